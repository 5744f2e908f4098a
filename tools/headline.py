# /// script
# dependencies = ["zero-study[report]"]
# ///
"""The pictures of README and of the answers' pages, from the kept runs of a machine.

python tools/headline.py                                   # all of them, and the picture that a link to the pages shows
"""

import functools
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from study.core.arms import ROOT
from study.core.text import nats
from study.records.runs import Runs, load
from study.report import answers, style
from study.report.topics import documents, losses, memory, on_gpu, traffic

CAPTION = "Compared with DDP: the same losses, less GPU memory, more traffic"
GPU_CAPTION = "On one H200: the same losses, memory as predicted, and what the engines cost one GPU"
BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.45, -0.16), "ncols": 2, "fontsize": 8}


STAGES = {
    "ddp": "DDP: each GPU holds everything",
    "zero1": "Stage 1 divides the optimizer states among the GPUs",
    "zero2": "Stage 2 divides the gradients as well",
    "zero3": "Stage 3 divides the weights as well",
}
SHOWN = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer states", "other": "the rest"}
STAGES_TITLE = "Llama-3-8B on eight GPUs: memory of each GPU"
STAGES_NOTE = """The same losses: within 2e-6 of DDP's, measured with a small GPT in fp32.
Memory: counted without a GPU on rank 0 of eight, run alone;
stages 2 and 3 measured on an H200 as well."""


@style.figure
def picture_of_stages(runs: Runs, ink: str = "#1d1d1f", page: str = "none") -> Figure:
    """What a GPU holds with DDP and with each stage. It is read on a phone too: names stand above their bars."""
    held = memory.table(Runs(tuple(answers.of_scale(runs)))).query("source == 'measured'")
    held["part"] = held["part"].where(held["part"].isin(SHOWN), "other")
    sizes: dict = held.groupby(["arm", "part"])["bytes"].sum().div(1e9).to_dict()
    drawing = Figure(figsize=(style.WIDTH, 3.7), layout="constrained", facecolor=page)
    ax = drawing.subplots()
    ax.set_axis_off()
    for place, (arm, name) in enumerate(STAGES.items()):
        ax.text(0, place - 0.34, name, color=ink, fontsize=10.5)
        end_gb = 0
        for part, label in SHOWN.items():
            size_gb = sizes.get((arm, part), 0)
            ax.barh(place, size_gb, 0.5, end_gb, color=style.PARTS[part], label=label, **style.EDGE)
            end_gb += size_gb
        ax.text(end_gb + 2, place, f"{end_gb:.0f} GB", color=ink, fontsize=13, fontweight="bold", va="center")
    ax.set(xlim=(0, 190), ylim=(len(STAGES) - 0.5, -0.8))
    keys, names = ax.get_legend_handles_labels()
    parts = dict(zip(names, keys, strict=True))
    ax.legend(parts.values(), parts, loc="lower right", labelcolor=ink, alignment="left")
    ax.set_title(STAGES_TITLE, color=ink, fontsize=11, fontweight="bold")
    drawing.supxlabel(STAGES_NOTE, x=0.01, ha="left", fontsize=9, color=ink)
    return drawing


def picture_of_losses(runs: Runs) -> Figure:
    return losses.figure(losses.table(Runs(tuple(answers.trained_here(runs)))))


