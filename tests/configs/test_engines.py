"""Files of one training that name two engines, or recompute twice: each command that reads them says which counts."""

import contextlib
import json
import re
from pathlib import Path

import accelerate
import pytest
import transformers
from packaging.version import Version

from study.cli.diagnosis import diagnose
from study.cli.oom import oom
from study.cli.stack import stack
from study.configs import scripts
from study.configs.arguments import ITS_OWN, Arguments, refused
from study.configs.engines import contradictions, engines, texts_of
from study.configs.oom.training import Described
from study.configs.pasted.read import read
from study.configs.stacks import described
from study.core.library_defaults import library_defaults
from study.known.faults import table
from study.known.stacks import Flags, Stack
from study.known.which_apply import which_apply
from study.predict.front import Wanted
from tests.cases import for_each

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


@for_each(("script", "launcher", "trains", "said"), DECIDED)
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


# What a run asks for, by each kind of file, and whether the Trainer refuses it beside this DeepSpeed config.
CONFIG = {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}
CONFIG = {
    "optimizer": {"type": "AdamW", "params": CONFIG},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
}
CONFIG |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
CONFIG |= {"train_batch_size": 64, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
RIGHT = {"learning_rate": 1e-5, "adam_beta2": 0.95, "weight_decay": 0.1, "warmup_steps": 100, "bf16": True}
RIGHT |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
PARSES = "from transformers import HfArgumentParser, TrainingArguments\nHfArgumentParser(TrainingArguments)\n"
LAUNCHED = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
OTHER = {"learning_rate": 2e-5, "adam_beta2": 0.99, "weight_decay": 0.2, "warmup_steps": 50, "bf16": False}
OTHER |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_grad_norm": 2.0}


def _call(arguments: dict, more: str = "") -> str:
    written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"{more}Trainer(model, TrainingArguments('out', {written})).train()\n"


def _flags(arguments: dict) -> str:
    return " ".join(f"\\\n  --{name} {value}" for name, value in arguments.items())


def _parsed(arguments: dict) -> str:
    """A script whose own arguments have these defaults."""
    added = "".join(f"p.add_argument('--my_{name}', default={value!r})\n" for name, value in arguments.items())
    written = ", ".join(f"{name}=args.my_{name}" for name in arguments)
    return f"{added}args = p.parse_args()\nTrainer(model, TrainingArguments('o', deepspeed='ds.json', {written}))\n"


def _yaml(arguments: dict) -> str:
    return "".join(f"{name}: {value}\n" for name, value in ({"output_dir": "o"} | arguments).items())


ASKING = {
    "script": lambda a: {"train.py": _call({"deepspeed": "conf/ds.json"} | a)},
    "names": lambda a: {
        "train.py": "".join(f"X_{name} = {value!r}\n" for name, value in a.items())
        + f"Trainer(m, TrainingArguments('o', deepspeed='ds.json', {', '.join(f'{each}=X_{each}' for each in a)}))"
    },
    "dictionary": lambda a: {"train.py": f"more = {a!r}\nTrainingArguments('o', deepspeed='ds.json', **more)\n"},
    "argparse": lambda a: {"train.py": _parsed(a), "run.sh": "torchrun --nproc_per_node 8 train.py\n"},
    "command": lambda a: {
        "train.py": PARSES,
        "run.sh": f"deepspeed --num_gpus 8 train.py --deepspeed ds.json {_flags(a)}\n",
    },
    "variables": lambda a: {
        "train.py": PARSES,
        "run.sh": "".join(f"export {name.upper()}={value}\n" for name, value in a.items())
        + "ARGS='--deepspeed ds.json --output_dir out'\n"
        + f"torchrun train.py $ARGS {_flags({name: f'${{{name.upper()}}}' for name in a})}\n",
    },
    "accelerate": lambda a: {"train.py": _call(a), "acc.yaml": LAUNCHED},
    "flag of accelerate": lambda a: {
        "train.py": _call(a),
        "run.sh": "accelerate launch --use_deepspeed --deepspeed_config_file=ds.json --num_processes 8 train.py\n",
    },
    "LLaMA-Factory": lambda a: {"r.yaml": _yaml({"finetuning_type": "full", "deepspeed": "ds.json"} | a)},
    "axolotl": lambda a: {
        "r.yaml": _yaml({"base_model": "m", "deepspeed": "ds.json"} | a).replace(
            "per_device_train_batch", "micro_batch"
        )
    },
    "ms-swift": lambda a: {"r.yaml": _yaml({"tuner_type": "full", "deepspeed": "ds.json"} | a)},
}
DEFAULTS_ARE_KNOWN = ("script", "names", "dictionary", "argparse", "command", "accelerate", "LLaMA-Factory")


def _told(folder: Path, files: dict[str, str], config: dict) -> list[str]:
    folder.mkdir()
    files = files | {"ds.json": json.dumps(config)}
    for name, text in files.items():
        (folder / name).write_text(text)
    answers = diagnose(tuple(str(folder / name) for name in files))
    told = [each["sentence"] for row in answers for each in row.get("findings", ()) if "Trainer refuses" in str(each)]
    assert all(row["fine"] for row in answers) == (not told)
    return told


@pytest.mark.parametrize("by", ASKING)
def test_what_a_run_asks_for_is_compared_with_its_config_as_the_trainer_does(by, tmp_path):
    """By each kind of file, one argument at a time, and none where the config says auto."""
    assert _told(tmp_path / "right", ASKING[by](RIGHT), CONFIG) == []
    for name, value in OTHER.items():
        if by == "argparse" and value is False:  # of what is on or off the command decides
            continue
        (told, *more) = _told(tmp_path / name, ASKING[by](RIGHT | {name: value}), CONFIG)
        assert f"{name} " in told
        of_rows = name in ("per_device_train_batch_size", "gradient_accumulation_steps")  # train_batch_size as well
        assert len(more) <= of_rows
        if by in DEFAULTS_ARE_KNOWN:
            unsaid = {key: each for key, each in RIGHT.items() if key != name}
            told = " ".join(_told(tmp_path / f"without {name}", ASKING[by](unsaid), CONFIG))
            assert re.search(rf"{name} .*by default", told)
    open_config = json.loads(re.sub(r"(?<=: )(?:[\d.e-]+|true|\[[^]]*\])(?=[,}])", '"auto"', json.dumps(CONFIG)))
    assert _told(tmp_path / "auto", ASKING[by](OTHER), open_config | {"zero_optimization": {"stage": 2}}) == []


def test_transformers_refuses_the_same(monkeypatch):
    """Its own comparison, of each argument with another value than the config's."""
    from transformers import TrainingArguments  # not in each worker of the tests: it takes seconds
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    monkeypatch.setattr("transformers.integrations.deepspeed.dep_version_check", lambda _: None)
    for name, value in ({"": None} | OTHER).items():
        written = TrainingArguments("o", report_to="none", use_cpu=True, **(RIGHT | ({name: value} if name else {})))
        config = HfTrainerDeepSpeedConfig(json.loads(json.dumps(CONFIG | {"train_batch_size": "auto"})))
        config.trainer_config_process(written)
        with contextlib.suppress(ValueError):
            config.trainer_config_finalize(written, None, 1000)
        content = CONFIG | {"train_batch_size": "auto"}
        asked = Arguments(RIGHT | ({name: value} if name else {}), defaults=library_defaults("trainer")[""])
        assert len(config.mismatches) == len([*refused(asked, content)]) == bool(name)


SFT = "from trl import SFTConfig\nSFTConfig('o', deepspeed='ds.json')\n"


@pytest.mark.parametrize("name", ["SFT", "DPO", "GRPO", "KTO", "Reward", "RLOO"])
def test_what_trls_configs_inherit_is_compared_as_transformers_does(name, monkeypatch, tmp_path):
    """Each key alone is refused by both, but for those in which TRL's classes and releases differ."""
    import trl  # it takes seconds as well
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    monkeypatch.setattr("transformers.integrations.deepspeed.dep_version_check", lambda _: None)
    written = getattr(trl, f"{name}Config")("o", report_to="none", use_cpu=True, bf16=False)
    config = HfTrainerDeepSpeedConfig(json.loads(json.dumps(CONFIG | {"train_batch_size": "auto"})))
    config.trainer_config_process(written)
    with contextlib.suppress(ValueError):
        config.trainer_config_finalize(written, None, 1000)
    theirs = {re.search(r"hf (\S+?)[=|]", each)[1] for each in config.mismatches}
    script = {"train.py": f"from trl import {name}Config\n{name}Config('o', deepspeed='ds.json')\n"}
    ours = " ".join(_told(tmp_path / "job", script, CONFIG | {"train_batch_size": "auto"}))
    assert {each for each in theirs if re.search(rf"\b{each.strip('[]').split('+')[0]}\b", ours)} == theirs - {*ITS_OWN}
    assert "max_grad_norm" in theirs
    assert ours.count("The Trainer refuses") == len(theirs - {*ITS_OWN})


REST = ", ".join(f"{name}={value!r}" for name, value in RIGHT.items() if name != "learning_rate")
UNKNOWN = {
    "a call": "TrainingArguments(deepspeed='ds.json', learning_rate=rate(), **more)\n",
    "a loop of one's own": "engine, *_ = deepspeed.initialize(model=model, config='ds.json', learning_rate=1)\n",
    "a name with two values": f"for lr in (1, 2):\n    SFTConfig(deepspeed='ds.json', learning_rate=lr, {REST})\n",
    "set later": f"a = SFTConfig(deepspeed='ds.json', learning_rate=1, {REST})\na.learning_rate = 1e-5\n",
    "a class of one's own": "@dataclass\nclass MySFTConfig(SFTConfig): pass\nMySFTConfig(deepspeed='ds.json')\n",
}


@pytest.mark.parametrize("script", UNKNOWN)
def test_what_is_not_known_contradicts_nothing(script, tmp_path):
    assert _told(tmp_path / "job", {"train.py": UNKNOWN[script]}, CONFIG) == []


def test_a_default_that_a_command_may_replace_is_not_surely_refused(tmp_path):
    files = {"train.py": _parsed(RIGHT | {"learning_rate": 2e-5})}
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "train.py").write_text(files["train.py"])
    told = [*contradictions(texts_of([tmp_path / "ds.json", tmp_path / "train.py"]))]
    assert [(each.id, each.is_surely_wrong) for each in told] == [("arguments_may_contradict", False)] * len(told) != []
    command = "torchrun train.py --my_learning_rate 1e-5"
    assert [*contradictions(texts_of([tmp_path / "ds.json", tmp_path / "train.py", command]))] == []


