"""Configs of the families that people train today: small ones that run in a test, and the published dimensions."""

TEXT = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1}
TEXT |= {"eos_token_id": 2}
GROUPED = TEXT | {"num_key_value_heads": 2}
GPT = {"vocab_size": 512, "n_positions": 128, "n_embd": 64, "n_inner": 160, "n_layer": 2, "n_head": 4}
EXPERTS = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
SEES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
SEES |= {"image_size": 32, "patch_size": 8}
SMALL = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 24},
    "mistral": GROUPED,
    "gemma2": GROUPED | {"head_dim": 24},
    "gemma3_text": GROUPED | {"head_dim": 24},
    "phi3": GROUPED,
    "olmo2": GROUPED,
    "mixtral": GROUPED | {"num_local_experts": 4},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 48},
    "qwen3_moe": EXPERTS | {"head_dim": 24},
    "bert": TEXT,
    "modernbert": TEXT | {"cls_token_id": 1, "sep_token_id": 2},
    "falcon": TEXT,
    "bloom": TEXT,
    "deberta-v2": TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    "t5": {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 2, "num_heads": 4},
    "vit": SEES,
    "whisper": ENDS
    | {"vocab_size": 512, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
    | {"decoder_attention_heads": 4, "encoder_ffn_dim": 160, "decoder_ffn_dim": 160}
    | {"max_source_positions": 50, "max_target_positions": 64},
}
# Models of images that cannot recompute activations, or have weights that a classification does not use.
SEEING = {
    "clip": {"vision_config": SEES, "text_config": TEXT},
    "resnet": {"depths": [1, 1], "hidden_sizes": [32, 64], "embedding_size": 16, "layer_type": "basic"},
}
OLDER = {
    "gpt2": GPT,
    "gptj": GPT | {"rotary_dim": 8, "tie_word_embeddings": False},
    "gpt_neox": TEXT | {"rotary_pct": 0.25},
}


def config_of(name: str, **changes) -> dict:
    """A small config.json of a family."""
    return {"model_type": name} | (SMALL | SEEING | OLDER)[name] | changes


# Dimensions as the authors' config.json gives them, and the number of parameters that they, or the hub, publish.
PUBLISHED = {
    "Llama-3-8B": (8030261248, {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096}
        | {"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5}),
    "Qwen3-8B": (8190735360, {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096}
        | {"intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"head_dim": 128, "max_position_embeddings": 40960}),
    "Gemma-3-1B": (999885952, {"model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152}
        | {"intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1}
        | {"head_dim": 256, "max_position_embeddings": 32768, "sliding_window": 512}),
    "Qwen3-30B-A3B": (30532122624, {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048}
        | {"intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
        | {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"max_position_embeddings": 40960, "norm_topk_prob": True}),
    "T5-base": (222903552, {"model_type": "t5", "vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 3072}
        | {"num_layers": 12, "num_heads": 12, "n_positions": 512}),
    "ModernBERT-base": (149.6e6, {"model_type": "modernbert", "vocab_size": 50368, "hidden_size": 768}
        | {"intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12}
        | {"max_position_embeddings": 8192}),
    "ViT-B-16": (86567656, {"model_type": "vit", "hidden_size": 768, "intermediate_size": 3072}
        | {"num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 224, "patch_size": 16}
        | {"num_labels": 1000}),
    "Whisper-small": (241734912, {"model_type": "whisper", "vocab_size": 51865, "d_model": 768}
        | {"encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12, "decoder_attention_heads": 12}
        | {"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "num_mel_bins": 80, "max_source_positions": 1500}
        | {"max_target_positions": 448}),
}  # fmt: skip
