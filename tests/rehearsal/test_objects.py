"""Objects that ranks exchange, where the other ranks do not exist."""

import inspect

import pytest
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from study.rehearsal import ranks

NAMES = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "monitored_barrier")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Signatures of PyTorch's own functions, which others stand for in a test."""
    theirs = {name: inspect.signature(getattr(dist, name)) for name in NAMES}
    for name in (*NAMES, "init_process_group", "destroy_process_group"):
        for module in (dist, distributed_c10d):
            monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(default_planner, "_validate_global_plan", default_planner._validate_global_plan)
    ranks.answer_alone(lambda name: None)
    return theirs


def test_what_stands_for_a_function_takes_the_arguments_that_pytorch_s_takes(alone):
    """`gather_object(obj=...)` of a sharded checkpoint was refused, and the script blamed."""
    for name, signature in alone.items():
        inspect.signature(getattr(dist, name)).bind(**dict.fromkeys(signature.parameters))


@pytest.mark.parametrize("objects", [None, ["", ""]])
def test_a_rank_alone_gathers_what_it_has_itself(objects):
    dist.gather_object(obj="mine", object_gather_list=objects, dst=0)
    assert objects in (None, ["mine", "mine"])


def test_parts_of_a_checkpoint_that_seem_to_overlap_are_no_error():
    """Both ranks seem to save the part that rank 0 has: the plan was refused, and the script blamed."""
    part = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    tensor = TensorStorageMetadata(TensorProperties(), torch.Size([8]), [part, part])
    assert default_planner._validate_global_plan([], Metadata({"weight": tensor})) in (True, [])
