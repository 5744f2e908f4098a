"""A small loop on two ranks, run once for each everyday mistake in its arguments: everyday.py FOLDER MISTAKE ..."""

import contextlib
import copy
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from study.watch import watch

STEPS = 12
PASSES = 4
CUDA_ERROR = (
    "CUDA out of memory. Tried to allocate 3.79 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is "
    "free. Including non-PyTorch memory, this process has 77.90 GiB memory in use. Of the allocated memory 75.10 GiB "
    "is allocated by PyTorch, and 1.30 GiB is reserved by PyTorch but unallocated."
)


def train(folder: Path, mistake: str) -> None:
    by_hand = mistake in ("cleared", "no_sync", "right_by_hand")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1 if by_hand else PASSES)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    trained = copy.deepcopy(model) if mistake == "optimizer_of_a_copy" else model
    rate = 1e-2 if mistake == "unequal_rates" and accelerator.process_index else 1e-3
    optimizer = torch.optim.AdamW(trained.parameters(), lr=rate)
    data = TensorDataset(torch.randn(STEPS * PASSES * 8, 32, generator=torch.Generator().manual_seed(1)))
    rows = 4 - 2 * accelerator.process_index if mistake == "unequal_rows" else 4
    loader = DataLoader(data, rows)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    loader = loader if mistake in ("same_rows", "unequal_rows") else accelerator.prepare(loader)
    called = model if mistake == "unprepared" else prepared
    batches = iter(loader)
    with watch(accelerator, prepared, optimizer, run_dir=folder / mistake):
        for number in range(STEPS * PASSES):
            if mistake == "oom" and number == 0:
                raise torch.OutOfMemoryError(CUDA_ERROR)
            (batch,) = next(batches)
            with _pass(accelerator, called, mistake, number):
                loss = called(batch).pow(2).mean()
                if mistake == "divided_twice" or by_hand:
                    loss = loss / PASSES
                accelerator.backward(loss)
                if not by_hand or (number + 1) % PASSES == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                if mistake == "cleared" or number == STEPS * PASSES - 2:  # once is no mistake
                    optimizer.zero_grad()
                if mistake == "accumulate_unused" and number + 1 == STEPS:
                    break
    accelerator.free_memory()


def _pass(accelerator: Accelerator, model, mistake: str, number: int):
    if mistake == "right_by_hand" and (number + 1) % PASSES:
        return accelerator.no_sync(model)
    if mistake in ("accumulate_unused", "no_sync", "cleared", "right_by_hand"):
        return contextlib.nullcontext()
    return accelerator.accumulate(model)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        with contextlib.suppress(torch.OutOfMemoryError):
            train(Path(sys.argv[1]), name)
