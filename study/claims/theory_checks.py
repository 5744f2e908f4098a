"""Checks that need no run: arithmetic, formulas of `study.theory`, and physical bounds.

P1: ZeRO (arXiv 1910.02054v3). P2: ZeRO-Offload (2101.06840). P3: ZeRO-Infinity (2104.07857). Nothing here is measured.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from study.claims.model import OWN, PREDICTED, TRENDS, Kind, calls_of, one_argument
from study.claims.verdict import Finding
from study.errors import Stop
from study.machine.gpus import GPUS
from study.spec.validation import nearest
from study.text.numbers import count, short, size
from study.theory import estimate as estimates
from study.theory import nodes, papers
from study.theory.advise import step_of
from study.theory.architecture import Architecture, flops_per_row, generic, named
from study.theory.architecture import parameters as count_parameters
from study.theory.deepspeed_memory import Engine
from study.theory.estimate import traffic
from study.theory.memory_kinds import reserve_bytes
from study.theory.question import Question
from study.theory.setup import Setup, arm_named
from study.theory.steptime import ON_GPU, StepTime

Name, Number, Whole = str | None, float | None, int | None
Part = Literal["all", "weights", "gradients", "optimizer"]
FittedPart = Literal["all", "weights", "gradients and optimizer"]
Unit = Literal["volume", "tensors"]
MIXED = "mixed-adam"
# Exponent and stored mantissa bits: IEEE 754 for the first two; bfloat16 is fp32 with 16 bits of the mantissa cut off.
FORMATS = {"fp32": (8, 23), "fp16": (5, 10), "bf16": (8, 7)}
FLOPS_PER_PARAMETER_AND_TOKEN = 6  # two forward, four backward: ZeRO-Infinity, section 4
estimate = functools.lru_cache(maxsize=1000)(estimates.estimate)  # many claims are of the same trainings


# --- what claims name ----------------------------------------------------------------------------------------------


def also_takes(helper: Callable) -> Callable:
    """List a helper's parameters in a check's signature, in place of the `**given` that the check passes to it.

    Claims files are validated against signatures. A parameter that the check has itself stays as the check has it.
    """

    def listed(check: Callable) -> Callable:
        every = {**inspect.signature(helper).parameters, **inspect.signature(check).parameters}
        check.__signature__ = inspect.Signature([each for each in every.values() if each.kind is each.KEYWORD_ONLY])
        return check

    return listed


def one_of(known: Mapping, name: str, what: str):
    if name not in known:
        raise Stop(f"{name!r} is not a known {what}", nearest(name, known))
    return known[name]


def exactly_one(**given) -> None:
    if sum(value is not None for value in given.values()) != 1:
        raise Stop(f"exactly one of {' and '.join(given)} is needed", "give one of them")


def size_of(*, model: Name = None, parameters: Number = None) -> float:
    exactly_one(model=model, parameters=parameters)
    return count_parameters(named(model)) if model else parameters


def device_bytes(*, gpu: Name = None, memory_bytes: Number = None) -> float:
    exactly_one(gpu=gpu, memory_bytes=memory_bytes)
    return one_of(GPUS, gpu, "GPU").memory_bytes if gpu else memory_bytes


def model_of(
    *, model: Name = None, parameters: Number = None, layers: Whole = None, hidden: Whole = None
) -> Architecture:
    if model is None and None in (parameters, layers, hidden):
        raise Stop("no model is given", "give model, or parameters, layers and hidden")
    return named(model) if model else generic(parameters, layers, hidden)


@also_takes(model_of)
def setup_of(
    *,
    arm: str = "single",
    ranks: int = 1,
    precision: str = "bf16_cast",
    micro_batch: int = 1,
    accumulation: int = 1,
    sequence: int = 1024,
    attention: str = "sdpa",
    checkpointing: bool = False,
    **given,
) -> Setup:
    """The training that a claim describes."""
    how = {"precision": precision, "attention": attention, "checkpointing": checkpointing, "device": "cuda"}
    rows = {"micro_batch": micro_batch, "accumulation": accumulation, "sequence": sequence}
    return Setup.of_arm(model_of(**given), arm, ranks=ranks, **how, **rows)


# --- memory: states by P1 sections 3 and 5, and all that a rank holds ----------------------------------------------


def parameters(*, model: str) -> Finding:
    """Parameters of a built-in shape, tensor by tensor, tied matrices once."""
    number = count_parameters(named(model))
    return Finding(number, f"the tensors of {model} have {number:,} elements")


def _states(number: float, stage: int, ranks: float, recipe: str, part: Part = "all") -> float:
    states = papers.states_bytes(number, stage, ranks, recipe)
    return sum(states.values()) if part == "all" else states[part]


@also_takes(size_of)
def states_bytes(*, stage: int, ranks: int, recipe: str = MIXED, part: Part = "all", **given) -> Finding:
    """Bytes of weights, gradients and optimizer states on a rank. P1 section 5, figure 1."""
    number = size_of(**given)
    states = papers.states_bytes(number, stage, ranks, recipe)
    words = " + ".join(f"{name} {short(value) if number == 1 else size(value)}" for name, value in states.items())
    working = f"{count(number)} parameters, {recipe}, stage {stage} on {ranks} ranks: {words}"
    return Finding(sum(states.values()) if part == "all" else states[part], working)


def states_saving(*, stage: int, ranks: int, over: int = 0, recipe: str = MIXED, part: Part = "all") -> Finding:
    """The share of another stage's bytes that a stage saves."""
    less, more = (_states(1, each, ranks, recipe, part) for each in (stage, over))
    return Finding(1 - less / more, f"1 - {short(less)} / {short(more)} bytes a parameter = {short(1 - less / more)}")


