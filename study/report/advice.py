"""An advice in words and as a table: the answer first, then every arm, then the assumptions."""

from collections import defaultdict
from dataclasses import replace

from study.io.numbers import UNKNOWN, short, size
from study.machine.gpus import GPUS
from study.predictor import papers
from study.predictor.advice.advise import MISS, OFFLOADING_PAYS, SEPARABLE, Advice, Row, Untried
from study.predictor.advice.purchase import LORA_RANK, Remedy
from study.predictor.advice.question import HALF, Question, beside_bytes
from study.predictor.advice.settled import USUAL
from study.predictor.memory.loading import HOST_PROCESS_BYTES, Load, Way, peaks
from study.predictor.memory.memory_kinds import reserve_bytes
from study.predictor.setup import ADAMW
from study.predictor.timing.pace import ceilings, has_measured_ceilings, interval_factor, pace
from study.spec import arms
from study.spec.settings import HALF_WEIGHTS

UNITS = ((1, "s"), (60, "min"), (3600, "h"))
PUBLISHED_BYTES = 2  # of a weight in the files of most models
LARGEST = 120  # of a unit; hours are always hours
FIT_IN_WORDS = {  # only just, and with offloading
    (False, False): "fit without offloading",
    (False, True): "fit only with offloading",
    (True, False): "fit only just",
    (True, True): "fit only just, with offloading",
}
IN_WORDS = {
    "fp32": "fp32",
    "bf16": "bf16 autocast over fp32 weights",
    "fp16": "fp16 autocast over fp32 weights, with loss scaling",
    "bf16_cast": "bf16 weights with fp32 master copies",
    "bf16_pure": "bf16 weights and optimizer states",
}


def in_words(advice: Advice) -> list[str]:
    """Which arm to use, and the alternative. The assumptions are not included."""
    question = advice.question
    choice = advice.choice
    if choice is None:
        lines = [f"Nothing fits on {machine(question)}: {lacks(advice)}."]
        if question.gpus > 1:
            lines.append("To divide the model as well (tensor or pipeline parallelism), see Megatron-LM or torchtitan.")
        return lines
    lines = [f"Use {use(choice, question)}.", *_instead(advice, choice)]
    if question.precision is None and len({row.precision for row in advice.tried if row.fits}) > 1:
        deepspeed, others = (precision_in_words(each, question) for each in USUAL)
        lines.append(
            f"Not quite alike: DeepSpeed's arms have {deepspeed}; ddp, single and FSDP2 have {others}. "
            "--precision makes them alike."
        )
    return lines


def _instead(advice: Advice, choice: Row) -> list[str]:
    """Return what to know before using the choice, and the alternative."""
    question = advice.question
    other = advice.alternative
    lines = []
    if load := to_load(choice, question):
        lines.append(load)
    if choice.is_tight:
        instead = "fewer rows per pass" if choice.micro_batch > 1 else "what needs less, below"
        lines.append(f"It fits only just: if it runs out of memory, take {instead}.")
    if other is None:
        return [*lines, "No other arm fits."]
    kind = "Simplest alternative" if other.simplicity < choice.simplicity else "Alternative"
    just = " It fits only just." if other.is_tight else ""
    return [*lines, f"{kind}: {use(other, question)}.{just}"]


def to_load(row: Row, question: Question) -> str | None:
    """Return what a node needs to load the model, if that may be more than it has. Published weights have 16 bits."""
    arm = arms.load_arm(row.arm)
    method: Way = "plain"
    better: Way = "meta"
    how = "let rank 0 load alone and the others begin on the meta device"
    if arm.stage == 3:
        method, better = "zero3_late", "zero3"
        how = "create the Accelerator or TrainingArguments before from_pretrained"
    elif arm.fsdp is not None:
        method = "fsdp2"
    weight_bytes = 2 if row.precision in HALF_WEIGHTS else 4
    load = Load(question.model, method, question.local, PUBLISHED_BYTES, weight_bytes, on_gpu=True)
    needed = max(peaks(load).values())
    if needed <= question.host_memory_bytes:
        return None
    least = max(peaks(replace(load, way=better)).values())
    return (
        f"To load it, a node may need {size(needed)} of host memory and has {size(question.host_memory_bytes)}: each "
        f"of {load.ranks} ranks makes a whole copy in fp32 of files in 16 bits. To need {size(least)}, {how}."
    )


