"""Runs read from folders: once, whatever is broken; grouped by equal cells, and told apart by machine."""

from itertools import product

import pytest

from study.core.arms import ROOT
from study.records.groups import groups, labels, lines
from study.records.runs import load
from study.report.topics import documents, losses, memory, traffic
from tests.shaped import failed, finished, put, rows

ARMS = ("ddp", "zero2")


@pytest.fixture
def of(tmp_path_factory):
    """A function that writes records into a new folder and loads them."""
    return lambda *records: load(put(tmp_path_factory.mktemp("runs"), *records))


def test_what_cannot_be_read_is_named_and_the_rest_is_there(tmp_path):
    put(tmp_path, finished("good"), finished("alien", schema=99), finished("half", status="running"))
    put(tmp_path, finished("none", observed__parameters=0), failed("oom"), failed("silent") | {"error": None})
    for name, file, text in (("torn", "record.json", '{"schema": 1, "sta'), ("bare", "steps.jsonl", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    loaded = load(tmp_path)
    assert [run.record.run_id for run in loaded] == ["good", "half", "oom"]
    assert [run.record.run_id for run in loaded.done] == ["good"]
    assert [run.record.run_id for run in loaded.counting] == ["good", "oom"], "out of memory is an answer, not a gap"
    problems = {
        "alien": "schema must be",
        "bare": "record.json' cannot be read",
        "half": "half is half-written",
        "none": "parameters must be greater than 0 (got 0)",
        "silent": "'error' is empty",
        "torn": "Unterminated string",
    }
    in_order = sorted(loaded.set_aside, key=lambda sentence: sentence.lstrip("'"))
    for sentence, (name, words) in zip(in_order, problems.items(), strict=True):
        assert f"/{name}" in sentence
        assert words in sentence


def test_nothing_is_no_error(tmp_path):
    for folders in (tmp_path, tmp_path / "none", ""):
        assert list(load(folders)) == []
    assert load(tmp_path / "none").set_aside == (f"{tmp_path / 'none'} is not a folder",)
    for table in (losses.table, memory.table, traffic.table, documents.script):
        assert table(load(tmp_path)).empty, table


def test_folders_are_a_list_or_a_text_and_a_copy_counts_once(tmp_path):
    put(tmp_path / "a", finished("one"))
    put(tmp_path / "b", finished("two"), finished("one") | {"run_id": "renamed"})
    for folders in (tmp_path, [tmp_path / "a", tmp_path / "b"], f"{tmp_path / 'a'}, {tmp_path / 'b'}"):
        loaded = load(folders)
        assert (sorted(run.record.run_id for run in loaded), loaded.copies) == (["one", "two"], 1)


def test_runs_of_two_machines_and_of_other_ranks_are_never_pooled(of):
    """In no table of losses, and with the letters that `compare` gives."""
    cells = product((2, 64), ARMS, (2, 8), (1, 2, 3))
    loaded = of(
        *(
            finished(f"{cores}-{arm}-{ranks}-{seed}", arm, ranks, seed, gpu=True, hardware__cores=cores)
            for cores, arm, ranks, seed in cells
        )
    )
    table = rows(losses.parity(losses.table(loaded)))
    words = {word for row in table for word in row["group"].split(", ") if word.startswith("environment")}
    assert words == {f"environment {letter}" for letter in "ABCD"}
    assert all("environment" in row["group"] for row in table)
    assert {row["n"] for row in table} == {3}
    assert not any("environment" in group for group in memory.table(loaded)["group"]), "bytes are the same everywhere"


def test_another_version_of_the_meters_is_not_pooled_with_this_one(of):
    loaded = of(finished("new"), finished("old", measure_version=1))
    assert memory.table(loaded)["group"].nunique() == 2


def test_a_group_is_named_by_what_tells_it_apart():
    base = {"task": "imdb", "model": "bert-tiny", "precision": "fp32", "micro_batch": 8, "lr": 1e-3}
    name = "imdb, bert-tiny, fp32"
    for other, ends in [
        ({"lr": 5e-5, "micro_batch": 4}, (", micro-batch 8", ", micro-batch 4")),
        ({"lr": 5e-5}, (", lr 0.001", ", lr 5e-05")),  # where nothing else tells them apart
        ({"save": True}, ("", ", save")),
        ({"save": False}, (" (1)", " (2)")),
    ]:
        assert labels([base, base | other]) == [name + end for end in ends]


def test_a_line_is_an_arm_and_more_where_that_is_not_enough(of):
    group = [finished("a", "zero2", 2), finished("b", "zero2", 4), finished("c", "ddp", 2)]
    loaded = of(*group, finished("d", "zero3", 64, virtual=True))
    assert set(lines(list(loaded.runs))) == {"ddp", "zero2, 2 ranks", "zero2, 4 ranks", "zero3 (virtual)"}
    assert len(groups(loaded.done)) == 2, "virtual ranks were asked for"


def test_an_accumulation_is_named_unless_it_is_one():
    base = {"task": "imdb", "model": "bert-tiny", "precision": "fp32"}
    name = "imdb, bert-tiny, fp32"
    assert labels([base | {"accumulation": 2}]) == [f"{name}, accumulation 2"]
    assert labels([base | {"accumulation": 1}]) == labels([base]) == [name]
    cells = [base | {"accumulation": 2, "micro_batch": number} for number in (1, 2)]
    assert labels(cells) == [f"{name}, micro-batch {number}, accumulation 2" for number in (1, 2)]
    for group, members in groups(load(ROOT / "reports/cpu-2core/runs").done).items():
        (passes,) = {run.record.requested.accumulation or 1 for run in members}
        assert passes == 1 or f", accumulation {passes}" in group, group


def test_first_and_last_losses_are_of_a_seed_that_all_lines_have(of):
    """Whichever came first. A line without it shows its own seed."""
    order = [("ddp", 1), ("ddp", 2), ("zero2", 3), ("zero2", 2), ("zero3", 2), ("zero1", 5)]
    runs = [finished(f"{arm}-{seed}", arm, 2, seed, loss=2 + seed) for arm, seed in order]
    runs = [run | {"started_utc": f"2026-01-02T03:04:0{turn}+00:00"} for turn, run in enumerate(runs)]
    table = {row["line"]: row for row in rows(losses.parity(losses.table(of(*runs))))}
    assert {line: row["seed"] for line, row in table.items()} == {"ddp": 2, "zero1": 5, "zero2": 2, "zero3": 2}
    for row in table.values():
        assert (row["first_loss"], row["last_loss"]) == (7 + row["seed"] / 1000, 2 + row["seed"])
    assert table["zero2"]["n"] == 2


def test_losses_are_held_against_the_same_seed_and_rows(of):
    runs = [
        finished(f"{arm}-{seed}", arm, 2, seed, loss=2 + seed / 10 + (arm == "zero2") / 1000)
        for arm, seed in product(ARMS, (1, 2))
    ]
    loaded = of(*runs, finished("alone", "single", 1), finished("odd", "zero3", 2, seed=7))
    table = {row["line"]: row for row in rows(losses.parity(losses.table(loaded)))}
    assert table["zero2"]["largest_difference"] == pytest.approx(0.0015)
    assert table["ddp"]["largest_difference"] is None
    assert table["single"]["against"] is None, "it takes half as many rows in a step"
    assert table["zero3"]["against"] is None, "nobody has its seed"
    other = {row["line"]: row for row in rows(losses.parity(losses.table(loaded, "zero2")))}
    assert other["ddp"]["against"] == "zero2"
    assert losses.table(loaded, tasks=["imdb"]).empty
