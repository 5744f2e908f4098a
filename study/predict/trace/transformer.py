"""Any transformers model as theory knows it: its config, and what a trace of the model has shown."""

import functools
import json
from dataclasses import astuple, replace
from typing import Any

from study.core import cache
from study.core.errors import Stop
from study.core.settings import cache_home
from study.core.text import bar
from study.predict.trace import committed
from study.predict.trace.asked import Look, Model, TraceOptions
from study.predict.trace.repeating import Followed, Stack, repeat
from study.predict.trace.tape import Pass, Tape, Tensor, at_rows, in_tuples, read

FORMAT = 19  # of the cached answers: raise it whenever their meaning changes


class Transformer(Model):
    """A model with what a trace of it has shown."""

    @classmethod
    def of(cls, config: dict, name: str, **which) -> "Transformer":
        return cls(name, json.dumps(config, sort_keys=True), **which)

    @functools.cached_property
    def look(self) -> Look:
        """What is true of the model in every training: from the package, the cache folder, or a new look."""
        return Look(*committed.look(self.member) or _kept(self, "look"))

    @functools.cached_property
    def member(self) -> committed.Member:
        """Its committed traces. There are some only if all of it trains."""
        if self.is_partly_frozen:
            return committed.UNKNOWN
        return committed.member(self.dimensions, self.dropout)

    @functools.cached_property
    def dimensions(self) -> dict:
        return json.loads(self.config)

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

    @functools.cached_property
    def trained(self) -> int:
        return sum(tensor.elements for tensor in self.tensors if tensor.trains)

    @property
    def positions(self) -> int | None:
        """The most tokens of a row; None if the config says nothing."""
        return self.look.limit

    def traced(self, options: TraceOptions, rows: int) -> Pass:
        return _traced(self, options, rows)

    def tape(self, options: TraceOptions, rows: int) -> Tape:
        counts: tuple[int, ...] = (2, 3)  # their difference is what each further row adds
        if rows == 1 or options.loss == "chunked":  # one row, or pieces: other kernels
            counts = (rows,)
        tapes, stacks = _followed(self, options, counts)
        return repeat(at_rows(tapes, counts, rows), stacks)


@functools.cache
def _traced(model: Transformer, options: TraceOptions, rows: int) -> Pass:
    return read(model.tape(options, rows), model.tensors)


@functools.lru_cache(maxsize=64)  # tapes are large
def _followed(model: Transformer, options: TraceOptions, counts: tuple[int, ...]) -> Followed:
    """Return a pass over each of these numbers of rows, from the package, the cache folder, or a new trace."""
    if known := committed.followed(model.member, options, counts):
        return known
    tapes, stacks = in_tuples(_kept(model, "followed", options, counts))
    return Followed(tapes, [Stack(*each) for each in stacks])


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
        remedy = "install PyTorch and transformers: pip install './zero-study[train]'"
        raise Stop(problem, remedy, "unavailable") from error
    with bar("tracing the model; this takes seconds to minutes, once"):
        known = json.loads(json.dumps(getattr(tracing, what)(model, *asked)))
    cache.keep(looks, name, known)
    return known


# --- a rank's part, if AutoTP (module_inject/layers.py) or a plan beside FSDP2 divides the layers: two projections back
# by rows, the others by columns, and an untied head by its vocabulary. Norms and embeddings are whole on each rank.

TRIED = ("llama", "qwen2", "qwen3", "mistral")  # the families for which this code knows the division
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


@functools.cache
def of_a_rank(model: Transformer, ranks: int) -> Transformer:
    """Return the part of a rank as a model: fewer heads, narrower feed-forward layers, and the whole output matrix."""
    config = model.dimensions
    sizes = {name: config.get(name) for name in DIVIDED}
    if model.family not in TRIED or any(type(size) is not int or size % ranks for size in sizes.values()):
        what = f"how {ranks} ranks divide layers of {model.family} with {sizes} is unknown here"
        raise Stop(what, "give another model, or fewer ranks for a layer", "unavailable")
    # Said, because the default is the model's width over its heads, and a rank has fewer heads of the same width.
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    parts = {name: config[name] // ranks for name in DIVIDED}
    one = Transformer.of(config | parts | {"head_dim": width}, f"a rank's part of {model.name}")
    return replace(model, name=one.name, config=one.config)  # one side of each adapter is divided as its layer


def part(tensor: Tensor, ranks: int) -> Tensor:
    """Return the tensor of a rank: only the output matrix of `of_a_rank` is still whole."""
    if tensor.name != "lm_head.weight":
        return tensor
    return replace(tensor, shape=(tensor.shape[0] // ranks, *tensor.shape[1:]))
