"""How many GPUs of which kind a training needs, and what would help if nothing fits."""

from dataclasses import replace

from study.machine.gpus import GPUS
from study.predictor.advice.advise import Advice, advise
from study.predictor.advice.question import Given, Question
from study.predictor.architecture import Architecture
from study.predictor.tracing.transformer import Transformer

LORA_RANK = 16  # a usual one; others need about as much memory
MOST_GPUS = 64  # the most that are tried if the user's GPUs do not suffice


def fewest(model: Architecture | Transformer, counts: tuple[int, ...], gpu: str, given: Given) -> list[Advice]:
    """The advice for the fewest GPUs that suffice; before it, that for fewer GPUs with states in host memory."""
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
    """What would make the training fit: only adapters, more host memory, more GPUs, larger GPUs."""
    model, helps = question.model, []
    if isinstance(model, Transformer) and model.lora_rank is None and model.train_only is None:
        adapters = advise(replace(question, model=replace(model, lora_rank=LORA_RANK)))
        helps += [(f"LoRA adapters of rank {LORA_RANK}", adapters)] if adapters.choice else []
    lacking = [row.host_bytes for row in advise(question).rows if row.limit == "host memory"]
    if lacking:
        richer = replace(question, host_memory_bytes=min(lacking))
        helps.append(("more host memory", advise(richer)))
    more = tuple(question.gpus * 2**n for n in range(1, 7) if question.gpus * 2**n <= MOST_GPUS)
    helps += [("more GPUs", each) for each in fewest(model, more, question.gpu, given)[-1:]]
    larger = sorted((gpu for gpu in GPUS if GPUS[gpu].memory_bytes > GPUS[question.gpu].memory_bytes), key=memory_of)
    with_host = None
    for gpu in larger:
        for advice in fewest(question.model, (question.gpus,), gpu, replace(given, link=None)):
            if not advice.choice.offloads:
                return [*helps, ("larger GPUs", advice)]
            with_host = with_host or advice
    return [*helps, ("larger GPUs", with_host)] if with_host else helps


def memory_of(gpu: str) -> int:
    return GPUS[gpu].memory_bytes
