"""Traces a model: it is built without values, and one forward and one backward pass show every tensor that they make.

This is the only module of `theory` that needs torch. It is imported when a model has to be traced, and not if an
earlier trace is in the cache.
"""

import contextlib
import functools
import itertools
import json
import logging
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from transformers import PreTrainedModel

from study.errors import Stop
from study.models import config as configs
from study.models.adapters import Adapted, Quantizing, quantize
from study.models.build import GROUPED, WithoutValues, build, freeze
from study.models.litgpt import as_litgpt, litgpt_attention, logits_in_pieces, losses_in_pieces
from study.models.step import Batch, inputs, logits_and_losses, mask
from study.predictor.tracing.long_rows import IS_LAST, keep_less
from study.predictor.tracing.losses import InPlace, without_logits
from study.predictor.tracing.on_cuda import AsOnCuda
from study.predictor.tracing.repeating import Followed, Stack, Unlike, repeat
from study.predictor.tracing.stacks import shorten
from study.predictor.tracing.tape import Tape, in_order
from study.predictor.tracing.transformer import SELECTIVE, Look, TraceOptions, Transformer
from study.predictor.tracing.zero3_linear import zero3_linear
from study.spec.settings import AUTOCAST

aten = torch.ops.aten


class _Watch(TorchDispatchMode):
    """Writes a tape: every tensor that the passes make, every kernel, and the operations of matrix products."""

    def __init__(self, known: list[torch.Tensor]):
        super().__init__()
        self.tape: Tape = []
        self._numbers: dict[int, int] = {}
        self._made = 0
        # Storages of the model and of its inputs, and references to those that a pass makes.
        self._live: dict[int, object] = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in known}

    def event(self, name: str, gradient: torch.Tensor | None = None) -> None:
        """Note a moment; with a gradient, that it is complete."""
        if gradient is None:
            self.tape.append(("event", name, 0))
        else:
            storage = gradient.untyped_storage()
            self.tape += [("event", name, storage.nbytes()), ("gradient", self._numbers[id(storage)])]

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in out if isinstance(out, list | tuple) else (out,):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        flops = 0
        packet = function._overloadpacket
        if count := PRODUCTS.get(packet):
            flops = count(*args, **(kwargs or {}), out_val=out)
        runs = not (function.is_view or function.namespace == "prim" or packet in NO_KERNEL)
        self.tape.append(("kernel", _kernel(packet, args, out, flops) if runs else None, flops))
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._live:
            return
        number = self._numbers[key] = self._made
        self._made += 1
        self.tape.append(("made", storage.nbytes(), _in_backward()))

        def gone(_) -> None:
            del self._live[key]
            self.tape.append(("freed", number))

        self._live[key] = weakref.ref(storage, gone)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _attention_flops(query, key, value, *_, **__) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward_flops(gradient, query, key, value, *_, **__) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)


KEPT = "keeps_activations"  # an attribute of a layer among others that are computed again
PRODUCTS = (
    flop_registry
    | GROUPED
    | {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
        torch.ops.study.fused_attention: _attention_flops,
        torch.ops.study.fused_attention_backward: _attention_backward_flops,
    }
)


# Operators whose results torchtitan's selective recomputation keeps, beside every second product.
SELECTED = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.study.fused_attention.default,
    aten.max.default,
}
NO_KERNEL = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view}
MATRICES = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}  # where their two factors begin in the arguments


def _kernel(packet, args: tuple, out, flops: int) -> tuple[str, tuple[int, ...]]:
    """Return a kernel's kind and sizes: "product", (count, m, n, k); "attention", (operations,); "other", (bytes,).

    A convolution is a product with as many operations and an inner size of 1024.
    """
    if packet in MATRICES:
        left, right = args[MATRICES[packet] :][:2]
        count = left.shape[0] if left.dim() == 3 else 1
        return "product", (count, left.shape[-2], right.shape[-1], left.shape[-1])
    if flops and "attention" in packet.__name__:
        return "attention", (flops,)
    if flops:
        return "product", (1, max(1, flops // (2 * 1024 * 1024)), 1024, 1024)
    tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, torch.Tensor)]
    return "other", (sum(_read_bytes(tensor) for tensor in tensors),)


