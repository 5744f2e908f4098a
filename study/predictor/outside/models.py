"""The models of published measurements, from their published dimensions. Nothing is downloaded."""

import re

from study.predictor.architecture import Architecture, describe, named, parameters
from study.predictor.tracing.transformer import Transformer
from study.spec.shapes import SHAPES, config_of

Model = Architecture | Transformer
NEAR = 0.05  # allowed difference between the parameters of model and row: names round, some leave out embeddings


class Unknown(Exception):
    """Why a row's model cannot be built."""


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more) -> dict:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    heads = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    rest = {"model_type": "llama", "max_position_embeddings": 131072, "tie_word_embeddings": False}
    return rest | sizes | heads | more


def _opt(hidden: int, layers: int, heads: int) -> dict:
    sizes = {"hidden_size": hidden, "ffn_dim": 4 * hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {"model_type": "opt", "vocab_size": 50272, "max_position_embeddings": 2048} | sizes


def _bloom(hidden: int, layers: int, heads: int) -> dict:
    return {"model_type": "bloom", "vocab_size": 250880, "hidden_size": hidden, "n_layer": layers, "n_head": heads}


def _neox(hidden: int, layers: int, heads: int, vocabulary: int = 50304) -> dict:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocabulary}
    return {"model_type": "gpt_neox", "intermediate_size": 4 * hidden, "max_position_embeddings": 2048} | sizes


TIED = {"tie_word_embeddings": True}
LLAMA3, LLAMA2, QWEN = 128256, 32000, {"model_type": "qwen2"}
# Regular expressions over the last part of a name in lower case; the first match counts. Dimensions are from the
# models' own config files, and a test compares them with the published numbers of parameters.
PUBLISHED: dict[str, str | dict] = {
    r"llama-?3(\.1)?-?8b": _llama(4096, 14336, 32, 32, 8, LLAMA3),
    r"llama-?3\.2-?1b": _llama(2048, 8192, 16, 32, 8, LLAMA3, **TIED),
    r"llama-?3\.2-?3b": _llama(3072, 8192, 28, 24, 8, LLAMA3, head_dim=128, **TIED),
    r"llama-?3(\.[13])?-?70b": _llama(8192, 28672, 80, 64, 8, LLAMA3),
    r"llama-?3(\.1)?-?405b": _llama(16384, 53248, 126, 128, 8, LLAMA3),
    r"llama-?2-?70b": _llama(8192, 28672, 80, 64, 8, LLAMA2),
    r"(llama|vicuna|alpaca|granite)(-?[12])?-?7b": _llama(4096, 11008, 32, 32, 32, LLAMA2),
    r"(llama|vicuna)(-?[12])?-?13b": _llama(5120, 13824, 40, 40, 40, LLAMA2),
    r"llama(-?1)?-?3[03]b": _llama(6656, 17920, 60, 52, 52, LLAMA2),
    r"llama(-?1)?-?65b": _llama(8192, 22016, 80, 64, 64, LLAMA2),
    r"mistral-7b(-instruct)?-v0\.3": "mistral-7b",
    r"mistral-?7b": _llama(4096, 14336, 32, 32, 8, LLAMA2, model_type="mistral", sliding_window=4096),
    r"mixtral-?8x7b": "mixtral-8x7b",
    r"qwen2(\.5)?-0\.5b": _llama(896, 4864, 24, 14, 2, 151936, **QWEN, **TIED),
    r"qwen2(\.5)?-1\.5b": _llama(1536, 8960, 28, 12, 2, 151936, **QWEN, **TIED),
    r"qwen2(\.5)?-3b": _llama(2048, 11008, 36, 16, 2, 151936, **QWEN, **TIED),
    r"qwen2(\.5)?-7b": "qwen2.5-7b",
    r"qwen2\.5-14b": _llama(5120, 13824, 48, 40, 8, 152064, **QWEN),
    r"qwen2\.5-32b": _llama(5120, 27648, 64, 40, 8, 152064, **QWEN),
    r"qwen2(\.5)?-72b": _llama(8192, 29568, 80, 64, 8, 152064, **QWEN),
    r"qwen3-8b": "qwen3-8b",
    r"gemma-?2-9b": "gemma2-9b",
    r"phi-?3-mini": "phi3-mini",
    r"olmo-?2.*-7b": "olmo2-7b",
    r"powerlm-3b": _llama(2304, 9216, 40, 36, 36, 49152, model_type="granite", **TIED),
    r"internlm-7b": _llama(4096, 11008, 32, 32, 32, 103168, attention_bias=True),
    r"internlm-20b": _llama(5120, 13824, 60, 40, 40, 103168),
    r"aquila2-7b": _llama(4096, 11008, 32, 32, 32, 100008),
    r"qwen-1\.8b": _llama(2048, 5504, 24, 16, 16, 151936, **QWEN),
    r"qwen-7b": _llama(4096, 11008, 32, 32, 32, 151936, **QWEN),
    r"tinyllama": _llama(2048, 5632, 22, 32, 4, LLAMA2),
    r"santacoder": {"model_type": "gpt_bigcode", "vocab_size": 49280, "n_positions": 2048, "n_embd": 2048}
    | {"n_layer": 24, "n_head": 16, "n_inner": 8192, "multi_query": True},
    r"opt-125m": _opt(768, 12, 12),
    r"opt-1\.3b": _opt(2048, 24, 32),
    r"opt-2\.7b": _opt(2560, 32, 32),
    r"opt-6\.7b": _opt(4096, 32, 32),
    r"opt-13b": _opt(5120, 40, 40),
    r"opt-30b": _opt(7168, 48, 56),
    r"opt-66b": _opt(9216, 64, 72),
    r"bloom-560m": _bloom(1024, 24, 16),
    r"bloom-1b1": _bloom(1536, 24, 16),
    r"bloom-3b": _bloom(2560, 30, 32),
    r"bloom-7b1": _bloom(4096, 30, 32),
    r"pythia-1b": _neox(2048, 16, 8),
    r"pythia-1\.4b": _neox(2048, 24, 16),
    r"pythia-2\.8b": _neox(2560, 32, 32),
    r"pythia-6\.9b": _neox(4096, 32, 32, 50432),
    r"pythia-12b": _neox(5120, 36, 40, 50688),
    r"neox-?20b": "gpt-neox-20b",
    r"gpt-?j(-?6b)?": "gpt-j-6b",
    r"distilbert": {"model_type": "distilbert", "vocab_size": 30522, "dim": 768, "hidden_dim": 3072, "n_layers": 6}
    | {"n_heads": 12, "max_position_embeddings": 512},
    r"^bert-(base|large)": r"bert-\1",
    r"gpt-?2-(medium|large|xl)": r"gpt2-\1",
    r"gpt-?2$": "gpt2",
}
# Layers, width and heads of MosaicML's MPT (llm-foundry, scripts/train/yamls/pretrain and the benchmark's README).
MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}


