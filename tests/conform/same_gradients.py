"""Two ranks train two updates with each trainer, whose gradients are compared: same_gradients.py FOLDER sft dpo."""

import os
import sys
from pathlib import Path

import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from study.conform.trainers import SameGradients


class PastDDP(Trainer):
    """A mistake: the loss calls the model inside DDP, whose forward pass prepares the reduction."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(self.accelerator.unwrap_model(model), inputs, *args, **kwargs)


words = {word: number for number, word in enumerate(["<pad>", "a", "b", "c", "d"])}
core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
core.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<pad>")
sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 5}
folder, *kinds = sys.argv[1:]
saved = Path(folder, f"model-{os.environ['RANK']}")
LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0)).save_pretrained(saved)  # DPO loads its reference from there

common = {"output_dir": f"{folder}/out", "use_cpu": True, "max_steps": 2, "per_device_train_batch_size": 2}
common |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
letters = ["a b c d", "b a a d", "c c a b", "d b b a"] * 4
texts = Dataset.from_dict({"text": letters})
ids = Dataset.from_list([{"input_ids": tokenizer(text).input_ids} for text in letters])
rows = ids.map(lambda row: {"labels": row["input_ids"]})
pairs = Dataset.from_list([{"prompt": "a b", "chosen": f" {text}", "rejected": " d d"} for text in letters])


def trainer_of(kind: str) -> Trainer:
    given = {"model": LlamaForCausalLM.from_pretrained(saved), "callbacks": [SameGradients()]}
    if kind == "sft":
        arguments = SFTConfig(**common, bf16=False)
        return SFTTrainer(**given, args=arguments, processing_class=tokenizer, train_dataset=texts)
    if kind == "dpo":
        arguments = DPOConfig(**common, bf16=False)
        return DPOTrainer(**given, args=arguments, processing_class=tokenizer, train_dataset=pairs)
    return {"trainer": Trainer, "past": PastDDP}[kind](**given, args=TrainingArguments(**common), train_dataset=rows)


for kind in kinds:
    trainer = trainer_of(kind)
    try:
        trainer.train()
        said = f"the same in {trainer.state.global_step} updates"
    except Exception as error:
        said = str(error)
    sys.stdout.write(f"{kind}, rank {dist.get_rank()}: {said}\n")
    sys.stdout.flush()
    dist.barrier()
