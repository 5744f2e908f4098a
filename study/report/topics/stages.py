"""What a stage does, for learners: the records beside a calculation by hand, and a figure that a reader can drag."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from study.records import metrics
from study.records.runs import Run, Runs

ARMS = ("ddp", "zero1", "zero2", "zero3")
STATES = ("weights", "master", "moments")  # what is there after each step; gradients come and go
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
SMALL = {"task": "wikitext", "model": "gpt-tiny", "ranks": 2, "virtual": False, "precision": "fp32", "accumulation": 1}
LARGE = {"model": "llama3-8b", "ranks": 8, "virtual": True, "precision": "bf16_cast"}


def recorded(runs: Runs, parts: Iterable[str], **wanted: object) -> pd.DataFrame:
    """Return one run of each arm, with the bytes a parameter of some parts of a step: states, or collectives."""
    rows: list[dict] = []
    for arm in ARMS:
        matching = [run for run in runs.select(arm=arm, **wanted).done if _trains_all(run)]
        for run in matching[:1]:
            sizes = _after_step(run) | metrics.sent(run.record)
            in_bytes = {part: round(sizes.get(part, 0) / (run.record.observed.parameters or 1), 3) for part in parts}
            rows.append(
                {"arm": arm} | in_bytes | {"parameters": run.record.observed.parameters, "run": run.record.run_id}
            )
    return pd.DataFrame(rows)


def _trains_all(run: Run) -> bool:
    observed = run.record.observed
    return observed is not None and observed.trained_parameters in (None, run.record.observed.parameters)


def _after_step(run: Run) -> dict[str, int]:
    return next((rank.after_step for rank in run.record.memory.components.per_rank), {})


def figure_to_drag() -> str:
    """Return a figure as HTML with its own script: what each rank holds, by stage, ranks and model."""
    return (Path(__file__).parents[1] / "templates" / "drag.html").read_text()
