"""A model looked at: built without values, one forward and one backward pass, every tensor that lives in between.

The only module of `theory` that needs torch. It is imported where a model has to be looked at, and not when an earlier
look is in the cache.
"""

import contextlib
import functools
import json
import logging
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from study.errors import Stop
from study.models import config as configs
from study.models.adapters import freeze
from study.models.build import build
from study.models.losses import InPlace, without_logits
from study.models.on_cuda import AsOnCuda
from study.models.shapes import WithoutValues
from study.models.step import Batch, inputs, logits_and_losses
from study.models.zero3_linear import zero3_linear
from study.spec.settings import AUTOCAST
from study.theory.transformer import Look, Pass, Transformer

aten = torch.ops.aten


@dataclass
class _Event:
    """A moment of the pass: what is held then, and all that was held since the event before it."""

    name: str
    kept: int
    in_use: int
    gradient: int  # bytes of the gradient that is complete
    since: list[tuple[int, int]] = field(default_factory=list)
    work: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # the kernels since the event before it


class _Watch(TorchDispatchMode):
    """Counts the bytes of live tensors, apart by the pass that made them; and the operations of matrix products."""

    def __init__(self, known: list[torch.Tensor]):
        super().__init__()
        self.kept = self.in_use = self.flops = 0
        self.since: list[tuple[int, int]] = []
        self.events: list[_Event] = []
        self.work: list[tuple[str, tuple[int, ...]]] = []
        self.log: list[tuple[int, ...]] = []  # what is made (0, bytes), freed (1, which) or a gradient (2, which)
        self._numbers: dict[int, int] = {}
        self._made = 0
        self._live = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in known}

    def event(self, name: str, gradient: int = 0) -> None:
        self.events.append(_Event(name, self.kept, self.in_use, gradient, self.since, self.work))
        self.since, self.work = [], []

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in out if isinstance(out, list | tuple) else (out,):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        self.since.append((self.kept, self.in_use))
        flops = 0
        if count := PRODUCTS.get(function._overloadpacket):
            flops = count(*args, **(kwargs or {}), out_val=out)
            self.flops += flops
        if not (function.is_view or function.namespace == "prim" or function._overloadpacket in NO_KERNEL):
            self.work.append(_kernel(function._overloadpacket, args, out, flops))
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._live:
            return
        backward = torch._C._current_graph_task_id() != -1
        self._change(size, backward)
        number = self._numbers[key] = self._made
        self._made += 1
        self.log.append((0, size))

        def gone(_) -> None:
            del self._live[key]
            self._change(-size, backward)
            self.log.append((1, number))

        self._live[key] = weakref.ref(storage, gone)

    def is_gradient(self, tensor: torch.Tensor) -> None:
        self.log.append((2, self._numbers[id(tensor.untyped_storage())]))

    def _change(self, size: int, backward: bool) -> None:
        if backward:
            self.in_use += size
        else:
            self.kept += size


def _attention_flops(query, key, value, *_, **__) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward_flops(gradient, query, key, value, *_, **__) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)


def _grouped_flops(left, right, *_, out_val, **__) -> int:
    """Each row of the left is multiplied with one group of the right."""
    inner = left.shape[-1]
    rows = out_val.numel() if left.dim() != 2 or right.dim() == 3 else left.shape[0] * right.shape[1]
    return 2 * rows * inner


PRODUCTS = flop_registry | {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    aten._grouped_mm: _grouped_flops,
    torch.ops.study.fused_attention: _attention_flops,
    torch.ops.study.fused_attention_backward: _attention_backward_flops,
}


NO_KERNEL = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view}
MATRICES = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}  # where their two factors begin in the arguments


