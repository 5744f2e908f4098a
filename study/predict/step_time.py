"""The seconds of an optimizer step: a roofline of the GPU, the pace of the host, and what links carry meanwhile.

From top to bottom: the constants, the machine, the work of a pass as a trace of the model shows it, and the step:
seconds of the GPU and the host, bytes between ranks, the update.
How far off it is: `python -m study.predict.outside.scores`. How it was fitted: `reproductions/laboratories/fit.py`.
"""

import functools
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from study.core.gpus import GPUS, LINKS
from study.predict import papers
from study.predict.estimate import exchanged, operations
from study.predict.memory.engine import Engine
from study.predict.setup import QUANTIZED_BYTES, Setup
from study.predict.trace.transformer import of_a_rank

FILE = Path(__file__).with_name("pace.toml")
ON_GPU = ("products", "attention", "memory traffic")
PHASES = ("forward", "backward")
# Bytes of memory traffic for each parameter that a GPU updates: the gradient is read for its norm and for Adam, weights
# and two moments are read and written. With bf16_cast the gradient is first copied to fp32 (6), the new weight is
# rounded (2), and the old gradient is set to zero (2).
UPDATE_BYTES = {"fp32": 36, "bf16": 36, "fp16": 36, "bf16_cast": 42, "bf16_pure": 18}
SEPARATE = ("foreach", "single_tensor")  # AdamWs of several kernels: they move 21 elements where the fused one moves 7
# Kernels and Python before a product with quantized weights, forward and backward, in kernels: counted with
# bitsandbytes 0.50 on two CPU cores (reproductions/laboratories/host_hooks.py); int8 in release 0.43.3.
QUANTIZED_KERNELS = {"nf4": (7, 4), "fp4": (7, 4), "nf4_double": (9, 6), "int8": (25, 10)}


@dataclass(frozen=True)
class Pace:
    """The constants that no datasheet has. `pace.toml` has the unit, the origin and the interval of each."""

    products: dict[str, float]  # by class of GPU: the share of its peak that large products reach
    attention: dict[str, float]  # by class of GPU: the same of fused attention
    few_tokens: float  # products of as many tokens run at half of that
    products_8_bits: float  # how much faster products in 8 bits are, with their casts
    moving: float  # the share of the memory's bandwidth in kernels that only move bytes
    fused_traffic: float  # the share of these bytes that is left if norms, activations and rotations are fused
    kernel_s: float  # of the host, to launch a kernel
    unit_kernels: float  # the host's work to gather, release or reduce a unit of sharded states, in kernels
    link: float  # the share of the datasheet's bandwidth that collectives reach over NVLink
    pcie: float
    network: float
    host_link: float
    separate_update: float  # the share of the memory's bandwidth in AdamWs of several kernels
    gpu_interval: float  # divides and multiplies a step that the GPU decides
    host_interval: float  # the same if the host, PCIe or a network decides


@functools.cache
def constants() -> dict:
    return tomllib.loads(FILE.read_text())


@functools.cache
def pace() -> Pace:
    values = {kind: {name: each["value"] for name, each in entries.items()} for kind, entries in constants().items()}
    return Pace(products=values["products"], attention=values["attention"], **values["constant"])


@functools.cache
def class_of(kind: str, gpu: str) -> str:
    """The class of a GPU in `products` or `attention`; the last class has all GPUs that no other names."""
    classes = constants()[kind]
    return next((name for name, each in classes.items() if gpu in each["gpus"]), [*classes][-1])


def peak_flops_per_s(gpu: str, whole: bool, tf32: bool = True) -> float:
    """The datasheet's speed of products, or a higher one that was measured. `whole`: in fp32, or TF32."""
    reached = pace().products[class_of("products", gpu)]
    return GPUS[gpu].flops_per_s(whole, tf32) * max(1.0, reached)


