"""The model of a prediction: a built-in shape, a transformers config, or a few numbers."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from study.core import files, shapes
from study.core.errors import Stop
from study.core.shapes import MAX_CONFIG_BYTES, SHAPES, config_of, is_local, letters, model_of_name
from study.core.text import count
from study.predict.trace.transformer import Transformer

NUMBERS = "--params with --layers and --hidden"
POSITIONS = 1024  # of a generic GPT


def named(model: str, **which) -> Transformer:
    """Return a model whose dimensions the study has, or that of a config.json in a folder or on the hub."""
    # A folder goes before a built-in shape of the same name: it is what the user sees.
    if not is_local(model) and (known := model_of_name(model)):
        return Transformer.of(config_of(known), known, **which)
    shapes.refuse_code(model)
    path = Path(model) / "config.json" if Path(model).is_dir() else shapes.hub_config(model)
    about = {"what": "the config of a model", "remedy": "name the folder of a model"}
    config = files.load(path, dict, **about, most_bytes=MAX_CONFIG_BYTES, links=True)  # the Hub's cache has links
    return Transformer.of(config, model, **which)


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
    """Parameters, such as 7e9: a GPT, with --layers and --hidden."""
    layers: int | None = None
    """With --params."""
    hidden: int | None = None
    """With --params."""
    lora_rank: int | None = None
    """With --model: only adapters of this rank train, at each linear layer but the head."""


def asked_for(wanted: Wanted, sequence: int) -> Transformer:
    """Return the model that --model names, if it reads `sequence` tokens; or a generic model from the other flags."""
    name = wanted.model
    if wanted.params and wanted.layers and wanted.hidden and not (name or wanted.lora_rank):
        return generic(wanted.params, wanted.layers, wanted.hidden)
    if name is None or wanted.params or wanted.layers or wanted.hidden:
        what = "one model is needed: --model and --params cannot be combined, and adapters need --model"
        raise Stop(what, f"give --model, or {NUMBERS}")
    model = named(name, lora_rank=wanted.lora_rank)
    if letters(model.name) != letters(name):
        sys.stderr.write(f"{name}: taken as {model.name}, whose dimensions come with the study\n")
    refuse_long_rows(model, sequence)
    return model


def refuse_long_rows(model: Transformer, sequence: int) -> None:
    if model.positions and sequence > model.positions:
        what = f"--sequence {sequence} is more than the model's {model.positions} positions"
        raise Stop(what, f"give {model.positions} or fewer")
