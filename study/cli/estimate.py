"""`study estimate`: what a rank of a training holds and moves, whether it fits, and how long a step takes."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from study.configs import sources
from study.configs.mistakes import unusable
from study.configs.oom.optimizers import optimizer_of
from study.configs.oom.said import PRECISIONS, config_settings, of_deepspeed, typed, understood
from study.core import arms, optimizers
from study.core.errors import Stop, refuse_beyond
from study.core.fsdp_keys import version_of
from study.core.settings import flag
from study.core.text import say, say_wrapped, show, size
from study.predict.front import (
    ANY_GPU,
    MOST_ROWS,
    Hardware,
    Keys,
    PlaceFlags,
    Prediction,
    Question,
    StepFlags,
    Training,
    TrainingFlags,
    Transformer,
    Wanted,
    asked_for,
    calibration,
    deepspeed_keys,
    settled_arm,
    usual_precision,
    with_homes,
)
from study.report import accuracy, estimates
from study.report import advice as answer

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True, kw_only=True)
class PassFlags:
    """The arm, and the micro-batches of a step."""

    arm: Annotated[str, tyro.conf.arg(aliases=("--config",))] = "zero3"
    """Of `study arms`; or your .yaml or .json."""
    micro_batch: int = 1
    """Sequences of a micro-batch, on each GPU."""
    accumulation: int = 1
    """Micro-batches of a step (gradient accumulation)."""
    checkpointing: bool = False
    """Recompute activations in the backward pass."""

    def __post_init__(self) -> None:
        for name in ("micro_batch", "accumulation"):
            refuse_beyond(flag(name), getattr(self, name), MOST_ROWS)


def training_of(
    model: Transformer,
    training: TrainingFlags,
    place: PlaceFlags,
    passes: PassFlags,
    arm: arms.Arm,
    device: Device,
    buckets: int | None = None,
    keys: Keys = (),
    sync_each_batch: bool = False,
) -> tuple[Training, Hardware | None]:
    """Return the training under an arm, and the machine; None if its kind of GPU is not given."""
    if device == "cpu" and place.gpu:
        raise Stop(f"--device cpu has no --gpu (got {place.gpu})", "leave one of them out")
    if arm.distributed_type == "NO":
        training = replace(training, gpus=1)  # whatever --gpus says: this arm uses one
    has_gpu = bool(place.gpu or (place.machine and calibration.read(place.machine).gpu))
    known = place if has_gpu else anywhere(place)
    step = StepFlags(checkpointing=passes.checkpointing, sync_each_batch=sync_each_batch)
    question = Question.of(model, training, known, step)
    arm = settled_arm(arm, question.gpus, question.local, buckets, keys=keys)
    ours = question.training(arm, passes.micro_batch, passes.accumulation)
    if device == "cpu":
        return in_host_memory(ours, passes), calibration.on_cpu(place.machine, ours.placement.ranks)
    return ours, question.machine if has_gpu else None


def anywhere(place: PlaceFlags) -> PlaceFlags:
    """Return nodes as most are: without a kind of GPU nobody has said how large they are.

    The kind that is taken changes no number, as no time is asked for. Nodes may be of a size that somebody says.
    """
    if place.link or place.disk or place.gpu_memory:
        raise Stop("options of a machine need its kind of GPU", "give --gpu")
    return replace(place, gpu=ANY_GPU, machine=None)


def in_host_memory(ours: Training, passes: PassFlags) -> Training:
    """Return a training on CPUs: the rows of a virtual rank's step, and what was read of them, are in its memory."""
    placement = replace(ours.placement, device="cpu")
    return replace(ours, placement=placement, data_bytes=(2 * passes.accumulation - 1) * ours.traced.inputs_bytes)


def unread_of_arm(arm: arms.Arm, given: TrainingFlags, buckets: int | None, sync_each_batch: bool) -> Iterator[str]:
    """Yield the options of a training that this arm does not read, each with the reason."""
    if arm.distributed_type == "NO" and given.gpus not in (None, 1):
        yield f"--gpus {given.gpus} ({arm.name} uses one)"
    if buckets is not None and arm.deepspeed is None:
        yield f"--buckets ({arm.name} has none of DeepSpeed)"
    if sync_each_batch and not arm.fsdp:
        yield f"--sync-each-batch ({arm.name} is not FSDP2)"


