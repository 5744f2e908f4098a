"""Traces a model without values: one forward and one backward pass show every tensor that they make. It needs torch."""

import functools
import itertools
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from study.core import files
from study.core.errors import NotFollowed, Stop
from study.core.models import config as configs
from study.core.models.build import Adapted, build, freeze, quantize
from study.core.models.on_cuda import AsOnCuda
from study.core.models.step import inputs, logits_and_losses
from study.core.models.values import WithoutValues
from study.predict.trace import committed
from study.predict.trace.kernels import in_place, without_logits, zero3_linear
from study.predict.trace.options import Look, Recomputation, TraceOptions
from study.predict.trace.recorder import Recorder
from study.predict.trace.sections import MarkingRecorder, cut, lengthened, repeats
from study.predict.trace.tape import Tape, compact
from study.predict.trace.transformer import Transformer

aten = torch.ops.aten
# Operators whose results torchtitan's selective recomputation keeps, beside every second product.
SELECTED = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.study.fused_attention.default,
    aten.max.default,
}
GENERIC = "give --params with --layers and --hidden"


def look(model: Transformer) -> Look:
    """Return a model's tensors, buffers, kind and limits. It is built on `meta`."""
    config = _config(model)
    built = _built(model, config, torch.float32)
    blocks: dict[str, str] = {}  # by the beginning of a name up to its first number: the layers, of all stacks
    tensors = []
    outside = "embeddings"  # what comes after any layer and is in none of them is the head
    for name, tensor in built.named_parameters():
        block = outside
        if layer := re.match(r"(?:.*?\.)?\d+(?=\.)", name):
            block = blocks.setdefault(layer[0], f"layer.{len(blocks)}")
            outside = "head"
        tensors.append((name, list(tensor.shape), block, tensor.requires_grad))
    return Look(
        kind=configs.kind_of(config) or "",
        family=config.model_type,
        tensors=tensors,
        buffers_bytes=sum(buffer.numel() * buffer.element_size() for buffer in built.buffers()),
        has_fused_attention=type(built)._supports_sdpa,
        limit=configs.sequence_limit(config),
        vocabulary=getattr(config.get_text_config(decoder=True), "vocab_size", None),
        has_checkpointing=type(built).supports_gradient_checkpointing,
    )


@contextmanager
def _foreign(model: Transformer, kind: type[Stop], what: str, remedy: str) -> Iterator[None]:
    """Run code of others. A wrong number in a config, or one that nobody has tried, may cause any error."""
    try:
        with _quiet():
            yield
    except Stop:
        raise
    except Exception as error:
        raise kind(f"{model.name} {what} ({type(error).__name__}: {files.why(error)})", remedy) from error


def _config(model: Transformer, attention: str | None = None):
    with _quiet():  # this imports the model's module
        return configs.of_dict(json.loads(model.config), attention, model.dropout)


def _built(model: Transformer, config, dtype: torch.dtype) -> PreTrainedModel:
    with _foreign(model, Stop, "cannot be built from its config", f"correct its config.json, or {GENERIC}"):
        built = build(config, "meta", dtype)
    with _quiet(), torch.device("meta"):
        freeze(built, model.lora_rank, model.train_only, model.lora_targets, model.dora, model.adapter_dropout)
    return built


def _freeze_as_others(model: PreTrainedModel, options: TraceOptions) -> None:
    """Let adapters compute as PEFT's, and frozen weights be in bf16 or as bitsandbytes' if the options say so."""
    adapted = [module for module in model.modules() if isinstance(module, Adapted)]
    for module in adapted:
        module.like_peft = True
    if adapted and not options.checkpointing:  # only recomputation needs a gradient of the embeddings' output
        model.disable_input_require_grads()
    for name, tensor in model.named_parameters():
        is_half = options.frozen == "bf16" or (options.frozen == "bf16_except_norms" and "norm" not in name)
        if is_half and not tensor.requires_grad:
            tensor.data = tensor.data.bfloat16()
    if options.quantized_bits:
        quantize(model, options.quantized_bits)


