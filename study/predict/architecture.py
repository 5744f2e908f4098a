"""The model of a prediction: a built-in shape, a transformers config, or a few numbers."""

import functools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.core import files, shapes
from study.core.errors import Stop, refuse_beyond
from study.core.settings import flag
from study.core.shapes import MAX_CONFIG_BYTES, SHAPES, config_of, is_local, letters, model_of_name, of_size
from study.core.text import count, say_aside
from study.predict.trace import committed
from study.predict.trace.transformer import Transformer

POSITIONS = 1024  # of a generic GPT
# By the ends of names in a config: more than any published model has. Making more would not end, or fill the memory.
MOST = {"layers?|depths?": 1_000, "experts": 20_000, "labels": 1_000_000, "vocab_size": 10_000_000}
# Keys that are at least 1 in every default of transformers 5.23, and ends of names that mean a number of things. Of
# these it has 0, such as 0 layers that share keys, or a window of 0, which means none.
LEAST_1 = re.compile(
    r"n_(layers?|heads?|embd|inner|positions|ctx)|num_(layers|heads|hidden_layers|attention_heads|key_value_heads)"
    r"|hidden_sizes?|(en|de)coder_(layers|attention_heads)|d_model|d_ff|d_kv|intermediate_size|vocab_size|depths"
    r"|num_experts_per_tok|rope_theta|max_(position_embeddings|source_positions|target_positions)"
)
LEAST_0 = re.compile(r"(num|n)_.*(layers|heads|experts|labels)|.*(dim|window|_size)")
BELOW_0 = ("chunk_size",)  # where transformers' own default is -1
SIZE = re.compile(r"[\d.]+\s?[bBmM]")  # as people call a model
QUANTIZED = ("quantization_config", "compression_config")
MOST_WANTED = {"params": 10**15, "layers": 1_000, "hidden": 10_000_000, "lora_rank": 1_000_000}


def named(model: str, **which: Any) -> Transformer:
    """Return a model whose dimensions the study has, or that of a config.json in a folder or on the hub.

    `which` are fields of a Transformer, such as `lora_rank`.
    """
    model = model.removesuffix("/config.json")
    # A folder goes before a built-in shape of the same name: it is what the user sees.
    if not is_local(model) and (known := model_of_name(model)):
        return _known(known, **which)
    shapes.refuse_code(model)
    folder = Path(model)
    path = folder / "config.json" if folder.is_dir() else shapes.hub_config(model)
    what, remedy = "the config of a model", "name the folder of a model"
    # The Hub's cache has links.
    config = files.load(path, dict, what=what, remedy=remedy, most_bytes=MAX_CONFIG_BYTES, links=True)
    check_config(config, str(path))
    return Transformer.of(config, model, **which)


@functools.lru_cache(maxsize=16)  # what such a model has shown of itself is kept with it
def _known(name: str, **which: Any) -> Transformer:
    return Transformer.of(config_of(name), name, **which)


def check_config(config: dict, where: str) -> None:
    """Raise Stop for numbers of a model's config that no model has, and for weights in few bits."""
    for name, value in config.items():
        if name in QUANTIZED and value:
            method = value.get("quant_method", "no method said") if isinstance(value, dict) else value
            what = f"{where} says {name} ({method!s:.40}), and weights in few bits do not train as they are"
            remedy = f"take {name} out: the answer is then of 16 or 32 bits. For adapters beside bitsandbytes' weights"
            raise Stop(what, f"{remedy} also give --lora-rank and --quantized")
        if isinstance(value, dict):  # such as text_config
            check_config(value, where)
        for number in value if isinstance(value, list) else [value]:  # a list has a number for each stage
            _check_number(name, number, where)


def _check_number(name: str, number: object, where: str) -> None:
    if not isinstance(number, (int, float)):
        return
    least, most = _limits(name)
    if number > most:
        raise Stop(f"{where} says {name} = {number!s:.20}, and at most {most} are traced", "correct it")
    if isinstance(number, float) and "drop" in name and not 0 <= number <= 1:
        raise Stop(f"{where} says {name} = {number!s:.20}, and a probability is from 0 to 1", "correct it")
    if number < least or (least == 1 and isinstance(number, bool)):
        raise Stop(f"{where} says {name} = {number!s:.20}, which must be a number of at least {least}", "correct it")