class Links(NamedTuple):
    """The connections of ranks that send to each other. `network` is between nodes."""

    ranks: int
    gpus_per_node: int
    link: str
    network: str

    @property
    def are_slow(self) -> bool:
        """Whether PCIe or a network carries the data. What these reach differs much between machines."""
        return self.ranks > 1 and (self.ranks > self.gpus_per_node or self.link.startswith("pcie"))

    def within(self, group: int | None) -> "Links":
        """The links within a group of neighbouring ranks."""
        return self._replace(ranks=min(self.ranks, group)) if group else self

    def between(self, group: int) -> "Links":
        """The links between ranks that have the same place in their groups."""
        return self._replace(ranks=self.ranks // group, gpus_per_node=max(1, self.gpus_per_node // group))

    def seconds(self, kind: str, size_bytes: float, of: Pace) -> float:
        """Seconds of a collective over so many bytes, in rings as NCCL builds them, without latencies.

        A ring goes through every GPU of a node before it leaves the node. There are as many rings as network ports, so
        all ports of a node carry the data. An all-reduce goes round twice.
        """
        if self.ranks == 1:
            return 0.0
        bandwidth = LINKS[self.link].bytes_per_s * (of.pcie if self.link.startswith("pcie") else of.link)
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
        return Links(ranks, self.gpus_per_node, self.link or gpu.peer_link, self.network or gpu.network)


class Product(NamedTuple):
    """`number` products of an m x k with a k x n matrix."""

    number: int
    m: int
    n: int
    k: int
    element_bytes: int | None = None  # of the factors; None: as a setup's products

    @property
    def flops(self) -> int:
        return 2 * self.number * self.m * self.n * self.k

    @property
    def elements(self) -> int:
        """Elements of both factors and of the product."""
        return self.number * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclass
class Work:
    """The kernels of the forward or the backward pass of a microbatch, with what is computed again."""

    products: Counter[Product]
    attention_flops: float = 0.0  # of fused kernels; written-out attention is products and moved bytes
    moved_bytes: float = 0.0  # read and written by all other kernels
    dequantized_bytes: float = 0.0  # moved to make whole weights of quantized ones: no fusing spares them
    kernels: int = 0  # that the host launches, and Python that takes as long
    moving_kernels: int = 0  # of these, those that fusing replaces


@functools.cache
def work(setup: Setup) -> dict[str, Work]:
    """The work of both passes, as a trace of the model shows it (`trace/tracing.py`)."""
    model = setup.model
    if setup.tensor_ranks > 1:
        model = of_a_rank(model, setup.tensor_ranks)
    passes = {phase: Work(Counter()) for phase in PHASES}
    for phase, kernels in model.traced(setup.trace_options, setup.micro_batch).work.items():
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
    if setup.quantized is None:
        return passes
    # Before each product with a quantized weight, kernels make a 16-bit one of it.
    packed = [tensor for tensor in setup.model.tensors if setup.packed_elements(tensor)]
    again = [tensor for tensor in packed if setup.computes_again(tensor.block)]
    in_forward, in_backward = QUANTIZED_KERNELS[setup.quantized]
    for phase, launched, weights in (
        ("forward", in_forward, packed),
        ("backward", in_backward, packed),
        ("backward", in_forward, again),
    ):
        elements = sum(tensor.elements for tensor in weights)
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
    """A predicted step: its seconds, their interval, and its parts."""

    seconds: float
    low_s: float  # of an interval that holds 80 % of unknown sources
    high_s: float
    peak_s: float  # no step is faster: its operations at the datasheet's peak, or at a higher one that was measured
    parts: dict[str, float]  # busy seconds by resource; they overlap
    limit: str  # the resource that is busy for the longest time
    phases: tuple[Phase, ...]


def step_time(setup: Setup, machine: Machine, of: Pace | None = None) -> StepTime:
    """Predict a step of a setup on a machine."""
    of = of or pace()
    step = _Step(setup, machine, of)
    phases = (step.forward(), step.backward(), step.update())
    seconds = sum(each.seconds for each in phases)
    passes = [step.seconds_of(each) for each in step.work.values()]
    on_gpu = {name: setup.accumulation * sum(each[name] for each in passes) for name in ON_GPU}
    others = {"launching": sum(each.host_s for each in phases), "link": sum(each.link_s for each in phases)}
    others |= step.update_parts
    parts = {name: part_s for name, part_s in (on_gpu | others).items() if part_s}
    busy_s = others | {"compute": sum(on_gpu.values())}
    limit = max(busy_s, key=busy_s.__getitem__)
    # Hosts, disks, PCIe and networks differ more between machines than GPUs do, so their intervals are wider.
    factor = of.host_interval
    if limit in ("compute", "update") or (limit == "link" and not step.links.are_slow):
        factor = of.gpu_interval
    # --- no step is faster than its operations at the peak, without what a causal mask hides: half of the scores
    needed: float = operations(setup)
    if setup.model.look.kind == "decoder":
        needed -= setup.accumulation * sum(each.attention_flops for each in step.work.values()) / 2
    peak_s = needed / peak_flops_per_s(machine.gpu, not setup.has_half_products, machine.tf32)
    if machine.products_8_bits:
        peak_s /= 2
    return StepTime(seconds, max(peak_s, seconds / factor), seconds * factor, peak_s, parts, limit, phases)


class _Step:
    """The passes and the update of a step. The order of collectives was read in FSDP, DDP and DeepSpeed 0.19.8."""

    def __init__(self, setup: Setup, machine: Machine, of: Pace):
        engine = Engine(setup)
        self.setup, self.machine, self.of, self.engine = setup, machine, of, engine
        self.gpu = GPUS[machine.gpu]
        self.work = work(setup)
        self.links = machine.links(setup.ranks).between(setup.tensor_ranks)  # of ranks with the same part of each layer
        self.stage = engine.stage
        self.elements = sum(tensor.elements for tensor in setup.tensors)
        self.reduce_kind = engine.reduce_kind
        self.reduces_each_pass = engine.stage > 1
        self.group: int | None = None  # of ranks that reduce gradients, before groups do
        self.backward_group = setup.second_partition  # of ranks that gather weights for the backward pass: with hpZ few
        self.gathers_again = 1.0  # the share of the weights that the backward pass gathers again
        if engine.stage == 3:
            self.gathers_again = min(1.0, engine.refetched / max(1, (engine.part + engine.frozen_part) * engine.ranks))
        if setup.fsdp:
            self.stage = 3  # weights are gathered for each pass
            self.reduces_each_pass = setup.fsdp_by == "torch"
            self.group = self.backward_group = setup.group
            self.gathers_again = {"full_shard": 1.0, "shard_grad_op": 0.0}[setup.fsdp]
        if self.stage == 3:
            self.reduce_kind = "reduce_scatter"
        self.divided_by = 1  # what hosts hold
        self.owned: float = setup.model.trained  # parameters that a rank updates
        if self.stage:
            self.divided_by = setup.state_ranks
            self.owned /= setup.sharing_ranks
        self.updates_on_host = engine.offloads or setup.fsdp_offload
        self.weights_on_host = engine.weights_home != "none" or setup.fsdp_offload

    def forward(self) -> Phase:
        return self.phase("forward", self.setup.accumulation * self.gather_s(1.0, self.setup.group))

    def backward(self) -> Phase:
        reductions = 1
        if self.reduces_each_pass:
            reductions = self.setup.accumulation
        gather_s = self.gather_s(self.gathers_again, self.backward_group)
        return self.phase("backward", self.setup.accumulation * gather_s + reductions * self.reduce_s())

    def phase(self, name: str, link_s: float) -> Phase:
        """The slower of host and GPU, or a little more. Sending is added: none was fitted to overlap."""
        passes = self.setup.accumulation
        gpu_s = passes * sum(self.seconds_of(self.work[name]).values())
        host_s = passes * self.host_s(name)
        link_s += passes * self.exchange_s()
        return Phase(name, gpu_s, host_s, link_s, (gpu_s**4 + host_s**4) ** 0.25 + link_s)

    def seconds_of(self, each: Work) -> dict[str, float]:
        """The seconds of the GPU for a pass, by what limits them."""
        moved = each.moved_bytes
        if self.machine.fused_kernels:
            moved *= self.of.fused_traffic
        attention = self.gpu.flops_per_s(self.setup.precision == "fp32", self.machine.tf32)
        attention *= self.of.attention[class_of("attention", self.machine.gpu)]
        return {
            "products": sum(count * self.product_s(product) for product, count in each.products.items()),
            "attention": each.attention_flops / attention,
            "memory traffic": (moved + each.dequantized_bytes) / self.gpu.memory_bytes_per_s / self.of.moving,
        }

    def product_s(self, product: Product) -> float:
        """Products of small matrices, as in a written-out attention, are limited by memory."""
        element_bytes = product.element_bytes or self.setup.product_bytes
        flops_per_s = self.gpu.flops_per_s(element_bytes == 4, self.machine.tf32)
        flops_per_s *= self.of.products[class_of("products", self.machine.gpu)]
        if product.number == 1:  # a linear layer, and not a product for each row and head
            flops_per_s *= self.setup.tokens / (self.setup.tokens + self.of.few_tokens)
            if self.machine.products_8_bits:
                flops_per_s *= self.of.products_8_bits
        bytes_s = product.elements * element_bytes / self.gpu.memory_bytes_per_s / self.of.moving
        return max(product.flops / flops_per_s, bytes_s)

    def host_s(self, phase: str) -> float:
        """The seconds in which Python and the driver launch a pass."""
        kernel_s = self.machine.kernel_s
        if kernel_s is None:
            kernel_s = self.of.kernel_s
        kernels: float = self.work[phase].kernels + self.of.unit_kernels * self.units(phase)
        if self.machine.fused_kernels:
            kernels -= (1 - self.of.fused_traffic) * self.work[phase].moving_kernels
        return kernels * kernel_s

    def units(self, phase: str) -> int:
        """How often Python gathers a unit of sharded weights: a layer in FSDP, a large module in stage 3."""
        if self.setup.fsdp:
            return len({each.block for each in self.setup.tensors if each.block.startswith("layer.")})
        if self.stage < 3:
            return 0
        large = [each for each in self.setup.tensors if each.elements > self.engine.limits.persistent]
        modules = {(each.block, each.name.rpartition(".")[0]) for each in large}
        gathered = [block for block, _ in modules]
        if phase == "backward":  # recomputation gathers once more
            gathered += [block for block in gathered if self.setup.computes_again(block)]
        return len(gathered)

    def gather_s(self, share: float, group: int | None) -> float:
        """The seconds in which weights are gathered for a pass, if they are sharded."""
        if self.stage < 3:
            return 0.0
        size = share * self.elements * self.setup.weight_bytes
        seconds = self.links.within(group).seconds("all_gather", size, self.of)
        if self.weights_on_host:
            seconds += self.host_link_s(size / self.divided_by)
        return seconds

    def reduce_s(self) -> float:
        """The seconds in which gradients are reduced, within a group first, and go to the host."""
        setup = self.setup
        size = setup.model.trained / setup.tensor_ranks * setup.reduced_bytes
        seconds = self.links.within(self.group).seconds(self.reduce_kind, size, self.of)
        if self.group:
            seconds += self.links.between(self.group).seconds("all_reduce", size / self.group, self.of)
        if self.updates_on_host:
            sums = min(2, setup.accumulation)  # with several passes, the sum so far is fetched first
            seconds += self.host_link_s(sums * setup.model.trained * setup.weight_bytes / self.divided_by)
        return seconds

    def exchange_s(self) -> float:
        """The seconds in which ranks that share rows or layers wait for each other, in one of the passes."""
        setup = self.setup
        links = self.machine.links(setup.ranks).within(setup.sequence_ranks * setup.tensor_ranks)
        seconds = sum(links.seconds(kind, size, self.of) for kind, size in exchanged(setup).items())
        return seconds / setup.accumulation / len(PHASES)

    def host_link_s(self, size_bytes: float) -> float:
        return size_bytes / LINKS[self.gpu.host_link].bytes_per_s / self.of.host_link

    def update(self) -> Phase:
        """The update, once all gradients are there. Stages 1 and 2 then gather the new weights."""
        link_s = 0.0
        if self.updates_on_host and not self.weights_on_host:
            link_s += self.host_link_s(self.owned * self.setup.weight_bytes)
        if self.stage in (1, 2):
            links = self.links.within(self.setup.group)
            link_s += links.seconds("all_gather", self.setup.model.trained * self.setup.weight_bytes, self.of)
        gpu_s = self.update_parts.get("update", 0.0)
        return Phase("update", gpu_s, 0.0, link_s, max(self.update_parts.values()) + link_s)

    @functools.cached_property
    def update_parts(self) -> dict[str, float]:
        """The seconds of the update on the GPU; or on a host, of all its ranks, while a disk feeds it."""
        if not self.updates_on_host:
            seconds = update_bytes(self.setup) * self.owned / self.gpu.memory_bytes_per_s
            if self.setup.optimizer in SEPARATE:
                seconds /= self.of.separate_update
            return {"update": seconds}
        local = min(self.setup.ranks, self.machine.gpus_per_node)
        parts = {"update on host": self.owned * local / 1e9 * papers.CPU_ADAM_S_PER_BILLION}
        moved_bytes = 2 * local * self.engine.swapped_bytes  # read and written
        if moved_bytes and self.machine.disk_bytes_per_s:
            parts["disk"] = moved_bytes / self.machine.disk_bytes_per_s
        return parts


def update_bytes(setup: Setup) -> float:
    """Bytes for each parameter in an update: AdamW's, less what smaller moments save. Muon's products do not count."""
    adam, others = (papers.states_of_a_parameter(setup.precision, name)[2] for name in ("fused", setup.optimizer))
    moved_bytes = UPDATE_BYTES[setup.precision] - 2 * (adam - others)
    if setup.optimizer in SEPARATE:
        moved_bytes += 14 * setup.state_bytes
    return moved_bytes
