"""Files of one training that name two engines, or recompute twice: each command that reads them says which counts."""

import json
from pathlib import Path

import accelerate
import pytest
import transformers

from study.cli.diagnosis import diagnose
from study.cli.oom import oom
from study.cli.stack import stack
from study.configs import scripts
from study.configs.engines import contradictions, engines, texts_of
from study.configs.oom.training import Described
from study.configs.stacks import described
from study.known.faults import table
from study.known.which_apply import Flags
from study.predict.front import Wanted

ZERO = '{"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": "auto"}'
YAML = {
    "FSDP": "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n",
    "DDP": "distributed_type: MULTI_GPU\nnum_processes: 8\n",
    "DeepSpeed": "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  zero_stage: 2\n",
}
TRAINER = "from transformers import Trainer, TrainingArguments\nargs = TrainingArguments(\n    output_dir='out',{})\n"
TRAINER += "Trainer(model=model, args=args).train()\n"
OWN = "from accelerate import Accelerator\naccelerator = Accelerator({})\nmodel = accelerator.prepare(model)\n"
SCRIPTS = {
    "deepspeed=": TRAINER.format('\n    deepspeed="ds.json",'),
    "fsdp=": TRAINER.format('\n    fsdp="full_shard auto_wrap",'),
    "both": TRAINER.format('\n    deepspeed="ds.json",\n    fsdp=True,'),
    "none": TRAINER.format('\n    deepspeed=None,\n    fsdp="",  # deepspeed="ds.json"'),
    "DeepSpeedPlugin": OWN.format('deepspeed_plugin=DeepSpeedPlugin(hf_ds_config="ds.json")'),
    "FSDPPlugin": OWN.format("fsdp_plugin=FullyShardedDataParallelPlugin()"),
}
# What trains with each script under each yaml, and what is said.
DECIDED = [
    ("deepspeed=", "FSDP", "DeepSpeed", "engine_of_script"),
    ("deepspeed=", "DDP", "DeepSpeed", "engine_beside_ddp"),
    ("deepspeed=", "DeepSpeed", "DeepSpeed", "two_configs_of_deepspeed"),
    ("fsdp=", "FSDP", "FSDP", "plugin_before_yaml"),
    ("fsdp=", "DDP", "FSDP", "engine_beside_ddp"),
    ("fsdp=", "DeepSpeed", "DeepSpeed", "fsdp_beside_deepspeed"),
    ("both", "DDP", "DeepSpeed", "fsdp_beside_deepspeed"),
    ("none", "FSDP", "FSDP", None),
    ("none", "DDP", "DDP", None),
    ("none", "DeepSpeed", "DeepSpeed", None),
    ("DeepSpeedPlugin", "FSDP", "DeepSpeed", "engine_of_script"),
    ("DeepSpeedPlugin", "DDP", "DeepSpeed", "engine_beside_ddp"),
    ("DeepSpeedPlugin", "DeepSpeed", "DeepSpeed", "two_configs_of_deepspeed"),
    ("FSDPPlugin", "FSDP", "FSDP", "plugin_before_yaml"),
    ("FSDPPlugin", "DDP", "FSDP", "engine_beside_ddp"),
    ("FSDPPlugin", "DeepSpeed", "DeepSpeed", "engine_of_launcher"),
]


RECOMPUTES = YAML["FSDP"] + "  fsdp_activation_checkpointing: true\n"


def job(
    folder: Path, script: str, yaml: str, command: str = "accelerate launch --config_file acc.yaml train.py"
) -> list:
    files = {"train.py": script, "acc.yaml": yaml, "run.sh": command, "requirements.txt": "accelerate==1.15.0\n"}
    for name, text in files.items():
        (folder / name).write_text(text)
    return [str(folder / name) for name in files]


@pytest.mark.parametrize(("script", "launcher", "trains", "said"), DECIDED)
def test_of_two_engines_the_one_that_trains_is_named_with_its_line(script, launcher, trains, said, tmp_path, capsys):
    words = job(tmp_path, SCRIPTS[script], YAML[launcher])
    (tmp_path / "ds.json").write_text(ZERO)
    assert engines(texts_of(words))[0].what == trains
    found = [*contradictions(texts_of(words))]
    assert [each.id for each in found] == ([said] if said else [])
    for printed in (_of_stack(words, capsys), _of_diagnose(words, capsys)):
        assert (f"[{said}]" in printed) == bool(said)
        assert not said or "acc.yaml:1" in printed or "train.py:" in printed
        assert not said or "Nothing known applies" not in printed


