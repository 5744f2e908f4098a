"""How many GPUs of which kind a training needs, and what would help if nothing fits."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from study.errors import Stop
from study.machine.gpus import GPUS
from study.predictor.advice.advise import Advice, Row, advise
from study.predictor.advice.question import Given, Question
from study.predictor.tracing.transformer import Transformer

LORA_RANK = 16  # a usual one; others need about as much memory
Change = Literal["adapters", "quantized adapters", "8-bit optimizer", "more host memory", "more GPUs", "larger GPUs"]
MOST_GPUS = 64  # the most that are tried if the user's GPUs do not suffice


@dataclass(frozen=True)
class Remedy:
    """A change that makes a training fit, and the advice with it."""

    what: Change
    advice: Advice
    choice: Row


def fewest(model: Transformer, counts: tuple[int, ...], gpu: str, given: Given) -> list[Advice]:
    """Return the advice for the fewest GPUs that suffice; before it, that for fewer GPUs with states in host memory."""
    possible = (n for n in counts if not ((given.batch or 0) % n or n % min(n, given.gpus_per_node or n)))
    # with_half would trace for each GPU
    return _until_enough(advise(Question.of(model, gpus, gpu, given), with_half=False) for gpus in possible)


def _until_enough(advices: Iterable[Advice]) -> list[Advice]:
    """Return the first advice that keeps the states on GPUs; before it, the first one with states in host memory."""
    enough: list[Advice] = []
    for advice in advices:
        if advice.choice and not advice.choice.offloads:
            return [*enough, advice]
        if advice.choice:
            enough = enough or [advice]
    return enough


def remedies(question: Question, given: Given) -> list[Remedy]:
    """Return what would make the training fit: only adapters, more host memory, more GPUs, larger GPUs."""
    candidates: list[tuple[Change, Advice]] = []
    model = question.model
    if not model.is_partly_frozen:
        adapted = replace(question, model=replace(model, lora_rank=LORA_RANK))
        with contextlib.suppress(Stop):  # adapters have to be traced, and torch may not be installed
            candidates.append(("adapters", advise(adapted)))
            if candidates[-1][1].choice is None:
                candidates.append(("quantized adapters", advise(replace(adapted, quantized="nf4"))))
    if question.optimizer == "fused":
        candidates.append(("8-bit optimizer", advise(replace(question, optimizer="adamw_8bit"))))
    if lacking := [row.host_bytes for row in advise(question).tried if row.limit == "host memory"]:
        candidates.append(("more host memory", advise(replace(question, host_memory_bytes=min(lacking)))))
    more = tuple(question.gpus * 2**n for n in range(1, 7) if question.gpus * 2**n <= MOST_GPUS)
    candidates += [("more GPUs", advice) for advice in fewest(model, more, question.gpu, given)[-1:]]
    candidates += [("larger GPUs", advice) for advice in _on_larger_gpus(question, replace(given, link=None))]
    return [Remedy(what, advice, advice.choice) for what, advice in candidates if advice.choice]


def _on_larger_gpus(question: Question, given: Given) -> list[Advice]:
    """Return the advice for the smallest larger GPU that keeps the states, or else for one with states on the host."""
    larger = [gpu for gpu in GPUS if GPUS[gpu].memory_bytes > GPUS[question.gpu].memory_bytes]
    in_order = sorted(larger, key=lambda gpu: GPUS[gpu].memory_bytes)
    advices = (each for gpu in in_order for each in fewest(question.model, (question.gpus,), gpu, given))
    return _until_enough(advices)[-1:]
