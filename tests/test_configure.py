"""Written configs are those of the arms, with processes, batch and precision, and `accelerate launch` accepts them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import test_parity
import test_save
from conftest import DECODERS_ALONE
from test_cli import in_this_process

from study.cli.configs import config, write
from study.core import arms
from study.core.errors import Stop
from study.predict.advice.advise import Advice, Row, advise
from study.predict.advice.question import Question
from study.predict.advice.settled import BUCKETS
from study.predict.architecture import named

QUESTION = Question(named("bert-tiny"), 2, "L4", "pcie4", 64e9, 128, 16, "bf16_cast", False, disk_bytes_per_s=3e9)


def advised(**change) -> Advice:
    return advise(replace(QUESTION, **change))


def asked(arm: str, advice: Advice | None = None) -> tuple[Row, Question]:
    """Return an arm's row of an advice, and the question."""
    advice = advice or advised()
    return next(row for row in advice.rows if row.arm == arm), advice.question


DIVIDED = ("hsdp", "zero3_hpz", *DECODERS_ALONE)  # into nodes, or not for a BERT


@pytest.mark.parametrize("arm", [name for name in arms.NAMES if name not in ("single", *DIVIDED)])
def test_what_is_written_is_the_arm(arm, tmp_path):
    written = write(tmp_path / "mine.yaml", *asked(arm))
    written_arm, ours = arms.read(tmp_path / "mine.yaml"), arms.read(arms.all_paths()[arm])
    assert [path.name for path in written] == ["mine.yaml", "mine.json"][: 2 if ours.deepspeed else 1]
    assert written_arm.num_processes == 2
    assert written_arm.distributed_type == ours.distributed_type
    if ours.deepspeed:
        added = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "bf16": {"enabled": True}}
        expected = json.loads(json.dumps(ours.deepspeed)) | added
        zero = expected["zero_optimization"]
        zero |= {name: 50_000_000 for name in BUCKETS if name in zero}
        if ours.uses_nvme:
            zero["offload_optimizer"]["nvme_path"] = str(tmp_path / "nvme")
        assert written_arm.deepspeed == expected


def test_groups_are_written_as_large_as_nodes(tmp_path):
    """Only with several nodes: on one node, such an arm is not advised."""
    assert "hsdp" not in {row.arm for row in advised().rows}
    nodes = advised(gpus=16, gpus_per_node=4)
    assert {row.arm: row.fits for row in nodes.rows}["hsdp"]
    write(tmp_path / "hsdp.yaml", *asked("hsdp", nodes))
    arm = arms.read(tmp_path / "hsdp.yaml")
    assert (arm.replicas, arm.shards, arm.sharing_ranks(16)) == (4, 4, 4)
    write(tmp_path / "hpz.yaml", *asked("zero3_hpz", nodes))
    assert arms.read(tmp_path / "hpz.yaml").second_partition(16) == 4


@pytest.mark.parametrize(("arm", "gpus"), [("ddp", 16), ("zero1", 2), ("zero3", 16), ("zero3_nvme", 2)])
def test_accelerate_reads_it(arm, gpus, tmp_path):
    """Accelerate's classes refuse unknown keys, and the launcher and the plugin take over the intended values."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import DeepSpeedPlugin

    row, question = asked(arm, advised(gpus=gpus))
    write(tmp_path / "mine.yaml", row, question)
    read = load_config_from_file(str(tmp_path / "mine.yaml"))
    assert (read.num_processes, read.num_machines) == (gpus, gpus // min(gpus, 8))
    if arm == "ddp":
        return
    plugin = DeepSpeedPlugin(hf_ds_config=read.deepspeed_config["deepspeed_config_file"])
    assert plugin.gradient_accumulation_steps == row.accumulation
    assert plugin.zero_stage == int(arm[4])
    assert plugin.hf_ds_config.get_value("train_micro_batch_size_per_gpu") == row.micro_batch


def autocast(dtype: str) -> dict:
    return {"torch_autocast": {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": []}}


@pytest.mark.parametrize(
    ("precision", "gpu", "with_deepspeed", "without"),
    [
        ("fp32", "L4", {}, "no"),
        ("bf16", "L4", autocast("bfloat16"), "bf16"),
        ("bf16", "T4", autocast("float16"), "fp16"),
        ("fp16", "L4", autocast("float16"), "fp16"),
        ("bf16_cast", "L4", {"bf16": {"enabled": True}}, "no"),
        ("bf16_cast", "T4", {"fp16": {"enabled": True}}, "no"),
    ],
)
def test_precision(precision, gpu, with_deepspeed, without):
    advice = advised(precision=precision, gpu=gpu)
    accelerate, deepspeed = config(*asked("zero2", advice), Path())
    assert {key: deepspeed[key] for key in ("torch_autocast", "bf16", "fp16") if key in deepspeed} == with_deepspeed
    assert "mixed_precision" not in accelerate, "Accelerate refuses it beside a json"
    accelerate, deepspeed = config(*asked("ddp", advice), Path())
    assert (accelerate["mixed_precision"], deepspeed) == (without, None)


def test_our_own_files_stay_as_they_are():
    before = arms.read(arms.all_paths()["zero3_nvme"]).deepspeed
    config(*asked("zero3_nvme"), arms.FOLDER)
    assert arms.read(arms.all_paths()["zero3_nvme"]).deepspeed == before


def test_what_cannot_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "taken.json").write_text("mine")
    for target, arm, what in (
        ("mine.json", "zero2", "not the name of a yaml file"),
        ("nowhere/mine.yaml", "zero2", "cannot be written"),
        ("taken.yaml", "zero2", "File exists"),
    ):
        with pytest.raises(Stop, match=what):
            write(tmp_path / target, *asked(arm))
    command = f"advise --model gpt-neox-20b --gpus 1 --gpu T4 --write {tmp_path / 'mine.yaml'}"
    assert in_this_process(monkeypatch, command) == 2
    assert "nothing is predicted to fit" in capsys.readouterr().err
    assert [each.read_text() for each in tmp_path.iterdir()] == ["mine"]


SHORT = ("--steps", "6", "--train-rows", "96", "--eval-rows", "16", "--no-instruments")
FLAGS = {"ddp": test_save.FLAGS, "zero2": test_parity.ACCUMULATED, "zero3": test_save.FLAGS}  # trained there as well
SELDOM = [name for name in arms.NAMES if name not in (*FLAGS, *DIVIDED)]


@pytest.mark.parametrize("arm", [*FLAGS, *(pytest.param(arm, marks=pytest.mark.slow) for arm in SELDOM)])
def test_accelerate_launches_it(arm, trained):
    """The trainer accepts the same file as a user's own script, and compares what it observes with it."""
    record = trained(arm, *FLAGS.get(arm, SHORT), advised=True).record
    file, ours = Path(record["requested"]["config_file"]), arms.read(arms.all_paths()[arm])
    assert file.name == f"{arm}.yaml"
    assert not file.is_relative_to(arms.FOLDER)
    seen = record["observed"]
    homes = (ours.stage, ours.offload_optimizer, ours.offload_param)
    assert (seen["stage"], seen["offload_optimizer"], seen["offload_param"]) == homes
    assert seen["ranks"] == (1 if arm == "single" else 2)
    if ours.deepspeed:  # the advised buckets, not those of the arm's own file
        written = json.loads(file.with_suffix(".json").read_text())["zero_optimization"]["reduce_bucket_size"]
        assert seen["bucket_elements"] == written != ours.deepspeed["zero_optimization"]["reduce_bucket_size"]
