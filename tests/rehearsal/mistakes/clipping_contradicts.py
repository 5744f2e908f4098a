# gradient_clipping=0.0 vs hf max_grad_norm=1.0
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Rows(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"input_ids": torch.arange(16), "labels": torch.arange(16)}


config = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=128,
)
model = LlamaForCausalLM(config)

zero = {"gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
arguments = TrainingArguments("out", max_grad_norm=1.0, deepspeed=zero, report_to="none", save_strategy="no")
Trainer(model, arguments, train_dataset=Rows()).train()
