"""An advice in words and as a table: the answer first, then every arm, then the assumptions."""

from collections import defaultdict

from study.io.numbers import short, size
from study.machine.gpus import GPUS
from study.predictor import architecture, papers
from study.predictor.advice.advise import MISS, SEPARABLE, Advice, Row
from study.predictor.advice.question import Question
from study.predictor.memory.memory_kinds import reserve_bytes
from study.predictor.room import HOST_PROCESS_BYTES
from study.predictor.timing.pace import ceilings, interval_factor, pace

IN_WORDS = {
    "fp32": "fp32",
    "bf16": "bf16 autocast over fp32 weights",
    "fp16": "fp16 autocast over fp32 weights, with loss scaling",
    "bf16_cast": "bf16 weights with fp32 master copies",
    "bf16_pure": "bf16 weights and optimizer states",
}


def in_words(advice: Advice) -> list[str]:
    """Which arm to use, and the alternative. The assumptions are not included."""
    question, choice, other = advice.question, advice.choice, advice.alternative
    if choice is None:
        return [f"Nothing fits on {machine(question)}: {lacks(advice)}."]
    lines = [f"Use {use(choice, question)}."]
    if choice.is_tight:
        instead = "fewer rows per pass" if choice.micro_batch > 1 else "what needs less, below"
        lines.append(f"It fits only just: if it runs out of memory, take {instead}.")
    if other is None:
        return [*lines, "No other arm fits."]
    kind = "Simplest alternative" if other.simplicity < choice.simplicity else "Alternative"
    just = " It fits only just." if other.is_tight else ""
    return [*lines, f"{kind}: {use(other, question)}.{just}"]


def use(row: Row, question: Question) -> str:
    """`zero2 with activation checkpointing, 3 rows per pass, 6 passes; 59 of 85.5 GB; 5 to 9 s per step`."""
    half = " in fp16" if row.precision != "fp32" and not question.has_bf16 else ""
    recomputes = " with activation checkpointing" if row.checkpointing else ""
    rows = f"{row.micro_batch} row{'s' * (row.micro_batch > 1)} per pass"
    passes = f"{row.accumulation} pass{'es' * (row.accumulation > 1)}"
    host = f" and {size(row.host_bytes)} of host memory" if row.offloads else ""
    group = f" on groups of {row.row_ranks} GPUs" if row.row_ranks > 1 else ""
    return (
        f"{row.arm}{group}{recomputes}{half}, {rows}, {passes}; {peak_of(row, question)}{host}; {seconds(row)} per step"
    )


def peak_of(row: Row, question: Question) -> str:
    peak = row.peak_bytes / 1e9
    return f"{f'{peak:.0f}' if peak >= 10 else f'{peak:.2g}'} of {size(GPUS[question.gpu].memory_bytes)}"


def machine(question: Question) -> str:
    return f"{question.gpus} x {question.gpu}"


def seconds(row: Row) -> str:
    """A step with its interval, to two digits: 5.4 s (4.6 to 6.3), or 2.6 min (2.2 to 3)."""
    low_s, high_s = row.step_interval_s
    unit, factor = ("s", 1) if high_s < 120 else ("min", 60) if high_s < 7200 else ("h", 3600)
    step, low, high = (short(float(f"{value / factor:.2g}")) for value in (row.step_s, low_s, high_s))
    return f"{step} {unit} ({low} to {high})"


def lacks(advice: Advice) -> str:
    """The arm that comes closest to fitting, and the memory that it lacks."""
    tried = [row for row in advice.rows if row.headroom_bytes is not None]
    on_host = [row for row in tried if row.limit == "host memory"]
    if on_host:
        row, has = min(on_host, key=lambda row: row.host_bytes), advice.question.host_memory_bytes
        return f"{row.arm} comes closest, and needs {size(row.host_bytes)} of host memory where there are {size(has)}"
    if tried:
        row = max(tried, key=lambda row: row.headroom_bytes)
        return f"{row.arm} comes closest, and lacks {size(-row.headroom_bytes)} on each GPU"
    states = min(row.peak_bytes for row in advice.rows if row.peak_bytes)
    return f"model states alone need {size(states)} on each GPU"


def remedies_in_words(helps: list[tuple[str, Advice]]) -> list[str]:
    """What would make the training fit, and what was not tried."""
    lines, adapters = [], False
    for what, advice in helps:
        changed = advice.question
        if what.startswith("LoRA"):
            adapters = True
        elif what == "more host memory":
            what = f"{size(changed.host_memory_bytes)} of host memory"
        else:
            what = machine(changed)
        lines.append(f"With {what}: {use(advice.choice, changed)}.")
    rest = "8-bit optimizers need" if adapters else "Training fewer weights (LoRA) or 8-bit optimizers need"
    return [*lines, f"{rest} far less memory; they were not tried."]


def table(advice: Advice) -> list[dict]:
    """Every arm, at most 100 columns wide."""
    return [
        {
            "predicted": row.arm,
            "fits": place(row, advice),
            "recompute": row.checkpointing,
            "rows x passes": row.micro_batch and f"{row.micro_batch} x {row.accumulation}",
            "memory": memory(row),
            "host": row.host_bytes and size(row.host_bytes),
            "per step": row.step_s and seconds(row),
            "limited by" if advice.choice else "lacks": row.limit,
        }
        for row in advice.rows
    ]


