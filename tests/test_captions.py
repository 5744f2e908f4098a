"""Sentences and figures: they tell of the same groups, and no sentence says what the rows do not."""

import pandas as pd
import pytest

from study.report import grouping, notebook
from study.report.topics import capacity, losses, memory, speed, traffic


def memory_rows(group: str, **bytes_of) -> pd.DataFrame:
    rows = [{"group": group, "line": line, "part": "weights", "bytes": size} for line, size in bytes_of.items()]
    return pd.DataFrame([row | {"source": source} for row in rows for source in ("measured", "predicted")])


def frontier_rows(group: str, **values) -> pd.DataFrame:
    """Of each line the seconds and the bytes; one number is both."""
    pairs = {line: value if isinstance(value, tuple) else (value, value) for line, value in values.items()}
    columns = ["group", "line", "median", "peak_bytes"]
    return pd.DataFrame([(group, line, *pair) for line, pair in pairs.items()], columns=columns)


@pytest.mark.parametrize(
    ("tell", "rows_of"), [(memory.sentence, memory_rows), (speed.sentence_of_frontier, frontier_rows)]
)
def test_sentences_tell_of_the_groups_that_are_drawn(tell, rows_of, tmp_path, monkeypatch):
    small, middle, large = rows_of("G1", a=1e6), rows_of("G2", a=1e6, b=2e6), rows_of("G3", a=1e6, b=2e6, c=3e6)
    rows, drawn, said = pd.concat([small, middle, large]), [], []
    monkeypatch.setattr(notebook, "say", said.append)
    book = notebook.Book("name", str(tmp_path))
    monkeypatch.setattr(book, "figure", lambda draw, rows, *_: drawn.append(rows["group"].iloc[0]))
    book.figures(None, rows, "name", most=2)
    assert drawn == ["G3", "G2"]
    assert [name for name in ("G1", "G2", "G3") if f"In {name}, " in tell(rows)] == ["G2", "G3"]
    assert "In G2, " not in tell(rows, most=1)
    assert said == ["Drawn: the 2 groups of runs with the most arms, of 3."]


def test_one_line_is_not_both_least_and_most():
    text = memory.sentence(memory_rows("G", single=41.04e6))
    assert "single holds 41 MB at the peak" in text
    assert "least" not in text
    assert "a and b hold 1 MB at the peak" in memory.sentence(memory_rows("G", a=1e6, b=1e6))
    assert "a has the lowest peak (1 MB), b the highest (2 MB)" in memory.sentence(memory_rows("G", b=2e6, a=1e6))


def test_one_point_is_neither_fastest_nor_smallest():
    text = speed.sentence_of_frontier(frontier_rows("G", single=(0.1, 1e6)))
    assert text == "In G, only single has timings: 0.1 s per step, 1 MB."
    text = speed.sentence_of_frontier(frontier_rows("G", a=(0.1, 2e6), b=(0.2, 1e6)))
    assert text == "In G, a is the fastest (0.1 s per step); b holds 50% less and takes 2 times as long."


def test_bytes_moved_are_told_in_the_order_of_arms_and_by_the_passes_of_a_step():
    rows = [
        {"group": group, "passes": passes, "line": arm, "arm": arm, "source": source, "times": times}
        for group, passes, factor in (("a", 1, 1), ("b", 1, 0.5), ("c", 4, 3), ("d", 16, 11))
        for arm in ("zero3", "zero2", "ddp", "zero1")
        for source, times in (("counted", 1.5 * factor if arm == "zero2" else 1.0), ("ZeRO paper", 1.0))
    ]
    lines = traffic.sentence(pd.DataFrame(rows)).splitlines()[2:]
    assert [line.split(":")[0] for line in lines] == ["- ddp", "- zero1", "- zero2", "- zero3"]
    assert lines[0] == "- ddp: **1** (1, 4 and 16 passes); ZeRO paper 1"
    assert lines[2] == "- zero2: **0.75** to **1.5** (1 pass); **4.5** (4 passes); **16.5** (16 passes); ZeRO paper 1"


def test_what_never_survived_or_never_failed_is_no_dash():
    row = {"group": "G", "arm": "single", "what": "micro_batch", "largest": 8, "failed": 16}
    rows = [row, row | {"failed": None}, row | {"largest": None}]
    largest = "- G, single: the largest that fits is 8 rows per pass"
    both, alive, dead = capacity.sentence(pd.DataFrame(rows)).splitlines()
    assert both == f"{largest}, and the smallest that runs out of memory is 16 rows per pass"
    assert alive == largest
    assert dead.startswith("- G, single: nothing that was tried fits, and")


def test_why_no_losses_are_compared():
    rows = pd.DataFrame([{"group": "G", "line": "ddp", "largest_difference": None, "seeds_differ_by": None}])
    assert "no two arms here have runs with the same seed" in losses.sentence(rows)
    assert losses.sentence(pd.DataFrame()) == ""


def test_the_groups_that_are_shown_have_most_arms_that_really_ran():
    """Not those with most lines: an arm on two numbers of ranks, or beside its emulated twin, has two."""

    def rows(group: str, kind: str, *arms: str) -> list[dict]:
        return [
            {"group": group, "line": f"{arm}, {ranks} ranks", "arm": arm, "kind": kind}
            for arm in arms
            for ranks in (2, 4)
        ]

    real, emulated = (
        rows("real", "real", "ddp", "zero1"),
        rows("emulated", "emulated", "ddp", "zero1", "zero2", "zero3"),
    )
    both = grouping.largest_groups(pd.DataFrame([*emulated, *real]), 2)
    assert [mine["group"].iloc[0] for mine in both] == ["real", "emulated"]


def test_losses_of_other_optimizers_do_not_hide_those_of_adamw():
    about = {"line": "zero1", "against": "ddp", "seeds_differ_by": None}
    groups = {"imdb, fp32, optimizer adafactor": 0.012, "imdb, fp32, optimizer adamw": 4e-7, "imdb, bf16": 0.001}
    rows = [about | {"group": group, "largest_difference": most} for group, most in groups.items()]
    text = losses.sentence(pd.DataFrame(rows))
    furthest = "furthest: zero1 against ddp in imdb, fp32, optimizer adafactor"
    assert f"within 0.01 nats of the baseline's** (3 comparisons; {furthest})" in text
    assert "In fp32 with AdamW, the largest difference is 4e-7 nats." in text


def test_an_error_is_not_0_percent():
    rows = pd.concat([memory_rows("G", a=1e6), memory_rows("H", b=1e6)])
    rows.loc[rows["source"] == "predicted", "bytes"] *= 1.00001
    assert "The error of the formulas is less than 0.1% in the median over 2 peaks" in memory.sentence(rows)
