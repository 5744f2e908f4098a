"""`study virtual`: measures the memory and the traffic of one rank of N, which runs alone."""

import math
import tempfile
from pathlib import Path
from typing import Any

from study.cli.predictions import Passes, Training
from study.core import arms, optimizers
from study.core.errors import Stop
from study.core.settings import Flags, check
from study.core.shapes import SHAPES, is_local
from study.core.text import during, say, show, size
from study.predict.front import Precision, Wanted, asked_for, default_sequence, usual_precision
from study.records.schema import Record
from study.sweeps import launches
from study.sweeps.protocol import Cell


def virtual(model: Wanted, training: Training, passes: Passes, *, run_dir: Path | None = None) -> None:
    """Run rank 0 of an N-rank job in one process, and print its memory and traffic. No GPU is needed.

    The tensors have shapes but no values, so that they need no memory. The rows are random.

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


def _settings(model: Wanted, training: Training, passes: Passes, usual: Precision) -> dict[str, Any]:
    """Return the flags of the trainer, apart from the arm, which it takes from the launcher."""
    shape = asked_for(model, training.sequence or 1)
    if model.model is None:
        raise Stop("only a model with a name can be run", "give --model")
    given = vars(training) | vars(passes)
    del given["gpus"], given["arm"]
    given |= {"model": model.model, "lora_rank": model.lora_rank, "trust_remote_code": model.trust_remote_code}
    if is_local(model.model) and model.model not in SHAPES:
        given["model"] = str(Path(model.model).resolve())  # it is launched from another folder
    # The trainer's own defaults are for its tiny models: the answers of `estimate` would be of other rows.
    given["sequence"] = training.sequence or default_sequence(shape)
    given["precision"] = training.precision or usual
    # Two steps: the optimizer makes its states in the first, so that the second is like all that follow.
    given |= {"steps": 2, "warmup_steps": 1, "virtual_ranks": training.ranks, "init": "none"}
    return {name: value for name, value in given.items() if value is not None}


def _show(record: Record, ranks: int) -> None:
    """Show the memory by component, and what the second step sent."""
    rank = record.memory.components.per_rank[0]
    at_peak = rank.at_peak or {}
    say(f"Rank 0 of {ranks}, run alone (virtual), holds {size(rank.tracked_peak_bytes)} at the peak.", "")
    components = []
    for name in at_peak | rank.after_step:
        peak, after = size(at_peak.get(name, 0)), size(rank.after_step.get(name, 0))
        components.append({"component": name, "at the peak": peak, "after a step": after})
    show(components)
    say("")
    collectives = []
    for kind, sent in record.traffic.per_rank[0].items():
        collectives.append({"collective": kind, "calls of a step": sent.calls, "bytes of a step": size(sent.bytes)})
    show(collectives)
    say("", f"rows: {record.observed.data_source}")