def test_the_yamls_precision_is_that_of_the_trainer(tmp_path):
    """As transformers 5.23.0 with accelerate 1.15.0: it refuses mixed_precision bf16 where no argument says it."""
    yaml = YAML["DeepSpeed"] + "mixed_precision: bf16\n"
    for argument, is_refused in (("", True), ("bf16=True", False), ("fp16=True", False)):
        words = job(tmp_path, TRAINER.format(argument), yaml)
        assert ["bf16" in each.sentence for each in contradictions(texts_of(words))] == [True] * is_refused


FLAGGED = [  # of the launcher, beside a yaml with 4 micro-batches and a Trainer with 8
    ("", True),
    ("--gradient_accumulation_steps 8", False),
    ("--gradient-accumulation-steps=2", True),
    ("--multi_gpu", False),
    ("--gradient_accumulation_steps 8 --mixed_precision bf16", True),
]


@pytest.mark.parametrize("is_in_yaml", [True, False])
@pytest.mark.parametrize(("flags", "is_refused"), FLAGGED)
def test_a_flag_of_the_launcher_counts_before_its_yaml(flags, is_refused, is_in_yaml, tmp_path, capsys):
    """As deepspeed_launcher sets the variables that the Trainer's plugin reads (utils/launch.py:569 of 1.15.0)."""
    yaml = YAML["DeepSpeed"] + "  gradient_accumulation_steps: 4\n" if is_in_yaml else ""
    if not yaml:
        flags = f"--use_deepspeed {flags or '--gradient_accumulation_steps 4'}".replace(
            "--use_deepspeed --multi", "--multi"
        )
    words = job(tmp_path, TRAINER.format("gradient_accumulation_steps=8"), yaml, f"accelerate launch {flags} train.py")
    words = [word for word in words if yaml or not word.endswith("acc.yaml")]
    told = [each.id for each in contradictions(texts_of(words)) if not each.id.startswith("engine")]
    assert told == ["arguments_contradicted"] * is_refused
    printed = _of_stack(words, capsys)
    assert printed.count("The Trainer refuses") == is_refused, "once, and not by what the text says"


