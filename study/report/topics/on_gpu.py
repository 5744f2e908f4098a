"""On a GPU: what each kept run of a machine with one measured, and what was predicted of it before."""

import functools
from itertools import islice
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from study.core.arms import ROOT
from study.core.text import rounded
from study.records import metrics
from study.records.runs import Runs, load
from study.report import style
from study.report.tables import parts

FOLDER = ROOT / "reports" / "h200"  # a wheel has none
LATER = [ROOT / "reports" / name for name in ("h200-2", "h200-3", "h100")]  # later sets of runs; hosts slower or busier
ABOUT = ["model", "precision", "micro_batch", "accumulation", "sequence", "checkpointing", "arm"]
# By the columns of predicted.csv. The first peak is that of the tensors. Of a rank that runs alone the last two are no
# measurement: it sends nothing, and the driver counted two runs at a time.
MEASURED = {
    "allocated_bytes": "tracked_peak_bytes",
    "reserved_bytes": "memory.per_rank.0.peak_reserved_bytes",
    "driver_bytes": "memory.per_rank.0.device_used_bytes",
    "step_s": "step_s",
}
OVER = {name: f"{name.partition('_')[0]} p/m" for name in MEASURED}  # predicted over measured
NEAR = 0.01
TICKS_GB = (5, 10, 20, 50, 100)
SECONDS = style.StackedBars(
    "over", {}, functools.partial(rounded, form=".3g"), "times the median step of one process alone"
)


def table(runs: Runs, folder: Path = FOLDER) -> pd.DataFrame:
    """Return each run with what it measured, and what was predicted over that."""
    before = pd.read_csv(folder / "predicted.csv", index_col="run")
    rows = []
    for run in runs.done:
        row = {name: run.facts[name] for name in ABOUT}
        for name, quantity in islice(MEASURED.items(), 2 if run.record.is_virtual else None):
            row[name] = metrics.value(run.record, quantity)
            row[OVER[name]] = metrics.over(before[name].get(run.record.run_id), row[name])
        rows.append(row)
    return pd.DataFrame(rows)


def at_first_sight() -> pd.DataFrame:
    """Return by set how many peaks of tensors were predicted within 1 %: of all runs, and of what no set before had.

    Two runs are one training if all is the same that may change a peak. A seed changes none.
    """
    rows = []
    for folder in (FOLDER, *LATER):
        done = load(folder / "runs")
        for run, over in zip(done.done, table(done, folder)[OVER["allocated_bytes"]], strict=True):
            if pd.isna(over):
                continue  # not predicted, or its tensors were not counted
            settings = [run.facts[name] for name in (*ABOUT, "lora_rank", "allocator")]
            releases = [run.record.software[name] for name in ("deepspeed", "transformers")]
            rows.append({"set": folder.name, "training": str(settings + releases), "near": abs(over - 1) < NEAR})
    runs = pd.DataFrame(rows)
    counted = {}
    for what, chosen in {"runs": runs, "new trainings": runs.drop_duplicates("training")}.items():
        counted[what] = chosen.groupby("set", sort=False)["near"].count()
        counted[f"{what} within 1 %"] = chosen.groupby("set", sort=False)["near"].sum()
    by_set = pd.DataFrame(counted)
    by_set.loc["all"] = by_set.sum()
    return by_set.reset_index()


def in_words(run: pd.Series) -> str:
    """Return what was trained, for a narrow column: the sequences of a micro-batch and their tokens stay on a line."""
    words = f"{run['model']}, {run['micro_batch']}\u00a0x\u00a0{run['sequence']}, {run['precision']}"
    passes = f", {run['accumulation']} micro-batches" if run["accumulation"] > 1 else ""
    return words + passes + (", recomputed" if run["checkpointing"] else "")


def later() -> pd.DataFrame:
    """Return the runs of the other machines, without adapters and with the allocator's defaults."""
    tables = []
    for folder in LATER:
        usual = load(folder / "runs").select(lora_rank=None, allocator=None)
        tables.append(table(usual, folder).assign(host=folder.name.removeprefix("h200-")))
    return pd.concat(tables)


@style.figure
def memory_figure(rows: pd.DataFrame) -> Figure:
    """Memory that was predicted, over what was measured: a dot for each run."""
    drawing, axes = style.panels([1.6] * 3)
    for ax, name in zip(axes, MEASURED, strict=False):
        ax.axhline(1, color=style.FAINT)
        for arm, mine in parts(rows, "arm").items():
            ax.plot(mine[name] / 1e9, mine[OVER[name]], **style.look(arm), linestyle="none", alpha=0.7)
        ax.set(title=OVER[name].replace("p/m", "memory, predicted over measured"), xscale="log", ylim=(0.6, 1.3))
        ax.set_xticks(TICKS_GB, map(str, TICKS_GB))
        ax.minorticks_off()
    axes[-1].set_xlabel("measured, GB")
    note = "Predicted before the runs, by the commit that made them. One run of each. Below 1: it took more."
    return style.finished(drawing, style.keys({arm: style.look(arm) for arm in rows["arm"].unique()}), note)


def seconds(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of what one process alone trained as well, with their seconds over its own."""
    same = rows.groupby(ABOUT[:-1])["step_s"]  # one process alone is the first arm
    panel = rows["model"] + ", " + rows["precision"] + ", " + "batch " + rows["micro_batch"].astype(str)
    rows = rows.assign(panel=panel, line=rows["arm"], kind="real", source="measured", part="step")
    return rows.assign(over=rows["step_s"] / same.transform("first"))[same.transform("count") > 1]


def seconds_figure(rows: pd.DataFrame) -> Figure:
    """Seconds of a step on one GPU, over those of one process alone."""
    return style.stacks(rows, SECONDS, "Medians of one run of each, without their spread.")
