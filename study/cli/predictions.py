"""`study advise`: which arm to use on given GPUs. `study estimate`: what a rank holds and moves, and if it fits.

`study virtual` measures what `study estimate` predicts: one rank of N, which runs alone.
"""

import math
import shlex
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from study.core import arms, optimizers
from study.core.errors import Stop
from study.core.settings import TrainerFlags, check, flag
from study.core.shapes import SHAPES, is_local
from study.core.text import during, say, say_wrapped, show, size
from study.known.findings import finding
from study.predict.front import (
    MOST_GPUS,
    MOST_ROWS,
    Advice,
    Hardware,
    PlaceFlags,
    Precision,
    Prediction,
    Question,
    Row,
    StepFlags,
    TrainingFlags,
    Transformer,
    Wanted,
    asked_for,
    calibration,
    default_sequence,
    fewest,
    fits_on,
    settled_arm,
    usual_precision,
)
from study.predict.front import Training as Predicted
from study.predict.front import advise as recommend
from study.records.schema import Record
from study.report import advice as answer
from study.report import estimates
from study.sweeps import launches
from study.sweeps.protocol import Cell

Device = Literal["cuda", "cpu"]
OF_ROW = ("arm", "precision", "micro_batch", "accumulation", "checkpointing")  # options that an advice chooses


@dataclass(frozen=True, kw_only=True)
class PassFlags:
    """The arm, and the micro-batches of a step."""

    arm: str = "zero3"
    """Name of an arm; `study arms` lists them."""
    micro_batch: int = 1
    """Sequences of a micro-batch, on each GPU."""
    accumulation: int = 1
    """Micro-batches of a step (gradient accumulation)."""
    checkpointing: bool = False
    """Recompute activations in the backward pass."""

    def __post_init__(self) -> None:
        for name in ("micro_batch", "accumulation"):
            if not 1 <= (value := getattr(self, name)) <= MOST_ROWS:
                raise Stop(f"{flag(name)} must be from 1 to {MOST_ROWS} (got {value})", "give such a number")


# --- study advise ----------------------------------------------------------------------------------------------------


def advise(
    model: Wanted, training: TrainingFlags, place: PlaceFlags, step: StepFlags, *, details: bool = False
) -> dict:
    """Recommend an arm for a model on your GPUs. Nothing is run.

    Without --gpus, the fewest GPUs of this kind are looked for that hold the training.

    With --json: all that was compared, to the byte. Example: `study advise --model gpt2-xl --gpus 8 --gpu H100`

    Args:
        model: The model.
        training: The training.
        place: The machine.
        step: What is asked for of a step and of the host.
        details: Also show what was assumed, how accurate predictions were, and the command that explains the choice.
    """
    shape = asked_for(model, training.sequence or 1)
    # --- the advice, for these GPUs or for the fewest that are enough
    lines = []
    advice: Advice | None
    if training.gpus is not None:
        advice = recommend(Question.of(shape, training, place, step))
    elif advice := fewest(shape, training, place, step):
        lines.append(answer.enough(advice, step.batch))
    if advice is None:
        remedy = "give --lora-rank, a shorter --sequence, or a larger --gpu"
        raise Stop(f"no 1 to {MOST_GPUS} {place.gpu} hold {shape.name}", remedy)
    lines += answer.in_words(advice)
    # --- what to do next: more GPUs if nothing fits, else the command that shows the choice in detail
    detail = ""
    choice = advice.choice
    if choice:
        lines += answer.recompute_note(choice.checkpointing, shape, choice.arm)
        detail = _in_detail(choice, vars(model) | vars(training) | vars(place) | {"gpus": advice.question.gpus})
    elif larger := fewest(shape, training, place, step, 2 * advice.question.gpus):  # by powers of two
        lines.append(answer.enough(larger, step.batch))
    else:
        lines.append(finding("needs_other_parallelism").said)
    # --- print it: the sentences first, because the table takes half a screen
    assumed = answer.assumptions(advice.question)
    say_wrapped(*lines, answer.resting_on(advice), *answer.card_note(place), "")
    show(answer.table(advice))
    if details:
        if detail:
            say_wrapped("", f"In detail: {detail}", indent="  ")
        say("", "Predicted for:")
        say_wrapped(*assumed, indent="  ", first="- ")
        say_wrapped("", *answer.accuracy(), indent="  ")
    else:
        if training.precision is None:
            say_wrapped("", answer.precisions(advice.question))
        if any(row.accumulation > 1 and not row.fits for row in advice.rows if row.arm.startswith("fsdp2")):
            say_wrapped(finding("fsdp2_whole_gradients").said)
    return answer.in_json(advice) | {
        "in_words": lines,
        "detail": detail,
        "assumed": assumed,
        "accuracy": answer.accuracy(),
    }


