"""What a loop holds that keeps the outputs of a model with keys and values.

Measured with transformers 4.31 and torch 2.13 on a CPU: every storage that a step makes, in the third of three steps.
Six layers in bf16 were under PyTorch's non-reentrant checkpointing, and read three rows of 96 tokens.
"""

import pytest

from study.predict.estimate import outputs, profile
from study.predict.memory.memory_kinds import reserved_bytes
from study.predict.setup import Library, Setup
from study.predict.trace.transformer import Transformer

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4}
LLAMA |= {"vocab_size": 600, "num_hidden_layers": 6, "max_position_embeddings": 96}
UNTIL_LOSS = {"keeps_cache": True}
WITH_OUTPUTS = {"keeps_cache": True, "keeps_logits": True}
# Bytes of the forward and of the backward pass at most.
WITHOUT_CACHE = (2_487_348, 2_477_864)
MEASURED = [(UNTIL_LOSS, (2_929_716, 2_477_864)), (WITH_OUTPUTS, (4_063_284, 3_611_432))]


def setup(config: dict = LLAMA, ways: dict | None = None, device: str = "cpu", **adapters) -> Setup:
    values = {"precision": "bf16_pure", "checkpointing": True, "micro_batch": 3, "sequence": 96, "device": device}
    model = Transformer.of(config, "small", **adapters)
    return Setup(model=model, library=Library(**ways or {}), **values)


@pytest.mark.parametrize(("ways", "measured"), MEASURED)
def test_outputs_are_held_as_measured(ways, measured):
    plain, held = profile(setup()), profile(setup(ways=ways))
    forward, backward = (there - without for there, without in zip(measured, WITHOUT_CACHE, strict=True))
    assert sum(held.most) - sum(plain.most) == forward
    for with_outputs, without in zip(held.gradients, plain.gradients, strict=True):
        assert with_outputs.complete.kept - without.complete.kept == backward


def test_layers_with_much_attention_do_not_hold_the_outputs_before():
    """The peak is not at the loss: it is where the last layer has run again for its adapter's gradient."""
    wide = LLAMA | {"vocab_size": 8, "num_attention_heads": 32}
    plain, held = (profile(setup(wide, ways, lora_rank=2)) for ways in ({}, WITH_OUTPUTS))
    *cache, logits = outputs(setup(wide))
    assert sum(held.most) - sum(plain.most) < 2 * sum(cache) + logits


def test_keys_and_values_are_the_same_beside_adapters():
    assert outputs(setup()) == outputs(setup(lora_rank=2, lora_targets=("k_proj", "v_proj")))
    assert sum(outputs(setup())) == 6 * 2 * 64 * 2 * 288 + 4 * 600 * 288


def test_the_keys_and_values_of_gpt2_are_parts_of_one_tensor():
    small = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 600}
    assert outputs(setup(small)) == [3 * 64 * 2 * 288, 3 * 64 * 2 * 288, 4 * 600 * 288]


def test_the_allocator_holds_outputs_during_a_pass():
    plain, held = (reserved_bytes(setup(ways=ways, device="cuda")) for ways in ({}, WITH_OUTPUTS))
    assert held - plain >= sum(outputs(setup()))
