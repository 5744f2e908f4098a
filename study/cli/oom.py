"""`study oom`: what an error about memory says, what made it, and which change would fit."""

import dataclasses
from typing import Annotated

import tyro

from study.core.gpus import GPUS
from study.core.numbers import number_of, short, size
from study.core.options import AsJson
from study.core.tables import say, say_wrapped, show, wrapped
from study.predict.front import reserve_bytes
from study.watch.oom import reading
from study.watch.oom.causes import Cause
from study.watch.oom.explain import Explanation, explain
from study.watch.oom.proposals import Proposal, proposals
from study.watch.oom.reading import OomError
from study.watch.oom.training import Described, Shaped


def oom(
    error: tyro.conf.Positional[str | None] = None,
    /,
    *,
    wanted: Annotated[Shaped, tyro.conf.arg(name="")],
    given: Annotated[Described, tyro.conf.arg(name="")],
    as_json: AsJson = False,
) -> dict | None:
    """Explain an error about memory: what its size is, what made it, and which change would fit. Nothing is run.

    It reads errors of CUDA and ROCm, of host memory and pinned memory, of processes that were killed, and of disks.
    With --model and --arm or --config, the size is matched with that training's tensors, and changes are predicted.

    Args:
        error: The error in quotes, or the log that holds it. Default: the standard input.
        wanted: The model. Also without --params: --vocabulary, --hidden, --ffn, --heads, as far as they are known.
        given: The training.
        as_json: Print the answer as JSON.
    """
    seen = explain(reading.content(error), wanted, given)
    changes: list[Proposal] = []
    if seen.training and seen.gpu and seen.error.where == "GPU":
        changes = proposals(seen.training, seen.gpu)
    if as_json:
        return _as_dict(seen, changes)
    _show_causes(seen.causes, has_sizes=seen.error.asked is not None)
    say_wrapped("", _message(seen.error))
    if seen.read:
        say_wrapped(f"Read in the log: {', '.join(seen.read)}.")
    _show_changes(changes, seen)
    if seen.training is None and seen.error.where == "GPU":
        say_wrapped("", "With --model and --arm or --config, the size is matched with this training's own tensors.")
    return None


def _message(seen: OomError) -> str:
    """Return what the message says, in one sentence."""
    says = {"asked for": seen.asked and seen.asked.text}
    names = {"allocated": "in tensors", "unallocated": "reserved and not in use", "free": "free", "total": "in all"}
    numbers = {words: getattr(seen, name) for name, words in names.items()}
    says |= {words: None if value is None else size(value) for words, value in numbers.items()}
    summary = ", ".join(f"{value} {words}" for words, value in says.items() if value)
    more = f" The text has {seen.count} such messages; this is the first." if seen.count > 1 else ""
    return f"Out of memory ({seen.where}): {summary or seen.line}.{more}"


def _show_causes(ranked: list[Cause], *, has_sizes: bool) -> None:
    if not ranked or not ranked[0].is_likely:
        fit = f": {number_of(len(ranked), 'causes')} possible, the likeliest first" if len(ranked) > 1 else ""
        sizes = "" if has_sizes else " It has no sizes: nvidia-smi shows whose memory it is."
        say_wrapped(f"No cause is sure{fit}; a memory snapshot of PyTorch tells.{sizes}", "")
    for number, cause in enumerate(ranked, 1):
        sure = "likely" if cause.is_likely else "possible"
        what = cause.what[0].upper() + cause.what[1:]
        say(*wrapped(f"{number:>2}. {what} ({sure}: {'; '.join(cause.reasons) or 'no number says more'}).", "    "))
        if number == 1 or cause.is_likely:
            say(*wrapped(f"What to do: {cause.remedy}.", "    ", "    "))
        if len(ranked) > 1:
            say(*wrapped(f"Tells it apart: {cause.apart}.", "    ", "    "))


def _show_changes(changes: list[Proposal], seen: Explanation) -> None:
    gpu = seen.gpu
    run = seen.training
    if not changes or gpu is None or run is None:
        return
    now, *fitting = changes
    fits = "should fit" if now.fits else "does not fit"
    say_wrapped(
        "",
        f"Predicted for {gpu} ({size(GPUS[gpu].memory_bytes)}) under {run.arm}: a peak of {size(now.peak_bytes)}, "
        f"which {fits} beside {size(int(reserve_bytes(GPUS[gpu])))} for the CUDA context, NCCL and fragmentation.",
    )
    if now.fits:
        say_wrapped("So the training is not as described, or rows are longer.")
    if run.assumed:
        say_wrapped(f"Assumed: {', '.join(run.assumed)}.")
    if fitting:
        say("", "What fits, predicted:")
        show([{"change": each.change, "peak": size(each.peak_bytes), "step": _seconds(each)} for each in fitting])
    elif not now.fits:
        say_wrapped("None of the usual changes fits: `study advise` tries all arms and names what would be enough.")


def _seconds(each: Proposal) -> str:
    return "-" if each.step_s is None else f"{short(round(each.step_s, 3))} s"


def _as_dict(seen: Explanation, changes: list[Proposal]) -> dict:
    error = {name: value for name, value in dataclasses.asdict(seen.error).items() if name != "context"}
    rows = [
        {"change": each.change, "peak_bytes": each.peak_bytes, "fits": each.fits, "step_s": each.step_s}
        for each in changes
    ]
    assumed = list(seen.training.assumed) if seen.training else []
    named = [dataclasses.asdict(cause) for cause in seen.causes]
    return {"error": error, "causes": named, "gpu": seen.gpu, "proposals": rows, "assumed": assumed}
