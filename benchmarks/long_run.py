"""Train 10,000 steps on two ranks, once without a stop, and once with three kills and two resumes, and compare the two.

python benchmarks/long_run.py reports/cpu-2core --work /tmp/long

The first kill comes before the first checkpoint, so that training begins anew. A kill is SIGKILL of one rank. Beside
both trainings their memory, the size of their folder and the CPU seconds of their ranks are written down. What does not
grow from the second quarter to the last is said so; the first has caches that fill.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import psutil

from study.core.arms import ROOT
from study.records import store
from study.report import style

TRAINING = ("--task", "wikitext", "--model", "gpt-tiny", "--micro-batch", "1", "--sequence", "16", "--threads", "1")
KEPT = ("--no-instruments", "--save", "--train-rows", "2000", "--eval-rows", "8")
LOOK_S = 2.0
COLUMNS = ("training", "seconds", "step", "memory_bytes", "folder_bytes", "cpu_s")


def ranks_below(launcher: psutil.Process) -> list[psutil.Process]:
    """Return the processes that train, of a launcher."""
    below = launcher.children(recursive=True)
    return [each for each in below if "study/train.py" in each.cmdline()]


def size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # a checkpoint that was removed meanwhile
            continue
    return total


def train(name: str, folder: Path, flags: list[str], kill_at: int | None, began_s: float) -> list[tuple]:
    """Train into a folder, and return what was seen. With `kill_at`, a rank is killed after that step."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/zero2.yaml"]
    words = ["study/train.py", "--run-dir", str(folder), *TRAINING, *KEPT, *flags]
    rows = []
    with (folder.parent / f"{folder.name}.txt").open("w") as output:
        launched = subprocess.Popen([*command, *words], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        while launched.poll() is None:
            time.sleep(LOOK_S)
            steps = [line["step"] for line in store.read_steps(folder) if "loss" in line] if folder.exists() else []
            try:
                ranks = ranks_below(psutil.Process(launched.pid))
                memory = sum(each.memory_info().rss for each in ranks)
                used_s = sum(sum(each.cpu_times()[:2]) for each in ranks)
                if kill_at and steps and steps[-1] >= kill_at:
                    ranks[-1].kill()
                    kill_at = None
            except psutil.NoSuchProcess:
                continue
            if steps and len(ranks) == 2:
                rows.append((name, time.monotonic() - began_s, steps[-1], memory, size_of(folder), used_s))
    return rows


def result(folder: Path) -> dict:
    """Return what two equal trainings have in common, to the bit."""
    record = store.load(folder)
    weights = (folder / "model/model.safetensors").read_bytes()
    losses = json.dumps([record.loss.train, [each.model_dump() for each in record.loss.eval]])
    return {
        "status": record.status,
        "steps": len(record.loss.train),
        "evaluations": len(record.loss.eval),
        "last_loss": record.loss.train[-1],
        "losses_sha256": hashlib.sha256(losses.encode()).hexdigest(),
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }


def growth(rows: pd.DataFrame, column: str) -> float:
    """Return the median of the last quarter of the steps over that of the second."""
    quarter = pd.cut(rows["step"], 4, labels=False)
    return float(rows[column][quarter == 3].median() / rows[column][quarter == 1].median())


def step_cpu_s(rows: pd.DataFrame) -> pd.DataFrame:
    """Return CPU seconds of a step between looks, within one process."""
    within = rows["step"].diff().gt(0) & rows["cpu_s"].diff().gt(0)
    made = rows.assign(step_cpu_s=rows["cpu_s"].diff() / rows["step"].diff())
    return made[within]


def draw(seen: pd.DataFrame, path: Path) -> None:
    figure, axes = plt.subplots(3, 1, sharex=True, figsize=(7, 6))
    for name, rows in seen.groupby("training"):
        timed = step_cpu_s(rows)
        axes[0].plot(rows["step"], rows["memory_bytes"] / 1e6, ".", markersize=2, label=name)
        axes[1].plot(rows["step"], rows["folder_bytes"] / 1e6, ".", markersize=2)
        axes[2].plot(timed["step"], timed["step_cpu_s"].rolling(20, center=True).median() * 1e3, linewidth=1)
    for axis, label in zip(axes, ("memory of both ranks, MB", "folder, MB", "CPU ms of a step"), strict=True):
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[0].legend()
    axes[2].set_xlabel("step")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="a new folder for both trainings")
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    options.work.mkdir(parents=True)
    steps = options.steps
    flags = ["--steps", str(steps), "--save-every", str(steps // 20), "--eval-every", str(steps // 20)]
    began_s = time.monotonic()
    whole = options.work / "whole"
    rows = train("without a stop", whole, flags, None, began_s)
    # --- the same, killed three times: before the first checkpoint, and twice after one
    last: list[str] = []
    for number, share in enumerate((0.03, 0.42, 0.77, None), 1):
        folder = options.work / f"part{number}"
        kill_at = None if share is None else int(share * steps)
        rows += train("three kills, two resumes", folder, flags + last, kill_at, began_s)
        last = ["--resume", str(folder)] if number > 1 else []
    # --- kept
    seen = pd.DataFrame(rows, columns=COLUMNS)
    results = {"without a stop": result(whole), "three kills, two resumes": result(folder)}
    timed = step_cpu_s(seen[seen["training"] == "without a stop"])
    content = {
        "equal": len({json.dumps(each) for each in results.values()}) == 1,
        "trainings": results,
        "last_quarter_over_second": {
            "memory": growth(seen[seen["training"] == "without a stop"], "memory_bytes"),
            "folder": growth(seen[seen["training"] == "without a stop"], "folder_bytes"),
            "cpu_of_a_step": growth(timed, "step_cpu_s"),
        },
        "seconds": round(time.monotonic() - began_s),
        "software": store.load(whole).software,
    }
    (options.out / "long_run.json").write_text(json.dumps(content, indent=1) + "\n")
    thinned = seen.iloc[np.unique(np.linspace(0, len(seen) - 1, min(len(seen), 400)).astype(int))]
    thinned.round(1).to_csv(options.out / "long_run.csv", index=False, lineterminator="\n")
    with plt.style.context(style.STYLE):
        draw(seen, options.out / "long_run.svg")


if __name__ == "__main__":
    main()
