"""Checks of memory by formulas: model states by the papers, and all that a rank holds by `study.predictor.estimate`.

P1: ZeRO (arXiv 1910.02054v3). P2: ZeRO-Offload (2101.06840). P3: ZeRO-Infinity (2104.07857).
"""

import math
from typing import Literal

from study.errors import Stop
from study.io.numbers import count, number_of, quantity, short, size
from study.ledger.arguments import Name, Number, Whole, also_takes, device_bytes, setup_of, size_of
from study.ledger.verdict import Finding
from study.machine.gpus import GPUS
from study.predictor import papers
from study.predictor.architecture import named
from study.predictor.estimate import estimate, profile
from study.predictor.memory.memory_kinds import reserve_bytes
from study.spec import arms

Part = Literal["all", "weights", "gradients", "optimizer"]
FittedPart = Literal["all", "weights", "gradients and optimizer"]
MIXED = "mixed-adam"


def parameters(*, model: str) -> Finding:
    """Return the parameters of a built-in shape, counted tensor by tensor. Tied matrices count once."""
    number = named(model).parameters
    return Finding(number, f"the tensors of {model} have {number:,} elements")


def _states(number: float, stage: int, ranks: float, recipe: str, part: Part = "all") -> float:
    states = papers.states_bytes(number, stage, ranks, recipe)
    return sum(states.values()) if part == "all" else states[part]


@also_takes(size_of)
def states_bytes(*, stage: int, ranks: int, recipe: str = MIXED, part: Part = "all", **given) -> Finding:
    """Return the bytes of weights, gradients and optimizer states on a rank. P1 section 5, figure 1."""
    number = size_of(**given)
    states = papers.states_bytes(number, stage, ranks, recipe)
    words = " + ".join(f"{name} {short(value) if number == 1 else size(value)}" for name, value in states.items())
    working = f"{quantity(number, 'parameters')}, {recipe}, stage {stage} on {number_of(ranks, 'ranks')}: {words}"
    return Finding(_states(number, stage, ranks, recipe, part), working)


def states_saving(*, stage: int, ranks: int, over: int = 0, recipe: str = MIXED, part: Part = "all") -> Finding:
    """Return the share of another stage's bytes that this stage saves."""
    less, more = (_states(1, each, ranks, recipe, part) for each in (stage, over))
    return Finding(1 - less / more, f"1 - {short(less)} / {short(more)} bytes a parameter = {short(1 - less / more)}")


def states_ratio(
    *, stage: int, ranks: int | Literal["limit"], over: int = 0, recipe: str = MIXED, part: Part = "all"
) -> Finding:
    """Return how many times fewer bytes a stage holds. In the limit of many ranks partitioned states are 0."""
    many = math.inf if ranks == "limit" else ranks
    less, more = (_states(1, each, many, recipe, part) for each in (stage, over))
    ratio = more / less if less else math.inf
    return Finding(ratio, f"{short(more)} / {short(less)} bytes a parameter on {ranks} ranks = {short(ratio)}")


@also_takes(device_bytes)
def largest_parameters(*, stage: int, ranks: int, recipe: str = MIXED, rest_bytes: float = 0, **given) -> Finding:
    """Return the most parameters whose states fit, with `rest_bytes` left for everything else. P1 section 5."""
    has = device_bytes(**given) - rest_bytes
    each = _states(1, stage, ranks, recipe)
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
    """Return the fewest ranks on which the states fit, with `rest_bytes` left for everything else.

    Infinity ("never") if what is not partitioned is already too much.
    """
    number = size_of(**given)
    has = device_bytes(gpu=gpu, memory_bytes=memory_bytes) - rest_bytes
    fixed = _states(number, stage, math.inf, recipe)
    shared = _states(number, stage, 1, recipe) - fixed
    if fixed >= has and not (shared == 0 and fixed == has):
        return Finding(math.inf, f"every rank holds {size(fixed)} and has {size(has)}: more ranks do not help")
    ranks = max(1, math.ceil(shared / (has - fixed))) if shared else 1
    return Finding(
        ranks, f"{size(shared)} shared over what {size(fixed)} leave of {size(has)}: {number_of(ranks, 'ranks')}"
    )


@also_takes(size_of)
def fitted_bytes_per_parameter(
    *, memory_bytes: list[float], stages: list[int], ranks: int, part: FittedPart = "all", **given
) -> Finding:
    """Return bytes a parameter, from figures of stages 0, 2 and 3 that differ in model states alone. P1 section 5.

    The states that one stage partitions, and the stage before does not, fall by (1 - 1/N).
    """
    number = size_of(**given)
    figures = dict(zip(stages, memory_bytes, strict=False))
    if len(stages) != len(memory_bytes) or sorted(figures) != [0, 2, 3]:
        raise Stop("a recipe is fitted to the memory of stages 0, 2 and 3", "give stages = [0, 2, 3] and three figures")
    unit = number * (1 - 1 / ranks)
    weights = (figures[2] - figures[3]) / unit
    others = (figures[0] - figures[2]) / unit
    rest = figures[3] - (weights + others) * number / ranks
    values = {"all": weights + others, "weights": weights, "gradients and optimizer": others}
    words = ", ".join(f"{name} {short(value)}" for name, value in values.items())
    return Finding(values[part], f"bytes a parameter: {words}; {size(rest)} are not states")