def test_each_trainer_of_a_script_is_compared_with_the_batch_of_all_ranks(tmp_path):
    calls = [f"TrainingArguments('o', deepspeed='ds.json', per_device_train_batch_size={rows})\n" for rows in (16, 2)]
    (tmp_path / "train.py").write_text("".join(calls))
    (tmp_path / "ds.json").write_text('{"train_batch_size": 64}')
    (tmp_path / "run.sh").write_text("deepspeed --num_gpus 4 train.py\n")
    assert [each.id for each in contradictions(texts_of(tmp_path.iterdir()))] == ["arguments_contradicted"]


@pytest.mark.parametrize(("passes", "is_refused"), [(8, True), (4, False), ("'auto'", False)])
@pytest.mark.parametrize("named", ["args.deepspeed", "config_path", "'ds.json'"])
def test_a_config_that_a_script_names_by_an_argument_is_the_one_that_is_given(
    named, passes, is_refused, tmp_path, capsys
):
    (tmp_path / "train.py").write_text(TRAINER.format(f"deepspeed={named}, gradient_accumulation_steps={passes}"))
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 4}')
    printed = _of_stack([tmp_path / "train.py", tmp_path / "ds.json"], capsys)
    assert printed.count("The Trainer refuses") == is_refused


PLACED = "def main():\n    args = TrainingArguments('o', deepspeed='ds.json')\n"
PLACED += "    model = X.from_pretrained('m', device_map={})\n"
LOADED = "model = X.from_pretrained('m', device_map={})\nargs = TrainingArguments('o', deepspeed='ds.json')\n"
CLIPPED = OWN.format("") + "accelerator.{}clip_grad_norm_(model.parameters(), {})\n"
CONTRADICTING = [
    (PLACED.format("'auto'"), ZERO, "device_map_refused"),
    (PLACED.format("{'': 0}"), ZERO, "device_map_refused"),
    (PLACED.format("None"), ZERO, None),
    (PLACED.format("'auto'"), ZERO.replace("3", "2"), "device_map_spreads"),
    (LOADED.format("'auto'"), ZERO, "device_map_spreads"),
    (LOADED.format("{'': 0}"), ZERO, None),
    (PLACED.replace("def main():", "def load():\n    pass\ndef main():").format("maps[0]"), ZERO, None),
    (CLIPPED.format("", 0.5), YAML["DeepSpeed"], "clipping_of_config"),
    (CLIPPED.format("", "max_norm=0.5"), YAML["DeepSpeed"] + "  gradient_clipping: 2.0\n", "clipping_of_config"),
    (CLIPPED.format("", 0.5), YAML["DeepSpeed"] + "  gradient_clipping: 0.5\n", None),
    (CLIPPED.format("", 1.0), YAML["DeepSpeed"], None),
    (CLIPPED.format("", 0.5), YAML["DeepSpeed"] + "  gradient_clipping: auto\n", "clipping_of_config"),
    (CLIPPED.format("", "limit"), YAML["DeepSpeed"], None),
    (CLIPPED.format("", 0.5), YAML["FSDP"], None),
    (CLIPPED.format("utils.", 0.5), YAML["DeepSpeed"], None),
]


