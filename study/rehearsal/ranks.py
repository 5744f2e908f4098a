"""Collectives of a script with ranks that do not exist: they hold what rank 0 holds."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d

c10d = torch.ops.c10d
BY_ELEMENTS = {c10d._allgather_base_.default, c10d._reduce_scatter_base_.default}  # NCCL asks for no shapes


def answer_alone(note: Callable[[str], None]) -> None:
    """Let a script make its group again, and exchange objects, with the ranks that do not exist."""

    def all_gather_object(objects: list, mine, group=None) -> None:
        note("all_gather_object")
        objects[:] = [mine] * len(objects)

    def gather_object(mine, objects: list | None = None, *_, **__) -> None:
        note("gather_object")
        if objects is not None:
            objects[:] = [mine] * len(objects)

    def scatter_object_list(out: list, objects: list | None, *_, **__) -> None:
        note("scatter_object_list")
        out[0] = (objects or [None])[0]

    replaced = {
        "init_process_group": lambda *_, **__: None,  # it exists already
        "destroy_process_group": lambda *_, **__: None,
        "broadcast_object_list": lambda *_, **__: note("broadcast_object_list"),
        "monitored_barrier": lambda *_, **__: note("barrier"),
        "all_gather_object": all_gather_object,
        "gather_object": gather_object,
        "scatter_object_list": scatter_object_list,
    }
    for name, function in replaced.items():
        setattr(dist, name, function)
        setattr(distributed_c10d, name, function)


def fill_in(function, args) -> None:
    """After a collective of tensors with values: the other ranks have sent what this one has."""
    if function is c10d.allgather_.default:
        for outputs, mine in zip(args[0], args[1], strict=True):
            for output in outputs:
                _copy(output, mine)
    elif function is c10d._allgather_base_.default:
        output, mine = args[:2]
        if not isinstance(output, FakeTensor):
            _copy(output.view(-1, mine.numel()), mine)
    elif function is c10d.scatter_.default and args[1]:
        _copy(args[0][0], args[1][0][0])
    elif function is c10d._reduce_scatter_base_.default:
        output, mine = args[:2]
        _copy(output, mine[: output.numel()])


def _copy(output: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(output, FakeTensor):
        return
    if isinstance(value, FakeTensor):
        output.zero_()  # as its values are read
    else:
        output.copy_(value)
