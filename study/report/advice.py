"""An advice in words and as a table."""

from collections.abc import Iterable
from dataclasses import asdict, replace

from study.core import arms
from study.core.gpus import Gpu, taken
from study.core.recipes import RECIPES
from study.core.text import UNKNOWN, count, number_of, percent, short, size, times
from study.known.findings import finding
from study.predict.front import (
    FASTER,
    MISS,
    MORE_ROWS,
    Advice,
    PlaceFlags,
    Question,
    Row,
    Transformer,
    advise,
    headroom_bytes,
    loading_bytes,
    reserve_bytes,
    scores,
    with_more_rows,
    with_precision,
)

GIB = 2**30


def enough(advice: Advice, batch: int | None) -> str:
    """`Enough: 4 x A6000. With offloading 2 are enough.` Or, where it is needed: `64 x H100 with offloading.`"""
    question = advice.question
    text = f"Enough: {question.gpus} x {question.gpu.kind}"
    if not any(row.fits and not row.offloads for row in advice.rows):
        text += " with offloading"
    if batch not in (None, question.batch):
        text += f", with --batch {question.batch}"
    fewer = advice.fewest_gpus
    if fewer in (None, question.gpus):
        return f"{text}."
    return f"{text}. With offloading {fewer} {'is' if fewer == 1 else 'are'} enough."


def in_words(advice: Advice) -> list[str]:
    """Return which arm to use, one alternative, and why; and what it warns of."""
    question = advice.question
    choice = advice.choice
    if choice is None:
        nothing = f"Nothing fits on {question.gpus} x {question.gpu.kind}: {_lacks(advice)}."
        return [nothing, *spared(advice), *_smaller(question)]
    # --- what to use
    lines = [f"Use {use(choice, question)}."]
    if choice.is_tight:
        lines.append(finding("fits_only_just", why=why_tight(choice)).said)
    if other := advice.alternative:
        lines.append(f"Alternative: {use(other, question)}; {_why_second(other, choice)}.")
    lines += spared(advice)
    # --- why, how to train so, what would need less, and what comes before the first step
    lines += [
        _reason(advice, choice) + _by_precision(advice, choice),
        start(choice),
    ]
    if question.model.is_partly_frozen and choice.offloads:
        lines += _smaller(question)
    if choice.limit == "launching":
        longer = times(with_more_rows(question, choice).seconds / choice.seconds)
        batch = MORE_ROWS * question.batch
        lines.append(finding("launch_bound", more=MORE_ROWS, batch=batch, longer=longer).said)
    # Published weights have 16 bits, and recipes with fp32 weights widen them.
    needed_bytes = loading_bytes(question.model, question.local, RECIPES[choice.precision].weight_bytes)
    if needed_bytes > question.host_memory_bytes:
        has = amount(question.host_memory_bytes)
        lines.append(finding("loading_fills_the_host", needed=amount(needed_bytes), has=has).said)
    return lines


def start(choice: Row) -> str:
    """Return the command that starts a script so. The files of arms leave the precision to it."""
    launch = f"accelerate launch --config_file accelerate_configs/{choice.arm}.yaml"
    rows = number_of(choice.micro_batch, "sequences")
    batch = f"a batch of {rows} and gradient_accumulation_steps={choice.accumulation}"
    precision = mixed_precision(choice)
    if precision != "no":
        of_fp32 = "Without --mixed_precision it trains in fp32."
        return f"Start it: `{launch} --mixed_precision {precision} train.py`, with {batch} in your script. {of_fp32}"
    if choice.precision != "fp32":
        batch += ", and weights in 16 bits"
    return f"Start it: `{launch} train.py`, with {batch} in your script."


def mixed_precision(row: Row) -> str:
    """Return the precision of a row as Accelerate names it."""
    arm = arms.load_arm(row.arm)
    casts = arm.deepspeed is not None or arm.fsdp is not None  # others get bf16 weights from the script alone
    if row.precision == "bf16" or (row.precision == "bf16_cast" and casts):
        return "bf16" if row.gpu.has_bf16 else "fp16"
    return "no"


