"""`study virtual`: measures the memory and the traffic of one rank of N, which runs alone."""

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from study.cli import room
from study.cli.asked import Passes, Training
from study.core import arms, optimizers
from study.core.errors import Stop
from study.core.gpus import num_gpus
from study.core.numbers import size
from study.core.options import AsJson
from study.core.settings import CACHE, Flags, Init, Task, check, resolve
from study.core.shapes import SHAPES, is_local
from study.core.tables import say, show
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
    init: Init = "none",
    attention: Literal["sdpa", "eager"] | None = None,
    run_dir: Path | None = None,
    nvme_dir: Path | None = None,
    cache_dir: Path = Flags.cache_dir,
    as_json: AsJson = False,
) -> dict | None:
    """Run rank 0 of an N-rank job in one process, and print its memory and traffic. No GPU is needed.

    By default the tensors have shapes but no values, so that they need no memory.

    Args:
        training: The training, as `study estimate` has it.
        passes: The arm and its passes.
        model: A hub name, a local folder, or a built-in shape. Default: a tiny model, or with a GPU the documents'.
        lora_rank: Only adapters of this rank train.
        trust_remote_code: Run the Python code that comes with a model.
        task: imdb, wikitext, or random rows of the shape that the model takes. Default: synthetic with --model.
        init: Where values come from. none: there are none. random: they need as much memory as a whole model.
        attention: sdpa (fused) or eager (written out). Default: sdpa if transformers has it for the model.
        run_dir: Keep the run in this new folder.
        nvme_dir: The folder for zero3_nvme.
        cache_dir: Where data, weights and traces are kept.
        as_json: Print the memory and the traffic as JSON.
    """
    ranks = 8 if training.gpus is None else training.gpus
    if ranks < 2:
        raise Stop(f"--ranks must be at least 2 (got {ranks})", "give 2 or more")
    if cache_dir != Flags.cache_dir:
        os.environ[CACHE] = str(cache_dir.expanduser().resolve())  # for traces, and for the trainer
    chosen = arms.load_arm(passes.arm)
    given = Flags(
        model=model,
        lora_rank=lora_rank,
        trust_remote_code=trust_remote_code,
        task=task,
        init=init,
        attention=attention,
        run_dir=run_dir,
        nvme_dir=nvme_dir,
        cache_dir=cache_dir,
        micro_batch=passes.micro_batch,
        accumulation=passes.accumulation,
        checkpointing=passes.checkpointing,
        sequence=training.sequence,
        precision=training.precision or usual_precision(chosen),
        optimizer=training.optimizer,
        steps=2,
        warmup_steps=1,
        virtual_ranks=ranks,
    )
    settings = given if model is None else _with_model(given, model)
    if stop := launches.lacking():
        raise stop
    check(settings)
    optimizers.check(settings, chosen)
    arms.check_virtual(chosen, settings.init)
    chosen.sharing_ranks(ranks)
    gpu = num_gpus() > 0
    room.check(resolve(settings, gpu), chosen, gpu)
    with tempfile.TemporaryDirectory() as temporary:
        folder = settings.run_dir.resolve() if settings.run_dir else Path(temporary) / "run"
        sys.stderr.write(f"running rank 0 of {ranks} under {passes.arm} ...\n")
        _launch(settings, passes.arm, folder)
        answer = _answer(store.load(folder))
    if as_json:
        return answer
    say(f"Rank 0 of {ranks}, run alone (virtual), holds {size(answer['peak_bytes'])} at the peak.", "")
    parts = answer["at_peak"] | answer["after_step"]
    times = {"at the peak": "at_peak", "after a step": "after_step"}
    show([{"component": part} | {name: size(answer[at].get(part, 0)) for name, at in times.items()} for part in parts])
    say("")
    show(
        [
            {"collective": kind, "calls of a step": answer["calls"][kind], "bytes of a step": size(sent_bytes)}
            for kind, sent_bytes in answer["traffic"].items()
        ]
    )
    say("", f"rows: {answer['data']}")
    if settings.run_dir is not None:
        say("", f"the run is in {settings.run_dir}")
    return None


def _with_model(settings: Flags, name: str) -> Flags:
    """Return the settings with the sequence that the model reads, and with its path if it is a folder."""
    model = named(name, trust_remote_code=settings.trust_remote_code)
    refuse_long_rows(model, settings.sequence or 0)
    path = name if name in SHAPES or not is_local(name) else str(Path(name).resolve())  # launched from another folder
    return replace(settings, model=path, sequence=settings.sequence or default_sequence(model))


def _launch(settings: Flags, arm: str, folder: Path) -> None:
    plain = replace(settings, run_dir=None, nvme_dir=None, cache_dir=Flags.cache_dir)  # given otherwise
    changed = {name: value for name, value in vars(plain).items() if value != getattr(Flags, name)}
    cell = Cell("", "virtual", "tiny", arm, None, changed)
    command = launches.command(cell, folder, settings.nvme_dir)
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
