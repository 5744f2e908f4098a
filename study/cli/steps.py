"""`study timeline`: predicts the time of a step and draws its streams."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from study.errors import Stop
from study.io import chrome
from study.io.numbers import short
from study.io.tables import say, show
from study.machine.gpus import GPUS, gpu_named
from study.predictor.advice.question import Precision, link_named, node_size
from study.predictor.setup import Setup
from study.predictor.timing import pace
from study.predictor.timing.replay import Span
from study.predictor.timing.steptime import MOST_PASSES, Machine, StepTime, step_time
from study.predictor.tracing.transformer import Transformer
from study.predictor.wanted import Wanted, asked_for
from study.spec import arms
from study.spec.options import AsJson
from study.spec.settings import Tokens

LANE = 88  # characters of a lane
MARKS = {"forward": "f", "backward": "b", "update": "u", "all_gather": "g"}  # by the first word of a task; others: "r"
BUSY = 0.1  # a character is drawn if tasks take at least this share of its time
DEFAULT_SEQUENCE = 1024
ARM = "zero3"  # the default


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training to predict."""

    arm: str | None = None
    """Name of an arm; `study arms` lists them. Default: zero3, or zero1 where ranks divide the model."""
    precision: Precision | Literal["fp8"] = "bf16_cast"
    """As in the trainer. fp8 is refused, with the reason."""
    micro_batch: int = 1
    """Rows per GPU and pass."""
    accumulation: int = 1
    """Passes per step."""
    sequence: Tokens | None = None
    """Tokens per row. Default: 1024, or as many as the model reads."""
    checkpointing: bool = False
    """Recompute activations in the backward pass."""

    def values(self, model: Transformer) -> dict:
        """Return the fields of a setup that do not depend on the arm."""
        values = {name: value for name, value in vars(self).items() if name not in ("arm", "sequence")}
        values["sequence"] = default_sequence(model) if self.sequence is None else self.sequence
        values["attention"] = "sdpa" if model.has_fused_attention else "eager"
        return values


@dataclass(frozen=True, kw_only=True)
class Links:
    """The machine to predict for."""

    gpu: str = "H100"
    """Kind of GPU: H100, A100-40GB, L4, RTX4090 and others."""
    link: str | None = None
    """The slowest link between the GPUs, such as nvlink, pcie4 or ib-hdr. Default: as such machines have."""
    gpus_per_node: int | None = None
    """GPUs in one node. Default: as many as such machines have, mostly 8."""
    fused_kernels: bool = False
    """Assume that norms, activation functions and rotations are single kernels, as with torch.compile."""
    host_pace: float | None = None
    """Seconds of the host for a kernel, over 51 us; study peaks measures it. 0: CUDA graphs. Default: unknown."""

    def machine(self, gpus: int) -> Machine:
        """Return the machine with so many GPUs."""
        gpu = gpu_named(self.gpu)
        per_node = min(gpus, node_size(gpus, gpu, self.gpus_per_node))
        several = gpus > per_node
        joined = None if gpus == 1 or self.link is None else link_named(self.link, GPUS[gpu], several)
        return Machine(
            gpu=gpu,
            gpus_per_node=per_node,
            fused_kernels=self.fused_kernels,
            host_pace=self.host_pace,
            link=None if several else joined,
            network=joined if several else None,
        )


def default_sequence(model: Transformer) -> int:
    """Return the tokens of a row where the user leaves them to the model."""
    return min(DEFAULT_SEQUENCE, model.positions or DEFAULT_SEQUENCE)


