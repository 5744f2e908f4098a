"""Passes over models with PEFT's adapters and bitsandbytes' weights, compared with the predicted bytes.

The real passes run on a CPU. Two questions of the libraries are answered as on a GPU: whether autocast is on, and which
product of int8 weights is used.
"""

import contextlib
import importlib.util
import types

import pytest
import torch
from families import config_of
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from study.core.models import config as configs
from study.core.models.build import build
from study.core.models.step import inputs, logits_and_losses
from study.measure.memory import MemoryWatch
from study.predict.estimate import moments, profile
from study.predict.memory.engine import Engine
from study.predict.setup import Library, Setup
from study.predict.trace import tracing
from study.predict.trace.transformer import Transformer

pytestmark = pytest.mark.usefixtures("without_traces")
ROWS, SEQUENCE, RANK = 3, 40, 4
TWO = ("q_proj", "v_proj")
FOUR = ("q_proj", "k_proj", "v_proj", "o_proj")
SEVEN = (*FOUR, "gate_proj", "up_proj", "down_proj")
FORMATS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}
# What a training says, and the same in the words of a setup.
TRAININGS = {
    "autocast": {"precision": "bf16", "frozen": "bf16"},
    "no autocast": {"precision": "bf16", "frozen": "bf16_without_autocast"},
    "adapters in bf16": {"precision": "bf16_pure"},
    "prepared for k bits": {"precision": "bf16", "frozen": "as_weights"},
    "prepared for k bits, no autocast": {"precision": "fp32"},
    "prepared by TRL": {"precision": "bf16", "frozen": "bf16_except_norms"},
}
CASES = [  # bytes of real passes, with PEFT 0.21.2 and bitsandbytes 0.50.2: at the end of the forward pass, and at most
    ("llama", SEVEN, "autocast", {}, 1_054_408, 1_544_968),
    ("llama", SEVEN, "autocast", {"dropout": True}, 1_515_208, 2_005_768),
    ("llama", SEVEN, "autocast", {"checkpointing": True}, 311_528, 802_088),
    ("llama", TWO, "autocast", {"dora": True, "dropout": True}, 982_216, 1_472_776),
    ("llama", SEVEN, "no autocast", {"dropout": True}, 1_787_208, 2_277_768),
    ("llama", TWO, "no autocast", {"dora": True}, 1_017_288, 1_507_848),
    ("llama", SEVEN, "adapters in bf16", {"dropout": True}, 1_266_888, 1_757_448),
    ("gpt2", ("c_attn", "c_proj"), "no autocast", {}, 1_124_168, 1_614_728),
    ("llama", SEVEN, "autocast", {"quantized": "nf4", "dropout": True}, 1_284_808, 1_775_368),
    ("llama", SEVEN, "no autocast", {"quantized": "nf4"}, 1_326_408, 1_816_968),
    ("llama", TWO, "adapters in bf16", {"quantized": "nf4"}, 781_128, 1_271_688),
    ("llama", TWO, "autocast", {"quantized": "nf4", "dora": True}, 877_384, 1_367_944),
    ("llama", SEVEN, "prepared for k bits", {"quantized": "nf4", "dropout": True}, 1_829_064, 2_319_624),
    ("llama", SEVEN, "prepared for k bits", {"quantized": "nf4", "checkpointing": True}, 410_344, 900_904),
    ("mistral", TWO, "prepared for k bits, no autocast", {"quantized": "nf4"}, 1_186_888, 1_677_448),
    ("llama", SEVEN, "autocast", {"quantized": "int8", "dropout": True}, 1_423_048, 1_913_608),
    ("llama", SEVEN, "prepared for k bits", {"quantized": "int8", "checkpointing": True}, 748_264, 1_238_824),
    ("gpt2", ("c_attn",), "autocast", {"quantized": "int8"}, 964_552, 1_455_112),
    ("llama", SEVEN, "prepared by TRL", {"quantized": "nf4", "dropout": True}, 1_760_968, 2_251_528),
    ("llama", SEVEN, "prepared by TRL", {"quantized": "nf4", "checkpointing": True}, 326_888, 817_448),
    ("llama", FOUR, "prepared for k bits, no autocast", {"quantized": "nf4", "checkpointing": True}, 344_808, 835_368),
    ("llama", FOUR, "no autocast", {"checkpointing": True, "keeps_logits": True}, 434_408, 924_968),
    ("llama", FOUR, "autocast", {"quantized": "nf4", "keeps_logits": True}, 913_480, 1_404_040),
]