def _why_second(other: Row, choice: Row) -> str:
    """What the alternative is, or gives, that the choice does not."""
    longer = other.seconds / choice.seconds
    reason = f"{times(1 / longer)} as fast" if longer < 1 else f"{times(longer)} as long"
    if reason.startswith("1.0"):
        reason = "as fast"
    keeps_all = choice.offloads and not other.offloads
    just = other.is_tight and not choice.is_tight
    if keeps_all:
        reason += ", and without offloading, as published trainings mostly are"
    if just:
        reason += f", but it fits only just ({why_tight(other)})"
    return reason if keeps_all or just else f"the next best: {reason}"


PRICES = {
    "adamw_8bit": "moments of 8 bits, by bitsandbytes, are coarser",
    "bf16_pure": "weights in bf16 throughout round small updates away",
}


def spared(advice: Advice) -> list[str]:
    """What keeps all on a single card, and the price."""
    lines = []
    for option, row in advice.without_offloading:
        price = "; ".join(words for name, words in PRICES.items() if name in option)
        just = f", only just ({why_tight(row)})" if row.is_tight else ""
        memory = of_card(row.peak_bytes, row.gpu)
        lines.append(f"Without offloading: {option}, {memory}{just}, {seconds(row)} per step; {price}.")
    return lines


def why_tight(row: Row) -> str:
    """The number that makes a row fit only just."""
    free_bytes = headroom_bytes(row.gpu, row.peak_bytes)
    if free_bytes < MISS * row.peak_bytes:
        return f"{of_card(row.peak_bytes, row.gpu)}, and {amount(free_bytes)} beside the reserve"
    return f"nvidia-smi shows {of_card(row.driver_bytes or 0, row.gpu)}"


def in_json(advice: Advice) -> dict:
    """All that was compared. A GPU is its name."""
    said = asdict(advice)
    others = [row for _, row in said["without_offloading"]]
    for each in (said["question"], said["choice"], said["alternative"], *said["rows"], *others):
        if each:
            each["gpu"] = advice.question.gpu.kind
    return said


def in_short(advice: Advice, unsaid: set[str]) -> list[str]:
    """Return how accurate its memory is, and what was taken for the options that nobody gave."""
    question = advice.question
    taken_as = []
    if "--batch" in unsaid and advice.choice:
        taken_as.append(f"--batch {question.batch}")
    if "--link" in unsaid and question.gpus > 1:
        taken_as.append(f"--link {question.link or 'none'}")
    if "--host-memory" in unsaid and any(row.offloads for row in (advice.choice, advice.alternative) if row):
        taken_as.append(f"--host-memory {amount(question.host_memory_bytes)}")
    if "--precision" in unsaid:
        taken_as.append(f"--precision {question.precision or 'by arm'}")
    accurate = f"{OUTSIDE_PEAKS[0].upper()}{OUTSIDE_PEAKS[1:]}."
    return [accurate, f"Taken: {', '.join(taken_as) or 'what you gave'}; --details says more."]


def of_steps(advice: Advice, is_default_batch: bool) -> list[str]:
    """Return how many micro-batches a step has where nobody says it, and what would narrow its seconds."""
    lines = []
    if advice.choice and is_default_batch:
        passes = number_of(advice.choice.accumulation, "micro-batches")
        batch = f"Without --batch a step has {advice.question.batch} sequences over all GPUs, here in {passes}"
        lines.append(f"{batch}; `study estimate` takes 1 unless --accumulation says more.")
    if advice.choice and advice.question.pace is None:
        lines.append("Seconds depend on the host: a minute of `study calibrate` there narrows them.")
    return lines