def _read_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a kernel reads or writes of a tensor. An expanded one, such as a bias, is smaller than its shape."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def look(model: Transformer) -> Look:
    """A model's tensors, buffers, kind and limits. It is built on `meta`."""
    config = _config(model)
    built = _built(model, config, torch.float32)
    blocks = []
    tensors = []
    for key, tensor in built.named_parameters():
        numbered = re.match(r"(?:.*?\.)?\d+(?=\.)", key)
        if numbered and numbered[0] not in blocks:
            blocks.append(numbered[0])
        block = "head" if blocks else "embeddings"
        if numbered:
            block = f"layer.{blocks.index(numbered[0])}"
        tensors.append((key, list(tensor.shape), block, tensor.requires_grad))
    limit = configs.sequence_limit(config)
    return Look(
        kind=configs.kind_of(config) or "",
        family=config.model_type,
        tensors=tensors,
        buffers_bytes=sum(buffer.numel() * buffer.element_size() for buffer in built.buffers()),
        has_fused_attention=configs.class_for(config)._supports_sdpa,
        limit=limit and limit[0],
        limited_by=limit and limit[1],
        vocabulary=getattr(config.get_text_config(decoder=True), "vocab_size", None),
    )


def has_checkpointing(model: Transformer) -> bool:
    return configs.class_for(_config(model)).supports_gradient_checkpointing


def _refusal(model: Transformer, what: str, error: Exception) -> Stop:
    text = " ".join(str(error).split())
    reason = f"{type(error).__name__}: {text[:160]}{'...' if len(text) > 160 else ''}"
    return Stop(
        f"{model.name} {what} ({reason})", "correct its config.json, or give --params with --layers and --hidden"
    )


def _config(model: Transformer, attention: str | None = None):
    with _quiet():
        if model.code_from is not None:
            return configs.load(model.code_from, attention=attention, dropout=model.dropout, trust_remote_code=True)
        return configs.of_dict(json.loads(model.config), attention, model.dropout)


def _built(model: Transformer, config, dtype: torch.dtype) -> torch.nn.Module:
    with _quiet():
        try:
            built = build(config, "meta", dtype)
        except Exception as error:  # a wrong number in a config may cause any error
            raise _refusal(model, "cannot be built from its config", error) from error
        with torch.device("meta"):
            adapters = (model.lora_targets, model.dora, model.adapter_dropout)
            freeze(built, model.lora_rank, model.train_only, *adapters)
    return built


def _freeze_as_others(model: PreTrainedModel, options: TraceOptions) -> None:
    """Let adapters compute as PEFT's, and quantized layers as bitsandbytes'. Convert frozen weights to bf16, if told.

    PEFT lets the embeddings' output have a gradient only where recomputation needs it.
    """
    adapted = [module for module in model.modules() if isinstance(module, Adapted)]
    for module in adapted:
        module.like_peft = True
    if adapted and not options.checkpointing:
        model.disable_input_require_grads()
    for name, tensor in model.named_parameters() if options.frozen != "as_weights" else ():
        stays = options.frozen == "bf16_except_norms" and "norm" in name
        if not tensor.requires_grad and not stays:
            tensor.data = tensor.data.to(torch.bfloat16)
    if options.quantized_bits:
        how = Quantizing(options.quantized_bits, options.old_bitsandbytes, options.litgpt, options.reentrant)
        quantize(model, how)
    if options.litgpt:
        as_litgpt(model)


def _keep_between(model: torch.nn.Module, every: int) -> None:
    """Mark the layers that keep their activations, all but every n-th. The mark makes them another kind of layer."""
    for layers in model.modules():
        for place, layer in enumerate(layers.children() if isinstance(layers, torch.nn.ModuleList) else ()):
            setattr(layer, KEPT, place % every > 0)


