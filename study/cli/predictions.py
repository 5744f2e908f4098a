"""`study advise`: which arm to use on given GPUs. `study estimate`: what a rank holds and moves, and if it fits.

`study virtual` measures what `study estimate` predicts: one rank of N, which runs alone.
"""

import math
import shlex
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from study.core import arms, optimizers
from study.core.errors import Stop
from study.core.gpus import GPUS
from study.core.settings import Flags, Optimizer, Tokens, check
from study.core.shapes import SHAPES, is_local
from study.core.text import during, say, say_wrapped, show, size
from study.predict.front import (
    MOST_GPUS,
    Machine,
    Precision,
    Question,
    Setup,
    Transformer,
    Wanted,
    asked_for,
    default_sequence,
    fewest,
    fits_on,
    inputs_bytes,
    memory_kinds,
    reserve_bytes,
    settled_arm,
    step_time,
    usual_precision,
)
from study.predict.front import advise as recommend
from study.predict.front import estimate as predict
from study.records.schema import Record
from study.report import advice as answer
from study.sweeps import launches
from study.sweeps.protocol import Cell

Device = Literal["cuda", "cpu"]
Quantized = Literal["nf4", "nf4_double", "int8"]
GPUS_AT_MOST = 2**16  # more is a typing error
ANY_GPU = "H100"  # where no time is asked for, the kind of GPU changes no number
USUAL_RANKS = 8  # those of most nodes
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

    @property
    def ranks(self) -> int:
        return self.gpus or USUAL_RANKS


@dataclass(frozen=True, kw_only=True)
class Place:
    """The machine, and how frozen weights are kept."""

    gpu: str | None = None
    """Kind of GPU: H100, A100-40GB, L4, RTX4090 and others."""
    gpu_memory: str | None = None
    """Memory of a card that is not in the list, or of a slice, such as 12GB. --gpu is the kind that it is most like."""
    gpu_tflops: float | None = None
    """With --gpu-memory: its TFLOP/s in 16 bits. Its memory is then as much slower or faster than that of --gpu."""
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
    options = vars(training) | vars(place)
    del options["gpus"], options["gpu"]
    # The predictor knows four implementations of the trainer's AdamW.
    return options | {"optimizer": "fused" if training.optimizer == "adamw" else training.optimizer}


# --- study advise ----------------------------------------------------------------------------------------------------


def advise(
    model: Wanted,
    training: Training,
    place: Place,
    *,
    batch: int | None = None,
    checkpointing: bool | None = None,
    host_memory: str | None = None,
) -> dict:
    """Recommend an arm for a model on your GPUs. Nothing is run.

    Without --gpus, the fewest GPUs of this kind are looked for that hold the training.

    With --json: all that was compared, to the byte. Example: `study advise --model gpt2-xl --gpus 8 --gpu H100`

    Args:
        model: The model.
        training: The training.
        place: The machine.
        batch: Rows per optimizer step, over all GPUs. Default: 128, or the next multiple of the GPUs.
        checkpointing: Recompute activations in the backward pass. Default: only if it helps.
        host_memory: Host memory of a node, such as 512GiB or 1TB. Default: twice that of its GPUs.
    """
    shape = asked_for(model, training.sequence or 1)
    if place.gpu is None:
        raise Stop("--gpu is missing", "give the kind of your GPUs, such as H100 or RTX4090")
    gpu = place.gpu
    given = _given(training, place) | {"batch": batch, "host_memory": host_memory, "checkpointing": checkpointing}
    # --- the advice, for these GPUs or for the fewest that are enough
    lines = []
    advice = None
    if training.gpus is not None:
        advice = recommend(Question.of(shape, training.gpus, gpu, **given))
    elif advice := fewest(shape, gpu, **given):
        lines.append(answer.enough(advice, batch))
    if advice is None:
        remedy = "give --lora-rank, a shorter --sequence, or a larger --gpu"
        raise Stop(f"no 1 to {MOST_GPUS} {gpu} hold {shape.name}", remedy)
    lines += answer.in_words(advice)
    # --- what to do next: more GPUs if nothing fits, else the command that shows the choice in detail
    detail = ""
    choice = advice.choice
    if choice:
        lines += answer.recompute_note(choice.checkpointing, shape)
        row = {name: getattr(choice, name) for name in OF_ROW} | {"buckets": choice.bucket_elements}
        options = vars(model) | vars(training) | vars(place) | {"gpus": advice.question.gpus} | row
        # An option that has its default would only make the command longer.
        chosen = {name: value for name, value in options.items() if value not in (None, False, Training.optimizer)}
        detail = shlex.join(["study", "estimate", *launches.options(chosen)])
    elif larger := fewest(shape, gpu, 2 * advice.question.gpus, **given):  # numbers are tried by powers of two
        lines.append(answer.enough(larger, batch))
    else:
        lines.append("It needs tensor or pipeline parallelism: see Megatron-LM or torchtitan.")
    # --- print it: the sentences first, because the table takes a whole screen
    assumed = answer.assumptions(advice.question)
    say_wrapped(*lines, "")
    show(answer.table(advice))
    if detail:
        say_wrapped("", f"In detail: {detail}", indent="  ")
    say("", "Predicted for:")
    say_wrapped(*assumed, indent="  ", first="- ")
    say_wrapped("", answer.accuracy())
    return asdict(advice) | {"in_words": lines, "detail": detail, "assumed": assumed, "accuracy": answer.accuracy()}


