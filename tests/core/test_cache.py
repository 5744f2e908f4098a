"""The cache: an entry is whole or not there, and one that may not be used is named with --cache-dir."""

import pytest
from safetensors import SafetensorError

from study.core import cache, digests
from study.core.errors import Stop


def write(folder):
    (folder / "rows.bin").write_bytes(b"rows")


def test_an_entry_is_written_once_by_the_first_of_two(tmp_path):
    folder = tmp_path / "data/name"
    first: list[int] = []

    def slow(part):
        write(part)
        first.append(cache.entry(folder, write).stat().st_ino)

    assert cache.entry(folder, slow) == folder
    assert cache.entry(folder, pytest.fail) == folder
    assert [folder.stat().st_ino] == first
    assert list(folder.parent.iterdir()) == [folder], "no scraps"


@pytest.mark.parametrize("file", ["rows.bin", digests.FILE])
def test_an_entry_that_is_damaged_or_of_an_older_release_is_made_again(file, tmp_path, caplog):
    """Older releases wrote no digests."""
    folder = cache.entry(tmp_path / "data/name", write)
    (folder / file).unlink()
    assert cache.entry(folder, write) == folder
    assert (folder / "rows.bin").read_bytes() == b"rows"
    assert f"{folder} in the cache is damaged ({file}), and is made again" in caplog.text
    caplog.clear()
    assert cache.entry(folder, pytest.fail) == folder
    assert (caplog.text, list(folder.parent.iterdir())) == ("", [folder])


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (SafetensorError("I/O error: No space left"), Stop),
        (OSError(12, "Cannot allocate memory"), OSError),  # it has its own status
    ],
)
def test_a_cache_that_cannot_be_written_is_named(tmp_path, error, seen):
    def fail(folder):
        raise error

    with pytest.raises(seen, match=r"cannot be used: .*name \(I/O error: No space left\)|allocate"):
        cache.entry(tmp_path / "name", fail)


def test_an_answer_that_is_damaged_is_none(tmp_path):
    cache.keep(tmp_path, "name", {"layers": [1, 2.5, None]})
    (file,) = tmp_path.iterdir()
    assert cache.answer(tmp_path, "name") == {"layers": [1, 2.5, None]}
    for content in (file.read_text()[:-4], "[]", "[" * 100_000):
        file.write_text(content)
        assert cache.answer(tmp_path, "name") is None
