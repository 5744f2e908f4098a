"""`study advise`: which arm to use on given GPUs."""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from study.cli import configs
from study.cli.asked import GPUS_AT_MOST, Place, Training, predictors_name
from study.errors import Stop
from study.io.tables import say, say_wrapped, show
from study.predictor.advice.advise import Advice, fewest, setup_of_row
from study.predictor.advice.advise import advise as recommend
from study.predictor.advice.question import Given, Question, gpu_named
from study.predictor.wanted import Wanted, asked_for
from study.report import advice as answer
from study.report.outside import accuracy
from study.spec.options import AsJson


def advise(
    wanted: Annotated[Wanted, tyro.conf.arg(name="")],
    training: Annotated[Training, tyro.conf.arg(name="")],
    place: Annotated[Place, tyro.conf.arg(name="")],
    *,
    batch: int | None = None,
    checkpointing: Literal["on", "off"] | None = None,
    host_memory: str | None = None,
    write: Path | None = None,
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
        write: Write the recommended Accelerate config into this new file, with a DeepSpeed json beside it if needed.
        details: Also print what is assumed, and how accurate such predictions are.
        as_json: Print the answer as JSON.
    """
    model = asked_for(wanted, training.sequence or 1)
    given = Given(
        sequence=training.sequence,
        batch=batch,
        precision=training.precision,
        checkpointing=None if checkpointing is None else checkpointing == "on",
        optimizer=predictors_name(training.optimizer),
        quantized=place.quantized,
        link=place.link,
        host_memory=host_memory,
        disk=place.disk,
        gpus_per_node=place.gpus_per_node,
    )
    gpu = gpu_named(place.gpu or "")
    advice, needed = _advice(model, training.gpus, gpu, given)
    if write is not None:
        if advice.choice is None:
            raise Stop("nothing is predicted to fit", "give more GPUs, or a shorter sequence")
        for written in configs.write(write, advice.choice, advice.question):
            sys.stderr.write(f"written: {written}\n")
    lines = [*needed, *answer.in_words(advice)]
    if advice.choice is None:
        lines += _what_helps(advice, given)
    else:
        lines += answer.recompute_note(setup_of_row(advice.question, advice.choice))
    detail = _in_detail(wanted, advice)
    assumed = answer.assumptions(advice.question)
    if as_json:
        more = {"in_words": lines, "detail": detail, "assumed": assumed, "accuracy": accuracy()}
        return dataclasses.asdict(advice) | more
    say_wrapped(*lines, "")
    show(answer.table(advice))
    if detail:
        say_wrapped("", f"In detail: {detail}", indent="  ")
    if details:
        say("", "Assumed:")
        say_wrapped(*assumed, indent="  ", first="- ")
        say_wrapped("", accuracy(), *model.remarks())
    return None


def _advice(model, gpus: int | None, gpu: str, given: Given) -> tuple[Advice, list[str]]:
    """Return the advice for so many GPUs; without a number, that for the fewest, and a sentence with them."""
    if gpus is None:
        if enough := fewest(model, gpu, given):
            return enough, [f"Enough: {enough.question.gpus} x {gpu}."]
        raise Stop(f"no 1 to 64 {gpu} hold {model.name}", "give --lora-rank, a shorter --sequence, or a larger --gpu")
    if not 1 <= gpus <= GPUS_AT_MOST:
        raise Stop(f"--gpus must be from 1 to {GPUS_AT_MOST} (got {gpus})", "give such a number")
    return recommend(Question.of(model, gpus, gpu, given)), []


def _what_helps(advice: Advice, given: Given) -> list[str]:
    """Return how many GPUs are enough if these are not, and what needs less."""
    question = advice.question
    enough = fewest(question.model, question.gpu, given, 2 * question.gpus)
    more = f"Enough: {enough.question.gpus} x {question.gpu}." if enough else answer.DIVIDE
    return [more] if question.model.is_partly_frozen else [more, "Adapters need far less memory: give --lora-rank 16."]


def _in_detail(wanted: Wanted, advice: Advice) -> str:
    """Return the command that shows the choice in detail; empty if nothing fits."""
    if advice.choice is None:
        return ""
    model = {name.replace("_", "-"): value for name, value in vars(wanted).items() if value not in (None, False)}
    words = [word for name, value in model.items() if value is not True for word in (f"--{name}", str(value))]
    words += [f"--{name}" for name, value in model.items() if value is True]
    return shlex.join(["study", "estimate", *words, *answer.flags(advice.choice, advice.question)])
