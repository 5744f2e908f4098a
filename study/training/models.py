"""Builds the model of a run, the starting weights that all arms share, and the optimizer."""

import copy
import importlib.util
import types
from pathlib import Path

import torch
import transformers
from torch.optim import Optimizer
from transformers import PretrainedConfig, PreTrainedModel

from study.errors import Stop
from study.io.files import safe_join
from study.machine import cache, hub
from study.measure.hardware import device_is_full, host_is_full
from study.models import config as configs
from study.models.build import build
from study.spec.settings import HALF_WEIGHTS, Settings
from study.spec.shapes import SHAPES, VOCABULARY

KINDS = {"imdb": "encoder", "wikitext": "decoder"}  # the kind of model that a task needs; synthetic takes any


def model_config(settings: Settings, vocabulary: int | None) -> PretrainedConfig:
    """Return the model's config, changed as the settings say. `vocabulary` is that of the data, if it has one."""
    config = configs.load(
        settings.model,
        vocabulary=vocabulary or VOCABULARY,
        attention=settings.attention,
        dropout=settings.dropout,
        trust_remote_code=settings.trust_remote_code,
    )
    kind = configs.kind_of(config)
    if kind != KINDS.get(settings.task, kind):
        what = f"--model {settings.model} ({config.model_type}) does not fit task {settings.task}"
        fitting = next((task for task, fits in KINDS.items() if fits == kind), None)
        raise Stop(what, f"give --task {fitting or 'synthetic with --virtual-ranks'}, or another model")
    if vocabulary and vocabulary > config.vocab_size:
        what = f"the data uses {vocabulary} token ids and --model {settings.model} knows {config.vocab_size}"
        raise Stop(what, "give the tokenizer that belongs to the model")
    limits = [configs.sequence_limit(config)]
    window = getattr(config, "sliding_window", None)
    if window and settings.task != "synthetic":  # our masks have no window, which would change the values
        limits.append((window, "tokens of attention window"))
    for most, what in filter(None, limits):
        if settings.sequence > most:
            raise Stop(f"--sequence {settings.sequence} is more than the model's {most} {what}", f"give at most {most}")
    return config


def on_meta(settings: Settings, config) -> PreTrainedModel:
    """Return the model without memory, for counting parameters and operations."""
    return build(config, "meta", weights_dtype(settings))


def weights_dtype(settings: Settings) -> torch.dtype:
    return torch.bfloat16 if settings.precision in HALF_WEIGHTS else torch.float32


