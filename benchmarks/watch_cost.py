"""Measure the cost of the watch: within one run, blocks of steps with and without it take turns in a random order.

python benchmarks/watch_cost.py reports/cpu-2core/watch_cost.json

The whole watch is there, of one rank. In a block without it, its hooks are removed. Each pair of blocks gives a
difference, so that a slow minute of the machine is in both of its parts. CPU seconds are compared as well as those of
the clock, because other programs change the latter.
"""

import json
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from study.measure import hardware
from study.records.compare import median_with_interval
from study.watch.instruments import AFTER
from study.watch.session import watch

PAIRS = 1000
WARM_UP = AFTER + 10  # steps until the instruments have looked
TIMED = 2  # steps of a block, after one that is not timed: setting or removing hooks makes it longer
WIDTH = 384
LAYERS = 6
ROWS = 512  # of a step: it takes 30 ms or longer on one thread
SEED = 32

Seconds = tuple[float, float]  # of the clock, of the CPU


def pairs(folder: Path) -> NDArray[np.float64]:
    """Return the seconds of a step for each pair, with the watch and without it, by the clock and the CPU."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters())
    steps = WARM_UP + 2 * PAIRS * (1 + TIMED)
    rows = torch.utils.data.TensorDataset(torch.randn(ROWS, WIDTH).expand(steps, -1, -1))
    loader = iter(torch.utils.data.DataLoader(rows, batch_size=None))

    def step() -> None:
        model(next(loader)[0]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def block() -> Seconds:
        step()
        begin = time.perf_counter(), time.process_time()
        for _ in range(TIMED):
            step()
        return (time.perf_counter() - begin[0]) / TIMED, (time.process_time() - begin[1]) / TIMED

    order = random.Random(SEED)
    measured = []
    with watch(model=model, optimizer=optimizer, run_dir=folder) as watched:
        assert watched.session, "the watch did not begin"
        for _ in range(WARM_UP):
            step()
        for _ in range(PAIRS):
            pair: dict[bool, Seconds] = {}
            for is_watched in order.sample((True, False), 2):
                if not is_watched:
                    watched.session.loop.detach()
                pair[is_watched] = block()
                if not is_watched:
                    watched.session.loop.attach()
            measured.append((pair[True], pair[False]))
    return np.array(measured)


def interval(values: NDArray[np.float64]) -> dict[str, float]:
    """Return the median, and the interval that holds it in 95 % of resamples."""
    estimates = median_with_interval(values.tolist(), np.random.default_rng(SEED))
    return {name: float(f"{each:.3g}") for name, each in zip(("median", "low", "high"), estimates, strict=True)}


def main(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        measured = pairs(Path(folder))
    result: dict = {"pairs": PAIRS, "steps_of_a_block": TIMED, "ranks": 1}
    for place, name in enumerate(("wall", "cpu")):
        without = measured[:, 1, place]
        added = measured[:, 0, place] - without
        result[f"step_{name}_s"] = interval(without)
        result[f"added_{name}_s"] = interval(added)
        result[f"added_{name}_share"] = interval(added / np.median(without))
    result |= {"torch": torch.__version__, "cpu": hardware.describe().cpu}
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