def model_of(name: str | None, params: float | None, sequence: int) -> Model:
    """The model of a row; `Unknown` if its dimensions are unknown or do not give the row's number of parameters."""
    if name is None:
        raise Unknown("the model is not said")
    model = _candidate(name, params, sequence)
    count = parameters(model)
    if params is not None and abs(count / params - 1) > NEAR:
        raise Unknown(f"the dimensions known for {name} make {count:,} parameters, the row says {params:,.0f}")
    return model


def _candidate(name: str, params: float | None, sequence: int) -> Model:
    words = name.lower()
    if match := re.search(r"\bl(\d+) h(\d+) a(\d+)(?: v(\d+))?", words):
        layers, hidden, heads, vocabulary = (int(number or 50257) for number in match.groups())
        return _gpt(layers, hidden, heads, vocabulary, max(sequence, 1024), params)
    if match := re.search(r"\bmpt-(\w+)", words):
        if match[1] not in MPT:
            raise Unknown(f"the dimensions of {name} are not known")
        return _gpt(*MPT[match[1]], 50368, sequence, params, dropout=0.0)
    last = re.sub(r"[_ ]", "-", words.rsplit("/", 1)[-1]).replace("llama3", "llama-3")
    for pattern, shape in PUBLISHED.items():
        if match := re.search(pattern, last):
            return _published(match.expand(shape) if isinstance(shape, str) else shape, name)
    raise Unknown(f"the dimensions of {name} are not known")


def _published(shape: str | dict, name: str) -> Model:
    layers = re.search(r"(\d+) layers", name)
    if isinstance(shape, str) and layers is None:
        return named(shape)
    config = config_of(shape) if isinstance(shape, str) else shape
    return Transformer.of(config | ({"num_hidden_layers": int(layers[1])} if layers else {}), name)


def _gpt(
    layers: int,
    hidden: int,
    heads: int,
    vocabulary: int,
    positions: int,
    params: float | None,
    dropout: float | None = None,
) -> Architecture:
    """A GPT-2 of these dimensions. The number of parameters decides whether embedding and head are one matrix."""
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": positions}
    config = SHAPES["gpt2"] | sizes | {"activation_function": "gelu"}  # one kernel, in both of these sources
    models = [
        describe(config | {"vocab_size": vocabulary, "tie_word_embeddings": tied}, dropout=dropout)
        for tied in (True, False)
    ]
    return models[0] if params is None else min(models, key=lambda model: abs(parameters(model) - params))