def states_ratio(
    *, stage: int, ranks: int | Literal["limit"], over: int = 0, recipe: str = MIXED, part: Part = "all"
) -> Finding:
    """How many times fewer bytes a stage holds than another. In the limit of many ranks partitioned states are 0."""
    many = math.inf if ranks == "limit" else ranks
    less, more = (_states(1, each, many, recipe, part) for each in (stage, over))
    ratio = more / less if less else math.inf
    return Finding(ratio, f"{short(more)} / {short(less)} bytes a parameter on {ranks} ranks = {short(ratio)}")


@also_takes(device_bytes)
def largest_parameters(*, stage: int, ranks: int, recipe: str = MIXED, rest_bytes: float = 0, **given) -> Finding:
    """The most parameters whose states fit, with `rest_bytes` left for everything else. P1 section 5."""
    has, each = device_bytes(**given) - rest_bytes, _states(1, stage, ranks, recipe)
    return Finding(has / each, f"{size(has)} / {short(each)} bytes a parameter = {count(has / each)}")


@also_takes(size_of)
def fewest_ranks(
    *,
    stage: int,
    gpu: Name = None,
    memory_bytes: Number = None,
    recipe: str = MIXED,
    rest_bytes: float = 0,
    **given,
) -> Finding:
    """The fewest ranks on which the states fit, with `rest_bytes` left for everything else.

    Infinity ("never") if what is not partitioned is already too much.
    """
    number, has = size_of(**given), device_bytes(gpu=gpu, memory_bytes=memory_bytes) - rest_bytes
    fixed = _states(number, stage, math.inf, recipe)
    shared = _states(number, stage, 1, recipe) - fixed
    if fixed >= has and not (shared == 0 and fixed == has):
        return Finding(math.inf, f"every rank holds {size(fixed)} and has {size(has)}: more ranks do not help")
    ranks = max(1, math.ceil(shared / (has - fixed))) if shared else 1
    return Finding(ranks, f"{size(shared)} shared over what {size(fixed)} leave of {size(has)}: {ranks} ranks")


@also_takes(size_of)
def fitted_bytes_per_parameter(
    *, memory_bytes: list[float], stages: list[int], ranks: int, part: FittedPart = "all", **given
) -> Finding:
    """Bytes a parameter, if memory figures of stages 0, 2 and 3 share a recipe and a rest. P1 section 5.

    What a stage partitions and the stage before does not falls by (1 - 1/N); nothing else changes.
    """
    number, held = size_of(**given), dict(zip(stages, memory_bytes, strict=False))
    if len(stages) != len(memory_bytes) or sorted(held) != [0, 2, 3]:
        raise Stop("a recipe is fitted to the memory of stages 0, 2 and 3", "give stages = [0, 2, 3] and three figures")
    unit = number * (1 - 1 / ranks)
    weights, others = (held[2] - held[3]) / unit, (held[0] - held[2]) / unit
    rest = held[3] - (weights + others) * number / ranks
    values = {"all": weights + others, "weights": weights, "gradients and optimizer": others}
    words = ", ".join(f"{name} {short(value)}" for name, value in values.items())
    return Finding(values[part], f"bytes a parameter: {words}; {size(rest)} are not states")


