"""Runs rank 0 of 2 of PEFT's adapters under FSDP1, alone and on a CPU, and prints peaks of its tensors as JSON.

As transformers 4 and its Trainer do it: adapters are units of their own, and recomputation is around a layer's unit.
"""

import functools
import json
import os
import sys

import torch
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

from study.core.models import config as configs
from study.core.models.build import build
from study.measure.memory import MemoryWatch
from study.measure.virtual_rank import become_virtual_rank
from tests.predict.families import config_of

RANKS, ROWS, SEQUENCE, RANK = 2, 2, 256, 4
LAYERS = (4, 8)  # with fewer a peak is that of the loss


def run(layers: int, reentrant: bool) -> int:
    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "LlamaDecoderLayer"
    config = configs.of_dict(config_of("llama", num_hidden_layers=layers, use_cache=False), "sdpa")
    model = get_peft_model(build(config, "cpu"), LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"]))
    model.enable_input_require_grads()
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=fsdp_auto_wrap_policy(model), device_id=torch.device("cpu")
    )
    for unit in sharded.modules():
        if isinstance(unit, FullyShardedDataParallel) and type(unit.module).__name__ == "LlamaDecoderLayer":
            setattr(unit, "forward", recomputed(unit.forward, reentrant))  # noqa: B010
    tokens = torch.randint(0, config.vocab_size, (ROWS, SEQUENCE))
    for _ in range(2):  # the first one also makes what stays
        watch = MemoryWatch("cpu", dict)
        with watch:
            before = watch.total
            sharded(tokens, labels=tokens).loss.backward()
    return watch.peak - before


def recomputed(forward, reentrant: bool):
    def again(hidden, **others):
        return checkpoint(functools.partial(forward, **others), hidden, use_reentrant=reentrant)

    return again


if __name__ == "__main__":
    become_virtual_rank(RANKS)
    peaks = {str(reentrant): [run(layers, reentrant) for layers in LAYERS] for reentrant in (True, False)}
    sys.stdout.write(json.dumps(peaks))
