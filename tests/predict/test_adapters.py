"""Passes over models with PEFT's adapters and bitsandbytes' weights, compared with the predicted bytes.

The real passes run on a CPU, and are told as on a GPU whether autocast is on. Those over quantized weights ran once:
bitsandbytes is not among what the tests install.
"""

import contextlib

import pytest
import torch

from study.core.models import config as configs
from study.core.models.build import build
from study.predict.engines import engine_of
from study.predict.trace import tracing
from study.predict.trace.transformer import Transformer
from tests.conftest import table
from tests.predict.families import config_of, held_by
from tests.predict.trainings import training_of

pytestmark = pytest.mark.usefixtures("without_traces")
ROWS, SEQUENCE, RANK = 3, 40, 4
MEASURED = table("predict/adapters.toml")


def dimensions(family: str) -> dict:
    """Return a small config whose matrices bitsandbytes divides into blocks of 64."""
    if family == "gpt2":
        return config_of(family, n_inner=192, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    return config_of(family, intermediate_size=192)


def real_model(config, targets, training, dropout=False, dora=False, checkpointing=False, keeps_logits=False):
    """Return a model as PEFT prepares it."""
    import peft  # here, and not in each worker of the tests: it takes seconds

    model = build(config, "cpu", torch.bfloat16)
    kind = {"use_dora": dora, "fan_in_fan_out": config.model_type == "gpt2", "lora_dropout": 0.1 if dropout else 0.0}
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=targets.split(), **kind))
    for tensor in filter(lambda each: each.requires_grad, model.parameters()):
        if training == "adapters in bf16":
            tensor.data = tensor.data.bfloat16()
        tensor.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if keeps_logits:  # as `out = model(...)` does in a loop
        model.register_forward_hook(lambda *seen: setattr(model, "out", seen[-1]))
    return model.train()


@pytest.mark.parametrize(("family", "targets", "training", "more", "kept", "peak"), MEASURED["cases"])
def test_what_adapters_hold_is_predicted(monkeypatch, family, targets, training, more, kept, peak):
    adapters = {"dora": more.get("dora", False), "adapter_dropout": more.get("dropout", False)}
    predicted = Transformer.of(
        dimensions(family), family, lora_rank=RANK, lora_targets=tuple(targets.split()), **adapters
    )
    values = {name: more[name] for name in ("quantized", "checkpointing") if name in more}
    values |= MEASURED["trainings"][training]
    values["keeps_logits"] = more.get("keeps_logits", False)
    if training == "adapters in bf16":  # on a CPU these are the trainer's own adapters
        values |= {"device": "cuda"}
        monkeypatch.setattr(tracing, "AsOnCuda", lambda _: contextlib.nullcontext())
    ours = training_of(predicted, micro_batch=ROWS, sequence=SEQUENCE, **values)
    seen = ours.profile
    most = max(sum(now.values()) for when, now in engine_of(ours).instants(seen) if when == "backward")
    assert seen.kept == pytest.approx(kept, rel=0.001)
    assert most == pytest.approx(peak, rel=0.001)


@pytest.mark.parametrize(
    ("family", "targets", "training", "more", "kept", "peak"),
    [case for case in MEASURED["cases"] if "quantized" not in case[3]],
)
def test_peft_still_holds_as_much(family, targets, training, more, kept, peak, monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu", ask=torch.is_autocast_enabled: ask(device))
    config = configs.of_dict(dimensions(family), "sdpa")
    model = real_model(config, targets, training, **more)
    assert held_by(monkeypatch, config, model, ROWS, SEQUENCE, torch.bfloat16, training == "autocast") == (kept, peak)
