"""`study advise`: which arm to use on given GPUs. `study estimate`: what a rank holds and moves, and if it fits."""

import shlex
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import tyro

from study.core import arms
from study.core.errors import Stop
from study.core.gpus import GPUS, gpu_named
from study.core.optimizers import refusal
from study.core.options import AsJson
from study.core.settings import Optimizer, Tokens, flag
from study.core.text import say, say_wrapped, show, size
from study.predict.front import (
    MOST_GPUS,
    Estimate,
    Machine,
    Precision,
    Question,
    Setup,
    StepTime,
    Transformer,
    Wanted,
    asked_for,
    fewest,
    fits_on,
    memory_kinds,
    reserve_bytes,
    settled_arm,
    step_time,
    usual_precision,
)
from study.predict.front import advise as recommend
from study.predict.front import estimate as predict
from study.report import advice as answer

Quantized = Literal["nf4", "nf4_double", "int8"]
GPUS_AT_MOST = 2**16  # more is a typing error
ANY_GPU = "H100"  # where no time is asked for, the kind of GPU changes no number
USUAL_RANKS = 8  # those of most nodes
CHECKPOINTING = {"on": True, "off": False}
FITS = {"yes": "It fits on {}.", "only just": "It fits only just on {}.", "no": "It does not fit on {}."}
OF_ROW = ("arm", "precision", "micro_batch", "accumulation", "checkpointing")  # options that an advice chooses


# --- the options that the commands share -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training."""

    gpus: Annotated[int | None, tyro.conf.arg(aliases=("--ranks",))] = None
    """GPUs over all nodes. Default: 8; `advise` looks for the fewest."""
    sequence: Tokens | None = None
    """Tokens per row. Default: 2048, or as many as the model reads."""
    precision: Precision | None = None
    """As in the trainer. Default: 16 bits, in the usual way of the arm."""
    optimizer: Optimizer = "adamw"
    """As in the trainer. adamw: PyTorch's fused AdamW."""

    def __post_init__(self) -> None:
        if self.gpus is not None and not 1 <= self.gpus <= GPUS_AT_MOST:
            raise Stop(f"--gpus must be from 1 to {GPUS_AT_MOST} (got {self.gpus})", "give such a number")


@dataclass(frozen=True, kw_only=True)
class Place:
    """The machine, and how frozen weights are kept."""

    gpu: str | None = None
    """Kind of GPU: H100, A100-40GB, L4, RTX4090 and others."""
    link: str | None = None
    """The slowest link between the GPUs: nvlink, pcie4, ib-hdr and others."""
    gpus_per_node: int | None = None
    """GPUs that share a host. Default: mostly 8."""
    disk: str | None = None
    """Read and write speed of a node's disk, such as 6GB/s. Default: no disk."""
    quantized: Quantized | None = None
    """With --lora-rank: how the frozen linear layers are kept, as in QLoRA."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The arm, and the passes of a step."""

    arm: str = "zero3"
    """Name of an arm; `study arms` lists them."""
    micro_batch: int = 1
    """Rows per GPU and pass."""
    accumulation: int = 1
    """Passes per step."""
    checkpointing: bool = False
    """Recompute activations in the backward pass."""


def _given(training: Training, place: Place) -> dict[str, Any]:
    """The options as fields of a Question."""
    options = vars(training) | vars(place)
    if training.optimizer == "adamw":
        options["optimizer"] = "fused"  # the predictor knows four implementations of the trainer's AdamW
    return {name: value for name, value in options.items() if name not in ("gpus", "gpu")}


# --- study advise ----------------------------------------------------------------------------------------------------