@for_each(("script", "config", "said"), CONTRADICTING)
def test_a_line_that_ends_the_training_or_does_nothing_beside_its_config_is_told_beforehand(
    script, config, said, tmp_path
):
    config_file = tmp_path / ("ds.json" if config.startswith("{") else "acc.yaml")
    config_file.write_text(config)
    (tmp_path / "train.py").write_text(script)
    told = [*contradictions(texts_of([tmp_path / "train.py", config_file]))]
    assert [each.id for each in told] == [said] * bool(said)
    assert not said or "train.py:" in told[0].sentence


def _of_stack(words, capsys) -> str:
    capsys.readouterr()
    stack(tuple(map(str, words)), flags=Flags())
    return " ".join(capsys.readouterr().out.split())


def _of_diagnose(words, capsys) -> str:
    capsys.readouterr()
    diagnose(tuple(words))
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("has_steps", [True, False])
@pytest.mark.parametrize("limit", [0.5, 1.0])
def test_a_start_that_is_refused_is_surely_wrong_by_each_command(limit, has_steps, tmp_path, capsys):
    """And if the log shows that it was not refused, they say so."""
    files = {"train.py": SFT, "ds.json": json.dumps({"zero_optimization": {"stage": 3}, "gradient_clipping": limit})}
    files["train.log"] = (
        "transformers==5.23.0\n"
        + "{'loss': 2.1, 'grad_norm': 1.1}\n" * has_steps
        + "CUDA out of memory. Tried to allocate 9.0 GiB"
    )
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    words = tuple(str(tmp_path / name) for name in files)
    for ask in (
        lambda: oom(words, model=Wanted(), training=Described()),
        lambda: stack(words, flags=Flags()),
        lambda: diagnose(words)[0],
    ):
        answered = ask()
        assert answered["fine"] == (limit != 0.5)  # why memory was full is likely, and not sure
        said = " ".join(capsys.readouterr().out.split())
        assert ("The Trainer refuses to start: gradient_clipping is 0.5" in said) == (limit == 0.5)
        assert ("The log shows steps: these are not its script" in said) == (limit == 0.5 and has_steps)


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
    assert said("accelerate launch --multi_gpu train.py", "none", YAML["DeepSpeed"]) == ["engine_of_launcher"]
    assert "DDP trains" in next(contradictions(texts_of([*tmp_path.iterdir()]))).sentence
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


