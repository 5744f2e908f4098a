"""A model folder whose config.json needs Python code of its own, and which leaves a mark where that code ran."""

import json
from pathlib import Path

CONFIG = """
from transformers import PretrainedConfig

class OwnConfig(PretrainedConfig):
    model_type = "own_decoder"
"""
MODEL = """
import torch
from pathlib import Path
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .configuration_own import OwnConfig

Path({mark!r}).touch()

class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        width = config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        return CausalLMOutput(logits=self.head(hidden))
"""
SIZES = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 3}
PARAMETERS = 2 * 512 * 64 + 3 * 64 * 64


def write(folder: Path, mark: Path) -> Path:
    folder.mkdir()
    names = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own_decoder", "auto_map": names} | SIZES))
    (folder / "configuration_own.py").write_text(CONFIG)
    (folder / "modeling_own.py").write_text(MODEL.format(mark=str(mark)))
    return folder
