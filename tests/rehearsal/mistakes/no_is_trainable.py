# does not require grad|not needed when a module doesn't have any parameters that require
import tempfile

import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
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
adapter = tempfile.mkdtemp()
lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
get_peft_model(LlamaForCausalLM(config), lora).save_pretrained(adapter)
model = PeftModel.from_pretrained(LlamaForCausalLM(config), adapter)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(torch.randint(0, 512, (64, 16)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for ids in loader:
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
