"""`study compare --arms`, with which `make study` ends: what it says is what the records hold."""

import pytest
from shaped import changed, failed, finished, put
from test_cli import in_this_process

from study.core.arms import NAMES, ROOT
from study.core.text import nats
from study.records import runs as records
from study.report.topics.arms import by_task

SMOKE = ROOT / "reports" / "cpu-2core" / "runs" / "smoke"
ANSWERS = {"Memory": "peak bytes", "Time": "s/step", "Traffic": "sent bytes"}


def test_each_task_has_a_table_in_the_order_of_arms_and_answers_with_its_numbers():
    compared = [each for each in by_task(records.load(SMOKE)) if len(each["rows"]) > 5]
    assert {each["group"].split(",")[0] for each in compared} == {"imdb", "wikitext"}
    for each in compared:
        of_arm = {row["arm"]: row for row in each["rows"]}
        assert [*of_arm] == sorted(of_arm, key=NAMES.index)
        lines = {line.partition(":")[0]: line for line in each["in_words"]}
        for answer, name in ANSWERS.items():
            over = [of_arm[f"zero{stage}"][name] / of_arm["ddp"][name] for stage in (1, 2, 3)]
            assert "stage 1 {:.2g}, stage 2 {:.2g}, stage 3 {:.2g}".format(*over) in lines[answer]
        furthest = max(row["furthest nats"] for row in each["rows"] if row["furthest nats"] is not None)
        assert f"{nats(furthest)} of ddp" in lines["Losses"]
        assert "buckets outweigh" in lines["Memory"], "or a reader thinks that ZeRO always costs memory"
        assert over[0] == pytest.approx(1.5, rel=0.01), "what stage 1 sends on rings, as the report has it"


def test_runs_without_ddp_have_no_ratios_and_what_could_not_run_is_named(tmp_path):
    put(tmp_path, finished("a", "zero1"), finished("b", "zero2", seed=7), failed("c", arm="zero3", seed=42))
    (group,) = by_task(records.load(tmp_path))
    assert [row["furthest nats"] for row in group["rows"]] == [None, None, None], "another seed, and a run that failed"
    (line,) = group["in_words"]
    assert line.startswith("zero3 did not run: ")


def test_runs_that_draw_their_weights_in_place_are_not_compared(tmp_path):
    """The command said "at no step is an arm further than 1 nats", where the report's figure compared nothing."""
    put(tmp_path, finished("a", "ddp"), finished("b", "zero3", loss=3.0, requested__init="in_place"))
    put(tmp_path, finished("c", "zero2", loss=2.5))
    (group,) = by_task(records.load(tmp_path))
    furthest = {row["arm"]: row["furthest nats"] for row in group["rows"]}
    assert furthest == {"ddp": None, "zero2": pytest.approx(0.625), "zero3": None}


def test_as_typed_it_is_no_wider_than_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    in_this_process(monkeypatch, f"compare --arms {SMOKE}")
    text = capsys.readouterr().out
    assert text.index("Losses: ") < text.index("last loss"), "the answer comes before the table"
    assert max(map(len, text.splitlines())) <= 100
    put(tmp_path, finished("a", "ddp"), changed(finished("malformed"), memory__components=[3]))
    assert in_this_process(monkeypatch, f"compare --arms {tmp_path}") == 2
    said = capsys.readouterr()
    assert "no task has runs of two arms" in said.err
    assert "malformed" in said.out, "it was set aside"
