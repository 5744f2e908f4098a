"""`study timeline`: predicts the time of a step and draws its streams."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from study.errors import Stop
from study.io.numbers import short
from study.io.tables import say, show
from study.machine.gpus import GPUS, gpu_named
from study.predictor.advice.question import link_named, node_size
from study.predictor.architecture import Architecture
from study.predictor.setup import Setup
from study.predictor.timing import pace
from study.predictor.timing.replay import Span
from study.predictor.timing.steptime import MOST_PASSES, Machine, StepTime, step_time
from study.predictor.tracing.transformer import Transformer
from study.predictor.wanted import Wanted, asked_for
from study.spec import arms
from study.spec.options import AsJson

LANE = 88  # characters of a lane
MARKS = {"forward": "f", "backward": "b", "update": "u", "all_gather": "g"}  # by the first word of a task; others: "r"
BUSY = 0.1  # a character is drawn if tasks take at least this share of its time
DEFAULT_SEQUENCE = 1024


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
    """Predict the time of a step, and show which streams work at the same time. Nothing is run.

    Args:
        wanted: The model.
        gpus: Number of GPUs over all nodes.
        gpu: Kind of GPU: H100, A100-40GB, L4, RTX4090 and others.
        arm: Name of an arm; `study arms` lists them.
        precision: As in the trainer.
        micro_batch: Rows per GPU and pass.
        accumulation: Passes per step. At most three are drawn, because the middle ones are alike.
        sequence: Tokens per row. Default: 1024, or as many as the model reads.
        checkpointing: Recompute activations in the backward pass.
        link: The slowest link between the GPUs, such as nvlink, pcie4 or ib-hdr. Default: as such machines have.
        gpus_per_node: GPUs in one node. Default: as many as such machines have, mostly 8.
        fused_kernels: Assume that norms, activation functions and rotations are single kernels, as with torch.compile.
        svg: Also draw the step into this SVG file.
        as_json: Print the prediction as JSON.
    """
    if svg is not None and svg.suffix != ".svg":
        raise Stop(f"--svg {svg} is not the name of an SVG file", "give a name that ends with .svg")
    model = asked_for(wanted, sequence or 1)
    if gpus != 1 and arms.load_arm(arm).distributed_type == "NO":
        raise Stop(f"{arm} trains on one GPU (got {gpus})", "give --gpus 1, or another --arm")
    if gpus < 1:
        raise Stop(f"--gpus must be at least 1 (got {gpus})", "give 1 or more")
    options = {"precision": precision, "micro_batch": micro_batch, "accumulation": accumulation, "device": "cuda"}
    options |= defaults_of(model, sequence) | {"checkpointing": checkpointing}
    machine = _machine(gpu_named(gpu), gpus, gpus_per_node, link, fused_kernels)
    step = step_time(Setup.of_arm(model, arm, ranks=gpus, **options), machine)
    title = f"{arm} on {gpus} x {machine.gpu}, predicted: {in_words(step)}"
    if svg is not None:
        from study.report.topics import timeline as drawing

        drawing.save(step.timeline, title, svg)
    if as_json:
        return as_dict(step)
    say(title, "")
    shown = f"{min(accumulation, MOST_PASSES)} of {accumulation} passes" if accumulation > MOST_PASSES else "a step"
    say(*lanes(step.timeline), f"{'':14}f forward, b backward, g gather, r reduce, u update or states; {shown}", "")
    shares = [(part, busy_s, f"{busy_s / step.seconds:.0%}") for part, busy_s in parts(step)]
    show([{"busy": part, "s": short(busy_s), "of the step": share} for part, busy_s, share in shares])


def defaults_of(model: Architecture | Transformer, sequence: int | None, attention: str | None = None) -> dict:
    """The sequence and the attention of a prediction, where the user leaves them to the model."""
    longest = min(DEFAULT_SEQUENCE, model.positions or DEFAULT_SEQUENCE)
    own_attention = "sdpa" if model.has_fused_attention else "eager"
    return {"sequence": longest if sequence is None else sequence, "attention": attention or own_attention}


def _machine(gpu: str, gpus: int, gpus_per_node: int | None, link: str | None, fused_kernels: bool) -> Machine:
    per_node = min(gpus, node_size(gpus, gpu, gpus_per_node))
    several = gpus > per_node
    joined = None if gpus == 1 or link is None else link_named(link, GPUS[gpu], several)
    links = {"network" if several else "link": joined}
    return Machine(gpu=gpu, gpus_per_node=per_node, fused_kernels=fused_kernels, **links)


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
    """A line of characters for each stream that has tasks."""
    end_s = max(span.end_s for span in spans)
    lines = []
    for stream in dict.fromkeys(span.task.stream for span in spans):
        busy = [dict.fromkeys((*MARKS.values(), "r"), 0.0) for _ in range(LANE)]
        for span in spans:
            if span.task.stream == stream and span.end_s > span.start_s:
                mark = MARKS.get(span.task.name.partition(" ")[0], "u" if stream in ("host", "disk") else "r")
                first, last = span.start_s / end_s * LANE, span.end_s / end_s * LANE
                for column in range(int(first), min(LANE, int(last) + 1)):
                    busy[column][mark] += max(0.0, min(last, column + 1) - max(first, column))
        drawn = (max(cell, key=cell.get) if sum(cell.values()) >= BUSY else "." for cell in busy)
        lines.append(f"{stream:14}{''.join(drawn)}")
    return lines


def explained(step: StepTime, gpu: str) -> list[dict]:
    """Every constant that a prediction used, with its origin."""
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
