"""GPUs: their datasheets, their measured speed, and the GPUs of this machine that a launch would see.

This module needs no torch, so it is fast.
"""

import contextlib
import ctypes
import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from study.errors import Stop
from study.io import files
from study.io import parsing as texts
from study.io.validation import nearest

MAX_PEAKS_BYTES = 2**20  # of a peaks.json: 3 kB
MIB = 2**20
HIDES_ALL = ("", "-1")  # as a value of CUDA_VISIBLE_DEVICES
CUDA_ERROR_NO_DEVICE = 100


@dataclass(frozen=True)
class Gpu:
    """A GPU. `name` is PyTorch's, as in records. Speeds are from the datasheet; peaks are FLOP/s without sparsity."""

    name: str
    memory_bytes: int  # the total that nvidia-smi shows
    memory_bytes_per_s: float
    peaks: dict[str, float]
    host_link: str  # links are names in theory.LINKS
    peer_link: str  # between two GPUs of a node, as such nodes are mostly built
    network: str  # between nodes, unless the user says otherwise
    source: str
    also: str = ""  # other names for it
    per_node: int = 8  # the most GPUs in a node, as such nodes are mostly built

    @property
    def has_bf16(self) -> bool:
        return "bf16" in self.peaks

    @property
    def half_flops_per_s(self) -> float:
        """The speed in bf16, or in fp16 if there is no bf16. GPUs with both are equally fast in both."""
        return self.peaks["fp16"]

    @property
    def single_flops_per_s(self) -> float:
        """The speed in TF32, or in fp32 if there is no TF32."""
        return self.peaks.get("tf32", self.peaks["fp32"])


def _peaks(half: float, tf32: float | None, fp32: float) -> dict[str, float]:
    """Peaks from TFLOP/s. A GPU without TF32 has no bf16 either: both came with Ampere."""
    printed = {"fp16": half, "fp32": fp32} | ({} if tf32 is None else {"bf16": half, "tf32": tf32})
    return {kind: float(round(tflops * 1e12)) for kind, tflops in printed.items()}


