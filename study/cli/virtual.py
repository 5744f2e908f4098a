"""`study virtual`: measures the memory and the traffic of one rank of N, which runs alone."""

import math
import tempfile
from pathlib import Path
from typing import Any

from study.cli.predictions import USUAL_RANKS, Passes, Training
from study.core import arms, optimizers
from study.core.errors import Stop
from study.core.settings import Flags, Task, check
from study.core.shapes import SHAPES, is_local
from study.core.text import during, say, show, size
from study.predict.front import default_sequence, named, refuse_long_rows, usual_precision
from study.sweeps import launches
from study.sweeps.protocol import Cell


def virtual(
    training: Training,
    passes: Passes,
    *,
    model: str | None = None,
    lora_rank: int | None = None,
    task: Task | None = None,
    run_dir: Path | None = None,
) -> None:
    """Run rank 0 of an N-rank job in one process, and print its memory and traffic. No GPU is needed.

    The tensors have shapes but no values, so that they need no memory.

    Args:
        training: The training, as `study estimate` has it.
        passes: The arm and its passes.
        model: A hub name, a local folder, or a built-in shape. Default: a tiny model, or with a GPU the documents'.
        lora_rank: Only adapters of this rank train.
        task: imdb, wikitext, or random rows of the shape that the model takes. Default: synthetic with --model.
        run_dir: Keep the run in this new folder. Its record.json has these numbers to the byte, and more.
    """
    given: dict[str, Any] = vars(training) | vars(passes)
    given |= {"lora_rank": lora_rank, "task": task}
    # The trainer takes both of these from elsewhere: the ranks from --virtual-ranks, the arm from the launcher.
    ranks = given.pop("gpus") or USUAL_RANKS
    arm = arms.load_arm(given.pop("arm"))
    given["precision"] = training.precision or usual_precision(arm)
    # Two steps: the optimizer makes its states in the first, so that the second is like all that follow.
    given |= {"steps": 2, "warmup_steps": 1, "virtual_ranks": ranks, "init": "none"}
    if model is not None:
        shape = named(model)
        refuse_long_rows(shape, training.sequence or 0)
        # The trainer's own default is shorter, for its tiny models: the answers of `estimate` would be of other rows.
        given["sequence"] = training.sequence or default_sequence(shape)
        given["model"] = model
        if is_local(model) and model not in SHAPES:
            given["model"] = str(Path(model).resolve())  # it is launched from another folder
    settings = {name: value for name, value in given.items() if value is not None}

    # --- What the trainer would refuse as well, but seconds later.
    if stop := launches.lacking():
        raise stop
    flags = Flags(**settings)
    check(flags)
    optimizers.check(flags, arm)
    arms.check_virtual(arm, "none")
    arm.sharing_ranks(ranks)
    if run_dir and run_dir.exists():
        raise Stop(f"--run-dir {run_dir} exists", "give a new folder")

    cell = Cell("", "virtual", "tiny", arm.name, None, settings)
    # --- The launch: one process with the collectives of rank 0, which move nothing. It ends like a sweep's cell.
    with tempfile.TemporaryDirectory() as temporary, during(f"running rank 0 of {ranks} under {arm.name}"):
        folder = run_dir or Path(temporary, "run")
        folder.parent.mkdir(parents=True, exist_ok=True)
        record = launches.run(cell, folder, math.inf, math.inf, None, lambda *_: None)
    if record.error:
        raise Stop(record.error.message, record.error.what_to_do)

    # --- The answer: memory by component, and what the second step sent.
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
