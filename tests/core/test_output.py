"""A folder that a command makes: replaced whole or not at all, and nothing of anybody else's is removed."""

import json
from pathlib import Path

import pytest

from study.core import files as output
from study.core.errors import Stop


def make(out: Path, fail=lambda: None, **files: str) -> None:
    with output.replaced(out) as folder:
        write(folder, **files)
        fail()


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_what_was_made_before_is_replaced_whole(tmp_path):
    make(tmp_path / "a" / "out", one="1", deep__two="2")
    make(tmp_path / "a" / "out", three="3")
    held = tree(tmp_path / "a" / "out")
    assert json.loads(held.pop(output.MANIFEST))["files"] == [*held]
    assert held == {"three": "3"}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["out"], "nothing is left beside it"


SPOILS = {
    "add": lambda out: write(out, deep__notes="mine"),
    "hide": lambda out: write(out, **{".git__config": "mine"}),
    "link": lambda out: (out / "link").symlink_to("/etc"),
    "foreign": lambda out: (out / output.MANIFEST).unlink(),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_file_of_the_users_in_it_stops_the_build(spoil, tmp_path):
    make(tmp_path / "out", one="1", deep__two="2")
    SPOILS[spoil](tmp_path / "out")
    before = tree(tmp_path)
    words = "was not made by this command" if spoil == "foreign" else "did not write"
    with pytest.raises(Stop, match=words):
        make(tmp_path / "out", three="3")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_build_leaves_what_was_there_and_no_hindrance(error, tmp_path):
    def fail() -> None:
        raise error

    make(tmp_path / "out", one="1")
    before = tree(tmp_path)
    for name in ("out", "new"):
        with pytest.raises(error):
            make(tmp_path / name, fail, half="")
        assert tree(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/x", "/"])
def test_a_place_that_cannot_be_written_is_one_sentence(place, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(Stop):
        make(tmp_path / place, one="1")
    assert tree(tmp_path) == {"file": "mine"}
