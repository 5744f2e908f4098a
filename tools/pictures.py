# /// script
# dependencies = ["zero-study[report]"]
# ///
"""The pictures of README and of the pages of answers, from kept runs, and the picture that a link to the report shows.

python tools/pictures.py
"""

import argparse
import functools
import textwrap
from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from packaging.version import Version

from study.conform import releases
from study.core.arms import ROOT
from study.ledger import texts, verdicts
from study.records import metrics
from study.records.runs import Runs, load
from study.report import answers, style
from study.report.topics import losses, memory, on_gpu, traffic

STAGES = {
    "ddp": "DDP: each GPU holds everything",
    "zero1": "Stage 1 divides the optimizer states",
    "zero2": "Stage 2 divides the gradients as well",
    "zero3": "Stage 3 divides the weights as well",
}
SHOWN = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer states", "other": "the rest"}
TITLE = "Llama-3-8B on eight GPUs: tensors of each at its peak"

INK, INK_AT_NIGHT = "#1d1d1f", "#e6edf3"
LORA = "LoRA on Llama-3-8B, stage 3, recomputed: peak of a rank"
FIT = "Predicted over measured"
RELEASES = "Releases of DeepSpeed, from the oldest to the newest"
CLAIMS = "Published claims by verdict"
WRONG = {
    "autocast-norms": "the norm with torch_autocast",
    "accumulation-4": "only the last micro-batch trains",
    "inner-forward": "a call of engine.module counts several times",
}


@style.figure
def of_memory(runs: Runs, ink: str = INK) -> Figure:
    """What a GPU holds with DDP and with each stage. It is read on a phone too: names stand above their bars."""
    held = memory.table(Runs(tuple(answers.of_scale(runs)))).query("source == 'measured'")
    held["part"] = held["part"].where(held["part"].isin(SHOWN), "other")
    sizes: dict = held.groupby(["arm", "part"])["bytes"].sum().div(1e9).to_dict()
    # The usual count has gradients in bf16 alone, as many bytes as weights.
    beyond_gb = sizes["ddp", "gradients"] - sizes["ddp", "weights"]
    sizes["ddp", "gradients"] -= beyond_gb
    sizes["ddp", "other"] += beyond_gb
    drawing, ax = plain(4.1, TITLE, ink)
    for place, (arm, name) in enumerate(STAGES.items()):
        ax.text(0, place - 0.34, name, color=ink, fontsize=10.5)
        end_gb = 0
        for part, label in SHOWN.items():
            size_gb = sizes.get((arm, part), 0)
            ax.barh(place, size_gb, 0.5, end_gb, color=style.PARTS[part], label="" if place else label, **style.EDGE)
            end_gb += size_gb
        ax.text(end_gb + 2, place, f"{end_gb:.0f} GB", color=ink, fontsize=13, fontweight="bold", va="center")
    usual_gb = sum(sizes["ddp", part] for part in ("weights", "gradients", "optimizer"))
    ax.plot([usual_gb] * 2, [-0.25, 0.32], color=ink, linewidth=1)
    ax.text(usual_gb - 2, 0.41, f"{usual_gb:.0f}: 16 bytes a parameter", color=ink, fontsize=9, ha="right")
    ax.set(xlim=(0, 190), ylim=(len(STAGES) + 0.4, -0.8))
    ax.legend(loc="lower right", labelcolor=ink)
    return drawing


def plain(height: float, title: str, ink: str) -> tuple[Figure, Axes]:
    """Return a figure without axes, in an ink that its page shows. What to know of it is text of that page."""
    drawing = Figure(figsize=(style.WIDTH, height), layout="constrained", facecolor="none")
    ax = drawing.subplots()
    ax.set_axis_off()
    ax.set_title(textwrap.fill(title, style.TITLE_LETTERS), color=ink, fontsize=11, fontweight="bold")
    return drawing, ax


@style.figure
def of_lora(runs: Runs, ink: str = INK) -> Figure:
    """The peak of rank 0 with adapters, by release and by how it recomputes."""
    drawing, ax = plain(2.9, LORA, ink)
    found = runs.select(model="llama3-8b", lora_rank=16, checkpointing=True).done
    for place, run in enumerate(sorted(found, key=lambda run: -metrics.value(run.record, "tracked_peak_bytes"))):
        software, size_gb = run.record.software, metrics.value(run.record, "tracked_peak_bytes") / 1e9
        name = f"deepspeed {software['deepspeed']}, transformers {software['transformers']}"
        recomputes = "reentrant" if run.record.requested.reentrant else "not reentrant"
        ax.text(0, place - 0.36, f"{name}, {recomputes}", color=ink, fontsize=9.5)
        ax.barh(place, size_gb, 0.4, color=style.PARTS["weights"], **style.EDGE)
        ax.text(size_gb + 0.3, place, f"{size_gb:.1f} GB", color=ink, fontsize=12, fontweight="bold", va="center")
    ax.set(xlim=(0, 21), ylim=(len(found) - 0.6, -0.8))
    return drawing