def shape_note(model: Transformer, params: float | None) -> list[str]:
    """Return which shape was taken for a number of parameters: much of the memory is its vocabulary's."""
    if params is None:
        return []
    vocabulary = f"with a vocabulary of {model.look.vocabulary:,} tokens"
    return [f"Shape taken: {model.name}, {vocabulary}. Yours: --model and a folder with its config.json."]


def card_note(place: PlaceFlags) -> list[str]:
    return [] if place.gpu is None or place.gpu_memory else taken(place.gpu)


def _smaller(question: Question) -> list[str]:
    if not question.model.is_partly_frozen:
        return [finding("adapters_need_less").said]
    return [] if question.quantized else [finding("four_bits_need_less").said]


def _reason(advice: Advice, choice: Row) -> str:
    # What was chosen among: `study.predict.advise` prefers arms that do not fit only just, and do not offload.
    alike = [row for row in advice.rows if row.fits and row.is_tight <= choice.is_tight]
    kept = [row for row in alike if not row.offloads]
    tight = [row for row in advice.rows if row.fits and row.is_tight and not row.offloads]
    quickest = min(tight, key=lambda row: row.seconds, default=choice)
    why = "Why: "
    others = "arms"
    if choice.offloads and kept:
        slower = min(kept, key=lambda row: row.seconds)
        why += f"it is nearly twice as fast as without offloading ({slower.arm}: {seconds(slower)}); "
    elif tight and not choice.is_tight and (choice.offloads or quickest.seconds < choice.seconds):
        why += f"without offloading {quickest.arm} fits only just ({why_tight(quickest)}); "
        if not choice.offloads:  # it is one of those that are compared
            others = "others"
    among = [row for row in alike if row.offloads == choice.offloads]
    fastest = min(among, key=lambda row: row.seconds)
    if fastest is not choice:
        faster = times(choice.seconds / fastest.seconds)
        # What is chosen comes first in arms.NAMES, which begins with the simplest.
        if faster == times(1):
            why += f"{fastest.arm} is as fast; {choice.arm} is simpler."
        else:
            why += (
                f"{fastest.arm} would be {faster} as fast; {choice.arm} is simpler, which counts up to {FASTER} times."
            )
    else:
        with_or_without = "with" if choice.offloads else "without"
        why += f"of the {others} that fit {with_or_without} offloading, it is the fastest"
        why += f"{_beside_simpler(among, choice)}."
    return why + _why_not_offloading(alike, choice)


def _beside_simpler(among: list[Row], choice: Row) -> str:
    """Say of the fastest arm whether simpler ones take long enough to lose."""
    simpler = [row for row in among if arms.NAMES.index(row.arm) < arms.NAMES.index(choice.arm)]
    if not simpler:
        return " and the simplest"
    quickest = min(simpler, key=lambda row: row.seconds)
    longer = times(quickest.seconds / choice.seconds)
    return f"; {quickest.arm} is simpler, but takes {longer} as long, which counts from {FASTER} times on"


def _why_not_offloading(alike: list[Row], choice: Row) -> str:
    """Name the quickest arm that offloads, if it is much faster than the choice or keeps the weights whole."""
    divides = {row.arm: arm.stage == 3 or bool(arm.fsdp) for row in alike for arm in [arms.load_arm(row.arm)]}
    others = [
        row
        for row in alike
        if row.offloads and (FASTER * row.seconds <= choice.seconds or divides[choice.arm] > divides[row.arm])
    ]
    if choice.offloads or not others:
        return ""
    quickest = min(others, key=lambda row: row.seconds)
    return (
        f" {quickest.arm} ({duration(quickest.seconds)}) fits as well, but how long offloading takes depends on the "
        "host, so it is preferred only where it is nearly twice as fast."
    )


