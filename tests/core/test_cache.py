"""The cache: an entry is whole or not there, and one that may not be used is named with --cache-dir."""

import pytest
from safetensors import SafetensorError

from study.core import cache
from study.core.errors import Stop


def write(folder):
    (folder / "rows.bin").write_bytes(b"rows")
    (folder / "deep").mkdir()
    (folder / "deep" / "config.json").write_text("{}")


def no_need(folder):
    raise AssertionError("the entry was whole")


@pytest.fixture
def entry(tmp_path):
    return cache.entry(tmp_path / "cache" / "data" / "name", write)


def contents(folder) -> dict:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_entry_is_written_once(entry, tmp_path, capsys):
    assert contents(entry).keys() == {"rows.bin", "deep/config.json"}
    assert cache.entry(entry, no_need) == entry
    assert list(entry.parent.iterdir()) == [entry], "no scraps"


def test_of_two_that_write_at_once_the_first_stays(tmp_path):
    folder = tmp_path / "data" / "name"

    def slow(part):
        write(part)
        cache.entry(folder, write)
        (folder / "deep" / "mark").write_text("of the first")

    assert cache.entry(folder, slow) == folder
    assert (folder / "deep" / "mark").exists()
    assert list(folder.parent.iterdir()) == [folder]


# --- what may not be used ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (SafetensorError("I/O error: No space left"), "name (I/O error: No space left)"),
        (OSError(12, "Cannot allocate memory"), None),  # it has its own status
    ],
)
def test_a_cache_that_cannot_be_written_is_named(tmp_path, error, problem):
    def fail(folder):
        raise error

    with pytest.raises(Stop if problem else OSError) as caught:
        cache.entry(tmp_path / "name", fail)
    if problem:
        assert caught.value.what.startswith("the cache cannot be used: ")
        assert caught.value.what.endswith(problem)
        assert "--cache-dir" in caught.value.remedy


# --- answers -------------------------------------------------------------------------------------------------------


def test_an_answer_that_is_damaged_is_none(tmp_path):
    cache.keep(tmp_path / "looks", "name", {"layers": [1, 2.5, None]})
    (file,) = (tmp_path / "looks").iterdir()
    assert cache.answer(tmp_path / "looks", "name") == {"layers": [1, 2.5, None]}
    whole = file.read_text()
    for content in (whole[:-4], "", "[]", "[" * 100_000):
        file.write_text(content)
        assert cache.answer(tmp_path / "looks", "name") is None
    cache.keep(tmp_path / "looks", "name", 7)
    assert cache.answer(tmp_path / "looks", "name") == 7
    assert cache.answer(tmp_path / "none", "name") is None
