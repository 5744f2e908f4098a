"""Sentences and figures: they tell of the same groups, and no sentence says what the rows do not."""

import pytest

from study.report import captions, notebook


def memory_rows(group: str, **bytes_of) -> list[dict]:
    rows = [{"group": group, "line": line, "part": "weights", "bytes": size} for line, size in bytes_of.items()]
    return [row | {"source": source} for row in rows for source in ("measured", "predicted")]


def frontier_rows(group: str, **values) -> list[dict]:
    """Of each line the seconds and the bytes; one number is both."""
    pairs = {line: value if isinstance(value, tuple) else (value, value) for line, value in values.items()}
    return [{"group": group, "line": line, "median": pair[0], "peak bytes": pair[1]} for line, pair in pairs.items()]


@pytest.mark.parametrize(("tell", "rows_of"), [(captions.memory, memory_rows), (captions.frontier, frontier_rows)])
def test_sentences_tell_of_the_groups_that_are_drawn(tell, rows_of, tmp_path, monkeypatch):
    small, middle, large = rows_of("G1", a=1e6), rows_of("G2", a=1e6, b=2e6), rows_of("G3", a=1e6, b=2e6, c=3e6)
    rows, drawn, said = [*small, *middle, *large], [], []
    monkeypatch.setattr(notebook, "say", said.append)
    book = notebook.Book("name", str(tmp_path))
    monkeypatch.setattr(book, "figure", lambda draw, rows, *_: drawn.append(rows[0]["group"]))
    book.figures(None, rows, "name", most=2)
    assert drawn == ["G3", "G2"]
    assert [name for name in ("G1", "G2", "G3") if f"In {name} " in tell(rows)] == ["G2", "G3"]
    assert "In G2 " not in tell(rows, most=1)
    assert said == ["Drawn: 2 of 3 groups of runs, those with most arms."]


def test_one_line_is_not_both_least_and_most():
    text = captions.memory(memory_rows("G", single=41.04e6))
    assert "single holds 41 MB at the peak" in text
    assert "least" not in text
    assert "a and b hold 1 MB at the peak" in captions.memory(memory_rows("G", a=1e6, b=1e6))
    assert "a holds least at its peak (1 MB) and b most (2 MB)" in captions.memory(memory_rows("G", b=2e6, a=1e6))


def test_one_point_is_neither_fastest_nor_smallest():
    text = captions.frontier(frontier_rows("G", single=(0.1, 1e6)))
    assert text == "In G there is only single: 0.1 s a step, 1 MB."
    text = captions.frontier(frontier_rows("G", a=(0.1, 2e6), b=(0.2, 1e6)))
    assert text == "In G a is the fastest (0.1 s a step); b holds 50% less and takes 2 times as long."


def test_bytes_moved_are_told_in_the_order_of_arms_and_a_range_with_its_ends():
    rows = [
        {"group": group, "line": arm, "arm": arm, "source": source, "times": times}
        for group, factor in (("one pass", 1), ("16 passes", 11))
        for arm in ("zero3", "zero2", "ddp", "zero1")
        for source, times in (("counted", 1.5 * factor if arm == "zero2" else 1.0), ("ZeRO paper", 1.0))
    ]
    lines = captions.traffic(rows).splitlines()[2:]
    assert [line.split(":")[0] for line in lines] == ["- ddp", "- zero1", "- zero2", "- zero3"]
    assert lines[0] == "- ddp: counted **1**; ZeRO paper 1"
    assert "**1.5** (least: one pass, zero2) to **16.5** (most: 16 passes, zero2)" in lines[2]


def test_what_never_survived_or_never_failed_is_no_dash():
    row = {"group": "G", "arm": "single", "what": "micro_batch", "largest": 8, "failed": 16}
    largest = "- G, single: the largest that survives is 8 rows per pass"
    assert captions.capacity([row]) == f"{largest}, and the smallest that does not is 16 rows per pass"
    assert captions.capacity([row | {"failed": None}]) == largest
    assert captions.capacity([row | {"largest": None}]).startswith("- G, single: nothing that was tried survives, and")


def test_why_no_losses_are_compared():
    rows = [{"group": "G", "line": "ddp", "largest difference": None, "seeds differ by": None}]
    assert "no two arms here have runs with the same seed" in captions.losses(rows)
    assert captions.losses([]) == ""


def test_published_numbers_are_told_over_all_and_where_nothing_was_fitted():
    errors = {
        "rows": 12,
        "median": "-1.0%",
        "off by": "4.0%",
        "worst": "+30%",
        "within 10 %": "90%",
        "within 30 %": "99%",
        "in interval": None,
    }
    names = (("a lab", "memory"), ("all of role fit", "time"), ("all of role test", "time"), ("all", "memory"))
    text = captions.outside([{"source": name, "quantity": quantity} | errors for name, quantity in names])
    first, second = text.splitlines()
    assert first.startswith("- **Time**, over rows that decided nothing of it: 4.0% off in the median of 12 published")
    assert second.startswith("- **Memory**, over all sources: 4.0% off")