@style.figure
def of_fit(runs: Runs, ink: str = INK) -> Figure:
    """Each run of four sets: what was predicted over what was measured, of memory and of seconds."""
    drawing, ax = plain(2.6, FIT, ink)
    later = [on_gpu.table(load(folder / "runs"), folder) for folder in on_gpu.LATER]
    rows = pd.concat([on_gpu.table(runs), *later])
    for place, (name, column) in enumerate(
        {"peak of tensors": "allocated_bytes", "seconds of a step": "step_s"}.items()
    ):
        over = np.log2(rows[on_gpu.OVER[column]].dropna().astype(float).sort_values())
        high = place + np.tile([-0.12, -0.04, 0.04, 0.12], len(over))[: len(over)]  # or dots would hide each other
        ax.plot(over, high, ".", color=style.PARTS["weights"], markersize=5)
        ax.text(-3.3, place - 0.28, f"{name}, {len(over)} runs", color=ink, fontsize=10.5)
    for at, name in {-3: "an eighth", -2: "a quarter", -1: "half", 0: "as predicted", 1: "twice"}.items():
        ax.axvline(at, color=style.FAINT, linewidth=0.8, linestyle=":")
        ax.text(at, 1.5, name, color=ink, fontsize=9, ha="center")
    ax.set(xlim=(-3.4, 1.4), ylim=(1.6, -0.6))
    return drawing


@style.figure
def of_releases(_: Runs, ink: str = INK) -> Figure:
    """Which releases of DeepSpeed get something wrong with stage 2 without a message."""
    drawing, ax = plain(2.7, RELEASES, ink)
    kept = releases.answers()
    asked = sorted({*kept.query("adapter == 'zero2'")["deepspeed"]}, key=Version)
    differs = kept.query("kind == 'differs'").groupby(["adapter", "property"])["deepspeed"].agg(set)
    wrong_in = differs["zero2"].to_dict()
    # Who trains the last micro-batch alone fails the third test by that, and passes it with stages 1 and 3.
    wrong_in["inner-forward"] = wrong_in["inner-forward"] - wrong_in["accumulation-4"]
    wrong_in["inner-forward"] |= differs["zero3", "inner-forward"] & {"0.18.9"}  # its stage 2 needs a GPU
    for place, (each, name) in enumerate(WRONG.items()):
        wrong = wrong_in[each]
        ax.text(0, place - 0.33, name, color=ink, fontsize=10)
        for at, release in enumerate(asked):
            ax.barh(place, 0.86, 0.4, at, color=style.ARMS["zero3"][0] if release in wrong else "none", **style.EDGE)
    for at in (0, len(asked) // 2, len(asked) - 1):
        ax.text(at + 0.4, len(WRONG) - 0.35, asked[at], color=ink, fontsize=9, ha="center")
    ax.set(xlim=(-0.8, len(asked) + 0.6), ylim=(len(WRONG) - 0.3, -0.7))
    return drawing


@style.figure
def of_claims(_: Runs, ink: str = INK) -> Figure:
    """How many claims of papers and how many of articles have each verdict."""
    drawing, ax = plain(3.5, CLAIMS, ink)
    for row, (source, part) in enumerate({"papers": "weights", "articles": "other"}.items()):
        of_source = verdicts.counts(claim for claim in texts.claims() if source in claim.kinds)
        for place, (verdict, number) in enumerate(of_source.items()):
            y = place + 0.3 * row
            ax.barh(y, number, 0.3, color=style.PARTS[part], label=f"of {source}" if place == 0 else "", **style.EDGE)
            ax.text(number + 0.3, y, str(number), color=ink, fontsize=11, fontweight="bold", va="center")
            if not row:
                ax.text(0, y - 0.28, verdict, color=ink, fontsize=10.5)
    ax.set(xlim=(0, 27), ylim=(len(texts.VERDICTS) - 0.4, -0.7))
    ax.legend(loc="upper right", labelcolor=ink)
    return drawing


def of_losses(runs: Runs) -> Figure:
    return losses.figure(losses.table(Runs(tuple(answers.trained_here(runs)))))


def of_traffic(runs: Runs) -> Figure:
    return traffic.figure(answers.titled(traffic.table(Runs(tuple(answers.of_scale(runs))))))


def of_time(runs: Runs) -> Figure:
    return on_gpu.seconds_figure(on_gpu.seconds(on_gpu.table(runs)).query("model == 'gpt2-medium'"))


# By name: the machine whose runs it shows, how it is drawn, and what a screen reader says.
TWICE: dict[str, tuple[str, Callable[..., Figure], str]] = {
    "memory": ("cpu-2core", of_memory, TITLE),
    "lora": ("h200-2", of_lora, LORA),
    "fit": ("h200", of_fit, f"{FIT}: the peak of tensors and the seconds of a step, in four sets of runs"),
    "releases": ("h100", of_releases, "Which releases of DeepSpeed train something wrong without a message"),
    "claims": ("h100", of_claims, CLAIMS),
}
PICTURES: dict[str, tuple[str, Callable[[Runs], Figure], str]] = {
    "losses": ("cpu-2core", of_losses, "The losses of DDP and of eleven other ways to train coincide"),
    "traffic": ("cpu-2core", of_traffic, "What a rank sends in a step, in multiples of what DDP sends"),
    "time": ("h200", of_time, "Seconds of a step on one H200, in multiples of one process alone"),
    **TWICE,
}
for each, (runs_of, shown, said) in TWICE.items():  # on a dark page
    PICTURES[f"{each}-dark"] = (runs_of, functools.partial(shown, ink=INK_AT_NIGHT), said)

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    reports = ROOT / "reports"
    for name, (machine, draw, caption) in PICTURES.items():
        (reports / f"answers/{name}.svg").write_text(style.svg(draw(load(reports / machine / "runs")), caption))
    preview = of_memory(load(reports / "cpu-2core/runs"))
    preview.savefig(reports / "h200" / "preview.png", dpi=220, facecolor="#ffffff", metadata={"Software": None})
