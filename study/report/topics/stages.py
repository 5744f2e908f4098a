"""What a stage does, for learners: the records beside a calculation by hand, and a figure that a reader can drag."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from study.records import metrics
from study.records.runs import Runs

ARMS = ("ddp", "zero1", "zero2", "zero3")
STATES = ("weights", "master", "moments")  # what is there after each step; gradients come and go
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
TINY = {"task": "wikitext", "model": "gpt-tiny", "ranks": 2, "virtual": False, "precision": "fp32"}
ALL_TRAIN = {"lora_rank": None, "train_only": None}  # states of adapters are few bytes of many parameters
SMALL = TINY | ALL_TRAIN | {"accumulation": 1}
DRAG = Path(__file__).parents[1] / "templates" / "drag.html"  # what each rank holds, by stage, ranks and model
LARGE = ALL_TRAIN | {"model": "llama3-8b", "ranks": 8, "virtual": True, "precision": "bf16_cast"}


def recorded(runs: Runs, parts: Iterable[str]) -> pd.DataFrame:
    """Return one run of each arm, with the bytes a parameter of some parts of a step: states, or collectives."""
    rows: dict[str, dict[str, Any]] = {}
    for run in runs.select(arm=list(ARMS)).done:
        observed = run.record.observed
        sizes = metrics.sent(run.record)
        for first_rank in run.record.memory.components.per_rank[:1]:
            sizes |= first_rank.after_step
        row: dict[str, Any] = {"arm": run.record.arm}
        row |= {part: round(sizes.get(part, 0) / (observed.parameters or 1), 3) for part in parts}
        # Of repeats the first: they hold and send the same.
        rows.setdefault(run.record.arm, row | {"parameters": observed.parameters, "run": run.record.run_id})
    return pd.DataFrame(rows.values())
