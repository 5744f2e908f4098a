"""`study oom`: what an error about memory says, what made it, and which change would fit."""

import dataclasses
from typing import Annotated

import tyro

from study.core.gpus import GPUS
from study.core.options import AsJson
from study.core.settings import flag
from study.core.text import say, say_wrapped, short, show, size, wrapped
from study.predict.front import Wanted, reserve_bytes
from study.watch.oom import reading
from study.watch.oom.explain import Described, Explanation, Proposal, explain, proposals


def oom(
    error: tyro.conf.Positional[str | None] = None,
    /,
    *,
    wanted: Annotated[Wanted, tyro.conf.arg(name="")],
    given: Annotated[Described, tyro.conf.arg(name="")],
    as_json: AsJson = False,
) -> dict | None:
    """Explain an error about memory: what its size is, what made it, and which change would fit. Nothing is run.

    It reads errors of CUDA and ROCm, of host memory and pinned memory, of processes that were killed, and of disks.
    With --model and --arm or --config, the size is matched with that training's tensors, and changes are predicted.

    Args:
        error: The error in quotes, or the log that holds it. Default: the standard input.
        wanted: The model.
        given: The training.
        as_json: Print the answer as JSON.
    """
    seen = explain(reading.content(error), wanted, given)
    changes = proposals(seen) if seen.error.where == "GPU" else []
    if as_json:
        message = {name: value for name, value in dataclasses.asdict(seen.error).items() if name != "context"}
        causes = [dataclasses.asdict(cause) for cause in seen.causes]
        tried = [dataclasses.asdict(change) for change in changes]
        return {"error": message, "gpu": seen.gpu, "causes": causes, "proposals": tried}
    if not seen.causes[0].is_likely:
        say_wrapped("No cause is sure. The likeliest is first; a memory snapshot of PyTorch tells.", "")
    for number, cause in enumerate(seen.causes, 1):
        sure = "likely" if cause.is_likely else "possible"
        why = f" ({sure}: {'; '.join(cause.reasons)})"
        say(*wrapped(f"{number:>2}. {cause.what[0].upper()}{cause.what[1:]}{why}.", "    "))
        say_wrapped(f"What to do: {cause.remedy}.", indent="    ", first="    ")
        say_wrapped(f"Tells it apart: {cause.apart}.", indent="    ", first="    ")
    say_wrapped("", f"The message ({seen.error.where}, {seen.error.count} of them): {seen.error.line}")
    known = {name: value for name, value in vars(seen.given).items() if value is not None}
    if known:
        say_wrapped(f"Taken as: {', '.join(f'{flag(name)} {value}' for name, value in known.items())}.")
    if changes:
        _show_changes(changes, seen)
    elif seen.error.where == "GPU":
        say_wrapped("", "With --model and --arm or --config, the size is matched with this training's own tensors.")
    return None


def _show_changes(changes: list[Proposal], seen: Explanation) -> None:
    now, *fitting = changes
    gpu = GPUS[seen.gpu or ""]
    does = "does not fit" if now.step_s is None else "should fit, so the training is not as described"
    say_wrapped(
        "",
        f"Predicted on {seen.gpu} ({size(gpu.memory_bytes)}) under {seen.given.arm}: a peak of {size(now.peak_bytes)}, "
        f"which {does} beside {size(int(reserve_bytes(gpu)))} for the CUDA context, NCCL and fragmentation.",
    )
    rows = [
        {"change": each.change, "peak": size(each.peak_bytes), "step": f"{short(round(each.step_s or 0, 3))} s"}
        for each in fitting
    ]
    if rows:
        say("", "What fits, predicted:")
        show(rows)
    elif now.step_s is None:
        say_wrapped("None of the usual changes fits: `study advise` tries all arms and names what would be enough.")
