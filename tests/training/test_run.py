"""A run in progress: its windows of steps, and the record that its ranks write together."""

import itertools
import types

from study.core.settings import TrainerFlags
from study.records import store
from study.records.sections import Loss
from study.training.run import windows
from tests.cases import for_each
from tests.conftest import ranks_of

# One of two ranks: the second finds a fault, and is slow to write it down while the first keeps what is known.
RANK = """
    import os, sys, time
    from pathlib import Path
    from accelerate import Accelerator
    from study.records import store
    from study.records.schema import Record
    from study.records.sections import Loss
    from study.core.errors import Stop
    from study.training.run import OpenRun

    folder = Path(sys.argv[1])
    accelerator = Accelerator(cpu=True)
    write = store.write

    def slowly(*args):
        time.sleep(0.6)
        write(*args)

    if not accelerator.is_main_process:
        store.write = slowly
    record = store.load(folder) if accelerator.is_main_process else Record(run_id="run", started_utc=store.now_utc())
    run = OpenRun(None, None, folder, record, None)
    run.accelerator = accelerator
    run.record.loss = Loss(train=[0.5])
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        time.sleep(0.3)  # the other one has read the record by now, and not yet written it
    run.keep()
    store.end_badly(folder, Stop("it went wrong", "fix it"), "Stop")
    accelerator.wait_for_everyone()
    os._exit(0)
"""


def test_what_was_kept_stays_when_another_rank_ends_badly(tmp_path):
    store.write(tmp_path, store.new("run", []))
    ranks = ranks_of(RANK, tmp_path, str(tmp_path))
    assert ranks.code == 0, ranks.output
    kept = store.load(tmp_path)
    assert (kept.status, kept.error.message, kept.loss) == ("failed", "it went wrong", Loss(train=[0.5]))


# --- windows -------------------------------------------------------------------------------------------------------


def a_run(steps: int, **settings):
    data = types.SimpleNamespace(train={"input_ids": range(70)}, train_rows=70)  # ten steps in an epoch
    heartbeat = types.SimpleNamespace(beat=lambda position: None)
    settings = TrainerFlags(**settings)
    return types.SimpleNamespace(settings=settings, data=data, rows_taken_per_step=7, steps=steps, heartbeat=heartbeat)


@for_each("warmup_steps", [1, 10, 13])
@for_each("log_every", [3, 10])
@for_each("eval_every", [None, 4, 10])
def test_windows_end_where_something_is_due(warmup_steps, log_every, eval_every):
    """The same as by a set of every edge."""
    run = a_run(30, warmup_steps=warmup_steps, log_every=log_every, eval_every=eval_every)
    cuts = {*range(0, 31, 10), *range(warmup_steps, 30, log_every), *range(0, 30, eval_every or 30)}
    by_cuts = [range(start, end) for start, end in itertools.pairwise(sorted(cuts))]
    assert [*windows(run, 0, warmup_steps), *windows(run, warmup_steps, 30)] == by_cuts
