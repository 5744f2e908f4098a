"""Collectives of a script with ranks that do not exist: they hold what rank 0 holds."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import default_planner
from torch.utils._pytree import tree_leaves

from study.rehearsal.request import Request

c10d = torch.ops.c10d
# After these all ranks have the same values.
AGREE = {c10d.allgather_.default, c10d._allgather_base_.default, c10d.allreduce_.default, c10d.broadcast_.default}
SAME_SIZES = {c10d.allreduce_.default, c10d.broadcast_.default}
MOST_BYTES = 2**20  # of a tensor that a script decides by
GIVEN = "given.pt"
save, load = torch.save, torch.load  # a script's are replaced
BY_ELEMENTS = {c10d._allgather_base_.default, c10d._reduce_scatter_base_.default}  # NCCL asks for no shapes


def answer_alone(note: Callable[[str], None]) -> None:
    """Let a script make its group again, and exchange objects, with the ranks that do not exist."""

    # With PyTorch's names: its checkpoints give arguments by them.
    def all_gather_object(object_list: list, obj, group=None) -> None:
        note("all_gather_object")
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj, object_gather_list: list | None = None, *_, **__) -> None:
        note("gather_object")
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def scatter_object_list(
        scatter_object_output_list: list, scatter_object_input_list: list | None = None, *_, **__
    ) -> None:
        note("scatter_object_list")
        scatter_object_output_list[0] = (scatter_object_input_list or [None])[0]

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
    # All ranks seem to save the parts of rank 0, which overlap, and a sharded checkpoint refuses such a plan.
    # PyTorch 2.13 returns a list of errors. Older releases return whether there is none.
    is_bool = default_planner._validate_global_plan.__annotations__["return"] is bool
    default_planner._validate_global_plan = lambda *_: True if is_bool else []  # type: ignore[assignment]


class Agreement:
    """What collectives gave rank 0, which rank 1 is given as well: scripts decide by it."""

    def __init__(self, folder: Path, request: Request):
        self.rank = request.rank
        self.keeps = request.evaluate or request.save  # only then a second rank is rehearsed
        self.path = (folder if self.rank == 0 else folder.parent) / GIVEN
        self.given: list[list[torch.Tensor]] = [] if self.rank == 0 else load(self.path)
        self._count = 0

    def note(self, function, args) -> None:
        """After a collective of this rank."""
        if not self.keeps or function not in AGREE:
            return
        here = [each for each in tree_leaves(args[0]) if type(each) is torch.Tensor and each.nbytes <= MOST_BYTES]
        self._count += 1
        if self.rank == 0:
            self.given.append([each.clone() for each in here])
        elif self._count <= len(self.given):
            there = self.given[self._count - 1]
            if [each.shape for each in here] == [each.shape for each in there]:
                for mine, first in zip(here, there, strict=True):
                    mine.copy_(first)

    def write(self) -> None:
        if self.rank == 0 and self.keeps:
            save(self.given, self.path)


def elements(function, args) -> int | None:
    """Return how many elements a collective of all ranks has, which none of them chooses. None: it may differ."""
    if function not in SAME_SIZES or dist.ProcessGroup.unbox(args[1]).size() < dist.get_world_size():
        return None
    return sum(each.numel() for each in args[0])


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
