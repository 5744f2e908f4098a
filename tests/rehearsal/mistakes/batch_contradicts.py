# train_micro_batch_size_per_gpu=2 vs hf per_device_train_batch_size=8
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

zero = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}
arguments = TrainingArguments("out", deepspeed=zero, report_to="none", save_strategy="no")
Trainer(model, arguments, train_dataset=Rows()).train()
