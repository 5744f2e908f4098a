"""The pace of GPUs: constants, which `pace.toml` has with their origins, and the seconds that some work takes."""

import functools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil
from pathlib import Path

from study.machine.gpus import GPUS
from study.predictor.timing.work import Product, Work

FILE = Path(__file__).with_name("pace.toml")
TILE = (128, 64)  # rows and columns of a product that one multiprocessor computes at a time
NARROW = 32  # rows or columns of the tiles of a product that has no more (cuBLAS's kernels are named so)
SPLIT = 1024  # the fewest terms of a sum that are computed apart ("split-K" of cuBLAS), where tiles are few; assumed
# Bytes that are read and written before a product of 8 bits, for an element of activations and one of a weight. Each
# has two products. torchao's compiled kernels find the largest number of activations on the way (roofline_utils.py,
# 36027d82). Transformer Engine's cast also transposes, with scales of the step before (arXiv 2209.05433).
CAST_BYTES = {"tensorwise": (2, 4), "rowwise": (3, 5), "rowwise_with_gw_hp": (1, 3), "mxfp8": (2, 3), "te": (2, 2)}
LARGE = 1e9  # parameters from which on a model has the interval of large models
OF_HOST = ("kernel_s", "module_s", "unit_s", "gradient_s", "tensor_s")
NORM = 4  # of the norm that joins the host's seconds and the GPU's: the larger counts, and a little of the smaller


@dataclass(frozen=True)
class Pace:
    """The constants that no datasheet has. `pace.toml` says where each comes from."""

    product_share: float  # of a GPU's ceiling, in whole waves of a product's tiles
    odd_share: float  # of the speed of products, where a matrix in 16 bits has an odd number of columns
    attention_share: float  # of what the authors of FlashAttention-2 reached on a GPU, in layers of a training
    moving_share: float  # of the memory's bandwidth, in kernels that only move bytes
    update_share: float  # of the memory's bandwidth, in AdamWs of several kernels
    fused_traffic: float  # of the bytes that kernels move, where norms, activations and rotations are fused
    cached_traffic: float  # seconds of what stays in a large cache, over those of what the memory moves
    kernel_s: float  # of the host, to launch a kernel
    module_s: float  # of the host, for a module whose weights stage 3 gathers and releases
    unit_s: float  # of the host, for a unit whose weights FSDP gathers and releases, or whose gradients it reduces
    gradient_s: float  # of the host, for a gradient that stages 1 and 2 reduce
    tensor_s: float  # of the host, for a tensor in an update by foreach
    checkpoint_share: float  # of the host, for hooks of checkpointing that does not re-enter, over its kernels' seconds
    host_pace: float  # of an unknown host: its seconds over those of the hosts that kernel_s and module_s are of
    host_factor: float  # divides and multiplies host_pace, for its interval
    contention: float  # the share of a collective's seconds by which the kernels beside it take longer
    link_share: float  # of NVLink's bandwidth, in collectives
    pcie_share: float  # of PCIe's, up to its fourth generation
    pcie5_share: float
    pcie_factor: float  # divides and multiplies them, for the interval
    network_share: float
    host_link_share: float
    base_latency_s: float  # of a collective
    link_latency_s: float  # of a step of a ring: over NVLink, PCIe and a network
    pcie_latency_s: float
    network_latency_s: float


@functools.cache
def _read() -> dict:
    return tomllib.loads(FILE.read_text())


@functools.cache
def pace() -> Pace:
    return Pace(**{field.name: _read()["constant"][field.name]["value"] for field in fields(Pace)})


def interval_factor(parameters: int, known: bool = True) -> float:
    """Return the factor that divides and multiplies a predicted time, for its interval.

    A kind of training that none of its sources has is not `known`, and has the widest one.
    """
    factors = _read()["interval"]
    return factors["large" if parameters >= LARGE else "small"] if known else max(factors.values())


def origins() -> dict[str, dict]:
    """Each constant with its value, unit and origin."""
    return _read()["constant"]


@functools.cache
def ceilings(gpu: str) -> dict[str, tuple[float, str]]:
    """The share of its peak that a GPU was measured to reach in products and in fused attention, with the origins.

    Products in fp32 have one of their own ("single") where it differs much.
    """
    shares = {}
    for kind in ("products", "single", "attention"):
        known = _read()["ceiling"][kind]
        if entry := known.get(gpu, known.get("others")):
            shares[kind] = (entry["value"], entry["origin"])
    return shares


def product_flops_per_s(gpu: str, whole: bool, tf32: bool = True) -> float:
    """Return the speed of large products. `whole`: in fp32, or TF32."""
    shares = ceilings(gpu)
    share = shares.get("single", shares["products"]) if whole else shares["products"]
    return GPUS[gpu].flops_per_s(whole, tf32) * share[0]


@functools.cache
def has_measured_ceilings(gpu: str) -> bool:
    """Return whether no ceiling of a GPU is assumed."""
    return not any(origin.startswith("assumed") for _, origin in ceilings(gpu).values())


def slow_dequantization(gpu: str) -> float:
    """Return the seconds of a dequantization by bitsandbytes before 0.48, over those of today's."""
    return _of_gpu(_read()["slow_dequantization"], gpu)


def attention_s(kernel: str | None, gpu: str) -> float:
    """Return the seconds of a decoder's attention by a kernel, over those of kernels that compute all scores."""
    return _of_gpu(_read()["attention_kernel"].get(kernel, {}), gpu)


