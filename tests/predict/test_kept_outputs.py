"""What a loop holds that keeps the outputs of a model with keys and values.

Measured with transformers 4.31 and torch 2.13 on a CPU: every storage that a step makes, in the third of three steps.
Six layers in bf16 were under PyTorch's non-reentrant checkpointing, and read three rows of 96 tokens.
"""

from study.predict.allocator import reserved_bytes
from study.predict.outside.loops import OthersTraining
from study.predict.trace.transformer import Transformer
from tests.predict.trainings import training_of

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4}
LLAMA |= {"vocab_size": 600, "num_hidden_layers": 6, "max_position_embeddings": 96}
HELD = {"keeps_cache": True, "keeps_logits": True}
# By what a loop keeps: bytes of the forward and of the backward pass at most.
MEASURED = {"": (2_487_348, 2_477_864), "keeps_cache": (2_929_716, 2_477_864), "both": (4_063_284, 3_611_432)}


def training(config: dict = LLAMA, ways: dict | None = None, device: str = "cpu", **adapters) -> OthersTraining:
    values = {"precision": "bf16_pure", "checkpointing": True, "micro_batch": 3, "sequence": 96, "device": device}
    return training_of(Transformer.of(config, "small", **adapters), **values | (ways or {}))


def test_outputs_are_held_as_measured():
    plain = training().profile
    for name, ways in (("keeps_cache", {"keeps_cache": True}), ("both", HELD)):
        forward, backward = (there - without for there, without in zip(MEASURED[name], MEASURED[""], strict=True))
        held = training(ways=ways).profile
        assert sum(held.most) - sum(plain.most) == forward
        for with_outputs, without in zip(held.gradients, plain.gradients, strict=True):
            assert with_outputs.complete.kept - without.complete.kept == backward


def test_keys_and_values_are_the_same_beside_adapters_and_parts_of_one_tensor_in_gpt2():
    assert sum(training().outputs) == 6 * 2 * 64 * 2 * 288 + 4 * 600 * 288
    assert training().outputs == training(lora_rank=2, lora_targets=("k_proj", "v_proj")).outputs
    small = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 600}
    assert training(small).outputs == [3 * 64 * 2 * 288, 3 * 64 * 2 * 288, 4 * 600 * 288]


def test_the_allocator_holds_outputs_during_a_pass():
    plain, held = (reserved_bytes(training(ways=ways, device="cuda")) for ways in ({}, HELD))
    assert held - plain >= sum(training().outputs)