def _limits(name: str) -> tuple[float, float]:
    """The least and the most that a number of this name may be."""
    least, most = -math.inf, math.inf
    if LEAST_0.fullmatch(name) and name not in BELOW_0:
        least = 0
    if LEAST_1.fullmatch(name):
        least = 1
    for ends, limit in MOST.items():
        if re.search(f"({ends})$", name):
            most = limit
    return least, most


def generic(params: float, layers: int, hidden: int) -> Transformer:
    """Return a GPT-2 with these layers and width, and feed-forward layers sized to reach the number of parameters."""
    heads = max((number for number in range(1, hidden // 64 + 1) if hidden % number == 0), default=1)  # of about 64
    vocabulary = SHAPES["gpt2"]["vocab_size"]
    # Parameters of a GPT-2. `rest`: embeddings and the last norm. `attention`: of a layer, with its two norms and its
    # last bias. What is left in a layer are two matrices and the bias between them: 2 hidden + 1 for each inner unit.
    rest = (vocabulary + POSITIONS + 2) * hidden
    attention = 4 * hidden**2 + 9 * hidden
    inner = ((params - rest) / layers - attention) / (2 * hidden + 1)
    if not 0.5 < inner < math.inf:
        least = rest + layers * (attention + 2 * hidden + 1)
        what = f"{layers} layers of width {hidden} have at least {count(least)} parameters (got {params:g})"
        raise Stop(what, "give more --params, or smaller --layers or --hidden")
    config = {"model_type": "gpt2", "vocab_size": vocabulary, "n_positions": POSITIONS}
    config |= {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": round(inner)}
    return Transformer.of(config, f"{layers} layers of width {hidden}, {heads} heads, feed-forward {inner:.0f}")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The model that a user names, or describes by a few numbers."""

    model: str | None = None
    """A built-in shape, a folder with a config.json, or a hub name."""
    params: float | None = None
    """Parameters, such as 7e9: a built-in shape of this size, or a GPT with --layers and --hidden."""
    layers: int | None = None
    """With --params."""
    hidden: int | None = None
    """With --params."""
    lora_rank: int | None = None
    """Only adapters of this rank train, at each linear layer but the head."""

    def __post_init__(self):
        for name, most in MOST_WANTED.items():
            refuse_beyond(flag(name), getattr(self, name), most)


def _of_size(params: float, lora_rank: int | None) -> str:
    """Return a model of nearly so many parameters: the nearest of those whose traces come with the package, if any."""

    def is_traced(name: str) -> bool:
        return committed.has_usual_passes(named(name, lora_rank=lora_rank).member)

    alike = sorted(of_size(params), key=is_traced, reverse=True)  # which keeps the order of equals
    if not alike:
        what = f"no model whose shape is known has about {count(params)} parameters"
        raise Stop(what, "give another --model, or --layers and --hidden as well")
    near = f"{alike[0]} ({count(named(alike[0]).parameters)})"
    say_aside(f"{count(params)} parameters: taken as {near}; as large: {', '.join(alike[1:6]) or 'none'}")
    return alike[0]


def _name_of(wanted: Wanted) -> str:
    """Return the name of a model: that of --model, or of one with about --params if nothing else is said."""
    has_dimensions = wanted.layers or wanted.hidden
    if wanted.model is None and wanted.params and not has_dimensions:
        return _of_size(wanted.params, wanted.lora_rank)
    what = "no model is given"
    if wanted.model is not None:
        if not (wanted.params or has_dimensions):
            return wanted.model
        what = "--model goes without --params, --layers and --hidden"
    elif has_dimensions:
        what = "adapters need --model" if wanted.lora_rank else "--params, --layers and --hidden go together"
    raise Stop(what, "give --model, or --params with --layers and --hidden")


def asked_for(wanted: Wanted, sequence: int) -> Transformer:
    """Return the model that --model names, if it reads `sequence` tokens; or a generic model from the other flags."""
    if wanted.params and wanted.layers and wanted.hidden and not (wanted.model or wanted.lora_rank):
        return generic(wanted.params, wanted.layers, wanted.hidden)
    name = _name_of(wanted)
    if SIZE.fullmatch(name) and not is_local(name):
        raise Stop(f"--model {name} is a number of parameters", f"give --params {name.replace(' ', '')}")
    model = named(name, lora_rank=wanted.lora_rank)
    if letters(model.name) != letters(name):
        say_aside(f"{name}: taken as {model.name}, whose dimensions come with the study")
    if model.positions and sequence > model.positions:
        what = f"--sequence {sequence} is more than the model's {model.positions} positions"
        raise Stop(what, f"give {model.positions} or fewer")
    return model