# --- study estimate --------------------------------------------------------------------------------------------------


def setup_of(
    model: Transformer, training: Training, place: Place, passes: Passes, buckets: int | None, device: Device = "cuda"
) -> tuple[Setup, Machine | None]:
    """Return the setup under an arm, and the machine; None if its kind of GPU is not given."""
    if device == "cpu" and place.gpu:
        raise Stop(f"--device cpu has no --gpu (got {place.gpu})", "leave one of them out")
    arm = arms.load_arm(passes.arm)
    gpus = training.ranks
    if arm.distributed_type == "NO":
        gpus = 1  # whatever --gpus says: this arm uses one
    given = _given(training, place) | {"checkpointing": passes.checkpointing}
    if place.gpu is None:
        if place.link or place.gpus_per_node or place.disk or place.gpu_memory:
            raise Stop("options of a machine need its kind of GPU", "give --gpu")
        given["gpus_per_node"] = gpus  # one node: without a machine nobody has said how large its nodes are
    question = Question.of(model, gpus, place.gpu or ANY_GPU, **given)
    arm = settled_arm(arm, gpus, question.local, buckets)
    machine = question.machine if place.gpu else None
    setup = replace(question.setup(arm, passes.micro_batch, passes.accumulation), device=device)
    if device == "cpu":  # the rows of a virtual rank's step, and those that were read of them, are in the same memory
        setup = replace(setup, data_bytes=(2 * setup.accumulation - 1) * inputs_bytes(setup))
    return setup, machine


def estimate(
    model: Wanted,
    training: Training,
    place: Place,
    passes: Passes,
    *,
    buckets: int | None = None,
    device: Device = "cuda",
) -> dict:
    """Predict the memory of one rank and the bytes that it moves in a step. Nothing is run.

    With --gpu the answer says whether it fits, and the time of a step.

    With --json: the same, and the time of each phase. Example: `study estimate --model llama3-8b --gpu H100`

    Args:
        model: The model.
        training: The training.
        place: The machine.
        passes: The arm and its passes.
        buckets: Elements of DeepSpeed's buckets. Default: as the arm's file says.
        device: cpu: what a rank holds on a machine without a GPU, as `study virtual` measures it there.
    """
    arm = arms.load_arm(passes.arm)
    # The predictor would give numbers for what the library refuses to train.
    if stop := optimizers.refusal(arm, training.optimizer, training.precision or usual_precision(arm)):
        raise stop
    setup, machine = setup_of(asked_for(model, training.sequence or 1), training, place, passes, buckets, device)
    whole = predict(setup)
    # Three numbers are called memory: what PyTorch allocates, what it holds, and what nvidia-smi shows. The last one
    # depends on the GPU, so it is told only with --gpu.
    kinds = memory_kinds(setup, machine.gpu if machine else None) if setup.on_gpu else None
    memory = "GPU memory" if setup.on_gpu else "memory"
    text = f"A rank of {setup.ranks} under {arm.name} needs {size(whole.peak_bytes)} of {memory} at the peak, predicted"
    step = None
    fits = None
    fit = ""
    time: list[str] = []
    if machine and kinds:
        gpu = machine.gpu
        step = step_time(setup, machine)
        fits = fits_on(gpu, whole.peak_bytes, kinds.driver)
        # What nvidia-smi shows of a training that does not fit is the whole card.
        if kinds.driver and fits != "no":
            text += f"; nvidia-smi will show {answer.of_card(kinds.driver, gpu)}"
        reserve = size(reserve_bytes(GPUS[gpu]))
        card = f"{gpu} ({size(GPUS[gpu].memory_bytes)}, less {reserve} for context and fragmentation)"
        fit = f" {FITS[fits].format(card)}"
        interval = f"{step.low_s:.2g} to {step.high_s:.2g} s"
        time = [f"time, predicted: {step.seconds:.3g} s per step ({interval}, limited by {step.limit})"]
    say_wrapped(f"{text}.{fit}", *answer.recompute_note(setup.checkpointing, setup.model), "")
    # --- the parts of the peak, and what moves
    say(f"at the peak ({whole.peak_when}), buffers and temporaries included:")
    parts = whole.at_peak | {"total": whole.peak_bytes}
    show([{"component": part, "per rank": size(part_bytes)} for part, part_bytes in parts.items()])
    moved = ", ".join(f"{kind} {size(moved_bytes)}" for kind, moved_bytes in whole.traffic.items())
    say("", f"host memory: {size(whole.host_bytes)}; collectives of a step: {moved or 'none'}", *time)
    say_wrapped("", answer.accuracy())
    return {
        "arm": arm.name,
        "ranks": setup.ranks,
        "parameters": whole.parameters,
        "estimate": asdict(whole),
        "kinds": asdict(kinds) if kinds else None,
        "step": asdict(step) if step else None,
        "fits": fits,
    }