def unread_of_place(arm: arms.Arm, ranks: int, place: PlaceFlags, model: Transformer) -> Iterator[str]:
    """Yield the options of a machine that change nothing here, each with the reason."""
    if place.link and ranks == 1:
        yield "--link (a GPU alone has none)"
    if place.disk and not arm.uses_nvme:
        yield f"--disk ({arm.name} keeps nothing there)"
    kernel, usual = place.attention_kernel, PlaceFlags.attention_kernel
    is_as_large = model.attention_taken(kernel) == model.attention_taken(usual)
    if kernel not in (usual, "eager") and place.gpu is None and is_as_large:
        yield "--attention-kernel (it changes the time, which needs --gpu)"


def estimate(
    model: Wanted,
    training: TrainingFlags,
    place: PlaceFlags,
    passes: PassFlags,
    *,
    buckets: int | None = None,
    sync_each_batch: bool = False,
    device: Device = "cuda",
    details: bool = False,
) -> dict:
    """Predict the memory of one rank and the bytes that it moves in a step. Nothing is run.

    With --gpu it also says whether that fits, and the time of a step; with --machine the time there.

    With --json: the same, busy seconds by resource, and the time of each phase.
    Example: `study estimate --model llama3-8b --gpu H100`

    Args:
        model: The model.
        training: The training.
        place: The machine.
        passes: The arm and its micro-batches.
        buckets: Elements of DeepSpeed's buckets. Default: the arm's.
        sync_each_batch: FSDP2 reduces gradients in each micro-batch.
        device: cpu: what a rank holds on a machine without a GPU, as `study virtual` measures it there.
        details: Also show assumptions and past accuracy.
    """
    config = passes.arm
    read = read_from(config, training, passes)
    is_fine = read.pop("fine", True)
    training = replace(training, **{name: value for name, value in read.items() if name in vars(training)})
    passes = replace(passes, **{name: value for name, value in read.items() if name in vars(passes)})
    homes = read.get("homes")
    arm = with_homes(arms.load_arm(passes.arm, of_a_run=True), homes)
    # A plain loop's torch.optim.AdamW is foreach on CUDA, of FSDP2's DTensors as well (torch 2.13, optim/optimizer.py,
    # _default_to_fused_or_foreach; distributed/tensor/__init__.py). A Trainer's is fused with torch 2.8 or later
    # (transformers 5.23, training_args.py, default_optim). A config does not say which it is: the larger counts.
    is_unsaid = bool(read) and training.optimizer is None and arm.offload_optimizer == "none"
    if is_unsaid:
        training = replace(training, optimizer="foreach")
    # The predictor would give numbers for what the library refuses to train.
    precision = training.precision or usual_precision(arm)
    if stop := optimizers.refusal(arm, training.optimizer or "adamw", precision):
        raise stop
    shape = asked_for(model, training.sequence or 1)
    keys = deepspeed_keys.counted(read.get("deepspeed") or arm.deepspeed, shape.hidden, buckets=buckets)
    if arm.deepspeed and "deepspeed" in read and buckets is None:
        read["buckets"] = int(dict(keys)[deepspeed_keys.REDUCED])
    ours, machine = training_of(shape, training, place, passes, arm, device, buckets, keys, sync_each_batch)
    needs = estimates.Needs.of(arm, precision, training.precision is None, ours, machine, place.gpus_per_node)
    unread = [*unread_of_arm(arm, training, buckets, sync_each_batch)]
    unread += unread_of_place(arm, ours.placement.ranks, place, ours.model)
    notes = [f"Not read: {', '.join(unread)}."] if unread else []
    if read:
        words = [typed(name, value) for name, value in read.items() if name not in ("homes", "deepspeed", "why")]
        why = f", the optimizer by {read['why']}" if "why" in read else ""
        notes.append(f"Read from {config}: {', '.join(words)}{why}.")
        notes += fused_note(ours) if is_unsaid else []
        notes += of_homes(homes)
    of_engine = read.get("deepspeed") or arm.deepspeed or {}
    notes += deepspeed_keys.in_words(of_engine, arm.stage, is_arm="deepspeed" not in read)
    if arm.fsdp and version_of(arm.fsdp) == "1":
        notes.append("Predicted as FSDP2: FSDP1 was not run. It also holds the whole embedding while layers run.")
    notes += answer.recompute_note(passes.checkpointing, ours.model, arm.stage)
    notes += [*answer.gradients_note(ours), *answer.bucket_note(ours), *answer.stages_note(ours)]
    notes += answer.attention_note(ours.model, place.attention_kernel)
    notes += answer.nodes_note(arm, ours.placement.ranks) if machine is None and not place.gpus_per_node else []
    notes += answer.experts_note(ours)
    states = estimates.model_states(needs)
    notes += answer.shape_note(ours.model, model.params)
    show_needs(needs, notes, estimates.of_states(needs, states))
    if details:
        assumed = accuracy.of_model_and_gpu(ours.model, needs.gpu)
        say("", "Predicted for:")
        say_wrapped(*assumed, indent="  ", first="- ")
        say_wrapped("", *(accuracy.accuracy() if needs.step else accuracy.accuracy_of_memory()), indent="  ")
    asked = {"parameters_asked": model.params, "shape": ours.model.name}
    return in_json(needs) | asked | {"model_states": states, "notes": notes, "fine": is_fine}


