"""Counts calls and bytes by collective, below DDP and ZeRO, where both call PyTorch's process group.

DeepSpeed's own logger cannot see DDP's reducer, which is C++; the dispatcher sees both. The bytes are logical: the size
of the whole tensor that a collective produces or consumes, whatever the backend does. Tests compute what gloo sends for
them, and the kernel's count of the bytes that the process wrote is a check of both.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from study.core.files import beside
from study.records.sections import Collective

ULYSSES = "dim_zero_all_to_all"  # DeepSpeed's own operator: the calls inside it are not dispatched again
NAMES = beside(__file__, "collectives.toml")
MOVES_NOTHING = {"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"}
KINDS = {name: kind for kind, names in NAMES.items() for name in names}


class CollectiveCounter(TorchDispatchMode):
    """Counts calls and bytes of each kind of collective.

    Bytes are those of the full tensor: the input of an all_reduce or a reduce_scatter, the output of an all_gather. So
    the traffic of all arms has the same unit.
    """

    def __init__(self):
        super().__init__()
        self.counts: dict[str, Collective] = {}
        self.not_counted: set[str] = set()  # collectives that are not in NAMES

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it comes again with the local parts
        out = function(*args, **(kwargs or {}))
        # DeepSpeed and DDP call c10d, where the output is an argument; DTensor and compiled code the functional ones.
        name = function.__name__.split(".")[0]
        if function.namespace == "c10d":
            self._count(name, args[:2], args)
        elif function.namespace == "_c10d_functional" or name == ULYSSES:
            self._count(name, (args[0], out), args)  # these return their output
        return out

    def _count(self, name: str, values, args) -> None:
        """Count one collective. Its input and output are both among the values; the larger one is the full tensor."""
        kind = KINDS.get(name)
        if kind is None:
            self.not_counted |= {name} - MOVES_NOTHING
            return
        sides = [[leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)] for value in values]
        # Of a reduce-scatter and an all-gather over N ranks, one side has N times the bytes of the other.
        full = max(sides, key=lambda side: sum(tensor.nbytes for tensor in side), default=[])
        count = self.counts.setdefault(kind, Collective(calls=0, bytes=0, bytes_by_dtype={}))
        count.calls += 1
        if kind == "barrier":  # its tensor only chooses the backend
            return
        group = _some_of_the_ranks(args)
        for tensor in full:
            dtype = str(tensor.dtype).removeprefix("torch.")
            count.bytes += tensor.nbytes
            count.bytes_by_dtype[dtype] = count.bytes_by_dtype.get(dtype, 0) + tensor.nbytes
            if group:
                count.bytes_by_group[group] = count.bytes_by_group.get(group, 0) + tensor.nbytes


def _some_of_the_ranks(args) -> str | None:
    """Return the ranks that take part in a collective, from its arguments: "0 2". None if all do."""
    # A functional collective has the name of its group as its last argument, the others have the group in a box.
    group: Any = args[-1]
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and arg._type().qualified_name().endswith(".ProcessGroup"):
            group = dist.ProcessGroup.unbox(arg)
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == dist.get_world_size():
        return None
    return " ".join(map(str, ranks))


def refuse_uncounted(counter: CollectiveCounter) -> None:
    """Raise for a collective that NAMES lacks: a sum without it would look like less traffic."""
    if counter.not_counted:
        names = " and ".join(sorted(counter.not_counted))
        raise NotImplementedError(f"{names}: not in NAMES, so their bytes were not counted: add them")
