# IndexError: index 512 is out of range: the model has 512 rows of an embedding
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=128,
)

accelerator = Accelerator()
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(torch.full((64, 16), 512), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for ids in loader:
    accelerator.backward(model(input_ids=ids).logits.sum())
    optimizer.step()
    optimizer.zero_grad()
