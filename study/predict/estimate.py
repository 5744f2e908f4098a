"""Predicts the bytes that a rank holds and moves, and its operations in a step, from a model and an arm's config."""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from study.predict.memory import deepspeed_memory, fsdp_memory, sequence, tensor
from study.predict.memory.deepspeed_memory import NORM_BYTES
from study.predict.memory.engine import Engine, padded
from study.predict.memory.fsdp_memory import Sharding
from study.predict.memory.kept import by_library
from study.predict.memory.moments import held_bytes
from study.predict.memory.profile import Profile
from study.predict.setup import Setup

SWAPPED_FROM_BYTES = 2**20  # smaller parts stay in memory (swap_tensor/utils.py, MIN_AIO_BYTES)
SWAP_BUFFERS = 4  # offload_config.py, buffer_count: master, two moments and the gradient
OPTIMIZER_ROLES = ("master", "moments", "swap", "host_gradients", "host_staging")


@dataclass(frozen=True)
class Estimate:
    """Memory by component, traffic and operations of the first rank in one optimizer step. Sizes are in bytes."""

    parameters: int
    at_peak: dict[str, int]
    after_step: dict[str, int]
    peak_bytes: int
    peak_when: str
    host_bytes: int  # on a GPU: what is offloaded
    nvme_bytes: dict[str, int]
    traffic: dict[str, int]
    flops_per_rank_and_step: int


@functools.cache
def estimate(setup: Setup) -> Estimate:
    """Return the prediction for a setup. It is cached, so callers must not change it.

    On a CPU, offloaded states and the data set share the memory with everything else and count at the peak. On a GPU,
    offloaded states are in `host_bytes`.
    """
    engine = Engine(setup)
    states, times, host_bytes = memory(setup, profile(setup))
    states["other"] = (0 if setup.on_gpu else setup.data_bytes) + inputs_bytes(setup)
    peak_when, most = max(times, key=lambda moment: sum(map(int, moment[1].values())))
    at_peak = _summed(states, most)
    if setup.fsdp:
        sharding = Sharding(setup)
        moved = fsdp_memory.traffic(sharding)
        # FSDP1 keeps the gradients until the next forward pass begins.
        after = {} if sharding.by_accelerate else {"gradients": sharding.gradients_bytes}
    else:
        moved = traffic(engine)
        after = {"gathered_weights": engine.stay_bytes} if engine.stage == 3 else {}
        if engine.stage == 0 and engine.ranks > 1:
            after = {"gradients": engine.elements * engine.weight_bytes}
    return Estimate(
        parameters=setup.model.parameters,
        at_peak=at_peak,
        after_step=_summed(states, after),
        peak_bytes=sum(at_peak.values()),
        peak_when=peak_when,
        host_bytes=host_bytes,
        nvme_bytes=disk_bytes(engine),
        traffic=dict(Counter(moved) + exchanged(setup)),
        flops_per_rank_and_step=operations(setup),
    )


def memory(setup: Setup, kept: Profile) -> tuple[dict[str, int], list[tuple[str, dict]], int]:
    """Return what a rank holds all the time, what it holds besides at each moment, and its bytes on the host.

    Inputs and data are not included. `kept` may have other numbers that add up, such as lines.
    """
    states = {"constants": setup.model.look.buffers_bytes}
    if setup.fsdp:
        sharding = Sharding(setup)
        states |= fsdp_memory.standing(sharding)
        times = [*fsdp_memory.moments(sharding, kept)]
        away = ["weights", *OPTIMIZER_ROLES] if setup.fsdp_offload else []
        more_bytes = sharding.gradients_bytes
    else:
        engine = Engine(setup)
        states |= standing(engine)
        times = [*moments(engine, kept)]
        away = [*OPTIMIZER_ROLES] if engine.offloads else []
        away += ["weights"] if engine.weights_home != "none" else []
        more_bytes = pinned_padding(engine)
    host_bytes = sum(states.pop(role, 0) for role in away) if setup.on_gpu else 0
    return states, times, host_bytes and host_bytes + more_bytes


def profile(setup: Setup) -> Profile:
    """Return the activations of a microbatch, as a trace of the model shows them."""
    if setup.tensor_ranks > 1:
        one = replace(setup, model=tensor.of_a_rank(setup.model, setup.tensor_ranks), tensor_ranks=1)
        seen = profile(one)  # with the gradient of the rank's part of the output matrix
        gradients = (each._replace(tensor=tensor.part(each.tensor, setup.tensor_ranks)) for each in seen.gradients)
        return replace(seen, gradients=tuple(gradients))
    return by_library(setup, setup.model.traced(setup.trace_options, setup.micro_batch).profile)


