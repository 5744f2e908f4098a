"""Which arms fit a model on given GPUs, how fast they should be, and which to take. Predicted, not measured."""

import re
from dataclasses import dataclass, field
from typing import Literal

from study.errors import Stop
from study.machine.gpus import GPUS, Gpu
from study.spec import arms
from study.spec.arms import Arm
from study.spec.validation import nearest
from study.text.numbers import short, size
from study.theory import architecture, papers
from study.theory.architecture import Architecture, parameters
from study.theory.estimate import Estimate, estimate
from study.theory.room import HOST_PROCESS_BYTES
from study.theory.setup import Setup, arm_named

# All assumed until measured; `assumptions` says so wherever an advice is shown.
OUTSIDE_BYTES = 2e9  # of a GPU, for what PyTorch does not count: the driver's own, the CUDA context, NCCL
FRAGMENTATION = 0.05  # of a GPU, reserved by PyTorch's allocator in blocks that do not fit what is asked for
EFFICIENCY = (0.3, 0.5)  # of the peak, while computing: about what published trainings report
LINK_SHARE = 0.7  # of the vendor's bandwidth, in the worst case; all of it in the best


@dataclass(frozen=True)
class Question:
    """What to train, and on which machine. `batch` is the rows of an optimizer step, over all GPUs."""

    model: Architecture
    gpus: int
    gpu: str
    link: str | None  # the slowest between GPUs: a name in papers.LINKS; None for a single GPU
    host_memory_bytes: float  # of a node
    sequence: int
    batch: int
    precision: str = "bf16_cast"
    checkpointing: bool = False
    disk_bytes_per_s: float | None = None  # of a node; None: nothing is offloaded to disk
    gpus_per_node: int = 8
    efficiency: tuple[float, float] = EFFICIENCY

    @property
    def local(self) -> int:
        return min(self.gpus, self.gpus_per_node)


@dataclass(frozen=True)
class Row:
    """What an arm is predicted to need. Intervals are (full overlap, no overlap); None if there is no answer."""

    arm: str
    fits: bool
    limit: str  # why it does not fit; if it fits, what takes longest
    micro_batch: int | None = None  # the largest that fits
    accumulation: int | None = None
    peak_bytes: int | None = None
    headroom_bytes: float | None = None  # after the reserve; negative if it does not fit
    components: dict[str, int] = field(default_factory=dict)  # at the peak
    host_bytes: float | None = None  # of a node, for all its ranks
    sent_bytes: float | None = None  # by a rank on the link, in a step
    step_s: tuple[float, float] | None = None
    tokens_per_s: tuple[float, float] | None = None


@dataclass(frozen=True)
class Advice:
    """Every arm, and which to take."""

    question: Question
    rows: tuple[Row, ...]
    choice: Row | None  # None: nothing fits
    runner_up: Row | None


