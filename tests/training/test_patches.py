"""What is read of libraries' objects: under the names of each release, and as JSON can hold it."""

import math
import types

import pytest
import torch
from transformers import AutoConfig

from study.core.models.build import build
from study.measure import readback, roles
from study.training.patches import name_layers


def test_a_config_with_odd_numbers_can_be_written():
    config = {"a": math.inf, "b": [-math.inf, math.nan], "c": 1.5, 4: None}
    assert readback._plain(config) == {"a": "never", "b": ["-Infinity", "NaN"], "c": 1.5, "4": None}


def test_fsdp2_is_read_under_the_names_of_torch_2_11():
    """A module has one unit at most, and a group of ranks one bucket that is being reduced. Later they are lists."""
    held, bucket, of = torch.zeros(4), torch.zeros(8), types.SimpleNamespace
    parameter = of(_sharded_param_data=held, all_gather_outputs=[], unsharded_accumulated_grad=None)
    parameter.sharded_param = of(grad=None)
    context = of(all_gather_state=None, reduce_scatter_state=of(reduce_scatter_input=bucket))
    unit = of(fsdp_params=[parameter], comm_ctx=context, _all_gather_result=None)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    for module, one in ((model, None), (model[0], unit)):  # the whole model has no parameters of its own
        state = of(_modules=[module], _fsdp_param_group=one)
        vars(module)["_get_fsdp_state"] = lambda state=state: state
    assert list(roles.fsdp_units(model)) == [unit]
    found = dict(roles.fsdp_tensors(model))
    assert found["weights"] is held
    assert found["buckets"] == [bucket]


LAYERS = {
    "llama": "LlamaDecoderLayer",
    "bert": "BertLayer",  # it names a class that holds the embeddings, too
    # These name no class, and Accelerate would shard none of their layers. The last one has stacks in its layers.
    "deberta-v2": "DebertaV2Layer",
    "biogpt": "BioGptDecoderLayer",
    "mobilebert": "MobileBertLayer",
}


@pytest.mark.parametrize("family", LAYERS)
def test_the_layers_of_each_family_are_units(family):
    plugin = types.SimpleNamespace()
    model = build(AutoConfig.for_model(family, num_hidden_layers=2), "meta")
    name_layers(types.SimpleNamespace(state=types.SimpleNamespace(fsdp_plugin=plugin)), model)
    assert plugin.transformer_cls_names_to_wrap == [LAYERS[family]]
    assert [type(module).__name__ for module in model.modules()].count(LAYERS[family]) == 2