def _by_precision(advice: Advice, choice: Row) -> str:
    """Say so if an arm is preferred to DDP or one process, or shown as faster, only because these run in autocast."""
    simplest = advice.rows[0]
    quickest = min(choice, advice.alternative or choice, key=lambda row: row.seconds)
    if simplest.precision != quickest.precision:
        alike = advise(replace(advice.question, precision=quickest.precision)).choice
        if alike and alike.arm == simplest.arm:
            return (
                f" By default {alike.arm} runs in autocast and {quickest.arm} does not: with --precision "
                f"{alike.precision} use {alike.arm}, {seconds(alike)}."
            )
    return ""


def use(row: Row, question: Question) -> str:
    """`zero2, 3 sequences of 2,048 tokens per micro-batch, 6 of them; 55 of 80 GiB (nvidia-smi shows 61); 7 s`."""
    name, memory = row.arm, of_card(row.peak_bytes, question.gpu)
    if row.checkpointing:
        name += " with activation checkpointing"
    # The recipes are named after bf16. On a GPU without it they are meant in fp16: bf16_cast as DeepSpeed's own.
    if row.precision != "fp32" and not question.gpu.has_bf16:
        name += " in DeepSpeed's fp16" if RECIPES[row.precision].master_bytes else " in fp16 autocast"
    if row.driver_bytes:
        memory += f" (nvidia-smi shows {_number(row.driver_bytes)})"
    if row.offloads:
        memory += f" and {amount(row.host_bytes)} of a node's host memory"
    rows = number_of(row.micro_batch, f"sequences of {count(question.sequence)} tokens per micro-batch")
    step = f"{duration(row.step_s or 0)} per step of {question.batch} sequences"
    low_s, high_s = row.step_interval_s or (0, 0)
    loops = of_others(row.step_s or 0, low_s, high_s, question.pace is not None)
    return f"{name}, {rows}, {number_of(row.accumulation, 'micro-batches')}; {memory}; {step}, and {loops}"


def of_others(step_s: float, low_s: float, high_s: float, is_known: bool) -> str:
    """`others' loops took 0.8 to 2 times that`: the interval of a step, for a reader who takes the first number."""
    low, high = (short(float(f"{end_s / step_s:.1f}")) for end_s in (low_s, high_s))
    whose = "steps on hosts that were timed" if is_known else "others' loops"
    return f"{whose} took {low} to {high} times that"


def recompute_note(checkpointing: object, model: Transformer, stage: int | None) -> list[str]:
    if not checkpointing or not model.is_partly_frozen:
        return []
    return [finding("recompute_frozen_stage_3" if stage == 3 else "recompute_frozen").said]


def _number(size_bytes: float) -> str:
    """Return a size in GiB, as nvidia-smi means them."""
    number = size_bytes / 2**30
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def amount(size_bytes: float) -> str:
    return f"{_number(size_bytes)} GiB"


def of_card(size_bytes: float, gpu: Gpu) -> str:
    """`61 of 80 GiB`: the second is the size that the card is sold with."""
    return f"{_number(size_bytes)} of {amount(gpu.memory_bytes)}"


def seconds(row: Row) -> str:
    """Return a step with its interval, to two digits: 5.4 s (4.6 to 6.3), or 2.6 min (2.2 to 3)."""
    if row.step_s is None or row.step_interval_s is None:
        return UNKNOWN
    return duration(row.step_s, *row.step_interval_s)


def duration(step_s: float, *ends_s: float) -> str:
    # The largest number decides the unit, so that all have the same.
    factor, unit = _unit(max(step_s, *ends_s, 0))
    step, *ends = (short(float(f"{value / factor:.2g}")) for value in (step_s, *ends_s))
    return f"{step} {unit} ({' to '.join(ends)})" if ends else f"{step} {unit}"


def _unit(step_s: float) -> tuple[float, str]:
    """Return the unit in which people would say a step: its seconds, and its name."""
    if step_s < 120:
        return 1, "s"
    return (60, "min") if step_s < 7200 else (3600, "h")


