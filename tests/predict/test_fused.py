"""What compiled layers and fused kernels do not keep, beside what PyTorch's own compiler keeps."""

import dataclasses

import pytest
from families import config_of

from study.predict.estimate import profile
from study.predict.setup import Library, Setup
from study.predict.trace.transformer import SELECTIVE, Transformer

pytestmark = pytest.mark.usefixtures("module_without_traces")
LAYERS = 2
CONFIG = config_of("llama", hidden_size=128, intermediate_size=448)


def setup_of(**values) -> Setup:
    how = {"micro_batch": 2, "sequence": 256, "precision": "bf16_pure", "device": "cuda"} | values
    return Setup(model=Transformer.of(CONFIG, "llama"), **how)


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
