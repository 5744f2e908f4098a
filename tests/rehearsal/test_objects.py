"""Objects that ranks exchange, where the other ranks do not exist."""

import inspect

import pytest
from torch import distributed as dist
from torch.distributed import distributed_c10d

from study.rehearsal import ranks

NAMES = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "monitored_barrier")


def test_what_stands_for_a_function_takes_the_arguments_that_pytorch_s_takes(monkeypatch):
    """`gather_object(obj=...)` of a sharded checkpoint was refused, and the script blamed."""
    theirs = {name: inspect.signature(getattr(dist, name)) for name in NAMES}
    for name in (*NAMES, "init_process_group", "destroy_process_group"):
        for module in (dist, distributed_c10d):
            monkeypatch.setattr(module, name, getattr(module, name))
    ranks.answer_alone(lambda name: None)
    for name, signature in theirs.items():
        inspect.signature(getattr(dist, name)).bind(**dict.fromkeys(signature.parameters))


@pytest.mark.parametrize("objects", [None, ["", ""]])
def test_a_rank_alone_gathers_what_it_has_itself(monkeypatch, objects):
    for name in (*NAMES, "init_process_group", "destroy_process_group"):
        for module in (dist, distributed_c10d):
            monkeypatch.setattr(module, name, getattr(module, name))
    ranks.answer_alone(lambda name: None)
    dist.gather_object(obj="mine", object_gather_list=objects, dst=0)
    assert objects in (None, ["mine", "mine"])
