"""The optimizers of a run, and an fp32 master copy of bf16 weights for arms without DeepSpeed."""

import importlib.util
import types

import torch
from torch.optim import Optimizer

from study.core.errors import Stop
from study.core.settings import Settings

MOMENTUM = 0.9  # of SGD; Muon's own default is 0.95
# Fused: one kernel for all parameters, which keeps no temporary copies of them. PyTorch has no fused Adafactor.
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict]] = {
    "adamw": (torch.optim.AdamW, {"fused": True}),
    "sgd": (torch.optim.SGD, {"momentum": MOMENTUM, "fused": True}),
    "adafactor": (torch.optim.Adafactor, {}),
}


def build_optimizer(settings: Settings, model: torch.nn.Module, with_master: bool = False) -> Optimizer:
    """Return the optimizer over the parameters that train."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    common = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    groups: list[dict] = [{"params": trained}]
    kind: type[Optimizer]
    options: dict
    if settings.optimizer == "muon":  # updates the matrices of the layers; its AdamW updates everything else
        from deepspeed import set_optimizer_flags
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        # As `deepspeed.initialize` marks them for a Muon that its config names.
        set_optimizer_flags(types.SimpleNamespace(optimizer_name="muon", optimizer_params={}), model)
        halves = [(of_muon, [p for p in trained if vars(p)["use_muon"] is of_muon]) for of_muon in (True, False)]
        groups = [{"params": half, "use_muon": of_muon} | common for of_muon, half in halves if half]
        kind, options = MuonWithAuxAdam, {"adam_optimizer": torch.optim.AdamW, "adam_optimizer_kwargs": {"fused": True}}
    elif settings.optimizer == "adamw_8bit":
        if importlib.util.find_spec("bitsandbytes") is None:
            raise Stop("--optimizer adamw_8bit needs bitsandbytes, which is not installed", "pip install bitsandbytes")
        from bitsandbytes.optim import AdamW8bit

        kind, options = AdamW8bit, common
    else:
        kind, more = OPTIMIZERS[settings.optimizer]
        options = common | more  # Accelerate reads the rate of an optimizer that it replaces from its defaults
    if with_master:
        kind = type(f"Master{kind.__name__}", (Master, kind), {})
    return kind(groups, **options)


class Master(Optimizer):
    """Keeps an fp32 master copy of bf16 weights, as DeepSpeed does, in arms without DeepSpeed.

    With AdamW, per parameter: 2 bytes of weight and 2 of gradient in the model, 4 of master copy and 8 of moments here,
    as in the ZeRO paper (section 3.1); and 4 more during an update, for the gradient in fp32.
    """

    def __init__(self, groups: list[dict], **options):
        self.weights: list[torch.Tensor] = []
        self.master: list[torch.Tensor] = []
        of_copies = []
        for group in groups:
            copies = [weight.detach().float().requires_grad_() for weight in group["params"]]
            self.weights += group["params"]
            self.master += copies
            of_copies.append(group | {"params": copies})
        super().__init__(of_copies, **options)

    @torch.no_grad()
    def step(self, closure=None):
        for master, weight in zip(self.master, self.weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        super().step(closure)
        # The local parts of FSDP2's parameters: they are DTensors, which _foreach_copy_ does not take.
        weights, masters = ([getattr(x, "_local_tensor", x) for x in xs] for xs in (self.weights, self.master))
        torch._foreach_copy_(weights, masters)
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
