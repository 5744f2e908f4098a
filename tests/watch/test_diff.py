"""`study diff`: configs and records of any kind, anybody's: known causes first, nothing trusted."""

import json
import tomllib
from pathlib import Path

import pytest
import yaml

from study.cli.diagnosis import diff
from study.core.errors import Stop
from study.watch import sources
from study.watch.differences import compare, mistakes, shown

ROOT = Path(__file__).resolve().parents[2]
ARMS = ROOT / "accelerate_configs"
RUNS = ROOT / "reports/cpu-2core/runs"

CASES = tomllib.loads((ROOT / "tests" / "watch" / "config_cases.toml").read_text())
BEGIN = CASES["begin"]
DEEPSPEED, _, ZERO, TRAINER = BEGIN.values()


@pytest.fixture
def file(tmp_path):
    """Writes settings to a file, as json or yaml by its name."""

    def write(name: str, content: dict) -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(content) if name.endswith("json") else yaml.safe_dump(content))
        return path

    return write


def known(a: Path, b: Path) -> dict[str, str]:
    compared = compare(sources.read(a), sources.read(b))
    return {each.name: f"{shown(each.a)}, {shown(each.b)}" for each in compared if each.description}


@pytest.mark.parametrize("case", CASES["pair"], ids=[" ".join(each["known"]) for each in CASES["pair"]])
def test_known_causes(file, case):
    first, second = (BEGIN[begin] | case.get(side, {}) for begin, side in zip(case["begin"], "ab", strict=True))
    assert known(file("a.json", first), file("b.yaml", second)) == case["known"]


def test_what_the_command_prints(file, tmp_path, capsys, monkeypatch, golden):
    """Clipping comes first, with its history; secrets and control characters are not shown; a json that a yaml names
    is read, or named if it is not here."""
    monkeypatch.chdir(tmp_path)
    other = TRAINER | {"group_by_length": True, "hub_token": "hf_mine", "note": "\x1b[31mred"}
    pairs = [
        (DEEPSPEED, DEEPSPEED | {"gradient_clipping": 0.0}),
        (ZERO | {"deepspeed_config": {"deepspeed_config_file": "a.json"}},
         ZERO | {"deepspeed_config": {"deepspeed_config_file": "elsewhere.json"}}),
        (other, TRAINER | {"group_by_length": False, "hub_token": "x", "note": "plain"}),
    ]  # fmt: skip
    for a, b in pairs:
        name = "a.yaml" if "distributed_type" in a else "a.json"
        file(name, a)
        file("b.yaml", b)
        diff(Path(name), Path("b.yaml"))
    printed = capsys.readouterr().out
    assert "hf_mine" not in printed + json.dumps(diff(Path("a.json"), Path("b.yaml")))
    assert "\x1b" not in printed
    assert max(map(len, printed.splitlines())) <= 100
    golden("command_diff.txt", printed)


@pytest.mark.parametrize("case", CASES["mistake"])
def test_what_a_library_ignores_in_a_config_is_found_although_nothing_differs(file, case):
    file("ds.json", case.get("file", {}))
    source = sources.read(file("mine.yaml", BEGIN[case["begin"]] | case["with"]))
    assert [each.id for each in mistakes(source)] == case["found"]


def test_records_and_mixed_kinds():
    a, b = RUNS / "smoke/arms-zero2-5228df76-r1.1", RUNS / "stages/precision-zero3-29137077-r1.1"
    causes = known(a, b)
    assert causes["precision"] == "fp32, autocast to bfloat16"
    assert causes["stage"] == "2, 3"
    assert next(iter(causes)) == "data"
    assert known(a, ARMS / "zero2.yaml") == {}
    assert known(a / "record.json", ARMS / "deepspeed/zero3_cpu.json").keys() == {
        "stage", "offload_optimizer", "offload_param",
    }  # fmt: skip


def test_our_configs_have_no_mistakes():
    paths = [path for path in ARMS.rglob("*") if path.suffix in (".yaml", ".json")]
    assert len(paths) > 40
    assert [each for path in paths for each in mistakes(sources.read(path))] == []


@pytest.mark.parametrize("content", [b"", b"!!python/object/apply:os.system ['echo no']", b"a: 1\n" * 1_000_000])
def test_a_file_that_is_no_config_is_refused_and_nothing_runs(tmp_path, content):
    (tmp_path / "bad.yaml").write_bytes(content)
    with pytest.raises(Stop, match=r"bad\.yaml"):
        sources.read(tmp_path / "bad.yaml")