def _selective(place: Callable) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return what a layer runs in, and what it runs in again: torchtitan's selective recomputation (parallelize.py)."""
    odd = {again: itertools.cycle((True, False)) for again in (False, True)}  # PyTorch before 2.13 asks again

    def policy(context, function, *_, **__) -> CheckpointPolicy:
        kept = next(odd[context.is_recompute]) if function is aten.mm.default else function in SELECTED
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(policy)

    @contextmanager
    def both() -> Iterator[None]:
        with place(), again:
            yield

    return first, both()


def _compute_again(model: PreTrainedModel, checkpointing: int, place: Callable) -> None:
    """Let the backward pass compute layers again. `checkpointing` is the value of a Recomputation."""
    if not model.supports_gradient_checkpointing:
        what = f"transformers has no activation checkpointing for {model.config.model_type}"
        raise Stop(what, "leave --checkpointing out")

    # backward() puts function modes aside, so layers that run again enter theirs themselves
    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        return _selective(place) if checkpointing == Recomputation.SELECTIVE.value else (nullcontext(), place())

    with _quiet():  # non-reentrant, as in the trainer
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})


def _loss(config, model: PreTrainedModel, batch: dict, options: TraceOptions) -> torch.Tensor:
    if options.loss == "chunked":
        return without_logits(config, model, batch)
    dtype = next(model.parameters()).dtype
    with in_place() if options.loss == "in_place" else nullcontext():
        return logits_and_losses(config, model, batch, dtype, options.logits == "fp32")[1].mean()


def _pass(model: Transformer, options: TraceOptions, rows: int, kind: type[Recorder] = Recorder) -> Tape:
    config = _config(model, options.attention)
    dtype = torch.bfloat16 if options.precision in ("bf16_cast", "bf16_gathered") else torch.float32
    built = _built(model, config, dtype)
    if options.cuda or options.frozen != "as_weights" or options.quantized_bits:
        _freeze_as_others(built, options)
    place: Callable = functools.partial(AsOnCuda, options.attention) if options.cuda else nullcontext
    if options.checkpointing:
        _compute_again(built, options.checkpointing, place)
    linear = zero3_linear if options.zero3_linear else nullcontext
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=options.precision in ("bf16", "bf16_gathered"))
    # Its error may also be of inputs that this type of model does not take: then its config is right.
    remedy = (
        f"if it trains elsewhere, the predictor does not know models of type {config.model_type}: rehearse a script "
        f"that trains it with `study virtual`, or {GENERIC}. Otherwise correct its config.json"
    )
    following = _foreign(model, NotFollowed, "cannot be followed without values", remedy)
    with following, FakeTensorMode(), WithoutValues():
        # Tensors that claim to be on a CPU, so operations are those of a CPU. Tied weights become one tensor again.
        built._apply(lambda tensor: torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype))
        built.tie_weights()
        batch = inputs(config, rows, options.sequence)
        recorder = kind([*built.parameters(), *built.buffers(), *batch.values()], model.is_partly_frozen)
        recorder.tape.append(("inputs", sum(tensor.untyped_storage().nbytes() for tensor in batch.values())))
        recorder.follow(built)
        kept: list[torch.Tensor] = []  # the logits, until the backward pass has ended
        if options.keeps_logits and options.loss != "chunked":
            built.register_forward_hook(lambda *seen: kept.append(seen[-1].logits))
        with place(), linear(), recorder:
            with autocast:
                loss = _loss(config, built, batch, options)
            recorder.tape.append(("event", "end of forward", 0))
            loss.backward()
    return recorder.tape


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' remarks on configs, and PyTorch's on missing devices and on operators that fail."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def whole(model: Transformer, options: TraceOptions, rows: tuple[int, ...], kind=Recorder) -> list[Tape]:
    """Return the tape of a pass over each number of rows, through every layer."""
    return [compact(_pass(model, options, count, kind)) for count in rows]


def followed(model: Transformer, options: TraceOptions, rows: tuple[int, ...]) -> list[Tape]:
    """Return the same tapes. Of a family that the package knows, few layers tell what more of them do."""
    layers = model.member.layers or 0
    if layers <= committed.MANY_LAYERS or committed.look(model.member) is None:
        return whole(model, options, rows)
    short = replace(model, config=json.dumps(committed.shorter(model.dimensions)))
    plans = [cut(tape) for tape in whole(short, options, rows, MarkingRecorder)]
    if not all(map(repeats, plans)):
        return whole(model, options, rows)
    return [compact(lengthened(sections, layers)) for sections in plans]
