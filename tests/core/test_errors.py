"""The exception for what a user can put right."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from study.core.errors import Stop


def refuse(what: str) -> None:
    raise Stop(what, "correct it", "unavailable", "rank 3")


def test_a_stop_of_a_worker_process_arrives_as_it_was_raised():
    """And not as BrokenProcessPool, which a worker's exception becomes that cannot be made again."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.raises(Stop) as caught:
            pool.submit(refuse, "this cannot be").result()
        assert pool.submit(len, "it goes on").result() == 10
    stop = caught.value
    told = (stop.what, stop.remedy, stop.status, stop.where)
    assert told == ("this cannot be", "correct it", "unavailable", "rank 3")
    assert stop.sentence == "this cannot be. What to do: correct it."
    assert stop.__notes__ == ["What to do: correct it"]