def _lacks(advice: Advice) -> str:
    """Return the arm that comes closest to fitting, and the memory that it lacks."""
    # Arms that fit on the GPUs lack host memory alone: the one with the least comes closest.
    if on_host := [row for row in advice.rows if row.limit == "host memory"]:
        row = min(on_host, key=lambda row: row.host_bytes)
        has_bytes = advice.question.host_memory_bytes
        lacks_bytes = row.host_bytes - has_bytes
        where = f"of host memory, if a node has {amount(has_bytes)} (--host-memory)"
    else:
        row = max(advice.rows, key=lambda row: row.headroom_bytes)
        lacks_bytes, where = -row.headroom_bytes, "on each GPU"
    return f"{row.arm} comes closest, and needs {amount(lacks_bytes)} more {where}"


def table(advice: Advice) -> list[dict]:
    """Return every arm, mostly at most 80 columns wide."""
    # The column has one unit: that of the fastest step, or ms where no step may take a second.
    unit = _unit(min((row.step_s for row in advice.rows if row.step_s), default=0))
    if all(row.step_interval_s is None or row.step_interval_s[1] < 1 for row in advice.rows):
        unit = 0.001, "ms"
    return [
        {
            "predicted": row.arm,
            "fits": _place(row, advice),
            "recompute": row.checkpointing,
            "batch": f"{row.micro_batch} x {row.accumulation}",
            "GiB": _of_row(row),
            "host GiB": _number(row.host_bytes),
            "per step": _narrow(row, *unit),
            "limit": row.limit.removesuffix(" memory"),
        }
        for row in advice.rows
    ]


def below_table(advice: Advice) -> str:
    """Return what stays free."""
    gpu = advice.question.gpu
    free = max(0, headroom_bytes(gpu, 0))
    return f"fits: up to {free / GIB:.1f} of {amount(gpu.memory_bytes)}; the rest is for context and fragmentation."


def stage_3_holds_no_less(advice: Advice) -> list[str]:
    by_arm = {row.arm: row for row in advice.rows}
    zero2, zero3 = by_arm.get("zero2"), by_arm.get("zero3")
    if zero2 and zero3 and _differ_in_arm_alone(zero2, zero3) and zero2.peak_bytes <= zero3.peak_bytes:
        return [finding("stage_3_holds_no_less").said]
    return []


def _differ_in_arm_alone(one: Row, other: Row) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in ("precision", "checkpointing", "micro_batch"))


def widest(advice: Advice) -> list[str]:
    """Say so if DDP or one process lacks room only because its weights are in fp32."""
    simplest, question = advice.rows[0], advice.question
    if simplest.fits or simplest.precision != "bf16" or question.precision is not None:
        return []
    row = with_precision(question, simplest, "bf16_cast")
    if not row.fits:
        return []
    fits = f"with --precision bf16_cast it fits, {of_card(row.peak_bytes, question.gpu)}"
    return [f"{row.arm} is compared with fp32 weights and autocast: {fits}."]


def _of_row(row: Row) -> str:
    """Return the memory of a row; where what nvidia-smi shows makes it fit only just, both."""
    if row.is_tight and row.driver_bytes:
        return f"{_number(row.peak_bytes)}-{_number(row.driver_bytes)}"
    return _number(row.peak_bytes)


def _narrow(row: Row, factor: float, unit: str) -> str:
    """Return a step with its interval in few characters: 5.4 s (4.6-6.3), or 71 ms (57-140)."""
    if row.step_s is None or row.step_interval_s is None:
        return UNKNOWN
    step, low, high = (f"{float(f'{value / factor:.2g}'):g}" for value in (row.step_s, *row.step_interval_s))
    return f"{step} {unit} ({low}-{high})"


def _place(row: Row, advice: Advice) -> str:
    if row is advice.choice:
        return "use"
    if row is advice.alternative:
        return "second"
    if not row.fits:
        return "no"
    if row.is_tight:
        return "tight"
    return "yes"