def drawn_weights(settings: Settings, config) -> Path:
    """Return a cached checkpoint with random weights for this model and seed, which every arm loads.

    Drawing in each arm would give stage 3 other weights than the rest, because DeepSpeed partitions each parameter as
    it is drawn.
    """
    key = {
        "config": {k: v for k, v in config.to_dict().items() if "drop" not in k and k != "transformers_version"},
        "class": configs.class_for(config).__name__,
        "seed": settings.seed,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    name = f"{Path(settings.model).name}-seed{settings.seed}-{cache.fingerprint(key)}"

    def write(folder: Path) -> None:
        from transformers.integrations import deepspeed as hf_deepspeed

        # Hidden from DeepSpeed's stage 3, which would partition the parameters while they are drawn.
        registered = hf_deepspeed._hf_deepspeed_config_weak_ref
        hf_deepspeed.unset_hf_deepspeed_config()
        try:
            transformers.set_seed(settings.seed)
            # A copy, because both calls change the config, which is part of the key.
            configs.class_for(config)(copy.deepcopy(config)).save_pretrained(folder)
        finally:
            hf_deepspeed._hf_deepspeed_config_weak_ref = registered

    return cache.entry(safe_join(settings.cache_dir, "weights", name), write)


def build_model(settings: Settings, config, device: torch.device) -> PreTrainedModel:
    """Return the model with its starting weights; under stage 3 each rank keeps only its own part while loading."""
    if settings.init in ("in_place", "none"):
        options = {"dtype": weights_dtype(settings), "attn_implementation": config._attn_implementation}
        with device:
            # As the Auto classes do it: under stage 3 each parameter is partitioned as it is drawn.
            model = configs.class_for(config)._from_config(copy.deepcopy(config), **options)
    elif settings.init == "random":
        folder = str(drawn_weights(settings, config))
        what = f"the drawn weights in {folder} cannot be loaded"
        remedy = "delete that folder, so that they are drawn again, or give another --cache-dir"
        model = _load(settings, config, folder, Stop(what, remedy))
    else:
        remedy = "give --init random to start from drawn weights, or a folder that holds weights"
        stop = Stop(f"no weights for --model {settings.model}", remedy)
        model = _load(settings, config, _published(settings), stop)
    if settings.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _load(settings: Settings, config, name: str, stop: Stop) -> PreTrainedModel:
    """Return the model with saved weights, or raise `stop` with the reason if they cannot be loaded."""
    try:
        return configs.class_for(config).from_pretrained(
            name,
            config=config,
            trust_remote_code=settings.trust_remote_code,
            dtype=weights_dtype(settings),
            attn_implementation=config._attn_implementation,
        )
    except Exception as error:
        if device_is_full(error) or host_is_full(error):
            raise
        raise Stop(f"{stop.what} ({hub.reason(name, error)})", stop.remedy) from error


def _published(settings: Settings) -> str:
    name = SHAPES[settings.model]["hub"] if settings.model in SHAPES else settings.model
    if name is None:
        raise Stop(f"--model {settings.model} has no published weights", "give --init random")
    hub.prepare_to_load(name)
    return name


MOMENTUM = 0.9  # of SGD; Muon's own default is 0.95


def build_optimizer(settings: Settings, model: torch.nn.Module, with_master: bool = False) -> Optimizer:
    """Return the optimizer over the parameters that train."""
    kind, options = _optimizer_kind(settings)
    kind = _with_master(kind) if with_master else kind
    return kind(_parameter_groups(settings, model), **options)


def _optimizer_kind(settings: Settings) -> tuple[type[Optimizer], dict]:
    """Return the class of the optimizer, and its arguments besides the parameters."""
    options = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if settings.optimizer == "adamw":
        return torch.optim.AdamW, options | {"fused": True}
    if settings.optimizer == "sgd":
        return torch.optim.SGD, options | {"momentum": MOMENTUM, "fused": True}
    if settings.optimizer == "adafactor":
        return torch.optim.Adafactor, options
    if settings.optimizer == "muon":
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        return MuonWithAuxAdam, {"adam_optimizer": torch.optim.AdamW, "adam_optimizer_kwargs": {"fused": True}}
    if importlib.util.find_spec("bitsandbytes") is None:
        what = f"--optimizer {settings.optimizer} needs bitsandbytes, which is not installed"
        raise Stop(what, "pip install bitsandbytes, or the extra `bits`", "unavailable")
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit, options


def _parameter_groups(settings: Settings, model: torch.nn.Module) -> list[dict]:
    """Return the parameters that train. Muon updates the matrices of the layers; its AdamW updates everything else."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.optimizer != "muon":
        return [{"params": trained}]
    from deepspeed import set_optimizer_flags

    # As `deepspeed.initialize` marks them for a Muon that its config names.
    set_optimizer_flags(types.SimpleNamespace(optimizer_name="muon", optimizer_params={}), model)
    common = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    halves = [(of_muon, [p for p in trained if vars(p)["use_muon"] is of_muon]) for of_muon in (True, False)]
    return [{"params": half, "use_muon": of_muon} | common for of_muon, half in halves if half]


class Master(Optimizer):
    """Keeps an fp32 master copy of bf16 weights, as DeepSpeed does, in arms without DeepSpeed.

    With AdamW, per parameter: 2 bytes of weight and 2 of gradient in the model, 4 of master copy and 8 of moments here,
    as in the ZeRO paper (section 3.1); and 4 more during an update, for the gradient in fp32.
    """

    def __init__(self, groups: list[dict], **options):
        self.weights = [parameter for group in groups for parameter in group["params"]]
        self.master = [weight.detach().float().requires_grad_() for weight in self.weights]
        copies = iter(self.master)
        super().__init__([group | {"params": [next(copies) for _ in group["params"]]} for group in groups], **options)

    @torch.no_grad()
    def step(self, closure=None):
        for master, weight in zip(self.master, self.weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        super().step(closure)
        torch._foreach_copy_(_local_parts(self.weights), _local_parts(self.master))
        for master in self.master:
            master.grad = None

    def zero_grad(self, set_to_none: bool = True):
        for weight in self.weights:
            weight.grad = None

    def state_dict(self) -> dict:
        """Includes the copies: made again from bf16 weights, they would have 8 bits of fraction instead of 24."""
        return super().state_dict() | {"master": [master.detach() for master in self.master]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "master"})
        for master, saved in zip(self.master, state_dict["master"], strict=True):
            master.copy_(saved)


def _local_parts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the local parts of FSDP2's parameters. They are DTensors, which _foreach_copy_ does not take."""
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


def _with_master(kind: type[Optimizer]) -> type[Optimizer]:
    return type(f"Master{kind.__name__}", (Master, kind), {})
