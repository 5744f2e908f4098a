"""An ordinary Accelerate loop. Two lines were added: the import, and `with watch(...)` around the loop.

accelerate launch --config_file accelerate_configs/zero2.yaml examples/accelerate_loop.py --run_dir runs/mine

With --state FOLDER it continues from what an earlier run has saved there, and saves at the end, under every arm.
"""

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from study.watch import watch


def synthetic_reviews(rows: int, tokens: int = 32) -> TensorDataset:
    """A review is positive if its first token is from the upper half of the vocabulary."""
    ids = torch.randint(0, 1000, (rows, tokens), generator=torch.Generator().manual_seed(0))
    return TensorDataset(ids, (ids[:, 0] >= 500).long())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--run_dir", default="runs/accelerate_loop")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--state")
    args = parser.parse_args()
    on_cpus = "LOCAL_RANK" in os.environ and not torch.cuda.is_available()
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    handlers = [InitProcessGroupKwargs(backend="gloo")] if on_cpus and deepspeed else []
    cpu = on_cpus and not deepspeed  # otherwise each rank would train alone
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=args.accumulation, kwargs_handlers=handlers)
    set_seed(42)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    model = BertForSequenceClassification(BertConfig(vocab_size=1000, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, args.steps * accelerator.num_processes)
    data = synthetic_reviews(4 * accelerator.num_processes * args.accumulation * args.steps)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    if args.state and Path(args.state).is_dir():
        accelerator.load_state(args.state)

    with watch(accelerator, model, optimizer, run_dir=args.run_dir):
        model.train()
        for ids, labels in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=labels).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    if args.state:  # all ranks save: under ZeRO each of them has a part. `if accelerator.is_main_process` would hang
        accelerator.save_state(args.state)
    accelerator.print(f"last loss {loss.item():.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
