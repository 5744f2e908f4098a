"""The model of a prediction: a built-in shape, a transformers config, or a few numbers."""

import math
from pathlib import Path

from study.core import files, hub, numbers
from study.core import parsing as texts
from study.core.errors import Stop
from study.core.shapes import MAX_CONFIG_BYTES, SHAPES, config_of, is_local, model_of_name
from study.predict.trace.transformer import Transformer

NUMBERS = "--params with --layers and --hidden"
POSITIONS = 1024  # of a generic GPT
MOST_LAYERS = 10_000  # more than any published model has; tracing more would not end


def named(model: str, *, trust_remote_code: bool = False, **which) -> Transformer:
    """Return a model whose dimensions the study has, or that of a config.json in a folder or on the hub.

    `which` are fields of Transformer. `gpt-tiny` has the vocabulary of the embedded corpus.
    """
    if not is_local(model) and (known := model_of_name(model)):
        return Transformer.of(config_of(known), known, **which)
    hub.refuse_code(model, trust_remote_code)
    path = Path(model) / "config.json" if Path(model).is_dir() else hub.config(model)
    try:
        config = texts.from_json(files.read(path, MAX_CONFIG_BYTES))
    except (OSError, ValueError) as error:
        raise Stop(f"{path} cannot be read ({files.why(error)})", "name the folder of a model") from None
    if not isinstance(config, dict):
        raise Stop(f"{path} is not the config of a model", "name the folder of a model")
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if isinstance(layers := config.get(name), int) and layers > MOST_LAYERS:
            raise Stop(f"{path} says {layers} layers, and at most {MOST_LAYERS} are traced", "correct it")
    code = str(model) if trust_remote_code and "auto_map" in config else None
    return Transformer.of(config, model, code_from=code, **which)


def generic(params: float, layers: int, hidden: int) -> Transformer:
    """Return a GPT-2 with these layers and width, and feed-forward layers sized to reach the number of parameters.

    Feed-forward layers are where models differ from 12 hidden^2 a layer (ZeRO-Infinity, eq. 1): gated, wider, narrower.
    Heads have about 64 numbers.
    """
    for name, value in (("params", params), ("layers", layers), ("hidden", hidden)):
        if not 0 < value < math.inf:
            raise Stop(f"--{name} must be a finite number above 0 (got {value:g})", "give a number above 0")
    heads = max((number for number in range(1, hidden // 64 + 1) if hidden % number == 0), default=1)
    vocabulary = SHAPES["gpt2"]["vocab_size"]
    rest = (vocabulary + POSITIONS + 2) * hidden
    attention = 4 * hidden**2 + 9 * hidden
    inner = round(((params - rest) / layers - attention) / (2 * hidden + 1))
    if inner < 1:
        least = rest + layers * (attention + 2 * hidden + 1)
        what = f"{layers} layers of width {hidden} have at least {numbers.count(least)} parameters (got {params:g})"
        raise Stop(what, "give more --params, or smaller --layers or --hidden")
    config = {"model_type": "gpt2", "vocab_size": vocabulary, "n_positions": POSITIONS}
    config |= {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": inner}
    return Transformer.of(config, f"{layers} layers of width {hidden}, {heads} heads, feed-forward {inner}")
