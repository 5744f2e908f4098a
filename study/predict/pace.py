"""The constants that no datasheet has. How they were fitted: `tools/fit.py`."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.core.files import beside
from study.core.gpus import Gpu

FILE = Path(__file__).with_name("pace.toml")


@dataclass(frozen=True)
class Pace:
    """The constants. `pace.toml` has the unit, the origin and the interval of each, under the same names."""

    products: dict[str, float]  # by class of GPU: the share of its peak that large products reach
    attention: dict[str, float]  # by class of GPU: the same of fused attention
    launch: dict[str, float]  # by class of host: seconds to launch a kernel
    python: dict[str, float]  # by library: kernels in whose time Python handles a parameter tensor in one pass
    # By what limits a step: how long the next source's may take, over what is predicted.
    interval: dict[str, tuple[float, float]]
    width: dict[str, float]  # by class of GPU: the same of products, where few rows are known
    newer_attention: float  # how much faster FlashAttention-3 and cuDNN's are than FlashAttention-2, on Hopper
    few_tokens: float  # products of as many tokens run at half of that
    products_8_bits: float  # how much faster products in 8 bits are, with their casts
    moving: float  # the share of the memory's bandwidth in kernels that only move bytes
    fused_traffic: float  # the share of these bytes that is left if norms, activations and rotations are fused
    link: float  # the share of the datasheet's bandwidth that collectives reach over NVLink
    pcie: float
    network: float
    host_link: float
    separate_update: float  # the share of the memory's bandwidth in AdamWs of several kernels
    host_update: float = 1.0  # how many times as long as on P2's host an update on the host takes


@functools.cache
def constants() -> dict:
    """The content of `pace.toml`."""
    return beside(__file__, FILE.name)


@functools.cache
def pace() -> Pace:
    """The fitted constants."""
    values: dict[str, Any] = {}
    for kind, entries in constants().items():
        values[kind] = {name: each["value"] for name, each in entries.items()}
    width = {name: each.get("width", 1.0) for name, each in constants()["products"].items()}
    values["interval"] = {name: tuple(each["interval"]) for name, each in constants()["interval"].items()}
    alone = values.pop("constant")
    return Pace(width=width, **values, **alone)


@functools.cache
def class_of(kind: str, gpu: Gpu) -> str:
    """The class of a GPU in `products` or `attention`; the last class has all GPUs that no other names."""
    known = gpu.like or gpu.kind
    for name, entry in constants()[kind].items():
        if known in entry["gpus"]:
            return name
    return name
