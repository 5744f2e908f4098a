"""The published script as printed and repaired: what starts DeepSpeed, and where the second training begins."""

import pytest

from study.records import store
from study.records.schema import Record
from tests.conftest import launch

pytestmark = pytest.mark.slow  # as all reproductions that launch a training

SCRIPT = "reproductions/as_printed.py"
FLAGS = ("--train-rows", "400", "--eval-rows", "8")
INITIAL = "the initial weights"


@pytest.fixture(scope="module")
def sessions(tmp_path_factory, cache) -> dict[str, Record]:
    """The script in each of its three states, by repair: as published, its gain takes 50 steps to see."""
    records = {}
    short = ("--sequence", "32", "--steps", "10")
    for repair, size in {"none": ("--sequence", "64"), "fresh_model": short, "engaged": short}.items():
        folder = tmp_path_factory.mktemp("script") / repair
        run = launch("single", folder, *FLAGS, *size, "--repair", repair, cache=cache, script=SCRIPT)
        assert run.code == 0, run.output
        records[repair] = store.load(folder)
        assert records[repair].status == "done"
        assert list(folder.glob("results*")) == [], "its checkpoints are not kept"
    return records


def column(record: Record, name: str) -> list:
    return [getattr(training, name) for training in record.observed.runs]


def test_deepspeed_is_engaged_only_when_it_is_given_in_time(sessions):
    calls = {repair: column(record, "deepspeed_initialize_calls") for repair, record in sessions.items()}
    assert calls == {"none": [0, 0, 0], "fresh_model": [0, 0, 0], "engaged": [0, 1, 1]}


def test_the_published_second_training_goes_on_where_the_first_ended(sessions):
    """From the same weights the two are the same, with DeepSpeed as well, and the gain is gone."""
    starts = {repair: column(record, "weights_from") for repair, record in sessions.items()}
    published = [INITIAL, "the end of training 1", "the end of training 2"]
    assert starts == {"none": published, "fresh_model": [INITIAL] * 3, "engaged": [INITIAL] * 3}
    first, second, _ = column(sessions["none"], "losses")
    assert second[0] < first[0] - 0.05
    first, second, _ = column(sessions["fresh_model"], "losses")
    assert second == first
    first, second, _ = column(sessions["engaged"], "losses")
    assert second == pytest.approx(first, abs=2e-3)
    assert second[0] > column(sessions["none"], "losses")[1][0] + 0.05
