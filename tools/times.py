"""What a step of Llama-3-8B is predicted to take on eight H100 under each arm, beside what others published.

python tools/times.py > reports/times.csv

No group of GPUs was measured here, and a CPU's times say nothing of one. `answers/time.md` has these numbers.
"""

import argparse
import sys

import pandas as pd

from study.core.arms import load_arm
from study.core.gpus import GPUS
from study.core.recipes import RECIPES
from study.predict.front import Batch, Hardware, Placement, Recomputation, Training, named, step_time
from study.predict.outside import published
from study.report.tables import stacked

MODEL, BASELINE = "llama3-8b", "ddp"
RANKS, GPU = 8, "H100-80GB"
PREDICTED, PUBLISHED = "predicted", "published by others"
ARMS = (BASELINE, "zero1", "zero2", "zero3", "zero2_cpu", "zero3_cpu", "fsdp2", "fsdp2_grad_op")
BATCHES = (
    Batch(rows=1, passes=1, tokens=2048, recomputation=Recomputation.ALL),  # as protocol at_scale has it
    Batch(rows=1, passes=4, tokens=512),  # in which others measured
)


def table() -> pd.DataFrame:
    """Return predicted seconds with their interval, also over DDP's, and published ones where there are any."""
    rows: list[dict] = []
    for batch in BATCHES:
        steps = {}
        for arm in ARMS:
            placement = Placement.of(load_arm(arm), RANKS, "cuda")
            training = Training(named(MODEL), RECIPES["bf16_cast"], batch, placement)
            steps[arm] = step_time(training, Hardware(gpu=GPUS[GPU]))
        ddp = steps[BASELINE]
        activations = "recomputed" if batch.recomputation is Recomputation.ALL else "kept"
        setting = f"{batch.passes} x {batch.tokens}, {activations}"
        for arm, step in steps.items():
            about = {
                "setting": setting,
                "panel": f"Llama-3-8B on eight H100, {setting}",
                "line": arm,
                "arm": arm,
                "low": step.low_s,
                "high": step.high_s,
                "over DDP": step.seconds / ddp.seconds,
                # The ends are those of two predictions that err in opposite directions.
                "at least": step.low_s / ddp.high_s,
                "at most": step.high_s / ddp.low_s,
            }
            sources = {PREDICTED: {"step": step.seconds}}
            for other in others(batch):
                if other.arm == arm and other.step_s:
                    sources[PUBLISHED] = {"step": other.step_s}
            rows += stacked(about, "seconds", sources)
    return pd.DataFrame(rows)


def others(batch: Batch) -> list[published.PublishedRow]:
    """Return the published rows of Llama-3-8B on eight GPUs, with such a batch."""
    known = [row for row in published.rows() if row.set == published.KNOWN and row.model == "Llama-3-8B"]
    return [row for row in known if (row.n_gpus, row.seq, row.grad_acc) == (RANKS, batch.tokens, batch.passes)]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    table().to_csv(sys.stdout, index=False, float_format="%.6g")
