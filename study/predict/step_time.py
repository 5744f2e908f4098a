"""The seconds of an optimizer step: a roofline of the GPU, the pace of the host, and what links carry meanwhile."""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from study.core.gpus import GPUS, LINKS
from study.predict import papers
from study.predict.estimate import engine_of, exchanged_layers, exchanged_rows, operations
from study.predict.memory.engine import Engine
from study.predict.pace import Pace, class_of, pace, peak_flops_per_s
from study.predict.setup import QUANTIZED_BYTES, Setup

PHASES = ("forward", "backward")
SEPARATE = ("foreach", "single_tensor")  # AdamWs of several kernels: they move 21 elements where the fused one moves 7
# Kernels and Python before a product with quantized weights, forward and backward, in kernels: counted with
# bitsandbytes 0.50 on two CPU cores (reproductions/laboratories/host_hooks.py); int8 in release 0.43.3.
QUANTIZED_KERNELS = {None: (0, 0), "nf4": (7, 4), "fp4": (7, 4), "nf4_double": (9, 6), "int8": (25, 10)}


class Links(NamedTuple):
    """The connections of ranks to each other and to their hosts. `network` is between nodes."""

    ranks: int
    gpus_per_node: int
    link: str
    network: str
    host: str

    @property
    def are_slow(self) -> bool:  # what PCIe and networks reach differs much between machines
        return self.ranks > 1 and (self.ranks > self.gpus_per_node or self.link.startswith("pcie"))

    def within(self, group: int | None) -> "Links":
        """The links within a group of neighbouring ranks."""
        return self._replace(ranks=min(self.ranks, group or self.ranks))

    def between(self, group: int) -> "Links":
        """The links between ranks that have the same place in their groups."""
        return self._replace(ranks=self.ranks // group, gpus_per_node=max(1, self.gpus_per_node // group))

    def seconds(self, kind: str, size_bytes: float, of: Pace) -> float:
        """Seconds of a collective over so many bytes, in rings as NCCL builds them, or from the host. No latencies."""
        if kind == "host":
            return size_bytes / (LINKS[self.host].bytes_per_s * of.host_link)
        bandwidth = LINKS[self.link].bytes_per_s * (of.pcie if self.link.startswith("pcie") else of.link)
        # A ring goes through every GPU of a node before it leaves it, and there are as many rings as network ports.
        if self.ranks > self.gpus_per_node:
            bandwidth = min(bandwidth, LINKS[self.network].bytes_per_s * self.gpus_per_node * of.network)
        return papers.wire_bytes({kind: size_bytes}, self.ranks) / bandwidth


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs of a training and their links. None: the usual link of such machines."""

    gpu: str
    gpus_per_node: int = 8
    link: str | None = None  # between GPUs of a node
    network: str | None = None  # between nodes
    disk_bytes_per_s: float | None = None  # of a node
    tf32: bool = True  # for products of fp32, if the GPU has it. Our trainer switches it on
    fused_kernels: bool = False  # by torch.compile, Liger or others, instead of transformers' own kernels
    products_8_bits: bool = False  # linear layers multiply in 8 bits, as torchao and Transformer Engine do
    kernel_s: float | None = None  # of its host, if that is known. 0: CUDA graphs or a compiler launch for it

    def links(self, ranks: int) -> Links:
        gpu = GPUS[self.gpu]
        usual = (self.link or gpu.peer_link, self.network or gpu.network, gpu.host_link)
        return Links(ranks, self.gpus_per_node, *usual)


class Product(NamedTuple):
    """`number` products of an m x k with a k x n matrix."""

    number: int
    m: int
    n: int
    k: int
    element_bytes: int | None = None  # of the factors; None: as a setup's products


@dataclass
class Work:
    """The kernels of the forward or the backward pass of a microbatch, with what is computed again."""

    products: Counter[Product] = field(default_factory=Counter)
    attention_flops: float = 0.0  # of fused kernels; written-out attention is products and moved bytes
    moved_bytes: float = 0.0  # read and written by all other kernels
    dequantized_bytes: float = 0.0  # moved to make whole weights of quantized ones: no fusing spares them
    kernels: int = 0  # that the host launches, and Python that takes as long
    moving_kernels: int = 0  # of these, those that fusing replaces


@functools.cache
def work(setup: Setup) -> dict[str, Work]:
    """The work of both passes, as a trace of the model shows it (`trace/tracing.py`)."""
    passes = {"forward": Work(), "backward": Work()}
    for phase, kernels in setup.traced.work.items():
        each = passes[phase]
        for kind, count, numbers in kernels:
            each.kernels += count
            if kind == "product":
                each.products[Product(*numbers)] += count
            elif kind == "attention":
                # A rank that shares rows has all tokens of some heads: more work than some tokens of all heads.
                each.attention_flops += numbers[0] * setup.sequence_ranks
            else:
                each.moved_bytes += numbers[0]
                each.moving_kernels += count
    # Before each product with a quantized weight, kernels make a 16-bit one of it.
    packed = [tensor for tensor in setup.model.tensors if setup.packed_elements(tensor)]
    again = [tensor for tensor in packed if setup.computes_again(tensor.block)]
    in_forward, in_backward = QUANTIZED_KERNELS[setup.quantized]
    made = (("forward", in_forward, packed), ("backward", in_backward, packed), ("backward", in_forward, again))
    for phase, launched, weights in made:
        elements = sum(tensor.elements for tensor in weights)
        # Read: the packed weight and its scales. Written: 2 bytes of an element in 16 bits.
        passes[phase].dequantized_bytes += elements * (QUANTIZED_BYTES[setup.quantized] + 2)
        passes[phase].kernels += launched * len(weights)
    return passes


@dataclass(frozen=True)
class Phase:
    """All forward passes, all backward passes, or the update of a step. Seconds that are busy may overlap."""

    name: str
    gpu_s: float
    host_s: float  # launching kernels, and Python for units of sharded weights
    link_s: float  # between GPUs, and to the host
    seconds: float


@dataclass(frozen=True)
class StepTime:
    seconds: float
    low_s: float  # of an interval that holds 80 % of unknown sources
    high_s: float
    peak_s: float  # no step is faster: its operations at the datasheet's peak, or at a higher one that was measured
    parts: dict[str, float]  # busy seconds by resource; they overlap
    limit: str  # the resource that is busy for the longest time
    phases: tuple[Phase, ...]


def step_time(setup: Setup, machine: Machine, of: Pace | None = None) -> StepTime:
    """The time of an optimizer step on a machine, with its interval. `of`: other constants than the fitted ones."""
    of = of or pace()
    engine = Engine(setup)
    sending_s = _sending(setup, machine, engine, of)
    phases = []
    on_gpu: defaultdict[str, float] = defaultdict(float)
    for name, each in work(setup).items():
        pass_s = _of_gpu(setup, machine, each, of)
        for limit, seconds in pass_s.items():
            on_gpu[limit] += setup.accumulation * seconds
        gpu_s = setup.accumulation * sum(pass_s.values())
        host_s = setup.accumulation * _of_host(setup, machine, engine, name, of)
        link_s = sending_s[name]
        # The slower of GPU and host, or a little more. Sending is added: none was fitted to overlap.
        # With this exponent two equal times make 1.19 times one of them. If one is half as long as the other, both
        # together are 1.015 times the longer one.
        phases.append(Phase(name, gpu_s, host_s, link_s, (gpu_s**4 + host_s**4) ** 0.25 + link_s))
    # --- the update, in which nothing else happens
    update_s = _update(setup, machine, engine, of)
    link_s = sending_s["update"]
    phases.append(Phase("update", update_s.get("update", 0.0), 0.0, link_s, max(update_s.values()) + link_s))
    seconds = sum(phase.seconds for phase in phases)
    others = {"launching": sum(phase.host_s for phase in phases), "link": sum(phase.link_s for phase in phases)}
    others |= update_s
    parts = {name: part_s for name, part_s in (on_gpu | others).items() if part_s}
    busy_s = others | {"compute": sum(on_gpu.values())}
    limit = max(busy_s, key=busy_s.__getitem__)
    # Hosts, disks, PCIe and networks differ more between machines than GPUs do, so their intervals are wider.
    links = machine.links(setup.ranks).between(setup.tensor_ranks)
    by_gpu = limit in ("compute", "update") or (limit == "link" and not links.are_slow)
    factor = of.gpu_interval if by_gpu else of.host_interval
    peak_s = _peak_s(setup, machine)
    return StepTime(seconds, max(peak_s, seconds / factor), seconds * factor, peak_s, parts, limit, tuple(phases))


def _peak_s(setup: Setup, machine: Machine) -> float:
    # Without what a causal mask hides: half of the scores.
    hidden = 0.5 * setup.accumulation if setup.model.look.kind == "decoder" else 0.0
    needed = operations(setup) - hidden * sum(each.attention_flops for each in work(setup).values())
    faster = 2 if machine.products_8_bits else 1
    is_whole = setup.recipe.product_bytes == 4 and not setup.quantized  # products of quantized weights are in 16 bits
    return needed / faster / peak_flops_per_s(machine.gpu, is_whole, machine.tf32)


def _of_gpu(setup: Setup, machine: Machine, each: Work, of: Pace) -> dict[str, float]:
    gpu = GPUS[machine.gpu]
    moving_bytes_per_s = gpu.memory_bytes_per_s * of.moving
    products_s = 0.0
    for (number, m, n, k, element_bytes), count in each.products.items():
        element_bytes = element_bytes or setup.recipe.product_bytes
        flops_per_s = gpu.flops_per_s(element_bytes == 4, machine.tf32)
        flops_per_s *= of.products[class_of("products", machine.gpu)]
        if number == 1:  # of a linear layer, and not one for each row and head
            flops_per_s *= setup.tokens / (setup.tokens + of.few_tokens)
            if machine.products_8_bits:
                flops_per_s *= of.products_8_bits
        # Products of small matrices, as in a written-out attention, are limited by memory: both factors are read, and
        # the product is written.
        bytes_s = (m * k + k * n + m * n) * element_bytes / moving_bytes_per_s
        products_s += count * number * max(2 * m * n * k / flops_per_s, bytes_s)
    attention_flops_per_s = gpu.flops_per_s(setup.recipe.product_bytes == 4, machine.tf32)
    attention_flops_per_s *= of.attention[class_of("attention", machine.gpu)]
    moved_bytes = each.moved_bytes * (of.fused_traffic if machine.fused_kernels else 1)
    return {
        "products": products_s,
        "attention": each.attention_flops / attention_flops_per_s,
        "memory traffic": (moved_bytes + each.dequantized_bytes) / moving_bytes_per_s,
    }


def _of_host(setup: Setup, machine: Machine, engine: Engine, phase: str, of: Pace) -> float:
    """The seconds in which the host launches a pass, and Python gathers units of sharded weights."""
    units = []
    if setup.fsdp:  # a layer is a unit
        units = list({tensor.block for tensor in setup.tensors if tensor.block.startswith("layer.")})
    elif engine.stage == 3:  # a module with a large tensor
        large = [tensor for tensor in setup.tensors if tensor.elements > engine.limits.persistent]
        units = [block for block, _ in {(tensor.block, tensor.name.rpartition(".")[0]) for tensor in large}]
        if phase == "backward":  # what is computed again is gathered again
            units += [block for block in units if setup.computes_again(block)]
    each = work(setup)[phase]
    # One constant for two libraries: on two CPU cores a module of stage 3 took as long as 9 to 36 kernels, and a unit
    # of FSDP as 66 to 154 (pace.toml).
    kernels = each.kernels + of.unit_kernels * len(units)
    if machine.fused_kernels:
        # The share of bytes that fusing leaves stands for the share of launches: that has no constant of its own.
        kernels -= (1 - of.fused_traffic) * each.moving_kernels
    return kernels * (of.kernel_s if machine.kernel_s is None else machine.kernel_s)


# What a phase sends in all passes of a step: a kind of collective, or "host"; its bytes; and over which links.
Sent = tuple[str, str, float, Links]


def _sending(setup: Setup, machine: Machine, engine: Engine, of: Pace) -> dict[str, float]:
    links = machine.links(setup.ranks)
    alike = links.between(setup.tensor_ranks)  # ranks with the same part of each layer
    sent = [*_gathered(setup, alike, engine), *_reduced(setup, alike, engine)]
    # Ranks that share rows or layers wait for each other in both passes.
    together = links.within(setup.sequence_ranks * setup.tensor_ranks)
    for kind, moved_bytes in (exchanged_rows(setup) + exchanged_layers(setup)).items():
        sent += [(phase, kind, moved_bytes / len(PHASES), together) for phase in PHASES]
    seconds: defaultdict[str, float] = defaultdict(float)
    for phase, kind, size_bytes, over in sent:
        seconds[phase] += over.seconds(kind, size_bytes, of)
    return seconds


def _gathered(setup: Setup, links: Links, engine: Engine) -> Iterator[Sent]:
    """The weights, if ranks divide them."""
    if setup.fsdp:
        again = 1.0 if setup.fsdp == "full_shard" else 0.0
    elif engine.stage == 3:  # the backward pass gathers what was released
        again = min(1.0, engine.refetched / max(1, (engine.part + engine.frozen_part) * engine.ranks))
    else:
        return
    weights = setup.accumulation * engine.all_elements * setup.weight_bytes
    # With a second copy of what was released (hpZ), from few ranks.
    gathered = (("forward", 1.0, setup.group), ("backward", again, setup.second_partition or setup.group))
    for phase, share, group in gathered:
        yield phase, "all_gather", share * weights, links.within(group)
        if "weights" in engine_of(setup).on_host:
            yield phase, "host", share * weights / setup.state_ranks, links


def _reduced(setup: Setup, links: Links, engine: Engine) -> Iterator[Sent]:
    """The gradients, and the new weights, as read in FSDP, DDP and DeepSpeed 0.19.8."""
    # DDP, stage 1 and Accelerate's FSDP reduce the sum of all passes.
    reduces_each_pass = setup.fsdp_by == "torch" if setup.fsdp else engine.stage > 1
    reductions = setup.accumulation if reduces_each_pass else 1
    kind = "reduce_scatter" if setup.fsdp or engine.stage == 3 else engine.reduce_kind
    gradients = reductions * setup.model.trained / setup.tensor_ranks * setup.reduced_bytes
    # FSDP's groups sum their parts with those of the other groups. A single group has no other.
    group = setup.group if setup.fsdp and setup.group else links.ranks
    yield "backward", kind, gradients, links.within(group)
    yield "backward", "all_reduce", gradients / group, links.between(group)
    trained_bytes = setup.model.trained * setup.weight_bytes
    on_host = engine_of(setup).on_host
    if "moments" in on_host:
        # P2 counts 2 bytes of a parameter down and 2 up in a step, the least that is possible. A sum that is fetched,
        # added to and stored again exceeds it (async_accumulate_grad_in_cpu_via_gpu).
        sums = min(2, setup.accumulation)  # with several passes, the sum so far is fetched first
        yield "backward", "host", reductions * sums * trained_bytes / setup.state_ranks, links
        if "weights" not in on_host:
            yield "update", "host", trained_bytes / setup.sharing_ranks, links
    if engine.stage in (1, 2):
        yield "update", "all_gather", trained_bytes, links.within(setup.group)


def _update(setup: Setup, machine: Machine, engine: Engine, of: Pace) -> dict[str, float]:
    """The seconds of the update on the GPU; or on a host, of all its ranks, while a disk feeds it."""
    owned: float = setup.model.trained
    if setup.fsdp or engine.stage:
        owned /= setup.sharing_ranks
    if "moments" in engine_of(setup).on_host:
        local = min(setup.ranks, machine.gpus_per_node)
        # The ranks of a node share its processors, so their updates add up. The constant is that of one host, a DGX-2's
        # (P2 table 4), where PyTorch's Adam on the host took 5 to 6 times as long.
        parts = {"update on host": owned * local / 1e9 * papers.CPU_ADAM_S_PER_BILLION}
        if machine.disk_bytes_per_s:  # what it has is read and written
            parts["disk"] = 2 * local * engine.swapped_bytes / machine.disk_bytes_per_s
        return parts
    seconds = update_bytes(setup) * owned / GPUS[machine.gpu].memory_bytes_per_s
    if setup.optimizer in SEPARATE:
        seconds /= of.separate_update
    return {"update": seconds}


def update_bytes(setup: Setup) -> float:
    """Bytes for each parameter in an update: AdamW's, less what smaller moments save. Muon's products do not count."""
    adam, others = (papers.states_of_a_parameter(setup.precision, name)[2] for name in ("fused", setup.optimizer))
    recipe = setup.recipe
    # The gradient is read for its norm and for Adam; weights and two moments are read and written; then the old
    # gradient is set to zero. For a master copy the gradient is first copied to fp32, and the new weight is rounded.
    moved_bytes = 8 * recipe.moment_bytes + recipe.gradient_bytes
    if recipe.master_bytes:
        moved_bytes += recipe.gradient_bytes + recipe.master_bytes + recipe.weight_bytes
    if setup.optimizer in SEPARATE:
        moved_bytes += 14 * recipe.moment_bytes
    return moved_bytes - 2 * (adam - others)  # twice, because a state is read and written
