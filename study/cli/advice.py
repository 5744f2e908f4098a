"""`study advise`: which arm to use on given GPUs, or how many GPUs a training needs."""

import dataclasses
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import tyro

from study.cli import configs
from study.errors import Stop
from study.io.tables import say, say_wrapped, show
from study.machine.gpus import GPUS, gpu_named
from study.predictor.advice.advise import Advice
from study.predictor.advice.advise import advise as recommend
from study.predictor.advice.purchase import fewest, remedies
from study.predictor.advice.question import Given, Question
from study.predictor.tracing.transformer import Transformer
from study.predictor.wanted import Wanted, asked_for
from study.report import advice as answer
from study.report.outside import accuracy
from study.spec.options import AsJson


def advise(
    wanted: Annotated[Wanted, tyro.conf.arg(name="")],
    given: Annotated[Given, tyro.conf.arg(name="")],
    *,
    gpus: str = "1..64",
    gpu: str | None = None,
    write: Path | None = None,
    nvme_dir: Path | None = None,
    as_json: AsJson = False,
) -> dict | None:
    """Recommend an arm for a model on your GPUs, or say how many of which GPUs it needs. Nothing is run.

    Give --gpu and one number as --gpus for a recommendation. Otherwise the answer is a number of GPUs.

    Args:
        wanted: The model.
        given: The training and the machine.
        gpus: Number of GPUs over all nodes, such as 8. Or a range to try, such as 1..64.
        gpu: Kind of GPU: H100, A100-40GB, L4, RTX4090 and others. Default: all kinds are tried.
        write: Write the recommended Accelerate config into this new file, with a DeepSpeed json beside it if needed.
        nvme_dir: For --write: the folder on the disk for offloading.
        as_json: Print the answer as JSON.
    """
    counts = counts_of(gpus)
    model = asked_for(wanted, given.sequence or 1)
    if gpu is None or len(counts) > 1:
        if write is not None:
            raise Stop("--write needs one machine", "give --gpu and one number as --gpus")
        return _advise_number(model, counts, [gpu_named(gpu)] if gpu else list(GPUS), given, as_json)
    advice = recommend(Question.of(model, counts[0], gpu, given))
    if write is not None:
        _write(write, advice, nvme_dir)
    lines = answer.in_words(advice)
    why = answer.reason(advice)
    detail = _in_detail(wanted, advice)
    if advice.choice is None:
        lines += answer.remedies_in_words(remedies(advice.question, given))
    assumed = answer.assumptions(advice.question)
    if as_json:
        more = {
            "in_words": lines,
            "why": why,
            "detail": detail,
            "assumed": assumed,
            "accuracy": accuracy(),
        }
        return dataclasses.asdict(advice) | more
    say_wrapped(*lines, *([why] if why else []), "")
    show(answer.table(advice))
    if detail:
        without = " but without --beside" if "--beside" in detail else ""
        say_wrapped("", f"In detail: {detail}, or study timeline with the same words{without}.", indent="  ")
    say("", "Assumed:")
    say_wrapped(*assumed, indent="  ", first="- ")
    say_wrapped("", accuracy(), *model.remarks())
    return None


def _write(path: Path, advice: Advice, nvme_dir: Path | None) -> None:
    """Write the config of the choice."""
    if advice.choice is None:
        raise Stop("nothing is predicted to fit", "give more GPUs, or a shorter sequence")
    for written in configs.write(path, advice.choice, advice.question, nvme_dir):
        sys.stderr.write(f"written: {written}\n")


def _in_detail(wanted: Wanted, advice: Advice) -> str:
    """Return the command that shows the choice in detail; empty if nothing fits."""
    if advice.choice is None:
        return ""
    model = {name.replace("_", "-"): value for name, value in vars(wanted).items() if value not in (None, False)}
    words = [word for name, value in model.items() if value is not True for word in (f"--{name}", str(value))]
    words += [f"--{name}" for name, value in model.items() if value is True]
    if advice.question.beside:
        words += ["--beside", f"{advice.question.beside:g}"]
    return shlex.join(["study", "estimate", *words, *answer.flags(advice.choice, advice.question)])


def counts_of(text: str) -> tuple[int, ...]:
    """Return how many GPUs to try: "8" means 8; "1..64" means both ends and the powers of two between them."""
    if "+" in text:
        what = f"--gpus {text!r:.80}: GPUs of several kinds in one training are not modelled"
        raise Stop(what, "give their number with --gpus, and the slowest or smallest of them with --gpu")
    match = re.fullmatch(r"(\d{1,9})(?:\.\.(\d{1,9}))?", text.strip(), re.ASCII)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high <= 2**16:
        raise Stop(f"--gpus {text!r:.80} is not a number of GPUs", "give a number from 1 to 65536, or two, as in 1..64")
    return tuple(sorted({low, high, *(2**n for n in range(17) if low <= 2**n <= high)}))


def _advise_number(
    model: Transformer, counts: tuple[int, ...], kinds: list[str], given: Given, as_json: bool
) -> dict | None:
    """Print the fewest GPUs of each kind that are enough."""
    enough = [advice for kind in kinds for advice in fewest(model, counts, kind, given)]
    line = answer.needed_in_words(enough, counts)
    if as_json:
        return {"in_words": [line], "enough": [dataclasses.asdict(each) for each in enough]}
    say_wrapped(line, "")
    show(answer.needed_table(enough))
    if enough:
        say("", "Assumed, for the first of them; give --gpus and --gpu for another:")
        say_wrapped(*answer.assumptions(enough[0].question), indent="  ", first="- ")
    return None
