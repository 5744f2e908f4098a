"""Every run as a row."""

from study.records.runs import Runs
from study.report.grouping import columns


def table(runs: Runs) -> list[dict]:
    """Every run as a row, however it ended."""
    rows = []
    for run in runs:
        about = columns(run, "status", "kind", "arm", "task", "model", "precision", "ranks")
        results = {
            "loss": run.losses[-1] if run.losses else None,
            "eval loss": run.record.loss.eval[-1].eval_loss if run.record.loss.eval else None,
            "s/step": run.median_step_s,
            "peak MB": run.peak_bytes and run.peak_bytes / 1e6,
            "peak of": run.peak_of,
            "moved MB": sum(run.traffic.values()) / 1e6 if run.traffic else None,
        }
        settings = {"rows/pass": run.micro_batch, "passes": run.accumulation, "seed": run.seed}
        rows.append({"run": run.name} | about | results | settings)
    return rows
