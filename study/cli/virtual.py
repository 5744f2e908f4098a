"""`study virtual`: measures the memory and the traffic of one rank of N, which runs alone."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import tyro

from study.cli.asked import Passes, Training
from study.core import arms, optimizers
from study.core.errors import Stop
from study.core.options import AsJson
from study.core.settings import Flags, Task, check
from study.core.shapes import SHAPES, is_local
from study.core.text import say, show, size
from study.predict.front import default_sequence, named, refuse_long_rows, usual_precision
from study.records import store
from study.records.schema import Record
from study.sweeps import launches
from study.sweeps.protocol import Cell


def virtual(
    training: Annotated[Training, tyro.conf.arg(name="")],
    passes: Annotated[Passes, tyro.conf.arg(name="")],
    *,
    model: str | None = None,
    lora_rank: int | None = None,
    trust_remote_code: bool = False,
    task: Task | None = None,
    run_dir: Path | None = None,
    as_json: AsJson = False,
) -> dict | None:
    """Run rank 0 of an N-rank job in one process, and print its memory and traffic. No GPU is needed.

    The tensors have shapes but no values, so that they need no memory.

    Args:
        training: The training, as `study estimate` has it.
        passes: The arm and its passes.
        model: A hub name, a local folder, or a built-in shape. Default: a tiny model, or with a GPU the documents'.
        lora_rank: Only adapters of this rank train.
        trust_remote_code: Run the Python code that comes with a model.
        task: imdb, wikitext, or random rows of the shape that the model takes. Default: synthetic with --model.
        run_dir: Keep the run in this new folder.
        as_json: Print the memory and the traffic as JSON.
    """
    ranks = training.ranks
    if ranks < 2:
        raise Stop(f"--ranks must be at least 2 (got {ranks})", "give 2 or more")
    arm = arms.load_arm(passes.arm)
    given: dict[str, Any] = vars(training) | vars(passes) | {"precision": training.precision or usual_precision(arm)}
    given |= {"lora_rank": lora_rank, "trust_remote_code": trust_remote_code, "task": task, "init": "none"}
    if model is not None:
        shape = named(model, trust_remote_code=trust_remote_code)
        refuse_long_rows(shape, training.sequence or 0)
        is_name = model in SHAPES or not is_local(model)  # it is launched from another folder
        given["model"] = model if is_name else str(Path(model).resolve())
        given["sequence"] = training.sequence or default_sequence(shape)
    given |= {"steps": 2, "warmup_steps": 1, "virtual_ranks": ranks}
    settings = Flags(**{name: value for name, value in given.items() if name not in ("arm", "gpus")})
    if stop := launches.lacking():
        raise stop
    check(settings)
    optimizers.check(settings, arm)
    arms.check_virtual(arm, "none")
    arm.sharing_ranks(ranks)
    with tempfile.TemporaryDirectory() as temporary:
        folder = run_dir.resolve() if run_dir else Path(temporary) / "run"
        sys.stderr.write(f"running rank 0 of {ranks} under {arm.name} ...\n")
        _launch(settings, arm.name, folder)
        answer = _answer(store.load(folder))
    if as_json:
        return answer
    say(f"Rank 0 of {ranks}, run alone (virtual), holds {size(answer['peak_bytes'])} at the peak.", "")
    at_peak, after = answer["at_peak"], answer["after_step"]
    parts = {part: (size(at_peak.get(part, 0)), size(after.get(part, 0))) for part in at_peak | after}
    show([{"component": part, "at the peak": peak, "after a step": rest} for part, (peak, rest) in parts.items()])
    say("")
    calls, sent = answer["calls"], answer["traffic"]
    show([{"collective": kind, "calls of a step": calls[kind], "bytes of a step": size(sent[kind])} for kind in sent])
    say("", f"rows: {answer['data']}")
    say(*(["", f"the run is in {run_dir}"] if run_dir else []))
    return None


def _launch(settings: Flags, arm: str, folder: Path) -> None:
    changed = {name: value for name, value in vars(settings).items() if value != getattr(Flags, name)}
    command = launches.command(Cell("", "virtual", "tiny", arm, None, changed), folder, None)
    try:  # in a session of its own, so that Ctrl-C does not reach the launcher, which would print a traceback
        done = subprocess.run(
            command,
            cwd=arms.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            start_new_session=True,
        )
    except KeyboardInterrupt:  # subprocess has ended the launcher, but not its rank
        launches.end_ranks(folder)
        raise
    if done.returncode != 0:
        sys.stderr.write(done.stdout)  # the trainer's last lines say the reason
        sys.exit(1)


def _answer(record: Record) -> dict:
    """Return what the instruments saw of the rank."""
    rank = record.memory.components.per_rank[0]
    collectives = record.traffic.per_rank[0].items()
    return {
        "ranks": record.observed.virtual_ranks,
        "data": record.observed.data_source,
        "peak_bytes": rank.tracked_peak_bytes,
        "at_peak": rank.at_peak or {},
        "after_step": rank.after_step,
        "traffic": {kind: sent.bytes for kind, sent in collectives},
        "calls": {kind: sent.calls for kind, sent in collectives},
    }
