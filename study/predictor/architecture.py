"""The model of a prediction: a built-in shape, a transformers config, or a few numbers."""

import math
from pathlib import Path

from study.errors import Stop
from study.io import files, numbers
from study.io import parsing as texts
from study.machine import hub
from study.predictor.tracing.transformer import Transformer
from study.spec.shapes import MAX_CONFIG_BYTES, SHAPES, config_of, is_local, model_of_name

NUMBERS = "--params with --layers and --hidden"
POSITIONS = 1024  # of a generic GPT
MOST_LAYERS = 10_000  # more than any published model has; tracing more would not end
HEAD_WIDTHS = (64, 80, 96, 128, 192, 256)  # of published decoders


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


def generic(
    params: float, layers: int, hidden: int, heads: int | None = None, vocabulary: int = SHAPES["gpt2"]["vocab_size"]
) -> Transformer:
    """Return a GPT-2 with these layers and width, and feed-forward layers sized to reach the number of parameters.

    Feed-forward layers are where models differ from 12 hidden^2 a layer (ZeRO-Infinity, eq. 1): gated, wider, narrower.
    """
    if heads is None:
        heads = max((h for h in range(1, max(1, hidden // 64) + 1) if hidden % h == 0), default=1)
    _refuse_impossible({"params": params, "layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary})
    if hidden % heads:
        raise Stop(f"--hidden {hidden} is not a multiple of --heads {heads}", "give --heads that divide --hidden")
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


def decoder(
    params: float,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int | None = None,
    kv_heads: int | None = None,
    vocabulary: int = SHAPES["llama3-8b"]["vocab_size"],
) -> Transformer:
    """Return a modern decoder: gated feed-forward layers, RMS norms, rotary positions, shared keys and values.

    The number of parameters decides what the other numbers leave open: the width of a head, and whether the output
    matrix is also the embedding.
    """
    heads = heads or max(1, hidden // 128)
    kv_heads = kv_heads or heads
    given = {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "kv-heads": kv_heads}
    _refuse_impossible(given | {"params": params, "vocabulary": vocabulary})
    if heads % kv_heads:
        raise Stop(f"--kv-heads {kv_heads} do not divide --heads {heads}", "give a number that does")

    def count(width: int, tied: bool) -> int:
        layer = 2 * hidden * width * (heads + kv_heads) + 3 * hidden * ffn + 2 * hidden
        return layers * layer + hidden + vocabulary * hidden * (1 if tied else 2)

    widths = dict.fromkeys((max(1, hidden // heads), *HEAD_WIDTHS))
    candidates = [(width, tied) for width in widths for tied in (False, True)]
    width, tied = min(candidates, key=lambda candidate: abs(count(*candidate) - params))
    if abs(count(width, tied) / params - 1) > 0.05:
        usual = numbers.count(count(*candidates[0]))
        what = f"these dimensions make {usual} parameters, not {numbers.count(params)}"
        raise Stop(what, "correct one of them; a mixture of experts needs --model with its config.json")
    config = SHAPES["llama3-8b"] | {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": ffn}
    config |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config |= {"head_dim": width, "tie_word_embeddings": tied}
    del config["hub"]
    return Transformer.of(config, f"{layers} layers of width {hidden}, {heads} heads of {width}, feed-forward {ffn}")


def _refuse_impossible(given: dict[str, float]) -> None:
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise Stop(f"--{name} must be a finite number above 0 (got {value:g})", "give a number above 0")
