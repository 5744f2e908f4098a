"""`study diff`: configs and records of any kind, anybody's: known causes first, nothing trusted."""

import contextlib
import json
from pathlib import Path
from pkgutil import resolve_name

import pytest

from study.cli.differences import diff
from study.configs import sources
from study.configs.differences import compare
from study.configs.mistakes import UNUSABLE, mistakes, recognised
from study.configs.oom import reading
from study.configs.oom.explain import Described, explain
from study.configs.settings import effective_settings
from study.configs.shown import shown
from study.configs.stacks import described
from study.core.arms import read
from study.core.errors import Stop
from study.core.library_defaults import library_defaults
from study.known.stacks import Flags
from study.predict.front import Wanted
from tests.cases import for_each
from tests.conftest import ROOT, table

ARMS = ROOT / "accelerate_configs"
RUNS = ROOT / "reports/cpu-2core/runs"

CASES = table("configs/config_cases.toml")
BEGIN = CASES["begin"]
_, DEEPSPEED, _, ZERO, _, TRAINER = BEGIN.values()


@pytest.fixture
def file(tmp_path):
    """Writes settings to a file. YAML contains JSON."""

    def write(name: str, content: dict) -> Path:
        (tmp_path / name).write_text(json.dumps(content))
        return tmp_path / name

    return write


def known(a: Path, b: Path, other: list[str] | None = None) -> dict[str, str]:
    causes, others = compare(sources.read(a), sources.read(b))
    assert other in (None, [each.name for each in others])
    return {each.name: f"{shown(each.a)}, {shown(each.b)}" for each in causes}


@for_each("case", CASES["pair"], ids=[" ".join(each["known"]) for each in CASES["pair"]])
def test_known_causes(file, case):
    first, second = (BEGIN[begin] | case.get(side, {}) for begin, side in zip(case["begin"], "ab", strict=True))
    assert known(file("a.json", first), file("b.yaml", second), case.get("other")) == case["known"]


@pytest.mark.parametrize("case", CASES["silent"])
def test_silence_is_the_librarys_default(file, case):
    read = effective_settings(sources.read(file("a.yaml", BEGIN[case["begin"]] | case["with"])))
    assert case["known"].items() <= {name: each.value for name, each in read.items()}.items()


def test_an_arm_is_named_without_its_file_unless_something_here_is_called_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for names in (("zero2", "zero3"), ("stage2", "zero3")):
        assert diff(*map(Path, names)) == diff(ARMS / "zero2.yaml", ARMS / "zero3.yaml")
    assert diff(Path("ddp"), Path("ddp"))["known"] == []
    (tmp_path / "zero2").write_text("a log\n")
    with pytest.raises(Stop, match="zero2 is no config"):
        diff(Path("zero2"), Path("zero3"))


def test_what_the_command_prints(file, tmp_path, capsys, monkeypatch, golden):
    """Clipping comes first, with its history; secrets and control characters are not shown, long keys whole; a json
    that a yaml names is read, or named if it is not here."""
    monkeypatch.chdir(tmp_path)
    long = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    other = TRAINER | {long: True, "max_tokens": 512, "hub_token": "hf_mine", "note": "\x1b[31mred"}
    here, elsewhere = (ZERO | {"deepspeed_config": {"deepspeed_config_file": name}} for name in ("a.json", "else.json"))
    pairs = {
        ("a.json", "b.yaml"): (DEEPSPEED, DEEPSPEED | {"gradient_clipping": 0.0}),
        ("a.yaml", "c.yaml"): (here, elsewhere),
        ("d.json", "e.yaml"): (other, TRAINER | {long: False, "hub_token": "x", "note": "plain"}),
    }
    for names, contents in pairs.items():
        a, b = map(file, names, contents)
        diff(*map(Path, names))
    printed = capsys.readouterr().out
    assert "hf_mine" not in printed + json.dumps(diff(a, b))
    golden("command_diff.txt", printed)


@for_each("case", CASES["mistake"])
def test_what_a_library_ignores_in_a_config_is_found_although_nothing_differs(file, case):
    file("ds.json", case.get("file", {}))
    source = sources.read(file("mine.yaml", BEGIN[case["begin"]] | case["with"]))
    found = list(mistakes(source))
    assert [each.id for each in found] == case["found"]
    assert case.get("said", "") in str(found)


@for_each("case", CASES["refused"])
def test_what_a_library_refuses_is_found_and_no_all_clear(file, case, capsys):
    config = DEEPSPEED | case["with"]
    path = file("mine.yaml", config)
    (mistake,) = mistakes(sources.read(path))
    assert case["said"] in mistake.sentence
    assert recognised(path).content
    # What was removed an older release may take, and so may the training that is asked about.
    assert (case["said"] in capsys.readouterr().err) == (mistake.id != "key_removed")
    with pytest.raises(Exception, match=r"\w"):
        resolve_name("deepspeed.runtime.config:DeepSpeedConfig")(config)


IGNORED = {  # by stage, what it does otherwise than it is told; `offload` is a section with a device
    0: {"offload_optimizer": "cpu", "zero_hpz_partition_size": 2},
    1: {"offload_optimizer": "nvme", "zero_quantized_weights": True},
    2: {"offload_optimizer": "nvme", "offload_param": "cpu", "zero_quantized_gradients": True},
}
PROMISES = [(stage, key, value) for stage, promises in IGNORED.items() for key, value in promises.items()]


