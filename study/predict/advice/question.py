"""The question that an advice answers: what to train, and on which machine. Everything not given has a default."""

import re
from dataclasses import dataclass
from typing import Literal

from study.core.errors import Stop
from study.core.gpus import GPUS, LINKS, Gpu, gpu_named
from study.core.validation import nearest
from study.predict.setup import Optimizer, Quantized
from study.predict.trace.transformer import Transformer

# All of these are assumed, and an advice says so.
SEQUENCE = 2048  # tokens of a row, if the model reads as many
BATCH = 128  # rows of a step, rounded up to a multiple of the GPUs
Precision = Literal["fp32", "bf16", "fp16", "bf16_cast", "bf16_pure"]  # of the trainer
LEAST_HOST_BYTES = 64e9
HOST_SHARE = 2  # the memory of most nodes is at least twice that of their GPUs
NODE_GPUS = 8
ALIKE = ("precision", "checkpointing", "optimizer", "quantized")  # in a Given and a Question
KINDS = {"nvlink": "nv", "pcie": "pcie", "ib": "ib", "infiniband": "ib", "eth": "eth", "ethernet": "eth"}
MOST_ROWS = 10**9  # of a step: a larger batch is a typing error


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a user says besides the model and the GPUs. None: not given."""

    sequence: int | None = None
    batch: int | None = None
    precision: Precision | None = None
    checkpointing: bool | None = None
    optimizer: Optimizer = "fused"
    quantized: Quantized | None = None
    link: str | None = None
    host_memory: str | None = None
    disk: str | None = None
    gpus_per_node: int | None = None


@dataclass(frozen=True)
class Question:
    """What to train, and on which machine. `batch` is the rows of an optimizer step, over all GPUs."""

    model: Transformer
    gpus: int
    gpu: str
    link: str | None  # the slowest link between GPUs, a name in LINKS; None for a single GPU
    host_memory_bytes: float  # of a node
    sequence: int
    batch: int
    precision: str | None = None  # None: the usual one of each arm
    checkpointing: bool | None = None  # None: both are tried
    disk_bytes_per_s: float | None = None  # of a node; None: nothing is offloaded to disk
    gpus_per_node: int = NODE_GPUS
    optimizer: Optimizer = "fused"
    quantized: Quantized | None = None  # frozen linear layers
    unit: Literal["GiB", "GB"] = "GiB"  # of the answer: that of the question

    @property
    def local(self) -> int:
        return min(self.gpus, self.gpus_per_node)

    @property
    def has_bf16(self) -> bool:
        return GPUS[self.gpu].has_bf16

    @classmethod
    def of(cls, model: Transformer, gpus: int, gpu: str, given: Given) -> "Question":
        """The question, with a default for everything that is not given."""
        name = gpu_named(gpu)
        per_node = node_size(gpus, name, given.gpus_per_node)
        local = min(gpus, per_node)
        host_bytes = max(LEAST_HOST_BYTES, HOST_SHARE * local * GPUS[name].memory_bytes)
        if given.host_memory is not None:
            host_bytes = bytes_of(given.host_memory, "--host-memory")
        return cls(
            model=model,
            gpus=gpus,
            gpu=name,
            link=None if gpus == 1 else link_named(given.link, GPUS[name], several_nodes=gpus > local),
            host_memory_bytes=host_bytes,
            sequence=default_sequence(model) if given.sequence is None else given.sequence,
            batch=-(-BATCH // gpus) * gpus if given.batch is None else given.batch,
            disk_bytes_per_s=None if given.disk is None else bytes_of(given.disk, "--disk", "B/s"),
            gpus_per_node=per_node,
            unit="GB" if given.host_memory and "i" not in given.host_memory.lower() else "GiB",
            **{name: getattr(given, name) for name in ALIKE},
        )


def default_sequence(model: Transformer) -> int:
    """Return the tokens of a row where the user leaves them to the model."""
    return min(SEQUENCE, model.positions or SEQUENCE)


def node_size(gpus: int, gpu: str, given: int | None) -> int:
    """GPUs in a node. By default the largest number that such machines have and that divides `gpus`."""
    if given is None:
        return next(n for n in range(GPUS[gpu].per_node, 0, -1) if gpus % n == 0)
    if given < 1:
        raise Stop(f"gpus_per_node must be a whole number, at least 1 (got {given})", "give 1 or more")
    if gpus % min(gpus, given):
        raise Stop(f"{gpus} GPUs do not fill nodes of {given}", "give a multiple of that")
    return given


def link_named(text: str | None, gpu: Gpu, several_nodes: bool) -> str:
    """The name in LINKS that a user means. `nvlink`, `pcie` and `infiniband` mean the links of this GPU."""
    if text is None:
        return gpu.network if several_nodes else gpu.peer_link
    name = text.lower().replace("_", "-").replace(" ", "-")
    if kind := KINDS.get(name):
        links = (gpu.peer_link, gpu.host_link, gpu.network, "ib-hdr", "pcie5", *LINKS)
        return next(link for link in links if link.startswith(kind))
    if name not in LINKS:
        raise Stop(f"{text!r} is not a known link between GPUs", nearest(name, [*LINKS, *KINDS], most=3))
    return name


def bytes_of(text: str, flag: str, unit: Literal["B", "B/s"] = "B") -> float:
    """Bytes from a text such as "1TB", "1T" or "80 GiB", or bytes a second from "6GB/s"."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) ?([KMGT])(i?)B?(/s)?", text.strip(), re.IGNORECASE | re.ASCII)
    if not match or float(match[1]) == 0 or bool(match[4]) != (unit == "B/s"):
        what, examples = ("size", "512GB, 1TB or 80GiB") if unit == "B" else ("speed", "6GB/s or 500MB/s")
        raise Stop(f"{flag} {text!r:.80} is not a {what}", f"give a number above 0 with its unit, such as {examples}")
    return float(match[1]) * (1024 if match[3] else 1000) ** (1 + "KMGT".index(match[2].upper()))


def check(question: Question) -> None:
    """Refuse an impossible question."""
    if question.quantized and not question.model.is_partly_frozen:
        raise Stop("quantized weights do not train", "give --lora-rank as well")
    if not 0 < question.batch <= MOST_ROWS:
        raise Stop(f"--batch must be from 1 to {MOST_ROWS} rows (got {question.batch})", "give the rows of one step")
    if question.batch % question.gpus:
        what = f"{question.gpus} GPUs do not divide a batch of {question.batch}"
        raise Stop(what, f"give a multiple of {question.gpus}")