def timeline(
    wanted: Annotated[Wanted, tyro.conf.arg(name="")],
    training: Annotated[Training, tyro.conf.arg(name="")],
    links: Annotated[Links, tyro.conf.arg(name="")],
    *,
    gpus: int = 8,
    svg: Path | None = None,
    trace: Path | None = None,
    as_json: AsJson = False,
) -> dict | None:
    """Predict the time of a step, and show which streams work at the same time. Nothing is run.

    At most three passes are drawn, because the middle ones are alike.

    Args:
        wanted: The model.
        training: The training.
        links: The machine.
        gpus: Number of GPUs over all nodes.
        svg: Also draw the step into this SVG file.
        trace: Also write the step into this JSON file, as a trace that Perfetto (ui.perfetto.dev) opens.
        as_json: Print the prediction as JSON.
    """
    if trace is not None and trace.suffix != ".json":
        raise Stop(f"--trace {trace} is not the name of a JSON file", "give a name that ends with .json")
    if svg is not None and svg.suffix != ".svg":
        raise Stop(f"--svg {svg} is not the name of an SVG file", "give a name that ends with .svg")
    model = asked_for(wanted, training.sequence or 1)
    if gpus < 1:
        raise Stop(f"--gpus must be at least 1 (got {gpus})", "give 1 or more")
    arm = training.arm or ARM
    if gpus != 1 and arms.load_arm(arm).distributed_type == "NO":
        raise Stop(f"{arm} trains on one GPU (got {gpus})", "give --gpus 1, or another --arm")
    machine = links.machine(gpus)
    setup = Setup.of_arm(model, arm, ranks=gpus, device="cuda", **training.values(model))
    step = step_time(setup, machine)
    title = f"{arm} on {gpus} x {machine.gpu}, predicted: {in_words(step)}"
    if svg is not None:
        from study.report.topics import timeline as drawing

        drawing.save(step.timeline, title, svg)
    if trace is not None:
        chrome.write(trace, [(title, s.task.stream, s.task.name, s.start_s, s.end_s) for s in step.timeline])
    if as_json:
        return as_dict(step)
    _show(step, title, training.accumulation)
    return None


def _show(step: StepTime, title: str, passes: int) -> None:
    shown = f"{MOST_PASSES} of {passes} passes" if passes > MOST_PASSES else "a step"
    legend = f"f forward, b backward, g gather, r reduce, u update or states; {shown}"
    say(title, "", *lanes(step.timeline), f"{'':14}{legend}", "")
    show([{**row, "of the step": f"{step.parts[row['busy']] / step.seconds:.0%}"} for row in parts(step)])


def in_words(step: StepTime) -> str:
    """Return `1.27 s per step (1.1 to 1.5 s, limited by compute)`."""
    return f"{step.seconds:.3g} s per step ({step.low_s:.2g} to {step.high_s:.2g} s, limited by {step.limit})"


def parts(step: StepTime) -> list[dict]:
    """Return the seconds of each kind of work in a step, the longest first."""
    in_order = sorted(step.parts.items(), key=lambda part: -part[1])
    return [{"busy": part, "s": short(busy_s)} for part, busy_s in in_order]


def as_dict(step: StepTime) -> dict:
    spans = [[s.task.stream, s.task.name, s.start_s, s.end_s] for s in step.timeline]
    interval = {"low_s": step.low_s, "high_s": step.high_s, "limit": step.limit}
    return {"seconds": step.seconds} | interval | {"busy_s": step.parts, "timeline": spans}


def lanes(spans: tuple[Span, ...]) -> list[str]:
    """Return a line of characters for each stream: in each column the mark of the tasks that take most of its time."""
    column_s = max(span.end_s for span in spans) / LANE
    busy: dict[str, list[dict[str, float]]] = {}
    for span in spans:
        stream = busy.setdefault(span.task.stream, [{} for _ in range(LANE)])
        first = span.start_s / column_s
        last = span.end_s / column_s
        for column in range(int(first), min(LANE, int(last) + 1)):
            share = max(0.0, min(last, column + 1) - max(first, column))
            stream[column][_mark(span)] = stream[column].get(_mark(span), 0.0) + share
    return [f"{stream:14}{''.join(map(_of_column, columns))}" for stream, columns in busy.items()]


def _of_column(column: dict[str, float]) -> str:
    return max(column, key=column.__getitem__) if sum(column.values()) >= BUSY else "."


def _mark(span: Span) -> str:
    others = "u" if span.task.stream in ("host", "disk") else "r"
    return MARKS.get(span.task.name.partition(" ")[0], others)


def explained(step: StepTime, gpu: str) -> list[dict]:
    """Return every constant that a prediction used, with its origin."""
    kind = GPUS[gpu]
    fitted = "fitted: it covers 80 % of the rows of sources that were predicted without themselves"
    rows = [(name, each["value"], each["unit"], each["origin"]) for name, each in pace.origins().items()]
    rows += [(f"{name} at most", share, "of the peak", why) for name, (share, why) in pace.ceilings(gpu).items()]
    rows += [
        ("interval", step.factor, "of the time, both ways", fitted),
        ("peak", kind.half_flops_per_s / 1e12, "TFLOP/s in 16 bits", kind.source),
        ("memory", kind.memory_bytes_per_s / 1e9, "GB/s", kind.source),
    ]
    return [{"constant": name, "value": short(value), "unit": unit, "origin": why} for name, value, unit, why in rows]