def _in_detail(choice: Row, options: dict) -> str:
    """Return the command that shows a choice in detail, without options that have their defaults."""
    options |= {name: getattr(choice, name) for name in OF_ROW} | {"buckets": choice.bucket_elements}
    usual = (None, False, TrainingFlags.optimizer, PlaceFlags.attention_kernel)
    chosen = {name: value for name, value in options.items() if value not in usual}
    return shlex.join(["study", "estimate", *launches.options(chosen)])


# --- study estimate --------------------------------------------------------------------------------------------------


def training_of(
    model: Transformer,
    training: TrainingFlags,
    place: PlaceFlags,
    passes: PassFlags,
    buckets: int | None,
    device: Device = "cuda",
) -> tuple[Predicted, Hardware | None]:
    """Return the training under an arm, and the machine; None if its kind of GPU is not given."""
    if device == "cpu" and place.gpu:
        raise Stop(f"--device cpu has no --gpu (got {place.gpu})", "leave one of them out")
    arm = arms.load_arm(passes.arm)
    if arm.distributed_type == "NO":
        training = replace(training, gpus=1)  # whatever --gpus says: this arm uses one
    known = place
    is_known = place.gpu or (place.machine and calibration.read(place.machine).gpu)
    if not is_known:
        if place.link or place.gpus_per_node or place.disk or place.gpu_memory:
            raise Stop("options of a machine need its kind of GPU", "give --gpu")
        # One node: without a machine nobody has said how large its nodes are. The kind of GPU changes no number, as no
        # time is asked for.
        known = replace(place, gpu="H100", gpus_per_node=training.ranks, machine=None)
    question = Question.of(model, training, known, StepFlags(checkpointing=passes.checkpointing))
    arm = settled_arm(arm, question.gpus, question.local, buckets)
    machine = question.machine if is_known else None
    ours = question.training(arm, passes.micro_batch, passes.accumulation)
    if device == "cpu":  # the rows of a virtual rank's step, and those that were read of them, are in the same memory
        ours = replace(ours, placement=replace(ours.placement, device=device))
        ours = replace(ours, data_bytes=(2 * passes.accumulation - 1) * ours.traced.inputs_bytes)
        machine = calibration.on_cpu(place.machine, ours.placement.ranks)
    return ours, machine


def _unread(given: TrainingFlags, place: PlaceFlags, arm: arms.Arm, ranks: int, buckets: int | None) -> list[str]:
    """Return the options that were given and change nothing here, each with the reason."""
    unread = []
    if arm.distributed_type == "NO" and given.ranks != ranks and given.gpus is not None:
        unread.append(f"--gpus {given.gpus} ({arm.name} uses one)")
    if place.link and ranks == 1:
        unread.append("--link (a GPU alone has none)")
    if place.disk and not arm.uses_nvme:
        unread.append(f"--disk ({arm.name} keeps nothing there)")
    if buckets is not None and arm.deepspeed is None:
        unread.append(f"--buckets ({arm.name} has none of DeepSpeed)")
    if place.attention_kernel != PlaceFlags.attention_kernel and place.gpu is None:
        unread.append("--attention-kernel (it changes the time, which needs --gpu)")
    return [f"Not read: {', '.join(unread)}."] if unread else []


def estimate(
    model: Wanted,
    training: TrainingFlags,
    place: PlaceFlags,
    passes: PassFlags,
    *,
    buckets: int | None = None,
    device: Device = "cuda",
) -> dict:
    """Predict the memory of one rank and the bytes that it moves in a step. Nothing is run.

    With --gpu the answer says whether it fits, and the time of a step; with --machine the time on that machine.

    With --json: the same, busy seconds by resource, and the time of each phase.
    Example: `study estimate --model llama3-8b --gpu H100`

    Args:
        model: The model.
        training: The training.
        place: The machine.
        passes: The arm and its micro-batches.
        buckets: Elements of DeepSpeed's buckets. Default: as the arm's file says.
        device: cpu: what a rank holds on a machine without a GPU, as `study virtual` measures it there.
    """
    arm = arms.load_arm(passes.arm)
    # The predictor would give numbers for what the library refuses to train.
    precision = training.precision or usual_precision(arm)
    if stop := optimizers.refusal(arm, training.optimizer, precision):
        raise stop
    ours, machine = training_of(asked_for(model, training.sequence or 1), training, place, passes, buckets, device)
    needs = _needs(arm, precision, ours, machine)
    unread = _unread(training, place, arm, ours.placement.ranks, buckets)
    say_wrapped(*estimates.in_words(needs), *unread, *answer.card_note(place))
    say_wrapped(*answer.recompute_note(passes.checkpointing, ours.model, arm.name), "")
    say(f"at the peak ({needs.estimate.peak_when}), buffers and temporaries included:")
    show(estimates.table(needs.estimate))
    say("", *estimates.moved(needs))
    say("", *estimates.resting_on(needs))
    return {
        "arm": arm.name,
        "ranks": ours.placement.ranks,
        "parameters": ours.model.parameters,
        "estimate": asdict(needs.estimate),
        "kinds": asdict(needs.kinds) if needs.kinds else None,
        "step": asdict(needs.step) if needs.step else None,
        "fits": needs.on_gpu.fits if needs.on_gpu else None,
    }


