"""Writes a model with random weights, in the form of files that a loading cell asks for. A process of its own."""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers.models.auto import modeling_auto as names

from study.core.shapes import config_of

SHARDS = 4


def write(shape: str, form: str, saved: str, folder: Path) -> dict:
    """Return the class of the model, its parameters, and the classes of its layers."""
    config = transformers.AutoConfig.for_model(**config_of(shape))
    config.use_cache = False
    is_encoder = config.model_type in ("bert", "modernbert")
    table = names.MODEL_FOR_MASKED_LM_MAPPING_NAMES if is_encoder else names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kind = getattr(transformers, table[config.model_type])
    with torch.device("meta"):
        model = kind(config).to(getattr(torch, saved))
    model.to_empty(device="cpu")
    model.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // SHARDS if form.endswith("shards") else 2 * size)
    if not form.startswith("safetensors"):
        _pickle(folder, as_today=form.startswith("pickled"))
    embeddings = model.get_input_embeddings()
    holders = {type(module).__name__ for module in model.modules() if embeddings in module.modules()}
    layers = sorted(set(model._no_split_modules or ()) - holders)  # see `study.training.patches.name_layers`
    return {"class": kind.__name__, "parameters": model.num_parameters(), "layers": layers}


def _pickle(folder: Path, as_today: bool) -> None:
    """Turn files of safetensors into pickled ones. PyTorch writes zip files since 1.6, and can write the older form."""
    for path in folder.glob("model*.safetensors"):
        values = load_file(path)
        torch.save(values, folder / f"pytorch_{path.stem}.bin", _use_new_zipfile_serialization=as_today)
        path.unlink()
    index = folder / "model.safetensors.index.json"
    if index.exists():
        text = index.read_text().replace('"model-', '"pytorch_model-').replace(".safetensors", ".bin")
        (folder / "pytorch_model.bin.index.json").write_text(text)
        index.unlink()


if __name__ == "__main__":
    shape, form, saved, place = sys.argv[1:]
    Path(place, "made.json").write_text(json.dumps(write(shape, form, saved, Path(place))))