_A100, _H100_SXM, _V100_SXM, _V100_PCIE = (312, 156, 19.5), (989.4, 494.7, 66.9), (125, None, 15.7), (112, None, 14)
# Links to the host, to other GPUs of the node, to other nodes. NVLink bridges of PCIe cards join only two cards.
_HOPPER, _AMPERE, _VOLTA = (
    ("pcie5", "nvswitch", "ib-ndr"),
    ("pcie4", "nvlink3", "ib-hdr"),
    ("pcie3", "nvlink-v100", "ib-edr"),
)
_PCIE5, _PCIE4, _PCIE3 = ("pcie5", "pcie5", "ib-ndr"), ("pcie4", "pcie4", "eth-25"), ("pcie3", "pcie3", "eth-25")
_XGMI = ("pcie5", "infinity-fabric", "ib-ndr")
# Peaks are those with fp32 accumulation, which PyTorch uses; GeForce cards reach twice that with fp16 accumulation.
# Uncertain: the memory that nvidia-smi shows for B200, H100 NVL, GH200, RTX 5090 and MI300X (within 1 %), the bandwidth
# of a T4 (300 or 320 GB/s), fp32 of a B200 (75 or 80).
# If a text fits several GPUs, it means the first: `H100` is an H100 SXM.
GPUS = {
    name: Gpu(full, mib * MIB, gb_per_s * 1e9, _peaks(*peaks), *links, *more)
    for name, full, mib, gb_per_s, peaks, links, *more in (
        ("B200", "NVIDIA B200", 183359, 7700, (2250, 1100, 75), ("pcie5", "nvlink5", "ib-ndr"), "HGX B200 datasheet"),
        ("H200", "NVIDIA H200", 143771, 4800, _H100_SXM, _HOPPER, "H200 datasheet", "SXM5 141GB"),
        ("H100-80GB", "NVIDIA H100 80GB HBM3", 81559, 3350, _H100_SXM, _HOPPER, "H100 datasheet", "SXM5"),
        ("H100-PCIe", "NVIDIA H100 PCIe", 81559, 2000, (756, 378, 51.2), _PCIE5, "H100 datasheet", "80GB"),
        ("H100-NVL", "NVIDIA H100 NVL", 95830, 3900, (835.5, 417.5, 60), _PCIE5, "H100 datasheet", "94GB"),
        (
            *("GH200", "NVIDIA GH200 480GB", 97871, 4000, _H100_SXM, ("c2c", "ib-ndr", "ib-ndr")),
            *("GH200 datasheet, 96 GB of HBM3", "96GB", 1),
        ),
        ("A100-80GB", "NVIDIA A100-SXM4-80GB", 81920, 2039, _A100, _AMPERE, "A100 datasheet"),
        ("A100-40GB", "NVIDIA A100-SXM4-40GB", 40960, 1555, _A100, _AMPERE, "A100 datasheet"),
        ("A100-PCIe-80GB", "NVIDIA A100 80GB PCIe", 81920, 1935, _A100, _PCIE4, "A100 datasheet"),
        ("A100-PCIe-40GB", "NVIDIA A100-PCIE-40GB", 40960, 1555, _A100, _PCIE4, "A100 datasheet"),
        ("V100-32GB", "Tesla V100-SXM2-32GB", 32768, 900, _V100_SXM, _VOLTA, "V100 datasheet"),
        ("V100-16GB", "Tesla V100-SXM2-16GB", 16384, 900, _V100_SXM, _VOLTA, "V100 datasheet"),
        ("V100-PCIe-32GB", "Tesla V100-PCIE-32GB", 32768, 900, _V100_PCIE, _PCIE3, "V100 datasheet"),
        ("V100-PCIe-16GB", "Tesla V100-PCIE-16GB", 16384, 900, _V100_PCIE, _PCIE3, "V100 datasheet"),
        ("L40S", "NVIDIA L40S", 46068, 864, (362, 183, 91.6), _PCIE4, "L40S datasheet", "48GB"),
        ("L4", "NVIDIA L4", 23034, 300, (121, 60, 30.3), _PCIE4, "L4 datasheet", "24GB"),
        ("A10", "NVIDIA A10", 23028, 600, (125, 62.5, 31.2), _PCIE4, "A10 datasheet", "24GB"),
        ("A6000", "NVIDIA RTX A6000", 49140, 768, (154.8, 77.4, 38.7), _PCIE4, "RTX A6000 datasheet", "48GB"),
        ("RTX3090", "NVIDIA GeForce RTX 3090", 24576, 936, (71, 35.6, 35.6), _PCIE4, "GA102 whitepaper", "24GB"),
        ("RTX4090", "NVIDIA GeForce RTX 4090", 24564, 1008, (165.2, 82.6, 82.6), _PCIE4, "Ada whitepaper", "24GB"),
        (
            *("RTX5090", "NVIDIA GeForce RTX 5090", 32607, 1792, (209.5, 104.8, 104.8), _PCIE5),
            *("RTX Blackwell whitepaper", "32GB"),
        ),
        ("T4", "Tesla T4", 15360, 320, (65, None, 8.1), _PCIE3, "T4 datasheet", "16GB"),
        ("MI300X", "AMD Instinct MI300X", 196592, 5300, (1307.4, 653.7, 163.4), _XGMI, "MI300X datasheet", "192GB"),
    )
}


def gpu_named(text: str) -> str:
    """Return the name in GPUS that a user means: `h100`, `A100 40GB`, `rtx 4090`, or PyTorch's own name."""
    lower = text.lower()
    for parts in (re.findall(r"[a-z0-9]+", lower), re.findall(r"[a-z]+\d+|[a-z]+|\d+(?:gb)?", lower)):
        meant = [name for name, gpu in GPUS.items() if all(_begins_a_word(part, name, gpu) for part in parts)]
        if meant and any(map(str.isdigit, lower)):  # the name of a vendor alone is not a GPU
            return min(meant, key=lambda name: lower not in (name.lower(), GPUS[name].name.lower()))
    kinds = dict.fromkeys(name.partition("-")[0] for name in GPUS)
    raise Stop(f"{text!r} is not a known GPU", nearest(text, kinds, most=3))


def _begins_a_word(part: str, name: str, gpu: Gpu) -> bool:
    """Return whether a part begins a word of a GPU's names: `80` begins 80GB, but `a10` does not begin A100."""
    vendor = "AMD" if gpu.name.startswith("AMD") else "NVIDIA"  # PyTorch omits it for a Tesla
    words = re.findall(r"[a-z0-9]+", f"{name} {gpu.name} {gpu.also} {vendor}".lower())
    return any(re.match(rf"{part}(?!\d)" if part[-1].isdigit() else part, word) for word in words)


