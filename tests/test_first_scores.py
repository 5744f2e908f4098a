"""Tests of the first scores of frozen rows."""

import csv
import tomllib

import pytest

from study.bench import first_scores
from study.errors import Stop
from study.predictor.outside.published import FOLDER
from study.report.outside import accuracy

HEADER = "split,source,quantity,measured,predicted,low,high\n"


@pytest.fixture
def scores(tmp_path, monkeypatch):
    """Return the function that replaces the file of first scores."""
    monkeypatch.setattr(first_scores, "FILE", tmp_path / "first_scores.csv")
    return lambda *lines: first_scores.FILE.write_text(HEADER + "".join(f"{line}\n" for line in lines))


def test_only_the_newest_set_counts_and_a_refused_row_has_no_error(scores):
    scores(
        "lora_2,old,time,1.0,9.0,8.0,10.0",
        "lora_3,one,time,1.0,1.2,1.1,1.3",
        "lora_3,one,time,1.0,0.6,0.5,1.1",
        "lora_3,four,time,1.0,1.1,0.9,1.3",
        "sharded_3,two,time,2.0,,,",
        "sharded_3,two,time,,,,",
        "sharded_3,two,memory,8e9,8.4e9,,",
    )
    time = first_scores.latest("time")
    assert time.median_error == pytest.approx(0.2)
    assert (time.rows, time.refused, time.near) == (5, 0.4, pytest.approx(2 / 3))
    assert time.inside == 0.75, "half of the rows of one, all of another: each source weighs the same"


def test_the_committed_accuracy_is_that_of_the_first_scores():
    words = accuracy()
    assert "half of 563 predicted step times were within 28% of the measured one, and 60% within a third" in words
    assert "half of 400 memory peaks were within 6.4%, but 35% were more than 10% too low" in words


def test_a_split_is_scored_once(scores):
    scores("lora_2,old,time,1.0,9.0,8.0,10.0")
    with pytest.raises(Stop, match="lora_2 was scored before"):
        first_scores.add(["lora_2"])


def test_each_row_of_a_scored_split_has_its_score():
    with (FOLDER / "frozen.csv").open(newline="") as file:
        published = [
            (line["split"], line["source"], name)
            for line in csv.DictReader(file)
            for name, texts in {
                "memory": [line["memory_GB"]],
                "time": [line["step_time_s"], line["tokens_per_s_per_gpu"]],
            }.items()
            if any(texts)
        ]
    kept = [each[:3] for each in first_scores.read()]
    scored = {split for split, _, _ in kept}
    assert sorted(kept) == sorted(each for each in published if each[0] in scored)
    waiting = {
        each["name"] for each in tomllib.loads((FOLDER / "splits.toml").read_text())["split"] if "on_board" in each
    }
    assert not scored & waiting, "a split that was scored is on the board"