@for_each("condition", table().questions)
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


@for_each(("question", "path", "pattern", "answer"), WRITTEN, ids=lambda part: str(part)[:40])
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


# --- the version of FSDP, which a release of transformers decides; and a file of which the name alone is given

FSDP_OF_TRAINER = [
    'args = TrainingArguments(output_dir="o", fsdp="full_shard auto_wrap")',
    'args = SFTConfig(output_dir="o", fsdp=["shard_grad_op"])',
    "args = TrainingArguments(fsdp=True)",
    "# torchrun train.py --fsdp 'full_shard offload'",
]
BY_RELEASE = {"4.57.6": "FSDP1", "5.9.0": "FSDP1", "5.10.1": "FSDP2", "5.23.0": "FSDP2", "5.10.0.dev0": "FSDP"}
OPEN_VERSION = "[fsdp_of_trainer]"
NEWEST = {name: Version(releases[-1]) for name, releases in table().asked.items()}
FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.83 GiB. GPU 0 has 79.15 GiB."


@for_each("release", [*BY_RELEASE, ""])
@for_each("asks", FSDP_OF_TRAINER)
def test_the_release_of_transformers_decides_which_fsdp_the_trainer_makes(asks, release, tmp_path):
    listed = f"torch==2.13.0\ntransformers=={release}" if release else "torch==2.13.0"
    expected = BY_RELEASE.get(release, "FSDP")
    assert read(f"{asks}\n{listed}").said["stage"] == expected
    (tmp_path / "train.py").write_text(asks)
    (tmp_path / "list.txt").write_text(listed)
    (tmp_path / "args.yaml").write_text("{output_dir: o, learning_rate: 1, fsdp: full_shard}")
    given = [((f"{tmp_path}/list.txt", f"{tmp_path}/train.py"), None), ((f"{tmp_path}/list.txt",), "args.yaml")]
    for words, config in given:
        stack, notes = described(words, Flags(), tmp_path / config if config else None)
        assert stack.said["stage"] == expected
        assert (OPEN_VERSION in " ".join(notes)) == (expected == "FSDP"), notes


# What trains, by the release, the version in the Trainer's fsdp_config, and that of the launcher.
BY_VERSIONS = {
    ("4.57.6", "1", "2"): "FSDP2",
    ("4.57.6", "2", "1"): "FSDP1",
    ("4.57.6", "2", ""): "FSDP1",
    ("4.57.6", "", "2"): "FSDP2",
    ("5.9.0", "1", "2"): "FSDP1",
    ("5.9.0", "2", ""): "FSDP2",
    ("5.9.0", "", "2"): "FSDP1",
    ("5.23.0", "1", ""): "FSDP1",
    ("5.23.0", "2", "1"): "FSDP2",
    ("5.23.0", "", "1"): "FSDP2",
    ("5.0.0.dev0", "2", "1"): "FSDP",
    ("", "2", ""): "FSDP",
    ("", "", "2"): "FSDP",
    ("", "2", "2"): "FSDP2",
}


