"""Runs read from folders: once, whatever is broken; grouped by equal cells, and told apart by machine."""

import shutil
from itertools import product

import pytest
from shaped import finished, put, rows

from study.core.errors import Stop
from study.records.groups import groups, labels, lines
from study.records.runs import load
from study.report.topics import documents, losses, memory, speed, traffic

ARMS = ("ddp", "zero2")


@pytest.fixture
def of(tmp_path_factory):
    """A function that writes records into a new folder and loads them."""
    return lambda *records: load(put(tmp_path_factory.mktemp("runs"), *records))


def test_what_cannot_be_read_is_named_and_the_rest_is_there(tmp_path):
    put(tmp_path, finished("good"), finished("alien", schema=99), finished("half", status="running"))
    put(tmp_path, finished("odd", traffic__per_rank=3), finished("none", observed__parameters=0))
    for name, text in (("torn", '{"schema": 1, "sta'), ("list", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(text)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "steps.jsonl").write_text("")
    loaded = load(tmp_path)
    assert [run.record.run_id for run in loaded] == ["good", "half"]
    assert loaded.done == [loaded.runs[0]]
    problems = {
        "alien": "schema must be",
        "bare": "record.json' cannot be read",
        "half": "half is half-written",
        "list": "must be a table",
        "none": "parameters must be greater than 0 (got 0)",
        "odd": "traffic.per_rank must be a list",
        "torn": "Invalid JSON",
    }
    in_order = sorted(loaded.set_aside, key=lambda sentence: sentence.lstrip("'"))
    for sentence, (name, words) in zip(in_order, problems.items(), strict=True):
        assert f"/{name}" in sentence
        assert words in sentence


def test_nothing_is_no_error(tmp_path):
    for folders in (tmp_path, tmp_path / "none", ""):
        assert list(load(folders)) == []
    assert load(tmp_path / "none").set_aside == (f"{tmp_path / 'none'} is not a folder",)
    tables = [topic.table for topic in (losses, memory, traffic)]
    tables += [speed.frontier, documents.script]
    for table in tables:
        assert table(load(tmp_path)).empty, table


def test_folders_are_a_list_or_a_text_and_a_copy_counts_once(tmp_path):
    put(tmp_path / "a", finished("one"))
    put(tmp_path / "b", finished("two"))
    shutil.copytree(tmp_path / "a" / "one", tmp_path / "b" / "one")
    put(tmp_path / "b", finished("one") | {"run_id": "renamed"})
    for folders in (tmp_path, [tmp_path / "a", tmp_path / "b"], f"{tmp_path / 'a'}, {tmp_path / 'b'}"):
        loaded = load(folders)
        assert (sorted(run.record.run_id for run in loaded), loaded.copies) == (["one", "two"], 2)


def test_runs_of_two_machines_are_never_pooled(of):
    """In no table of seconds or losses, and with the letters that `compare` gives."""
    cells = list(product((2, 64), ARMS, (1, 2, 3)))
    loaded = of(
        *(
            finished(f"{cores}-{arm}-{seed}", arm, 2, seed, gpu=True, hardware__cores=cores)
            for cores, arm, seed in cells
        )
    )
    for table in (rows(speed.frontier(loaded)), rows(losses.parity(losses.table(loaded)))):
        words = {word for row in table for word in row["group"].split(", ") if word.startswith("environment")}
        assert words == {"environment A", "environment B"}
        assert all("environment" in row["group"] for row in table)
        assert {row["n"] for row in table} == {3}
    (group,) = set(memory.table(loaded)["group"])
    assert "environment" not in group, "bytes are the same on any number of cores"


def test_the_zero_paper_s_formula_is_shown_for_what_the_paper_describes(of):
    """Adam under ZeRO, with all weights trained. FSDP2 had the bar of an arm that partitions nothing."""
    loaded = of(
        finished("zero", "zero3"),
        finished(
            "fsdp", "fsdp2", observed__fsdp={"units_resharded_after_forward": 3, "mesh": [[2]], "offloads": False}
        ),
        finished("sgd", "zero3", requested__optimizer="sgd"),
        finished("lora", "zero3", requested__lora_rank=4),
    )
    parts = rows(memory.table(loaded))
    assert len({(row["group"], row["line"]) for row in parts if row["source"] == "measured"}) == 4
    (shown,) = {(row["group"], row["line"]) for row in parts if row["source"].startswith("ZeRO paper")}
    assert shown[1] == "zero3"
    assert not {"sgd", "lora"} & set(shown[0].replace(",", "").split())


def test_another_version_of_the_meters_is_not_pooled_with_this_one(of):
    loaded = of(finished("new"), finished("old", measure_version=1))
    assert memory.table(loaded)["group"].nunique() == 2


def test_a_group_is_named_by_what_tells_it_apart():
    base = {"task": "imdb", "model": "bert-tiny", "precision": "fp32", "micro_batch": 8, "lr": 1e-3}
    assert labels([base]) == ["imdb, bert-tiny, fp32"]
    assert labels([base, base | {"micro_batch": 4}]) == [
        "imdb, bert-tiny, fp32, rows/pass 8",
        "imdb, bert-tiny, fp32, rows/pass 4",
    ]
    assert labels([base, base | {"lr": 5e-5, "micro_batch": 4}])[1] == "imdb, bert-tiny, fp32, rows/pass 4"
    assert labels([base, base | {"lr": 5e-5}])[1] == "imdb, bert-tiny, fp32, lr 5e-05", "where nothing else does"
    assert labels([base | {"save": True}, base]) == ["imdb, bert-tiny, fp32, save", "imdb, bert-tiny, fp32"]
    assert len(set(labels([base | {"seed_of_data": value} for value in (None, False)]))) == 2, "never twice the same"


def test_a_line_is_an_arm_and_more_where_that_is_not_enough(of):
    group = [finished("a", "zero2", 2), finished("b", "zero2", 4), finished("c", "ddp", 2)]
    loaded = of(*group, finished("d", "zero3", 64, virtual=True))
    assert set(lines(list(loaded.runs))) == {"ddp", "zero2, 2 ranks", "zero2, 4 ranks", "zero3 (virtual)"}
    assert len(groups(loaded.done)) == 2, "virtual ranks were asked for"


def test_losses_are_held_against_the_same_seed_and_rows(of):
    runs = [
        finished(f"{arm}-{seed}", arm, 2, seed, loss=2 + seed / 10 + (arm == "zero2") / 1000)
        for arm, seed in product(ARMS, (1, 2))
    ]
    loaded = of(*runs, finished("alone", "single", 1), finished("odd", "zero3", 2, seed=7))
    table = {row["line"]: row for row in rows(losses.parity(losses.table(loaded)))}
    assert table["zero2"]["largest_difference"] == pytest.approx(0.00125)
    assert table["ddp"]["largest_difference"] is None
    assert table["single"]["against"] is None, "it takes half as many rows in a step"
    assert table["zero3"]["against"] is None, "nobody has its seed"
    other = {row["line"]: row for row in rows(losses.parity(losses.table(loaded, "zero2")))}
    assert other["ddp"]["against"] == "zero2"
    assert losses.table(loaded, tasks=["imdb"]).empty


def test_an_interval_needs_three_runs():
    assert speed.middle([1.0, 2.0]) == {"median": 1.5, "low": None, "high": None, "n": 2}
    of_three = speed.middle([1.0, 2.0, 3.0])
    assert of_three["low"] < of_three["median"] == 2.0 < of_three["high"]


def test_a_field_that_no_run_has_is_refused(of):
    loaded = of(finished("one"))
    for name in ("memroy_cap_gib", "arn"):
        with pytest.raises(Stop, match=name):
            loaded.select(**{name: "zero2"})
    assert [run.record.run_id for run in loaded.select(arm="zero2", repair=None)] == ["one"]


def test_seconds_on_unlike_ranks_are_never_pooled(of):
    runs = [
        finished(f"{arm}-{model}-{ranks}", arm, ranks, model=model, step=ranks / 10, gpu=True)
        for arm, model, ranks in product(("ddp", "zero2", "zero3"), ("gpt-tiny", "gpt2"), (2, 8))
    ]
    loaded = of(*runs)
    speeds = rows(speed.frontier(loaded))
    assert {row["n"] for row in speeds} == {1}
    assert len({row["group"] for row in speeds}) == 4, "two models on 2 and on 8 ranks"