def advise(
    wanted: Wanted,
    training: Training,
    place: Place,
    *,
    batch: int | None = None,
    checkpointing: Literal["on", "off"] | None = None,
    host_memory: str | None = None,
    details: bool = False,
    as_json: AsJson = False,
) -> dict | None:
    """Recommend an arm for a model on your GPUs. Nothing is run.

    Without --gpus, the fewest GPUs of this kind are looked for that hold the training.

    Args:
        wanted: The model.
        training: The training.
        place: The machine.
        batch: Rows per optimizer step, over all GPUs. Default: 128, or the next multiple of the GPUs.
        checkpointing: Recompute activations in the backward pass. Default: only if it helps.
        host_memory: Host memory of a node, such as 512GiB, or 1TB for an answer in GB. Default: twice that of its GPUs.
        details: Also print what is assumed, and how accurate such predictions are.
        as_json: Print the answer as JSON.
    """
    model = asked_for(wanted, training.sequence or 1)
    gpu = gpu_named(place.gpu or "")  # without --gpu its message lists the kinds
    given = _given(training, place) | {"batch": batch, "host_memory": host_memory}
    given["checkpointing"] = CHECKPOINTING.get(checkpointing or "")
    lines = []
    # --- the advice, for these GPUs or for the fewest that are enough
    if training.gpus is not None:
        advice = recommend(Question.of(model, training.gpus, gpu, **given))
    elif smallest := fewest(model, gpu, **given):
        advice = smallest
        lines.append(f"Enough: {advice.question.gpus} x {gpu}.")
    else:
        remedy = "give --lora-rank, a shorter --sequence, or a larger --gpu"
        raise Stop(f"no 1 to {MOST_GPUS} {gpu} hold {model.name}", remedy)
    question, choice = advice.question, advice.choice
    lines += answer.in_words(advice)
    detail = ""
    # --- what to do next: more GPUs or less memory if nothing fits, else the command that shows the choice in detail
    if choice is None:
        # These GPUs are too few, and numbers are tried by powers of two.
        if larger := fewest(model, gpu, 2 * question.gpus, **given):
            lines.append(f"Enough: {larger.question.gpus} x {gpu}.")
        else:
            lines.append("It needs tensor or pipeline parallelism: see Megatron-LM or torchtitan.")
        # Their gradients and states are small beside the model's. Who trains them already needs no such advice.
        if not model.is_partly_frozen:
            lines.append("Adapters need far less memory: give --lora-rank 16.")
    else:
        lines += answer.recompute_note(choice.checkpointing, model)
        row = {name: getattr(choice, name) for name in OF_ROW} | {"buckets": choice.bucket_elements}
        detail = _command(vars(wanted) | vars(training) | vars(place) | {"gpus": question.gpus} | row)
    # --- print it: the sentences first, because the table takes a whole screen
    assumed = answer.assumptions(question)
    if as_json:
        return asdict(advice) | {"in_words": lines, "detail": detail, "assumed": assumed, "accuracy": answer.accuracy()}
    say_wrapped(*lines, "")
    show(answer.table(advice))
    if detail:
        say_wrapped("", f"In detail: {detail}", indent="  ")
    if details:
        say("", "Predicted for:")
        say_wrapped(*assumed, indent="  ", first="- ")
        say_wrapped("", answer.accuracy())
    return None


def _command(options: dict) -> str:
    # An option that has its default would only make the command longer.
    words = ["study", "estimate"]
    for name, value in options.items():
        if value not in (None, False, Training.optimizer):
            words += [flag(name), str(value)]
    return shlex.join(word for word in words if word != "True")  # a switch has no value


# --- study estimate --------------------------------------------------------------------------------------------------


def setup_of(
    model: Transformer, training: Training, place: Place, passes: Passes, buckets: int | None
) -> tuple[Setup, Machine | None]:
    """Return the setup under an arm, and the machine; None if its kind of GPU is not given."""
    arm = arms.load_arm(passes.arm)
    gpus = training.gpus or USUAL_RANKS
    if arm.distributed_type == "NO":
        gpus = 1  # whatever --gpus says: this arm uses one
    given = _given(training, place) | {"checkpointing": passes.checkpointing}
    if place.gpu is None:
        if place.link or place.gpus_per_node or place.disk:
            raise Stop("options of a machine need its kind of GPU", "give --gpu")
        given["gpus_per_node"] = gpus  # one node: without a machine nobody has said how large its nodes are
    question = Question.of(model, gpus, place.gpu or ANY_GPU, **given)
    arm = settled_arm(arm, gpus, question.local, buckets)
    machine = None
    if place.gpu:
        machine = question.machine
    return question.setup(arm, passes.micro_batch, passes.accumulation), machine