@for_each("form", ["{{'version': {}}}", "dict(\n    fsdp_version={})", "a file of arguments"])
@for_each(("release", "own", "launched"), BY_VERSIONS)
def test_the_release_decides_whose_version_of_fsdp_counts(release, own, launched, form, tmp_path):
    expected = BY_VERSIONS[release, own, launched]
    (tmp_path / "list.txt").write_text(f"transformers=={release}" if release else "torch==2.13.0")
    in_call = f", fsdp_config={form.format(own)}" if own else ""
    (tmp_path / "train.py").write_text(f'TrainingArguments(fsdp="full_shard"{in_call})')
    (tmp_path / "f.yaml").write_text(YAML["FSDP"].replace("2", launched or "''"))
    words = [f"{tmp_path}/list.txt", f"{tmp_path}/train.py"]
    config = tmp_path / "f.yaml" if launched else None
    if form == "a file of arguments":
        if launched:
            return  # of two configs one counts
        config, words = tmp_path / "args.json", words[:1]
        arguments = {"output_dir": "o", "learning_rate": 1, "fsdp": "full_shard"}
        config.write_text(json.dumps(arguments | ({"fsdp_config": {"version": int(own)}} if own else {})))
    stack, notes = described(tuple(words), Flags(), config)
    assert stack.said["stage"] == expected
    unread = expected != "FSDP" and own and expected != f"FSDP{own}"
    assert ("[fsdp_version_unread]" in " ".join(notes)) == bool(unread), notes
    text = "\n".join(Path(each).read_text() for each in [*words, *([config] if config else [])])
    assert read(text).said["stage"] == expected


def test_a_file_of_the_trainers_fsdp_that_is_not_here_leaves_the_version_open():
    assert read("train.py --fsdp full_shard --fsdp_config fsdp.json\ntransformers==5.23.0").said["stage"] == "FSDP"


def test_an_open_version_asks_for_it_in_faults_of_fsdp_alone():
    stack = Stack.of(NEWEST, config={"engine": "FSDP"})
    stages = {each.fault.id: each.fault.conditions.get("stage", []) for each in which_apply(stack)}
    assert any("stage" in each.unknown for each in which_apply(stack))
    assert not [id for id, ways in stages.items() if ways and not {"fsdp1", "fsdp2"} & {*map(str, ways)}]


NAMES = {"ddp.yaml": "DDP", "cfg/fsdp2.yaml": "FSDP2", "zero1.json": 1, "ds_zero3.json": 3}


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_file_is_a_hint_and_its_content_a_fact(name, tmp_path, capsys):
    command = f"accelerate launch --config_file {name} train.py"
    hinted = read(command)
    assert (hinted.said["stage"], hinted.said["stage_by"]) == (NAMES[name], name)
    content = read(f"{command}\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2")
    assert content.said["stage"] == 2
    assert "stage_by" not in content.said
    (tmp_path / "launch.sh").write_text(command)
    said = Flags(stage=3, optimizer="adafactor")
    words = ("deepspeed==0.19.8", f"{tmp_path}/launch.sh")
    hinted_stack, notes = described(words, Flags(optimizer="adafactor"))
    assert "[engine_by_name]" in " ".join(notes)
    flagged, notes = described(words, said)
    assert "[engine_by_name]" not in " ".join(notes), "a flag is a fact"
    answers = {each.fault.id: each.answer for each in which_apply(hinted_stack)}
    assert answers.get("L-69") == ("likely" if name.endswith(".json") else None)
    assert {each.fault.id: each.answer for each in which_apply(flagged)}["L-69"] == "applies"
    for ask in (
        lambda: diagnose((command,)),
        lambda: oom((f"{command}\n{FULL}",), model=Wanted(), training=Described()),
    ):
        ask()
        assert "[engine_by_name]" in capsys.readouterr().out
