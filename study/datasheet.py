"""What devices can do at their best, by their exact names. What is not in the table is None, never a guess."""

# Dense peaks in FLOP/s from the vendors' datasheets, without sparsity. V100 and T4 have no bf16 units and no TF32.
_A100 = {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12}
_H100_SXM = {"bf16": 989.4e12, "fp16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}
_V100_SXM = {"fp16": 125e12, "fp32": 15.7e12}
_V100_PCIE = {"fp16": 112e12, "fp32": 14e12}
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51.2e12},
    "NVIDIA H200": _H100_SXM,
    "Tesla V100-SXM2-16GB": _V100_SXM,
    "Tesla V100-SXM2-32GB": _V100_SXM,
    "Tesla V100-PCIE-16GB": _V100_PCIE,
    "Tesla V100-PCIE-32GB": _V100_PCIE,
    "NVIDIA L4": {"bf16": 121e12, "fp16": 121e12, "tf32": 60e12, "fp32": 30.3e12},
    "Tesla T4": {"fp16": 65e12, "fp32": 8.1e12},
    "NVIDIA GeForce RTX 4090": {"bf16": 165.2e12, "fp16": 165.2e12, "tf32": 82.6e12, "fp32": 82.6e12},
}


def peak_flops(device_name: str | None, precision: str, tf32: bool) -> float | None:
    """The peak that a precision recipe is measured against, or None where it is not known."""
    peaks = PEAK_FLOPS.get(device_name or "", {})
    if precision != "fp32":
        return peaks.get("bf16")
    return peaks.get("tf32", peaks.get("fp32")) if tf32 else peaks.get("fp32")
