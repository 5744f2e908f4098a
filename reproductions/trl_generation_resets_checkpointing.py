# /// script
# requires-python = ">=3.11"
# dependencies = ["trl==1.16.0", "torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0"]
# ///
"""Claimed: gradient_checkpointing_kwargs decides how activations are recomputed (TrainingArguments' documentation).

What happens (TRL 1.15.0, not in 1.16.0): GRPO and RLOO turn recomputation off while they generate, and on again without
these arguments. After the first generation the kind is the default one. "found": use_reentrant before and after.
"""

import inspect
import json

from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig
from trl.models import unwrap_model_for_generation

KIND = {"use_reentrant": True}


def kind(model) -> bool:
    return model.model.layers[0]._gradient_checkpointing_func.keywords["use_reentrant"]


sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=KIND)
before = kind(model)
# As the trainers call it: from 1.16.0 on they pass their arguments.
takes = inspect.signature(unwrap_model_for_generation).parameters
arguments = {"gradient_checkpointing_kwargs": KIND} if "gradient_checkpointing_kwargs" in takes else {}
with unwrap_model_for_generation(model, Accelerator(cpu=True), **arguments):
    pass
print(json.dumps({"found": f"{before} {kind(model)}"}))
