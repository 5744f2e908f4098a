"""A model's dimensions, its parameter tensors in the order of its modules, and the operations of a row."""

import functools
import math
from dataclasses import dataclass
from pathlib import Path

from study.errors import Stop
from study.io import files, numbers
from study.io import parsing as texts
from study.io.validation import nearest
from study.machine import hub
from study.predictor.memory.profile import Tensor
from study.predictor.tracing.transformer import Transformer
from study.spec.shapes import MAX_CONFIG_BYTES, NO_FUSED_ATTENTION, SHAPES, config_of

FAMILIES = ("bert", "gpt2", "gptj", "gpt_neox", "gemma2")
NUMBERS = "--params with --layers and --hidden"
# The names of the same dimension in transformers' configs.
NAMES = {
    "hidden": ("hidden_size", "n_embd"),
    "layers": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "inner": ("intermediate_size", "n_inner"),
    "positions": ("max_position_embeddings", "n_positions"),
}
# Dropout probabilities: after a sub-layer, on the attention's weights, on the embeddings. transformers' defaults.
DROPOUT = {
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "gpt2": {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1},
    "gptj": {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt_neox": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gemma2": {"attention_dropout": 0.0},
}


@dataclass(frozen=True)
class Architecture:
    """The dimensions of a model that decide its parameters, operations and activations."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    vocabulary: int
    positions: int
    rotary: int  # the elements of a head that are rotated
    tied: bool  # one matrix is embedding and head
    biases: bool  # GPT-NeoX: whether the attention's matrices have them
    parallel: bool  # attention and feed-forward read the same input, as in GPT-J and GPT-NeoX
    hidden_dropout: float
    attention_dropout: float
    embedding_dropout: float
    labels: int = 2
    activation: str | None = None  # of GPT-2 and GPT-J, if it is not transformers' gelu of eight kernels

    @property
    def has_checkpointing(self) -> bool:
        return True

    @property
    def has_fused_attention(self) -> bool:
        return self.family not in NO_FUSED_ATTENTION


def describe(model: str | dict, vocabulary: int | None = None, dropout: float | None = None) -> Architecture:
    """The architecture of a built-in shape or a transformers config.

    `vocabulary` is needed for shapes whose vocabulary is that of their data; `dropout` replaces every probability of
    the config.
    """
    if isinstance(model, str):
        if model not in SHAPES:
            raise Stop(f"{model!r} is not a built-in shape", f"{nearest(model, SHAPES)}, or give a config")
        model = SHAPES[model]
    family = model.get("model_type")
    if family not in FAMILIES:
        raise Stop(f"model_type {family} is not known", f"choose one of {', '.join(FAMILIES)}, or give {NUMBERS}")
    sizes = {key: next((model[n] for n in names if model.get(n) is not None), None) for key, names in NAMES.items()}
    sizes["vocabulary"] = model.get("vocab_size") or vocabulary
    sizes["inner"] = sizes["inner"] or 4 * (sizes["hidden"] or 0)
    for name, value in sizes.items():
        if not isinstance(value, int) or value <= 0:
            raise Stop(f"the config gives {value} for {name}", "fix the config: a whole number above 0 is needed")
    width = model.get("head_dim") or sizes["hidden"] // sizes["heads"]
    chances = [model.get(name, chance) if dropout is None else dropout for name, chance in DROPOUT[family].items()]
    if family == "gemma2":
        chances = [0.0, *chances, 0.0]
    elif len(chances) == 2:
        chances.append(chances[0])
    share = (model.get("rope_parameters") or {}).get("partial_rotary_factor", model.get("rotary_pct", 0.25))
    rotary = {"gptj": model.get("rotary_dim", 64), "gpt_neox": int(width * share), "gemma2": width}
    return Architecture(
        family=family,
        kv_heads=model.get("num_key_value_heads") or sizes["heads"],
        head_width=width,
        rotary=rotary.get(family, 0),
        tied=model.get("tie_word_embeddings", family not in ("gptj", "gpt_neox")),
        biases=family != "gpt_neox" or model.get("attention_bias", True),
        parallel=family == "gptj" or (model.get("use_parallel_residual", True) and family == "gpt_neox"),
        hidden_dropout=chances[0],
        attention_dropout=chances[1],
        embedding_dropout=chances[2],
        # 2 labels are transformers' default for a config that names none.
        labels=model.get("num_labels") or len(model.get("id2label") or ()) or 2,
        activation="gelu" if model.get("activation_function") == "gelu" else None,
        **sizes,
    )


def named(model: str, *, trust_remote_code: bool = False, **which) -> Architecture | Transformer:
    """A built-in shape, or the model of a config.json in a folder or on the hub. `gpt-tiny` has the embedded corpus.

    `which` says which part of it trains. In that case a built-in shape is traced like other models.
    """
    if model in SHAPES:
        shape = config_of(model)
        has_formulas = shape["model_type"] in FAMILIES and not any(which.values())
        return describe(shape) if has_formulas else Transformer.of(shape, model, **which)
    hub.refuse_code(model, trust_remote_code)
    path = Path(model) / "config.json" if Path(model).is_dir() else hub.config(model)
    try:
        config = texts.from_json(files.read(path, MAX_CONFIG_BYTES))
    except (OSError, ValueError) as error:
        raise Stop(f"{path} cannot be read ({files.why(error)})", "name the folder of a model") from None
    if not isinstance(config, dict):
        raise Stop(f"{path} is not the config of a model", "name the folder of a model")
    code = str(model) if trust_remote_code and "auto_map" in config else None
    return Transformer.of(config, model, code_from=code, **which)


def generic(
    params: float, layers: int, hidden: int, heads: int | None = None, vocabulary: int = SHAPES["gpt2"]["vocab_size"]
) -> Architecture:
    """A GPT-2 with these layers and width, and feed-forward layers sized to reach the number of parameters.

    Feed-forward layers are where models differ from 12 hidden^2 a layer (ZeRO-Infinity, eq. 1): gated, wider, narrower.
    """
    if heads is None:
        heads = max((h for h in range(1, max(1, hidden // 64) + 1) if hidden % h == 0), default=1)
    _refuse_impossible({"params": params, "layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary})
    if hidden % heads:
        raise Stop(f"--hidden {hidden} is not a multiple of --heads {heads}", "give --heads that divide --hidden")
    outside, attention = (vocabulary + 1024 + 2) * hidden, 4 * hidden**2 + 9 * hidden
    inner = round(((params - outside) / layers - attention) / (2 * hidden + 1))
    if inner < 1:
        least = outside + layers * (attention + 2 * hidden + 1)
        what = f"{layers} layers of width {hidden} have at least {numbers.count(least)} parameters (got {params:g})"
        raise Stop(what, "give more --params, or smaller --layers or --hidden")
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": inner, "n_positions": 1024}
    return describe({"model_type": "gpt2", "vocab_size": vocabulary} | sizes)


def decoder(
    params: float,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int | None = None,
    kv_heads: int | None = None,
    vocabulary: int = 128256,
) -> Architecture:
    """A modern decoder: gated feed-forward layers, RMS norms, rotary positions, heads that share keys and values.

    The number of parameters decides what the other numbers leave open: the width of a head, and whether the output
    matrix is also the embedding.
    """
    heads = heads or max(1, hidden // 128)
    kv_heads = kv_heads or heads
    given = {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "kv-heads": kv_heads}
    _refuse_impossible(given | {"params": params, "vocabulary": vocabulary})
    if heads % kv_heads:
        raise Stop(f"--kv-heads {kv_heads} do not divide --heads {heads}", "give a number that does")
    fixed = {"family": "llama", "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "inner": ffn}
    fixed |= {"vocabulary": vocabulary, "positions": 0, "rotary": 0, "biases": False, "parallel": False}
    fixed |= {"hidden_dropout": 0, "attention_dropout": 0, "embedding_dropout": 0}
    candidates = [
        Architecture(head_width=width, tied=tied, **fixed)
        for width in dict.fromkeys((hidden // heads, 64, 80, 96, 128, 192, 256))
        for tied in (False, True)
    ]
    best = min(candidates, key=lambda model: abs(parameters(model) - params))
    if abs(parameters(best) / params - 1) > 0.05:
        count = numbers.count(parameters(candidates[0]))
        what = f"these dimensions make {count} parameters, not {numbers.count(params)}"
        raise Stop(what, "correct one of them; a mixture of experts needs --model with its config.json")
    return best


def _refuse_impossible(given: dict[str, float]) -> None:
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise Stop(f"--{name} must be a finite number above 0 (got {value:g})", "give a number above 0")


def in_words(model: Architecture | Transformer) -> str:
    """The model, as part of a sentence."""
    if isinstance(model, Transformer):
        return model.in_words()
    sizes = f"{model.heads} heads, feed-forward {model.inner}, vocabulary {model.vocabulary}"
    count = numbers.count(parameters(model))
    return f"{model.family}, {model.layers} layers of width {model.hidden}, {sizes}: {count} parameters"


# --- tensors -------------------------------------------------------------------------------------------------------


def tensors(model: Architecture | Transformer) -> tuple[Tensor, ...]:
    """Every parameter once, in the order of the model's modules. DeepSpeed flattens them in this order."""
    return model.tensors if isinstance(model, Transformer) else _tensors(model)


@functools.cache
def _tensors(model: Architecture) -> tuple[Tensor, ...]:
    prefix, ends, layer = {
        "bert": ("bert.encoder.layer", _bert_ends, _bert_layer),
        "gpt2": ("transformer.h", _gpt_ends, _gpt2_layer),
        "gptj": ("transformer.h", _gpt_ends, _gptj_layer),
        "gpt_neox": ("gpt_neox.layers", _gpt_ends, _neox_layer),
        "gemma2": ("model.layers", _gpt_ends, _gemma_layer),
        "llama": ("model.layers", _gpt_ends, _llama_layer),
    }[model.family]
    first, last = ends(model)
    rows = [Tensor(name, shape, "embeddings") for name, shape in first]
    for i in range(model.layers):
        rows += [Tensor(f"{prefix}.{i}.{name}", shape, f"layer.{i}") for name, shape in layer(model)]
    return (*rows, *(Tensor(name, shape, "head") for name, shape in last))


def trained(model: Architecture | Transformer) -> int:
    """Parameters that are not frozen."""
    return sum(tensor.elements for tensor in tensors(model) if tensor.trains)


def parameters(model: Architecture | Transformer) -> int:
    return sum(tensor.elements for tensor in tensors(model))


def matrix_elements(model: Architecture) -> int:
    """Elements of a layer's matrices, which autocast copies to bf16, and which multiply each token."""
    return sum(tensor.elements for tensor in tensors(model) if tensor.block == "layer.0" and len(tensor.shape) == 2)


def _linear(name: str, out: int, into: int) -> list:
    return [(f"{name}.weight", (out, into)), (f"{name}.bias", (out,))]


def _norm(name: str, width: int) -> list:
    return [(f"{name}.weight", (width,)), (f"{name}.bias", (width,))]


def _transposed(name: str, into: int, out: int) -> list:
    """GPT-2 stores its matrices inputs first."""
    return [(f"{name}.weight", (into, out)), (f"{name}.bias", (out,))]


def _bert_ends(m: Architecture) -> tuple[list, list]:
    names = {"word": m.vocabulary, "position": m.positions, "token_type": 2}
    first = [(f"bert.embeddings.{name}_embeddings.weight", (size, m.hidden)) for name, size in names.items()]
    last = _linear("bert.pooler.dense", m.hidden, m.hidden) + _linear("classifier", m.labels, m.hidden)
    return first + _norm("bert.embeddings.LayerNorm", m.hidden), last


def _gpt_ends(m: Architecture) -> tuple[list, list]:
    embedding, norm = {
        "gpt2": ("transformer.wte", "transformer.ln_f"),
        "gptj": ("transformer.wte", "transformer.ln_f"),
        "gpt_neox": ("gpt_neox.embed_in", "gpt_neox.final_layer_norm"),
        "gemma2": ("model.embed_tokens", "model.norm"),
        "llama": ("model.embed_tokens", "model.norm"),
    }[m.family]
    first = [(f"{embedding}.weight", (m.vocabulary, m.hidden))]
    if m.family == "gpt2":
        first.append(("transformer.wpe.weight", (m.positions, m.hidden)))
    last = _norm(norm, m.hidden)[: 1 if m.family in ("gemma2", "llama") else 2]
    if not m.tied:
        last += _linear("lm_head", m.vocabulary, m.hidden)[: 2 if m.family == "gptj" else 1]
    return first, last


def _bert_layer(m: Architecture) -> list:
    names = [f"attention.self.{name}" for name in ("query", "key", "value")] + ["attention.output.dense"]
    attention = [pair for name in names for pair in _linear(name, m.hidden, m.hidden)]
    feed = _linear("intermediate.dense", m.inner, m.hidden) + _linear("output.dense", m.hidden, m.inner)
    return attention + _norm("attention.output.LayerNorm", m.hidden) + feed + _norm("output.LayerNorm", m.hidden)


def _gpt2_layer(m: Architecture) -> list:
    attention = _transposed("attn.c_attn", m.hidden, 3 * m.hidden) + _transposed("attn.c_proj", m.hidden, m.hidden)
    feed = _transposed("mlp.c_fc", m.hidden, m.inner) + _transposed("mlp.c_proj", m.inner, m.hidden)
    return _norm("ln_1", m.hidden) + attention + _norm("ln_2", m.hidden) + feed


def _gptj_layer(m: Architecture) -> list:
    attention = [(f"attn.{name}_proj.weight", (m.hidden, m.hidden)) for name in ("k", "v", "q", "out")]
    feed = _linear("mlp.fc_in", m.inner, m.hidden) + _linear("mlp.fc_out", m.hidden, m.inner)
    return _norm("ln_1", m.hidden) + attention + feed


def _neox_layer(m: Architecture) -> list:
    attention = _linear("attention.query_key_value", 3 * m.hidden, m.hidden)
    attention += _linear("attention.dense", m.hidden, m.hidden)
    if not m.biases:
        attention = attention[::2]
    feed = _linear("mlp.dense_h_to_4h", m.inner, m.hidden) + _linear("mlp.dense_4h_to_h", m.hidden, m.inner)
    return _norm("input_layernorm", m.hidden) + _norm("post_attention_layernorm", m.hidden) + attention + feed


def _llama_layer(m: Architecture) -> list:
    return _gated_layer(m) + [(f"{name}_layernorm.weight", (m.hidden,)) for name in ("input", "post_attention")]


def _gemma_layer(m: Architecture) -> list:
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    return _gated_layer(m) + [(f"{name}_layernorm.weight", (m.hidden,)) for name in norms]


def _gated_layer(m: Architecture) -> list:
    queries, keys = m.heads * m.head_width, m.kv_heads * m.head_width
    sizes = {"q": (queries, m.hidden), "k": (keys, m.hidden), "v": (keys, m.hidden), "o": (m.hidden, queries)}
    rows = [(f"self_attn.{name}_proj.weight", size) for name, size in sizes.items()]
    sizes = {"gate": (m.inner, m.hidden), "up": (m.inner, m.hidden), "down": (m.hidden, m.inner)}
    return rows + [(f"mlp.{name}_proj.weight", size) for name, size in sizes.items()]


# --- operations ----------------------------------------------------------------------------------------------------


def flops_per_row(model: Architecture | Transformer, sequence: int) -> int:
    """Operations of a forward and a backward pass over a row of `sequence` tokens, without recomputation.

    The forward pass has two per token and matrix element. The backward pass has twice as many: for the gradients of the
    input and of the matrix. Attention's two products count the same way. Embeddings are looked up, not multiplied.
    PyTorch's FlopCounterMode, which counts only matrix products, counts like this.
    """
    if isinstance(model, Transformer):
        return model.flops_per_row(sequence)
    per_layer = sequence * matrix_elements(model) + 2 * sequence**2 * model.heads * model.head_width
    if model.family == "bert":
        head = model.hidden**2 + model.hidden * model.labels  # pooler and classifier see the first token alone
    else:
        head = sequence * model.hidden * model.vocabulary
    return 3 * 2 * (model.layers * per_layer + head)