def _kernel(packet, args: tuple, out, flops: int) -> tuple[str, tuple[int, ...]]:
    """A kernel as what its time depends on: ("product", (count, m, n, k)), ("attention", (operations,)), or the bytes
    that it reads and writes. A convolution is a product of the same operations with an inner size of 1024."""
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
    """What a kernel reads or writes of a tensor: an expanded one, such as a bias, has fewer bytes than elements."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def look(model: Transformer) -> Look:
    """What a model is: its tensors, buffers, kind and limits. Built on `meta`."""
    config = _config(model)
    built = _built(model, config, torch.float32)
    blocks, tensors = [], []
    for key, tensor in built.named_parameters():
        numbered = re.match(r"(?:.*?\.)?\d+(?=\.)", key)
        if numbered and numbered[0] not in blocks:
            blocks.append(numbered[0])
        block = f"layer.{blocks.index(numbered[0])}" if numbered else "head" if blocks else "embeddings"
        tensors.append((key, list(tensor.shape), block, tensor.requires_grad))
    limit = configs.sequence_limit(config)
    return Look(
        kind=configs.kind_of(config),
        family=config.model_type,
        tensors=tensors,
        buffers_bytes=sum(buffer.numel() * buffer.element_size() for buffer in built.buffers()),
        has_fused_attention=configs.class_for(config)._supports_sdpa,
        limit=limit and limit[0],
        limited_by=limit and limit[1],
        vocabulary=getattr(config.get_text_config(decoder=True), "vocab_size", None),
    )


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
        except Exception as error:  # whatever a wrong number in a config leads to
            raise _refusal(model, "cannot be built from its config", error) from error
        with torch.device("meta"):
            freeze(built, model.lora_rank, model.train_only)
    return built


def _freeze_in_bf16(model: torch.nn.Module) -> None:
    """Frozen weights as an expert loads them; what trains keeps its type."""
    for tensor in model.parameters():
        if not tensor.requires_grad:
            tensor.data = tensor.data.to(torch.bfloat16)


def trace(model: Transformer, way: Pass, rows: int) -> tuple[_Watch, dict[str, int]]:
    """A pass over so many rows as it was watched, and its operations and the bytes of its inputs."""
    config = _config(model, way.attention)
    dtype = torch.bfloat16 if way.precision in ("bf16_cast", "bf16_gathered") else torch.float32
    built = _built(model, config, dtype)
    if way.frozen == "bf16":
        _freeze_in_bf16(built)
    place = functools.partial(AsOnCuda, way.cuda) if way.cuda else contextlib.nullcontext
    with _quiet(), FakeTensorMode(), WithoutValues():
        if way.checkpointing:  # backward() puts function modes aside, so layers that run again enter theirs themselves
            options = {"use_reentrant": False, "context_fn": lambda: (contextlib.nullcontext(), place())}
            built.gradient_checkpointing_enable(options)
        _give_device(built)
        batch = inputs(config, rows, way.sequence)
        watch = _Watch([*built.parameters(), *built.buffers(), *batch.values()])
        _follow(built, watch)
        try:
            with place(), zero3_linear(way.zero3_linear), watch:
                _pass(config, way, built, batch, watch)
        except Stop:
            raise
        except Exception as error:  # of code that is not ours, for a config that nobody has tried
            raise _refusal(model, "cannot be followed without values", error) from error
        inputs_bytes = sum(tensor.untyped_storage().nbytes() for tensor in batch.values())
    return watch, {"flops": watch.flops, "inputs": inputs_bytes}


def _pass(config, way: Pass, built: torch.nn.Module, batch: Batch, watch: _Watch) -> None:
    dtype = next(built.parameters()).dtype
    with torch.autocast("cpu", torch.bfloat16, enabled=way.precision in (*AUTOCAST, "bf16_gathered")):
        if way.loss == "chunked":
            loss = without_logits(config, built, batch)
        else:
            with InPlace() if way.loss == "in_place" else contextlib.nullcontext():
                loss = logits_and_losses(config, built, batch, dtype, way.logits == "fp32")[1].mean()
    watch.event("end of forward")
    loss.backward()


def _give_device(model: torch.nn.Module) -> None:
    """Replace the tensors on `meta` by ones that claim to be on a CPU, whose operations then are a CPU's."""
    made: dict[int, torch.Tensor] = {}

    def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")

    for module in model.modules():
        for key, tensor in module._parameters.items():
            if tensor is not None:
                if id(tensor) not in made:
                    made[id(tensor)] = torch.nn.Parameter(on_cpu(tensor), requires_grad=tensor.requires_grad)
                module._parameters[key] = made[id(tensor)]
        for key, tensor in module._buffers.items():
            if tensor is not None:
                module._buffers[key] = on_cpu(tensor)


