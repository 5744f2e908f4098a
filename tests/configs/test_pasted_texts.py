"""The tables of pasted texts and their files belong to each other. What a reader says of them is held elsewhere."""

import pytest

from tests.conftest import ROOT, table

PASTED = ROOT / "tests/configs/pasted"


@pytest.mark.parametrize(
    ("name", "key", "count"), [("threads", "thread", 30), ("threads2", "thread", 30), ("healthy", "log", 40)]
)
def test_each_row_has_its_text(name, key, count):
    rows = table(f"configs/pasted/{name}.toml")[key]
    files = {path.stem: path.read_text() for path in (PASTED / name).iterdir()}
    assert len(rows) == len(files) >= count
    assert {row["name"] for row in rows} == files.keys()
    assert all(0 < len(text.split("\n")) <= 202 for text in files.values())
    assert all(row["address"].startswith("https://") for row in rows if row.get("origin") not in ("run", "composed"))


def test_no_thread_is_asked_twice():
    rows = [row for name in ("threads", "threads2") for row in table(f"configs/pasted/{name}.toml")["thread"]]
    assert len({row["address"] for row in rows}) == len({row["name"] for row in rows}) == 60
    assert all(row["date"][:4] in ("2024", "2025", "2026") and row["answer"] for row in rows)
