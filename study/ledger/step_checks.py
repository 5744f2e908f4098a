"""Checks of a step by formulas: what it moves (P1 section 7 and `study.predictor.estimate`), and how long it takes.

P1: ZeRO (arXiv 1910.02054v3). P3: ZeRO-Infinity (2104.07857).
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from study.errors import Stop
from study.io.numbers import count, number_of, short, size
from study.ledger import ratios
from study.ledger.arguments import Name, Number, also_takes, model_of, one_of, setup_of
from study.ledger.verdict import Finding
from study.machine.gpus import GPUS, LINKS
from study.predictor import nodes
from study.predictor.advice import settled
from study.predictor.advice.question import Question, check
from study.predictor.estimate import estimate, traffic
from study.predictor.memory.engine import Engine
from study.predictor.step_time import ON_GPU, StepTime, step_time
from study.spec import arms, node_traffic

Unit = Literal["volume", "tensors"]
FLOPS_PER_PARAMETER_AND_TOKEN = 6  # two forward, four backward: ZeRO-Infinity, section 4


def volume(traffic: Mapping[str, float], unit: Unit) -> float:
    """Return the bytes of collectives. In the papers an all-reduce moves its tensor twice; "tensors" counts it once."""
    return sum(value * (2 if unit == "volume" and kind == "all_reduce" else 1) for kind, value in traffic.items())


def _listed(moved: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {size(value)}" for kind, value in moved.items()) or "nothing"


def published_traffic_bytes(parameters: float, stage: int, ranks: int, element_bytes: float = 2) -> float:
    """Bytes that a rank sends in a step, P1 section 7: (N - 1) / N of 2 Psi up to stage 2, of 3 Psi in stage 3."""
    return (3 if stage == 3 else 2) * parameters * element_bytes * (ranks - 1) / ranks


def traffic_ratio(*, stage: int, over: int = 0) -> Finding:
    """Return the bytes that a stage moves in a step, over those of another stage. P1 section 7."""
    numerator, denominator = (published_traffic_bytes(1, each, 10**9, 1) for each in (stage, over))
    return Finding(numerator / denominator, f"ZeRO paper, section 7: {numerator:.0f} Psi / {denominator:.0f} Psi")


def _over(moved: Mapping[str, Mapping[str, float]], arm: str, over: str, unit: Unit) -> Finding:
    """Return the bytes of an arm over those of another, with all that both move."""
    working = "; ".join(f"{name}: {_listed(kinds)}" for name, kinds in moved.items())
    return Finding(volume(moved[arm], unit) / volume(moved[over], unit), working)


@also_takes(setup_of)
def deepspeed_traffic_ratio(*, arm: str, over: str, ranks: int = 8, unit: Unit = "volume", **given) -> Finding:
    """Return the bytes that an arm moves in a step, over another's, as DeepSpeed 0.19.8 and DDP call collectives."""
    moved = {each: traffic(Engine(setup_of(arm=each, ranks=ranks, **given))) for each in (arm, over)}
    return _over(moved, arm, over, unit)


@also_takes(setup_of)
def traffic_bytes(*, arm: str, ranks: int, collective: str = "all", unit: Unit = "volume", **given) -> Finding:
    """Return the bytes of a rank's collectives in a step, as DeepSpeed 0.19.8 and DDP call them."""
    moved = estimate(setup_of(arm=arm, ranks=ranks, **given)).traffic
    chosen = moved if collective == "all" else {collective: moved.get(collective, 0)}
    return Finding(volume(chosen, unit), f"{arm} on {number_of(ranks, 'ranks')}: {_listed(moved)}")


@also_takes(setup_of)
def between_nodes_ratio(*, arm: str, over: str, node_ranks: int, collective: str = "all", **given) -> Finding:
    """Return the bytes that an arm moves between nodes of `node_ranks` ranks in a step, over another arm's."""
    moved = {}
    for each in (arm, over):
        between = node_traffic.by_node(nodes.predicted(setup_of(arm=each, **given)), node_ranks)["between"]
        moved[each] = between if collective == "all" else {collective: between.get(collective, 0)}
    return _over(moved, arm, over, "volume")


def link_bytes_per_s(*, link: str, directions: Literal[1, 2] = 1) -> Finding:
    """Return the bytes a second that a GPU can send while it receives as many, by the vendor; or both together."""
    known = one_of(LINKS, link, "link")
    return Finding(known.bytes_per_s * directions, f"{known.source}: {size(known.bytes_per_s)}/s in each direction")


@functools.lru_cache(maxsize=1000)
def _step(question: Question, arm: str, micro_batch: int) -> StepTime:
    """Return a predicted step without its timeline. It is cached, because open claims need it many times."""
    return replace(step_of(question, arms.load_arm(arm), micro_batch), timeline=())


