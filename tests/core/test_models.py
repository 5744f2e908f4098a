"""Any transformers model from its config: its kind, its inputs, and what it must not do."""

import json

import pytest
import torch
from families import SEEING, SMALL, config_of
from torch._subclasses.fake_tensor import FakeTensorMode

from study.core.errors import Stop
from study.core.models import config as configs
from study.core.models.build import WithoutValues, build
from study.core.models.step import inputs, logits_and_losses

KINDS = {"bert": "encoder", "modernbert": "encoder", "deberta-v2": "encoder", "t5": "seq2seq", "vit": "vision"}
KINDS |= {"whisper": "speech"}


@pytest.mark.parametrize("name", SMALL)
def test_every_kind_has_inputs_a_loss_of_each_row_and_gradients(name):
    config = configs.of_dict(config_of(name))
    assert configs.kind_of(config) == KINDS.get(name, "decoder")
    model = build(config, "cpu")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    logits, losses = logits_and_losses(config, model, inputs(config, rows=3, sequence=16), torch.float32)
    losses.mean().backward()
    assert (losses.shape, losses.dtype) == ((3,), torch.float32)
    assert len(set(losses.tolist())) == 3, "rows are different"
    assert logits.shape[0] == 3
    without = [name for name, tensor in model.named_parameters() if tensor.requires_grad and tensor.grad is None]
    assert without == []


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in SMALL), ("mixtral", torch.bfloat16), ("vit", torch.bfloat16)],
)
def test_a_step_needs_no_values(name, dtype):
    """Mixtures of experts in fp32, too, and models that read a value of their mask or their image."""
    config = configs.of_dict(config_of(name))
    with FakeTensorMode(), WithoutValues():
        model = build(config, "cpu", dtype)
        _, losses = logits_and_losses(config, model, inputs(config, rows=2, sequence=16), dtype)
        losses.mean().backward()
    assert {tensor.grad.shape == tensor.shape for tensor in model.parameters() if tensor.grad is not None} == {True}
    assert all(tensor.grad is not None for key, tensor in model.named_parameters() if "experts" in key)


@pytest.mark.parametrize("name", SEEING)
def test_images_where_the_config_has_their_size_in_a_part_or_not_at_all(name):
    config = configs.of_dict(config_of(name))
    model = build(config, "cpu")
    logits, losses = logits_and_losses(config, model, inputs(config, rows=2, sequence=1), torch.float32)
    assert (losses.shape, len(logits), configs.kind_of(config)) == ((2,), 2, "vision")


def test_code_of_a_model_is_refused_and_not_run(tmp_path):
    ran = tmp_path / "ran"
    (tmp_path / "modeling_own.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    values = config_of("llama") | {"auto_map": {"AutoConfig": "modeling_own.Own", "AutoModel": "modeling_own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(Stop, match=r"has Python code of its own \(modeling_own.py\), which was not run"):
        configs.load(str(tmp_path))
    assert not ran.exists()
    (tmp_path / "modeling_own.py").unlink()
    assert configs.load(str(tmp_path)).model_type == "llama", "without that code it is transformers' own"
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_type": "own"}))
    with pytest.raises(Stop, match="it needs Python code of its own"):
        configs.load(str(tmp_path))


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


def test_a_config_cannot_name_code_that_is_run(tmp_path, monkeypatch):
    """The trainer sets this key if the user trusts the code, but a stranger may write it as well."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    evil, ran = tmp_path / "evil", tmp_path / "ran"
    evil.mkdir()
    (evil / "modeling_evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Evil: pass\n")
    (tmp_path / "model").mkdir()
    names = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    content = config_of("llama") | {"auto_map": names, "code_from": str(evil)}
    (tmp_path / "model" / "config.json").write_text(json.dumps(content))
    config = configs.load(str(tmp_path / "model"))
    assert not ran.exists()
    assert configs.class_for(config).__name__ == "LlamaForCausalLM"
