"""`study timeline`: a predicted step, stream by stream."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from study.errors import Stop
from study.machine.gpus import GPUS, gpu_named
from study.text.numbers import short
from study.text.tables import say, show
from study.theory import pace
from study.theory.architecture import Wanted, asked_for
from study.theory.question import link_named, node_size
from study.theory.replay import Span
from study.theory.setup import Setup, arm_named
from study.theory.steptime import MOST_PASSES, Machine, StepTime, step_time

LANE = 88  # characters of a lane
MARKS = {
    "forward": "f",
    "backward": "b",
    "update": "u",
    "all_gather": "g",
}  # of tasks, by their first word; others: "r"
BUSY = 0.1  # a character is drawn where tasks take at least this share of its time
AsJson = Annotated[bool, tyro.conf.arg(name="json")]


def timeline(
    wanted: Annotated[Wanted, tyro.conf.arg(name="")],
    *,
    gpus: int = 8,
    gpu: str = "H100",
    arm: str = "zero3",
    precision: Literal["fp32", "bf16", "fp16", "bf16_cast"] = "bf16_cast",
    micro_batch: int = 1,
    accumulation: int = 1,
    sequence: int | None = None,
    checkpointing: bool = False,
    link: str | None = None,
    gpus_per_node: int | None = None,
    fused_kernels: bool = False,
    svg: Path | None = None,
    as_json: AsJson = False,
) -> dict | None:
    """Predict a step's time, and show what overlaps with what. Nothing is run.

    Args:
        wanted: The model.
        gpus: How many, over all nodes.
        gpu: Which: H100, A100-40GB, L4, RTX4090 and others.
        arm: A file in accelerate_configs/.
        precision: As in the trainer.
        micro_batch: Rows per GPU and pass.
        accumulation: Passes per step. At most three are drawn: those in the middle are alike.
        sequence: Tokens per row. Default: 1024, or as many as the model reads.
        checkpointing: Recompute activations.
        link: Between GPUs, the slowest on the way. Default: as such machines have.
        gpus_per_node: Default: 8, or as many as there are.
        fused_kernels: Norms, activation functions and rotations are single kernels, as torch.compile makes them.
        svg: Draw it into this file.
        as_json: Print it as JSON.
    """
    name, model = gpu_named(gpu), asked_for(wanted, sequence or 1)
    if gpus != 1 and arm_named(arm).distributed_type == "NO":
        raise Stop(f"{arm} trains on one GPU (got {gpus})", "give --gpus 1, or another --arm")
    if gpus < 1:
        raise Stop(f"--gpus must be at least 1 (got {gpus})", "give 1 or more")
    per_node = min(gpus, node_size(gpus, name, gpus_per_node))
    several = gpus > per_node
    joined = None if gpus == 1 or link is None else link_named(link, GPUS[name], several)
    links = {"network" if several else "link": joined}
    machine = Machine(gpu=name, gpus_per_node=per_node, fused_kernels=fused_kernels, **links)
    setup = Setup.of_arm(
        model,
        arm,
        ranks=gpus,
        precision=precision,
        micro_batch=micro_batch,
        accumulation=accumulation,
        sequence=min(1024, model.positions or 1024) if sequence is None else sequence,
        attention="sdpa" if model.has_fused_attention else "eager",
        checkpointing=checkpointing,
        device="cuda",
    )
    step = step_time(setup, machine)
    title = f"{arm} on {gpus} x {name}, predicted: {in_words(step)}"
    if svg is not None:
        from study.report import timeline as drawing

        if svg.suffix != ".svg":
            raise Stop(f"--svg {svg} is not the name of an SVG file", "give a name that ends with .svg")
        drawing.save(step.timeline, title, svg)
    if as_json:
        return as_dict(step)
    say(title, "")
    shown = f"{min(accumulation, MOST_PASSES)} of {accumulation} passes" if accumulation > MOST_PASSES else "a step"
    say(*lanes(step.timeline), f"{'':14}f forward, b backward, g gather, r reduce, u update or states; {shown}", "")
    show(
        [
            {"busy": part, "s": short(busy_s), "of the step": f"{busy_s / step.seconds:.0%}"}
            for part, busy_s in parts(step)
        ]
    )


def in_words(step: StepTime) -> str:
    """`1.27 s per step (1.1 to 1.5 s, limited by compute)`."""
    return f"{step.seconds:.3g} s per step ({step.low_s:.2g} to {step.high_s:.2g} s, limited by {step.limit})"


def parts(step: StepTime) -> list[tuple[str, float]]:
    return sorted(step.parts.items(), key=lambda part: -part[1])


def as_dict(step: StepTime) -> dict:
    spans = [[s.task.stream, s.task.name, s.start_s, s.end_s] for s in step.timeline]
    interval = {"low_s": step.low_s, "high_s": step.high_s, "limit": step.limit}
    return {"seconds": step.seconds} | interval | {"busy_s": step.parts, "timeline": spans}


def lanes(spans: tuple[Span, ...]) -> list[str]:
    """A line of characters for each stream that does something."""
    end_s = max(span.end_s for span in spans)
    lines = []
    for stream in dict.fromkeys(span.task.stream for span in spans):
        busy = [dict.fromkeys((*MARKS.values(), "r"), 0.0) for _ in range(LANE)]
        for span in spans:
            if span.task.stream == stream and span.end_s > span.start_s:
                mark = MARKS.get(span.task.name.partition(" ")[0], "u" if stream in ("host", "disk") else "r")
                first, last = span.start_s / end_s * LANE, span.end_s / end_s * LANE
                for place in range(int(first), min(LANE, int(last) + 1)):
                    busy[place][mark] += max(0.0, min(last, place + 1) - max(first, place))
        drawn = (max(cell, key=cell.get) if sum(cell.values()) >= BUSY else "." for cell in busy)
        lines.append(f"{stream:14}{''.join(drawn)}")
    return lines


def explained(step: StepTime, gpu: str) -> list[dict]:
    """Every constant that went into a prediction, with its origin."""
    rows = [
        {"constant": name, "value": short(constant["value"]), "unit": constant["unit"], "origin": constant["origin"]}
        for name, constant in pace.origins().items()
    ]
    kind = GPUS[gpu]
    rows += [
        {"constant": f"{name} at most", "value": short(share), "unit": "of the peak", "origin": origin}
        for name, (share, origin) in pace.ceilings(gpu).items()
    ]
    width = {"constant": "interval", "value": short(step.factor), "unit": "of the time, both ways"}
    rows.append(width | {"origin": "fitted: 80 % of the rows of sources that were predicted without themselves"})
    datasheet = {"peak": (kind.half_flops_per_s / 1e12, "TFLOP/s in 16 bits")}
    datasheet |= {"memory": (kind.memory_bytes_per_s / 1e9, "GB/s")}
    return rows + [
        {"constant": name, "value": short(value), "unit": unit, "origin": f"{kind.source}"}
        for name, (value, unit) in datasheet.items()
    ]