@also_takes(size_of)
def rest_bytes(*, memory_bytes: float, stage: int, ranks: int, recipe: str = MIXED, **given) -> Finding:
    """What a memory figure leaves for everything but model states; negative if the states alone are more."""
    states = _states(size_of(**given), stage, ranks, recipe)
    rest = memory_bytes - states
    return Finding(rest, f"{size(memory_bytes)} - {size(states)} of states = {size(rest)}")


@also_takes(size_of)
def rest_spread(*, memory_bytes: list[float], stages: list[int], ranks: int, recipe: str = MIXED, **given) -> Finding:
    """By how much the rests of the memory figures of several stages differ, as a share of the largest figure."""
    number = size_of(**given)
    pairs = zip(memory_bytes, stages, strict=True)
    rests = {stage: has - _states(number, stage, ranks, recipe) for has, stage in pairs}
    words = ", ".join(f"stage {stage} {size(rest)}" for stage, rest in rests.items())
    return Finding((max(rests.values()) - min(rests.values())) / max(memory_bytes), f"{recipe} leaves {words}")


@also_takes(size_of)
def offloaded_states_bytes(
    *, stage: int, ranks: int, home: Literal["device", "host"], weights_too: bool = False, **given
) -> Finding:
    """Model states of a rank with ZeRO-Offload, on the device or on the host. P2 section 4.1; P3 section 5.1."""
    states = papers.offloaded_states_bytes(size_of(**given), stage, ranks, weights_too)
    return Finding(states[home], ", ".join(f"{size(value)} on the {where}" for where, value in states.items()))


@also_takes(setup_of)
def peak_bytes(*, arm: str, ranks: int, part: Name = None, **given) -> Finding:
    """The predicted peak of a rank with buffers, activations and temporaries, or a component of it."""
    prediction = estimate(setup_of(arm=arm, ranks=ranks, **given))
    held = prediction.at_peak.get(part, 0) if part else prediction.peak_bytes
    terms = ", ".join(f"{name} {size(value)}" for name, value in prediction.at_peak.items())
    return Finding(held, f"{arm} on {ranks} ranks, at the peak {size(prediction.peak_bytes)}: {terms}")


@also_takes(setup_of)
def peak_saving(*, arm: str, over: str, ranks: int, **given) -> Finding:
    """The share of another arm's predicted peak that an arm saves."""
    less, more = (estimate(setup_of(arm=each, ranks=ranks, **given)).peak_bytes for each in (arm, over))
    return Finding(1 - less / more, f"1 - {size(less)} of {arm} / {size(more)} of {over} = {short(1 - less / more)}")


@also_takes(setup_of)
def activation_bytes(*, micro_batch: int, sequence: int, **given) -> Finding:
    """What a forward pass keeps for its backward pass, operation by operation."""
    kept = estimates.profile(setup_of(micro_batch=micro_batch, sequence=sequence, **given)).kept
    return Finding(kept, f"{micro_batch} rows of {sequence} tokens keep {size(kept)}")


@also_takes(setup_of)
def fits(
    *,
    arm: Name = None,
    stage: Whole = None,
    ranks: int = 1,
    gpu: Name = None,
    memory_bytes: Number = None,
    recipe: str = MIXED,
    states_only: bool = False,
    rest_bytes: float = 0,
    host_memory_bytes: Number = None,
    **given,
) -> Finding:
    """ "fits" or "does not fit": predicted bytes of a rank against the memory of its device.

    With `states_only`, the ZeRO paper's model states: if they do not fit, nothing does. Otherwise the whole peak of an
    arm, against a GPU's memory without what the driver and the allocator take. `host_memory_bytes`: the host's, a rank.
    """
    has, on_host = device_bytes(gpu=gpu, memory_bytes=memory_bytes), 0
    if arm is None and not (states_only and stage is not None):
        what = "neither arm nor stage is given" if states_only else "only an arm has more than model states"
        raise Stop(what, "give arm, or stage and states_only = true")
    if states_only:
        stage = arm_named(arm).stage or 0 if arm else stage
        needed = _states(size_of(model=given.get("model"), parameters=given.get("parameters")), stage, ranks, recipe)
        what = f"model states of stage {stage} on {ranks} ranks, {recipe}"
    else:
        prediction = estimate(setup_of(arm=arm, ranks=ranks, **given))
        needed, on_host, what = prediction.peak_bytes, prediction.host_bytes, f"the peak of {arm} on {ranks} ranks"
        has -= reserve_bytes(GPUS[gpu]) if gpu else 0
    if host_memory_bytes is not None and on_host > host_memory_bytes:
        return Finding("does not fit", f"a rank keeps {size(on_host)} on the host, of {size(host_memory_bytes)} for it")
    needed += rest_bytes
    working = f"{what}: {size(needed)}; {gpu or 'the device'} has {size(has)}"
    return Finding("fits" if needed <= has else "does not fit", working)


