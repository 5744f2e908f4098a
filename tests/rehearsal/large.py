"""Large models as rank 0 of 8 and of 64, without their weights: python -m tests.rehearsal.large FILE.csv [PART]

TRL's own scripts and a loop of Accelerate, with stage 3 and bf16, one sequence of 2,048 tokens or 16 images. Processor
seconds are of all threads; the host's memory is the most that a process had. Rows of other runs in the file stay as
they are.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import LlamaConfig, Qwen3MoeConfig, ViTConfig

from tests.rehearsal.material import configs_of_accelerate, data_set, text, write

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {
    "llama-3-8b": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, dtype="bfloat16",
    ),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        norm_topk_prob=True, max_position_embeddings=8192, dtype="bfloat16",
    ),
    "vit-huge": ViTConfig(
        hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=16, patch_size=14
    ),
}  # fmt: skip
VIT = """
import torch
from accelerate import Accelerator
from transformers import AutoModelForImageClassification

accelerator = Accelerator()
model = AutoModelForImageClassification.from_pretrained("vit-huge")
rows = torch.utils.data.TensorDataset(torch.randn(256, 3, 224, 224), torch.randint(0, 2, (256,)))
loader = torch.utils.data.DataLoader(rows, batch_size=16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for images, labels in loader:
    accelerator.backward(model(images, labels=labels).loss)
    optimizer.step()
    optimizer.zero_grad()
"""
USUAL = (
    "--output_dir out --report_to none --bf16 True --dtype bfloat16 --per_device_train_batch_size 1 --max_length 2048 "
    "--gradient_checkpointing True --max_steps 10 "
)
LORA = "--use_peft --lora_r 16 --lora_target_modules all-linear "
RUNS = {  # a script and its words
    "sft": ("trl.scripts.sft", f"{USUAL} --model_name_or_path llama-3-8b --dataset_name long"),
    "sft_lora": ("trl.scripts.sft", f"{USUAL} {LORA} --model_name_or_path llama-3-8b --dataset_name long"),
    "dpo_lora": ("trl.scripts.dpo", f"{USUAL} {LORA} --model_name_or_path llama-3-8b --dataset_name pairs"),
    "sft_moe": ("trl.scripts.sft", f"{USUAL} --model_name_or_path qwen3-30b-a3b --dataset_name long"),
    "vit": ("vit.py", ""),
}


def material(folder: Path) -> None:
    for name, config in CONFIGS.items():
        write(folder, config, (name,))
        tokenizer = json.loads((folder / name / "tokenizer_config.json").read_text())
        (folder / name / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"model_max_length": 8192}))
    data_set(folder / "long", [{"text": text(n, 3000)} for n in range(256)], splits=("train",))
    pairs = [{"prompt": text(n, 200), "chosen": text(n, 3000), "rejected": text(n + 1, 3000)} for n in range(256)]
    data_set(folder / "pairs", pairs, splits=("train",))
    (folder / "vit.py").write_text(VIT)
    configs_of_accelerate(folder)
    zero3 = json.loads((folder / "zero3.yaml").read_text())
    (folder / "zero3.yaml").write_text(json.dumps(zero3 | {"mixed_precision": "bf16"}))


def run(name: str, ranks: int, folder: Path) -> dict:
    script, words = RUNS[name]
    command = [sys.executable, "-m", "study.cli", "virtual", script, f"--ranks={ranks}", "--config_file=zero3.yaml"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(folder / ".cache")}
    options = ["--gpu=H100", "--json", "--timeout=3000", "--", *words.split()]
    with (folder / "answer.json").open("w+") as out:
        process = subprocess.Popen([*command, *options], cwd=folder, env=environment, stdout=out)
        _, _, used = os.wait4(process.pid, 0)  # with the process that it waits for
        out.seek(0)
        answer = json.load(out)
    return {
        "run": name,
        "ranks": ranks,
        "peak_bytes": answer["peak_bytes"],
        "parameters": answer["observed"]["parameters"],
        "processor_s": round(used.ru_utime + used.ru_stime),
        "host_bytes": used.ru_maxrss * 1024,
    }


def main() -> None:
    file, part = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    rows = {(each["run"], each["ranks"]): each for each in csv.DictReader(file.open())} if file.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        material(Path(temporary))
        for name in RUNS:
            for ranks in (8, 64):
                if part not in f"{name} {ranks}":
                    continue
                rows[name, str(ranks)] = run(name, ranks, Path(temporary))
                with file.open("w", newline="") as out:
                    writer = csv.DictWriter(out, rows[name, str(ranks)], lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows.values())


if __name__ == "__main__":
    main()
