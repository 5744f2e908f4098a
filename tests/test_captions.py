"""Sentences and figures: they tell of the same groups, and no sentence says what the rows do not."""

import pandas as pd
import pytest

from study.report import grouping, notebook
from study.report.topics import memory, speed


def memory_rows(group: str, **bytes_of) -> pd.DataFrame:
    rows = [{"group": group, "line": line, "part": "weights", "bytes": size} for line, size in bytes_of.items()]
    both = [row | {"source": source, "panel": ""} for row in rows for source in ("measured", "predicted")]
    return pd.DataFrame(both)


def frontier_rows(group: str, **values) -> pd.DataFrame:
    """Of each line the seconds and the bytes; one number is both."""
    pairs = {line: value if isinstance(value, tuple) else (value, value) for line, value in values.items()}
    columns = ["group", "line", "median", "peak_bytes"]
    return pd.DataFrame([(group, line, *pair) for line, pair in pairs.items()], columns=columns)


@pytest.mark.parametrize(
    ("tell", "rows_of"), [(memory.sentence, memory_rows), (speed.sentence_of_frontier, frontier_rows)]
)
def test_sentences_tell_of_the_groups_that_are_drawn(tell, rows_of, tmp_path, monkeypatch):
    small, middle, large = rows_of("G1", a=1e6), rows_of("G2", a=1e6, b=2e6), rows_of("G3", a=1e6, b=2e6, ddp=3e6)
    rows, drawn, said = pd.concat([small, middle, large]), [], []
    monkeypatch.setattr(notebook, "say", said.append)
    book = notebook.Book("name", str(tmp_path))
    monkeypatch.setattr(book, "figure", lambda draw, rows, *_: drawn.append(rows["group"].iloc[0]))
    book.figures(None, rows, "name", most=2)
    assert drawn == ["G3", "G2"]
    assert [name for name in ("G1", "G2", "G3") if f"In {name}, " in tell(rows)] == ["G2", "G3"]
    assert "In G2, " not in tell(rows, most=1)
    assert said == ["Drawn: 2 of 3 groups of runs, those with the most arms."]


def test_the_groups_that_are_shown_have_most_arms_that_really_ran():
    """Not those with most lines: an arm on two numbers of ranks, or beside its emulated twin, has two."""
    rows = [
        {"group": kind, "line": f"{arm}, {ranks} ranks", "arm": arm, "kind": kind}
        for kind, arms in (("emulated", ("ddp", "zero1", "zero2", "zero3")), ("real", ("ddp", "zero1")))
        for arm in arms
        for ranks in (2, 4)
    ]
    both = grouping.largest_groups(pd.DataFrame(rows), 2)
    assert [mine["group"].iloc[0] for mine in both] == ["real", "emulated"]