def _needs(arm: arms.Arm, precision: str, ours: Predicted, machine: Hardware | None) -> estimates.Needs:
    """Return what a rank needs; with a machine also whether it fits there, and the time of a step."""
    prediction = Prediction(ours)
    whole = prediction.memory
    if not ours.placement.on_gpu:
        step = prediction.step(machine) if machine else None
        return estimates.Needs(arm.name, precision, ours, whole, None, None, step)
    kinds = prediction.kinds(machine.gpu if machine else None)
    if machine is None:
        return estimates.Needs(arm.name, precision, ours, whole, kinds, None, None)
    if arm.uses_nvme and not machine.disk_bytes_per_s:
        remedy = "give --disk, such as 6GB/s (study calibrate --disk measures yours), or leave --gpu out"
        raise Stop(f"the time of {arm.name} depends on the disk", remedy)
    fits = fits_on(machine.gpu, whole.peak_bytes, kinds.driver)
    on_gpu = estimates.FitsGpu(machine.gpu, fits)
    return estimates.Needs(arm.name, precision, ours, whole, kinds, on_gpu, prediction.step(machine))


# --- study virtual ---------------------------------------------------------------------------------------------------


def virtual(
    model: Wanted,
    training: TrainingFlags,
    passes: PassFlags,
    *,
    run_dir: Path | None = None,
    machine: Path | None = None,
) -> dict:
    """Run rank 0 of an N-rank job in one process, and print its memory and traffic. No GPU is needed.

    The tensors have shapes but no values, so that they need no memory. Sequences are random. It takes seconds for a
    small model, and minutes for a large one.

    With --json: the record. Example: `study virtual --model llama-micro --arm zero2 --ranks 4`

    Args:
        model: The model.
        training: The training, as `study estimate` has it.
        passes: The arm and its micro-batches.
        run_dir: Keep the run in this new folder. Its record.json has these numbers to the byte, and more.
        machine: The machine.json of `study calibrate`: also predict the seconds of a step of all ranks there.
    """
    if model == Wanted():
        raise Stop("neither a script nor a model is given", "give a script, as in `study virtual train.py`, or --model")
    arm = arms.load_arm(passes.arm)
    settings = _settings(model, training, passes, usual_precision(arm))
    # --- What the trainer would refuse as well, but seconds later.
    if stop := launches.lacking():
        raise stop
    flags = TrainerFlags(**settings)
    check(flags)
    optimizers.check(flags, arm)
    arms.check_virtual(arm, "none")
    arm.sharing_ranks(training.ranks)
    if run_dir and run_dir.exists():
        raise Stop(f"--run-dir {run_dir} exists", "give a new folder")

    # --- The launch: one process with the collectives of rank 0, which move nothing. It ends like a sweep's cell.
    cell = Cell("", "virtual", "tiny", arm.name, None, settings)
    during(f"running rank 0 of {training.ranks} with {arm.name}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = run_dir or Path(temporary, "run")
        folder.parent.mkdir(parents=True, exist_ok=True)
        record = launches.run(cell, folder, math.inf, math.inf, None, lambda *_: None)
    if record.error:
        remedy = record.error.what_to_do
        if remedy.startswith("report this") and Path(f"{model.model}").is_dir():
            remedy = f"correct {model.model}/config.json if `study estimate` refuses it as well, or {remedy}"
        raise Stop(record.error.message, remedy)
    _show(record, training.ranks)
    if path := machine or calibration.from_environment():
        device: Device = "cuda" if calibration.read(path).gpu else "cpu"
        shape, place = asked_for(model, training.sequence or 1), PlaceFlags(machine=path)
        ours, there = training_of(shape, training, place, passes, None, device)
        if there:
            say(estimates.time_line(Prediction(ours).step(there)))
    return record.model_dump(mode="json", by_alias=True)


def _settings(model: Wanted, training: TrainingFlags, passes: PassFlags, usual: Precision) -> dict[str, Any]:
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
    moved = ", ".join(f"{kind} {size(sent.bytes)}" for kind, sent in record.traffic.per_rank[0].items())
    say("", f"collectives of a step: {moved or 'none'}; sequences: {record.observed.data_source}")