def estimate(
    wanted: Wanted,
    training: Training,
    place: Place,
    passes: Passes,
    *,
    buckets: int | None = None,
    timeline: bool = False,
    as_json: AsJson = False,
) -> dict | None:
    """Predict the memory of one rank and the bytes that it moves in a step. Nothing is run.

    With --gpu the answer says whether it fits, and the time of a step.

    Args:
        wanted: The model.
        training: The training.
        place: The machine.
        passes: The arm and its passes.
        buckets: Elements of DeepSpeed's buckets. Default: as the arm's file says.
        timeline: With --gpu: list the phases of the step.
        as_json: Print the prediction as JSON.
    """
    arm = arms.load_arm(passes.arm)
    # The predictor would give numbers for what the library refuses to train.
    if stop := refusal(arm, training.optimizer, training.precision or usual_precision(arm)):
        raise stop
    setup, machine = setup_of(asked_for(wanted, training.sequence or 1), training, place, passes, buckets)
    whole = predict(setup)
    gpu = step = fits = None
    if machine:
        gpu = machine.gpu
        step = step_time(setup, machine)
    elif timeline:
        raise Stop("--timeline needs a predicted time", "give --gpu")
    # Three numbers are called memory: what PyTorch allocates, what it holds, and what nvidia-smi shows. The last one
    # depends on the GPU, so it is told only with --gpu.
    kinds = memory_kinds(setup, gpu)
    text = (
        f"A rank of {setup.ranks} under {arm.name} needs {size(whole.peak_bytes)} of GPU memory at the peak, predicted"
    )
    if gpu:
        fits = fits_on(gpu, whole.peak_bytes, kinds.driver)
        # What nvidia-smi shows of a training that does not fit is the whole card.
        if kinds.driver and fits != "no":
            text += f"; nvidia-smi will show {answer.of_card(kinds.driver, gpu)}"
        reserve = size(reserve_bytes(GPUS[gpu]))
        card = f"{gpu} ({size(GPUS[gpu].memory_bytes)}, less {reserve} for context and fragmentation)"
        text += f". {FITS[fits].format(card)}"
    else:
        text += "."
    if as_json:
        content = {"arm": arm.name, "ranks": setup.ranks, "parameters": whole.parameters, "estimate": asdict(whole)}
        return content | {"kinds": asdict(kinds), "step": step and asdict(step), "fits": fits}
    say_wrapped(text, *answer.recompute_note(setup.checkpointing, setup.model), "")
    _show(whole, step, timeline)
    say_wrapped("", answer.accuracy())
    return None


def _show(whole: Estimate, step: StepTime | None, timeline: bool) -> None:
    say(f"at the peak ({whole.peak_when}), buffers and temporaries included:")
    parts = whole.at_peak | {"total": whole.peak_bytes}
    show([{"component": part, "per rank": size(part_bytes)} for part, part_bytes in parts.items()])
    moved = [f"{kind} {size(moved_bytes)}" for kind, moved_bytes in whole.traffic.items()]
    say("", f"host memory: {size(whole.host_bytes)}; collectives of a step: {', '.join(moved) or 'none'}")
    if step:
        interval = f"{step.low_s:.2g} to {step.high_s:.2g} s"
        say(f"time, predicted: {step.seconds:.3g} s per step ({interval}, limited by {step.limit})")
    if step and timeline:
        # GPU, host and link work at the same time, so their seconds may add up to more than those of the phase.
        say("")
        show([{name.replace("_s", " s"): value for name, value in vars(phase).items()} for phase in step.phases])
