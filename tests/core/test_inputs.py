"""Names and files of strangers: what is read, what is written, and what is refused."""

import os
from pathlib import Path

import pytest

from study.core import files
from study.core.errors import Stop

LONGEST = "n" * files.LONGEST_NAME_BYTES


def test_a_name_that_leads_elsewhere_is_refused_and_any_other_not_changed(tmp_path):
    for name in ("", ".", "..", "a/b", "a\\b", "a\0b", "a\nb", "\u202ea", None, LONGEST + "n"):
        with pytest.raises(Stop):
            files.safe_join(tmp_path, "a", name)
    for name in ("zero2-r1.1", "a b", "é", "..a", LONGEST):
        assert files.safe_join(tmp_path, "deep", name) == tmp_path / "deep" / name


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder with one file, and with other things that a stranger's folder may contain."""
    (tmp_path / "secret").write_text("private")
    place = tmp_path / "place"
    (place / "deep").mkdir(parents=True)
    (place / "deep" / "file").write_text("content")
    links = {"link": tmp_path / "secret", "folder": tmp_path, "inside": place / "deep", "device": Path("/dev/zero")}
    for name, target in links.items():
        (place / name).symlink_to(target)
    os.mkfifo(place / "pipe")
    (place / "large").write_bytes(b"x" * 101)
    return place


REFUSED = {
    "it is a link": ("link", "folder/secret", "inside/file"),
    "it is not a file": ("pipe",),
    "Is a directory": ("deep",),
    "it has more than 100 bytes": ("large",),
    "leads out of its folder": ("../secret", "deep/../../secret", "/etc/hostname", ""),
    "it is not a valid path": ("deep/a\0b", "deep/\ud800"),
    "No such file": ("gone",),
}


def test_below_a_folder_only_its_own_files_are_read(place):
    assert files.read_below(place, "deep/file", 100) == b"content"
    for why, names in REFUSED.items():
        for name in names:
            with pytest.raises(OSError, match=why) as caught:
                files.read_below(place, name, 100)
            assert why in files.why(caught.value)


def test_a_file_that_the_user_named_may_be_a_link_and_is_a_file_of_limited_size(place):
    assert files.read(place / "link", 100) == b"private"
    for name, why in {"pipe": "not a file", "device": "not a file", "large": "100 bytes", "\ud800": "path"}.items():
        with pytest.raises(OSError, match=why):
            files.read(place / name, 100)


def test_what_is_written_stays_below_its_folder(place, tmp_path, monkeypatch):
    for name in ("deep/new/a", "deep/file", "link"):
        files.write_below(place, name, b"new")
        assert files.read_below(place, name, 100) == b"new"
    assert (tmp_path / "secret").read_text() == "private", "the link was replaced, not what it led to"
    for name in ("folder/a", "inside/a", "../a", "/a", "a\0b"):
        with pytest.raises(OSError, match=r"link|leads out|not a valid path"):
            files.write_below(place, name, b"newer")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_below(place, "deep/file", b"newer")
    assert (place / "deep" / "file").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["place", "secret"]
    assert not list(place.rglob("*.part"))


BROKEN = [
    (files.from_json, "[" * 100_000, "nested too deeply"),
    (files.from_json, '{"a": NaN}', "NaN is not a number"),
    (files.from_json, b"\xff", "decode"),
    (files.from_yaml, "[" * 100_000, "nested too deeply"),
    (files.from_yaml, "a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    (files.from_yaml, "a: !!timestamp x", "NoneType"),
    (files.from_toml, "a = " + "[" * 100_000, "nested too deeply"),
    (files.from_toml, "a = " + "9" * 5000, "digits"),
]


def test_what_is_broken_is_a_value_error_and_what_configs_have_is_read():
    for parse, text, why in BROKEN:
        with pytest.raises(ValueError, match=why) as caught:
            parse(text)
        assert len(files.why(caught.value)) <= files.LONGEST_REASON + 3
    assert files.from_json(b'\xef\xbb\xbf{"a": 1e5}') == {"a": 1e5}
