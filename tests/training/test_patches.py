"""Changes to libraries: they last as long as they should, and have names that the record gives."""

import math
import types

import pytest
import torch

from study.measure import readback, roles


def test_a_config_with_odd_numbers_can_be_written():
    config = {"a": math.inf, "b": [-math.inf, math.nan], "c": 1.5, 4: None}
    assert readback._plain(config) == {"a": "never", "b": ["-Infinity", "NaN"], "c": 1.5, "4": None}


@pytest.mark.parametrize("in_lists", [False, True], ids=["torch 2.11", "torch 2.12"])
def test_fsdp2_is_read_under_the_names_of_each_release(in_lists):
    """Until torch 2.11 a module has one unit at most, and a group of ranks one bucket that is being reduced."""
    bucket, held = torch.zeros(8), torch.zeros(4)
    context = types.SimpleNamespace(all_gather_state=None)
    parameter = types.SimpleNamespace(_sharded_param_data=held, all_gather_outputs=[], unsharded_accumulated_grad=None)
    parameter.sharded_param = types.SimpleNamespace(grad=None)
    unit = types.SimpleNamespace(fsdp_params=[parameter], comm_ctx=context, _all_gather_result=None)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    for module, one in ((model, None), (model[0], unit)):  # the whole model has no parameters of its own
        state = types.SimpleNamespace(_modules=[module])
        vars(module)["_get_fsdp_state"] = lambda state=state: state
        keep(state, "_fsdp_param_group", one, in_lists)
    for reduced in (None, types.SimpleNamespace(reduce_scatter_input=bucket)):
        keep(context, "reduce_scatter_state", reduced, in_lists)
        assert list(roles.fsdp_units(model)) == [unit]
        found = dict(roles.fsdp_tensors(model))
        assert found["weights"] is held
        assert found["buckets"] == ([] if reduced is None else [bucket])


def keep(holder, name: str, one, in_lists: bool) -> None:
    if in_lists:
        setattr(holder, f"{name}s", [] if one is None else [one])
    else:
        setattr(holder, name, one)
