"""What a commit predicts of each run that a machine's folder keeps, or of each cell of protocols on one GPU.

python windows/predicted.py reports/h200 579c3b24 > reports/h200/predicted.csv
python windows/predicted.py reports/h200-2 dfb6b367 > reports/h200-2/predicted.csv
python windows/predicted.py reports/h200-3 3e5f3d55 > reports/h200-3/predicted.csv
python windows/predicted.py reports/h100 f926602a > reports/h100/predicted.csv
python windows/predicted.py windows predictions h100 guelph > reports/h200/next.csv
python windows/predicted.py registered eight COMMIT > reports/eight/registered.csv

The first and the last check out that commit and ask its code: nothing that came later can change an answer. From a
record it takes what was asked for and what the arm's config was, and nothing measured. A run that the code does not
predict has no row. The fifth asks the code that is installed.
"""

import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIRST = "c536f597:reproductions/laboratories/predicted.py"  # which asks commits that have no such script
COLUMNS = ("run", "allocated_bytes", "reserved_bytes", "driver_bytes", "step_s", "step_low_s", "step_high_s")
MACHINES = (("H100-80GB", 8), ("A100-80GB", 8), ("H200", 8), ("B200", 8))  # registered before
GPU = "H200"  # of cells that have not run yet: the machine of reports/h200, whose host is of the quick class


def main(first: str, *others: str) -> None:
    folder = Path(first)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    if first == "registered":
        name, commit, *gpu = others
        at_commit(commit, "machines", name, *gpu)
    elif first == "machines":
        writer.writerows(of_machines(*others))
    elif folder.is_dir() and others:
        at_commit(others[0], str(folder.resolve()))
    else:
        trainings = of_records(folder / "runs") if folder.is_dir() else of_protocols(first, *others)
        writer.writerows([COLUMNS, *(row(*each) for each in trainings)])


def at_commit(commit: str, *words: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        there = Path(temporary, "then")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", there, commit], cwd=ROOT, check=True)
        try:
            # Its package comes before the one that is installed.
            environment = os.environ | {"PYTHONPATH": str(there)}
            own = [path for place in ("tools", "windows") if (path := Path(there, place, "predicted.py")).exists()]
            script = own[0] if words[0] == "machines" else Path(__file__).resolve()
            if not own:
                script = Path(temporary, "predicted.py")
                with script.open("wb") as file:
                    subprocess.run(["git", "show", FIRST], cwd=ROOT, check=True, stdout=file)
            subprocess.run([sys.executable, script, *words], cwd=there, env=environment, check=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", there], cwd=ROOT, check=True)


def of_machines(name: str, only: str | None = None) -> Iterator[list]:
    """Yield the rows that are registered of a protocol on several machines, with the commit that predicts them."""
    from study.core.gpus import GPUS
    from study.records.store import commit_of_this_tree
    from study.report import plan
    from study.sweeps import protocol

    commit, dirty = commit_of_this_tree()
    if dirty:
        sys.exit("The tree has changed since its commit. What to do: name a commit.")
    cells = protocol.cells(protocol.read(name), "paper")
    yield ["commit", *plan.COLUMNS]
    for gpu, gpus in MACHINES:
        if only in (None, gpu):
            yield from ([commit, *row] for row in plan.registered(cells, GPUS[gpu], gpus))


# Name, Training, GPU, and whether its seconds are not predicted: a rank that runs alone sends nothing, and with states
# on a disk they depend on the disk.
Named = tuple[str, Any, str, bool]


def of_records(folder: Path) -> Iterator[Named]:
    from study.core.arms import load_arm
    from study.core.gpus import gpu_named
    from study.records.runs import load
    from study.report.of_record import training_of

    for run in sorted(load(folder).done, key=lambda run: run.folder):
        record = run.record
        if training := training_of(record):
            untimed = record.is_virtual or load_arm(record.arm).uses_nvme
            yield record.run_id, training, gpu_named(record.hardware.devices[0].name), untimed


def of_protocols(*names: str) -> Iterator[Named]:
    from study.core.arms import load_arm
    from study.report.plan import training_of
    from study.sweeps import protocol

    for cell in (cell for name in names for cell in protocol.cells(protocol.read(name), "one_gpu")):
        untimed = cell.value("virtual_ranks") is not None or load_arm(cell.arm).uses_nvme
        yield cell.name, training_of(cell, 1), GPU, untimed


def row(name: str, training: Any, gpu_name: str, untimed: bool) -> tuple[str | float | None, ...]:
    from study.core.gpus import GPUS
    from study.predict.front import Hardware, memory_kinds, step_time

    # Older commits take a GPU by its name.
    gpu: Any = gpu_name if "str" in str(memory_kinds.__annotations__["gpu"]) else GPUS[gpu_name]
    kinds = memory_kinds(training, gpu)
    times: tuple[float | None, ...] = (None, None, None)
    if not untimed:
        machine = Hardware(gpu=gpu, gpus_per_node=training.placement.ranks, host="new")
        step = step_time(training, machine)
        times = tuple(float(f"{seconds:.4g}") for seconds in (step.seconds, step.low_s, step.high_s))
    return (name, kinds.allocated, kinds.reserved, kinds.driver, *times)


if __name__ == "__main__":
    main(*sys.argv[1:])
