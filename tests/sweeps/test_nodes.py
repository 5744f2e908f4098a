"""Bytes inside a node and between nodes, computed by hand and read from records."""

import pytest

from study.predict.architecture import named
from study.predict.estimate import estimate
from study.records import store
from study.report.of_record import predicted
from tests.conftest import ROOT
from tests.predict.trainings import training_of
from tests.wire import wire_bytes_per_rank


def test_bytes_by_the_papers():
    """FSDP, stage 3: 2 M gathered, M scattered (P4). Hybrid sharding: an all-reduce of M/8 besides (P5)."""
    model = named("bert-large")
    sharded = {"all_gather": 2, "reduce_scatter": 1}
    expected = {"fsdp2": sharded, "zero3_textbook": sharded, "hsdp": sharded | {"all_reduce": 1 / 8}}
    for arm, times in expected.items():
        moved = estimate(training_of(model, arm, ranks=16)).traffic
        assert {kind: size / 4 / model.parameters for kind, size in moved.items()} == pytest.approx(times, rel=0.02)


# --- the records of `study sweep nodes`, kept in the repository ------------------------------------------------------


@pytest.mark.parametrize("arm", ["hsdp", "zero3_hpz", "zero3_hpz_textbook"])
def test_counted_bytes_are_the_predicted_ones_and_the_kernels(arm):
    (folder,) = (ROOT / "reports/cpu-2core/runs/nodes").glob(f"parity-{arm}-????????-*")
    record = store.load(folder)
    counted = {kind: count.bytes for kind, count in record.traffic.per_rank[0].items() if count.bytes > 100}
    assert counted == pytest.approx(predicted(record).traffic, rel=0.01)
    assert record.traffic.kernel_bytes_written == pytest.approx(wire_bytes_per_rank(record), rel=0.01)
