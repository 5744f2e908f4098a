"""Measure the cost of the watch: blocks of steps with and without it take turns within one run.

python -m study.watcher.cost reports/cpu-2core/watch_cost.json

CPU seconds are compared, since other programs on this machine change the wall time. Long steps give a ratio with a wide
spread; steps of less than a millisecond give the seconds that the watch adds to each.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from study.measure import hardware
from study.watcher.loop import Loop, Step
from study.watcher.steps import Counts, StepLog

PAIRS = 120
STEPS = 10  # of a block: the first one after the hooks are set takes longer
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
        one = block(first)
        other = block(not first)
        measured.append((one, other) if first else (other, one))
    return measured[1:]  # the first is a warm-up


def interval(values: NDArray[np.float64]) -> dict[str, float]:
    """Return the median, and the interval that holds it in 95 % of resamples."""
    medians = np.median(np.random.default_rng(0).choice(values, (2_000, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return {name: float(f"{each:.3g}") for name, each in (("median", np.median(values)), ("low", low), ("high", high))}


def main(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        usual = np.array(pairs(Path(folder), WIDTH))
        tiny = np.array(pairs(Path(folder), TINY))
    added_s = tiny[:, 0] - tiny[:, 1]
    result = {
        "ratio_of_long_steps": interval(usual[:, 0] / usual[:, 1]),
        "long_step_cpu_s": interval(usual[:, 1]),
        "added_cpu_s": interval(added_s),  # by steps so short that the difference stands out
        "added_share_of_30_ms": interval(added_s / 0.03),
        "pairs": PAIRS,
        "torch": torch.__version__,
        "cpu": hardware.describe(path.parent).cpu,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
