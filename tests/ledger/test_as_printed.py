"""The published script as printed and repaired: what starts DeepSpeed, and where the second training begins."""

import pytest

from study.records import runs, store
from study.records.schema import Record
from tests.conftest import ROOT, launch

pytestmark = pytest.mark.slow  # as all reproductions that launch a training

SHORT = ("--train-rows", "400", "--eval-rows", "8", "--sequence", "32", "--steps", "10")


def told(record: Record) -> list[tuple]:
    """What a record says of each training, whatever its size."""
    return [
        (each.name, each.optimizer, each.weights_from, each.deepspeed_initialize_calls) for each in record.observed.runs
    ]


@pytest.mark.parametrize("repair", ["none", "engaged"])
def test_the_script_does_what_the_kept_records_say(repair, tmp_path, cache):
    script, folder = "reproductions/as_printed.py", tmp_path / "run"
    run = launch("single", folder, *SHORT, "--repair", repair, cache=cache, script=script)
    assert run.code == 0, run.output
    kept = runs.load(ROOT / "reports/cpu-2core/runs/as_printed").select(repair=repair).done
    assert {tuple(told(each.record)) for each in kept} == {tuple(told(store.load(folder)))}
    assert list(folder.glob("results*")) == [], "its checkpoints are not kept"
