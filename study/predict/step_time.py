"""The seconds of an optimizer step: a roofline of the GPU, the pace of the host, and what links carry meanwhile."""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from study.core.gpus import CPU, LINKS, Gpu
from study.predict import papers
from study.predict.engines.base import Engine, Sent, elements_of
from study.predict.exchanges import exchanged_rows
from study.predict.pace import Pace, class_of, pace
from study.predict.trace.tape import Work
from study.predict.trace.transformer import Transformer
from study.predict.training import QUANTIZED_BYTES, Training

PHASES = ("forward", "backward")
# Fused attention: that of PyTorch, which is FlashAttention-2; FlashAttention-3; that of cuDNN and Transformer Engine.
AttentionKernel = Literal["eager", "sdpa", "flash2", "flash3", "cudnn"]
NEWER = ("flash3", "cudnn")  # faster than FlashAttention-2, from Hopper on
# The class of its pace. new: only outside/ and tools say so. none: CUDA graphs or a compiler launch for it.
Host = Literal["unsaid", "new", "none"]
# Kernels of an expert that Python calls by itself, about 60 in both passes: its rows are looked up, gathered,
# multiplied by three matrices, weighted and added (MixtralSparseMoeBlock of transformers 4).
EXPERT_KERNELS = {"forward": 20, "backward": 40}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # their number, by the names of families
SEPARATE = ("foreach", "single_tensor")  # AdamWs of several kernels: they move 21 elements where the fused one moves 7
# Kernels and Python before a product with quantized weights, forward and backward, in kernels: counted with
# bitsandbytes 0.50 on two CPU cores (host_hooks.py, up to commit fdb9a1e5); int8 in release 0.43.3.
QUANTIZED_KERNELS = {
    None: {"forward": 0, "backward": 0},
    "nf4": {"forward": 7, "backward": 4},
    "nf4_double": {"forward": 9, "backward": 6},
    "int8": {"forward": 25, "backward": 10},
}