def use(row: Row, question: Question) -> str:
    """`zero2 with activation checkpointing, 3 rows per pass, 6 passes; 59 of 85.5 GB; 5 to 9 s per step`."""
    name = row.arm
    if row.row_ranks > 1:
        name += f" on groups of {row.row_ranks} GPUs"
    if row.checkpointing:
        name += " with activation checkpointing" + " of every second layer" * (row.checkpointing == HALF)
    if row.precision != "fp32" and not question.has_bf16:
        name += " in fp16"
    rows = f"{row.micro_batch} row{'s' * (row.micro_batch > 1)} per pass"
    passes = f"{row.accumulation} pass{'es' * (row.accumulation > 1)}"
    host = f" and {size(row.host_bytes)} of host memory" if row.offloads else ""
    driver = f" (nvidia-smi: {size(row.driver_bytes)})" if row.driver_bytes else ""
    text = f"{name}, {rows}, {passes}; {peak_of(row, question)}{driver}{host}; {seconds(row)} per step"
    if question.price and row.step_s:
        text += f", {question.price * question.gpus * row.step_s / 3600:.2g} at {question.price:g} for an hour of a GPU"
    return text


def peak_of(row: Row, question: Question) -> str:
    peak = row.peak_bytes / 1e9
    digits = f"{peak:.0f}" if peak >= 10 else f"{peak:.2g}"
    return f"{digits} of {size(question.memory_bytes)}"


def machine(question: Question) -> str:
    return f"{question.gpus} x {question.gpu}"


def reason(advice: Advice) -> str:
    """Return why this arm is the choice; empty if nothing fits."""
    choice = advice.choice
    if choice is None:
        return ""
    kept = [row for row in advice.tried if row.fits and row.step_s and not row.offloads and not row.is_tight]
    if choice.offloads and kept:
        fastest = min(kept, key=lambda row: row.step_s or 0)
        return f"Why: without offloading, {fastest.arm} is the fastest, and takes {seconds(fastest)}."
    rivals = [row for row in advice.tried if row.fits and row.drawbacks == choice.drawbacks and row.step_s]
    fastest = min(rivals, key=lambda row: row.step_s or 0)
    fit = FIT_IN_WORDS[choice.drawbacks]
    if fastest is choice:
        return f"Why: of the arms that {fit}, it is the fastest, and no simpler one comes within {SEPARABLE:.0%}."
    simplest = f"{choice.arm} the simplest within {SEPARABLE:.0%}"
    return f"Why: of the arms that {fit}, {fastest.arm} is the fastest, and {simplest}."


def flags(row: Row, question: Question) -> list[str]:
    """Return the flags with which `study estimate` and `study timeline` predict a row."""
    given: dict[str, object] = {
        "arm": row.arm,
        "gpus": question.gpus,
        "gpu": question.gpu,
        "precision": row.precision,
        "micro-batch": row.micro_batch,
        "accumulation": row.accumulation,
        "sequence": question.sequence,
        "buckets": row.bucket_elements,
    }
    if row.row_ranks > 1:
        given["group"] = row.row_ranks
    if question.optimizer != "fused":
        given["optimizer"] = question.optimizer
    if question.model.is_partly_frozen:
        given["frozen"] = question.frozen
    given |= {"quantized": question.quantized} | _flags_of_machine(question)
    if row.checkpointing > 1:
        given["recompute-every"] = row.checkpointing
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    return words + ["--checkpointing"] * (row.checkpointing == 1)


def _flags_of_machine(question: Question) -> dict[str, object]:
    given: dict[str, object] = {"host-pace": question.host_pace}
    if question.disk_bytes_per_s:
        given["disk"] = f"{question.disk_bytes_per_s / 1e6:g}MB/s"
    if question.gpus > 1 and "link" not in question.defaults:
        given["link"] = question.link
    if "gpus_per_node" not in question.defaults:
        given["gpus-per-node"] = question.gpus_per_node
    return given


