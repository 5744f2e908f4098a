# /// script
# dependencies = ["zero-study[report]"]
# ///
"""The pictures of README and GUIDE, from the kept runs of a machine.

python tools/headline.py reports/h200/headline.svg
python tools/headline.py reports/cpu-2core/headline.svg
python tools/headline.py reports/h200/preview.png       # the picture that a link to the pages shows
"""

import sys
from pathlib import Path
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


PICTURES = {"cpu-2core": (picture, CAPTION), "h200": (picture_of_gpu, GPU_CAPTION)}

if __name__ == "__main__":
    target = Path(sys.argv[1])
    draw, caption = PICTURES[target.parent.name]
    drawing = draw(load(ROOT / "reports" / target.parent.name / "runs"))
    if target.suffix == ".png":
        drawing.savefig(target, dpi=110, metadata={"Software": None})
    else:
        target.write_text(style.svg(drawing, caption))