def dimensions(family: str) -> dict:
    """Return a small config whose matrices bitsandbytes divides into blocks of 64."""
    if family == "gpt2":
        sizes = {"vocab_size": 512, "n_positions": 128, "n_embd": 64, "n_inner": 192, "n_layer": 2, "n_head": 4}
        return {"model_type": "gpt2"} | sizes | dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    return config_of(family) | {"intermediate_size": 192}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu", ask=torch.is_autocast_enabled: ask(device))
    if importlib.util.find_spec("bitsandbytes"):
        import bitsandbytes

        def product(x, weight, out=None, state=None, threshold=0.0, bias=None):
            state.threshold = threshold
            return bitsandbytes.autograd._functions.MatMul8bitLt.apply(x, weight, out, bias, state)

        monkeypatch.setattr(bitsandbytes, "matmul", product)


def real_model(
    peft,
    config,
    targets,
    training,
    folder,
    quantized=None,
    dropout=False,
    dora=False,
    checkpointing=False,
    keeps_logits=False,
):
    """Return a model as PEFT prepares it."""
    model = build(config, "cpu", torch.bfloat16)
    if quantized:
        model.save_pretrained(folder)
        how = BitsAndBytesConfig(**FORMATS[quantized])
        kind = {"quantization_config": how, "dtype": torch.bfloat16, "device_map": {"": "cpu"}}
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", **kind)
    if training.startswith("prepared"):  # for few bits
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    kind = {"use_dora": dora, "fan_in_fan_out": config.model_type == "gpt2" and not quantized}
    adapters = peft.LoraConfig(r=RANK, target_modules=[*targets], lora_dropout=0.1 * dropout, **kind)
    model = peft.get_peft_model(model, adapters)
    for name, tensor in model.named_parameters():
        if tensor.requires_grad and training == "adapters in bf16":
            tensor.data = tensor.data.bfloat16()
        if training == "prepared by TRL" and ("embed_tokens" in name or "lm_head" in name):  # as in TRL 0.13.0
            tensor.data = tensor.data.bfloat16()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if keeps_logits:  # as `out = model(...)` does in a loop
        model.register_forward_hook(lambda *seen: setattr(model, "out", seen[-1]))
    return model.train()


def tensors_of(model) -> list[torch.Tensor]:
    """Return all tensors that a model keeps between passes, with the scales of quantized weights."""
    found = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        weight = getattr(module, "weight", None)
        for holder in (weight, getattr(module, "state", None), getattr(weight, "quant_state", None)):
            values = vars(holder).values() if hasattr(holder, "__dict__") else ()
            found += [each for each in values if isinstance(each, torch.Tensor)]
    return found


def measured(monkeypatch, config, model, autocast: bool) -> tuple[int, int]:
    """Bytes that a model holds: at the end of a forward pass, and at most until the backward pass ends."""
    batch = inputs(config, ROWS, SEQUENCE)
    known = [*tensors_of(model), *batch.values()]
    monkeypatch.setattr("study.measure.memory.gc", types.SimpleNamespace(collect=int, get_objects=lambda: known))
    for tensor in model.parameters():
        if tensor.requires_grad:
            tensor.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    cast = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with MemoryWatch("cpu", dict) as watch:
        before = watch.total
        with cast:
            loss = logits_and_losses(config, model, batch, torch.bfloat16)[1].mean()
        kept = watch.total - before
        loss.backward()
    return kept, watch.peak - before


@pytest.mark.parametrize(("family", "targets", "training", "more", "kept", "peak"), CASES)
def test_what_adapters_hold_is_predicted(monkeypatch, family, targets, training, more, kept, peak):
    adapters = {"dora": more.get("dora", False), "adapter_dropout": more.get("dropout", False)}
    predicted = Transformer.of(dimensions(family), family, lora_rank=RANK, lora_targets=targets, **adapters)
    values = {name: more[name] for name in ("quantized", "checkpointing") if name in more} | TRAININGS[training]
    library = Library(keeps_logits=more.get("keeps_logits", False))
    if training == "adapters in bf16":  # on a CPU these are the trainer's own adapters
        values |= {"device": "cuda"}
        monkeypatch.setattr(tracing, "AsOnCuda", lambda _: contextlib.nullcontext())
    setup = Setup(model=predicted, micro_batch=ROWS, sequence=SEQUENCE, library=library, **values)
    seen = profile(setup)
    most = max(sum(now.values()) for when, now in moments(Engine(setup), seen) if when == "backward")
    assert seen.kept == pytest.approx(kept, rel=0.001)
    assert most == pytest.approx(peak, rel=0.001)


@pytest.mark.parametrize(("family", "targets", "training", "more", "kept", "peak"), CASES)
def test_the_libraries_still_hold_as_much(
    family, targets, training, more, kept, peak, as_on_a_gpu, monkeypatch, tmp_path
):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    if "quantized" in more:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    config = configs.of_dict(dimensions(family), "sdpa")
    model = real_model(peft, config, targets, training, tmp_path, **more)
    autocast = training in ("autocast", "prepared for k bits", "prepared by TRL")
    assert measured(monkeypatch, config, model, autocast) == (kept, peak)
