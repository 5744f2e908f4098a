"""The difference of two peaks, on records made by hand: to the byte, and in sentences."""

import pytest

from study.core.errors import Stop
from study.records.explain import UNTRACKED, explain, peak, sentences, totals, unlike
from study.records.schema import Record

MB = 1_000_000
DDP = {"weights": 18 * MB, "gradients": 18 * MB, "moments": 35 * MB, "activations": 25 * MB, "other": MB}
ZERO2 = {"weights": 18 * MB, "moments": 18 * MB, "master": 9 * MB, "activations": 25 * MB, "other": MB}
ZERO2 |= {"buckets": 52 * MB, "temporaries": 3 * MB}


def run(arm: str, *ranks: dict[str, int], device: dict | None = None, homes: dict | None = None) -> Record:
    """A record of ranks that hold so many bytes at their peaks."""
    per_rank = [{"at_peak": held, "tracked_peak_bytes": sum(held.values())} for held in ranks]
    components = {"per_rank": per_rank, "optimizer_home": "none", "weights_home": "none"} | (homes or {})
    fields = {
        "run_id": arm,
        "started_utc": "2026-01-02T03:04:05+00:00",
        "requested": {"arm": arm, "task": "imdb", "model": "bert-tiny", "precision": "fp32", "micro_batch": 8},
        "observed": {"ranks": len(ranks), "parameters": 4_386_178, "device": "cuda" if device else "cpu"},
        "memory": {"per_rank": [device or {} for _ in ranks], "components": components},
    }
    return Record.model_validate(fields)


def tracked(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["kind"] != UNTRACKED]


@pytest.mark.parametrize(("a", "b"), [(DDP, ZERO2), (ZERO2, DDP), (DDP, DDP), (DDP, {"new_thing": 7})])
def test_the_components_sum_to_the_difference_of_the_peaks_and_the_largest_comes_first(a, b):
    rows = tracked(explain(run("ddp", a), run("zero2", b)))
    difference = sum(b.values()) - sum(a.values())
    for row in rows:
        assert row["difference_bytes"] == b.get(row["component"], 0) - a.get(row["component"], 0)
    total = totals(rows)
    assert (total["a_bytes"], total["b_bytes"]) == (sum(a.values()), sum(b.values()))
    assert total["difference_bytes"] == sum(row["difference_bytes"] for row in rows) == difference
    sizes = [abs(row["difference_bytes"]) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(row["share"] or 0 for row in rows) == pytest.approx(1 if difference else 0)
    kinds = {row["component"]: row["kind"] for row in rows}
    assert {kinds[name] for name in ("weights", "gradients", "master", "moments") if name in kinds} == {"model states"}


def test_the_rank_that_held_most_counts():
    uneven = run("ddp", {"weights": 5}, {"weights": 7, "moments": 1}, {"weights": 6})
    assert peak(uneven).components == {"weights": 7, "moments": 1}
    per_rank = uneven.memory.components.per_rank
    per_rank[1].tracked_peak_bytes = 20
    assert peak(uneven).components == {"weights": 6}, "ranks whose components sum to the peak come first"
    uneven.memory.components.per_rank = per_rank[1:2]
    assert peak(uneven).components == {"weights": 7, "moments": 1, "not told apart": 12}
    rows = tracked(explain(uneven, run("ddp", {"weights": 7})))
    assert sum(row["difference_bytes"] for row in rows) == 7 - 20


def test_from_what_is_tracked_to_what_the_device_says():
    a, b = (
        {"peak_allocated_bytes": allocated * MB, "peak_reserved_bytes": reserved * MB, "device_used_bytes": used * MB}
        for allocated, reserved, used in ((100, 130, 600), (140, 220, 691))
    )
    rows = explain(run("ddp", DDP, device=a), run("zero2", ZERO2, device=b))
    more = {row["component"]: row["difference_bytes"] for row in rows if row["kind"] == UNTRACKED}
    assert more["reserved and not in use"] == 50 * MB
    assert more["outside the allocator"] == MB
    assert sum(row["difference_bytes"] for row in rows) == 91 * MB, "all rows together give what the device reports"
    on_cpu = [row for row in explain(run("ddp", DDP), run("zero2", ZERO2)) if row["kind"] == UNTRACKED]
    assert len(on_cpu) == 3
    assert {row[name] for row in on_cpu for name in ("a_bytes", "b_bytes", "difference_bytes", "share")} == {None}


def test_one_memory_is_named_where_a_cpu_offloads_to_itself():
    """Buckets in place of states, on a small model and a large one; one arm twice; offloading on a CPU and on a GPU."""
    large = dict.fromkeys(("weights", "gradients", "moments"), 10_000 * MB)
    offloads = {"homes": {"optimizer_home": "cpu", "weights_home": "none"}}
    pairs = [
        (run("ddp", DDP), run("zero2", ZERO2)),
        (run("ddp", large), run("zero2", {"weights": 10_000 * MB, "buckets": 2_000 * MB})),
        (run("zero2", DDP), run("zero2", ZERO2)),
        (run("ddp", DDP), run("ddp", DDP)),
        (run("ddp", DDP), run("zero2_cpu", ZERO2, **offloads)),
        (run("ddp", DDP), run("zero2_cpu", ZERO2, device={"peak_allocated_bytes": 1}, **offloads)),
    ]
    texts = [sentences(*pair) for pair in pairs]
    assert [len(text) for text in texts[3:5]] == [1, 4]
    assert [any("one memory" in line for line in text) for text in texts] == [False] * 4 + [True, False]


def test_what_makes_runs_hard_to_compare_is_named():
    a, b = run("ddp", DDP), run("zero2", ZERO2, ZERO2)
    assert unlike(a, a) is None
    b.requested.micro_batch, b.requested.precision, b.observed.parameters, b.measure_version = 4, "bf16", 9, 1
    differences = ("precision fp32 and bf16", "micro batch 8 and 4", "ranks 1 and 2", "parameters 4386178 and 9")
    assert all(words in unlike(a, b) for words in (*differences, "measure version 3 and 1"))


@pytest.mark.parametrize("components", [{}, {"per_rank": [{"at_peak": None, "tracked_peak_bytes": 5}]}])
def test_a_record_without_components_is_a_stop(components):
    record = run("zero2", ZERO2).model_dump(by_alias=True)
    record["memory"]["components"] = components
    with pytest.raises(Stop, match="has no memory by component") as stop:
        explain(run("ddp", DDP), Record.model_validate(record))
    assert "--no-instruments" in stop.value.remedy
