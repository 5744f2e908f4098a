"""The four answers of the index: does ZeRO change the losses, save memory, cost time, send more?

A person writes the sentence of each, in `templates/index.html`; here are the rows below it. Losses are of real ranks,
memory and traffic also of virtual ones of the sizes that people train: on a tiny model ZeRO costs memory. Where the
reader has no such runs, those that the repository keeps are shown, and marked.
"""

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from study.core.arms import ROOT
from study.core.text import count, nats, size
from study.predict.front import (
    PlaceFlags,
    Question,
    TrainingFlags,
    estimate,
    named,
    papers,
)
from study.predict.front import advise as advised
from study.predict.front import published as others
from study.records import metrics
from study.records.groups import groups
from study.records.runs import Run, Runs, kept, load
from study.report import advice as in_words
from study.report import style, tables
from study.report.of_record import training_of
from study.report.topics import losses, memory, on_gpu, stages, traffic

BASELINE = "ddp"
RANKS, GPU = 8, "H100-80GB"
PREDICTED, PUBLISHED = "predicted", "published by others"
TITLES = {"llama3-8b": "Llama-3-8B", "bert-tiny": "a tiny BERT", "gpt-tiny": "a tiny GPT"}
SMOKE, AT_SCALE = "study sweep smoke --runs runs/smoke", "study sweep at_scale --runs runs/at_scale"
SECONDS = style.Stack("seconds", {}, "{:.2g} s".format, "seconds of an optimizer step")
PASSES = 8  # of a step, beside the one pass of the runs: stages 2 and 3 send in each
MODEL, ADVISED = "llama3-8b", "mistral-7b"  # the last one of the advice
TIMES = ROOT / "reports" / "times.csv"  # tools/times.py writes it


class Answer(NamedTuple):
    """The answer to one question. Without rows it has no figure. Without runs of the reader it has a command."""

    name: str
    command: str  # what makes runs that are missing here
    table: pd.DataFrame = pd.DataFrame()
    rows: pd.DataFrame = pd.DataFrame()  # that the figure draws
    figure: Figure | None = None


def answers(runs: Runs) -> list[Answer]:
    """Return the answers of the index, in their order."""
    here = trained_here(runs) or trained_here(kept("smoke"))
    at_scale = of_scale(runs) or of_scale(kept("at_scale"))
    return [of_losses(here), of_memory(here, at_scale), of_time(), of_traffic(here, at_scale)]


def trained_here(runs: Runs) -> list[Run]:
    """Return the runs of a small model in fp32 that learns; if there is none, of the group with the most arms."""
    for chosen in (runs.select(**stages.TINY), runs):
        real = [run for run in chosen.select(virtual=False).done if metrics.components(run.record)]
        if with_baseline := list(filter(_has_baseline, groups(real).values())):
            return max(with_baseline, key=lambda mine: len({run.record.arm for run in mine}))
    return []


def of_scale(runs: Runs) -> list[Run]:
    """Return the runs of Llama-3-8B on eight virtual ranks that recompute activations; none without DDP's."""
    known = runs.select(model=MODEL, ranks=RANKS, virtual=True, checkpointing=True)
    mine = [run for run in known.done if run.record.cell.protocol == "at_scale"]
    return mine if _has_baseline(mine) else []


def _unless_own(members: list[Run], command: str) -> str:
    """Return a command that makes runs, unless these are the reader's own."""
    return "" if members and not members[0].mark else command


def _has_baseline(members: list[Run]) -> bool:
    return any(run.record.arm == BASELINE for run in members)


def of_losses(here: list[Run]) -> Answer:
    """Return how far the arms of one training are apart, step by step."""
    rows = losses.table(Runs(tuple(here)))
    if rows.empty or rows["difference"].isna().all():
        return Answer("losses", SMOKE)
    rows["group"] += here[0].mark
    table = losses.parity(rows).rename(columns={"line": "arm"})
    table["largest_difference"] = table["largest_difference"].map(nats, na_action="ignore")
    shown = ["arm", "first_loss", "last_loss", "steps", "largest_difference"]
    return Answer("losses", _unless_own(here, SMOKE), table[shown], rows, losses.figure(rows))


# --- memory --------------------------------------------------------------------------------------------------------


def of_memory(here: list[Run], at_scale: list[Run]) -> Answer:
    """Return what a rank of each arm holds: a model of usual size on virtual ranks, and the model trained here."""
    # The last run of each arm. One process alone is no rank of several.
    tiny = {run.record.arm: run for run in here if run.record.observed.ranks != 1}
    rows = pd.DataFrame([row for run in (*at_scale, *tiny.values()) for row in memory_rows(run)])
    if rows.empty:
        return Answer("memory", AT_SCALE)
    # The table has the first source of each arm: where nothing was measured, the prediction.
    first = rows.groupby(["panel", "arm"], sort=False)["source"].transform("first")
    peaks = rows[(rows["source"] == first) & (rows["part"] != "host memory")]
    wide = peaks.groupby(["arm", "model"], sort=False)["bytes"].sum().unstack("model", sort=False)
    table = wide.map(size, na_action="ignore").assign(basis=peaks.groupby("arm")["source"].first()).reset_index()
    return Answer("memory", _unless_own(at_scale, AT_SCALE), table, rows, memory.figure(rows))


