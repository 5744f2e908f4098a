"""What compiled layers and fused kernels do not keep, beside what PyTorch's own compiler keeps."""

import dataclasses

import pytest

from study.predict.loop import Loop
from study.predict.trace.transformer import Transformer
from study.predict.training import Recomputation, Training
from tests.predict.families import config_of
from tests.predict.trainings import training_of

pytestmark = pytest.mark.usefixtures("module_without_traces")
LAYERS = 2
CONFIG = config_of("llama", hidden_size=128, intermediate_size=448)


def training(**values) -> Training:
    how = {"micro_batch": 2, "sequence": 256, "precision": "bf16_pure", "device": "cuda"} | values
    return training_of(Transformer.of(CONFIG, "llama"), **how)


def test_fused_layers_keep_less_until_their_backward_pass():
    plain, fused = training().profile, training(fused_layers=True).profile
    spared = 512 * (2 * 4 * 128 + 2 * 448)
    assert plain.kept - fused.kept == plain.most.kept - fused.most.kept == LAYERS * spared
    assert plain.at_first_gradient.kept - fused.at_first_gradient.kept == LAYERS * spared
    second = "model.layers.1.mlp.down_proj.weight"
    assert plain.at_use[second] - fused.at_use[second] == spared, "of the layer before it"
    less = {
        old.tensor.name: old.complete.kept - new.complete.kept
        for old, new in zip(plain.gradients, fused.gradients, strict=True)
    }
    assert (less["lm_head.weight"], less[second], less["model.embed_tokens.weight"]) == (2 * spared, spared, 0)
    assert min(each.complete.kept for each in fused.gradients) >= 0


@pytest.mark.parametrize(("checkpointing", "spared"), [(True, 0), (Recomputation.SELECTIVE, LAYERS * 512 * 2 * 128)])
def test_layers_that_are_computed_again_spare_their_last_product_at_most(checkpointing, spared):
    plain = training(checkpointing=checkpointing)
    fused = dataclasses.replace(plain, loop=Loop(fused_layers=True))
    assert plain.profile.kept - fused.profile.kept == spared
