"""The stack that words describe: of any length, in any script."""

from pathlib import Path

import pytest

from study.cli.diagnosis import diagnose
from study.cli.stack import stack
from study.configs.mistakes import recognised
from study.configs.pasted.read import read
from study.configs.stacks import described
from study.core.errors import Stop
from study.known.stacks import Flags


@pytest.mark.parametrize("letter", ["x", "\u8bad"])
@pytest.mark.parametrize("length", [85, 199, 200, 4000])
def test_a_text_in_quotes_may_be_longer_than_the_name_of_a_file(letter, length):
    """A name has 255 bytes at most, and a letter has up to four of them."""
    used, _ = described((f"deepspeed==0.18.2 zero stage 3\n{letter * length}\n",), Flags())
    assert (str(used.releases["deepspeed"]), used.said["stage"]) == ("0.18.2", 3)


@pytest.mark.parametrize("name", ["train.py", "run.sh", "train.ipynb"])
def test_a_script_in_place_of_a_config_is_called_one(name, tmp_path):
    (tmp_path / name).write_text("x = {'a': 1}\nfor y: z:\n")
    with pytest.raises(Stop) as stop:
        recognised(tmp_path / name)
    assert stop.value.what.endswith(f"{name} is a script, and no config")
    assert stop.value.remedy.startswith("give it without --config, as a file")


@pytest.mark.parametrize(
    ("script", "trainer"),
    [
        ("from trl import SFTConfig\naccelerator.backward(loss)\n", "own"),
        ("import trl\nmodel, loader = accelerator.prepare(model, loader)\n", "own"),
        ("from trl import DPOTrainer\ntrainer = DPOTrainer(model)\n", "trl"),
        ("from transformers import Trainer\ntrainer = Trainer(model)\n", "trainer"),
        ("import torch\nmodel.train()\n", "trl"),  # it constructs nothing: the list alone says it
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_trainer_is_what_a_script_constructs_and_not_what_it_imports_or_lists(script, trainer, is_first, tmp_path):
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "requirements.txt").write_text("transformers==4.56.0\ntrl==0.23.0\n")
    words = [str(tmp_path / "requirements.txt"), str(tmp_path / "train.py")]
    used, notes = described(tuple(words[::-1] if is_first else words), Flags())
    assert used.said["trainer"] == trainer
    assert trainer == "trl" or "trainer trl" not in " ".join(notes)


@pytest.mark.parametrize(("script", "refused"), [("Trainer(model)", True), ("accelerator.backward(loss)", False)])
@pytest.mark.parametrize(
    ("said", "name", "config", "written"),
    [
        (
            "gradient_accumulation_steps=2",
            "gradient accumulation 2",
            '"gradient_accumulation_steps": 8',
            "accumulation 8",
        ),
        ("fp16=True", "precision fp16", '"bf16": {"enabled": true}', "precision cast to bfloat16"),
        ("bf16=True", "precision bf16", '"fp16": {"enabled": true}', "precision cast to float16"),
    ],
)
def test_a_trainer_that_refuses_two_values_is_not_said_to_take_one(
    said, name, config, written, script, refused, tmp_path
):
    (tmp_path / "train.py").write_text(f"import deepspeed\n{said}\n{script}\n")
    (tmp_path / "ds.json").write_text(f'{{"zero_optimization": {{"stage": 3}}, {config}}}')
    _, notes = described((str(tmp_path / "train.py"),), Flags(), tmp_path / "ds.json")
    words = " ".join(notes)
    assert (
        f"The Trainer refuses to start with both: the config's {written}, and {name} of train.py:2." in words
    ) == refused, words
    assert (f"The config's {written} counts, and not {name} of train.py:2." in words) != refused, words


@pytest.mark.parametrize(
    ("config", "script", "recomputes"),
    [
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_activation_checkpointing: WORD}",
            "",
            {"false": None, "true": True},
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_activation_checkpointing: WORD}",
            "model.gradient_checkpointing_enable()\n",
            {"false": True, "true": True},
        ),
        (
            "output_dir: x\nlearning_rate: 1\nfsdp: full_shard auto_wrap\ngradient_checkpointing: true\n"
            "fsdp_config: {activation_checkpointing: WORD}",
            "",
            {"false": True, "true": True},
        ),
    ],
)
def test_fsdps_own_recomputing_that_is_off_says_nothing_of_the_other(config, script, recomputes, tmp_path):
    """A script, or the Trainer's own key, may recompute all the same: no sentence says that the config counts."""
    file, code = tmp_path / "a.yaml", tmp_path / "t.py"
    code.write_text(f"import torch\n{script}")
    for word, expected in recomputes.items():
        file.write_text(config.replace("WORD", word))
        used, notes = described((str(code),), Flags(), file)
        assert used.said.get("checkpointing") is expected
        assert not [note for note in notes if "counts" in note]