def _follow(model: torch.nn.Module, watch: _Watch) -> None:
    """Events when the forward pass comes to a tensor, and when a gradient is complete; it is dropped then."""
    names: dict[int, str] = {id(tensor): name for name, tensor in model.named_parameters()}
    used = set()

    def comes_to(module: torch.nn.Module, _) -> None:
        for tensor in module.parameters(recurse=False):
            if id(tensor) not in used and torch._C._current_graph_task_id() == -1:
                used.add(id(tensor))
                watch.event("use " + names[id(tensor)])

    def complete(tensor: torch.Tensor) -> None:
        watch.event("gradient " + names[id(tensor)], tensor.grad.untyped_storage().nbytes())
        watch.is_gradient(tensor.grad)
        tensor.grad = None

    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(comes_to)
    for tensor in model.parameters():
        if tensor.requires_grad:
            tensor.register_post_accumulate_grad_hook(complete)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the remarks of transformers on configs, and PyTorch's on devices that are not there."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def lines(model: Transformer, way: Pass, rows: tuple[int, ...]) -> dict:
    """The pass as lines over the number of rows: of one row count, or of two, and exact beyond them.

    Every tensor's size is a number plus a number for each row, so what is held at a moment is, too. What is held at
    most between two moments is the largest of several such lines.
    """
    passes = [trace(model, way, count) for count in rows]
    if len(rows) == 1:  # no slope is known, and none is needed
        passes, rows = passes * 2, (0, 1)
    events, logs = [watch.events for watch, _ in passes], [watch.log for watch, _ in passes]
    alike = [[(event.name, event.gradient, len(event.since)) for event in each] for each in events]
    if alike[0] != alike[1]:
        raise AssertionError(f"{model.name} does other operations for {rows[0]} rows than for {rows[1]}")

    def line(first: tuple[int, ...], second: tuple[int, ...]) -> list[int]:
        """A number at no row and for each row, for each of some numbers."""
        slopes = [(b - a) // (rows[1] - rows[0]) for a, b in zip(first, second, strict=True)]
        return [n for a, slope in zip(first, slopes, strict=True) for n in (a - slope * rows[0], slope)]

    def highest(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> list[list[int]]:
        return _envelope([line(*pair) for pair in zip(first, second, strict=True)], rows[0])

    seen = {"at_use": {}, "gradients": [], "log": [], "made": [], "work": _work(model, events, line)}
    sizes = ([value for kind, value in log if kind == 0] for log in logs)
    seen["made"] = [n for first, second in zip(*sizes, strict=True) for n in line((first,), (second,))]
    # Of one pass: in which order autocast drops its copies of weights differs from run to run.
    for kind, value in logs[1]:
        seen["log"].append({0: 0, 1: value + 1, 2: -value - 1}[kind])
    before: tuple[list, list] = ([], [])
    for one, two in zip(*events, strict=True):
        kind, _, name = one.name.partition(" ")
        now = line((one.kept, one.in_use), (two.kept, two.in_use))
        if not seen["gradients"]:
            before[0].extend(one.since)
            before[1].extend(two.since)
        if kind == "use":
            seen["at_use"][name] = now[:2]
        elif kind == "gradient":
            seen["gradients"].append([name, one.gradient, highest(one.since, two.since), now])
        elif one.name == "end of forward":
            seen["kept"] = now[:2]
    seen["most"] = highest(*before)
    return seen | {key: line((passes[0][1][key],), (passes[1][1][key],)) for key in passes[0][1]}


def _work(model: Transformer, events: list[list[_Event]], line) -> list[list]:
    """Kernels as [phase, block, kind, how many, line], like ones together; those that only move bytes are summed."""
    blocks = {tensor.name: tensor.block for tensor in model.tensors}
    counts, moved, phase, block = Counter(), {}, "forward", model.tensors[0].block
    for first, second in zip(*events, strict=True):
        kind, _, name = first.name.partition(" ")
        if kind == "gradient":
            phase, block = "backward", blocks[name]
        for (what, sizes), (_, more) in zip(first.work, second.work, strict=True):
            numbers = line(sizes, more)
            if what == "product":
                counts[phase, block, what, *numbers] += 1
            else:
                entry = moved.setdefault((phase, block, what), [0, 0, 0])
                entry[:] = [a + b for a, b in zip(entry, (1, *numbers), strict=True)]
        if kind == "use":
            block = blocks[name]
    products = [[*key[:3], count, *key[3:]] for key, count in counts.items()]
    return products + [[*key, *entry] for key, entry in moved.items()]


def _envelope(points: list[list[int]], least: int) -> list[list[int]]:
    """Those of some lines that are the highest somewhere from `least` rows on."""
    best: list[list[int]] = []
    for point in sorted(points, key=lambda p: (p[1] + p[3], p[0] + p[2])):
        at, slope = point[0] + point[2], point[1] + point[3]
        while best:
            last_at, last_slope = best[-1][0] + best[-1][2], best[-1][1] + best[-1][3]
            if at + slope * least >= last_at + last_slope * least:
                best.pop()  # never the higher one from here on
                continue
            if len(best) > 1:
                before_at, before_slope = best[-2][0] + best[-2][2], best[-2][1] + best[-2][3]
                # The last one counts only where it passes the one before it earlier than this one does.
                if (before_at - at) * (last_slope - before_slope) <= (before_at - last_at) * (slope - before_slope):
                    best.pop()
                    continue
            break
        best.append(point)
    return best