def _selective(place: Callable) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return what a layer runs in, and what it runs in again: torchtitan's selective recomputation (parallelize.py)."""
    odd = itertools.cycle((True, False))

    def policy(_, function, *__, **___) -> CheckpointPolicy:
        kept = next(odd) if function is aten.mm.default else function in SELECTED
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(policy)

    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with place(), again:
            yield

    return first, both()


def _compute_again(model: PreTrainedModel, place: Callable, selectively: bool) -> None:
    """Let the backward pass compute the layers again that do not keep their activations."""
    if not model.supports_gradient_checkpointing:
        what = f"transformers has no activation checkpointing for {model.config.model_type}"
        raise Stop(what, "leave --checkpointing out")
    # backward() puts function modes aside, so layers that run again enter theirs themselves
    contexts = functools.partial(_selective, place) if selectively else lambda: (contextlib.nullcontext(), place())
    again = {"use_reentrant": False, "context_fn": contexts}
    model.gradient_checkpointing_enable(again)
    for layer in model.modules():
        if getattr(layer, KEPT, False):
            setattr(layer, "gradient_checkpointing", False)  # noqa: B010


def _pass(model: Transformer, options: TraceOptions, rows: int, with_all_layers: bool) -> tuple[Tape, list[Stack]]:
    """Return the tape of a pass over `rows` rows, and the stacks of which only some layers were followed."""
    config = _config(model, options.attention)
    dtype = torch.bfloat16 if options.precision in ("bf16_cast", "bf16_gathered") else torch.float32
    built = _built(model, config, dtype)
    if options.cuda or options.frozen != "as_weights" or options.quantized_bits or options.litgpt:
        _freeze_as_others(cast(PreTrainedModel, built), options)
    # A model with its own code may treat layers differently in ways that `shorten` does not know.
    if options.checkpointing > 1:
        _keep_between(built, options.checkpointing)
    stacks = [] if with_all_layers or model.code_from else shorten(built)
    place = functools.partial(AsOnCuda, options.cuda) if options.cuda else contextlib.nullcontext
    with _quiet(), FakeTensorMode(), WithoutValues():
        if options.checkpointing:
            _compute_again(cast(PreTrainedModel, built), place, options.checkpointing == SELECTIVE)
        keep_less(built, options.long_rows, place)
        _give_device(built)
        try:
            batch = inputs(config, rows, options.sequence)
        except Exception as error:  # such as a vocabulary of 0
            raise _refusal(model, "cannot be given rows", error) from error
        watch = _Watch([*built.parameters(), *built.buffers(), *batch.values()])
        watch.tape.append(("inputs", sum(tensor.untyped_storage().nbytes() for tensor in batch.values())))
        _follow(built, watch)
        for stack in stacks:
            _mark(cast(torch.nn.ModuleList, built.get_submodule(stack.name)), stack.name, watch)
        try:
            with place(), zero3_linear(options.zero3_linear), watch:
                _run(config, options, built, batch, watch)
        except Stop:
            raise
        except Exception as error:  # in foreign code, with a config that nobody has tried
            if stacks:
                raise Unlike("the model does not run with fewer layers") from error
            raise _refusal(model, "cannot be followed without values", error) from error
    return watch.tape, stacks


def _run(config, options: TraceOptions, built: torch.nn.Module, batch: Batch, watch: _Watch) -> None:
    dtype = next(built.parameters()).dtype
    attention = litgpt_attention() if options.litgpt else contextlib.nullcontext()
    with attention:  # in the backward pass, too: recomputed layers run there
        loss, held = _loss(config, options, built, batch, dtype)
        watch.event("end of forward")
        loss.backward()
    del held