def inputs_bytes(setup: Setup) -> int:
    """Return the bytes of a microbatch's inputs: token ids, masks, images, sound."""
    return setup.model.traced(setup.trace_options, setup.micro_batch).inputs_bytes


def exchanged(setup: Setup) -> Counter[str]:
    """Return the bytes by collective of ranks that share rows or divide layers."""
    return Counter(sequence.exchanged(setup)) + Counter(tensor.exchanged(setup))


def operations(setup: Setup) -> int:
    """Return the operations of a rank's matrix products in a step, including those that checkpointing repeats.

    Ranks that share rows or layers share the operations, too. Of shared rows, each rank computes all tokens of some
    heads in attention, and some of the tokens everywhere else.
    """
    if setup.sequence_ranks > 1 or setup.tensor_ranks > 1:
        whole = replace(setup, sequence_ranks=1, tensor_ranks=1)
        return operations(whole) // (setup.sequence_ranks * setup.tensor_ranks)
    return setup.model.traced(setup.trace_options, setup.micro_batch).flops * setup.accumulation


def _summed(states: dict, now: dict) -> dict[str, int]:
    """Return the sum of both, by the component names of records, without empty components."""
    sizes: Counter[str] = Counter()
    for role, size in [*states.items(), *now.items()]:
        sizes[role.removeprefix("host_")] += int(size)
    return {role: size for role, size in sizes.items() if size}


def standing(engine: Engine) -> dict[str, int]:
    """Return what stays during the whole step. `host_`: what an offloading engine keeps with the optimizer states."""
    w = engine.weight_bytes
    b = engine.state_bytes
    part = engine.part
    trained = engine.elements
    frozen = engine.frozen_bytes
    moments_bytes = held_bytes(engine.setup.optimizer, engine.pieces, b)
    if engine.stage == 0:
        return {"weights": trained * w + frozen, "master": b * trained * engine.master, "moments": moments_bytes}
    # DeepSpeed keeps a master copy even of fp32 weights: 4 / N bytes a parameter that the papers do not count. With
    # bf16_master_weights_and_grads it keeps a copy in bf16.
    states = {"master": b * part, "moments": moments_bytes}
    if engine.stage < 3:
        states["weights"] = padded(trained, engine.ranks) * w + frozen
        if engine.offloads:
            largest = max(tensor.elements for tensor in engine.tensors)
            states |= {
                "host_staging": (part + largest) * w,  # updated weights on their way up; a gradient on its way down
                "staging": largest * w,
                "host_gradients": b * part,
            }
            # whole tensors, collected on the host (async_accumulate_grad_in_cpu_via_gpu)
            if engine.accumulation > 1 and engine.stage == 2:
                states["host_gradients"] += engine.owned_whole_bytes
        return states
    gradients = "host_gradients" if engine.offloads else "gradients"
    bucket_bytes = engine.bucket_elements * engine.reduced_bytes
    states |= {"weights": part * w + frozen, gradients: part * w, "buckets": bucket_bytes}
    if engine.optimizer_home == "cpu":
        states["host_gradients"] += b * part
    if engine.optimizer_home == "nvme" and 4 * part >= SWAPPED_FROM_BYTES:
        buffer = ceil(4 * max(engine.sub_groups) / 1024) * 1024
        states |= {"master": 0, "moments": 0, "swap": SWAP_BUFFERS * buffer}
    return states


def moments(engine: Engine, kept: Profile) -> Iterator[tuple[str, dict]]:
    """Yield the moments of a step's last backward pass and of its update, each with what is held besides the states."""
    yield from (("backward", now) for now in deepspeed_memory.backward(engine, kept))
    yield from (("update", now) for now in _update(engine))