def _of_stack(words, capsys) -> str:
    capsys.readouterr()
    stack(tuple(words), flags=Flags())
    return " ".join(capsys.readouterr().out.split())


def _of_diagnose(words, capsys) -> str:
    capsys.readouterr()
    diagnose(tuple(words))
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("is_given", [True, False])
def test_the_config_of_the_engine_that_trains_is_read_and_no_other(is_given, tmp_path, capsys):
    """Of the launcher's only the ranks: `study oom` takes the same one."""
    words = job(tmp_path, SCRIPTS["deepspeed="], YAML["FSDP"])
    (tmp_path / "ds.json").write_text(ZERO)
    given = [*words, *([str(tmp_path / "ds.json")] if is_given else [])]
    answer = stack(tuple(given), flags=Flags())
    assert answer["faults"]
    assert not [each for each in answer["faults"] if "fsdp2" in str(each["when"])]
    log = tmp_path / "train.log"
    log.write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.83 GiB. GPU 0 has a total capacity of 79 GiB"
    )
    taken = oom((str(log), *given), model=Wanted(), training=Described())["taken_as"]
    assert str(taken["config"]).endswith("ds.json")
    assert "[engine_of_script]" in capsys.readouterr().out


def test_what_does_not_train_is_not_read(tmp_path, capsys):
    """Not the FSDP of the launcher's yaml, nor that it recomputes; its ranks are started whatever trains."""
    words = job(tmp_path, SCRIPTS["deepspeed="], RECOMPUTES)
    read = _of_diagnose(words, capsys).partition("Read: ")[2]
    assert "8 ranks" in read
    assert "FSDP2" not in read
    assert "checkpointing" not in read
    assert "ds.json is not here" in _of_stack(words, capsys)


def test_a_flag_of_the_launch_command_is_read_and_torchrun_reads_no_yaml(tmp_path):
    def said(command: str, script: str = "none", yaml: str = YAML["FSDP"]) -> list[str]:
        return [each.id for each in contradictions(texts_of(job(tmp_path, SCRIPTS[script], yaml, command)))]

    assert said("accelerate launch train.py --deepspeed ds.json") == ["engine_of_script"]
    assert said("accelerate launch train.py \\\n  --deepspeed ds.json") == ["engine_of_script"]
    assert said("accelerate launch --use_deepspeed train.py", "fsdp=", "") == ["fsdp_beside_deepspeed"]
    assert said("torchrun --nproc-per-node 8 train.py --deepspeed ds.json") == []
    assert said("torchrun --nproc-per-node 8 train.py", "deepspeed=") == []
    assert said("accelerate launch train.py --deepspeed_config ds.json  # --deepspeed ds.json") == []


@pytest.mark.parametrize(
    ("script", "command", "said"),
    [
        (TRAINER.format("gradient_checkpointing=True"), "", "recomputing_refused"),
        (TRAINER.format("activation_checkpointing=True"), "", "recomputing_refused"),
        (TRAINER.format("gradient_checkpointing=False"), "", None),
        (TRAINER.format(""), "accelerate launch train.py --gradient_checkpointing --bf16", "recomputing_refused"),
        ("args = SFTConfig(output_dir='out')\n", "", "recomputing_refused_by_default"),
        ("args = SFTConfig(gradient_checkpointing=False)\n", "", None),
        (OWN.format("") + "model.gradient_checkpointing_enable()\n", "", "recomputed_twice"),
        (OWN.format(""), "", None),
    ],
)
def test_recomputing_by_fsdp_and_by_another_is_said(script, command, said, tmp_path, capsys):
    words = job(tmp_path, script, RECOMPUTES, command)
    ids = {"recomputing_refused", "recomputing_refused_by_default", "recomputed_twice"}
    for printed in (_of_stack(words, capsys), _of_diagnose(words, capsys)):
        assert {id for id in ids if f"[{id}]" in printed} == {*filter(None, [said])}
    words = job(tmp_path, script, YAML["FSDP"], command)
    assert [*contradictions(texts_of(words))] == [], "FSDP does not recompute"


