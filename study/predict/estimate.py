"""Predicts the bytes that a rank holds and moves in a step."""

from collections import Counter
from dataclasses import dataclass

from study.predict.engines.base import Engine, Instant
from study.predict.exchanges import exchanged_rows
from study.predict.trace.tape import Profile
from study.predict.trace.transformer import Transformer

HOST_PROCESS_BYTES = 4e9  # assumed, for each rank with a GPU: Python, PyTorch, CUDA's host side, a data loader
PUBLISHED_BYTES = 2  # of an element in published files


@dataclass(frozen=True)
class Estimate:
    """Memory by component and traffic of the first rank in one optimizer step. Sizes are in bytes."""

    at_peak: dict[str, int]
    after_step: dict[str, int]
    peak_bytes: int
    peak_when: str  # "backward": in either pass, or between them; or "update"
    on_host: dict[str, int]  # on a GPU: what is offloaded. pinned: what pinning rounds up
    host_bytes: int  # all of it
    swapped_bytes: int  # on a disk: read and written once in a step
    traffic: dict[str, int]


def estimate_of(engine: Engine) -> Estimate:
    training = engine.training
    states, instants, on_host = memory(engine, training.profile)
    states["other"] = training.traced.inputs_bytes + (0 if training.placement.on_gpu else training.data_bytes)
    peak_when, most = max(instants, key=lambda instant: sum(map(int, instant[1].values())))
    at_peak = _summed(states, most)
    return Estimate(
        at_peak=at_peak,
        after_step=_summed(states, engine.after_step),
        peak_bytes=sum(at_peak.values()),
        peak_when=peak_when,
        on_host=on_host,
        host_bytes=sum(on_host.values()),
        swapped_bytes=engine.swapped_bytes,
        traffic=dict(Counter(engine.traffic) + exchanged_rows(training)),
    )


def memory(engine: Engine, profile: Profile) -> tuple[dict[str, int], list[Instant], dict[str, int]]:
    """What a rank holds all the time, without inputs and data; what at each moment; and what on the host."""
    training = engine.training
    states = {"constants": training.model.look.buffers_bytes} | engine.standing
    instants = [*engine.instants(profile)]
    if not (training.placement.on_gpu and engine.on_host):  # without a GPU, what is offloaded is in the same memory
        return states, instants, {}
    offloaded = {role: states.pop(role, 0) for role in engine.on_host}
    return states, instants, _summed(offloaded, engine.beside_on_host)


def _summed(states: dict[str, int], now: dict) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for role, size in [*states.items(), *now.items()]:
        sizes[role.removeprefix("host_")] += int(size)
    return {role: size for role, size in sizes.items() if size}


def loading_bytes(model: Transformer, ranks: int, weight_bytes: int) -> float:
    """What the ranks of a node with GPUs need of the host at most while each loads the model."""
    # A tensor of the files' own type stays in the mapped file, in the page cache that all ranks share. One of another
    # type is a copy of each rank (transformers 5.23: the load observatory, up to commit 286c4f30).
    copied_bytes = 0 if weight_bytes == PUBLISHED_BYTES else weight_bytes
    return ranks * (HOST_PROCESS_BYTES + model.parameters * copied_bytes)
