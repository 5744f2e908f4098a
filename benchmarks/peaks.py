"""Measures what this machine can do: the host's pace, matrix products, copies, Adam on the host, the disk.

python benchmarks/peaks.py --json runs/peaks.json

No program reaches a datasheet's peak. Each number is the median of several tries after a warm-up, with the lowest and
the highest. The data are random, because zeros take less power and are faster.
"""

import fcntl
import json
import mmap
import os
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from study.core.errors import Stop, exit_on_stop
from study.core.gpus import num_gpus
from study.core.models.build import build
from study.core.models.config import load
from study.core.operators import load as load_operators
from study.core.options import parsed
from study.core.recipes import RECIPES
from study.core.shapes import VOCABULARY
from study.core.text import say
from study.measure import hardware
from study.measure.clock import Clock
from study.measure.hardware import CUDA
from study.predict.architecture import named
from study.predict.pace import pace
from study.predict.placement import Placement
from study.predict.step_time import PHASES, work
from study.predict.training import Batch, Training
from study.records.store import now_utc

DEVICE = torch.device("cuda" if CUDA else "cpu")
WARM_UP = 3
SUSTAINED_S = 3
PASSES = 10  # of the host's pace, between two looks at the clock
REQUEST_BYTES = 2**20  # of direct I/O, DeepSpeed's default
HOST_TOKENS = 16  # few, so that every kernel is shorter than its launch


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Measure this machine: the pace of the host, FLOP/s of products, bytes/s of copies, Adam on the host, the disk."""

    size: int = 8192 if CUDA else 1024  # Rows and columns of the matrices.
    copy_mib: int = 1024 if CUDA else 64  # Size of a copy in MiB.
    adam_parameters: int = 100_000_000 if CUDA else 4_000_000  # Parameters of DeepSpeed's Adam in host memory.
    disk_mib: int = 2048 if CUDA else 64  # Size in MiB of the file that is written to the disk and read back.
    disk: Path = Path()  # A folder on the disk for offloading.
    tries: int = 15  # The number of tries of each measurement.
    json: Path | None = None  # Write the numbers into this file, with a description of the machine.


def main() -> None:
    with exit_on_stop():
        options = parsed(Peaks, prog="python benchmarks/peaks.py", description=__doc__.partition("\n")[0])
        result = measure(options)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


def measure(options: Peaks) -> dict:
    """Measure everything, and print each result. A value that cannot be measured here is None."""
    if options.tries < 3:
        raise Stop(f"--tries must be at least 3 (got {options.tries})", "give 3 or more: fewer show no spread")
    if not options.disk.is_dir():
        raise Stop(f"--disk {options.disk} is not a folder", "give a folder on the disk to measure")
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32}
    if CUDA:
        kinds |= {"fp16": torch.float16, "tf32": torch.float32}
    flops = {}
    for name, dtype in kinds.items():
        products = matrix_products(dtype, name == "tf32", options)
        flops[name] = _printed(f"{name} matrix products", "FLOP/s", products)
    if CUDA and (bf16 := flops["bf16"]):  # after some seconds a GPU is warm, and at the limit of its power
        count = int(SUSTAINED_S * bf16["median"] / (2 * options.size**3))
        products = matrix_products(torch.bfloat16, False, replace(options, tries=max(count, options.tries)))
        flops["bf16 sustained"] = _printed(f"bf16 matrix products for {SUSTAINED_S} s", "FLOP/s", products)
    return {
        "measured_utc": now_utc(),
        "hardware": hardware.describe().model_dump(),
        "software": hardware.versions(),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "host_pace": host_pace(options.tries),
        "flops_per_s": flops,
        "copy_bytes_per_s": {name: _printed(f"copy {name}", "B/s", rate) for name, rate in copies(options).items()},
        "host_adam_parameters_per_s": _printed("Adam on the host", "parameters/s", host_adam(options)),
        "disk_bytes_per_s": disk_speed(options),
    }


def rates(work: Callable[[], object], amount: float, tries: int) -> dict:
    """Return `amount` per second over several tries, each timed separately, with the clock of the trainer's steps."""
    for _ in range(WARM_UP):
        work()
    clock = Clock()
    with clock.window(lambda: None) as tick:
        for _ in range(tries):
            work()
            tick()
    return _spread(amount, clock.step_s)


def _spread(amount: float, seconds: list[float]) -> dict:
    rates = sorted(amount / each for each in seconds)
    return {"median": statistics.median(rates), "low": rates[0], "high": rates[-1], "tries": len(rates)}


