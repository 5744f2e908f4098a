"""Names and files of strangers: what is read, written and refused; and folders that a command replaces as a whole."""

import json
import os
from pathlib import Path

import pytest

from study.core import files
from study.core.errors import Stop

LONGEST = "n" * files.LONGEST_NAME_BYTES


def test_a_name_that_leads_elsewhere_is_refused_and_any_other_not_changed(tmp_path):
    for name in ("", ".", "..", "a/b", "a\\b", "a\0b", "a\nb", "\u202ea", "\ud800", None, LONGEST + "n"):
        with pytest.raises(Stop):
            files.safe_join(tmp_path, "a", name)
        with pytest.raises(Stop):
            files.read_below(tmp_path, name, 100)
    for name in ("zero2-r1.1", "a b", "é", "..a", LONGEST):
        assert files.safe_join(tmp_path, "deep", name) == tmp_path / "deep" / name


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder with one file, and with other things that a stranger's folder may contain."""
    (tmp_path / "secret").write_text("private")
    place = tmp_path / "place"
    (place / "folder").mkdir(parents=True)
    (place / "file").write_text("content")
    (place / "link").symlink_to(tmp_path / "secret")
    (place / "device").symlink_to("/dev/zero")
    os.mkfifo(place / "pipe")
    (place / "large").write_bytes(b"x" * 101)
    return place


def test_only_regular_files_of_limited_size_are_read(place):
    """And through a link only if the user named it."""
    refused = {"pipe": "not a file", "large": "100 bytes", "gone": "No such", "folder": "dir"}
    assert files.read(place / "link", 100) == b"private"
    for name, why in (refused | {"device": "not a file", "\ud800": "not a valid path"}).items():
        with pytest.raises(OSError, match=why):
            files.read(place / name, 100)
    assert files.read_below(place, "file", 100) == b"content"
    for name, why in (refused | {"device": "symbolic links", "link": "symbolic links"}).items():
        with pytest.raises(OSError, match=why) as caught:
            files.read_below(place, name, 100)
        assert why in files.why(caught.value)


def test_a_file_is_replaced_as_a_whole(place, tmp_path, monkeypatch):
    for name in ("new", "file", "link"):
        files.write_below(place, name, b"new")
        assert files.read_below(place, name, 100) == b"new"
    assert (tmp_path / "secret").read_text() == "private", "the link was replaced, not what it led to"

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_below(place, "file", b"newer")
    assert (place / "file").read_text() == "new"
    assert not list(place.glob(".*"))


BROKEN = [
    (files.from_json, "[" * 100_000, "nested too deeply"),
    (files.from_json, '{"a": NaN}', "NaN is not a number"),
    (files.from_json, b"\xff", "decode"),
    (files.from_yaml, "a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    (files.from_toml, "a = " + "9" * 5000, "digits"),
]


def test_what_is_broken_is_a_value_error_and_what_configs_have_is_read():
    for parse, text, why in BROKEN:
        with pytest.raises(ValueError, match=why) as caught:
            parse(text)
        assert len(files.why(caught.value)) <= files.LONGEST_REASON
    for code in ("utf-8-sig", "utf-16"):
        assert files.from_json('{"a": 1e5}'.encode(code)) == {"a": 1e5}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"zero": {"stage": 2, "stage": 3}}'),
        ("a.yaml", "zero:\n  stage: 2\n  stage: 3\n"),
        ("a.toml", "[zero]\nstage = 2\nstage = 3\n"),
    ],
)
def test_a_key_that_a_config_gives_twice_is_named(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(Stop, match=r"stage' is given twice|overwrite a value"):
        files.load(tmp_path / name, dict, what="a config", remedy="mend it", most_bytes=1000)


def test_a_mapping_of_yaml_may_replace_a_key_of_the_one_that_it_merges(tmp_path):
    (tmp_path / "a.yaml").write_text("a: &a {stage: 2}\nb: &b {<<: *a, stage: 3}\nc: {<<: *b, stage: 1}\n")
    content = files.load(tmp_path / "a.yaml", dict, what="a config", remedy="mend it", most_bytes=1000)
    assert [each["stage"] for each in content.values()] == [2, 3, 1]


def test_a_sentence_is_one_short_line_whatever_it_quotes():
    stop = Stop(f"there is no arm a\nb{'c' * 9999}", f"choose one in {'d' * 298}?")
    assert stop.sentence == f"there is no arm a b{'c' * 79}... What to do: choose one in {'d' * 298}?"


# --- folders that a command makes -----------------------------------------------------------------------------------


def make(out: Path, name: str, error: BaseException | None = None) -> None:
    with files.replaced(out) as folder:
        (folder / name).write_text(name)
        if error:
            raise error


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_what_was_made_before_is_replaced_whole(tmp_path):
    for name in ("one", "two"):
        make(tmp_path / "a/out", name)
    held = tree(tmp_path)
    assert json.loads(held.pop(f"a/out/{files.MANIFEST}"))["files"] == ["two"]
    assert held == {"a/out/two": "two"}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["out"], "nothing is left beside it"


SPOILS = {
    "add": lambda out: (out / "notes").write_text("mine"),
    "link": lambda out: (out / "link").symlink_to("/etc"),
    "foreign": lambda out: (out / files.MANIFEST).unlink(),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_file_of_the_users_in_it_stops_the_build(spoil, tmp_path):
    make(tmp_path / "out", "one")
    SPOILS[spoil](tmp_path / "out")
    before = tree(tmp_path)
    with pytest.raises(Stop, match=r"was not made by this command|did not write"):
        make(tmp_path / "out", "two")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["out", "new"])
def test_an_interrupted_build_leaves_what_was_there_and_no_hindrance(name, tmp_path):
    make(tmp_path / "out", "one")
    before = tree(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / name, "half", KeyboardInterrupt())
    assert tree(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/x"])
def test_a_place_that_cannot_be_written_is_one_sentence(place, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(Stop):
        make(tmp_path / place, "one")
    assert tree(tmp_path) == {"file": "mine"}