# --- traffic, by P1 section 7 and study.theory.estimate, and time --------------------------------------------------


def volume(traffic: dict[str, float], unit: Unit) -> float:
    """Bytes of collectives. In the papers an all-reduce moves its tensor twice; "tensors" counts each tensor once."""
    return sum(value * (2 if unit == "volume" and kind == "all_reduce" else 1) for kind, value in traffic.items())


def _listed(moved: dict[str, int]) -> str:
    return ", ".join(f"{kind} {size(value)}" for kind, value in moved.items()) or "nothing"


def traffic_ratio(*, stage: int, over: int = 0) -> Finding:
    """How many times the bytes of another stage a stage moves in a step, by P1 section 7."""
    mine, other = (papers.published_traffic_bytes(1, each, 10**9, 1) for each in (stage, over))
    return Finding(mine / other, f"ZeRO paper, section 7: {mine:.0f} Psi / {other:.0f} Psi")


@also_takes(setup_of)
def deepspeed_traffic_ratio(*, arm: str, over: str, ranks: int = 8, unit: Unit = "volume", **given) -> Finding:
    """How many times the bytes of another arm an arm moves in a step, as DeepSpeed 0.19.8 and DDP call collectives."""
    moved = {each: traffic(Engine(setup_of(arm=each, ranks=ranks, **given))) for each in (arm, over)}
    working = "; ".join(f"{name}: {_listed(kinds)}" for name, kinds in moved.items())
    return Finding(volume(moved[arm], unit) / volume(moved[over], unit), working)


@also_takes(setup_of)
def traffic_bytes(*, arm: str, ranks: int, collective: str = "all", unit: Unit = "volume", **given) -> Finding:
    """Bytes of a rank's collectives in a step, as DeepSpeed 0.19.8 and DDP call them."""
    moved = estimate(setup_of(arm=arm, ranks=ranks, **given)).traffic
    chosen = moved if collective == "all" else {collective: moved.get(collective, 0)}
    return Finding(volume(chosen, unit), f"{arm} on {ranks} ranks: {_listed(moved)}")


@also_takes(setup_of)
def between_nodes_ratio(*, arm: str, over: str, node_ranks: int, collective: str = "all", **given) -> Finding:
    """What an arm's collectives between nodes of so many ranks move in a step, over another arm's."""
    moved = {}
    for each in (arm, over):
        between = nodes.by_node(nodes.predicted(setup_of(arm=each, **given)), node_ranks)["between"]
        moved[each] = between if collective == "all" else {collective: between.get(collective, 0)}
    working = "; ".join(f"{name}: {_listed(kinds)}" for name, kinds in moved.items())
    return Finding(volume(moved[arm], "volume") / volume(moved[over], "volume"), working)


def link_bytes_per_s(*, link: str, directions: Literal[1, 2] = 1) -> Finding:
    """What a GPU sends while it receives as much, by the vendor; both directions together are twice that."""
    known = one_of(papers.LINKS, link, "link")
    return Finding(known.bytes_per_s * directions, f"{known.source}: {size(known.bytes_per_s)}/s in each direction")


@functools.lru_cache(maxsize=1000)
def _step(question: Question, arm: str, micro_batch: int) -> StepTime:
    """A predicted step without its timeline: claims that leave something open ask for the same steps again."""
    return replace(step_of(question, arm_named(arm), micro_batch), timeline=())