# --- study virtual ---------------------------------------------------------------------------------------------------


def virtual(model: Wanted, training: Training, passes: Passes, *, run_dir: Path | None = None) -> dict:
    """Run rank 0 of an N-rank job in one process, and print its memory and traffic. No GPU is needed.

    The tensors have shapes but no values, so that they need no memory. The rows are random.

    With --json: the record. Example: `study virtual --model llama-micro --arm zero2 --ranks 4`

    Args:
        model: The model.
        training: The training, as `study estimate` has it.
        passes: The arm and its passes.
        run_dir: Keep the run in this new folder. Its record.json has these numbers to the byte, and more.
    """
    arm = arms.load_arm(passes.arm)
    settings = _settings(model, training, passes, usual_precision(arm))
    # --- What the trainer would refuse as well, but seconds later.
    if stop := launches.lacking():
        raise stop
    flags = Flags(**settings)
    check(flags)
    optimizers.check(flags, arm)
    arms.check_virtual(arm, "none")
    arm.sharing_ranks(training.ranks)
    if run_dir and run_dir.exists():
        raise Stop(f"--run-dir {run_dir} exists", "give a new folder")

    # --- The launch: one process with the collectives of rank 0, which move nothing. It ends like a sweep's cell.
    cell = Cell("", "virtual", "tiny", arm.name, None, settings)
    with tempfile.TemporaryDirectory() as temporary, during(f"running rank 0 of {training.ranks} under {arm.name}"):
        folder = run_dir or Path(temporary, "run")
        folder.parent.mkdir(parents=True, exist_ok=True)
        record = launches.run(cell, folder, math.inf, math.inf, None, lambda *_: None)
    if record.error:
        raise Stop(record.error.message, record.error.what_to_do)
    _show(record, training.ranks)
    return record.model_dump(mode="json", by_alias=True)


def _settings(model: Wanted, training: Training, passes: Passes, usual: Precision) -> dict[str, Any]:
    shape = asked_for(model, training.sequence or 1)
    if model.model is None:
        raise Stop("only a model with a name can be run", "give --model")
    settings: dict[str, Any] = {
        "model": model.model,
        # The trainer's own defaults are for its tiny models: the answers of `estimate` would be of other rows.
        "sequence": training.sequence or default_sequence(shape),
        "precision": training.precision or usual,
        "optimizer": training.optimizer,
        "micro_batch": passes.micro_batch,
        "accumulation": passes.accumulation,
        "checkpointing": passes.checkpointing,
        # Two steps: the optimizer makes its states in the first, so that the second is like all that follow.
        "steps": 2,
        "warmup_steps": 1,
        "virtual_ranks": training.ranks,
        "init": "none",
    }
    if model.lora_rank is not None:
        settings["lora_rank"] = model.lora_rank
    if is_local(model.model) and model.model not in SHAPES:
        settings["model"] = str(Path(model.model).resolve())  # it is launched from another folder
    return settings


def _show(record: Record, ranks: int) -> None:
    rank = record.memory.components.per_rank[0]
    at_peak = rank.at_peak or {}
    after = rank.after_step
    say(f"Rank 0 of {ranks}, run alone (virtual), holds {size(rank.tracked_peak_bytes)} at the peak.", "")
    show(
        [
            {"component": name, "at the peak": size(at_peak.get(name, 0)), "after a step": size(after.get(name, 0))}
            for name in at_peak | after
        ]
    )
    say("")
    sent = record.traffic.per_rank[0]
    show(
        [
            {"collective": kind, "calls of a step": moved.calls, "bytes of a step": size(moved.bytes)}
            for kind, moved in sent.items()
        ]
    )
    say("", f"rows: {record.observed.data_source}")
