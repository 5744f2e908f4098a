"""`study oom`: what an error about memory means, and which change would fit."""

from dataclasses import asdict

import tyro

from study.cli import given
from study.cli.findings import say_indented
from study.configs.oom import reading
from study.configs.oom.causes import Cause
from study.configs.oom.changes import predicted
from study.configs.oom.explain import explain
from study.configs.oom.reading import OomError
from study.configs.oom.training import Described, KnownTraining
from study.core.errors import Stop
from study.core.settings import flag
from study.core.text import say_wrapped
from study.known.findings import with_id
from study.predict.front import Wanted


def oom(error: tyro.conf.Positional[tuple[str, ...]] = (), /, *, model: Wanted, training: Described) -> dict:
    """Explain an error about memory: what its size is, and what made it. Nothing is run.

    It reads errors of CUDA and ROCm, of host memory and pinned memory, of processes that were killed, and of disks.
    With --model and --arm or --config, the size is matched with that training's tensors; with --micro-batch
    and --sequence also with what a micro-batch makes. With --model, --arm, --ranks and --micro-batch, and an error that
    tells the size of the GPU, it says which single change is predicted to fit.

    With --json: the causes with their points, and the prediction.

    Example: `study oom train.log --vocabulary 248320 --sequence 4k --micro-batch 1`

    Args:
        error: The error, best in quotes, or the log that holds it. Default: the standard input.
        model: The model.
        training: The training.
    """
    paths, text = given.split(error or ("-",), "oom")
    if not text.strip():
        what = " ".join(error) or "the standard input"
        raise Stop(
            f"{what!r:.80} has no text of an error", "name the log of the training, or paste the error in quotes"
        )
    message = reading.find(given.whole_text(paths, text))
    causes, known = explain(message, model, training)
    which = predicted(message, known)
    _show_causes(causes, known.described.checkpointing)
    say_wrapped("", f"The message ({message.where.removeprefix('oom-')}): {message.line}")
    used = vars(model) | vars(known.described)
    # The config says more of the training than the flags do. A wrong guess has to be seen.
    taken = [f"{flag(name)} {value}".removesuffix(" True") for name, value in used.items() if value is not None]
    if taken:
        say_wrapped(f"Taken as: {', '.join(taken)}.")
    if which:
        say_wrapped("", which)
    _ask(message, known)
    answer = {"error": asdict(message), "causes": list(map(asdict, causes)), "taken_as": used}
    return answer | {"predicted": which or None}


def _show_causes(causes: list[Cause], checkpointing: bool | None) -> None:
    first, *others = causes
    how = "Likely" if first.is_likely else "Perhaps"
    say_wrapped(with_id(f"{how}: {first.what}", first.id), "")
    if not first.is_likely:
        say_indented("A memory snapshot of PyTorch would tell.")
    say_indented(f"What to do: {first.remedy_for(checkpointing)}.", f"Tells it apart: {first.apart}.")
    say_indented(f"It rests on: {'; '.join(first.reasons)}.")
    for number, cause in enumerate(others, 2):
        why = f"{'likely' if cause.is_likely else 'possible'}: {'; '.join(cause.reasons)}"
        what = with_id(f"{cause.what[0].upper()}{cause.what[1:]} ({why})", cause.id)
        say_wrapped("", what, indent="    ", first=f"{number:>2}. ")
        say_indented(f"What to do: {cause.remedy_for(checkpointing)}.", f"Tells it apart: {cause.apart}.")


def _ask(message: OomError, training: KnownTraining) -> None:
    """Say which flags would tell more."""
    if training.model is None:
        say_wrapped("", "With --model and --arm or --config, the size is matched with this training's own tensors.")
    elif training.wanted.lora_rank is None:
        say_wrapped("", "If only adapters train, give --lora-rank as well.")
    missing = [flag(name) for name in training.described.missing]
    if missing and message.total:
        say_wrapped(f"Give {' and '.join(missing)} to hear which change is predicted to fit.")
    say_wrapped("`study advise` predicts which arms fit, and how long their steps take.")
