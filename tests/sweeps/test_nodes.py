"""Bytes inside a node and between nodes, computed by hand and read from records."""

import functools

import pytest
from conftest import ROOT
from wire import wire_bytes_per_rank

from study.core import gpus
from study.predict.architecture import named
from study.predict.estimate import estimate
from study.predict.setup import Setup
from study.records.schema import Record
from study.report.of_record import predicted

EVERYONE, PAIR, ACROSS = (0, 1, 2, 3), (0, 1), (0, 2)


@pytest.mark.parametrize(
    ("kind", "ranks", "between"),
    [
        ("all_gather", EVERYONE, {"all_gather": 100}),
        ("reduce_scatter", PAIR, {}),
        ("all_reduce", ACROSS, {"all_reduce": 100}),
    ],
)
def test_bytes_between_nodes_are_those_of_groups_over_several_nodes(kind, ranks, between):
    assert gpus.between_nodes({kind: {ranks: 100}}, 2) == between


def test_bytes_by_the_papers():
    """FSDP, stage 3: 2 M gathered, M scattered (P4). Hybrid sharding: an all-reduce of M/8 besides (P5)."""
    model = named("bert-large")
    sharded = {"all_gather": 2, "reduce_scatter": 1}
    expected = {"fsdp2": sharded, "zero3_textbook": sharded, "hsdp": sharded | {"all_reduce": 1 / 8}}
    for arm, times in expected.items():
        moved = estimate(Setup.of_arm(model, arm, ranks=16)).traffic
        assert {kind: size / 4 / model.parameters for kind, size in moved.items()} == pytest.approx(times, rel=0.02)


# --- the records of `study sweep nodes`, kept in the repository ------------------------------------------------------

KEPT = ROOT / "reports" / "cpu-2core" / "runs" / "nodes"
DIVIDED = ("hsdp", "zero3_hpz", "zero3_hpz_textbook")


@functools.cache
def kept(part: str, arm: str) -> Record:
    (path,) = KEPT.glob(f"{part}-{arm}-????????-*/record.json")
    return Record.model_validate_json(path.read_text())


@pytest.mark.parametrize("arm", DIVIDED)
def test_counted_bytes_are_the_predicted_ones_and_the_kernels(arm):
    record = kept("parity", arm)
    counted = {kind: count.bytes for kind, count in record.traffic.per_rank[0].items() if count.bytes > 100}
    assert counted == pytest.approx(predicted(record).traffic, rel=0.01)
    wires = zip(record.traffic.kernel_bytes_written, wire_bytes_per_rank(record), strict=True)
    assert all(kernel == pytest.approx(wire, rel=0.01) for kernel, wire in wires)
