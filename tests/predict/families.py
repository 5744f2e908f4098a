"""Small configs, which run in a test, of the families that people train today, and what real passes over them hold."""

import types

import torch

from study.core.models.step import inputs, logits_and_losses
from study.measure.memory import MemoryWatch

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


def held_by(patch, config, model, rows: int, sequence: int, dtype: torch.dtype, autocast: bool) -> tuple[int, int]:
    """Bytes that a model holds on a CPU: at the end of a forward pass, and at most until the backward pass ends."""
    batch = inputs(config, rows, sequence)
    known = [*model.parameters(), *model.buffers(), *batch.values()]
    patch.setattr("study.measure.memory.gc", types.SimpleNamespace(collect=int, get_objects=lambda: known))
    with MemoryWatch("cpu", dict) as watch:
        before = watch.total
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = logits_and_losses(config, model, batch, dtype)[1].mean()
        kept = watch.total - before
        loss.backward()
    return kept, watch.peak - before
