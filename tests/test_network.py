"""Slow links: the fit of a link, the table of the network protocol, and what it says of made-up runs."""

import itertools
from types import SimpleNamespace

import pandas as pd
import pytest
import shaped
from shaped import changed, finished, put

from study.bench.prediction import predicted
from study.ledger.choosing import choose
from study.records import runs
from study.records.evidence import Evidence
from study.records.metrics import gloo_wire_bytes
from study.records.schema import Collective
from study.report.topics import network

FREE_S, OVERHEAD = 0.2, 1.06  # of the made-up runs


def over_links(arm: str, mbit: float | None, hosts: int = 2, ranks: int = 2, overhead: float = OVERHEAD) -> dict:
    """A made-up run over emulated hosts, as slow as theory's bytes make it."""
    name, wire_bytes = f"net-{arm}-{mbit}-{hosts}-{ranks}", wire_of(arm, ranks)
    step = FREE_S + (overhead * wire_bytes * 8e-6 / mbit if mbit else 0.0)
    link = {"sent_bytes": int(7 * 1.04 * wire_bytes), "sent_packets": 99, "received_bytes": 0, "dropped_packets": 0}
    seen = {"hosts": hosts, "interfaces": ["zshost0"] * hosts, "bandwidth_mbit": mbit}
    changes = {"requested__hosts": hosts, "requested__bandwidth_mbit": mbit or "unlimited"}
    changes |= {"traffic__per_link": [link] * hosts, "traffic__link_steps": 7}
    return changed(finished(name, arm, ranks, precision="fp32", step=step), observed__network=seen, **changes)


def wire_of(arm: str, ranks: int) -> float:
    sent = predicted(shaped.run(finished("x", arm, ranks, precision="fp32")).record).traffic
    moved = {kind: Collective(calls=1, bytes=size, bytes_by_dtype={}) for kind, size in sent.items()}
    return gloo_wire_bytes(moved, ranks)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    cells = itertools.product(("ddp", "zero2", "zero3"), (None, 50.0, 200.0))
    records = [over_links(arm, mbit) for arm, mbit in cells] + [over_links("ddp", mbit, 4, 4) for mbit in (None, 200.0)]
    records += [over_links(arm, mbit, 2, 4) for arm in ("ddp", "zero2") for mbit in (None, 200.0)]
    records.append(finished("elsewhere", "ddp", precision="fp32"))
    return shaped.rows(network.table(runs.load(put(tmp_path_factory.mktemp("runs"), *records))))


def test_a_link_is_fitted_by_what_it_reduces_and_what_it_gathers():
    truth = network.SlowLink(1.01, 1.57)
    cells = [(*sizes, mbit, truth.added_s(*sizes, mbit)) for *sizes, mbit in CELLS]
    fitted = network.fit(cells)
    assert (fitted.reduced, fitted.gathered) == pytest.approx((1.01, 1.57))
    assert network.data_s(12.5e6, 100) == 1.0


CELLS = ((17e6, 0, 200), (17e6, 9e6, 200), (17e6, 17e6, 200), (5e6, 1e6, 50))


def test_each_cell_is_a_row_and_other_networks_are_left_out(rows):
    assert len(rows) == 15
    assert {row["kind"] for row in rows} == {"emulated"}
    assert {row["held_out"] for row in rows if row["mbit"] is None} == {None}
    assert [row["arm"] for row in rows if row["held_out"] is False] == ["ddp", "zero2", "zero3", "ddp", "zero2"]


def test_held_out_cells_are_predicted_from_theorys_bytes(rows):
    """The made-up runs are as slow as the model says, so nothing may be left but the noise of their seconds."""
    held_out = [row for row in rows if row["held_out"]]
    assert {(row["arm"], row["hosts"], row["mbit"]) for row in held_out} == {
        *((arm, 2, 50.0) for arm in ("ddp", "zero2", "zero3")),
        ("ddp", 4, 200.0),
    }
    assert all(abs(row["error"]) < 0.02 for row in held_out)
    assert all(row["median"] > 2 * row["unlimited_s"] for row in held_out), "else the links would decide nothing"
    text = network.sentence(pd.DataFrame(rows))
    assert text.startswith("**Over 4 held-out cells, the median error of the prediction is 0.")
    assert "- 2 ranks, passes: 1, 50 Mbit/s: zero2 1." in text


def test_runs_over_an_emulated_network_decide_no_time_unless_a_check_asks_for_them():
    evidence = Evidence((shaped.run(over_links("zero2", 50.0)),))
    about, of_bytes = (SimpleNamespace(kind=kind, conditions={}) for kind in ("time", "bytes"))
    assert choose(evidence, about, {"arm": "zero2"}).runs == ()
    assert "a network between hosts that is emulated, 50.0 Mbit/s" in choose(evidence, about, {"arm": "zero2"}).differs
    asked = choose(evidence, about, {"arm": "zero2", "bandwidth_mbit": 50.0})
    assert len(asked.runs) == 1
    assert "a network between hosts that is emulated, 50.0 Mbit/s" in asked.differs, "it is said either way"
    assert len(choose(evidence, of_bytes, {"arm": "zero2"}).runs) == 1, "bytes are the same over any network"