@also_takes(model_of)
def step_ratio(
    *,
    arm: str,
    over: str,
    gpus: int,
    gpu: str,
    link: Name = None,
    sequence: int,
    batch: int,
    micro_batch: int = 1,
    precision: str = "bf16_cast",
    precision_over: Name = None,
    checkpointing: bool = False,
    disk_bytes_per_s: Number = None,
    speed: bool = False,
    **given,
) -> Finding:
    """An arm's predicted seconds a step over another's, with the interval of both predictions. P1 7, P3 6.

    With `speed` the inverse: an arm's speed as a share of the other's. `precision_over` is the other's precision, if it
    is not the same. Whether the arms fit is not checked.
    """
    how = {"checkpointing": checkpointing, "disk_bytes_per_s": disk_bytes_per_s}
    model, sides = model_of(**given), ((arm, precision), (over, precision_over or precision))
    mine, others = (
        _step(Question(model, gpus, gpu, link, 1e15, sequence, batch, each_precision, **how), each, micro_batch)
        for each, each_precision in sides
    )
    if precision_over:
        arm, over = (f"{each} in {each_precision}" for each, each_precision in sides)
    middle, low, high = mine.seconds / others.seconds, mine.low_s / others.high_s, mine.high_s / others.low_s
    if speed:
        middle, low, high = 1 / middle, 1 / high, 1 / low
    working = f"{arm} over {over}: {short(middle)} {'of the speed' if speed else 'times as long'}"
    return Finding(middle, f"{working}, {short(low)} to {short(high)} if both predictions miss apart", (low, high))


@also_takes(model_of)
def utilization(
    *,
    counts: Literal["operations", "kernels"],
    arm: str,
    gpus: int,
    gpu: str,
    sequence: int,
    batch: int,
    micro_batch: int = 1,
    precision: str = "bf16_cast",
    checkpointing: bool = False,
    **given,
) -> Finding:
    """How much of a predicted step a GPU is used, with the interval of the step.

    "operations": the share of its peak that the model's operations need (MFU). "kernels": the share of the time in
    which a kernel runs, as nvidia-smi counts it.
    """
    model = model_of(**given)
    ask = Question(model, gpus, gpu, None, 1e15, sequence, batch, precision, checkpointing=checkpointing)
    step = _step(ask, arm, micro_batch)
    used_s = sum(step.parts.get(part, 0.0) for part in (*ON_GPU, "update"))
    if counts == "operations":
        used_s = flops_per_row(model, sequence) * batch / gpus / one_of(GPUS, gpu, "GPU").half_flops_per_s
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
    """The share of the peak that is left if transfers do not overlap. P3 equations 6 and 9 to 11."""
    intensity = papers.infinity_intensities(micro_batch, sequence, hidden, every)[moved]
    share = papers.infinity_efficiency(intensity, bytes_per_s, peak_flops_per_s)
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
    """The operations per second that a claimed speed needs, as a share of the peak of all GPUs."""
    if samples_per_s is not None and tokens_per_sample is not None:
        tokens_per_s = samples_per_s * tokens_per_sample
    if tokens_per_s is None:
        raise Stop("a bound needs a speed", "give tokens_per_s, or samples_per_s and tokens_per_sample")
    peak = one_of(GPUS, gpu, "GPU").half_flops_per_s * gpus
    needed = FLOPS_PER_PARAMETER_AND_TOKEN * parameters * tokens_per_s
    speed = f"6 x {count(parameters)} parameters x {short(tokens_per_s)} tokens/s need {short(needed / 1e12)} TFLOP/s"
    return Finding(needed / peak, f"{speed}, {short(needed / peak)} of the peak of {gpus} {gpu}, {short(peak / 1e12)}")


# --- numbers and texts ---------------------------------------------------------------------------------------------


def float_format(*, dtype: Literal["fp32", "fp16", "bf16"], bits: Literal["exponent", "mantissa", "all"]) -> Finding:
    """Bits of a number format."""
    exponent, mantissa = FORMATS[dtype]
    number = {"exponent": exponent, "mantissa": mantissa, "all": 1 + exponent + mantissa}[bits]
    return Finding(number, f"{dtype}: a sign, {exponent} bits of exponent, {mantissa} of mantissa")


def arithmetic(
    *, times: list[float] = (), over: list[float] = (), plus: list[float] = (), saved: bool = False
) -> Finding:
    """The document's own numbers: the product of some over the product of others, plus a sum."""
    if 0 in over:
        raise Stop("an arithmetic check divides by 0", "give numbers other than 0 for over")
    result = (math.prod(times) / math.prod(over) if times or over else 0.0) + sum(plus)
    digits = {"x": times or ([1] if over else []), "/": over, "+": plus}
    words = "".join(f" {sign} {short(float(number))}" for sign, numbers in digits.items() for number in numbers)[3:]
    if saved:
        result, words = 1 - result, f"1 - {words}"
    return Finding(result, f"{words} = {short(float(result))}")


