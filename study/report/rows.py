"""The rows of an advice: one in words, and all as a table.

A row is an arm on the GPUs that were asked for, with its memory and the time of a step.
"""

from dataclasses import replace

from study.core.arms import load_arm
from study.core.gpus import Gpu
from study.core.recipes import RECIPES
from study.core.text import UNKNOWN, number_of, percent, rounded, short
from study.known.findings import finding
from study.predict.front import (
    FULL,
    MISS,
    Advice,
    Question,
    Row,
    headroom_bytes,
    held_back,
    training_of,
    with_precision,
)

GIB = 2**30
Unit = tuple[float, str]  # of time: its seconds, and its name


def use(row: Row, question: Question, unit: Unit) -> str:
    """`zero2, 3 sequences of 2,048 tokens per micro-batch, 6 of them; 55 of 80 GiB (nvidia-smi shows 61); 7 s`."""
    name, memory = way(row), of_card(row.peak_bytes, question.gpu)
    # The recipes are named after bf16. On a GPU without it they are meant in fp16: bf16_cast as DeepSpeed's own.
    if row.precision != "fp32" and not question.gpu.has_bf16:
        arm = load_arm(row.arm)
        if RECIPES[row.precision].autocast:
            name += " in fp16, cast when gathered" if arm.fsdp else " in fp16 autocast"
        else:
            name += " in DeepSpeed's fp16" if arm.deepspeed else " in fp16"
    if row.driver_bytes:
        memory += f" (nvidia-smi shows {_number(row.driver_bytes)})"
    if row.offloads:
        memory += f" and {amount(row.host_bytes)} of a node's host memory"
    rows = f"{question.model.rows_in_words(row.micro_batch, question.sequence)} per micro-batch"
    step = f"{duration(row.step_s or 0, unit=unit)} per step of {question.batch} {question.model.row_names}"
    low_s, high_s = row.step_interval_s or (0, 0)
    loops = of_others(row.step_s or 0, low_s, high_s, question.pace is not None)
    return f"{name}, {rows}, {number_of(row.accumulation, 'micro-batches')}; {memory}; {step}, and {loops}"


def computes_in(precision: str, gpu: Gpu) -> str:
    """Return the type of products: recipes are named after bf16, and are fp16 on a GPU without it."""
    return "fp32" if precision == "fp32" else "bf16" if gpu.has_bf16 and precision != "fp16" else "fp16"


def weights(row: Row) -> str:
    """Return the type in which a row keeps the weights between products."""
    return "fp32" if RECIPES[row.precision].weight_bytes == 4 else computes_in(row.precision, row.gpu)


def way(row: Row) -> str:
    """`fsdp2 with activation checkpointing and sync_each_batch=True`."""
    besides = {"activation checkpointing": row.checkpointing, "sync_each_batch=True": row.sync_each_batch}
    return " with ".join(filter(None, [row.arm, " and ".join(name for name, is_on in besides.items() if is_on)]))


def of_others(step_s: float, low_s: float, high_s: float, is_known: bool) -> str:
    """`others' loops took 0.8 to 2 times that`: the interval of a step, for a reader who takes the first number."""
    low, high = (short(float(f"{end_s / step_s:.1f}")) for end_s in (low_s, high_s))
    whose = "steps on hosts that were timed" if is_known else "others' loops"
    return f"{whose} took {low} to {high} times that"


def why_tight(row: Row) -> str:
    """The number that makes a row fit only just."""
    if reserved_decides(row.gpu, row.peak_bytes):
        return f"nvidia-smi shows {_of_full(row.gpu, row.driver_bytes or 0)}"
    return _of_free(row.gpu, row.peak_bytes)


def reserved_decides(gpu: Gpu, peak_bytes: int) -> bool:
    """Whether tensors leave room, so that what fits only just does so because of what PyTorch reserves."""
    return headroom_bytes(gpu, peak_bytes) >= MISS * peak_bytes


def _of_free(gpu: Gpu, peak_bytes: int) -> str:
    return f"{peak_bytes / GIB:.1f} of at most {headroom_bytes(gpu, 0) / GIB:.1f} GiB"


def _of_full(gpu: Gpu, driver_bytes: int) -> str:
    return f"{of_card(driver_bytes, gpu)}, full from {FULL * gpu.memory_bytes / GIB:.1f} on"


def only_just(gpu: Gpu, peak_bytes: int, driver_bytes: int) -> str:
    """Return what decides that something fits only just, and what to do."""
    if reserved_decides(gpu, peak_bytes):
        return finding("reserved_decides", shown=_of_full(gpu, driver_bytes)).said
    return finding("fits_only_just", why=_of_free(gpu, peak_bytes)).said