def seconds(row: Row) -> str:
    """Return a step with its interval, to two digits: 5.4 s (4.6 to 6.3), or 2.6 min (2.2 to 3)."""
    if row.step_s is None or row.step_interval_s is None:
        return UNKNOWN
    low_s, high_s = row.step_interval_s
    factor, unit = next((pair for pair in UNITS if high_s < LARGEST * pair[0]), UNITS[-1])
    step, low, high = (short(float(f"{value / factor:.2g}")) for value in (row.step_s, low_s, high_s))
    return f"{step} {unit} ({low} to {high})"


def lacks(advice: Advice) -> str:
    """Return the arm that comes closest to fitting, and the memory that it lacks."""
    if on_host := [row for row in advice.tried if row.limit == "host memory"]:
        row = min(on_host, key=lambda row: row.host_bytes)
        present = size(advice.question.host_memory_bytes)
        return f"{row.arm} comes closest, and needs {size(row.host_bytes)} of host memory where there are {present}"
    if advice.tried:
        row = max(advice.tried, key=lambda row: row.headroom_bytes)
        return f"{row.arm} comes closest, and lacks {size(-row.headroom_bytes)} on each GPU"
    states = [row.states_bytes for row in advice.rows if isinstance(row, Untried) and row.states_bytes]
    return f"model states alone need {size(min(states))} on each GPU"


def remedies_in_words(helps: list[Remedy]) -> list[str]:
    """Return what would make the training fit, and what was not tried."""
    lines = []
    for remedy in helps:
        question = remedy.advice.question
        change = machine(question)
        if remedy.what == "adapters":
            change = f"LoRA adapters of rank {LORA_RANK}"
        elif remedy.what == "quantized adapters":
            change = f"LoRA adapters of rank {LORA_RANK} on weights in 4 bits (QLoRA, bitsandbytes)"
        elif remedy.what == "8-bit optimizer":
            change = "AdamW with 8-bit states (bitsandbytes)"
        elif remedy.what == "more host memory":
            change = f"{size(question.host_memory_bytes)} of host memory"
        lines.append(f"With {change}: {use(remedy.choice, question)}.")
    if not any(remedy.what.endswith("adapters") or remedy.what == "more host memory" for remedy in helps):
        lines.append("Training fewer weights (LoRA) needs far less memory: give --lora-rank.")
    return lines


def table(advice: Advice) -> list[dict]:
    """Return every arm, at most 100 columns wide."""
    limit = "limited by" if advice.choice else "lacks"
    return [_settings(row, _place(row, advice)) | {limit: row.limit} for row in advice.rows]


def _settings(row: Row | Untried, place: str) -> dict:
    line: dict[str, object] = {"predicted": row.arm, "fits": place}
    if isinstance(row, Row):
        line |= {"recompute": recomputed(row), "rows x passes": f"{row.micro_batch} x {row.accumulation}"}
        return line | {"memory": size(row.peak_bytes), "host": size(row.host_bytes), "per step": seconds(row)}
    least = f"over {size(row.states_bytes)}" if row.states_bytes else None
    return line | {"recompute": None, "rows x passes": None, "memory": least, "host": None, "per step": None}


def recomputed(row: Row) -> bool | str:
    return "half" if row.checkpointing == HALF else bool(row.checkpointing)


def _place(row: Row | Untried, advice: Advice) -> str:
    """Return whether it fits, and whether it is advised."""
    if row is advice.choice:
        return "use"
    if row is advice.alternative:
        return "or"
    if not isinstance(row, Row) or not row.fits:
        return "no"
    return "just" if row.is_tight else "yes"


