"""The optimizer of a run, and the fp32 master copies of bf16 weights in arms without DeepSpeed."""

import importlib.util
import types

import torch
from torch.optim import Optimizer

from study.errors import Stop
from study.spec.settings import Settings

MOMENTUM = 0.9  # of SGD; Muon's own default is 0.95


def build(settings: Settings, model: torch.nn.Module, with_master: bool = False) -> Optimizer:
    """The optimizer over the parameters that train."""
    kind, options = _kind(settings)
    kind = _with_master(kind) if with_master else kind
    return kind(_groups(settings, model), **options)


def _kind(settings: Settings) -> tuple[type[Optimizer], dict]:
    """The class of the optimizer, and its arguments besides the parameters."""
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


def _groups(settings: Settings, model: torch.nn.Module) -> list[dict]:
    """The parameters that train. Muon updates the matrices of the layers; its AdamW updates everything else."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.optimizer != "muon":
        return [{"params": trained}]
    from deepspeed import set_optimizer_flags

    # As `deepspeed.initialize` marks them for a Muon that its config names.
    set_optimizer_flags(types.SimpleNamespace(optimizer_name="muon", optimizer_params={}), model)
    common = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    halves = [(of_muon, [p for p in trained if p.use_muon is of_muon]) for of_muon in (True, False)]
    return [{"params": half, "use_muon": of_muon} | common for of_muon, half in halves if half]


class Master:
    """Keeps an fp32 master copy of bf16 weights, as DeepSpeed does, in arms without DeepSpeed.

    With AdamW, per parameter: 2 bytes of weight and 2 of gradient in the model, 4 of master copy and 8 of moments here,
    as in the ZeRO paper (section 3.1); and 4 more during an update, for the gradient in fp32.
    """

    def __init__(self, groups: list[dict], **options):
        self.held = [parameter for group in groups for parameter in group["params"]]
        self.master = [p.detach().float().requires_grad_() for p in self.held]
        copies = iter(self.master)
        super().__init__([group | {"params": [next(copies) for _ in group["params"]]} for group in groups], **options)

    @torch.no_grad()
    def step(self, closure=None):
        for master, held in zip(self.master, self.held, strict=True):
            master.grad = None if held.grad is None else held.grad.float()
        super().step(closure)
        # FSDP2's parameters are DTensors, which _foreach_copy_ does not take: copy the local parts.
        local = ([getattr(each, "_local_tensor", each) for each in tensors] for tensors in (self.held, self.master))
        torch._foreach_copy_(*local)
        for master in self.master:
            master.grad = None

    def zero_grad(self, set_to_none: bool = True):
        for held in self.held:
            held.grad = None

    def state_dict(self) -> dict:
        """Includes the copies: made again from bf16 weights, they would have 8 bits of fraction instead of 24."""
        return super().state_dict() | {"master": [master.detach() for master in self.master]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "master"})
        for master, saved in zip(self.master, state_dict["master"], strict=True):
            master.copy_(saved)


def _with_master(kind: type[Optimizer]) -> type[Optimizer]:
    return type(f"Master{kind.__name__}", (Master, kind), {})