def stated(*, needed: list[str], given: list[str]) -> Finding:
    """How many of the things that a reader has to know are not said."""
    lacking = [name for name in needed if name not in given]
    working = f"{len(needed) - len(lacking)} of {len(needed)} are given"
    return Finding(len(lacking), f"{working}; not given: {', '.join(lacking)}" if lacking else working)


def trend(*, quantity: str, along: dict[str, list], where: dict) -> Finding:
    """Whether a quantity of theory "rises" or "falls" along the values of an argument, in their order, or "neither"."""
    name, values = one_argument(along)
    results = [_quantity(quantity, where | {name: value}).value for value in values]
    pairs = list(itertools.pairwise(results))
    word = "rises" if all(a < b for a, b in pairs) else "falls" if all(a > b for a, b in pairs) else "neither"
    return Finding(word, f"{quantity} with {name} {short(values)}: {short(results)}")


def _quantity(quantity: str, arguments: dict) -> Finding:
    """A quantity of theory."""
    function = one_of(QUANTITIES, quantity, "quantity")
    try:
        (call,) = calls_of(function, arguments, quantity)
    except ValueError as error:
        raise Stop(str(error), "correct the arguments") from None
    return function(**call)


def quotient(*, quantity: str, of: dict, to: dict, where: dict = {}) -> Finding:  # noqa: B006
    """A quantity of theory with some arguments over the same, or over another `quantity`, with others.

    If both have intervals, so has their quotient: as if they missed apart.
    """
    names = [side.get("quantity", quantity) for side in (of, to)]
    sides = [where | {key: value for key, value in side.items() if key != "quantity"} for side in (of, to)]
    findings = [_quantity(name, side) for name, side in zip(names, sides, strict=True)]
    (above, below), interval = (finding.value for finding in findings), None
    if not below:
        raise Stop(f"{names[1]} is 0 on the side to divide by", "give another")
    if all(finding.interval for finding in findings):
        (low, high), (least, most) = (finding.interval for finding in findings)
        interval = low / most, high / least
    working = f"{names[0]} {short(above)} / {names[1]} {short(below)} = {short(above / below)}"
    return Finding(above / below, working, interval)


STATES = (parameters, states_bytes, states_saving, states_ratio, largest_parameters, fewest_ranks)
MEMORY = (fitted_bytes_per_parameter, rest_bytes, rest_spread, offloaded_states_bytes, peak_bytes, peak_saving)
TRAFFIC = (traffic_ratio, deepspeed_traffic_ratio, traffic_bytes, between_nodes_ratio, link_bytes_per_s)
OTHER = (activation_bytes, float_format, step_ratio, utilization, offload_efficiency)
QUANTITIES = {check.__name__: check for check in (*STATES, *MEMORY, *TRAFFIC, *OTHER)}
BYTES = ("states_bytes", "rest_bytes", "offloaded_states_bytes", "peak_bytes", "activation_bytes", "traffic_bytes")
UNITS = dict.fromkeys(QUANTITIES, "number") | dict.fromkeys(BYTES, "bytes")
UNITS |= {"parameters": "parameters", "largest_parameters": "parameters", "link_bytes_per_s": "bytes/s"}
UNITS |= {"fitted_bytes_per_parameter": "bytes"}
FROM_THE_DOCUMENT = ("fitted_bytes_per_parameter", "rest_bytes", "rest_spread")  # differences of its own figures
PUBLISHED = {
    "P1": ("states_bytes", "states_saving", "states_ratio", "largest_parameters", "fewest_ranks", "traffic_ratio"),
    "P2": ("offloaded_states_bytes",),
    "P3": ("offload_efficiency",),
}
KINDS = {check.__name__: Kind(OWN, {"": check}) for check in (arithmetic, stated)}
KINDS |= {check.__name__: Kind(PREDICTED, {"": check}) for check in (bound, quotient)}
KINDS |= {"fits": Kind(PREDICTED, {"": fits}, finds=("fits", "does not fit"))}
KINDS |= {"trend": Kind(PREDICTED, {"": trend}, finds=TRENDS)}
KINDS |= {
    "theory": Kind(PREDICTED, QUANTITIES, "quantity", FROM_THE_DOCUMENT, lambda name, _: UNITS.get(name), (), PUBLISHED)
}
