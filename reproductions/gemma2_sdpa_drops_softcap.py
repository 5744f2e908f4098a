# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.20.0"]
# ///
"""Claimed: an attention implementation changes speed and memory, and not what a model computes.

What happens (transformers 4.48.3 to 5.20.0): Gemma-2 caps the logits of its attention (`attn_logit_softcapping`), and
sdpa, its default, leaves that out. Up to 4.56.2 a warning says once that eager is recommended; 4.57.1 and later are
silent. From 5.21.0 on sdpa is refused, and eager is the default.
"""

import json

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM


def loss(attention: str) -> float:
    config = Gemma2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=1,
        attn_logit_softcapping=0.5,
        max_position_embeddings=64,
    )
    model = Gemma2ForCausalLM._from_config(config, attn_implementation=attention)
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tokens = torch.arange(16)[None]
    return model.train()(tokens, labels=tokens).loss.item()


eager = loss("eager")
try:
    sdpa = loss("sdpa")
except ValueError:  # it is refused
    sdpa = eager
print(json.dumps({"found": abs(sdpa - eager) > 0.01, "eager": round(eager, 3), "sdpa": round(sdpa, 3)}), flush=True)
