"""How fast a GPU does its work, and a link moves bytes: constants with their origins, in `pace.toml`."""

import functools
import tomllib
from dataclasses import dataclass, fields
from math import ceil
from pathlib import Path

from study.machine.gpus import GPUS, Gpu
from study.theory import papers
from study.theory.work import Product, Work

TILE = (128, 128)  # rows and columns of a product that one multiprocessor computes at a time


@dataclass(frozen=True)
class Pace:
    """The constants that no datasheet has. `pace.toml` says where each comes from."""

    product_share: float  # of a GPU's ceiling, in the main loop of a product
    product_traffic: float  # times that a product's matrices pass through memory
    attention_share: float  # of the ceiling, in fused attention, all scores counted
    moving_share: float  # of the memory's bandwidth, in kernels that only move bytes
    kernel_s: float  # of the host, to launch a kernel
    module_s: float  # of the host, for a module whose weights stage 3 gathers and releases
    link_share: float  # of NVLink's bandwidth, in collectives
    pcie_share: float
    network_share: float
    host_link_share: float
    base_latency_s: float  # of a collective
    link_latency_s: float  # of a step of a ring: over NVLink, PCIe and a network
    pcie_latency_s: float
    network_latency_s: float


@dataclass(frozen=True)
class Spread:
    """How far measurements lie from predictions: shares of the prediction, below and above."""

    low: float
    high: float


@functools.cache
def _read() -> dict:
    return tomllib.loads(Path(__file__).with_name("pace.toml").read_text())


@functools.cache
def pace() -> Pace:
    return Pace(**{field.name: _read()["constant"][field.name]["value"] for field in fields(Pace)})


@functools.cache
def spread() -> Spread:
    return Spread(**_read()["spread"]["of_prediction"])


def origins() -> dict[str, dict]:
    """Each constant with its value, unit and origin."""
    return _read()["constant"]


@functools.cache
def ceiling(gpu: str) -> float:
    """The share of its datasheet's peak that a GPU was measured to reach in large products of 16 bits."""
    table = _read()["ceiling"]
    return table.get(gpu, table["others"])["value"]


@functools.cache
def multiprocessors(gpu: str) -> int:
    return _read()["multiprocessors"].get(gpu, 108)


@dataclass(frozen=True)
class Seconds:
    """What a GPU takes for some work, by what it is bound by; and the host for launching it."""

    products: float = 0.0
    attention: float = 0.0
    moving: float = 0.0
    launching: float = 0.0

    @property
    def on_gpu(self) -> float:
        return self.products + self.attention + self.moving


def work_s(work: Work, gpu_name: str, whole: bool, constants: Pace) -> Seconds:
    """Seconds of a pass over a block; `whole`: products of fp32, which run as TF32 where there is one."""
    gpu = GPUS[gpu_name]
    peak = (gpu.single_flops_per_s if whole else gpu.half_flops_per_s) * ceiling(gpu_name)
    products = sum(product_s(product, gpu, gpu_name, peak, 4 if whole else 2, constants) for product in work.products)
    return Seconds(
        products=products,
        attention=work.attention_flops / (peak * constants.attention_share),
        moving=work.moved_bytes / (gpu.memory_bytes_per_s * constants.moving_share),
        launching=work.kernels * constants.kernel_s,
    )


def product_s(product: Product, gpu: Gpu, gpu_name: str, peak: float, element_bytes: int, constants: Pace) -> float:
    """A product's main loop in whole waves of tiles, and the traffic of its matrices."""
    moved = element_bytes * product.count * (
        product.m * product.k + product.k * product.n + product.m * product.n
    )
    loop_s = product.flops / (peak * constants.product_share * filled(product, multiprocessors(gpu_name)))
    return loop_s + constants.product_traffic * moved / gpu.memory_bytes_per_s


def filled(product: Product, processors: int) -> float:
    """The share of a GPU's processors that compute something, over all waves of tiles."""
    tiles = product.count * ceil(product.m / TILE[0]) * ceil(product.n / TILE[1])
    padding = product.m * product.n * product.count / (tiles * TILE[0] * TILE[1])
    return padding * tiles / (ceil(tiles / processors) * processors)


# --- links ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Links:
    """What joins the ranks of a training. `network` is between nodes."""

    ranks: int
    gpus_per_node: int
    link: str
    network: str

    @property
    def nodes(self) -> int:
        return ceil(self.ranks / self.gpus_per_node)


def collective_s(kind: str, size_bytes: float, links: Links, constants: Pace) -> float:
    """Seconds of a collective over a tensor of this size, in rings as NCCL builds them.

    A ring goes through every GPU of a node before it leaves it, and there are as many rings as ports, so a node's ports
    carry it together. Latencies add up along the ring (NCCL, src/graph/tuning.cc).
    """
    ranks, nodes = links.ranks, links.nodes
    if ranks == 1:
        return 0.0
    rounds = 2 if kind == "all_reduce" else 1
    pcie = links.link.startswith("pcie")
    bandwidth = papers.LINKS[links.link].bytes_per_s * (constants.pcie_share if pcie else constants.link_share)
    if nodes > 1:
        ports = papers.LINKS[links.network].bytes_per_s * min(ranks, links.gpus_per_node)
        bandwidth = min(bandwidth, ports * constants.network_share)
    hop_s = constants.pcie_latency_s if pcie else constants.link_latency_s
    outer = nodes - 1
    latency_s = constants.base_latency_s + rounds * ((ranks - 1 - outer) * hop_s + outer * constants.network_latency_s)
    return latency_s + rounds * size_bytes * (ranks - 1) / ranks / bandwidth
