"""Any transformers model from its config: its kind, its inputs, and what it must not do."""

import json

import pytest
import torch

from study.core.errors import Stop
from study.core.models import config as configs
from study.core.models.build import build
from study.core.models.step import inputs, logits_and_losses
from tests.predict.families import SMALL, config_of

KINDS = {"bert": "encoder", "modernbert": "encoder", "deberta-v2": "encoder", "t5": "seq2seq", "vit": "vision"}
KINDS |= {"esm": "encoder", "whisper": "speech", "clip": "vision", "resnet": "vision"}


@pytest.mark.parametrize("name", SMALL["families"])
def test_every_kind_has_inputs_a_loss_of_each_row_and_gradients(name):
    config = configs.of_dict(config_of(name))
    assert configs.kind_of(config) == KINDS.get(name, "decoder")
    model = build(config, "cpu")
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    logits, losses = logits_and_losses(config, model, inputs(config, rows=3, sequence=16), torch.float32)
    losses.mean().backward()
    assert (losses.shape, losses.dtype, len(logits)) == ((3,), torch.float32, 3)
    assert len(set(losses.tolist())) == 3, "rows are different"
    if name not in ("clip", "resnet", "esm"):  # of CLIP, for example, the part that reads text is not used
        assert all(tensor.grad is not None for tensor in model.parameters() if tensor.requires_grad)


def test_code_of_a_model_is_refused_and_not_run(tmp_path):
    ran = tmp_path / "ran"
    (tmp_path / "modeling_own.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    values = config_of("llama") | {"auto_map": {"AutoConfig": "modeling_own.Own", "AutoModel": "modeling_own.Model"}}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(values))
    with pytest.raises(Stop, match=r"has Python code of its own \(modeling_own.py\), which was not run"):
        configs.load(str(tmp_path))
    (tmp_path / "modeling_own.py").unlink()
    assert configs.load(str(tmp_path)).model_type == "llama", "without that code it is transformers' own"
    config.write_text(json.dumps(values | {"model_type": "own"}))
    with pytest.raises(Stop, match="it needs Python code of its own"):
        configs.load(str(tmp_path))
    assert not ran.exists()


@pytest.mark.parametrize(
    ("values", "attention", "words"),
    [
        ({"model_type": "no_such"}, None, "cannot read the config"),
        ({"hidden_size": 64}, None, "cannot read the config .*model_type"),
        ({"model_type": "clip_text_model"}, None, "has no class to train a model of type clip_text_model"),
        (config_of("gemma2"), "sdpa", "no fused attention for gemma2"),
    ],
)
def test_what_cannot_be_built_is_a_sentence(values, attention, words):
    with pytest.raises(Stop, match=words):
        configs.of_dict(values, attention=attention)
