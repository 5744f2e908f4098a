"""What a commit predicts of each run that a machine's folder keeps, in the order of their folders.

python reproductions/laboratories/predicted.py reports/h200 579c3b24 > reports/h200/predicted.csv

It checks out that commit and asks its code: nothing that came later can change an answer. Without a commit it asks the
code that is installed. From a record it takes what was asked for and what the arm's config was, and nothing measured.
"""

import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ("run", "allocated_bytes", "reserved_bytes", "driver_bytes", "step_s", "step_low_s", "step_high_s")


def main(folder: Path, commit: str | None) -> None:
    if commit is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows([COLUMNS, *rows(folder / "runs")])
        return
    with tempfile.TemporaryDirectory() as temporary:
        there = Path(temporary, "then")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", there, commit], cwd=ROOT, check=True)
        try:
            # Its package comes before the one that is installed.
            environment = os.environ | {"PYTHONPATH": str(there)}
            subprocess.run([sys.executable, __file__, folder.resolve()], cwd=there, env=environment, check=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", there], cwd=ROOT, check=True)


def rows(folder: Path) -> Iterator[tuple[str | float | None, ...]]:
    from study.core.gpus import gpu_named
    from study.predict.front import Machine, memory_kinds, step_time
    from study.records.runs import load
    from study.report.of_record import setup_of

    for run in sorted(load(folder), key=lambda run: run.folder):
        record = run.record
        setup = setup_of(record)
        if setup is None:
            raise SystemExit(f"{run.folder} trains a model that is not known")
        gpu = gpu_named(record.hardware.devices[0].name)
        kinds = memory_kinds(setup, gpu)
        times: tuple[float | None, ...] = (None, None, None)
        if not record.is_virtual:  # a rank that runs alone sends nothing, so its step is no prediction's
            step = step_time(setup, Machine(gpu=gpu, gpus_per_node=setup.ranks))
            times = tuple(float(f"{seconds:.4g}") for seconds in (step.seconds, step.low_s, step.high_s))
        yield (record.run_id, kinds.allocated, kinds.reserved, kinds.driver, *times)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