def peak_flops(device_name: str | None, precision: str, tf32: bool) -> float | None:
    """Return the datasheet peak of a precision recipe; None if unknown."""
    gpu = next((gpu for gpu in GPUS.values() if gpu.name == device_name), None)
    if gpu is None:
        return None
    if precision != "fp32":
        return gpu.peaks.get("fp16" if precision == "fp16" else "bf16")
    return gpu.single_flops_per_s if tf32 else gpu.peaks["fp32"]


def measured_flops(record: dict, folder: Path) -> float | None:
    """Return FLOP/s of matrix products, as `study peaks` measured them on a run's machine and in its precision.

    They are in the nearest peaks.json above the run's folder. None without such a file, or if it is of another machine.
    """
    file = next((path for above in folder.absolute().parents if (path := above / "peaks.json").exists()), None)
    if file is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            peaks = texts.from_json(files.read(file, MAX_PEAKS_BYTES))
            if peaks["hardware"]["devices"] and peaks["hardware"]["devices"] == record["hardware"]["devices"]:
                return matrix_peak(peaks, record["requested"])
    return None


def matrix_peak(peaks: dict, settings: dict) -> float:
    """Return the measured FLOP/s for a precision recipe, from the content of a peaks.json."""
    kind = settings["precision"].removesuffix("_cast")
    if kind == "fp32" and settings.get("tf32", True):
        kind = "tf32"
    return peaks["flops_per_s"][kind]["median"]


class Visible(NamedTuple):
    """A GPU of this machine that a launch would see."""

    name: str
    memory_bytes: int
    capability: int  # the major number of CUDA's compute capability


def gpus_here() -> list[Visible]:
    """Return the GPUs that a launch would see, in CUDA's order. A Stop if the driver fails.

    CUDA and NVML number GPUs differently: NVML by slot, CUDA the fastest first, unless CUDA_DEVICE_ORDER says
    otherwise. So CUDA lists the UUIDs, and NVML is asked by UUID.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in HIDES_ALL:
        return []
    import pynvml

    try:
        pynvml.nvmlInit()  # first: CUDA reports a driver that is not loaded as no GPU
        handles = [_handle(each) for each in _cuda_uuids()]
        return [
            Visible(
                pynvml.nvmlDeviceGetName(handle),
                pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                pynvml.nvmlDeviceGetCudaComputeCapability(handle)[0],
            )
            for handle in handles
        ]
    except pynvml.NVMLError_LibraryNotFound:
        return []  # no driver, no GPU: nothing to fix
    except pynvml.NVMLError as error:
        raise Stop(f"NVML: {error}", "fix what nvidia-smi reports") from None


def _handle(name: str):
    """NVML's handle of a GPU, or of a part of a GPU (MIG). CUDA's UUID does not say which it is."""
    import pynvml

    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{name}")
    except pynvml.NVMLError_NotFound:
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{name}")


def _cuda_uuids() -> list[str]:
    """Return the UUIDs of the GPUs that CUDA shows, in its order and without those that are hidden."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        init = cuda.cuInit
    except (OSError, AttributeError):  # no driver, or only the stub library that programs are linked with
        return []
    if (code := init(0)) == CUDA_ERROR_NO_DEVICE:
        return []
    count, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    code = code or cuda.cuDeviceGetCount(ctypes.byref(count))
    uuids = []
    for number in range(count.value):
        device = ctypes.c_int()
        code = code or cuda.cuDeviceGet(ctypes.byref(device), number) or cuda.cuDeviceGetUuid_v2(raw, device)
        uuids.append(str(uuid.UUID(bytes=bytes(raw))))
    if code:
        raise Stop(f"the CUDA driver reports error {code}", "fix what nvidia-smi reports")
    return uuids


def num_gpus() -> int:
    """Return the number of GPUs that a launch would see; 0 if the driver fails."""
    try:
        return len(gpus_here())
    except Stop:
        return 0


def half_precision() -> str:
    """bf16 if the first GPU has units for it (compute capability 8 and later), else fp16; fp32 without a GPU."""
    if not (gpus := gpus_here()):
        return "fp32"
    return "bf16" if gpus[0].capability >= 8 else "fp16"
