"""What changes between two releases, and between two lists of releases."""

from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from study.cli.differences import diff
from study.core.errors import Stop
from study.known.between import between, two_lists
from study.known.faults import ANY


def test_a_fault_is_fixed_new_or_in_both():
    changes = between("deepspeed", Version("0.17.6"), Version("0.19.8"))
    fixed, added, both = ({fault.id for fault in faults} for faults in (changes.fixed, changes.added, changes.both))
    assert "last-pass-only" in fixed
    assert "clips-by-default" in added
    assert "L-69" in both
    assert not fixed & added
    assert not both & (fixed | added)
    assert not changes.notes


def test_two_lists_are_compared_by_package():
    a = {"deepspeed": Version("0.17.6"), "torch": Version("2.9.0"), "transformers": SpecifierSet(">=4"), "trl": ANY}
    b = {"deepspeed": Version("0.19.8"), "torch": Version("2.9.0"), "transformers": Version("4.57.1")}
    two = two_lists(a, b)
    assert two.pinned == {"deepspeed": (Version("0.17.6"), Version("0.19.8"))}
    assert two.notes == ["transformers: A has >=4, B 4.57.1.", "trl: A has no release, B none."]


@pytest.fixture
def pins(tmp_path):
    """Writes a list of releases in a form that people have, and returns its path."""

    def write(name: str, **releases: str) -> Path:
        joint = {".txt": "{}=={}", ".yml": "  - {}={}", ".lock": 'name = "{}"\nversion = "{}"\n'}[Path(name).suffix]
        lines = [joint.format(*pair) for pair in releases.items()]
        head = ["dependencies:"] if name.endswith(".yml") else []
        (tmp_path / name).write_text("\n".join([*head, *lines, ""]))
        return tmp_path / name

    return write


@pytest.mark.parametrize(
    ("old", "new"), [("old.txt", "new.txt"), ("environment.yml", "new.txt"), ("old.txt", "new.yml")]
)
def test_two_lists_of_pins_answer_as_two_releases_do(old, new, pins, capsys):
    a = pins(old, deepspeed="0.17.6", torch="2.11.0", numpy="1.0")
    b = pins(new, deepspeed="0.19.8", torch="2.11.0", numpy="2.0")
    of_lists = diff(a, b)
    printed = capsys.readouterr().out
    assert of_lists["packages"] == {"deepspeed": diff(Path("deepspeed==0.17.6"), Path("deepspeed==0.19.8"))}
    assert capsys.readouterr().out in printed


def test_what_no_test_tells_apart_stops_no_other_package(pins, capsys):
    a, b = pins("a.txt", deepspeed="98.0", torch="2.11.0"), pins("b.txt", deepspeed="99.0", torch="2.13.0")
    answer = diff(a, b)
    assert "no test of ours tells 98.0 and 99.0 apart" in answer["packages"]["deepspeed"]["not_known"]
    assert "From torch 2.11.0 to 2.13.0" in capsys.readouterr().out
    diff(a, a)
    assert "none of those of which faults are known" in " ".join(capsys.readouterr().out.split())


def test_a_list_beside_a_config_is_refused(pins, tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    listed = pins("a.txt", deepspeed="0.17.6")
    for two in ((listed, tmp_path / "ds.json"), (tmp_path / "ds.json", listed)):
        with pytest.raises(Stop, match=r"a\.txt is a list of releases, and the other is none"):
            diff(*two)
