"""Recognises errors that mean that memory is full, or that another rank is gone."""

import re

import torch

# How gloo, NCCL and torch's store report a connection that another rank has closed (torch 2.13; NCCL's are from its
# source and were never seen here).
LOST_CONNECTION = re.compile(
    "Connection closed by peer|Read error|Write error|Connection reset by peer|Broken pipe|"
    "Connection was likely closed|failed to recv|remote process exited|ncclRemoteError"
)


def device_is_full(error: BaseException) -> bool:
    """Whether the device refused memory: to PyTorch's allocator, or to a library with its own."""
    message = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "_STATUS_ALLOC_FAILED" in message:
        return True
    # NCCL, Triton and the pinning of host memory have their own messages.
    return "out of memory" in message and torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 2**30


def host_is_full(error: BaseException) -> bool:
    """Whether the host refused memory, by the messages of Python and PyTorch's CPU allocator."""
    messages = (
        "DefaultCPUAllocator: can't allocate memory",
        "std::bad_alloc",
        "Cannot allocate",
        "CUDA error: out of memory",  # pinning host memory; a full device has the same message
    )
    return isinstance(error, MemoryError) or any(words in str(error) for words in messages)


def lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank has closed its connection."""
    return isinstance(error, RuntimeError) and bool(LOST_CONNECTION.search(str(error)))