def step_of(question: Question, arm: arms.Arm, micro_batch: int) -> StepTime:
    """Return the predicted step of an arm. It need not fit."""
    check(question)
    share = question.batch * arm.row_ranks // question.gpus
    if share % micro_batch:
        what = f"a micro_batch of {micro_batch} does not divide the {share} rows of a rank"
        raise Stop(what, "give another micro_batch")
    return step_time(settled.setup_of(question, arm, micro_batch), settled.machine_of(question))


@also_takes(model_of)
def question_of(
    *,
    gpus: int,
    gpu: str,
    link: Name = None,
    sequence: int,
    batch: int,
    precision: str = "bf16_cast",
    checkpointing: bool = False,
    disk_bytes_per_s: Number = None,
    **given,
) -> Question:
    """Return what the adviser is asked, for a host with room for everything."""
    question = Question(model_of(**given), gpus, gpu, link, 1e15, sequence, batch, precision)
    return replace(question, checkpointing=checkpointing, disk_bytes_per_s=disk_bytes_per_s)


@also_takes(question_of)
def step_ratio(
    *, arm: str, over: str, micro_batch: int = 1, precision_over: Name = None, speed: bool = False, **given
) -> Finding:
    """Return an arm's predicted seconds a step over another's, with the interval of such ratios. P1 7, P3 6.

    With `speed` it is the inverse: an arm's speed as a share of the other's. `precision_over` is the other arm's
    precision, if it differs. Whether the arms fit is not checked.
    """
    question = question_of(**given)
    numerator = _step(question, arm, micro_batch)
    denominator = _step(replace(question, precision=precision_over or question.precision), over, micro_batch)
    pair = f"{arm} in {question.precision} over {over} in {precision_over}" if precision_over else f"{arm} over {over}"
    middle = numerator.seconds / denominator.seconds
    low, high, origin = ratios.interval(numerator, denominator)
    words = "times as long"
    if speed:
        middle, low, high = 1 / middle, 1 / high, 1 / low
        words = "of the speed"
    return Finding(middle, f"{pair}: {short(middle)} {words}, {short(low)} to {short(high)} {origin}", (low, high))


@also_takes(question_of)
def utilization(*, counts: Literal["operations", "kernels"], arm: str, micro_batch: int = 1, **given) -> Finding:
    """Return how much a GPU is used during a predicted step, with the interval of the step.

    "operations": the share of its peak that the model's operations need (MFU). "kernels": the share of the time during
    which a kernel runs, as nvidia-smi counts it.
    """
    question = question_of(**given)
    step = _step(question, arm, micro_batch)
    used_s = sum(step.parts.get(part, 0.0) for part in (*ON_GPU, "update"))
    if counts == "operations":
        flops = question.model.flops_per_row(question.sequence) * question.batch / question.gpus
        used_s = flops / one_of(GPUS, question.gpu, "GPU").half_flops_per_s
    share, low, high = (min(1.0, used_s / seconds) for seconds in (step.seconds, step.high_s, step.low_s))
    working = f"{arm}, {micro_batch} rows a pass: {short(used_s)} s of {counts} in {short(step.seconds)} s a step"
    return Finding(share, f"{working}: {short(share)}, {short(low)} to {short(high)}", (low, high))


def offload_efficiency(
    *,
    micro_batch: int,
    sequence: int,
    bytes_per_s: float,
    peak_flops_per_s: float,
    moved: Literal["weights_gradients", "optimizer", "checkpoints"],
    hidden: int = 1,
    every: int = 1,
) -> Finding:
    """Return the share of the peak that remains if transfers do not overlap. P3 equations 6 and 9 to 11."""
    tokens = sequence * micro_batch
    intensity = {"weights_gradients": tokens, "optimizer": tokens / 4, "checkpoints": 24 * hidden * every}[moved]
    share = intensity * bytes_per_s / (intensity * bytes_per_s + peak_flops_per_s)
    return Finding(share, f"{short(intensity)} operations a byte of {moved}, {size(bytes_per_s)}/s: {short(share)}")


def bound(
    *,
    parameters: float,
    gpus: int,
    gpu: str,
    samples_per_s: Number = None,
    tokens_per_s: Number = None,
    tokens_per_sample: Number = None,
) -> Finding:
    """Return the operations per second that a claimed speed needs, as a share of the peak of all GPUs."""
    if samples_per_s is not None and tokens_per_sample is not None:
        tokens_per_s = samples_per_s * tokens_per_sample
    if tokens_per_s is None:
        raise Stop("a bound needs a speed", "give tokens_per_s, or samples_per_s and tokens_per_sample")
    peak = one_of(GPUS, gpu, "GPU").half_flops_per_s * gpus
    needed = FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens_per_s
    speed = f"6 x {count(parameters)} parameters x {short(tokens_per_s)} tokens/s need {short(needed / 1e12)} TFLOP/s"
    return Finding(needed / peak, f"{speed}, {short(needed / peak)} of the peak of {gpus} {gpu}, {short(peak / 1e12)}")