@also_takes(size_of)
def rest_bytes(*, memory_bytes: float, stage: int, ranks: int, recipe: str = MIXED, **given) -> Finding:
    """Return what remains of a memory figure without the model states. Negative if the states alone are more."""
    states = _states(size_of(**given), stage, ranks, recipe)
    rest = memory_bytes - states
    return Finding(rest, f"{size(memory_bytes)} - {size(states)} of states = {size(rest)}")


@also_takes(size_of)
def rest_spread(*, memory_bytes: list[float], stages: list[int], ranks: int, recipe: str = MIXED, **given) -> Finding:
    """Return how far apart the remainders of several stages' figures are, as a share of the largest figure."""
    number = size_of(**given)
    figures = zip(stages, memory_bytes, strict=True)
    rests = {stage: figure - _states(number, stage, ranks, recipe) for stage, figure in figures}
    words = ", ".join(f"stage {stage} {size(rest)}" for stage, rest in rests.items())
    return Finding((max(rests.values()) - min(rests.values())) / max(memory_bytes), f"{recipe} leaves {words}")


@also_takes(size_of)
def offloaded_states_bytes(
    *, stage: int, ranks: int, home: Literal["device", "host"], weights_too: bool = False, **given
) -> Finding:
    """Return a rank's model states with ZeRO-Offload in mixed precision. P2 section 4.1; P3 section 5.1.

    P2: 16-bit weights stay on the device, gradients and optimizer states go to the host. P3 also moves the weights.
    """
    states = papers.states_bytes(size_of(**given), max(stage, 2), ranks)
    device = 0.0 if weights_too else states["weights"]
    of_homes = {"device": device, "host": sum(states.values()) - device}
    return Finding(of_homes[home], ", ".join(f"{size(value)} on the {where}" for where, value in of_homes.items()))


@also_takes(setup_of)
def peak_bytes(*, arm: str, ranks: int, part: Name = None, **given) -> Finding:
    """Return the predicted peak of a rank, with buffers, activations and temporaries; or one component of it."""
    prediction = estimate(setup_of(arm=arm, ranks=ranks, **given))
    held = prediction.at_peak.get(part, 0) if part else prediction.peak_bytes
    terms = ", ".join(f"{name} {size(value)}" for name, value in prediction.at_peak.items())
    return Finding(held, f"{arm} on {number_of(ranks, 'ranks')}, at the peak {size(prediction.peak_bytes)}: {terms}")


@also_takes(setup_of)
def peak_saving(*, arm: str, over: str, ranks: int, **given) -> Finding:
    """Return the share of another arm's predicted peak that this arm saves."""
    less, more = (estimate(setup_of(arm=each, ranks=ranks, **given)).peak_bytes for each in (arm, over))
    return Finding(1 - less / more, f"1 - {size(less)} of {arm} / {size(more)} of {over} = {short(1 - less / more)}")


@also_takes(setup_of)
def activation_bytes(*, micro_batch: int, sequence: int, **given) -> Finding:
    """Return the bytes that a forward pass keeps for the backward pass, counted operation by operation."""
    kept = profile(setup_of(micro_batch=micro_batch, sequence=sequence, **given)).kept
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
    """Return whether the predicted bytes of a rank fit into its device: "fits" or "does not fit".

    With `states_only` it compares the ZeRO paper's model states: if they do not fit, nothing does. Otherwise it
    compares the whole peak of an arm with a GPU's memory, less what the driver and the allocator take.
    `host_memory_bytes` is the host's memory for each rank.
    """
    has = device_bytes(gpu=gpu, memory_bytes=memory_bytes)
    on_host = 0
    if arm is None and not (states_only and stage is not None):
        what = "neither arm nor stage is given" if states_only else "only an arm has more than model states"
        raise Stop(what, "give arm, or stage and states_only = true")
    if states_only:
        if arm:
            stage = arms.load_arm(arm).stage or 0
        needed = _states(
            size_of(model=given.get("model"), parameters=given.get("parameters")), stage or 0, ranks, recipe
        )
        what = f"model states of stage {stage} on {number_of(ranks, 'ranks')}, {recipe}"
    else:
        prediction = estimate(setup_of(arm=arm, ranks=ranks, **given))
        needed = prediction.peak_bytes
        on_host = prediction.host_bytes
        what = f"the peak of {arm} on {number_of(ranks, 'ranks')}"
        has -= reserve_bytes(GPUS[gpu]) if gpu else 0
    if host_memory_bytes is not None and on_host > host_memory_bytes:
        return Finding("does not fit", f"a rank keeps {size(on_host)} on the host, of {size(host_memory_bytes)} for it")
    needed += rest_bytes
    working = f"{what}: {size(needed)}; {gpu or 'the device'} has {size(has)}"
    return Finding("fits" if needed <= has else "does not fit", working)
