"""Measures whether a rehearsal says what a GPU holds: TRL's own scripts as rank 0 of eight, counted, then run for real.

python benchmarks/rehearsed.py large      on one GPU: Llama-3-8B with LoRA, and Llama-3.2-1B whole and by DPO
python benchmarks/rehearsed.py            anywhere: the same of a tiny model; without a GPU nothing is run for real

Each line is JSON, the last one of all trainings: bytes that are counted without values, bytes that are counted with
them, the peaks that CUDA allocated in each update, and `error`, the answer of a rehearsal that did not end.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from study.core.shapes import config_of

ROOT = Path(__file__).resolve().parents[1]
WORD = "weights "
SHARED = ["--max_steps=4", "--per_device_train_batch_size=1", "--gradient_accumulation_steps=1", "--bf16=true"]
SHARED += ["--max_grad_norm=0", "--report_to=none", "--save_strategy=no", "--gradient_checkpointing=true"]
LORA = ["--use_peft", "--lora_r=16", "--lora_target_modules=all-linear"]
TRAININGS = {  # TRL's script, the way to train, the model, and the script's words
    "sft-lora": ("trl.scripts.sft", "zero3", "llama3-8b", LORA),
    "sft": ("trl.scripts.sft", "zero2", "llama3.2-1b", []),
    "dpo": ("trl.scripts.dpo", "fsdp2", "llama3.2-1b", []),
}


def main(large: bool) -> None:
    answers = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, (script, arm, model, more) in TRAININGS.items():
            shape, length = (model, 2048) if large else ("llama-micro", 64)
            words = [*SHARED, *more, f"--max_length={length}", f"--output_dir={temporary}/out"]
            words += given(Path(temporary, name), shape, length, script.endswith("dpo"))
            asked = ["virtual", script, "--json", "--ranks=8", "--config-file", f"accelerate_configs/{arm}.yaml"]
            counted = answer([*asked, "--", *words])
            answers[name] = {"counted_bytes": counted.get("peak_bytes"), "error": counted["error"]}
            if torch.cuda.is_available():
                real = answer([*asked, "--real", "--", *words])
                answers[name] |= {"real_bytes": real.get("peak_bytes"), "cuda_bytes": real.get("cuda_peaks")}
                answers[name]["error"] = counted["error"] or real["error"]
            print(json.dumps(answers), flush=True)


def given(folder: Path, shape: str, length: int, is_dpo: bool) -> list[str]:
    """Write a model's config, a tokenizer of one word, and rows that fill a sequence. Return the words for them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(shape) | {"architectures": ["LlamaForCausalLM"]}))
    core = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2, WORD.strip(): 3}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(folder)
    half = WORD * (length // 2)
    row = {"prompt": half, "chosen": half, "rejected": half} if is_dpo else {"text": half + half}
    data = folder / "data"
    data.mkdir()
    (data / "train.jsonl").write_text((json.dumps(row) + "\n") * 64)
    return [f"--model_name_or_path={folder}", f"--dataset_name={data}"]


def answer(words: list[str]) -> dict:
    done = subprocess.run([sys.executable, "-m", "study.cli", *words], cwd=ROOT, capture_output=True, text=True)
    try:
        said = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"error": done.stderr.strip()[-300:]}
    failure = said.get("error")
    return said | {"error": failure["message"] if failure else None}


if __name__ == "__main__":
    main(large=sys.argv[1:] == ["large"])
