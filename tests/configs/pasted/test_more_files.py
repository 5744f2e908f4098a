"""Whoever gives more files beside a symptom is told no less than who gives the symptom alone."""

import itertools

import pytest

from study.cli.diagnosis import diagnose

SCRIPT = """
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

config = SFTConfig(output_dir="out", max_length=4096, save_steps=50, gradient_checkpointing=True, bf16=True)
trainer = SFTTrainer(model="Qwen/Qwen3-0.6B", args=config)
trainer.train()
"""
FILES = {
    "ds.json": '{"zero_optimization": {"stage": 3},\n"bf16": {"enabled": true}}',
    "fsdp.yaml": "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\nmixed_precision: bf16\nnum_processes: 4\n",
    "train.py": SCRIPT + "\n" * 60,  # longer than a question
    "freeze.txt": "torch==2.6.0\ntransformers==4.51.3\ntrl==0.17.0\naccelerate==1.6.0\n",
}
SETS = [names for count in (1, 3, 4) for names in itertools.combinations(FILES, count)]
SYMPTOMS = [
    "the loss jumps after resuming from a checkpoint",
    "loss jumps after resuming",
    "on resume the loss starts over",
    "it hangs when saving with ZeRO 3",
    "the loss does not decrease",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ids(*files: str, symptom: str = "") -> list[str]:
    told = diagnose(files, symptom=symptom)[0]
    return [each["id"] for each in told["found"]]


@pytest.mark.parametrize("names", SETS, ids="+".join)
@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_what_a_symptom_means_is_told_whatever_files_are_beside_it(symptom, names, folder):
    alone = ids(symptom=symptom)
    assert alone
    assert ids(*names, symptom=symptom)[:1] == alone[:1]


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_a_symptom_in_a_file_is_that_of_the_option(symptom, folder):
    (folder / "note.txt").write_text(symptom)
    assert ids("note.txt", *FILES)[:1] == ids(symptom=symptom)[:1]


def test_a_yaml_is_answered_as_with_the_json_that_it_names(folder):
    (folder / "small.json").write_text('{"zero_optimization": {"stage": 2, "reduce_bucket_size": 500000}}')
    yaml = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {}\n"
    (folder / "arm.yaml").write_text(yaml.format("small.json"))
    (folder / "gone.yaml").write_text(yaml.format("gone.json"))
    by_json = ids("small.json", symptom="slow")
    assert "small-buckets-slow" in by_json
    assert ids("arm.yaml", symptom="slow") == ids("arm.yaml", "small.json", symptom="slow") == by_json
    assert "small-buckets-slow" not in ids("gone.yaml", symptom="slow")
    # What a script names counts in its place.
    (folder / "own.py").write_text("args = TrainingArguments(deepspeed='ds.json')\n")
    _, told, _ = diagnose(("own.py", "arm.yaml"), symptom="slow")
    assert told["found"] == []