def assumptions(question: Question) -> list[str]:
    """Return the assumptions of an advice, which nobody has measured."""
    gpu = GPUS[question.gpu]
    half = "bf16" if gpu.has_bf16 else "fp16"
    constants = pace()
    is_known = has_measured_ceilings(question.gpu) and not question.model.is_partly_frozen
    reached = ceilings(question.gpu)["products"][0] * constants.product_share
    return [
        f"the model is {question.model.in_words()}",
        f"{question.gpu} is {gpu.name}: {size(gpu.memory_bytes)} ({gpu.memory_bytes / 2**30:.1f} GiB), "
        f"{gpu.half_flops_per_s / 1e12:.0f} TFLOP/s in {half}, {size(gpu.memory_bytes_per_s)}/s ({gpu.source})",
        *_by_default(question),
        *_of_values(question),
        f"{size(reserve_bytes(gpu))} of each GPU stay free for context, NCCL and fragmentation, and "
        f"{MISS:.0%} of the peak where possible, because predictions have errors",
        f"step times within {SEPARABLE:.0%} count as equal, and the simpler arm wins; states stay on GPUs "
        f"if they fit, unless offloading takes less than {OFFLOADING_PAYS:.0%} of the time",
        f"large products reach {reached:.0%} of the peak, small ones less; "
        f"links {constants.link_share:.0%}, networks {constants.network_share:.0%}, PCIe {constants.pcie_share:.0%}",
        f"the interval of a step's time is the prediction divided and multiplied by "
        f"{interval_factor(question.model.parameters, is_known):.2f}, and by more where an "
        f"unknown host decides or states are offloaded",
        f"each process needs {size(HOST_PROCESS_BYTES)} of the host; loading a checkpoint may need more, once",
        f"a host updates a billion parameters in {papers.CPU_ADAM_S_PER_BILLION} s, as in the ZeRO-Offload paper",
        "torch.compile was not tried: it changes time more than memory, and its effect is not known here",
    ]


def _by_default(question: Question) -> list[str]:
    values = {
        "sequence": f"{question.sequence} tokens per row (--sequence)",
        "batch": f"{question.batch} rows per step (--batch)",
        "host_memory": f"{size(question.host_memory_bytes)} of host memory in a node (--host-memory)",
    }
    values["host_pace"] = f"a host of pace {pace().host_pace} (--host-pace)"
    if question.gpus > 1:
        values["link"] = f"{question.link} between GPUs (--link)"
        values["gpus_per_node"] = f"{question.local} GPUs in a node (--gpus-per-node)"
    names = [name for name in question.defaults if name in values]
    return [f"not given, so by default: {'; '.join(values[name] for name in names)}"] if names else []


def _of_values(question: Question) -> list[str]:
    """Return what is assumed of the precision, the optimizer and the frozen weights."""
    if question.precision:
        lines = [f"precision: {precision_in_words(question.precision, question)}"]
    else:
        with_deepspeed, without = (precision_in_words(name, question) for name in USUAL)
        lines = [f"precision: {with_deepspeed} (ddp, single and fsdp2: {without})"]
    if question.optimizer not in ADAMW:
        muon = "; the products of its update are not counted" if question.optimizer == "muon" else ""
        lines.append(f"the time of {question.optimizer} is that of the bytes that it reads and writes{muon}")
    if not question.has_bf16:
        lines.append(f"{question.gpu} has no bf16, so fp16 with loss scaling is used; it needs as many bytes")
    if question.model.trained < question.model.parameters:
        kind = "bf16" if question.frozen == "bf16" else "the type of the others"
        lines.append(f"frozen weights are loaded in {kind} (--frozen)")
    if question.beside:
        lines.append(
            f"another program takes {size(beside_bytes(question.gpu, question.beside))} of each GPU (--beside)"
        )
    return lines


def precision_in_words(precision: str, question: Question) -> str:
    words = IN_WORDS[precision]
    return words if question.has_bf16 else words.replace("bf16", "fp16")


# --- how many GPUs --------------------------------------------------------------------------------------------------


def needed_in_words(enough: list[Advice], counts: tuple[int, ...]) -> str:
    """Return the fewest GPUs of each kind, in a sentence."""
    if not enough:
        return f"No {counts[0]} to {counts[-1]} GPUs of a kind are enough."
    by_count: dict[int, list[str]] = defaultdict(list)
    for advice in enough:
        if advice.choice and not advice.choice.offloads:
            by_count[advice.question.gpus].append(advice.question.gpu)
    if not by_count:
        return "Enough only with states in host memory, as the table says."
    lists = [f"{gpus} x {', '.join(kinds)}" for gpus, kinds in sorted(by_count.items())]
    return f"Enough: {'; '.join(lists)}."


def needed_table(enough: list[Advice]) -> list[dict]:
    return [
        {
            "predicted": machine(advice.question),
            "arm": row.arm,
            "recompute": recomputed(row),
            "GPU memory": peak_of(row, advice.question),
            "host": size(row.host_bytes),
            "per step": seconds(row),
            "tokens/s": f"{float(f'{row.tokens_per_s:.2g}'):,.0f}",
        }
        for advice in enough
        if (row := advice.choice)
    ]