def _of_gpu(known: dict, gpu: str, otherwise: float = 1.0) -> float:
    return known.get(gpu, known.get("others", {"value": otherwise}))["value"]


def peak_flops_per_s(gpu: str, whole: bool, tf32: bool = True) -> float:
    """Return the datasheet's speed of products, or a higher one that was measured. `whole`: in fp32, or TF32."""
    return max(GPUS[gpu].flops_per_s(whole, tf32), product_flops_per_s(gpu, whole, tf32))


@dataclass(frozen=True)
class Seconds:
    """Seconds of a GPU for some work, by what limits it; and of the host for launching it."""

    products: float = 0.0
    attention: float = 0.0
    moving: float = 0.0
    launching: float = 0.0

    @property
    def on_gpu(self) -> float:
        """Kernel by kernel, host or GPU is the slower one. Together they take a little more than the slower one."""
        working = self.products + self.attention + self.moving
        return (working**NORM + self.launching**NORM) ** (1 / NORM)


OfBlocks = dict[str, tuple[Seconds, Seconds]]  # of the forward and the backward pass of each block


def total(passes: Sequence[Seconds]) -> dict[str, float]:
    """Return the seconds of passes, by what limits them."""
    parts = {"products": "products", "attention": "attention", "memory traffic": "moving", "launching": "launching"}
    return {name: sum(getattr(each, part) for each in passes) for name, part in parts.items()}


def work_s(
    work: Work,
    gpu_name: str,
    whole: bool,
    fused: bool,
    constants: Pace,
    casts: str | None = None,
    tokens: int = 0,
    tf32: bool = True,
    with_adapters: bool = False,
) -> Seconds:
    """Seconds of a pass over a block. `whole`: products of fp32, which run as TF32 if the GPU has it and `tf32` is on.

    `fused`: norms, activation functions and rotations are single kernels; `with_adapters`: adapters, too, which spares
    the host small kernels (others' fused kernels do not). `casts`: to 8 bits, a name in CAST_BYTES. Products of small
    matrices, as in a written-out attention, are limited by memory. Hopper, Ada, Blackwell and MI300 multiply twice as
    many numbers of 8 bits (datasheets).
    """
    gpu = GPUS[gpu_name]
    processors = _read()["multiprocessors"].get(gpu_name, 108)
    moving_share = _of_gpu(_read()["ceiling"]["moving"], gpu_name, constants.moving_share)
    reached = gpu.flops_per_s(whole, tf32) * ceilings(gpu_name)["attention"][0] * constants.attention_share

    def product_s(product: Product) -> float:
        element_bytes = product.element_bytes or (4 if whole else 2)
        flops_per_s = product_flops_per_s(gpu_name, element_bytes == 4, tf32)
        speed = 2 if has_casts(product, casts, tokens) else 1
        flops_s = product.flops / filled(product, processors) / flops_per_s / speed
        bytes_s = product.elements * element_bytes / gpu.memory_bytes_per_s
        return max(flops_s / constants.product_share, bytes_s / moving_share)

    cast_bytes = sum(_cast_bytes(product, casts, tokens) for product in work.products)
    moving = (work.moved_bytes + cast_bytes) / gpu.memory_bytes_per_s
    lasting = (work.lasting_bytes + cast_bytes) / gpu.memory_bytes_per_s  # no fusing spares these
    share = constants.fused_traffic if fused else 1
    fusible = (moving - lasting) * share
    # If half of the cache holds all that a kernel moves, it finds there what the one before has written.
    held = work.moving_kernels * share * _read()["cache_bytes"].get(gpu_name, 0) / 2 / gpu.memory_bytes_per_s
    return Seconds(
        products=sum(map(product_s, work.products)),
        attention=work.attention_flops / reached,
        moving=(fusible + lasting - min(fusible, held) * (1 - constants.cached_traffic)) / moving_share,
        launching=(work.kernels - with_adapters * (1 - share) * work.moving_kernels) * constants.kernel_s,
    )


def has_casts(product: Product, casts: str | None, tokens: int) -> bool:
    """Return whether a product is of 8 bits. The gradient of a weight, which sums over tokens, may stay in 16 bits."""
    in_16_bits = casts == "rowwise_with_gw_hp" and product.k == tokens
    return casts is not None and product.number == 1 and not in_16_bits


def _cast_bytes(product: Product, casts: str | None, tokens: int) -> int:
    """Return the bytes of the casts of both factors. The gradient of a weight is a product of activations."""
    if casts is None or not has_casts(product, casts, tokens):
        return 0
    of_activations, of_weights = CAST_BYTES[casts]
    weights = product.k * product.n if product.k != tokens else 0
    return of_activations * (product.m * product.k + product.k * product.n - weights) + of_weights * weights


def filled(product: Product, processors: int) -> float:
    """The share of a GPU's processors that do useful work, over all waves of tiles."""
    rows, columns = (NARROW if size <= NARROW else tile for size, tile in ((product.m, TILE[0]), (product.n, TILE[1])))
    tiles = product.number * ceil(product.m / rows) * ceil(product.n / columns)
    padding = product.m * product.n * product.number / (tiles * rows * columns)
    tiles *= max(1, min(processors // tiles, product.k // SPLIT))
    return padding * tiles / (ceil(tiles / processors) * processors)
