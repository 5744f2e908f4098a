"""Builds the model of a run, and the starting weights that all arms share."""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from study.core import cache, shapes
from study.core.errors import Stop
from study.core.files import safe_join
from study.core.models import config as configs
from study.core.models.build import build
from study.core.settings import Settings
from study.core.shapes import SHAPES, VOCABULARY
from study.measure.hardware import device_is_full, host_is_full

KINDS = {"imdb": "encoder", "wikitext": "decoder"}  # the kind of model that a task needs; synthetic takes any


def model_config(settings: Settings, vocabulary: int | None) -> PretrainedConfig:
    """Return the model's config, changed as the settings say. `vocabulary` is that of the data, if it has one."""
    config = configs.load(
        settings.model,
        vocabulary=vocabulary or VOCABULARY,
        attention=settings.attention,
        dropout=settings.dropout,
    )
    kind = configs.kind_of(config)
    if kind != KINDS.get(settings.task, kind):
        what = f"--model {settings.model} ({config.model_type}, {kind}) does not fit task {settings.task}"
        raise Stop(what, "give another --task or --model, or --task synthetic with --virtual-ranks")
    if vocabulary and vocabulary > config.vocab_size:
        what = f"the data uses {vocabulary} token ids and --model {settings.model} knows {config.vocab_size}"
        raise Stop(what, "give the tokenizer that belongs to the model")
    limits = {"positions": configs.sequence_limit(config)}
    if settings.task != "synthetic":  # our masks have no window, which would change the values
        limits["tokens of attention window"] = getattr(config, "sliding_window", None)
    for what, most in limits.items():
        if most and settings.sequence > most:
            raise Stop(f"--sequence {settings.sequence} is more than the model's {most} {what}", f"give at most {most}")
    return config


def on_meta(settings: Settings, config) -> PreTrainedModel:
    """Return the model without memory, for counting parameters and operations."""
    return build(config, "meta", weights_dtype(settings))


def weights_dtype(settings: Settings) -> torch.dtype:
    return torch.bfloat16 if settings.recipe.weight_bytes == 2 else torch.float32


def drawn_weights(settings: Settings, config) -> Path:
    """Return a cached checkpoint with random weights for this model and seed, which every arm loads."""
    # Drawn in each arm, they would be others under stage 3, where DeepSpeed partitions each parameter as it is drawn.
    # Everything that decides what is drawn. Dropout and attention do not, so runs that differ in them share weights.
    drawn = {name: value for name, value in config.to_dict().items() if "drop" not in name}
    key = [drawn, configs.class_for(config).__name__, settings.seed, torch.__version__, transformers.__version__]
    name = f"{Path(settings.model).name}-seed{settings.seed}-{cache.fingerprint(key)}"

    def write(folder: Path) -> None:
        from transformers.integrations import deepspeed as hf_deepspeed

        # Hidden from DeepSpeed's stage 3, which would partition the parameters while they are drawn.
        with mock.patch.object(hf_deepspeed, "_hf_deepspeed_config_weak_ref", None):
            transformers.set_seed(settings.seed)
            # A copy, because both calls change the config, which is part of the key.
            configs.class_for(config)(copy.deepcopy(config)).save_pretrained(folder)

    return cache.entry(safe_join(settings.cache_dir, "weights", name), write)


def build_model(settings: Settings, config, device: torch.device) -> PreTrainedModel:
    """Return the model with its starting weights; under stage 3 each rank keeps only its own part while loading."""
    options = {"dtype": weights_dtype(settings), "attn_implementation": config._attn_implementation}
    if settings.init in ("in_place", "none"):
        with device:
            # As the Auto classes do it: under stage 3 each parameter is partitioned as it is drawn.
            model = configs.class_for(config)._from_config(copy.deepcopy(config), **options)
    else:
        model = _load(settings, config, options)
    if settings.checkpointing:
        # The reentrant kind needs inputs that require gradients, which `freeze` sees to.
        model.gradient_checkpointing_enable({"use_reentrant": settings.reentrant})
    return model.train()


def hub_name(settings: Settings) -> str | None:
    """Return the name of the model on the hub, or its folder. None for a shape of the study's own."""
    return SHAPES.get(settings.model, {"hub": settings.model})["hub"]


def _load(settings: Settings, config, options: dict) -> PreTrainedModel:
    """Return the model with drawn or published weights."""
    name = str(drawn_weights(settings, config)) if settings.init == "random" else hub_name(settings)
    if name is None:
        raise Stop(f"--model {settings.model} has no published weights", "give --init random")
    with reading("weights of", name, "give --init random, or a folder with weights; remove one of drawn weights"):
        return configs.class_for(config).from_pretrained(name, config=config, trust_remote_code=False, **options)


@contextlib.contextmanager
def reading(what: str, name: str, remedy: str = shapes.WITHOUT_HUB) -> Iterator[None]:
    """Let a library read a folder, or a name on the hub. It raises a dozen types; each means that it cannot."""
    shapes.prepare_to_load(name)
    try:
        yield
    except Exception as error:
        if device_is_full(error) or host_is_full(error):
            raise  # which has its own status
        raise Stop(f"the {what} {name} cannot be read ({shapes.why_not_loaded(name, error)})", remedy) from error
