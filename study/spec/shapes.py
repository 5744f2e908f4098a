"""The built-in model shapes: published dimensions by name, so that building a model needs no network.

Each shape is a config of `transformers`, plus `hub`: the name of the published weights and tokenizer. The dimensions
come from the models' own config files.
"""

from pathlib import Path

from study.io import files
from study.io import parsing as texts

VOCABULARY = 2048
MAX_CONFIG_BYTES = 8 * 2**20  # of a config.json: one with 20,000 labels has 1 MB


def _bert(hub: str, width: int, layers: int) -> dict:
    sizes = {"vocab_size": 30522, "max_position_embeddings": 512, "hidden_size": width, "num_hidden_layers": layers}
    return {
        "model_type": "bert",
        "hub": hub,
        **sizes,
        "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
    }


def _gpt2(hub: str | None, width: int, layers: int, heads: int, positions: int = 1024) -> dict:
    sizes = {"vocab_size": 50257, "n_positions": positions, "n_embd": width, "n_layer": layers, "n_head": heads}
    return {"model_type": "gpt2", "hub": hub, **sizes}


def _decoder(model_type: str, hub: str | None, vocabulary: int, width: int, ffn: int, layers: int, **more) -> dict:
    """Return a modern decoder. `more` are further fields of its family's config."""
    sizes = {"hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers}
    return {"model_type": model_type, "hub": hub, "vocab_size": vocabulary, **sizes} | more


def _heads(heads: int, of_keys: int, width: int | None = None) -> dict:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": of_keys}
    return sizes if width is None else sizes | {"head_dim": width}


UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _micro(model_type: str, **more) -> dict:
    """Ours: a decoder as small as bert-tiny, with the embedded corpus's vocabulary."""
    return _decoder(model_type, None, VOCABULARY, 128, 384, 4, max_position_embeddings=512) | _heads(8, 4) | IDS | more


SHAPES = {
    "bert-tiny": _bert("google/bert_uncased_L-2_H-128_A-2", 128, 2),
    "bert-base": _bert("google-bert/bert-base-uncased", 768, 12),
    "bert-large": _bert("google-bert/bert-large-uncased", 1024, 24),
    "gpt-tiny": _gpt2(None, 128, 2, 2) | {"vocab_size": None},  # ours: it takes the vocabulary of its data
    "gpt2": _gpt2("openai-community/gpt2", 768, 12, 12),
    "gpt2-medium": _gpt2("openai-community/gpt2-medium", 1024, 24, 16),
    "gpt2-large": _gpt2("openai-community/gpt2-large", 1280, 36, 20),
    "gpt2-xl": _gpt2("openai-community/gpt2-xl", 1600, 48, 25),
    # Table 2.1 of the GPT-3 paper, as GPT-2s without weights. For 13B it prints a width of 5140, and 40 heads of 128
    # make 5120.
    "gpt3-2.7b": _gpt2(None, 2560, 32, 32, positions=2048),
    "gpt3-13b": _gpt2(None, 5120, 40, 40, positions=2048),
    "gpt-j-6b": {
        "model_type": "gptj",
        "hub": "EleutherAI/gpt-j-6b",
        "vocab_size": 50400,
        "n_positions": 2048,
        "n_embd": 4096,
        "n_layer": 28,
        "n_head": 16,
        "rotary_dim": 64,
        "tie_word_embeddings": False,
    },
    "gemma2-9b": {
        "model_type": "gemma2",
        "hub": "google/gemma-2-9b",
        "vocab_size": 256000,
        "hidden_size": 3584,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "gpt-neox-20b": {
        "model_type": "gpt_neox",
        "hub": "EleutherAI/gpt-neox-20b",
        "vocab_size": 50432,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
    },
    "llama3-8b": _decoder("llama", "meta-llama/Meta-Llama-3-8B", 128256, 4096, 14336, 32, max_position_embeddings=8192)
    | _heads(32, 8)
    | UNTIED,
    "llama3.2-1b": _decoder("llama", "meta-llama/Llama-3.2-1B", 128256, 2048, 8192, 16, max_position_embeddings=131072)
    | _heads(32, 8)
    | TIED,
    "qwen2.5-7b": _decoder("qwen2", "Qwen/Qwen2.5-7B", 152064, 3584, 18944, 28, max_position_embeddings=131072)
    | _heads(28, 4)
    | UNTIED,
    "qwen3-8b": _decoder("qwen3", "Qwen/Qwen3-8B", 151936, 4096, 12288, 36, max_position_embeddings=40960)
    | _heads(32, 8, 128)
    | UNTIED,
    "qwen3-32b": _decoder("qwen3", "Qwen/Qwen3-32B", 151936, 5120, 25600, 64, max_position_embeddings=40960)
    | _heads(64, 8, 128)
    | UNTIED,
    "mistral-7b": _decoder("mistral", "mistralai/Mistral-7B-v0.3", 32768, 4096, 14336, 32)
    | {"max_position_embeddings": 32768, "sliding_window": None}
    | _heads(32, 8)
    | UNTIED,
    "gemma3-1b": _decoder("gemma3_text", "google/gemma-3-1b-pt", 262144, 1152, 6912, 26, max_position_embeddings=32768)
    | {"sliding_window": 512, "query_pre_attn_scalar": 256}
    | _heads(4, 1, 256)
    | TIED,
    "phi3-mini": _decoder("phi3", "microsoft/Phi-3-mini-4k-instruct", 32064, 3072, 8192, 32)
    | {"max_position_embeddings": 4096, "sliding_window": 2047}
    | _heads(32, 32)
    | UNTIED,
    "olmo2-7b": _decoder("olmo2", "allenai/OLMo-2-1124-7B", 100352, 4096, 11008, 32, max_position_embeddings=4096)
    | _heads(32, 32)
    | UNTIED,
    "mixtral-8x7b": _decoder("mixtral", "mistralai/Mixtral-8x7B-v0.1", 32000, 4096, 14336, 32)
    | {"max_position_embeddings": 32768, "num_local_experts": 8, "num_experts_per_tok": 2}
    | _heads(32, 8)
    | UNTIED,
    "qwen3-30b-a3b": _decoder("qwen3_moe", "Qwen/Qwen3-30B-A3B", 151936, 2048, 6144, 48)
    | {"max_position_embeddings": 40960}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    | _heads(32, 4, 128)
    | UNTIED,
    "t5-large": {"model_type": "t5", "hub": "google-t5/t5-large", "vocab_size": 32128, "d_model": 1024, "d_kv": 64}
    | {"d_ff": 4096, "num_layers": 24, "num_heads": 16},
    "modernbert-large": _decoder("modernbert", "answerdotai/ModernBERT-large", 50368, 1024, 2624, 28)
    | {"num_attention_heads": 16},
    "vit-large": {"model_type": "vit", "hub": "google/vit-large-patch16-224", "hidden_size": 1024}
    | {"intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 224}
    | {"num_labels": 1000},
    "whisper-large": {"model_type": "whisper", "hub": "openai/whisper-large-v3", "vocab_size": 51866, "d_model": 1280}
    | {"encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20, "decoder_attention_heads": 20}
    | {"encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "num_mel_bins": 128},
    "llama-micro": _micro("llama"),
    "qwen2-micro": _micro("qwen2"),
    "qwen3-micro": _micro("qwen3", head_dim=32),
    "mistral-micro": _micro("mistral"),
    "gemma2-micro": _micro("gemma2", head_dim=32),
    "gemma3-micro": _micro("gemma3_text", head_dim=32),
    "phi3-micro": _micro("phi3"),
    "olmo2-micro": _micro("olmo2"),
    "mixtral-micro": _micro("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe-micro": _micro("qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96),
    "modernbert-micro": _micro("modernbert", cls_token_id=1, sep_token_id=2),
    "t5-micro": {"model_type": "t5", "hub": None, "vocab_size": VOCABULARY, "d_model": 128, "d_kv": 16, "d_ff": 384}
    | {"num_layers": 3, "num_heads": 8},
    "vit-micro": {"model_type": "vit", "hub": None, "hidden_size": 128, "intermediate_size": 384}
    | {"num_hidden_layers": 4, "num_attention_heads": 8, "image_size": 64, "patch_size": 8},
    "whisper-micro": {"model_type": "whisper", "hub": None, "vocab_size": VOCABULARY, "d_model": 128}
    | {"encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 8, "decoder_attention_heads": 8}
    | {"encoder_ffn_dim": 384, "decoder_ffn_dim": 384, "max_source_positions": 100, "max_target_positions": 128}
    | IDS
    | {"decoder_start_token_id": 3},
}
NO_FUSED_ATTENTION = ("gptj", "gemma2")  # model types for which transformers 5 has eager attention only


def config_of(name: str, vocabulary: int = VOCABULARY) -> dict:
    """Return the config of a built-in shape. `vocabulary` is for shapes that take the vocabulary of their data."""
    shape = {key: value for key, value in SHAPES[name].items() if key != "hub"}
    if shape.get("vocab_size", 0) is None:
        shape |= {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None}
    return shape


def shape_of(model: str) -> str:
    """Return the built-in shape that a hub name or the last part of a path means; the name itself if it means none."""
    last = Path(model).name
    return next((name for name, shape in SHAPES.items() if last == Path(shape.get("hub") or name).name), model)


def model_type(model: str) -> str | None:
    """Return the `model_type` of a built-in shape, a local folder or the hub name of a shape. None if unknown."""
    if model in SHAPES:
        return SHAPES[model]["model_type"]
    if not is_local(model):
        return SHAPES.get(shape_of(model), {}).get("model_type")
    try:
        config = texts.from_json(files.read(Path(model) / "config.json", MAX_CONFIG_BYTES))
    except (OSError, ValueError):
        return None  # whoever builds the model says what is wrong with it
    return config.get("model_type") if isinstance(config, dict) else None


def is_local(name: str) -> bool:
    """Return whether a name is a path that exists, as opposed to a name on the hub."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # too long for a path, or with a NUL in it
        return False