def place(row: Row, advice: Advice) -> str:
    """Whether it fits, and whether it is advised."""
    if not row.fits:
        return "no"
    return "use" if row is advice.choice else "or" if row is advice.alternative else "just" if row.is_tight else "yes"


def memory(row: Row) -> str | None:
    """The peak of a GPU; or the model states, if these alone do not fit."""
    if row.peak_bytes is None:
        return None
    return size(row.peak_bytes) if row.micro_batch else f"over {size(row.peak_bytes)}"


def assumptions(question: Question) -> list[str]:
    """The assumptions of an advice, which nobody has measured."""
    gpu = GPUS[question.gpu]
    half = "bf16" if gpu.has_bf16 else "fp16"
    values = {
        "sequence": f"{question.sequence} tokens per row (--sequence)",
        "batch": f"{question.batch} rows per step (--batch)",
        "link": f"{question.link} between GPUs (--link)" if question.gpus > 1 else "",
        "host_memory": f"{size(question.host_memory_bytes)} of host memory in a node (--host-memory)",
        "gpus_per_node": f"{question.local} GPUs in a node (--gpus-per-node)" if question.gpus > 1 else "",
    }
    by_default = "; ".join(values[name] for name in question.defaults if values.get(name))
    lines = [
        f"the model is {architecture.in_words(question.model)}",
        f"{question.gpu} is {gpu.name}: {size(gpu.memory_bytes)} ({gpu.memory_bytes / 2**30:.1f} GiB), "
        f"{gpu.half_flops_per_s / 1e12:.0f} TFLOP/s in {half}, {size(gpu.memory_bytes_per_s)}/s ({gpu.source})",
    ]
    if by_default:
        lines.append(f"not given, so by default: {by_default}")
    if question.precision:
        lines.append(f"precision: {precision_in_words(question.precision, question)}")
    else:
        with_deepspeed, without = (precision_in_words(name, question) for name in ("bf16_cast", "bf16"))
        lines.append(f"precision: {with_deepspeed} (ddp, single and fsdp2: {without})")
    if question.optimizer not in ("fused", "foreach"):
        muon = "; the products of its update are not counted" if question.optimizer == "muon" else ""
        lines.append(f"the time of {question.optimizer} is that of the bytes that it reads and writes{muon}")
    if not gpu.has_bf16:
        lines.append(f"{question.gpu} has no bf16, so fp16 with loss scaling is used; it needs as many bytes")
    if architecture.trained(question.model) < architecture.parameters(question.model):
        kind = "bf16" if question.frozen == "bf16" else "the type of the others"
        lines.append(f"frozen weights are loaded in {kind} (--frozen)")
    constants, factor = pace(), interval_factor(architecture.parameters(question.model))
    reached = ceilings(question.gpu)["products"][0] * constants.product_share
    lines += [
        f"{size(reserve_bytes(gpu))} of each GPU stay free for context, NCCL and fragmentation, and "
        f"{MISS:.0%} of the peak where possible, because predictions have errors",
        f"step times within {SEPARABLE:.0%} count as equal, and the simpler arm wins; states stay on GPUs if they fit",
        f"large products reach {reached:.0%} of the peak, small ones less; "
        f"links {constants.link_share:.0%}, networks {constants.network_share:.0%}, PCIe {constants.pcie_share:.0%}",
        f"the interval of a step's time is the prediction divided and multiplied by {factor:.2f}",
        f"each process needs {size(HOST_PROCESS_BYTES)} of the host; loading a checkpoint may need more, once",
        f"a host updates a billion parameters in {papers.CPU_ADAM_S_PER_BILLION} s, as in the ZeRO-Offload paper",
        "torch.compile was not tried: it changes time more than memory, and its effect is not known here",
    ]
    return lines


def precision_in_words(precision: str, question: Question) -> str:
    words = IN_WORDS[precision]
    return words if question.has_bf16 else words.replace("bf16", "fp16")


# --- how many GPUs --------------------------------------------------------------------------------------------------


def needed_in_words(enough: list[Advice], counts: tuple[int, ...]) -> str:
    """The fewest GPUs of each kind, in a sentence."""
    if not enough:
        return f"No {counts[0]} to {counts[-1]} GPUs of a kind are enough."
    of_count = defaultdict(list)
    for advice in enough:
        if not advice.choice.offloads:
            of_count[advice.question.gpus].append(advice.question.gpu)
    if not of_count:
        return "Enough only with states in host memory, as the table says."
    lists = [f"{gpus} x {', '.join(of_count[gpus])}" for gpus in sorted(of_count)]
    return f"Enough: {'; '.join(lists)}."


def needed_table(enough: list[Advice]) -> list[dict]:
    rows = []
    for advice in enough:
        row = advice.choice
        rows.append(
            {
                "predicted": machine(advice.question),
                "arm": row.arm,
                "recompute": row.checkpointing,
                "GPU memory": peak_of(row, advice.question),
                "host": size(row.host_bytes),
                "per step": seconds(row),
                "tokens/s": f"{float(f'{row.tokens_per_s:.2g}'):,.0f}",
            }
        )
    return rows