@pytest.mark.parametrize(("stage", "key", "value"), PROMISES)
def test_what_a_stage_ignores_is_refused_of_an_arm_and_found_in_a_config_in_the_same_words(file, stage, key, value):
    value = {"device": value} if key.startswith("offload") else value
    config = DEEPSPEED | {"zero_optimization": {"stage": stage, key: value}}
    path = file("ds.json", config)
    naming = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": str(path)}}
    with pytest.raises(Stop) as refused:
        read(file("mine.yaml", naming))
    for config_file in (path, file("mine.yaml", naming), file("args.json", TRAINER | {"deepspeed": str(path)})):
        (found,) = [each for each in mistakes(sources.read(config_file)) if each.id == "stage_ignores"]
        assert f"{found.sentence}: {found.remedy}".lower() in refused.value.what
    config["zero_optimization"]["stage"] = 3
    assert "stage_ignores" not in [each.id for each in mistakes(sources.read(file("ds.json", config)))]


SECTIONS = library_defaults("deepspeed")


@for_each("path", SECTIONS)
def test_a_key_that_deepspeed_does_not_know_is_found_in_whatever_names_the_json(file, path):
    """At the upper level and in each section, whether DeepSpeed refuses it there or reads the section key by key."""
    wrong: dict = {"mine_alone": 1}
    for name in reversed(path.split(".") if path else ()):
        wrong = {name: wrong}
    json_file = file("ds.json", DEEPSPEED | wrong)
    naming = ZERO | {"deepspeed_config": {"deepspeed_config_file": "ds.json"}, "mixed_precision": None}
    for config in (json_file, file("mine.yaml", naming), file("args.json", TRAINER | {"deepspeed": "ds.json"})):
        said = " ".join(each.sentence for each in mistakes(sources.read(config)))
        assert f"{path}.mine_alone".lstrip(".") in said, config


def test_a_contradiction_names_both_sides_and_all_wrong_keys_are_named(file, capsys):
    (found,) = mistakes(sources.read(file("mine.yaml", TRAINER | {"deepspeed": {"gradient_clipping": 0.0}})))
    assert "gradient_clipping is 0 in the DeepSpeed config, and max_grad_norm 0.5" in found.sentence
    wrong = file("mine.json", DEEPSPEED | {"bf16": {"enable": True}, "gradient_cliping": 1.0})
    recognised(wrong)
    ignored, refused = capsys.readouterr().err.splitlines()
    assert "gradient_cliping is no key of" in ignored
    assert ignored.endswith("What to do: write gradient_clipping.")
    assert "bf16.enable is no key of deepspeed, which refuses to start with it" in refused
    assert refused.endswith("What to do: write enabled.")


@for_each("case", CASES["mistake"] + CASES["refused"])
def test_a_config_with_mistakes_is_read_as_far_as_it_can_be(file, case, capsys):
    """`study diagnose` sends its owner to these commands."""
    file("ds.json", case.get("file", {}))
    path = file("mine.yaml", BEGIN[case.get("begin", "deepspeed")] | case["with"])
    if "kind_unknown" in case.get("found", ()):
        with pytest.raises(Stop):
            recognised(path)
        return
    # Only what DeepSpeed derives of rows may still contradict itself.
    with contextlib.suppress(Stop):
        described(("deepspeed==0.19.8",), Flags(), path)
    explain(reading.find("CUDA out of memory. Tried to allocate 2.44 GiB."), Wanted(), Described(config=path))
    said = [each for each in mistakes(sources.read(path)) if each.id in UNUSABLE]
    assert all(each.said in capsys.readouterr().err for each in said[:1])


def test_a_file_that_is_not_here_is_no_matter_of_commas(tmp_path):
    with pytest.raises(Stop) as stop:
        diff(tmp_path / "none.json", tmp_path / "other.json")
    assert stop.value.remedy == "name a file that is here"


def test_a_key_that_is_given_twice_is_refused_as_deepspeed_does(tmp_path):
    config = tmp_path / "ds.json"
    config.write_text('{"zero_optimization": {"stage": 2}, "zero_optimization": {"stage": 3}}')
    with pytest.raises(Stop, match="the key 'zero_optimization' is given twice"):
        recognised(config)
    refuse = resolve_name("deepspeed.runtime.config_utils:dict_raise_error_on_duplicate_keys")
    with pytest.raises(ValueError, match="zero_optimization"):
        json.loads(config.read_text(), object_pairs_hook=refuse)


def test_records_and_mixed_kinds():
    a, b = RUNS / "smoke/arms-zero2-5228df76-r1.1", RUNS / "stages/precision-zero3-29137077-r1.1"
    causes = known(a, b)
    assert causes["precision"] == "fp32, autocast to bfloat16"
    assert causes["stage"] == "2, 3"
    assert known(a, ARMS / "zero2.yaml") == {}
    assert known(a / "record.json", ARMS / "deepspeed/zero3_cpu.json").keys() == {
        "stage", "offload_optimizer", "offload_param",
    }  # fmt: skip


def test_our_configs_have_no_mistakes():
    paths = [path for path in ARMS.rglob("*") if path.suffix in (".yaml", ".json")]
    assert len(paths) > 40
    assert [each for path in paths for each in mistakes(sources.read(path))] == []
