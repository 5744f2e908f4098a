"""How many of which GPUs a training needs, and what would help where nothing fits."""

from dataclasses import replace

from study.machine.gpus import GPUS
from study.theory.advise import Advice, advise
from study.theory.architecture import Architecture
from study.theory.question import Given, Question

MOST_GPUS = 64  # that are tried where the user's do not suffice


def fewest(model: Architecture, counts: tuple[int, ...], gpu: str, given: Given) -> list[Advice]:
    """For the fewest GPUs of a kind that suffice; before them, for fewer that do with states in host memory."""
    enough = []
    for gpus in counts:
        if (given.batch or 0) % gpus or gpus % min(gpus, given.gpus_per_node or gpus):
            continue
        advice = advise(Question.of(model, gpus, gpu, given))
        if advice.choice and not advice.choice.offloads:
            return [*enough, advice]
        if advice.choice and not enough:
            enough = [advice]
    return enough


def remedies(question: Question, given: Given) -> list[tuple[str, Advice]]:
    """What would make a training fit that does not: more host memory, more GPUs, larger GPUs."""
    lacking = [row.host_bytes for row in advise(question).rows if row.limit == "host memory"]
    helps = []
    if lacking:
        richer = replace(question, host_memory_bytes=min(lacking))
        helps.append(("more host memory", advise(richer)))
    more = tuple(question.gpus * 2**n for n in range(1, 7) if question.gpus * 2**n <= MOST_GPUS)
    helps += [("more GPUs", each) for each in fewest(question.model, more, question.gpu, given)[-1:]]
    larger = sorted((gpu for gpu in GPUS if GPUS[gpu].memory_bytes > GPUS[question.gpu].memory_bytes), key=memory_of)
    tried = [fewest(question.model, (question.gpus,), gpu, replace(given, link=None)) for gpu in larger]
    enough = [advices[0] for advices in tried if advices]
    if enough:
        helps.append(("larger GPUs", min(enough, key=lambda advice: advice.choice.offloads)))
    return helps


def memory_of(gpu: str) -> int:
    return GPUS[gpu].memory_bytes
