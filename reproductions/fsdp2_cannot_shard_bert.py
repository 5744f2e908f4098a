# /// script
# requires-python = ">=3.11"
# dependencies = ["accelerate==1.15.0", "torch==2.13.0", "transformers==5.23.0"]
# ///
"""Claimed: "It will try to use `model._no_split_modules` when possible" (Accelerate's usage guide of FSDP, whose
example trains BERT, on the policy TRANSFORMER_BASED_WRAP).

What happens (accelerate 1.15.0 with torch 2.13.0, transformers 5.23.0): for BERT these modules are the layers and
the embeddings. `fsdp2_prepare_model` shards them, and then shards the input embeddings, which are inside, once more:
TypeError. The same happens with ViT and ModernBERT. A workaround is to name only the layers, as with
`fsdp_transformer_layer_cls_to_wrap: BertLayer`.
"""

import json
import os

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import BertConfig, BertForSequenceClassification

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # the other rank is not needed


def sharded(layers: list[str] | None) -> str:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=layers
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # On a GPU Accelerate does this itself; without one it does not shard at all.
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=32, **sizes))
    try:
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    except Exception as error:
        return type(error).__name__
    return "sharded"


found, with_layers = sharded(None), sharded(["BertLayer"])
print(json.dumps({"found": found, "with the layers named": with_layers}), flush=True)
os._exit(0)
