"""Any transformers model as theory knows it: its config, and what a trace of the model has shown."""

import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from study.errors import Stop
from study.io import numbers, progress
from study.machine import cache, hub
from study.predictor.memory.profile import Gradient, Held, Profile, Tensor
from study.predictor.tracing import committed
from study.spec.settings import cache_home

FORMAT = 12  # of the cached answers: raise it whenever their meaning changes
# Attention without kept scores, masks of one byte, and what autocast computes in fp32: see on_cuda.py.
CUDA_DIFFERENCES = ("attention", "dropout", "autocast")
TILED_MLP = "tiled_mlp"
HOST_CHECKPOINTS = "host_checkpoints"
LONG_ROWS = (TILED_MLP, HOST_CHECKPOINTS)  # what keeps passes over long rows small: see long_rows.py
# As `checkpointing`: torchtitan's selective kind, which keeps attention and every second product of each layer.
SELECTIVE = -1


class TraceOptions(NamedTuple):
    """All that decides a pass over a model, besides the number of rows."""

    sequence: int
    precision: str  # as a setup's, or bf16_gathered: autocast over weights that FSDP gathers in bf16
    attention: str
    checkpointing: int  # as a setup's
    loss: str  # whole: from all logits; in_place: by a kernel that overwrites them; chunked: by one without them
    zero3_linear: bool  # linear layers are stage 3's own: see study/predictor/tracing/zero3_linear.py
    cuda: tuple[str, ...]  # the differences from a CPU in which CUDA's kernels are followed
    logits: str = "fp32"  # or as_computed: the type of the logits in the loss
    frozen: str = "as_weights"  # or bf16: the type of the frozen weights
    long_rows: tuple[str, ...] = ()  # of LONG_ROWS


class Look(NamedTuple):
    """All that is true of a model in every training."""

    kind: str  # decoder, encoder, seq2seq, vision or speech
    family: str
    tensors: list[tuple[str, list[int], str, bool]]
    buffers_bytes: int
    has_fused_attention: bool
    limit: int | None  # tokens of a row
    limited_by: str | None
    vocabulary: int | None


