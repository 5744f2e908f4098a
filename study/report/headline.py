"""The answer for a README's first screen: one picture of three panels, and five findings, all made from records.

Losses are of real ranks, on a model so small that two CPU cores can train it. Memory and traffic are of virtual ranks
at the size of Llama-3-8B, because on a tiny model ZeRO costs memory.
"""

from dataclasses import dataclass

from matplotlib.figure import Figure

from study.io.numbers import nats, size
from study.ledger.verdict import REFUTED
from study.records.groups import by
from study.records.runs import Runs
from study.report import style
from study.report.topics import losses, memory, traffic

BASELINE = "ddp"
AT_SCALE = {"model": "llama3-8b", "ranks": 8, "virtual": True, "precision": "bf16_cast", "checkpointing": True}
AT_SCALE |= {"sequence": 2048, "micro_batch": 1, "accumulation": 1}
TINY = {"task": "imdb", "model": "bert-tiny", "ranks": 2, "virtual": False, "precision": "fp32", "steps": 24}
SHOWN = ("weights", "gradients", "optimizer")  # the model states; everything else is one part


@dataclass(frozen=True)
class Headline:
    """What the three panels show, as rows."""

    losses: list[dict]  # of one group: the one with most arms
    memory: list[dict]
    traffic: list[dict]
    tiny: list[dict]  # memory of the model whose losses these are


def of(runs: Runs) -> Headline | None:
    """None if the runs lack something that a panel shows."""
    groups = by([row for row in losses.table(runs.select(**TINY)) if row["rows per step"]], "group").values()
    trained = max(groups, key=lambda rows: len({row["arm"] for row in rows}), default=[])
    at_scale = runs.select(**AT_SCALE)
    held, sends, tiny = _measured(at_scale), traffic.table(at_scale), _measured(runs.select(**TINY))
    complete = all(any(row["arm"] == BASELINE for row in rows) for rows in (trained, held, sends, tiny))
    return Headline(trained, held, sends, tiny) if complete else None


def _measured(runs: Runs) -> list[dict]:
    return [row for row in memory.table(runs) if row["source"] == "measured"]


def held_bytes(headline: Headline) -> dict[str, float]:
    """What a rank holds at its peak, by arm, in the order of the arms."""
    return _sums(headline.memory, "bytes")


def sent(headline: Headline, source: str = "counted") -> dict[str, float]:
    """Bytes that a rank sends in a step over those of DDP's all-reduce, by arm."""
    return _sums([row for row in headline.traffic if row["source"] == source], "times")


def largest_difference(headline: Headline) -> float:
    """The largest difference of any arm's loss from DDP's at any step, in nats."""
    return max(row["difference"] for row in headline.losses if row["difference"] is not None)


def findings(headline: Headline, verdicts: list[dict]) -> list[str]:
    """Each a sentence or two with its numbers, and the claims that it is about."""
    steps = max(row["step"] for row in headline.losses)
    arms = {row["arm"] for row in headline.losses} - {BASELINE}
    held, tiny, moved = held_bytes(headline), _sums(headline.tiny, "bytes"), sent(headline)
    lines = [
        f"**ZeRO does not change the losses.** In fp32, {len(arms)} arms on two real ranks stay within"
        f" {_nats(headline)} of DDP at each of {steps} steps (`study claims S002-35`).",
        f"**It saves memory on large models.** For Llama-3-8B on eight GPUs, a rank holds {_named(held)} and"
        f" {size(held[BASELINE])} under DDP (virtual ranks, activations recomputed).",
        f"**On a tiny model it costs memory.** For a BERT with 4.4 million parameters, a rank holds {_named(tiny)}"
        f" and {size(tiny[BASELINE])} under DDP: the buckets are larger than the states that are partitioned.",
        f"**Stages 1 and 2 send more than DDP:** {_times(moved['zero1'], moved['zero2'])} as much"
        " (`study claims L-32`). They all-reduce the gradients, as DDP does, and then gather the weights.",
    ]
    return lines + _about_script(verdicts)


def _about_script(verdicts: list[dict]) -> list[str]:
    by_id = {row["claim"]: row["verdict"] for row in verdicts}
    if not by_id.get("S002-25") == by_id.get("S002-27") == REFUTED:
        return []
    return [
        "**The script of document 002 never switches DeepSpeed on.** Its gain comes from a second training that"
        " starts from the weights of the first (`study claims S002-25`, `S002-27`)."
    ]