def memory_rows(run: Run) -> list[dict]:
    """Return the parts of a rank's peak of GPU memory, measured and predicted, and what others measured."""
    model, arm = run.record.requested.model or "", run.record.arm
    # --- what our bars show
    sources: dict[str, Any] = {}
    if not memory.has_one_memory(run):
        sources = {"measured": memory.held_parts(run), PREDICTED: memory.predicted_parts(run)}
    # Where a run without a GPU offloads, both memories are one: its split is predicted. Of smaller models a GPU would
    # need other memory than the CPU on which the other arms were measured.
    elif model == MODEL and (training := training_of(run.record)):
        on_gpu = estimate(replace(training, placement=replace(training.placement, device="cuda")))
        sources = {PREDICTED: memory.part_bytes(on_gpu.at_peak) | {"host memory": on_gpu.host_bytes}}
    # --- and the numbers of others, of which no parts are known
    for other in published():
        if model == MODEL and run.record.is_virtual and other.arm == arm and other.memory_bytes:
            sources[PUBLISHED] = {"parts not given": other.memory_bytes}
    about = {"model": _title(run), "panel": _panel(run), "line": arm, "arm": arm, "kind": run.kind}
    return tables.stacked(about, "bytes", sources)


def _title(run: Run) -> str:
    model = run.record.requested.model or "a model"
    return TITLES.get(model, model) + run.mark


def _panel(run: Run) -> str:
    asked, seen = run.record.requested, run.record.observed
    activations = "recomputed" if asked.checkpointing else "kept"
    about = f"{_title(run)}, {count(seen.parameters or 0)} parameters, on {seen.ranks} {run.kind} ranks"
    return f"{about}\n{asked.micro_batch} x {asked.sequence} tokens in a pass, activations {activations}"


def published() -> list[others.Row]:
    """Return the published rows of Llama-3-8B on eight GPUs."""
    known = [row for row in others.rows() if row.set == others.KNOWN and row.n_gpus == RANKS]
    return [row for row in known if row.model == TITLES[MODEL]]


# --- time ----------------------------------------------------------------------------------------------------------


def of_time() -> Answer:
    """Return predicted and published times, as they are kept: they depend on no run."""
    rows = pd.read_csv(TIMES)
    over = rows[(rows["source"] == PREDICTED) & (rows["arm"] != BASELINE)]
    table = over[["setting", "arm", "over DDP", "at least", "at most"]].round(2)
    note = "Bars: predicted; lines: their intervals. No group of GPUs was measured here. DDP would not fit into 80 GB."
    note += " Others (tohtana/ds_verify_loss) do not say on which GPUs they measured, nor whether activations were"
    note += " recomputed."
    return Answer("time", "", table, rows, style.stacks(rows, SECONDS, note))


# --- bytes ---------------------------------------------------------------------------------------------------------


def of_traffic(here: list[Run], at_scale: list[Run]) -> Answer:
    """Return what arms send: of Llama-3-8B on virtual ranks; if there is none, of the model trained here."""
    members = at_scale or here
    rows = traffic.table(Runs(tuple(members)))
    if rows.empty:
        return Answer("traffic", AT_SCALE)
    times = rows.groupby(["arm", "source"], sort=False)["times"].sum().unstack("source", sort=False)
    # --- with more passes than the runs have
    sent = {}
    for run in members:
        if training := training_of(run.record):
            several = estimate(replace(training, batch=replace(training.batch, passes=PASSES)))
            sent[run.record.arm] = papers.wire_bytes(several.traffic, training.placement.ranks)
    counted = times[traffic.COUNTED]
    table = pd.DataFrame(
        {
            "over DDP": counted / counted[BASELINE],
            "by the ZeRO paper": times[traffic.PAPER],
            f"over DDP with {PASSES} passes, predicted": pd.Series(sent, dtype=float) / sent.get(BASELINE, math.nan),
        },
        index=times.index,
    )
    # The groups of `traffic.table` say how runs differ. Here there is one, and its title says what it is.
    rows = rows.assign(panel=_panel(members[0]), line=rows["arm"])
    return Answer("traffic", _unless_own(at_scale, AT_SCALE), table.reset_index(), rows, traffic.figure(rows))


# --- on a GPU: whatever runs the report is of, its kept records are there -------------------------------------------


def of_gpu() -> list[Answer]:
    """Return what the kept runs on a GPU say of memory, time and losses."""
    runs = load(on_gpu.FOLDER / "runs")
    rows = on_gpu.table(runs)
    later = on_gpu.later()
    over = on_gpu.seconds(rows)
    pair = losses.table(runs.select(protocol_part="loss"), "single")
    in_memory = [*on_gpu.OVER.values()][:2]  # the others are in the table of all runs, which has more room
    furthest = rows.sort_values(in_memory[1], key=lambda over: (over.astype(float) - 1).abs(), ascending=False)
    shown = ["line", "first_loss", "last_loss", "largest_difference"]
    return [
        Answer("memory", "", furthest[["model", "arm", *in_memory]], rows, on_gpu.memory_figure(rows)),
        Answer("time", "", over[["panel", "arm", "over"]], over, on_gpu.seconds_figure(over)),
        Answer("losses", "", losses.parity(pair)[shown], pair, losses.figure(pair)),
        Answer("runs", "", rows.drop(columns=in_memory)),
        Answer("later", "", later.drop(columns=[in_memory[0], "driver_bytes", on_gpu.OVER["driver_bytes"]])),
    ]


# --- the advice --------------------------------------------------------------------------


@functools.cache
def advice() -> list[str]:
    """Return which arm `study advise` recommends for 7 billion parameters on eight GPUs."""
    return in_words.in_words(advised(Question.of(named(ADVISED), TrainingFlags(gpus=RANKS), PlaceFlags(gpu=GPU))))
