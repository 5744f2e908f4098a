"""The four answers of the index: does ZeRO change the losses, save memory, cost time, send more?

A person writes the sentence of each, in `templates/index.html`; here are the rows below it. Losses are of real ranks,
memory and traffic also of virtual ones of the sizes that people train: on a tiny model ZeRO costs memory. Where the
reader has no such runs, those that the repository keeps are shown, and marked.
"""

import functools
import itertools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from study.core.arms import NAMES, load_arm
from study.core.recipes import RECIPES
from study.core.shapes import letters
from study.core.text import count, nats, size
from study.predict.front import (
    Batch,
    Hardware,
    PlaceFlags,
    Placement,
    Question,
    Recomputation,
    Training,
    TrainingFlags,
    estimate,
    named,
    papers,
    step_time,
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
TITLES = {"llama3-8b": "Llama-3-8B", "bert-large": "BERT-large", "bert-tiny": "a tiny BERT", "gpt-tiny": "a tiny GPT"}
SMOKE, AT_SCALE = "study sweep smoke --runs runs/smoke", "study sweep at_scale --runs runs/at_scale"
PASSES = 8  # of a step, beside the one pass of the runs: stages 2 and 3 send in each
MODEL, SMALL, ADVISED = "llama3-8b", "bert-large", "mistral-7b"  # the last one of the advice
ARMS = (BASELINE, "zero1", "zero2", "zero3", "zero2_cpu", "zero3_cpu", "fsdp2", "fsdp2_grad_op")
BATCHES = (
    Batch(rows=1, passes=1, tokens=2048, recomputation=Recomputation.ALL),  # as protocol at_scale has it
    Batch(rows=1, passes=4, tokens=512),  # in which others measured
)


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


def of_scale(runs: Runs) -> list[list[Run]]:
    """Return the runs of two models on eight virtual ranks; of Llama-3-8B those that recompute activations."""
    known = runs.select(ranks=RANKS, virtual=True)
    several = (known.select(model=MODEL, checkpointing=True), known.select(model=SMALL))
    of_protocol = [[run for run in mine.done if run.record.cell.protocol == "at_scale"] for mine in several]
    return list(filter(_has_baseline, of_protocol))


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


def of_memory(here: list[Run], at_scale: list[list[Run]]) -> Answer:
    """Return what a rank of each arm holds: models of usual size on virtual ranks, and the model trained here."""
    # The last run of each arm. One process alone is no rank of several.
    tiny = {run.record.arm: run for run in here if run.record.observed.ranks != 1}
    large = [*itertools.chain(*at_scale)]
    members = [*large, *tiny.values()]
    rows = pd.DataFrame([row for run in members for row in memory_rows(run)])
    if rows.empty:
        return Answer("memory", AT_SCALE)
    # The table has the first source of each arm: where nothing was measured, the prediction.
    first = rows.groupby(["panel", "arm"], sort=False)["source"].transform("first")
    peaks = rows[(rows["source"] == first) & (rows["part"] != "host memory")]
    wide = peaks.groupby(["arm", "model"], sort=False)["bytes"].sum().unstack("model", sort=False)
    table = wide.map(size, na_action="ignore").assign(basis=peaks.groupby("arm")["source"].first()).reset_index()
    return Answer("memory", _unless_own(large, AT_SCALE), table, rows, memory.figure(rows))


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
    for other in published(model):
        if run.record.is_virtual and other.memory_bytes and other.arm == arm:
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


def published(model: str = MODEL) -> list[others.Row]:
    """Return the published rows with this model on eight GPUs, and an arm of this study."""
    known = [row for row in others.rows() if row.set == others.KNOWN and row.arm in NAMES and row.n_gpus == RANKS]
    return [row for row in known if letters(row.model or "") == letters(model)]  # Llama-3-8B is llama3-8b


# --- time ----------------------------------------------------------------------------------------------------------


@functools.cache
def of_time() -> Answer:
    """Return predicted and published times. No group of GPUs was measured, and a CPU's times say nothing of one."""
    rows: list[dict] = []
    for batch in BATCHES:
        times = {}
        for arm in ARMS:
            placement = Placement.of(load_arm(arm), RANKS, "cuda")
            training = Training(named(MODEL), RECIPES["bf16_cast"], batch, placement)
            times[arm] = step_time(training, Hardware(gpu=GPU))
        ddp = times[BASELINE]
        about = {"setting": f"{batch.passes} x {batch.tokens} tokens"}
        for arm, step in times.items():
            row = {
                "arm": arm,
                "source": PREDICTED,
                "seconds": step.seconds,
                "low": step.low_s,
                # The ends are those of two predictions that err in opposite directions.
                "at least": step.low_s / ddp.high_s,
                "at most": step.high_s / ddp.low_s,
                "high": step.high_s,
                "over DDP": step.seconds / ddp.seconds,
            }
            rows.append(about | row)
        rows += [
            about | {"arm": other.arm, "source": PUBLISHED, "seconds": other.step_s, "of": other.source}
            for other in published()
            if other.step_s and (other.seq, other.grad_acc) == (batch.tokens, batch.passes)
        ]
    drawn = pd.DataFrame(rows)
    table = drawn[drawn["source"] == PREDICTED][["setting", "arm", "over DDP", "at least", "at most"]]
    return Answer("time", "", table.round(2), drawn, figure_of_steps(drawn))


@style.figure
def figure_of_steps(rows: pd.DataFrame) -> Figure:
    settings = tables.parts(rows, "setting")
    arms = style.ordered(rows["arm"])
    drawing, axes = style.panels([0.7 + 0.25 * len(arms)] * len(settings))
    for ax, setting in zip(axes, settings, strict=True):
        for arm, source, seconds, low, high in settings[setting][
            ["arm", "source", "seconds", "low", "high"]
        ].to_numpy():
            place = arms.index(arm)
            if source != PREDICTED:  # published: one number, without an interval
                ax.plot(seconds, place, **style.MARKS[PUBLISHED])
                continue
            tone = style.look(arm)["color"]
            ax.plot([low, high], [place] * 2, color=tone, linewidth=2)
            ax.plot(seconds, place, "o", color=tone, markerfacecolor=style.CARD)
            style.annotate(ax, f"{seconds:.2g} s", high, place)
        # All arms have a place in each panel, so that panels can be compared.
        style.name_bars(ax, arms)
        ax.margins(x=0.14, y=0.06)
        ax.set_xlim(left=0)
        ax.set_title(f"Llama-3-8B on eight H100, {setting} in a step")
    axes[-1].set_xlabel("seconds of an optimizer step", loc="right")
    note = "No group of GPUs was measured here. DDP would not fit into 80 GB. Others do not say on which GPUs they"
    note += " measured, nor whether activations were recomputed; the data file names them."
    predicted = {"color": style.FAINT, "marker": "o", "markerfacecolor": style.CARD}
    return style.finished(
        drawing, style.keys({"predicted": predicted, "measured by others": style.MARKS[PUBLISHED]}), note
    )


# --- bytes ---------------------------------------------------------------------------------------------------------


def of_traffic(here: list[Run], at_scale: list[list[Run]]) -> Answer:
    """Return what arms send: of the first model on virtual ranks; if there is none, of the model trained here."""
    members = at_scale[0] if at_scale else here
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
    command = _unless_own([*itertools.chain(*at_scale)], AT_SCALE)
    return Answer("traffic", command, table.reset_index(), rows, traffic.figure(rows))


# --- on a GPU: whatever runs the report is of, its kept records are there -------------------------------------------


def of_gpu() -> list[Answer]:
    """Return what the kept runs on a GPU say of memory, time and losses."""
    runs = load(on_gpu.FOLDER / "runs")
    rows = on_gpu.table(runs)
    again = on_gpu.table(load(on_gpu.SECOND / "runs").select(lora_rank=None), on_gpu.SECOND)
    over = on_gpu.seconds(rows)
    pair = losses.table(runs.select(protocol_part="loss"), "single")
    in_memory = [*on_gpu.OVER.values()][:2]  # the others are in the table of all runs, which has more room
    shown = ["line", "first_loss", "last_loss", "largest_difference"]
    return [
        Answer("memory", "", rows[["model", "arm", *in_memory]], rows, on_gpu.memory_figure(rows)),
        Answer("time", "", over[["panel", "arm", "over"]], over, on_gpu.seconds_figure(over)),
        Answer("losses", "", losses.parity(pair)[shown], pair, losses.figure(pair)),
        Answer("runs", "", rows.drop(columns=in_memory)),
        Answer("second", "", again.drop(columns=[in_memory[0], on_gpu.OVER["driver_bytes"]])),
    ]


# --- the advice --------------------------------------------------------------------------


@functools.cache
def advice() -> list[str]:
    """Return which arm `study advise` recommends for 7 billion parameters on eight GPUs."""
    return in_words.in_words(advised(Question.of(named(ADVISED), TrainingFlags(gpus=RANKS), PlaceFlags(gpu=GPU))))