def assumptions(question: Question) -> list[str]:
    """Return what an advice was predicted for. Nobody has measured it."""
    model = question.model
    gpu = question.gpu
    return [
        f"the model is {model.family} ({model.name}), {count(model.parameters)} parameters",
        f"{gpu.kind} is {gpu.name}: {size(gpu.memory_bytes)}, {gpu.peaks['fp16'] / 1e12:.0f} TFLOP/s in 16 bits, "
        f"{size(gpu.memory_bytes_per_s)}/s ({gpu.source})",
        f"{question.batch} sequences per step (--batch) of {question.sequence} tokens (--sequence)",
        f"{amount(question.host_memory_bytes)} of host memory in a node (--host-memory)",
        precisions(question),
        f"{size(reserve_bytes(gpu))} of each GPU stay free for context, NCCL and fragmentation, and {MISS:.0%} of the "
        "peak where possible",
        f"{_links(question)} (--link, --gpus-per-node)",
        finding("fsdp2_whole_gradients").said,
    ]


def precisions(question: Question) -> str:
    if question.precision == "fp32":
        return finding("fp32_is_tf32").said
    half = "bf16" if question.gpu.has_bf16 else "fp16"  # GPUs before Ampere have none
    of_adapters = question.model.is_partly_frozen and question.precision == "bf16_cast"
    return finding("adapters_in_one_precision" if of_adapters else "precision_by_default", half=half).said


def _links(question: Question) -> str:
    if question.gpus == 1:
        return "one GPU, which needs no link"
    if question.gpus == question.local:
        return f"{question.link or 'no link'} between {question.local} GPUs in a node"
    within = question.gpu.peer_link
    nodes = question.gpus // question.local
    return f"{question.link} for each GPU between {nodes} nodes, and {within} between {question.local} GPUs in a node"


# Predictions by this code, on 28 November 2026, of measurements that nobody who writes it has read, and whose rows are
# not kept here. They are worse than those of published numbers, so they are said first.
OUTSIDE_STEPS = (
    "step time, an outside check of 31 steps that nobody here had read: half were off by 34% or more, 21 were more "
    "than 10% too short, and the interval of that day, which was narrower, held 8"
)
OUTSIDE_PEAKS = (
    "memory, an outside check of 56 peaks of others' trainings that nobody here had read: half were off by 11% or "
    "more, 20 were more than 10% too low"
)
BESIDE_README = "README counts tensors of our own trainer, which are predicted better"
LIMITS = {"gpu": "the GPU is the limit", "host": "the host is the limit", "links": "links are the limit"}


def accuracy(limits: Iterable[str] = tuple(LIMITS)) -> list[str]:
    """Return how far others' trainings were from their predictions: steps with these limits, then memory.

    First what an outside check gave, then the first predictions of published numbers: before any error was seen.
    """
    times = first_of("time")
    lines = []
    for limit in limits:
        time = scores.score([each for each in times if each.limit == limit], "first")
        lines.append(
            f"step time, published steps where {LIMITS[limit]}: half of first predictions were at most "
            f"{percent(time['median error'])} off, {percent(time['near'])} of all at most {scores.NEAR['time']:.0%}"
        )
    return [*([OUTSIDE_STEPS] if lines else []), *lines, *accuracy_of_memory()]


def accuracy_of_memory() -> list[str]:
    peak = scores.score(first_of("memory"), "first")
    published = (
        f"memory, published peaks: half of first predictions were at most {percent(peak['median error'])} off, "
        f"{percent(peak['too low'])} were more than {scores.TOO_LOW:.0%} too low"
    )
    return [f"{OUTSIDE_PEAKS}; {BESIDE_README}", published]


def first_of(quantity: str) -> list[scores.Number]:
    """The published numbers of which a first prediction is known, so many of a source."""
    return scores.capped([each for each in scores.numbers() if each.first and each.quantity == quantity])
