"""Small configs, which run in a test, of the families that people train today, and what real passes over them hold."""

import copy
import types
from pathlib import Path

import torch
import yaml

from study.core.models.step import inputs, logits_and_losses
from study.measure.memory import MemoryWatch

SMALL = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text())


def config_of(name: str, **changes) -> dict:
    """A small config.json of a family."""
    return {"model_type": name} | copy.deepcopy(SMALL["families"][name]) | changes


def held_by(patch, config, model, rows: int, sequence: int, dtype: torch.dtype, autocast: bool) -> tuple[int, int]:
    """Bytes that a model holds on a CPU: at the end of a forward pass, and at most until the backward pass ends."""
    batch = inputs(config, rows, sequence)
    known = [*model.parameters(), *model.buffers(), *batch.values()]
    patch.setattr("study.measure.memory.gc", types.SimpleNamespace(collect=int, get_objects=lambda: known))
    with MemoryWatch("cpu", dict) as watch:
        before = watch.total
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = logits_and_losses(config, model, batch, dtype)[1].mean()
        kept = watch.total - before
        loss.backward()
    return kept, watch.peak - before
