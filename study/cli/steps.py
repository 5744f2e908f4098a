"""`study timeline`: predicts the time of a step and draws its streams."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from study.errors import Stop
from study.io import chrome
from study.io.numbers import short
from study.io.tables import say, say_wrapped, show
from study.machine.gpus import GPUS, gpu_named
from study.predictor.advice.question import Precision, bytes_of, default_sequence, link_named, node_size
from study.predictor.advice.settled import settled_arm
from study.predictor.library import Library
from study.predictor.setup import Frozen, Fsdp, Loss, Optimizer, Quantized, Setup, distribution
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
ARM = "zero3"  # the default
GPU = "H100-80GB"  # of a timeline, if no kind is given


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training to predict."""

    arm: str | None = None
    """Name of an arm; `study arms` lists them. Default: zero3."""
    precision: Precision | Literal["fp8"] = "bf16_cast"
    """As in the trainer. fp8 is refused, with the reason."""
    micro_batch: int = 1
    """Rows per GPU and pass."""
    accumulation: int = 1
    """Passes per step."""
    sequence: Tokens | None = None
    """Tokens per row. Default: 2048, or as many as the model reads."""
    checkpointing: bool = False
    """Recompute activations in the backward pass."""
    recompute_every: int | None = None
    """Recompute the activations of every n-th layer only, such as 2."""
    buckets: int | None = None
    """Elements of DeepSpeed's buckets. Default: as the arm's file says."""
    group: int | None = None
    """Ranks that share rows, under zero3_ulysses, zero1_tp and zero2_tp. Default: as the arm's file says."""

    def values(self, model: Transformer) -> dict:
        """Return the fields of a setup that do not depend on the arm."""
        names = ("precision", "micro_batch", "accumulation")
        values = {name: getattr(self, name) for name in names}
        if self.recompute_every is not None and self.recompute_every < 2:
            raise Stop(
                f"--recompute-every must be at least 2 (got {self.recompute_every})", "give --checkpointing for 1"
            )
        values["checkpointing"] = self.recompute_every or self.checkpointing
        values["sequence"] = default_sequence(model) if self.sequence is None else self.sequence
        values["attention"] = "sdpa" if model.has_fused_attention else "eager"
        return values


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """How the training computes. The defaults are the trainer's."""

    attention: Literal["sdpa", "eager"] | None = None
    """sdpa: fused. eager: written out. Default: sdpa if transformers has it for the model."""
    loss: Loss = "whole"
    """How the loss is computed. whole: from all logits at once, as in the trainer. in_place: by a kernel that
    overwrites the logits. chunked: part by part, as Liger does."""
    optimizer: Optimizer = "fused"
    """fused: PyTorch's fused AdamW, as in the trainer. foreach: AdamW with a copy of a moment during the update. The
    others are the trainer's."""
    frozen: Frozen = "as_weights"
    """The dtype of weights that do not train. as_weights: the dtype of the other weights, as after PEFT's
    prepare_model_for_kbit_training. bf16: bf16 under autocast. bf16_without_autocast: bf16 with adapters in fp32, where
    each product has the dtype of its weight."""
    quantized: Quantized | None = None
    """With --lora-rank: how the frozen linear layers are kept, as in QLoRA. After prepare_model_for_kbit_training, give
    --precision fp32 for a training without autocast: then only the products of quantized weights are in 16 bits."""
    keeps_logits: bool = False
    """The loop holds the model's outputs during the backward pass, as after `out = model(...); out.loss.backward()`.
    transformers' Trainer does not."""
    keeps_cache: bool = False
    """The model returns its keys and values, which are held until the loss is computed; with --keeps-logits, those of
    two passes. transformers 4 does so if use_cache is not off and layers have PyTorch's own checkpointing. Known for
    models with k_proj and v_proj, and for GPT-2 and GPT-BigCode."""
    plain_linear: bool = False
    """With stage 3: linear layers are PyTorch's, whose graph keeps the gathered weights until the backward pass. So
    they are where the model was not built within deepspeed.zero.Init, and DeepSpeed is older than 0.19.4.
    from_pretrained builds it within only if TrainingArguments or HfDeepSpeedConfig exists before."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cuda: offloaded tensors are in host memory. cpu: host and device are one memory."""
    cuda: tuple[Literal["attention", "dropout", "autocast"], ...] = ("attention", "dropout", "autocast")
    """Where the CUDA kernels keep other bytes than the CPU's, and the prediction follows CUDA. Only for models that are
    predicted from their config.json, and with --device cuda."""

    def values(self) -> dict:
        """Return the fields of a setup, without those that are left to the model."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        held = {name: given.pop(name) for name in ("keeps_logits", "keeps_cache", "plain_linear")}
        return given | {"library": Library(**held)}


@dataclass(frozen=True, kw_only=True)
class Links:
    """The machine to predict for."""

    gpu: str | None = None
    """Kind of GPU: H100, A100-40GB, L4, RTX4090 and others. With it, `estimate` adds whether it fits, the time of a
    step, and how PyTorch's allocator frees cached memory when the GPU is nearly full. Default of `timeline`: H100."""
    link: str | None = None
    """The slowest link between the GPUs, such as nvlink, pcie4 or ib-hdr. Default: as such machines have."""
    gpus_per_node: int | None = None
    """GPUs in one node. Default: as many as such machines have, mostly 8, or the next lower number that divides all."""
    tf32: bool = True
    """Products of fp32 run in TF32, if the GPU has it. PyTorch needs to be told; our trainer does so."""
    fused_kernels: bool = False
    """Assume that norms, activation functions and rotations are single kernels, as with torch.compile."""
    host_pace: float | None = None
    """Seconds of the host for a kernel, over 51 us; make peaks measures it. 0: CUDA graphs. Default: unknown."""
    disk: str | None = None
    """Read and write speed of a node's disk, such as 6GB/s. Default: its time is not counted."""

    def machine(self, gpus: int) -> Machine | None:
        """Return the machine with so many GPUs; None if their kind is not given."""
        if self.gpu is None:
            if self != Links():
                raise Stop("options of a machine need its kind of GPU", "give --gpu")
            return None
        gpu = gpu_named(self.gpu)
        per_node = min(gpus, node_size(gpus, gpu, self.gpus_per_node))
        several = gpus > per_node
        joined = None if gpus == 1 or self.link is None else link_named(self.link, GPUS[gpu], several)
        return Machine(
            gpu=gpu,
            gpus_per_node=per_node,
            tf32=self.tf32,
            fused_kernels=self.fused_kernels,
            host_pace=self.host_pace,
            link=None if several else joined,
            network=joined if several else None,
            disk_bytes_per_s=None if self.disk is None else bytes_of(self.disk, "--disk", "B/s"),
        )