def _loss(config, options: TraceOptions, built: torch.nn.Module, batch: Batch, dtype: torch.dtype) -> tuple:
    """Return the loss, and the logits if the loop holds them until the backward pass has ended, as litgpt's does.

    litgpt computes the head in pieces where adapters train.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=options.precision in (*AUTOCAST, "bf16_gathered")):
        if options.loss == "chunked":
            return without_logits(config, built, batch), None
        if options.litgpt and any(isinstance(module, Adapted) for module in built.modules()):
            pieces = logits_in_pieces(cast(PreTrainedModel, built), batch, mask(config, batch, dtype))
            return losses_in_pieces(pieces, batch).mean(), pieces
        with InPlace() if options.loss == "in_place" else contextlib.nullcontext():
            logits, losses = logits_and_losses(config, built, batch, dtype, options.logits == "fp32")
            held = logits if options.litgpt else None
            del logits
            return losses.mean(), held


def _give_device(model: torch.nn.Module) -> None:
    """Replace the tensors on `meta` by tensors that claim to be on a CPU, so that operations are those of a CPU."""
    copies: dict[int, torch.nn.Parameter] = {}

    def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")

    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in copies:
                copies[id(parameter)] = torch.nn.Parameter(on_cpu(parameter), requires_grad=parameter.requires_grad)
            module._parameters[key] = copies[id(parameter)]
        for key, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            module._buffers[key] = on_cpu(buffer)


def _follow(model: torch.nn.Module, watch: _Watch) -> None:
    """Note when the forward pass reaches a tensor, and when a gradient is complete; then the gradient is dropped."""
    names: dict[int, str] = {id(tensor): name for name, tensor in model.named_parameters()}
    used = set()

    def reaches(module: torch.nn.Module, _) -> None:
        for tensor in module.parameters(recurse=False):
            if id(tensor) not in used and not _in_backward():
                used.add(id(tensor))
                watch.event("use " + names[id(tensor)])

    def complete(tensor: torch.Tensor) -> None:
        if not getattr(tensor, IS_LAST, True):
            return
        watch.event("gradient " + names[id(tensor)], tensor.grad)
        tensor.grad = None

    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(reaches)
    for tensor in model.parameters():
        if tensor.requires_grad:
            tensor.register_post_accumulate_grad_hook(complete)


def _mark(layers: torch.nn.ModuleList, stack: str, watch: _Watch) -> None:
    """Mark on the tape where each layer of a stack begins in each phase, and where the stack ends."""

    def forward(stack: str | None, place: int) -> None:
        if not _in_backward():
            watch.tape.append(("layer", "forward", stack, place))

    def backward(values, stack: str | None, place: int) -> None:
        """The mark comes when the gradient of these values is computed."""
        tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor) and value.requires_grad)
        if not _in_backward() and (tensor := next(tensors, None)) is not None:
            tensor.register_hook(lambda _: watch.tape.append(("layer", "backward", stack, place)))

    for place, layer in layers.named_children():
        layer.register_forward_pre_hook(lambda *_, place=int(place): forward(stack, place))
        layer.register_forward_hook(lambda *values, place=int(place): backward(values[-1], stack, place))
    *_, last = layers
    last.register_forward_hook(lambda *_: forward(None, 0))
    next(iter(layers)).register_forward_pre_hook(lambda _, *values: backward(values, None, 0), with_kwargs=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' remarks on configs, and PyTorch's on missing devices."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def followed(model: Transformer, options: TraceOptions, rows: tuple[int, ...], with_all_layers=False) -> Followed:
    """Return a pass over each number of rows.

    Without `with_all_layers`, only some of the layers are followed if they repeat each other.
    """
    try:
        passes = [_pass(model, options, count, with_all_layers) for count in rows]
        both = Followed([in_order(tape) for tape, _ in passes], passes[0][1])
        for tape in both.tapes:
            repeat(tape, both.stacks)
    except Unlike:
        if with_all_layers:
            raise
        return followed(model, options, rows, with_all_layers=True)
    return both
