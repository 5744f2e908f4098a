"""The answers of the index that have tables: does ZeRO change the losses, save memory, send more?

A person writes the sentence of each, in `templates/index.html`; here are the rows below it. Losses are of real ranks,
memory and traffic also of virtual ones of the sizes that people train: on a tiny model ZeRO costs memory. Where the
reader has no such runs, those that the repository keeps are shown, and marked.
"""

from types import ModuleType
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from study.core.files import beside
from study.core.text import nats
from study.records import metrics
from study.records.groups import groups
from study.records.runs import Run, Runs, kept, load
from study.report.topics import losses, memory, on_gpu, stages, traffic

BASELINE = "ddp"
RANKS = 8
SMOKE, AT_SCALE = "study sweep smoke --runs runs/smoke", "study sweep at_scale --runs runs/at_scale"
MODEL = "llama3-8b"
LABEL, TITLE = f"synthetic, {MODEL}, bf16_cast", f"Llama-3-8B on {RANKS} virtual ranks"  # of a panel, and in words
VIRTUAL = " (virtual)"


class PageAnswer(NamedTuple):
    """The answer to one question. Without rows it has no figure. Without runs of the reader it has a command."""

    name: str
    command: str  # what makes runs, unless these are the reader's own
    table: pd.DataFrame = pd.DataFrame()
    rows: pd.DataFrame = pd.DataFrame()  # that the figure draws
    figure: Figure | None = None


def questions() -> list[dict[str, str]]:
    """Return what the first page and README say first: a question, its answer, one number and how that is known."""
    return beside(__file__, "answers.toml")["answer"]


def answers(runs: Runs) -> list[PageAnswer]:
    """Return the answers of the index, in their order."""
    here = trained_here(runs) or trained_here(kept("smoke"))
    at_scale = of_scale(runs) or of_scale(kept("at_scale"))
    return [
        of_losses(here),
        of_topic("memory", memory, here, at_scale),
        of_topic("traffic", traffic, here, at_scale),
    ]


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


def _has_baseline(members: list[Run]) -> bool:
    return any(run.record.arm == BASELINE for run in members)


def of_losses(here: list[Run]) -> PageAnswer:
    """Return how far the arms of one training are apart, step by step."""
    rows = losses.table(Runs(tuple(here)))
    if rows.empty or rows["difference"].isna().all():
        return PageAnswer("losses", SMOKE)
    table = losses.parity(rows).rename(columns={"line": "arm"})
    table["largest_difference"] = table["largest_difference"].map(nats, na_action="ignore")
    shown = ["arm", "largest_difference", "first_loss", "last_loss", "steps"]
    return PageAnswer("losses", SMOKE if here[0].mark else "", table[shown], rows, losses.figure(rows))


def of_topic(name: str, topic: ModuleType, here: list[Run], at_scale: list[Run]) -> PageAnswer:
    """Return what a rank holds, or sends: of a model of usual size on virtual ranks, and of the one trained here."""
    several = [run for run in here if run.record.observed.ranks != 1]  # one process alone divides and sends nothing
    rows = topic.table(Runs((*at_scale, *several)))
    # Beside a GPU's bytes a sum with the host's would say that offloading costs memory.
    rows = rows[~rows["panel"].str.endswith(memory.ONE_MEMORY)]
    # --- a column for each model, of what was measured or counted: the first source
    first = rows[rows["source"] == rows["source"].iloc[0]]
    arms = first["line"].str.removesuffix(VIRTUAL).rename("arm")
    names = {run.kind: f"{run.facts['model']}, {run.kind} ranks{run.mark}" for run in (*at_scale, *several)}
    models = first["kind"].map(names)
    sums = first.groupby([arms, models], sort=False)[topic.BARS.value].sum().unstack("kind", sort=False)
    table = sums.map(topic.BARS.words, na_action="ignore").reset_index()
    return PageAnswer(name, AT_SCALE if at_scale[0].mark else "", table, rows, topic.figure(titled(rows)))


def titled(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows whose panel says once, and in words, that its ranks are virtual."""
    of_label = rows["panel"].str.startswith(LABEL)
    return rows.assign(
        panel=rows["panel"].str.replace(LABEL, TITLE, regex=False),
        line=rows["line"].mask(of_label, rows["line"].str.removesuffix(VIRTUAL)),
    )


# --- on a GPU: whatever runs the report is of, its kept records are there -------------------------------------------


def of_gpu() -> list[PageAnswer]:
    """Return what the kept runs on a GPU say of memory, time and losses."""
    runs = load(on_gpu.FOLDER / "runs")
    rows = on_gpu.table(runs)
    later = on_gpu.later()
    over = on_gpu.seconds(rows)
    times = over[["panel", "arm", "over"]].set_axis(["training", "arm", "times single"], axis="columns")
    pair = losses.table(runs.select(protocol_part="loss"), "single")
    in_memory = [*on_gpu.OVER.values()][:2]  # the others are in the table of all runs, which has more room
    furthest = rows.sort_values(in_memory[1], key=lambda over: (over.astype(float) - 1).abs(), ascending=False)
    furthest["training"] = furthest.apply(on_gpu.in_words, axis="columns")
    shown = ["line", "seed", "first_loss", "last_loss", "largest_difference"]
    return [
        PageAnswer("memory", "", furthest[["arm", "training", *in_memory]], rows, on_gpu.memory_figure(rows)),
        PageAnswer("time", "", times, over, on_gpu.seconds_figure(over)),
        PageAnswer("losses", "", losses.parity(pair)[shown], pair, losses.figure(pair)),
        PageAnswer("runs", "", rows.drop(columns=in_memory)),
        PageAnswer("later", "", later.drop(columns=[in_memory[0], "driver_bytes", on_gpu.OVER["driver_bytes"]])),
    ]
