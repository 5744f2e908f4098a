"""The same script under other arms, and the seconds of a step."""

import json

import pytest

from study.core.arms import load_arm
from study.core.errors import Stop
from study.core.files import from_yaml
from study.records.sections import Observed
from study.rehearsal import start
from study.rehearsal.alternatives import check_is, under
from study.rehearsal.request import Answer, Failure, Request
from study.rehearsal.seconds import recipe_of
from tests.rehearsal.test_rehearsal import rehearsed

ZERO = {
    "bf16": {"enabled": True},
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "reduce_bucket_size": 7},
}
YAML = """
distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config: {gradient_clipping: 0.5, zero_stage: 2, offload_optimizer_device: cpu}
"""


@pytest.fixture
def asked(tmp_path):
    """Return the request for another arm, and the config that was written for it."""

    def ask(arm: str, *words: str, yaml: str | None = None) -> tuple[Request, dict]:
        (tmp_path / "ds.json").write_text(json.dumps(ZERO))
        (tmp_path / "given.yaml").write_text(yaml or "")
        given = Request("train.py", [*words], 8, 8, 2, config_file=str(tmp_path / "given.yaml") if yaml else None)
        request = under(load_arm(arm), given, tmp_path)
        return request, from_yaml((tmp_path / "config.yaml").read_bytes())

    return ask


def test_a_json_of_the_scripts_words_gets_another_stage_and_keeps_the_rest(asked, tmp_path):
    request, config = asked("zero2", "--lr", "1", "--deepspeed", f"{tmp_path}/ds.json")
    assert request.words == ["--lr", "1"]
    zero = json.loads((tmp_path / "deepspeed.json").read_text())
    assert zero == ZERO | {"zero_optimization": {"stage": 2, "reduce_bucket_size": 7}}
    assert config["deepspeed_config"] == {"deepspeed_config_file": str(tmp_path / "deepspeed.json")}


def test_a_yaml_keeps_its_precision_and_clipping(asked):
    _, config = asked("zero3_cpu", yaml=YAML)
    section = config["deepspeed_config"]
    assert (section["zero_stage"], section["gradient_clipping"], section["offload_param_device"]) == (3, 0.5, "cpu")
    assert config["mixed_precision"] == "bf16"


@pytest.mark.parametrize("words", [["--mixed_precision", "bf16"], ["--mixed-precision=bf16"]])
def test_the_precision_of_a_launcher_is_kept(words, tmp_path):
    given = Request("train.py", [], 8, 8, 2, launch_words=["--use_deepspeed", *words])
    under(load_arm("zero2"), given, tmp_path)
    assert from_yaml((tmp_path / "config.yaml").read_bytes())["mixed_precision"] == "bf16"


# Groups of Accelerate's parser that say how a training is distributed, and what in them says something else.
OF_ARMS = ("Hardware", "Training Paradigm", "DeepSpeed", "FSDP", "Megatron", "ParallelismConfig")
OF_STEPS = ("gradient_accumulation_steps", "gradient_clipping")


def test_another_arm_keeps_each_option_of_accelerate_that_does_not_say_how_to_distribute(tmp_path):
    from accelerate.commands.launch import launch_command_parser

    names = {}
    for group in launch_command_parser()._action_groups[1:]:
        for action in group._group_actions:
            says_arm = f"{group.title}".startswith(OF_ARMS) and action.dest not in OF_STEPS
            names[action.option_strings[-1]] = not says_arm and action.dest != "mixed_precision"
    del names["--tpu"], names["--config-file"], names["--deepspeed-config-file"]  # which is read
    words = [word for name in names for word in (name, "1")]
    request = under(load_arm("zero2"), Request("train.py", [], 8, 8, 2, launch_words=words), tmp_path)
    assert request.launch_words == [word for name, is_kept in names.items() if is_kept for word in (name, "1")]
    assert {"--gradient-clipping", "--dynamo-backend", "--num-machines"} <= {*request.launch_words}


def test_a_json_of_the_launchers_words_gets_another_stage(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(ZERO))
    words = ["--use_deepspeed", f"--deepspeed-config-file={tmp_path}/ds.json"]
    request = under(load_arm("zero2"), Request("train.py", [], 8, 8, 2, launch_words=words), tmp_path)
    assert json.loads((tmp_path / "deepspeed.json").read_text())["gradient_clipping"] == 0.5
    assert request.launch_words == []


def test_fsdp_takes_the_precision_of_a_deepspeed_json(asked, tmp_path):
    request, config = asked("fsdp2", f"--deepspeed={tmp_path}/ds.json")
    assert (request.words, config["mixed_precision"], config["fsdp_config"]["fsdp_version"]) == ([], "bf16", 2)


def test_a_script_that_decides_by_itself_is_told():
    with pytest.raises(Stop, match="the script decides by itself, and trains with stage 3"):
        check_is(load_arm("zero2"), Observed(stage=3))
    check_is(load_arm("fsdp2"), Observed(fsdp={"units": 2}))


def test_a_script_that_fails_with_another_arm_is_told_without_an_empty_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "run_request", lambda *_: Answer(failure=Failure("value", "no value")))
    given = Request("train.py", [], 2, 2, 2)
    assert start.try_arm(load_arm("zero2"), given, tmp_path / "run", 9).error == "no value"


@pytest.mark.parametrize(
    ("seen", "recipe"),
    [
        (Observed(dtypes={"weights": "float32"}), "fp32"),
        (Observed(dtypes={"weights": "float32"}, autocast="bf16"), "bf16"),
        (Observed(dtypes={"weights": "bfloat16", "master": "float32"}), "bf16_cast"),
        (Observed(dtypes={"weights": "bfloat16"}), "bf16_pure"),
    ],
)
def test_a_precision_is_read_from_what_was_prepared(seen, recipe):
    assert recipe_of(seen) == recipe
    with pytest.raises(Stop, match="weights should be float32"):
        recipe_of(Observed(dtypes={"weights": "float16 bfloat16"}))


def test_the_same_script_is_rehearsed_under_other_arms_and_a_step_has_seconds():
    answer = rehearsed("examples/trl_sft.py", "--gpu=H100", "--try=fsdp2", ranks=8)
    assert answer["observed"]["wrapper"] == "DistributedDataParallel"
    assert [row["arm"] for row in answer["tried"]] == ["fsdp2"]
    assert 0 < answer["tried"][0]["peak_bytes"] < answer["peak_bytes"]
    assert answer["step"]["low_s"] < answer["step"]["seconds"] < answer["step"]["high_s"]