@dataclass(frozen=True)
class Transformer:
    """A config.json of transformers, and which part of the model trains.

    The model is built once without values to find out what the config means. The answer stays in the cache.
    """

    name: str  # as the user calls it
    config: str  # JSON with sorted keys
    lora_rank: int | None = None  # only adapters of this rank train
    lora_targets: tuple[str, ...] = ()  # names of the linear layers with adapters; empty: all except the head
    dora: bool = False  # adapters have a magnitude, as DoRA's
    adapter_dropout: bool = False  # on a GPU: adapters drop some of their inputs, as PEFT's lora_dropout does
    train_only: str | None = None  # only the tensors train whose names match this regular expression
    dropout: float | None = None  # in place of every probability of the config
    code_from: str | None = None  # a model whose own Python code the user trusts

    @classmethod
    def of(cls, config: dict, name: str, **which) -> "Transformer":
        return cls(name, json.dumps(config, sort_keys=True), **which)

    @functools.cached_property
    def look(self) -> Look:
        known = committed.look(self.dimensions, self.dropout) if self._is_plain else None
        return Look(*known) if known else self.traced_look

    @functools.cached_property
    def traced_look(self) -> Look:
        return Look(*_cached(self._key, lambda tracing: tracing.look(self)))

    @property
    def _is_plain(self) -> bool:
        """Return whether all of it trains, and it is transformers' own. Only such models have committed traces."""
        return not (self.is_partly_frozen or self.code_from)

    @functools.cached_property
    def dimensions(self) -> dict:
        """Return what the config says, by transformers' names."""
        return json.loads(self.config)

    @property
    def family(self) -> str:
        return self.look.family

    @property
    def _key(self) -> list:
        code = self.code_from and [self.code_from, hub.code_digest(self.code_from)]
        words = [*self.lora_targets, *("dora",) * self.dora, *("adapter dropout",) * self.adapter_dropout]
        return [self.config, self.lora_rank, self.train_only, self.dropout, code, *words]

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(Tensor(name, tuple(shape), block, trains) for name, shape, block, trains in self.look.tensors)

    @functools.cached_property
    def parameters(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @functools.cached_property
    def trained(self) -> int:
        """The parameters that are not frozen."""
        return sum(tensor.elements for tensor in self.tensors if tensor.trains)

    @property
    def is_partly_frozen(self) -> bool:
        return bool(self.lora_rank or self.train_only)

    @property
    def positions(self) -> int | None:
        """The most tokens of a row; None if the config says nothing."""
        return self.look.limit

    @property
    def has_fused_attention(self) -> bool:
        return self.look.has_fused_attention

    @functools.cached_property
    def has_checkpointing(self) -> bool:
        """Return whether transformers can recompute its activations."""
        if self._is_plain and committed.has_passes(self.dimensions, self.dropout):
            return True
        return bool(_cached([*self._key, "checkpointing"], lambda tracing: tracing.has_checkpointing(self)))

    def flops_per_row(self, sequence: int) -> int:
        """Return the operations of matrix products in a pass over a row, without recomputation.

        One of the five products of fused attention's backward pass computes the scores again.
        """
        attention = "sdpa" if self.has_fused_attention else "eager"
        options = TraceOptions(sequence, "bf16_cast", attention, False, "whole", False, CUDA_DIFFERENCES)
        kernels = self.work(options, 1)
        again = sum(_at(line, 1) for phase, _, kind, _, *line in kernels if (phase, kind) == ("backward", "attention"))
        return self.flops(options, 1) - again // 5

    def flops(self, options: TraceOptions, rows: int) -> int:
        """Operations of matrix products in a pass, including those of recomputed layers."""
        return _at(self._lines(options, rows)["flops"], rows)

    def work(self, options: TraceOptions, rows: int) -> list[list]:
        """The kernels of a pass as lines over the number of rows: see `tracing.lines`."""
        return self._lines(options, rows)["work"]

    def profile(self, options: TraceOptions, rows: int) -> Profile:
        seen = self._lines(options, rows)
        profiles = seen.setdefault("profiles", {})  # many arms have the same pass
        if rows not in profiles:
            profiles[rows] = self._profile(seen, rows)
        return profiles[rows]

    def _profile(self, seen: dict, rows: int) -> Profile:
        by_name = {tensor.name: tensor for tensor in self.tensors}

        def at(line) -> Held:
            return Held(_at(line[:2], rows), _at(line[2:], rows))

        def most(lines, gradient_bytes: int = 0) -> Held:
            largest = max(map(at, lines), key=lambda each: each.total)
            return Held(largest.kept, largest.in_use - gradient_bytes)

        gradients = tuple(
            Gradient(by_name[name], most(lines, size), Held(at(line).kept, at(line).in_use - size))
            for name, size, lines, line in seen["gradients"]
        )
        return Profile(
            kept=_at(seen["kept"], rows),
            most=most(seen["most"]),
            at_use={name: _at(line, rows) for name, line in seen["at_use"].items()},
            before_use={name: most(lines) for name, lines in seen["before_use"].items()},
            gradients=gradients,
        )

    def allocations(self, options: TraceOptions, rows: int) -> tuple[list[int], list[int]]:
        """Sizes of a pass's tensors in the order in which they are made; and the log of what happens:
        0: the next tensor is made; n + 1: tensor n is freed; -n - 1: tensor n is a complete gradient."""
        seen = self._lines(options, rows)
        if "log" not in seen:
            seen |= committed.allocations(self.dimensions, self.dropout, options, _counts(options, rows)) or {}
        return [_at(seen["made"][i : i + 2], rows) for i in range(0, len(seen["made"]), 2)], seen["log"]

    def inputs_bytes(self, options: TraceOptions, rows: int) -> int:
        return _at(self._lines(options, rows)["inputs"], rows)

    def _lines(self, options: TraceOptions, rows: int) -> dict:
        """A pass as lines over the number of rows. One row has its own lines: size 1 leads to other kernels."""
        counts = _counts(options, rows)
        key = [*self._key, list(committed.without_last(options)), counts[0] if len(counts) == 1 else None]
        return _cached(
            key, lambda tracing: tracing.lines(self, options, counts), lambda: self._committed(options, counts)
        )

    def _committed(self, options: TraceOptions, rows: tuple[int, ...]) -> dict | None:
        if not self._is_plain:
            return None
        blocks = {tensor.name: tensor.block for tensor in self.tensors}
        return committed.lines(self.dimensions, self.dropout, options, rows, blocks)

    def remarks(self) -> list[str]:
        """Return what a user has to know of the traces of this model."""
        return committed.remarks(self.dimensions, self.dropout) if self._is_plain else []

    def in_words(self) -> str:
        sizes = f"{len(self.tensors)} tensors in {len({tensor.block for tensor in self.tensors})} blocks"
        return f"{self.family} ({self.name}), {sizes}: {numbers.count(self.parameters)} parameters"


def _counts(options: TraceOptions, rows: int) -> tuple[int, ...]:
    """Return the row counts from which a pass over so many rows follows. One row leads to other kernels."""
    return (rows,) if rows == 1 or options.loss == "chunked" or options.long_rows else (2, 3)


def _at(line: list[int], rows: int) -> int:
    return line[0] + line[1] * rows


_seen: dict[str, Any] = {}


def _cached(key: list, look, committed_answer=lambda: None) -> Any:
    """Return an answer by its key: from this process, the package, the cache folder, or a new trace.

    Only a new trace needs torch.
    """
    key = [FORMAT, *committed.installed().values(), *key]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    if name not in _seen:
        _seen[name] = committed_answer() or _kept(name, look)
    return _seen[name]


def _kept(name: str, look) -> Any:
    looks = cache_home().expanduser() / "looks"
    if (known := cache.answer(looks, name)) is None:
        with progress.during("tracing the model; this takes seconds, once"):
            known = json.loads(json.dumps(look(_tracing())))
        cache.keep(looks, name, known)
    return known


def _tracing():
    """Import what traces a model. Raise Stop where torch or transformers is missing."""
    try:
        from study.predictor.tracing import tracing
    except ModuleNotFoundError as error:
        what = f"this model with these options has to be traced, and {error.name} is not installed"
        raise Stop(what, "run: pip install 'zero-study[train]'", "unavailable") from error
    return tracing