class Links(NamedTuple):
    """The connections of ranks to each other and to their hosts. `network` is between nodes."""

    ranks: int
    gpus_per_node: int
    link: str
    network: str
    host: str

    def among(self, ranks: int, apart: int = 1) -> "Links":
        """The links between neighbours; or between ranks that have the same place in groups of `apart`."""
        return self._replace(ranks=min(self.ranks, ranks), gpus_per_node=max(1, self.gpus_per_node // apart))

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
class Hardware:
    """The GPUs of a training and their links. None: the usual link of such machines."""

    gpu: Gpu
    gpus_per_node: int = 8
    link: str | None = None  # between GPUs of a node
    network: str | None = None  # between nodes
    disk_bytes_per_s: float | None = None  # of a node
    tf32: bool = True  # for products of fp32, if the GPU has it. Our trainer switches it on
    fused_kernels: bool = False  # by torch.compile, Liger or others, instead of transformers' own kernels
    products_8_bits: bool = False  # linear layers multiply in 8 bits, as torchao and Transformer Engine do
    attention: AttentionKernel = "sdpa"  # of the fused ones
    host: Host = "unsaid"
    loops_over_experts: bool = False  # Python calls one expert after the other, as transformers 4 does
    pace: Pace | None = None  # other constants than the fitted ones: where the machine's own steps were timed

    def links(self, ranks: int) -> Links:
        gpu = self.gpu
        usual = (self.link or gpu.peer_link, self.network or gpu.network, gpu.host_link)
        return Links(ranks, self.gpus_per_node, *usual)


@functools.cache
def work(training: Training, phase: str) -> Work:
    """The work of a pass, as a trace of the model shows it, and what quantized weights add."""
    traced = training.traced.forward if phase == "forward" else training.traced.backward
    # Before each product with a quantized weight, kernels make a 16-bit one of it.
    packed = [tensor for tensor in training.model.tensors if training.packed_elements(tensor)]
    launched = QUANTIZED_KERNELS[training.quantized][phase] * len(packed)
    if phase == "backward":
        again = [tensor for tensor in packed if training.computes_again(tensor.block)]
        launched += QUANTIZED_KERNELS[training.quantized]["forward"] * len(again)
        packed += again
    return replace(
        traced,
        # A rank that shares rows has all tokens of some heads: more work than some tokens of all heads.
        attention_flops=traced.attention_flops * training.placement.sequence_ranks,
        # Read: the packed weight and its scales. Written: 2 bytes of an element in 16 bits.
        dequantized_bytes=elements_of(packed) * (QUANTIZED_BYTES[training.quantized] + 2),
        kernels=traced.kernels + launched,
    )


@dataclass(frozen=True)
class Phase:
    """All forward passes, all backward passes, or the update of a step. Busy seconds may overlap.

    Those of an update on a host or a disk are in `StepTime.parts` alone, and its launches are in the backward phase.
    """

    name: str
    gpu_s: float
    host_s: float  # launching kernels, and the Python of DDP, DeepSpeed and FSDP
    link_s: float  # between GPUs, and to the host
    seconds: float


@dataclass(frozen=True)
class StepTime:
    """The time of an optimizer step, and what takes it."""

    seconds: float
    low_s: float  # of an interval for the next source: it holds 80 % of those that nobody had read
    high_s: float
    parts: dict[str, float]  # busy seconds by resource; they overlap
    # The resource that is busy for the longest time; compute: products, attention and memory traffic.
    limit: str
    phases: tuple[Phase, ...]
    is_known: bool = False  # its machine's own steps were timed


def step_of(engine: Engine, machine: Hardware) -> StepTime:
    """The time of an optimizer step on a machine, with its interval."""
    of = machine.pace or pace()
    sent_s = links_s(engine, machine, of)
    phases = []
    computing_s: defaultdict[str, float] = defaultdict(float)
    for phase in PHASES:
        pass_s = gpu_s(engine, machine, phase, of)
        for part, seconds in pass_s.items():
            computing_s[part] += engine.passes * seconds
        on_gpu_s = engine.passes * sum(pass_s.values())
        on_host_s = engine.passes * host_s(engine, machine, phase, of)
        if phase == "backward":  # the host goes on to the update while the GPU is still busy
            # Python handles each tensor of an optimizer. ZeRO's are one vector.
            on_host_s += of.python["update"] * len(engine.pieces) * launch_s(machine, of)
        # The slower of GPU and host, or a little more. Sending is added: none was fitted to overlap.
        # With this exponent two equal times make 1.19 times one of them. If one is half as long as the other, both
        # together are 1.015 times the longer one. A CPU computes what it launches before it goes on.
        sharp = 1 if machine.gpu.kind == CPU.kind else 4
        seconds = (on_gpu_s**sharp + on_host_s**sharp) ** (1 / sharp) + sent_s[phase]
        phases.append(Phase(phase, on_gpu_s, on_host_s, sent_s[phase], seconds))
    # --- the update, in which the GPU does nothing else
    updating_s = update_s(engine, machine, of)
    seconds = max(updating_s.values()) + sent_s["update"]
    phases.append(Phase("update", updating_s.get("update", 0.0), 0.0, sent_s["update"], seconds))
    # --- what limits the step, and how sure that is
    seconds = sum(phase.seconds for phase in phases)
    # "launching" has Python as well: under stage 3 most of it is what DeepSpeed does for each tensor.
    others = {"launching": sum(phase.host_s for phase in phases), "link": sum(sent_s.values())} | updating_s
    parts = {name: part_s for name, part_s in (computing_s | others).items() if part_s}
    busy_s = others | {"compute": sum(computing_s.values())}
    limit = max(busy_s, key=busy_s.__getitem__)
    kind = kind_of_interval(limit)
    shortest, longest = of.interval[kind]
    if kind == "gpu":
        width = of.width[class_of("products", machine.gpu)]
        shortest, longest = shortest / width, longest * width
    ends = (seconds * shortest, seconds * longest)
    return StepTime(seconds, *ends, parts, limit, tuple(phases), machine.pace is not None)


def kind_of_interval(limit: str) -> str:
    """The kind of interval: gpu, host or links."""
    if limit in ("compute", "update"):
        return "gpu"
    return "links" if limit == "link" else "host"


def gpu_s(engine: Engine, machine: Hardware, phase: str, of: Pace) -> dict[str, float]:
    """The seconds of the GPU in a pass, by what it does: a roofline."""
    training, of_phase = engine.training, work(engine.training, phase)
    gpu = machine.gpu
    moving_bytes_per_s = gpu.memory_bytes_per_s * of.moving
    products_s = 0.0
    for (number, m, n, k, element_bytes), count in of_phase.products.items():
        element_bytes = element_bytes or engine.recipe.product_bytes
        flops_per_s = gpu.flops_per_s(element_bytes == 4, machine.tf32)
        flops_per_s *= of.products[class_of("products", machine.gpu)]
        if number == 1:  # of a linear layer, and not one for each row and head
            flops_per_s *= training.tokens / (training.tokens + of.few_tokens)
            if machine.products_8_bits:
                flops_per_s *= of.products_8_bits
        # Products of small matrices, as in a written-out attention, are limited by memory: both factors are read, and
        # the product is written.
        bytes_s = (m * k + k * n + m * n) * element_bytes / moving_bytes_per_s
        products_s += count * number * max(2 * m * n * k / flops_per_s, bytes_s)
    attention_flops_per_s = gpu.flops_per_s(engine.recipe.product_bytes == 4, machine.tf32)
    kind = class_of("attention", machine.gpu)
    attention_flops_per_s *= of.attention[kind]
    if kind == "hopper" and machine.attention in NEWER:
        attention_flops_per_s *= of.newer_attention
    moved_bytes = of_phase.moved_bytes * (of.fused_traffic if machine.fused_kernels else 1)
    return {
        "products": products_s,
        "attention": of_phase.attention_flops / attention_flops_per_s,
        "memory traffic": (moved_bytes + of_phase.dequantized_bytes) / moving_bytes_per_s,
    }


def host_s(engine: Engine, machine: Hardware, phase: str, of: Pace) -> float:
    """The seconds in which the host launches a pass, and Python handles the tensors of DDP, DeepSpeed or FSDP."""
    of_phase = work(engine.training, phase)
    kernels: float = of_phase.kernels
    if machine.fused_kernels:
        # The share of bytes that fusing leaves stands for the share of launches: that has no constant of its own.
        kernels -= (1 - of.fused_traffic) * of_phase.moving_kernels
    if machine.host == "none":
        kernels = 0
    elif machine.loops_over_experts:
        kernels += EXPERT_KERNELS[phase] * experts(engine.training.model)
    if engine.python:
        kernels += of.python[engine.python] * engine.handled[phase]
    return kernels * launch_s(machine, of)


def launch_s(machine: Hardware, of: Pace) -> float:
    """The seconds of the host for a kernel. Where a compiler launches, Python still handles tensors, at this pace."""
    return of.launch["new" if machine.host == "new" else "unsaid"]


def experts(model: Transformer) -> int:
    """The experts of all layers."""
    config = model.dimensions
    for name in EXPERTS:
        if config.get(name):
            return config[name] * config.get("num_hidden_layers", 0)
    return 0


def links_s(engine: Engine, machine: Hardware, of: Pace) -> dict[str, float]:
    """The seconds in which each phase of a step waits for what ranks send, or for the host's memory."""
    links = machine.links(engine.placement.ranks)
    seconds: defaultdict[str, float] = defaultdict(float)
    for phase, kind, size_bytes, ranks, apart in sent_by(engine):
        seconds[phase] += links.among(ranks, apart).seconds(kind, size_bytes, of)
    return seconds


def sent_by(engine: Engine) -> Iterator[Sent]:
    """Yield what a rank sends in a step."""
    yield from engine.sent()
    # Ranks that share rows wait for each other in both passes.
    together = engine.placement.sequence_ranks
    for kind, moved_bytes in exchanged_rows(engine.training).items():
        for phase in PHASES:
            yield Sent(phase, kind, moved_bytes / len(PHASES), together)


def inside_nodes(engine: Engine, machine: Hardware) -> Counter[str]:
    """Bytes by collective of a step whose ranks are all in one node, if there are several nodes."""
    links, inside = machine.links(engine.placement.ranks), Counter[str]()
    for _, kind, size_bytes, ranks, apart in sent_by(engine):
        near = links.among(ranks, apart)
        if kind != "host" and links.ranks > links.gpus_per_node and near.ranks <= near.gpus_per_node:
            inside[kind] += round(size_bytes)
    return inside


def update_s(engine: Engine, machine: Hardware, of: Pace) -> dict[str, float]:
    """The seconds of the update on the GPU; or on a host, of all its ranks, while a disk feeds it."""
    if "moments" in engine.on_host:
        local = min(engine.placement.ranks, machine.gpus_per_node)
        # The ranks of a node share its processors, so their updates add up. The constant is that of one host, a DGX-2's
        # (P2 table 4), with DeepSpeed's Adam. PyTorch's took 5 to 6 times as long there. Its fused one, which our FSDP2
        # has, takes 1.03 times as long today, and its default 8.8 times (reproductions/cpu_adam_speed.py).
        parts = {"update on host": engine.part * local / 1e9 * papers.CPU_ADAM_S_PER_BILLION * of.host_update}
        if machine.disk_bytes_per_s:  # what it has is read and written
            parts["disk"] = 2 * local * engine.swapped_bytes / machine.disk_bytes_per_s
        return parts
    seconds = update_bytes(engine.training) * engine.part / machine.gpu.memory_bytes_per_s
    if engine.training.optimizer in SEPARATE:
        seconds /= of.separate_update
    return {"update": seconds}


def update_bytes(training: Training) -> float:
    """Bytes for each parameter in an update: AdamW's, less what smaller moments save. Muon's products do not count."""
    recipe, optimizer = training.recipe, training.optimizer
    adam, others = (papers.optimizer_bytes(recipe, name) for name in ("adamw", optimizer))
    # The gradient is read for its norm and for Adam; weights and two moments are read and written; then the old
    # gradient is set to zero. For a master copy the gradient is first copied to fp32, and the new weight is rounded.
    moved_bytes = 8 * recipe.moment_bytes + recipe.gradient_bytes
    if recipe.master_bytes:
        moved_bytes += recipe.gradient_bytes + recipe.master_bytes + recipe.weight_bytes
    if optimizer in SEPARATE:
        moved_bytes += 14 * recipe.moment_bytes
    return moved_bytes - 2 * (adam - others)  # twice, because a state is read and written
