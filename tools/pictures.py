# /// script
# dependencies = ["zero-study[report]"]
# ///
"""The pictures of README and of the pages of answers, from kept runs, and the picture that a link to the report shows.

python tools/pictures.py
"""

import functools
from collections.abc import Callable

from matplotlib.figure import Figure

from study.core.arms import ROOT
from study.records.runs import Runs, load
from study.report import answers, style
from study.report.topics import losses, memory, on_gpu, traffic

STAGES = {
    "ddp": "DDP: each GPU holds everything",
    "zero1": "Stage 1 divides the optimizer states among the GPUs",
    "zero2": "Stage 2 divides the gradients as well",
    "zero3": "Stage 3 divides the weights as well",
}
SHOWN = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer states", "other": "the rest"}
TITLE = "Llama-3-8B on eight GPUs: memory of each GPU"
NOTE = """The same losses: within 2e-6 of DDP's, measured with a small GPT in fp32.
Memory: counted without a GPU on rank 0 of eight, run alone;
stages 2 and 3 measured on an H200 as well."""


@style.figure
def of_memory(runs: Runs, ink: str = "#1d1d1f", page: str = "none") -> Figure:
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
    ax.legend(parts.values(), parts, loc="lower right", labelcolor=ink)
    ax.set_title(TITLE, color=ink, fontsize=11, fontweight="bold")
    drawing.supxlabel(NOTE, x=0.01, ha="left", fontsize=9, color=ink)
    return drawing


def of_losses(runs: Runs) -> Figure:
    return losses.figure(losses.table(Runs(tuple(answers.trained_here(runs)))))


def of_traffic(runs: Runs) -> Figure:
    return traffic.figure(traffic.table(Runs(tuple(answers.of_scale(runs)))))


def of_time(runs: Runs) -> Figure:
    return on_gpu.seconds_figure(on_gpu.seconds(on_gpu.table(runs)).query("model == 'gpt2-medium'"))


# By name: the machine whose runs it shows, how it is drawn, and what a screen reader says.
PICTURES: dict[str, tuple[str, Callable[[Runs], Figure], str]] = {
    "memory": ("cpu-2core", of_memory, TITLE),
    "memory-dark": ("cpu-2core", functools.partial(of_memory, ink="#e6edf3"), TITLE),
    "losses": ("cpu-2core", of_losses, "The losses of DDP and of eleven other ways to train coincide"),
    "traffic": ("cpu-2core", of_traffic, "What a rank sends in a step, in multiples of what DDP sends"),
    "time": ("h200", of_time, "Seconds of a step on one H200, in multiples of one process alone"),
}

if __name__ == "__main__":
    reports = ROOT / "reports"
    for name, (machine, draw, caption) in PICTURES.items():
        (reports / f"answers/{name}.svg").write_text(style.svg(draw(load(reports / machine / "runs")), caption))
    preview = of_memory(load(reports / "cpu-2core/runs"), page="#ffffff")
    preview.savefig(reports / "h200" / "preview.png", dpi=220, metadata={"Software": None})