def _update(engine: Engine) -> Iterator[dict]:
    w = engine.weight_bytes
    b = engine.state_bytes
    part = engine.part
    copied = 0 if w == b else b  # of an element of a gradient, in the type of the states
    if engine.stage == 0:
        # With a master copy there are also the gradients in fp32. DeepSpeed then flattens them (fused_optimizer.py).
        in_fp32 = 4 * engine.elements * engine.master
        flat = in_fp32 if engine.setup.deepspeed else 0
        gradients = deepspeed_memory.kept_gradients(engine) * w + in_fp32
        yield {"gradients": gradients, "temporaries": max(engine.made_bytes, flat)}
    elif engine.offloads:
        return  # norms are taken during the backward pass, and the update uses the standing buffers
    elif engine.stage == 3:
        stay = engine.second_copy(engine.all_elements)  # all are released first (_partition_all_parameters)
        yield stay | {"temporaries": NORM_BYTES * max(ceil(t.elements / engine.ranks) for t in engine.tensors)}
        group = max(engine.sub_groups)  # gradients are flattened, then copied to fp32, one group at a time
        yield stay | {"temporaries": group * (w + copied)}  # _prepare_fp32_grad_for_sub_group
        created_bytes = engine.made_bytes * group // part
        yield stay | {"temporaries": b * group + created_bytes}  # _release_sub_group frees them
    else:
        whole = engine.owned_whole_bytes
        # Outside autograd, records count temporaries as activations.
        yield {"gradients": whole, "activations": NORM_BYTES * max(engine.owned.values())}
        flat = part * w if len(engine.owned) > 1 else 0
        yield {"gradients": whole, "activations": flat + copied * part}
        yield {"activations": b * part + engine.made_bytes}  # the whole gradients are freed by now


def pinned_padding(engine: Engine) -> int:
    """Return the bytes that pinned host memory takes beyond its content, on a GPU. Read in the sources, not measured.

    PyTorch rounds each piece up to a power of two and returns none of it (2.11, CachingHostAllocator.h; newer versions
    have an option). Stage 3 has all weights in one piece (stage3.py, _create_param_groups_fp16_flat_cpu_memory).
    """
    w = engine.weight_bytes
    part = engine.part
    if engine.stage < 3:  # master, gradients, updated weights, a gradient on its way
        return sum(map(_rounding, [4 * part, 4 * part, part * w, max(t.elements for t in engine.tensors) * w]))
    pieces = [part * w] * (1 if engine.weights_home == "none" else 2)
    if engine.optimizer_home == "cpu":
        pieces += [4 * size for size in engine.sub_groups]
    parts = [ceil(tensor.elements / engine.ranks) * w for tensor in engine.tensors] if engine.pins_parts else []
    return sum(parts) + sum(map(_rounding, [*pieces, *parts]))


def _rounding(size: int) -> int:
    return (1 << (size - 1).bit_length()) - size if size else 0


def disk_bytes(engine: Engine) -> dict[str, int]:
    """Return the bytes held on disk, and read and written in a step: master and two moments, but no gradients."""
    part = 4 * engine.part
    swapped_bytes = 3 * part if engine.optimizer_home == "nvme" and part >= SWAPPED_FROM_BYTES else 0
    return dict.fromkeys(("held", "read_per_step", "written_per_step"), swapped_bytes)


def traffic(engine: Engine) -> dict[str, int]:
    """Return the bytes by collective of an optimizer step. As in records, each collective counts its whole tensor."""
    if engine.ranks == 1 and engine.stage == 0:
        return {}
    w = engine.weight_bytes
    passes = engine.accumulation
    if engine.stage == 0:
        return {"all_reduce": engine.elements * w}
    if engine.stage < 3:
        reduced = {engine.reduce_kind: engine.elements * engine.reduced_bytes * (passes if engine.stage == 2 else 1)}
        if engine.setup.tensor_ranks > 1 and engine.ranks == 1:  # it sums its gradients over itself alone
            return reduced
        return reduced | {"all_gather": padded(engine.elements, engine.ranks) * w}
    whole = engine.part * engine.ranks
    reduced = {"reduce_scatter": whole * engine.reduced_bytes * passes}
    if engine.ranks == 1:
        return reduced
    # ZeRO++ sends weights in 8 bits and gradients in 4. Its scales are left out.
    if engine.zero["zero_quantized_gradients"]:
        reduced = {"all_to_all": whole * passes // 2}
    stay = sum(ceil(t.elements / engine.ranks) * engine.ranks for t in engine.persistent)
    whole += engine.frozen_part * engine.ranks
    gathered = (whole - stay + engine.refetched) * passes + stay
    return reduced | {"all_gather": gathered * (1 if engine.zero["zero_quantized_weights"] else w)}