@dataclass(frozen=True)
class Asked:
    """A training on a machine, as `estimate` and `timeline` predict it."""

    arm: str
    setup: Setup
    machine: Machine | None


def with_fsdp(known: Asked, fsdp: Fsdp) -> Asked:
    """Return a training under PyTorch's own FSDP, without Accelerate, instead of an arm."""
    setup = replace(known.setup, deepspeed=None, fsdp=fsdp, fsdp_by="torch", fsdp_offload=False, group=None)
    return replace(known, arm=fsdp, setup=setup)


def full_setup(model: Transformer, training: Training, kernels: Kernels, links: Links, ranks: int) -> Asked:
    """Return the setup under an arm with the sizes that are given, and the machine."""
    name = training.arm or ARM
    arm = arms.load_arm(name)
    if not 0 < ranks <= 65536:
        raise Stop(f"--ranks must be from 1 to 65536 (got {ranks})", "give such a number")
    ranks = 1 if arm.distributed_type == "NO" else ranks
    machine = links.machine(ranks)
    local = machine.gpus_per_node if machine else ranks
    settled = settled_arm(arm, ranks, local, training.group, training.buckets)
    values = distribution(settled, ranks) | training.values(model) | kernels.values()
    return Asked(name, Setup(model=model, ranks=ranks, **values), machine)


def timeline(
    wanted: Annotated[Wanted, tyro.conf.arg(name="")],
    training: Annotated[Training, tyro.conf.arg(name="")],
    kernels: Annotated[Kernels, tyro.conf.arg(name="")],
    links: Annotated[Links, tyro.conf.arg(name="")],
    *,
    gpus: Annotated[int, tyro.conf.arg(aliases=("--ranks",))] = 8,
    svg: Path | None = None,
    trace: Path | None = None,
    as_json: AsJson = False,
) -> dict | None:
    """Predict the time of a step, and show which streams work at the same time. Nothing is run.

    At most three passes are drawn, because the middle ones are alike.

    Args:
        wanted: The model.
        training: The training.
        kernels: How it computes.
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
    arm = training.arm or ARM
    if gpus != 1 and arms.load_arm(arm).distributed_type == "NO":
        raise Stop(f"{arm} trains on one GPU (got {gpus})", "give --gpus 1, or another --arm")
    known = full_setup(model, training, kernels, replace(links, gpu=links.gpu or GPU), gpus)
    machine = known.machine or Machine(gpu=GPU)
    step = step_time(known.setup, machine)
    nodes = machine.links(gpus).nodes
    places = f" in {nodes} nodes" if nodes > 1 else ""
    title = f"{known.arm} on {gpus} x {machine.gpu}{places}, predicted: {in_words(step)}"
    if svg is not None:
        from study.report.topics import timeline as drawing

        drawing.save(step.timeline, title, svg)
    if trace is not None:
        chrome.write(trace, [(title, s.task.stream, s.task.name, s.start_s, s.end_s) for s in step.timeline])
    if as_json:
        return as_dict(step)
    _show(step, title, training.accumulation)
    say_wrapped(*of_bf16(known.setup, machine.gpu))
    return None


def _show(step: StepTime, title: str, passes: int) -> None:
    shown = f"{MOST_PASSES} of {passes} passes" if passes > MOST_PASSES else "a step"
    legend = f"f forward, b backward, g gather, r reduce, u update or states; {shown}"
    say(title, "", *lanes(step.timeline), f"{'':14}{legend}", "")
    show([{**row, "of the step": f"{step.parts[row['busy']] / step.seconds:.0%}"} for row in parts(step)])


def of_bf16(setup: Setup, gpu: str | None) -> list[str]:
    """Say that a GPU has no bf16, if that is the precision of a prediction."""
    if gpu is None or GPUS[gpu].has_bf16 or not setup.precision.startswith("bf16"):
        return []
    return [f"{gpu} has no bf16, and this is a prediction for bf16: give --precision fp16."]


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