def _number(size_bytes: float) -> str:
    """Return a size in GiB, as nvidia-smi means them."""
    number = size_bytes / 2**30
    return rounded(number, ".0f" if number >= 10 else ".2g")


def amount(size_bytes: float) -> str:
    return f"{_number(size_bytes)} GiB"


def of_card(size_bytes: float, gpu: Gpu) -> str:
    """`61 of 80 GiB`: the second is the size that the card is sold with."""
    return f"{_number(size_bytes)} of {amount(gpu.memory_bytes)}"


def seconds(row: Row, unit: Unit) -> str:
    """Return a step with its interval, to two digits: 5.4 s (4.6 to 6.3), or 2.6 min (2.2 to 3)."""
    return UNKNOWN if row.step_s is None else duration(row.step_s, *(row.step_interval_s or ()), unit=unit)


def duration(step_s: float, *ends_s: float, unit: Unit) -> str:
    factor, name = unit
    step, *ends = (short(float(rounded(value / factor, ".2g"))) for value in (step_s, *ends_s))
    return f"{step} {name}" + (f" ({' to '.join(ends)})" if ends else "")


def unit_of(advice: Advice) -> Unit:
    """Return the one unit of all steps of an advice, in which people would say the fastest: its seconds, its name."""
    rows = advice.rows if advice.choice else [row for _, row in advice.ways_out]
    step_s = min((row.step_s for row in rows if row.step_s), default=0)
    if step_s < 120:
        return 1, "s"
    return (60, "min") if step_s < 7200 else (3600, "h")


def table(advice: Advice) -> list[dict]:
    """Return every arm, mostly at most 80 columns wide."""
    unit = unit_of(advice)  # or ms where no step may take a second
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
            "per step": seconds(row, unit).replace(" to ", "-"),
            "limit": row.limit.removesuffix(" memory"),
        }
        for row in advice.rows
    ]


def throughputs(advice: Advice) -> list[str]:
    """Return the tokens a second of each GPU, and MFU, which does not count what is computed again, of all that fit."""
    question, said = advice.question, []
    are_images = question.model.row_names == "images"
    row_tokens = 1 if are_images else question.sequence
    peak = question.gpu.peaks["fp16"]
    for row in (row for row in advice.rows if row.step_s):
        tokens = question.batch * row_tokens / question.gpus / row.seconds
        once = training_of(question, replace(row, checkpointing=False)).traced
        again = once.backward.attention_flops - 2 * once.forward.attention_flops  # fused kernels keep no scores
        token_flops = (once.flops - again) / row.micro_batch / row_tokens
        said.append(f"{row.arm} {float(rounded(tokens, '.2g')):,.0f} ({percent(tokens * token_flops / peak)})")
    counted = "Images" if are_images else "Tokens"
    what = f"{counted} a second of each GPU (MFU of {peak / 1e12:.0f} TFLOP/s, with attention to all tokens)"
    return [f"{what}: {', '.join(said)}."] if said else []


def below_table(advice: Advice) -> str:
    """Return what stays free, and what room costs."""
    gpu = advice.question.gpu
    free = max(0, headroom_bytes(gpu, 0))
    text = f"fits: up to {free / GIB:.1f} of {amount(gpu.memory_bytes)}; the rest is for context and fragmentation."
    unit = unit_of(advice)
    faster = [
        f"{arm} {rows} x {passes}, {duration(step_s, unit=unit)}" for arm, rows, passes, step_s in held_back(advice)
    ]
    return f"{text} Faster, and only just fitting: {'; '.join(faster)}." if faster else text


def synced(advice: Advice) -> list[str]:
    """Return which arms are compared with gradients reduced in each micro-batch."""
    names = [row.arm for row in advice.rows if row.sync_each_batch]
    return [finding("fsdp2_synced", arms=", ".join(names)).said] if names else []


def stage_3_holds_no_less(advice: Advice) -> list[str]:
    by_arm = {row.arm: row for row in advice.rows}
    zero2, zero3 = by_arm.get("zero2"), by_arm.get("zero3")
    if not (zero2 and zero3) or zero2.peak_bytes > zero3.peak_bytes:
        return []
    if any(getattr(zero2, name) != getattr(zero3, name) for name in ("precision", "checkpointing", "micro_batch")):
        return []
    return [finding("stage_3_holds_no_less").said]


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
