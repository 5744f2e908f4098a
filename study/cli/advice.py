"""`study advise`: which arm to use on given GPUs."""

import shlex
from dataclasses import asdict
from typing import Annotated, Literal

import tyro

from study.cli.asked import Place, Training, given, question_of
from study.core.errors import Stop
from study.core.gpus import gpu_named
from study.core.options import AsJson
from study.core.text import say, say_wrapped, show
from study.predict.front import MOST_GPUS, Wanted, asked_for, fewest
from study.predict.front import advise as recommend
from study.report import advice as answer

ENOUGH = "Enough: {0.gpus} x {0.gpu}."
DIVIDE = "It needs tensor or pipeline parallelism: see Megatron-LM or torchtitan."
OF_ROW = ("arm", "precision", "micro_batch", "accumulation", "checkpointing")


def advise(
    wanted: Annotated[Wanted, tyro.conf.arg(name="")],
    training: Annotated[Training, tyro.conf.arg(name="")],
    place: Annotated[Place, tyro.conf.arg(name="")],
    *,
    batch: int | None = None,
    checkpointing: Literal["on", "off"] | None = None,
    host_memory: str | None = None,
    details: bool = False,
    as_json: AsJson = False,
) -> dict | None:
    """Recommend an arm for a model on your GPUs. Nothing is run.

    Without --gpus, the fewest GPUs of this kind are looked for that hold the training.

    Args:
        wanted: The model.
        training: The training.
        place: The machine.
        batch: Rows per optimizer step, over all GPUs. Default: 128, or the next multiple of the GPUs.
        checkpointing: Recompute activations in the backward pass. Default: only if it helps.
        host_memory: Host memory of a node, such as 512GiB, or 1TB for an answer in GB. Default: twice that of its GPUs.
        details: Also print what is assumed, and how accurate such predictions are.
        as_json: Print the answer as JSON.
    """
    model = asked_for(wanted, training.sequence or 1)
    gpu = gpu_named(place.gpu or "")
    more = {"batch": batch, "host_memory": host_memory, "checkpointing": checkpointing and checkpointing == "on"}
    lines = []
    if training.gpus is None:
        found = fewest(model, gpu, **given(training, place) | more)
        if found is None:
            remedy = "give --lora-rank, a shorter --sequence, or a larger --gpu"
            raise Stop(f"no 1 to {MOST_GPUS} {gpu} hold {model.name}", remedy)
        advice = found
        lines.append(ENOUGH.format(advice.question))
    else:
        advice = recommend(question_of(model, training.gpus, training, place, **more))
    question, choice = advice.question, advice.choice
    lines += answer.in_words(advice)
    detail = ""
    if choice is None:
        larger = fewest(model, gpu, 2 * question.gpus, **given(training, place) | more)
        lines.append(ENOUGH.format(larger.question) if larger else DIVIDE)
        if not model.is_partly_frozen:
            lines.append("Adapters need far less memory: give --lora-rank 16.")
    else:
        lines += answer.recompute_note(choice.checkpointing, model)
        of_row = {name: getattr(choice, name) for name in OF_ROW} | {"buckets": choice.bucket_elements}
        detail = _command(vars(wanted) | vars(training) | vars(place) | {"gpus": question.gpus} | of_row)
    assumed = answer.assumptions(question)
    if as_json:
        return asdict(advice) | {"in_words": lines, "detail": detail, "assumed": assumed, "accuracy": answer.accuracy()}
    say_wrapped(*lines, "")
    show(answer.table(advice))
    if detail:
        say_wrapped("", f"In detail: {detail}", indent="  ")
    if details:
        say("", "Predicted for:")
        say_wrapped(*assumed, indent="  ", first="- ")
        say_wrapped("", answer.accuracy(), *model.remarks())
    return None


def _command(options: dict) -> str:
    """Return the command that shows a row in detail."""
    words = ["study", "estimate"]
    for name, value in options.items():
        if value not in (None, False, Training.optimizer):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(word for word in words if word != "True")  # a switch has no value
