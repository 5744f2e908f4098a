# /// script
# requires-python = ">=3.11"
# dependencies = ["deepspeed==0.19.8", "torch==2.13.0", "transformers==5.22.2"]
# ///
"""Claimed: with stage 3 `from_config` builds the model that it builds without, in parts.

What happens (transformers 4.46.3 to 5.22.2): a module that draws its children's weights, as GPT-2's attention draws
`c_proj` and T5's all matrices, meets empty tensors. These keep what was there: GPT-2's `c_proj` begins 6.9 times as
wide with 24 layers, and T5's in 5.3.0 to 5.10.4 are whatever was in memory. In 4.52.4 to 5.2.0 no module of any model
draws its weights, and BERT cannot be built. 5.23.0 gathers the children's weights as well. In 5.0.0 to 5.10.4 `c_proj`
is as wide without stage 3.

Prints for each model the largest ratio of standard deviations of a weight, with stage 3 over without.
"""

import json
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")

import deepspeed
import torch
from transformers import AutoModel, BertConfig, GPT2Config, LlamaConfig, T5Config
from transformers.integrations import HfDeepSpeedConfig

deepspeed.init_distributed("gloo")
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
SHAPES = {
    "gpt2": GPT2Config(n_layer=24, n_embd=64, n_head=4, n_positions=64, vocab_size=512),
    "t5": T5Config(d_model=64, d_kv=16, num_heads=4, d_ff=256, num_layers=2, vocab_size=512),
    "llama": LlamaConfig(**SMALL, vocab_size=512),
    "bert": BertConfig(**SMALL, vocab_size=512),
}


def widths(shape) -> dict[str, float]:
    """The standard deviation of each matrix that is drawn."""
    torch.manual_seed(1)
    found = {}
    for name, parameter in AutoModel.from_config(shape).named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            if parameter.dim() == 2:
                found[name] = parameter.detach().float().std().item()
    return found


def largest_ratio(alone: dict[str, float], shape) -> float | str:
    try:
        divided = widths(shape)
    except IndexError as error:  # the row of the padding token, of a tensor without rows
        return type(error).__name__
    ratios = [max(divided[name] / width, width / max(divided[name], 1e-9)) for name, width in alone.items()]
    return round(max(ratios), 1)


alone = {name: widths(shape) for name, shape in SHAPES.items()}
config = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
ratios = {name: largest_ratio(alone[name], shape) for name, shape in SHAPES.items()}
differ = any(isinstance(ratio, str) or ratio > 2 for ratio in ratios.values())  # small tensors draw up to 1.2
print(json.dumps({"found": differ, **ratios}), flush=True)
os._exit(0)  # gloo's threads may abort an ordinary exit