def beyond_papers(verdicts: list[dict]) -> list[str]:
    """Findings that no paper states: one sentence for each of these claims that is refuted."""
    refuted = {row["claim"] for row in verdicts if row["verdict"] == REFUTED}
    known = {
        "L-32": "**Stages 1 and 2 send more than DDP,** because DeepSpeed all-reduces the gradients and then gathers"
        " the weights.",
        "L-67": "**Without a GPU, Accelerate does not use FSDP2,** even if its config asks for it, and does not warn.",
    }
    lines = [f"{text} ([{claim}](claims/{claim}.html))" for claim, text in known.items() if claim in refuted]
    return lines + [
        f"{text[: text.rindex(' (')]}. ([S002-25](claims/S002-25.html))" for text in _about_script(verdicts)
    ]


def _named(held: dict[str, float]) -> str:
    """The stages that keep everything on the GPU, in their order: "60 GB under stage 1, ..."."""
    stages = {arm: held[arm] for arm in ("zero1", "zero2", "zero3") if arm in held}
    return ", ".join(f"{size(held_bytes)} under stage {arm[-1]}" for arm, held_bytes in stages.items())


def _times(first: float, second: float) -> str:
    texts = dict.fromkeys(f"{value:.2g}" for value in (first, second))
    return f"{' and '.join(texts)} times"


def _nats(headline: Headline) -> str:
    return nats(largest_difference(headline))


def _sums(rows: list[dict], value: str) -> dict[str, float]:
    arms = style.ordered(row["arm"] for row in rows)
    return {arm: sum(row[value] for row in rows if row["arm"] == arm) for arm in arms}


@style.figure
def picture(headline: Headline) -> Figure:
    """Three panels side by side: the losses lie on each other; memory by part; bytes sent, and the paper's figure."""
    drawing = Figure(figsize=(2 * style.WIDTH, 3.6), layout="constrained")
    left, middle, right = drawing.subplots(1, 3, width_ratios=(1, 1.25, 1.1))
    _draw_losses(left, headline)
    _draw_memory(middle, headline)
    _draw_traffic(right, headline)
    return drawing


def _draw_losses(axes, headline: Headline) -> None:
    arms = by(headline.losses, "arm")
    for number, arm in enumerate(style.ordered(arm for (arm,) in arms)):
        mine = arms[arm,]
        first = [row for row in mine if row["run"] == mine[0]["run"]]
        steps, values = [row["step"] for row in first], [row["loss"] for row in first]
        axes.plot(steps, values, color=style.colour(arm), linestyle=(4 * number, (4, 4 * (len(arms) - 1))))
    axes.set_title(f"Same losses\n{len(arms)} arms, two real ranks, a tiny BERT, fp32")
    axes.set(xlabel="optimizer step", ylabel="training loss (nats)")
    text = f"every arm within\n{_nats(headline)} of DDP"
    axes.text(0.97, 0.95, text, transform=axes.transAxes, ha="right", va="top", fontsize=9)


def _draw_memory(axes, headline: Headline) -> None:
    held = held_bytes(headline)
    for place, arm in enumerate(held):
        left = 0.0
        sizes = {row["part"]: row["bytes"] for row in headline.memory if row["arm"] == arm}
        states = {part: sizes.get(part, 0.0) for part in SHOWN}
        for part, part_bytes in (states | {"other": held[arm] - sum(states.values())}).items():
            axes.barh(
                place, part_bytes / 1e9, 0.75, left, color=style.PARTS[part], edgecolor=style.FAINT, linewidth=0.5
            )
            left += part_bytes / 1e9
        axes.annotate(f"{left:.0f}", (left, place), (3, 0), textcoords="offset points", va="center", fontsize=9)
    style.name_bars(axes, held)
    axes.margins(x=0.14)
    axes.set_title("Less memory\nLlama-3-8B on 8 GPUs, virtual ranks")
    axes.set_xlabel("GB per rank, at its peak")
    colours = {part: style.PARTS[part] for part in (*SHOWN, "other")}
    axes.legend(handles=style.patches(colours), loc="lower right", fontsize=8)


def _draw_traffic(axes, headline: Headline) -> None:
    counted, paper = sent(headline), sent(headline, "ZeRO paper")
    for place, arm in enumerate(counted):
        axes.barh(place, counted[arm], 0.75, color=style.colour(arm), edgecolor=style.FAINT, linewidth=0.5)
        if arm in paper:
            axes.plot([paper[arm]] * 2, [place - 0.42, place + 0.42], color=style.INK, linewidth=2.5)
        axes.annotate(
            f"{counted[arm]:.2g}",
            (max(counted[arm], paper.get(arm, 0)), place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    style.name_bars(axes, counted)
    axes.margins(x=0.14)
    axes.set_title("More traffic\nthe same job; black line: the ZeRO paper")
    axes.set_xlabel("bytes sent in a step, over DDP's")
