"""Any transformers model as theory knows it: its config, and what a trace of the model has shown."""

import functools
import json
from dataclasses import astuple, dataclass
from typing import Any

from study.core import cache
from study.core.errors import FULL_INSTALL, Stop
from study.core.settings import cache_home
from study.core.shapes import FUSED_BY_FLASH, SHAPES, config_of
from study.core.text import bar, number_of
from study.predict.trace import committed
from study.predict.trace.options import Look, TraceOptions
from study.predict.trace.tape import Pass, Tape, Tensor, at_rows, in_tuples, read

FORMAT = 20  # of the cached answers: raise it whenever their meaning changes


@dataclass(frozen=True)
class Transformer:
    """A config.json of transformers, and which part of the model trains; with what a trace of it has shown."""

    name: str  # as the user calls it
    config: str  # JSON with sorted keys
    lora_rank: int | None = None  # only adapters of this rank train
    lora_targets: tuple[str, ...] = ()  # names of the linear layers with adapters; empty: all except the head
    dora: bool = False  # adapters have a magnitude, as DoRA's
    adapter_dropout: bool = False  # on a GPU: adapters drop some of their inputs, as PEFT's lora_dropout does
    train_only: str | None = None  # only the tensors train whose names match this regular expression
    dropout: float | None = None  # in place of every probability of the config

    @property
    def is_partly_frozen(self) -> bool:
        """Whether only adapters or chosen tensors train."""
        return bool(self.lora_rank or self.train_only)

    @classmethod
    def of(cls, config: dict, name: str, **which) -> "Transformer":
        return cls(name, json.dumps(config, sort_keys=True), **which)

    @functools.cached_property
    def look(self) -> Look:
        """What is true of the model in every training: from the package, the cache folder, or a new look."""
        return Look(*committed.look(self.member) or _kept(self, "look"))

    @functools.cached_property
    def member(self) -> committed.Member:
        """Its committed traces. There are some if all of it trains, or adapters alone."""
        if self.train_only:
            return committed.UNKNOWN
        adapters = (self.lora_targets, self.dora, self.adapter_dropout)
        return committed.member(self.dimensions, self.dropout, self.lora_rank, adapters)

    @property
    def comes_traced(self) -> bool:
        """Whether its usual passes come with the package: to trace others takes minutes."""
        return committed.has_usual_passes(self.member)

    @functools.cached_property
    def dimensions(self) -> dict:
        return json.loads(self.config)

    @property
    def hidden(self) -> int:
        """The width of a layer. 0: its config has none of the usual names for it."""
        return next(
            (self.dimensions[name] for name in ("hidden_size", "n_embd", "d_model") if name in self.dimensions), 0
        )

    @property
    def family(self) -> str:
        return self.look.family

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parameter tensors in the order of the model. Tied ones count once, where they come first."""
        return tuple(Tensor(name, tuple(shape), block, trains) for name, shape, block, trains in self.look.tensors)

    @functools.cached_property
    def parameters(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def reads_out_by_embeddings(self) -> bool:
        """Whether the forward pass ends with the tensor that it begins with, as it does with tied embeddings."""
        heads = [tensor.shape for tensor in self.tensors if tensor.block == "head"]
        return self.look.kind in ("decoder", "seq2seq", "speech") and self.tensors[0].shape not in heads

    @property
    def positions(self) -> int | None:
        """The most tokens of a row; None if the config says nothing."""
        return self.look.limit

    @property
    def row_names(self) -> str:
        """What a batch consists of. How many tokens an image makes, the config says."""
        return "images" if self.look.kind == "vision" else "sequences"

    def rows_in_words(self, rows: int, tokens: int) -> str:
        """Return rows of a batch: 4 sequences of 2,048 tokens."""
        return number_of(rows, self.row_names + ("" if self.row_names == "images" else f" of {tokens:,} tokens"))

    def attention_taken(self, kernel: str) -> str:
        """Return the attention whose memory is predicted: fused ones keep as much as sdpa."""
        if kernel != "eager" and self.look.has_fused_attention:
            return "sdpa"
        return "flash" if kernel.startswith("flash") and self.family in FUSED_BY_FLASH else "eager"

    def attention_note(self, kernel: str) -> str:
        """Return that eager attention is taken though another was asked for. Empty: it is not."""
        has_heads = not self.dimensions.keys().isdisjoint(("num_attention_heads", "n_head"))
        if kernel == "eager" or self.attention_taken(kernel) != "eager" or not has_heads:
            return ""
        other = "; flash2 keeps none" if self.family in FUSED_BY_FLASH else ""
        return f"no {kernel} is predicted for {self.family}, and eager keeps all scores{other}"

    def tape(self, options: TraceOptions, rows: int) -> Tape:
        """Return the tape of a pass, from the package, the cache folder, or a new trace."""
        known = committed.tape(self.member, options, rows)
        if known is not None:
            return known
        counts: tuple[int, ...] = (2, 3)  # their difference is what each further row adds
        if rows == 1 or options.loss == "chunked":  # one row, or pieces: other kernels
            counts = (rows,)
        return at_rows(_followed(self, options, counts), counts, rows)


@functools.cache
def traced(model: Transformer, options: TraceOptions, rows: int) -> Pass:
    return read(model.tape(options, rows), model.tensors)


@functools.lru_cache(maxsize=16)  # tapes are large: up to 40 MB for 126 layers
def _followed(model: Transformer, options: TraceOptions, counts: tuple[int, ...]) -> list[Tape]:
    return in_tuples(_kept(model, "followed", options, counts))


def _instead_of_tracing(model: Transformer, asked: tuple) -> str:
    """Return what to do where nothing can be traced: install it, or ask for what the package has."""
    remedy = f"install PyTorch and transformers: {FULL_INSTALL}"
    for options in asked:
        if not isinstance(options, TraceOptions):
            continue
        if options.loss == "chunked":
            return f"{remedy}; or give --no-chunked-loss, which needs at least as much memory"
        if committed.tape(model.member, options._replace(precision="bf16_cast"), 1):
            return f"{remedy}; or give --precision bf16_cast: its traces come with the package"
    if committed.has_usual_passes(model.member):
        return remedy
    shapes = [Transformer.of(config_of(name), name) for name in SHAPES]
    names = ", ".join(shape.name for shape in shapes if committed.has_usual_passes(shape.member))
    return f"{remedy}; or name a model whose traces come with the package: {names}"


def _kept(model: Transformer, what: str, *asked) -> Any:
    """Return what a function of `tracing.py` says of a model, from the cache folder or of a new trace."""
    # The name of a model changes nothing.
    name = cache.fingerprint([FORMAT, *committed.installed().values(), *astuple(model)[1:], what, *asked])
    looks = cache_home().expanduser() / "looks"
    known = cache.answer(looks, name)
    if known is not None:
        return known
    try:
        from study.predict.trace import tracing
    except ModuleNotFoundError as error:
        problem = f"this model with these options has to be traced, and {error.name} is not installed"
        raise Stop(problem, _instead_of_tracing(model, asked), "unavailable") from error
    with bar("tracing the model; this takes seconds to minutes, once"):
        known = json.loads(json.dumps(getattr(tracing, what)(model, *asked)))
    cache.keep(looks, name, known)
    return known