@pytest.mark.parametrize(("text", "differs"), [("bf16=True", False), ("fp16=True", True)])
@pytest.mark.parametrize("kind", ["FSDP", "MULTI_GPU"])
def test_a_scripts_bf16_is_that_of_its_config(text, differs, kind, tmp_path):
    """It may be of weights or of autocast: the config says which."""
    (tmp_path / "train.py").write_text(f"from trl import SFTConfig\nargs = SFTConfig({text})\n")
    (tmp_path / "accelerate.yaml").write_text(f"distributed_type: {kind}\nmixed_precision: bf16\nnum_processes: 4\n")
    _, notes = described((str(tmp_path / "train.py"),), Flags(), tmp_path / "accelerate.yaml")
    assert ("counts, and not precision" in " ".join(notes)) == differs


def test_a_launch_command_in_a_file_of_one_line_is_read(tmp_path):
    (tmp_path / "run.sh").write_text(
        "trl sft --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --bf16 true"
    )
    used, _ = described((str(tmp_path / "run.sh"),), Flags())
    assert (used.said["passes"], used.said["precision"]) == (8, "bf16")


SEEN_BESIDE = (
    "grad_norm is four times smaller than with DDP",
    "slower than DDP on 16 GPUs",
    "the norm differs from ZeRO-1",
    "the norm is wrong with stage 2, as with FSDP2",
    "the loss is higher than in fp32",
    "the loss is nan in fp16, and not in bf16",
    "the loss differs from one GPU with gradient_accumulation_steps=8",
    "the memory is higher than with LoRA and sgd",
    "the step is slower than with cpu offload and without gradient checkpointing",
    "grad_norm is smaller than with transformers 4.46.1 and TRL's SFTTrainer",
)


@pytest.mark.parametrize("seen", SEEN_BESIDE)
def test_what_was_seen_says_nothing_of_the_training(seen, tmp_path, monkeypatch):
    """It names what it is compared with: a config, a flag and a script alone say what trains."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    Path("requirements.txt").write_text("torch==2.5.1\ntransformers==4.48.3\naccelerate==1.3.0\ndeepspeed==0.16.3\n")
    script = "trainer = Trainer(model, TrainingArguments(deepspeed='ds.json', gradient_accumulation_steps=4))\n"
    Path("train.py").write_text(script)

    def told(symptom: str | None) -> dict[str, str]:
        words = ("requirements.txt", "train.py")
        answer = stack(words, flags=Flags(ranks=8), config=Path("ds.json"), symptom=symptom)
        return {row["id"]: row["answer"] for row in answer["faults"]}

    assert told(seen) == told(None)
    text = "\n".join(Path(name).read_text() for name in ("requirements.txt", "train.py", "ds.json"))
    beside, alone = read(text, seen), read(text)
    assert (beside.said, beside.releases, beside.contradictions) == (alone.said, alone.releases, [])


@pytest.mark.parametrize(("release", "is_known"), [("0.19.8", True), ("0.18.1", False)])
def test_a_config_that_is_surely_wrong_is_no_fine_stack_and_of_whose_release_is_said(
    release, is_known, tmp_path, capsys
):
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, "fp16": {"enabled": true}}'
    )
    told = stack((f"deepspeed=={release}",), flags=Flags(), config=tmp_path / "ds.json")
    assert [each["id"] for each in told["mistakes"]] == ["value_refused"]
    assert told["fine"] is False
    said = " ".join(capsys.readouterr().out.split())
    assert ("compared with deepspeed 0.19.8: of 0.18.1 nobody read them." in said) == (not is_known)
    (tmp_path / "list.txt").write_text(f"deepspeed=={release}\n")
    diagnose((str(tmp_path / "list.txt"), str(tmp_path / "ds.json")))
    said = " ".join(capsys.readouterr().out.split())
    assert ("compared with deepspeed 0.19.8: of 0.18.1 nobody read them." in said) == (not is_known)


def test_a_sentence_of_what_was_seen_names_the_command_that_reads_it(capsys):
    for words, is_named in (("loss spike", True), ("loss", False)):
        stack(("deepspeed==0.19.8",), flags=Flags(), symptom=words)
        assert ("`study diagnose --symptom 'loss spike'`" in " ".join(capsys.readouterr().out.split())) == is_named


def test_a_config_that_is_given_is_not_said_to_be_known_by_its_name_alone(tmp_path):
    (tmp_path / "z3.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "train.py").write_text("args = TrainingArguments(deepspeed='z3.json')\n")
    for config, is_told in ((None, True), (tmp_path / "z3.json", False)):
        _, notes = described((str(tmp_path / "train.py"),), Flags(), config)
        assert ("by its name alone" in " ".join(notes)) == is_told


@pytest.mark.parametrize("script", ["gradient_accumulation_steps=8", ""])
def test_a_release_older_than_all_tested_is_told_what_the_oldest_has_and_the_script_meets(script, tmp_path, capsys):
    """Of the Trainer with accumulation: that its micro-batches count alike, whatever their labels."""
    (tmp_path / "train.py").write_text(
        f"from transformers import Trainer, TrainingArguments\nargs = TrainingArguments('o', {script})\n"
        "Trainer(model, args).train()\n"
    )
    stack(("transformers==4.44.0", "deepspeed==0.15.4", str(tmp_path / "train.py")), flags=Flags(stage=2))
    assert ("[passes-with-few-labels-count-as-much]" in capsys.readouterr().out) == bool(script)