def bytes_of(text: str, flag: str, unit: Literal["B", "B/s"] = "B") -> float:
    """Bytes from a text such as "1TB" or "80 GiB", or bytes a second from "6GB/s"."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?) ?([KMGT])(i?){unit}", text.strip())
    if not match or float(match[1]) == 0:
        what, examples = ("size", "512GB, 1TB or 80GiB") if unit == "B" else ("speed", "6GB/s or 500MB/s")
        raise Stop(f"{flag} {text!r} is not a {what}", f"give a number above 0 with its unit, such as {examples}")
    return float(match[1]) * (1024 if match[3] else 1000) ** (1 + "KMGT".index(match[2]))


def check(question: Question) -> None:
    """Refuse an impossible question."""
    known = {"GPU": (question.gpu, GPUS), "precision": (question.precision, papers.OF_PRECISION)}
    if question.gpus > 1 or question.link is not None:
        known["link between GPUs"] = (question.link, papers.LINKS)
    for what, (name, names) in known.items():
        if name not in names:
            remedy = f"choose one of {', '.join(names)}"  # all of them: H800 is spelled like H200, and is another GPU
            if name and (guess := nearest(name, names)) != remedy:
                remedy = f"{guess} Or {remedy}"
            raise Stop(f"{name!r} is not a known {what}" if name else f"no {what} is given", remedy)
    for name in ("gpus", "batch", "sequence", "gpus_per_node"):
        if (value := getattr(question, name)) < 1:
            raise Stop(f"{name} must be a whole number, at least 1 (got {value})", "give 1 or more")
    if question.disk_bytes_per_s is not None and question.disk_bytes_per_s <= 0:
        raise Stop(f"disk_bytes_per_s must be above 0 (got {question.disk_bytes_per_s})", "give a number above 0")
    if question.gpus % question.local:
        raise Stop(f"{question.gpus} GPUs do not fill nodes of {question.gpus_per_node}", "give a multiple of that")
    if question.batch % question.gpus:
        what = f"{question.gpus} GPUs do not divide a batch of {question.batch}"
        raise Stop(what, f"give a multiple of {question.gpus}")


def reserve_bytes(gpu: Gpu) -> float:
    """Memory of a GPU that is kept free, because the prediction does not count it."""
    return OUTSIDE_BYTES + FRAGMENTATION * gpu.memory_bytes


def advise(question: Question) -> Advice:
    """Every arm as a row. The choice has the shortest step in the worst case among arms that fit; ties go to the first.

    The worst case, because the formulas do not know how much overlaps. `single` needs a single GPU.
    """
    check(question)
    rows = tuple(_row(question, arm_named(name)) for name in arms.NAMES)
    best = sorted((row for row in rows if row.fits), key=lambda row: row.step_s[1])  # stable; the simplest arm is first
    return Advice(question, rows, *[*best, None, None][:2])


def _row(question: Question, arm: Arm) -> Row:
    if arm.distributed_type == "NO" and question.gpus > 1:
        return Row(arm.name, False, f"one process, {question.gpus} GPUs")
    if arm.uses_nvme and question.disk_bytes_per_s is None:
        return Row(arm.name, False, "no disk given")
    gpu, share = GPUS[question.gpu], question.batch // question.gpus
    available = gpu.memory_bytes - reserve_bytes(gpu)
    for micro_batch in (rows for rows in range(share, 0, -1) if share % rows == 0):
        prediction = _estimate(question, arm, micro_batch)
        headroom = available - prediction.peak_bytes
        if headroom >= 0:
            break
    accumulation = share // micro_batch
    host_bytes = question.local * (prediction.host_bytes + HOST_PROCESS_BYTES)
    lacks = "device memory" if headroom < 0 else "host memory" if host_bytes > question.host_memory_bytes else None
    slowest = _seconds(question, arm, prediction, accumulation, best=False)
    fastest = _seconds(question, arm, prediction, accumulation, best=True)
    step_s = None if lacks else (papers.overlapped_s(fastest), sum(slowest.values()))
    return Row(
        arm=arm.name,
        fits=lacks is None,
        limit=lacks or max(slowest, key=slowest.get),
        micro_batch=micro_batch,
        accumulation=accumulation,
        peak_bytes=prediction.peak_bytes,
        headroom_bytes=headroom,
        components=prediction.at_peak,
        host_bytes=host_bytes,
        sent_bytes=papers.wire_bytes(prediction.traffic, question.gpus),
        step_s=step_s,
        tokens_per_s=step_s and tuple(question.batch * question.sequence / s for s in step_s),
    )


def step_interval(question: Question, arm: Arm, micro_batch: int) -> tuple[float, float]:
    """Seconds of a step of an arm if everything overlaps, and if nothing does. The arm need not fit."""
    check(question)
    share = question.batch // question.gpus
    if share % micro_batch:
        what = f"a micro_batch of {micro_batch} does not divide the {share} rows of a rank"
        raise Stop(what, "give another micro_batch")
    prediction = _estimate(question, arm, micro_batch)
    fastest, slowest = (_seconds(question, arm, prediction, share // micro_batch, best) for best in (True, False))
    return papers.overlapped_s(fastest), sum(slowest.values())


def _estimate(question: Question, arm: Arm, micro_batch: int) -> Estimate:
    setup = Setup.of_arm(
        question.model,
        arm.name,
        ranks=question.gpus,
        precision=question.precision,
        micro_batch=micro_batch,
        accumulation=question.batch // question.gpus // micro_batch,
        sequence=question.sequence,
        attention="sdpa" if question.model.has_fused_attention else "eager",
        checkpointing=question.checkpointing,
        device="cuda",
    )
    return estimate(setup)


def _seconds(question: Question, arm: Arm, prediction: Estimate, accumulation: int, best: bool) -> dict[str, float]:
    """Seconds of a step by the resource that takes them, at the best or the worst speeds assumed."""
    gpu, link_share, ranks = GPUS[question.gpu], 1 if best else LINK_SHARE, question.gpus
    peak = gpu.single_flops_per_s if question.precision == "fp32" else gpu.half_flops_per_s
    seconds = {"compute": prediction.flops_per_rank_and_step / (peak * question.efficiency[best])}
    if ranks > 1:
        sent = papers.wire_bytes(prediction.traffic, ranks)
        seconds["link"] = sent / (papers.LINKS[question.link].bytes_per_s * link_share)
    if arm.offload_optimizer == "none":
        return seconds
    # Gradients go down in each pass that reduces them, and those of earlier passes come up to be added to
    # (stage_1_and_2.py, async_accumulate_grad_in_cpu_via_gpu; stage3.py, partition_grads). Weights come up once a step,
    # or, if they live on the host, for each forward and each backward pass (ZeRO-Infinity, 4.1).
    part = (2 if question.precision == "bf16_cast" else 4) * prediction.parameters / ranks
    passes = accumulation if arm.stage > 1 else 1
    moved = part * (4 * passes - 1 if arm.offload_param != "none" else 2 * passes)
    seconds["host link"] = moved / (papers.LINKS[gpu.host_link].bytes_per_s * link_share)
    # A host updates what all its ranks own; the published speed is that of a whole host.
    updated = prediction.parameters * question.local / ranks
    seconds["update on host"] = updated / 1e9 * papers.CPU_ADAM_S_PER_BILLION
    if arm.uses_nvme:
        disk_bytes = prediction.nvme_bytes["read_per_step"] + prediction.nvme_bytes["written_per_step"]
        seconds["disk"] = question.local * disk_bytes / question.disk_bytes_per_s
    return seconds


def in_words(advice: Advice) -> str:
    """The choice and the runner-up, in two sentences."""
    best, second, question = advice.choice, advice.runner_up, advice.question
    if best is None:
        closest = max((row for row in advice.rows if row.micro_batch), key=lambda row: row.headroom_bytes)
        short_of = f" ({size(-closest.headroom_bytes)} on each GPU)" if closest.headroom_bytes < 0 else ""
        return (
            f"No arm is predicted to fit: {closest.arm} comes closest, and lacks {closest.limit}{short_of}. "
            "Try checkpointing, a shorter sequence, more GPUs, or more host memory."
        )
    first = (
        f"Take {best.arm}: of the arms predicted to fit it has the shortest step in the worst case (nothing overlaps, "
        f"{question.efficiency[0]:.0%} of the peak), {short(best.step_s[1])} s, and {short(best.step_s[0])} s at best. "
        f"It is limited by {best.limit} and leaves {size(best.headroom_bytes)} of each GPU free."
    )
    if second is None:
        return first + " There is no runner-up: no other arm is predicted to fit."
    more = second.step_s[1] / best.step_s[1] - 1
    close = ", too close for a prediction to separate them" if more < 0.05 else ""
    return (
        f"{first} Runner-up is {second.arm}, predicted at {short(second.step_s[1])} s, {more:.0%} more{close}, "
        f"limited by {second.limit}, with {size(second.headroom_bytes)} free."
    )


def sentences(advice: Advice) -> list[str]:
    return [in_words(advice), agreement(advice), "Assumed:", *assumptions(advice.question)]


def assumptions(question: Question) -> list[str]:
    """What an advice assumes and nobody has measured."""
    gpu, (low, high) = GPUS[question.gpu], question.efficiency
    lines = [
        f"the model is {architecture.in_words(question.model)}",
        f"{size(reserve_bytes(gpu))} of each GPU are kept free for driver, context, NCCL and fragmentation",
        f"each process needs {size(HOST_PROCESS_BYTES)} of the host; loading a checkpoint may need more, once",
        f"GPUs reach {low:.0%} to {high:.0%} of their peak at any number of rows, links {LINK_SHARE:.0%} to 100%",
        f"the host updates a billion parameters in {papers.CPU_ADAM_S_PER_BILLION} s, as in the ZeRO-Offload paper",
        f"each node has {question.local} GPUs, each with its own link to the host",
    ]
    if "bf16" in question.precision and not gpu.has_bf16:
        lines.append(f"{question.gpu} has no bf16: read it as fp16, which needs as many bytes")
    return lines


def agreement(advice: Advice) -> str:
    """Whether document 000 picks the same arm, by its decision tree and by its table of model sizes, in one sentence.

    Questions 1 and 2 of the tree ask what fits, and predictions answer them. 3 and 4 are preferences that nobody gave
    here, and 5 changes nothing where only ZeRO-3 is left. The document knows ddp, zero2 and zero3 on several GPUs.
    """
    rows, ours = {row.arm: row for row in advice.rows}, advice.choice
    billions = parameters(advice.question.model) / 1e9
    by_size = "ddp" if billions <= 7 else "zero2" if billions <= 13 else "zero3"
    if advice.question.gpus == 1:
        arm, by_size, path = "single", "single", "one GPU: no ZeRO"
    elif rows["ddp"].fits:
        arm, path = "ddp", "1: DDP fits"
    elif rows["zero2"].fits:
        arm, path = "zero2", "1: DDP does not fit; 2: ZeRO-2 fits"
    else:
        limited = advice.question.link.startswith("pcie")
        link = "limited bandwidth, ZeRO-3 only if necessary" if limited else "ZeRO-3 is viable on this link"
        arm, path = "zero3", f"1: DDP does not fit; 2: ZeRO-2 does not fit; 5: {link}"
    theirs = rows[arm]
    if ours is None:
        comparison = "but nothing is predicted to fit"
    elif ours.arm == arm:
        comparison = "as we do"
    elif theirs.fits:
        seconds = short(theirs.step_s[1]), short(ours.step_s[1])
        comparison = f"predicted at {seconds[0]} s a step in the worst case, {ours.arm} at {seconds[1]} s"
    else:
        comparison = f"which is predicted not to fit ({theirs.limit})"
    if not rows[by_size].fits:
        by_size += ", which is predicted not to fit"
    return f"Document 000's decision tree picks {arm} ({path}), {comparison}; its table of model sizes picks {by_size}."
