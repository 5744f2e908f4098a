"""What compiled layers and fused kernels do not keep, beside what PyTorch's own compiler keeps."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from study.predict.estimate import profile, spared_bytes
from study.predict.setup import Library, Setup
from study.predict.trace.transformer import SELECTIVE, Transformer

pytestmark = pytest.mark.usefixtures("module_without_traces")
LAYERS = 2
SIZES = {"hidden_size": 128, "intermediate_size": 448, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = LlamaConfig(**SIZES, num_hidden_layers=LAYERS, vocab_size=64)


def setup_of(**values) -> Setup:
    how = {"micro_batch": 2, "sequence": 256, "precision": "bf16_pure", "device": "cuda"} | values
    return Setup(model=Transformer.of(CONFIG.to_dict(), "llama"), **how)


def kept_bytes(model: torch.nn.Module) -> int:
    """Return the bytes that autograd keeps for the backward pass, without weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(torch.zeros(2, 256, dtype=torch.long)).logits.float().sum()
    size = sum(kept.values())
    loss.backward()
    return size


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # raised inside torch
def test_a_compiled_layer_spares_what_the_formula_says():
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    eager = kept_bytes(model)
    for place, layer in enumerate(model.model.layers):
        model.model.layers[place] = torch.compile(layer, backend="aot_eager_decomp_partition")
    kept_bytes(model)  # compiles
    assert eager - kept_bytes(model) == LAYERS * spared_bytes(setup_of())


def test_fused_layers_keep_less_until_their_backward_pass():
    plain, fused = profile(setup_of()), profile(setup_of(library=Library(fused_layers=True)))
    spared = 512 * (2 * 4 * 128 + 2 * 448)
    assert plain.kept - fused.kept == plain.most.kept - fused.most.kept == LAYERS * spared
    second = "model.layers.1.mlp.down_proj.weight"
    assert plain.at_use[second] - fused.at_use[second] == spared, "of the layer before it"
    less = {
        old.tensor.name: old.complete.kept - new.complete.kept
        for old, new in zip(plain.gradients, fused.gradients, strict=True)
    }
    assert (less["lm_head.weight"], less[second], less["model.embed_tokens.weight"]) == (2 * spared, spared, 0)
    assert min(each.complete.kept for each in fused.gradients) >= 0


@pytest.mark.parametrize(("checkpointing", "spared"), [(True, 0), (SELECTIVE, LAYERS * 512 * 2 * 128)])
def test_layers_that_are_computed_again_spare_their_last_product_at_most(checkpointing, spared):
    plain = setup_of(checkpointing=checkpointing)
    fused = dataclasses.replace(plain, library=Library(fused_layers=True))
    assert profile(plain).kept - profile(fused).kept == spared
