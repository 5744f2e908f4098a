"""What an advice assumes, and how far others' trainings were from their predictions."""

from collections.abc import Mapping

from study.core.gpus import Gpu
from study.core.text import count, number_of, percent, size
from study.known.findings import finding
from study.predict.front import MISS, Advice, Hardware, Question, Transformer, reserve_bytes, scores
from study.report.rows import amount


def assumptions(question: Question) -> list[str]:
    """Return what an advice was predicted for. Nobody has measured it."""
    gpu = question.gpu
    return [
        *of_model_and_gpu(question.model, gpu),
        f"{question.model.rows_in_words(question.batch, question.sequence)} per step (--batch, --sequence)",
        f"{amount(question.host_memory_bytes)} of host memory in a node (--host-memory)",
        precisions(question),
        f"{MISS:.0%} of the peak stay free as well, where possible",
        f"{links(question.machine, question.gpus)} (--link, --gpus-per-node)",
        finding("fsdp2_whole_gradients").said,
    ]


def of_model_and_gpu(model: Transformer, gpu: Gpu | None) -> list[str]:
    of_model = f"the model is {model.family} ({model.name}), {count(model.parameters)} parameters"
    if gpu is None:
        return [of_model]
    return [
        of_model,
        f"{gpu.kind} is {gpu.name}: {size(gpu.memory_bytes)}, {gpu.peaks['fp16'] / 1e12:.0f} TFLOP/s in 16 bits, "
        f"{size(gpu.memory_bytes_per_s)}/s ({gpu.source})",
        f"{size(reserve_bytes(gpu))} of each GPU stay free for context, NCCL and fragmentation",
    ]


def precisions(question: Question) -> str:
    if question.precision == "fp32":
        return finding("fp32_is_tf32").said
    half = "bf16" if question.gpu.has_bf16 else "fp16"  # GPUs before Ampere have none
    of_adapters = question.model.is_partly_frozen and question.precision == "bf16_cast"
    return finding("adapters_in_one_precision" if of_adapters else "precision_by_default", half=half).said


def links(machine: Hardware, gpus: int) -> str:
    """Return the links of so many GPUs."""
    if gpus == 1:
        return "one GPU, which needs no link"
    between, local = machine.links(gpus), machine.gpus_per_node
    if gpus <= local:
        return f"{between.link} between {gpus} GPUs in a node"
    nodes = f"{between.network} for each GPU between {gpus // local} nodes"
    return f"{nodes}, and {between.link} between {local} GPUs in a node" if local > 1 else nodes


def in_short(advice: Advice, given: Mapping[str, object]) -> list[str]:
    """Return how accurate it is, and what was taken for the options that nobody gave, whose value is None."""
    question = advice.question
    taken: dict[str, object] = {"--sequence": question.sequence} if question.model.row_names == "sequences" else {}
    if advice.choice:
        taken["--batch"] = question.batch
    if question.gpus > 1:
        taken["--link"] = question.link or "none"
    if any(row.offloads for row in (advice.choice, advice.alternative) if row):
        taken["--host-memory"] = amount(question.host_memory_bytes)
    taken["--precision"] = question.precision or "by arm"
    words = [f"{option} {value}" for option, value in taken.items() if given[option] is None]
    return [in_a_line(has_seconds=True), f"Taken: {', '.join(words) or 'what you gave'}; --details says more."]


def of_steps(advice: Advice, is_default_batch: bool) -> list[str]:
    """Return how many micro-batches a step has where nobody says it, and what would narrow its seconds."""
    lines = []
    if advice.choice and is_default_batch:
        passes = number_of(advice.choice.accumulation, "micro-batches")
        batch = f"{advice.question.batch} {advice.question.model.row_names} over all GPUs, here in {passes}"
        lines.append(f"Without --batch a step has {batch}; `study estimate` takes 1 unless --accumulation says more.")
    if advice.choice and advice.question.pace is None:
        lines.append("Seconds depend on the host: a minute of `study calibrate` there narrows them.")
    return lines


# Predictions by this code, on 28 November 2026, of measurements that nobody who writes it has read, and whose rows are
# not kept here. They are worse than those of published numbers, so they are said first.
OUTSIDE_STEPS = (
    "step time: of 31 steps of others, which nobody here had read, half were predicted 34% or more off, and 21 more "
    "than 10% too short; the interval of that day, which was narrower, held 8"
)
OUTSIDE_PEAKS = (
    "memory: of 56 peaks of others' trainings, which nobody here had read, half were predicted 11% or more off, and 20 "
    "more than 10% too low"
)
BESIDE_README = "README counts tensors of our own trainer, which are predicted better"
LIMITS = {"gpu": "the GPU is the limit", "host": "the host is the limit", "links": "links are the limit"}


def in_a_line(has_seconds: bool) -> str:
    """Return in plain sentences how far off others' trainings were, and where all figures stand."""
    steps = " Half of their steps were a third or more off, in an outside check." if has_seconds else ""
    return f"A third of others' peaks were more than 10% above the prediction.{steps} More: reports/answers/fit.md."


def accuracy() -> list[str]:
    """Return how far others' trainings were from their predictions: steps by what limits them, then memory.

    First what an outside check gave, then the first predictions of published numbers: before any error was seen.
    """
    times = first_of("time")
    lines = []
    for limit, said in LIMITS.items():
        time = scores.score([each for each in times if each.limit == limit], "first")
        lines.append(
            f"step time, published steps where {said}: half of first predictions were at most "
            f"{percent(time['median error'])} off, {percent(time['near'])} of all at most {scores.NEAR['time']:.0%}"
        )
    return [OUTSIDE_STEPS, *lines, *accuracy_of_memory()]


def accuracy_of_memory() -> list[str]:
    peak = scores.score(first_of("memory"), "first")
    published = (
        f"memory, published peaks: half of first predictions were at most {percent(peak['median error'])} off, "
        f"{percent(peak['too low'])} were more than {scores.TOO_LOW:.0%} too low"
    )
    return [f"{OUTSIDE_PEAKS}. {BESIDE_README}", published]


def first_of(quantity: str) -> list[scores.Number]:
    """The published numbers of which a first prediction is known, so many of a source."""
    return scores.capped([each for each in scores.numbers() if each.first and each.quantity == quantity])
