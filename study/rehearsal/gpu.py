"""What `torch.cuda` answers in a rehearsal: as the named GPU would, without one."""

import contextlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from study.core.gpus import GPUS, Gpu, gpu_named
from study.rehearsal.request import Request
from study.rehearsal.user_code import Script
from study.rehearsal.values import on_cpu

TORCH: Any = torch  # whose parts are replaced
DEFAULT = "H100"  # whose answers a script gets if no GPU is named


class Stream:
    """A stream or an event: everything happens at once."""

    def __init__(self, *_, **__):
        self.device = torch.device("cpu")
        self.cuda_stream = 0

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: True if name == "query" else 0.0 if name == "elapsed_time" else self

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass


def answer_as_a_gpu(request: Request, script: Script) -> None:
    """Replace the functions of torch.cuda that scripts call."""
    gpu = GPUS[gpu_named(request.gpu or DEFAULT)]
    for attribute, function in answers(gpu, request.ranks_per_machine, script).items():
        setattr(torch.cuda, attribute, function)
        if hasattr(torch.accelerator, attribute):
            setattr(torch.accelerator, attribute, function)
    answer_for_any_accelerator(script, gpu.memory_bytes)
    # It asks for a GPU at each operation, and none may be touched.
    FakeTensorMode.avoid_device_init = True  # type: ignore[method-assign, assignment]
    TORCH.cuda.Stream = Stream
    TORCH.cuda.Event = Stream
    stay_on_cpu()


def answers(gpu: Gpu, count: int, script: Script) -> dict[str, Callable]:
    """Return what functions of torch.cuda do on a machine with so many GPUs of a kind, by their names."""
    capability = (9, 0) if gpu.has_bf16 else (7, 5)
    properties = types.SimpleNamespace(
        name=f"NVIDIA {gpu.kind}", total_memory=gpu.memory_bytes, major=capability[0], minor=capability[1],
        multi_processor_count=132, gcnArchName="", warp_size=32,
    )  # fmt: skip

    def is_available() -> bool:
        # Libraries that hear of a GPU would call its driver; a script only decides by it.
        return script.reader() is not None

    functions: dict[str, Callable] = {
        "is_available": is_available,
        "is_initialized": lambda: False,
        "device_count": lambda: count if script.reader() is not None else 0,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: capability,
        "mem_get_info": lambda *_: (gpu.memory_bytes, gpu.memory_bytes),
        "is_bf16_supported": lambda *_, **__: gpu.has_bf16,
        "current_stream": lambda *_: Stream(),
        "default_stream": lambda *_: Stream(),
        "stream": lambda *_: contextlib.nullcontext(),
        "memory_stats": lambda *_: {},
        "memory_summary": lambda *_, **__: "",
        "get_rng_state": lambda *_: torch.get_rng_state(),
    }
    for zero in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        functions[zero] = lambda *_: 0
    for silent in (
        "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all",
        "set_rng_state", "set_per_process_memory_fraction", "ipc_collect", "init", "reset_max_memory_allocated",
    ):  # fmt: skip
        functions[silent] = lambda *_, **__: None  # one for each: the compiler tells functions apart by their identity
    return functions


def stay_on_cpu() -> None:
    """Replace what moves a model to a GPU, or computes there by autocast."""
    begin = torch.autocast.__init__

    def autocast(self, device_type: str, *args, **kwargs) -> None:
        begin(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    TORCH.autocast.__init__ = autocast
    TORCH.cuda.amp.common.amp_definitely_not_available = lambda: False  # otherwise a GradScaler turns itself off
    TORCH.nn.Module.cuda = lambda module, *_, **__: module
    move = torch.nn.Module.to

    def to(module, *args, **kwargs):
        kwargs = {key: on_cpu(value) for key, value in kwargs.items()}
        return move(module, *map(on_cpu, args), **kwargs)

    TORCH.nn.Module.to = to
    TORCH.nn.Module._apply = apply


def answer_for_any_accelerator(script: Script, memory_bytes: int) -> None:
    """Replace the functions of torch.accelerator that torch.cuda has under other names. PyTorch asks them itself."""

    def is_available() -> bool:
        return script.owns(sys._getframe(1).f_code.co_filename)

    find = torch.accelerator.current_accelerator

    def current_accelerator(*args, **kwargs) -> torch.device | None:
        mine = script.owns(sys._getframe(1).f_code.co_filename)
        return torch.device("cuda") if mine else find(*args, **kwargs)

    answers: dict[str, Callable] = {
        "is_available": is_available,
        "current_accelerator": current_accelerator,
        "current_device_index": lambda: 0,
        "set_device_index": lambda *_: None,
        "get_memory_info": lambda *_: (memory_bytes, memory_bytes),
    }
    for attribute, function in answers.items():
        setattr(torch.accelerator, attribute, function)


def apply(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True):
    """Convert a module's tensors. PyTorch's own way exchanges tensors without values, which others may refer to."""
    if recurse:
        for child in module.children():
            child._apply(function)
    with torch.no_grad():
        for name, parameter in module._parameters.items():
            if parameter is None or (converted := function(parameter)) is parameter:
                continue
            if converted.device == parameter.device:
                parameter.data = converted
            else:
                module._parameters[name] = torch.nn.Parameter(converted, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
    return module
