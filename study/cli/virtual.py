"""`study virtual`: one rank of N, which runs alone, and so measures what `study estimate` predicts."""

import tempfile
from pathlib import Path
from typing import Any

from study.cli.estimate import Device, PassFlags, training_of
from study.core import arms, optimizers
from study.core.arms import Arm
from study.core.errors import Stop
from study.core.settings import TrainerFlags, check
from study.core.shapes import SHAPES, is_local
from study.core.text import bar, say_wrapped, show, size
from study.predict.front import (
    PlaceFlags,
    Precision,
    Prediction,
    TrainingFlags,
    Wanted,
    asked_for,
    calibration,
    default_sequence,
    usual_precision,
)
from study.records.schema import Record
from study.report import estimates
from study.sweeps import launches
from study.sweeps.protocol import Cell


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
    small model, and minutes for a large one. `study virtual train.py` runs a script;
    after its name --help lists its options.

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
    settings = settings_of(model, training, passes, usual_precision(arm))
    refuse(arm, passes, settings, training.ranks)
    if run_dir and run_dir.exists():
        raise Stop(f"--run-dir {run_dir} exists", "give a new folder")
    with bar(f"running rank 0 of {training.ranks} with {arm.name}"):
        record = run_alone(Cell("", "virtual", "tiny", arm.name, None, settings), run_dir)
    refuse_failed(record, model)
    show_rank(record, training.ranks)
    if path := machine or calibration.from_environment():
        show_seconds(model, training, passes, arm, path)
    return record.model_dump(mode="json", by_alias=True)


def run_alone(cell: Cell, run_dir: Path | None) -> Record:
    """Launch one process with the collectives of rank 0, which move nothing. It ends like a sweep's cell."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = run_dir or Path(temporary, "run")
        folder.parent.mkdir(parents=True, exist_ok=True)
        return launches.run(cell, folder)


def refuse_failed(record: Record, model: Wanted) -> None:
    if not record.error:
        return
    remedy = record.error.what_to_do
    if remedy.startswith("report this") and Path(f"{model.model}").is_dir():
        remedy = f"correct {model.model}/config.json if `study estimate` refuses it as well, or {remedy}"
    raise Stop(record.error.message, remedy)


def show_seconds(model: Wanted, training: TrainingFlags, passes: PassFlags, arm: Arm, path: Path) -> None:
    """Say how long a step of all ranks takes on a machine that was measured."""
    device: Device = "cuda" if calibration.read(path).gpu else "cpu"
    shape, place = asked_for(model, training.sequence or 1), PlaceFlags(machine=path)
    ours, there = training_of(shape, training, place, passes, arm, device)
    if there:
        say_wrapped(estimates.time_line(Prediction(ours).step(there)))


def refuse(arm: Arm, passes: PassFlags, settings: dict[str, Any], ranks: int) -> None:
    """Raise Stop for what the trainer would refuse as well, but seconds later."""
    if arm.name != passes.arm:
        raise Stop(f"{passes.arm} is a file, and arms run by their names", "`study estimate --arm` takes it")
    if stop := launches.lacking():
        raise stop
    flags = TrainerFlags(**settings)
    check(flags)
    optimizers.check(flags, arm)
    arms.check_virtual(arm, "none")
    arm.sharing_ranks(ranks)


def settings_of(model: Wanted, training: TrainingFlags, passes: PassFlags, usual: Precision) -> dict[str, Any]:
    shape = asked_for(model, training.sequence or 1)
    if model.model is None:
        raise Stop("only a model with a name can be run", "give --model")
    settings: dict[str, Any] = {
        "model": model.model,
        # The trainer's own defaults are for its tiny models: the answers of `estimate` would be of other rows.
        "sequence": training.sequence or default_sequence(shape),
        "precision": training.precision or usual,
        "optimizer": training.optimizer or "adamw",
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


def show_rank(record: Record, ranks: int) -> None:
    rank = record.memory.components.per_rank[0]
    at_peak, after = rank.at_peak or {}, rank.after_step
    say_wrapped(f"Rank 0 of {ranks}, run alone (virtual), holds {size(rank.tracked_peak_bytes)} at the peak.", "")
    rows = []
    for name in at_peak | after | {"gradients": 0}:  # often there are none at either time
        at_end = size(after.get(name, 0))
        rows.append({"component": name, "at the peak": size(at_peak.get(name, 0)), "after a step": at_end})
    show(rows)
    moved = {kind: sent.bytes for kind, sent in record.traffic.per_rank[0].items()}
    say_wrapped("", f"{estimates.collectives(moved)}; sequences: {record.observed.data_source}")
    if not record.hardware.devices:
        say_wrapped(
            "Kernels are a CPU's, which keep the scores of attention with dropout: study estimate counts a GPU's."
        )
