"""Measure the cost of the watch: blocks of steps with and without it take turns within one run.

python -m study.watcher.cost reports/cpu-2core/watch_cost.json

The cost of a pair of blocks is a ratio of CPU seconds, since other programs on this machine change the wall time.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from study.measure import hardware
from study.watcher.loop import Loop, Step
from study.watcher.steps import Counts, StepLog

PAIRS = 300
STEPS = 2  # of a block
WIDTH = 768  # steps of some 30 ms on a thread
TINY = 16  # steps that take hardly longer than the watch


def pairs(folder: Path, width: int) -> list[tuple[float, float]]:
    """Return the CPU seconds of a step with the watch and without it, of each pair of blocks."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.utils.data.TensorDataset(torch.randn(2 * (PAIRS + 1) * STEPS * 32, width))
    loader = iter(torch.utils.data.DataLoader(rows, 32))
    log = StepLog(folder, 0)

    def ended(step: Step) -> None:
        log.add(Counts(True, step.passes, step.row_count, step.token_count, step.rate), step.loss)

    def block(watched: bool) -> float:
        loop = Loop(None, model, optimizer, log, ended, lambda error: sys.exit(str(error)))
        if watched:
            loop.attach()
            log.begin()
        begin_s = time.process_time()
        for _ in range(STEPS):
            model(next(loader)[0]).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        spent_s = time.process_time() - begin_s
        loop.detach()
        return spent_s / STEPS

    measured = []
    for pair in range(PAIRS + 1):
        first = bool(pair % 2)  # neither kind is always the first
        one, other = block(first), block(not first)
        measured.append((one, other) if first else (other, one))
    return measured[1:]  # the first is a warm-up


def main(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        measured = np.array(pairs(Path(folder), WIDTH))
        tiny = np.array(pairs(Path(folder), TINY))
    costs = measured[:, 0] / measured[:, 1] - 1
    medians = np.median(np.random.default_rng(0).choice(costs, (10_000, len(costs))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    result = {"cost": np.median(costs), "low": low, "high": high, "step_cpu_s": np.median(measured[:, 1])}
    result |= {"added_cpu_s": np.median(tiny[:, 0] - tiny[:, 1])}
    about = {"pairs": PAIRS, "steps": STEPS, "torch": torch.__version__, "cpu": hardware.describe(path.parent).cpu}
    text = json.dumps({name: round(float(value), 6) for name, value in result.items()} | about, indent=1)
    path.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
