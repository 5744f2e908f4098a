"""Every run as a row."""

from dataclasses import asdict, dataclass

import pandas as pd

from study.records.runs import Run, Runs


@dataclass(frozen=True)
class RunRow:
    """A run, however it ended, as the list of all runs shows it. What is not known is None."""

    run: str
    status: str
    kind: str
    arm: str
    task: str | None
    model: str | None
    precision: str | None
    ranks: int | None
    loss: float | None
    eval_loss: float | None
    step_s: float | None
    peak_mb: float | None
    peak_of: str | None
    moved_mb: float | None
    micro_batch: int | None
    accumulation: int | None
    seed: int | None


def row(run: Run) -> RunRow:
    """Return a run as a row."""
    evaluations = run.record.loss.eval
    return RunRow(
        run=run.name,
        status=run.status,
        kind=run.kind,
        arm=run.arm,
        task=run.task,
        model=run.model,
        precision=run.precision,
        ranks=run.ranks,
        loss=run.losses[-1] if run.losses else None,
        eval_loss=evaluations[-1].eval_loss if evaluations else None,
        step_s=run.median_step_s,
        peak_mb=run.peak_bytes / 1e6 if run.peak_bytes else None,
        peak_of=run.peak_of,
        moved_mb=sum(run.traffic.values()) / 1e6 if run.traffic else None,
        micro_batch=run.micro_batch,
        accumulation=run.accumulation,
        seed=run.seed,
    )


def table(runs: Runs) -> pd.DataFrame:
    """Return a row for each run."""
    return pd.DataFrame([asdict(row(run)) for run in runs])