def host_pace(tries: int) -> float:
    """Return the host's seconds for a kernel of a tiny GPT, over those of the hosts that predictions know.

    Python decides them. Without a GPU, launches are missing.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them wait for each other in kernels so small
    ids = torch.randint(0, VOCABULARY, (1, HOST_TOKENS), device=DEVICE)
    model = build(load("gpt-tiny"), DEVICE)
    batch = Batch(rows=1, tokens=HOST_TOKENS)
    training = Training(named("gpt-tiny"), RECIPES["fp32"], batch, Placement(device=DEVICE.type))
    kernels = sum(work(training, phase).kernels for phase in PHASES)
    # Trainings do not wait for the GPU after each pass. With a wait after each a host beside an H200 took 45 us for a
    # kernel, and 19 to 22 in trainings (reports/h200).
    rate = rates(lambda: passes(model, ids), PASSES * kernels, tries)
    torch.set_num_threads(threads)
    pace_of_host = 1 / rate["median"] / pace().launch["unsaid"]
    say(f"host: {1e6 / rate['median']:.3g} us for a kernel, {pace_of_host:.2g} times what predictions assume")
    return pace_of_host


def passes(model: torch.nn.Module, ids: torch.Tensor) -> None:
    for _ in range(PASSES):
        model.zero_grad()  # else each pass adds to the gradients of the one before, in kernels that no work counts
        model(input_ids=ids, labels=ids).loss.backward()


def matrix_products(dtype: torch.dtype, tf32: bool, options: Peaks) -> dict:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    a, b = (torch.randn(options.size, options.size, device=DEVICE, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return rates(lambda: torch.matmul(a, b, out=out), 2 * options.size**3, options.tries)


def copies(options: Peaks) -> dict[str, dict]:
    """Return bytes per second of copies over the device's link, and within it, where each byte counts twice."""
    count = options.copy_mib * 2**20
    host_tensor = torch.randint(0, 256, (count,), dtype=torch.uint8)
    if not CUDA:
        other = torch.empty_like(host_tensor)
        return {"within host": rates(lambda: other.copy_(host_tensor), 2 * count, options.tries)}
    pinned = host_tensor.pin_memory()
    device = host_tensor.to(DEVICE)
    other = torch.empty_like(device)
    return {
        "within device": rates(lambda: other.copy_(device), 2 * count, options.tries),
        "host to device": rates(lambda: device.copy_(pinned, non_blocking=True), count, options.tries),
        "device to host": rates(lambda: pinned.copy_(device, non_blocking=True), count, options.tries),
        "host to device, not pinned": rates(lambda: device.copy_(host_tensor), count, options.tries),
    }


def host_adam(options: Peaks) -> dict | None:
    """Return parameters per second of the Adam that offloading uses, on all cores. None if it cannot be compiled."""
    try:
        load_operators(["cpu_adam"], num_gpus(), say)
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        parameter = torch.nn.Parameter(torch.randn(options.adam_parameters))
        optimizer = DeepSpeedCPUAdam([parameter])
    except Exception as error:  # a compilation can fail in many ways
        say(f"Adam on the host: none ({type(error).__name__}: {str(error).splitlines()[0][:100]})")
        return None
    parameter.grad = torch.randn_like(parameter)
    seconds = timeit.repeat(optimizer.step, number=1, repeat=WARM_UP + 5)  # host time: the device does nothing
    return _spread(options.adam_parameters, seconds[WARM_UP:])


def disk_speed(options: Peaks) -> dict | None:
    try:
        written, read = by_direct_io(options.disk, options.disk_mib * 2**20)
    except OSError as error:
        say(f"disk: refuses direct I/O ({error.strerror})")
        return None
    say(f"disk: {written / 1e9:.2f} GB/s written, {read / 1e9:.2f} GB/s read")
    return {"written": written, "read": read}


def by_direct_io(folder: Path, total_bytes: int) -> tuple[float, float]:
    """Return bytes per second of writing and reading a file with direct I/O, as DeepSpeed does, request by request."""
    request = mmap.mmap(-1, REQUEST_BYTES)  # anonymous maps are page-aligned, which direct I/O demands
    request.write(os.urandom(REQUEST_BYTES))
    starts = range(0, total_bytes, REQUEST_BYTES)
    with tempfile.TemporaryFile(dir=folder) as open_file:  # without a name, so nothing is left behind
        file = open_file.fileno()
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
        started = time.perf_counter()
        written_bytes = sum(os.pwrite(file, request, start) for start in starts)
        os.fsync(file)
        between = time.perf_counter()
        read_bytes = sum(os.preadv(file, [request], start) for start in starts)
        return written_bytes / (between - started), read_bytes / (time.perf_counter() - between)


def _printed(what: str, unit: str, rate: dict | None) -> dict | None:
    if rate:
        say(f"{what}: {rate['median']:.3g} {unit} ({rate['low']:.3g} to {rate['high']:.3g})")
    return rate


if __name__ == "__main__":
    main()