def fused_note(training: Training) -> list[str]:
    """Return which optimizer was taken, and what the Trainer's needs."""
    needs = size(Prediction.of(replace(training, optimizer="adamw")).memory.peak_bytes)
    taken = "Taken: --optimizer foreach (nobody says it; it is PyTorch's AdamW without fused=True)"
    other = "With --optimizer adamw, which is fused, as the Trainer's is with torch 2.8 or later"
    return [f"{taken}. {other}, it needs {needs}."]


def of_homes(homes: tuple[str, str] | None) -> list[str]:
    """Say where a config keeps the optimizer's states and the weights."""
    if homes is None:
        return []
    states, weights = ({"none": "on the GPUs", "cpu": "on the host", "nvme": "on the disk"}[home] for home in homes)
    return [f"The optimizer's states are counted {states}, the weights {weights}."]


def read_from(config: str, training: TrainingFlags, passes: PassFlags) -> dict[str, Any]:
    """Return what a config says of a training, its arm and its micro-batches. Options that were given count.

    A yaml is the arm itself, with its buckets; of a json the nearest arm is taken.
    """
    if arms.is_file_name(config):
        arms.load_arm(config, of_a_run=True)  # its mistakes are told first
    elif not config.endswith(".json"):
        return {}
    written = {name: each.value for name, each in config_settings(Path(config), training.gpus).items()}
    written["deepspeed"] = of_deepspeed(Path(config)) or None
    said = understood(written)["ranks"]
    settings = understood(written | {"ranks": training.gpus or said or training.ranks})
    settings |= {"precision": PRECISIONS.get(str(written.get("precision"))), "gpus": said}
    refused = unusable(sources.read(Path(config)), training.gpus)
    taken = optimizer_of(settings)
    settings["optimizer"], why = taken or (None, "")
    read: dict[str, Any] = {}
    if config.endswith(".json"):
        if settings["arm"] is None:
            raise Stop(f"{config} names no stage of ZeRO, nor FSDP", "give --arm alone")
        read = {name: settings[name] for name in ("arm", "homes", "deepspeed")}
    for flags, names in (
        (training, ("gpus", "precision", "optimizer")),
        (passes, ("micro_batch", "accumulation", "checkpointing")),
    ):
        read |= {name: settings.get(name) for name in names if getattr(flags, name) == getattr(type(flags), name)}
    read |= {"why": why if read.get("optimizer") else None, "fine": False if any(refused) else None}
    return {name: value for name, value in read.items() if value is not None}


def show_needs(needs: estimates.Needs, notes: list[str], states: list[str]) -> None:
    say_wrapped(*estimates.in_words(needs), *notes, "")
    say(f"at the peak ({needs.estimate.peak_when}), buffers and temporaries included:")
    show(estimates.table(needs.estimate, needs.training))
    say_wrapped("", *states, *estimates.moved(needs), accuracy.in_a_line(bool(needs.step)))


def in_json(needs: estimates.Needs) -> dict:
    ours = needs.training
    return {
        "arm": needs.arm,
        "ranks": ours.placement.ranks,
        "parameters": ours.model.parameters,
        "estimate": asdict(needs.estimate),
        "host_bytes_of_node": needs.host_bytes_of_node,
        "kinds": asdict(needs.kinds) if needs.kinds else None,
        "inside_nodes": needs.inside_nodes,
        "step": asdict(needs.step) if needs.step else None,
        "fits": needs.fits,
    }