@style.figure
def picture(runs: Runs) -> Figure:
    rows = losses.table(Runs(tuple(answers.trained_here(runs))))
    at_scale = Runs(tuple(answers.of_scale(runs)))
    held, sent = memory.table(at_scale), traffic.table(at_scale)
    # Arms that offload have another panel: on a machine without a GPU, host and device are one memory.
    held = held[held["panel"] == held["group"]]
    drawing = Figure(figsize=(2 * style.WIDTH, 4.6), layout="constrained")
    left, middle, right = drawing.subplots(1, 3, width_ratios=(1, 1.35, 1.1))
    losses.draw_curves(left, rows[rows["difference"].notna() | (rows["arm"] == answers.BASELINE)])
    left.set_title(
        f"Same losses\nDDP and {rows['arm'].nunique() - 1} arms, {nats(rows['difference'].max())} apart at most"
    )
    left.set_ylabel("training loss of a small GPT, fp32 (nats)")
    style.draw_stacks(middle, held.assign(line=held["arm"]), memory.BARS)
    middle.legend(handles=style.stack_keys(held, memory.BARS), **BELOW)
    middle.set_title(f"Less GPU memory\nLlama-3-8B on {answers.RANKS} virtual ranks, recomputed")
    style.draw_stacks(right, sent.assign(line=sent["arm"]), traffic.BARS._replace(words="{:.2g}".format))
    middle.set_xlabel("a rank at its peak")
    right.legend(handles=style.stack_keys(sent, traffic.BARS), **BELOW)
    right.set_title("More traffic\nthe same runs, one pass in a step")
    right.set_xlabel("bytes sent (1 = one all-reduce)")
    drawing.supxlabel("Hatched: virtual ranks.", x=0.01, ha="left", fontsize=8.5, color=style.FAINT)
    return drawing


@style.figure
def picture_of_gpu(runs: Runs) -> Figure:
    """Losses of one process alone and of stage 2, rank 0 of eight beside a published table, and seconds of a step."""
    curves = losses.table(runs.select(protocol_part="loss"), "single")
    held = documents.memory_000(runs).query("arm != 'ddp'")
    over = on_gpu.seconds(on_gpu.table(runs)).query("model == 'gpt2-medium' and micro_batch == 4")
    drawing = Figure(figsize=(2 * style.WIDTH, 4.3), layout="constrained")
    left, middle, right = drawing.subplots(1, 3, width_ratios=(1, 1.1, 1.1))
    losses.draw_curves(left, curves)
    left.legend(handles=style.keys({arm: style.look(arm) for arm in curves["arm"].unique()}), fontsize=8)
    left.set_title(f"Same losses, to the last bit\nBERT-large on IMDB, {nats(curves['difference'].max())} apart")
    style.draw_stacks(middle, held.assign(line=held["arm"]), memory.BARS)
    middle.legend(handles=style.stack_keys(held, memory.BARS), **BELOW)
    middle.set_title("Memory as predicted, and as published\nGemma2-9B as rank 0 of eight, recomputed")
    style.draw_stacks(right, over, on_gpu.SECONDS)
    right.set_title("What the engines cost one GPU\nGPT-2 medium, bf16, 4 rows of 512 tokens")
    right.set_xlabel(on_gpu.SECONDS.label)
    return drawing


DARK = functools.partial(picture_of_stages, ink="#e6edf3")
Draw = Callable[[Runs], Figure]
# By path: the machine whose runs it shows, how it is drawn, and what a screen reader says.
PICTURES: dict[str, tuple[str, Draw, str]] = {
    "cpu-2core/headline.svg": ("cpu-2core", picture, CAPTION),
    "h200/headline.svg": ("h200", picture_of_gpu, GPU_CAPTION),
    "answers/memory.svg": ("cpu-2core", picture_of_stages, STAGES_TITLE),
    "answers/memory-dark.svg": ("cpu-2core", DARK, STAGES_TITLE),
    "answers/losses.svg": ("cpu-2core", picture_of_losses, "Losses of DDP and of eleven other ways to train"),
}

if __name__ == "__main__":
    reports = ROOT / "reports"
    for name, (machine, draw, caption) in PICTURES.items():
        (reports / name).write_text(style.svg(draw(load(reports / machine / "runs")), caption))
    preview = picture_of_stages(load(reports / "cpu-2core/runs"), page="#ffffff")
    preview.savefig(reports / "h200" / "preview.png", dpi=220, metadata={"Software": None})
