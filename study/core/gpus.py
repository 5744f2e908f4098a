"""GPUs and their links: their datasheets, their measured speed, and the GPUs of this machine that a launch would see.

Peaks are those with fp32 accumulation, which PyTorch uses; GeForce cards reach twice that with fp16 accumulation.
Uncertain: the memory that nvidia-smi shows for B200, B300, H20, H100 NVL, GH200, RTX 5090, L20, A30, MI300X and MI325X
(within 1 %), the bandwidth of a T4 (300 or 320 GB/s), fp32 of a B200 (75 or 80). An H100 of 96 GB calls itself NVIDIA
H100. NVLink bridges of PCIe cards join only two.
This module needs no torch, so it is fast.
"""

import os
import re
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from study.core.errors import Stop, nearest, refuse_beyond
from study.core.files import beside

MOST_TFLOPS = 100_000


@dataclass(frozen=True)
class Gpu:
    """A GPU. `kind` is its name in GPUS, `name` that of PyTorch, as in records.

    Speeds are from the datasheet; peaks are FLOP/s without sparsity.
    """

    kind: str
    name: str
    memory_bytes: int  # the total that nvidia-smi shows
    memory_bytes_per_s: float
    peaks: dict[str, float] = field(hash=False)
    host_link: str  # links are names in LINKS
    peer_link: str  # between two GPUs of a node, as such nodes are mostly built
    network: str  # between nodes, unless the user says otherwise
    source: str
    also: str = ""  # other names for it
    per_node: int = 8  # the most GPUs in a node, as such nodes are mostly built
    like: str = ""  # the kind in the list that a card outside of it, or a slice, is most like

    @property
    def has_bf16(self) -> bool:
        return "bf16" in self.peaks

    def flops_per_s(self, whole: bool, tf32: bool = True) -> float:
        """Return the speed in 16 bits. `whole`: in TF32 if there is one and it is switched on, or else in fp32."""
        if not whole:
            return self.peaks["fp16"]  # in bf16, where there is one, a GPU is as fast
        return self.peaks.get("tf32" if tf32 else "fp32", self.peaks["fp32"])


@dataclass(frozen=True)
class Link:
    """Bytes a second that a GPU can send while it receives as many, by the vendor. Software reaches less."""

    bytes_per_s: float
    source: str


LINKS = {name: Link(**link) for name, link in beside(__file__, "links.json").items()}
# If a text fits several GPUs, it means the first: `H100` is an H100 SXM.
GPUS = {name: Gpu(name, **gpu) for name, gpu in beside(__file__, "gpus.json").items()}
# A thread of a CPU as if it were a GPU, roughly: its own steps say how fast it is (`study calibrate`).
CPU = Gpu("CPU", "CPU", 0, 2.5e10, {"fp32": 1.5e11, "fp16": 1.5e11}, "gloo", "gloo", "gloo", "a guess, on two cores")


def _meant(lower: str) -> list[str]:
    """Return the names in GPUS that fit a text.

    Each part of it must begin a word of the GPU's names: `80` begins 80GB, but `a10` does not begin A100.
    """
    parts = [re.sub(r"(\d)$", r"\1(?!\\d)", part) for part in re.findall(r"[a-z0-9]+", lower)]
    meant = []
    for name, gpu in GPUS.items():
        # PyTorch omits the vendor of a Tesla. People write H100SXM as one word.
        known = f"{name} {gpu.name} {gpu.also} {name.partition('-')[0]}{gpu.also} nvidia".lower()
        if all(re.search(rf"\b{part}", known) for part in parts):
            meant.append(name)
    return meant


def gpu_named(text: str) -> str:
    """Return the name in GPUS that a user means: `h100`, `A100 40GB`, `rtx 4090`, or PyTorch's own name."""
    lower = re.sub(r"(\d+) gi?b", r"\1gb", text.lower())
    meant = _meant(lower)
    if len(meant) == 1 or (meant and any(map(str.isdigit, lower))):  # the name of a vendor alone is not a GPU
        return min(meant, key=lambda name: lower not in (name.lower(), GPUS[name].name.lower()))
    # A100-40GB and A100-80GB are one suggestion.
    kinds = dict.fromkeys(name.partition("-")[0] for name in GPUS)
    remedy = f"{nearest(text, kinds, most=3)}. Another card is one of these with --gpu-memory and --gpu-tflops"
    raise Stop(f"{text!r} is not a known GPU", remedy)


def taken(text: str) -> str:
    """Return a sentence of which GPU a text is taken as; empty unless such GPUs are sold in several sizes."""
    meant = _meant(text.lower())
    if not meant or text.lower() == (name := gpu_named(text)).lower():
        return ""
    of_size = {GPUS[each].memory_bytes: each for each in reversed(meant) if each != name}
    of_size.pop(GPUS[name].memory_bytes, None)
    others = sorted(of_size.values(), key=meant.index)
    if not others:
        return ""
    return f"{text} taken as {name} ({' and '.join(others)} {'are others' if len(others) > 1 else 'is another'})"


def like(gpu: Gpu, memory_bytes: float, tflops: float | None) -> Gpu:
    """Return a card like a known one, but with other memory."""
    refuse_beyond("--gpu-tflops", tflops, MOST_TFLOPS)
    speed = 1.0 if tflops is None else tflops * 1e12 / gpu.peaks["fp16"]
    peaks = {kind: speed * peak for kind, peak in gpu.peaks.items()}
    return replace(
        gpu,
        kind=f"{gpu.kind} of {memory_bytes / 2**30:.3g} GB",  # as a label says
        name="a card or a slice",
        peaks=peaks,
        like=gpu.kind,
        source="as you say",
        memory_bytes=int(memory_bytes),
        memory_bytes_per_s=speed * gpu.memory_bytes_per_s,
    )


def peak_flops(device_name: str | None, precision: str, tf32: bool) -> float | None:
    """Return the datasheet peak of a precision, in 16 bits that of fp16; None if the GPU is not known."""
    for gpu in GPUS.values():
        if gpu.name == device_name:
            return gpu.flops_per_s(precision == "fp32", tf32)
    return None


class Visible(NamedTuple):
    """A GPU of this machine that a launch would see, as nvidia-smi shows it."""

    name: str
    memory_bytes: int


def gpus_here() -> list[Visible]:
    """Return the GPUs that a launch would see. Raise Stop if the driver fails."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip()
    if chosen in ("", "-1"):
        return []  # they are hidden
    import pynvml

    found = []
    try:
        pynvml.nvmlInit()
        for number in range(pynvml.nvmlDeviceGetCount()):
            card = pynvml.nvmlDeviceGetHandleByIndex(number)
            found.append(Visible(pynvml.nvmlDeviceGetName(card), pynvml.nvmlDeviceGetMemoryInfo(card).total))
    except pynvml.NVMLError_LibraryNotFound:
        return []  # no driver: nothing to fix
    except pynvml.NVMLError as error:
        raise Stop(f"NVML: {error}", "fix what nvidia-smi reports") from None
    if chosen != "all":  # NVML does not know which those are: the cards of a machine are mostly alike
        return found[: len(chosen.split(","))]
    return found


def num_gpus() -> int:
    """Return the number of GPUs that a launch would see; 0 if the driver fails."""
    try:
        return len(gpus_here())
    except Stop:
        return 0
