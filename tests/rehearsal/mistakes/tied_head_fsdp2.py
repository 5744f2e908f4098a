# The first and the last weights are two tensors|tied|shared
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=128,
)

dist.init_process_group("nccl")
config.tie_word_embeddings = True
model = LlamaForCausalLM(config)
fully_shard(model.model.embed_tokens)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model.lm_head)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.randint(0, 512, (4, 16)).cuda()
for _ in range(9):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
