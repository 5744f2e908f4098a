"""What is read of libraries' objects, as JSON can hold it, and which layers FSDP takes for units."""

import math
import types

import pytest
from transformers import AutoConfig

from study.core.models.build import build
from study.measure import readback
from study.training.patches import name_layers


def test_a_config_with_odd_numbers_can_be_written():
    config = {"a": math.inf, "b": [-math.inf, math.nan], "c": 1.5, 4: None}
    assert readback._plain(config) == {"a": "never", "b": ["-Infinity", "NaN"], "c": 1.5, "4": None}


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