def test_the_lines_of_the_libraries_that_decide_are_there():
    """What was read; another release may decide otherwise."""
    trainer = (Path(transformers.__file__).parent / "trainer.py").read_text()
    state = (Path(accelerate.__file__).parent / "state.py").read_text()
    assert "Using --fsdp xxx together with --deepspeed is not possible" in trainer
    assert "fsdp_plugin.activation_checkpointing and self.args.activation_checkpointing" in trainer
    asks_for_deepspeed = '"ACCELERATE_USE_DEEPSPEED", "false").lower() == "true" and not cpu'
    assert state.index(asks_for_deepspeed) < state.index("self.fsdp_plugin = fsdp_plugin")


# --- questions that a file answers

# Of a condition, a file of the launcher, of DeepSpeed or of the Trainer that decides it.
DECIDING = {
    "stage": ZERO,
    "ranks": YAML["FSDP"],
    "machines": YAML["FSDP"] + "num_machines: 2\n",
    "offload": '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    "lean_loading": YAML["FSDP"],
    "passes": '{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4}',
    "precision": '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}',
    "optimizer": '{"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}',
    "peft": '{"output_dir": "out", "learning_rate": 1e-5, "use_peft": true}',
    "checkpointing": '{"output_dir": "out", "learning_rate": 1e-5, "gradient_checkpointing": true}',
    "reentrant": '{"output_dir": "out", "max_steps": 5, "gradient_checkpointing_kwargs": {"use_reentrant": true}}',
}
# That no file of these decides: who trains and where, releases, and whether the config has a key at all.
OF_NO_FILE = {"script", "trainer", "cuda", "deepspeed", "torch", "transformers", "keys"}


@pytest.mark.parametrize("condition", table().questions)
def test_a_condition_that_a_file_decides_is_not_asked(condition, tmp_path):
    assert (condition in DECIDING) != (condition in OF_NO_FILE), "say which file decides it, or that none does"
    if condition in DECIDING:
        file = tmp_path / ("config.json" if DECIDING[condition].startswith("{") else "config.yaml")
        file.write_text(DECIDING[condition])
        used, _ = described(("deepspeed==0.19.8", "accelerate==1.15.0"), Flags(), file)
        assert used.said[condition] is not None


WRITTEN = [
    (question, path, pattern, answer)
    for question, row in scripts.rows().items()
    for path, answers in row.written.items()
    for pattern, answer in answers.items()
]
VALUES = {
    "(?!false$|none$|null$).+": "out/checkpoint-100", "(?!no$).+": "INDUCTOR", r"1(?:\.0*)?": 1.0, ".+": 0.5,
    "0*(?:[2-9]|[1-9]\\d+)": 4, "SIZE_BASED_WRAP|NO_WRAP": "NO_WRAP", "true": True, "false": False,
}  # fmt: skip


def value_of(pattern: str):
    return VALUES.get(pattern, pattern.replace("(?:torch\\.)?", "").strip("(?:)").split("|")[0])


@pytest.mark.parametrize(("question", "path", "pattern", "answer"), WRITTEN, ids=lambda part: str(part)[:40])
def test_a_question_that_a_key_decides_is_not_asked(question, path, pattern, answer, tmp_path):
    """Of a config alone, without any script."""
    section, _, key = path.rpartition(".")
    written = {key: value_of(pattern)}
    if section == "fsdp_config":
        content = {"distributed_type": "FSDP", section: {"fsdp_version": 2, **written}}
    elif section:
        content = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, section: written}
    else:
        content = {"output_dir": "out", "learning_rate": 1e-5, "deepspeed": "ds.json", **written}
        (tmp_path / "ds.json").write_text(ZERO)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    used, _ = described(("deepspeed==0.19.8", "accelerate==1.15.0"), Flags(), file)
    assert used.shown.get(question) is answer
    asking = [fault for fault in table().fault if fault.conditions.get("script") == question]
    assert asking


def test_a_question_about_a_script_is_answered_by_a_key_or_listed_as_one_that_none_answers():
    open_questions = {*Path(__file__).with_name("open_questions.txt").read_text().splitlines()}
    asked = {fault.conditions["script"] for fault in table().fault if "script" in fault.conditions}
    answered = {name for name, row in scripts.rows().items() if row.written or row.number}
    assert asked - answered == open_questions
