"""The optimizers of a run, and an fp32 master copy of bf16 weights for arms without DeepSpeed."""

import types

import torch
from torch.optim import Optimizer

from study.core.settings import Settings
from study.measure.roles import tensors_in

# Fused: one kernel for all parameters, which keeps no temporary copies of them. PyTorch has no fused Adafactor.
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict]] = {
    "adamw": (torch.optim.AdamW, {"fused": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),  # Muon's own default is 0.95
    "adafactor": (torch.optim.Adafactor, {}),
}


def build_optimizer(settings: Settings, model: torch.nn.Module, with_master: bool) -> Optimizer:
    """Return the optimizer over the parameters that train."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Accelerate reads the rate of an optimizer that it replaces from its defaults.
    options: dict = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    groups: list[dict] = [{"params": trained}]
    if settings.optimizer == "muon":  # updates the matrices of the layers; its AdamW updates everything else
        from deepspeed import set_optimizer_flags
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam as kind

        # As `deepspeed.initialize` marks them for a Muon that its config names.
        set_optimizer_flags(types.SimpleNamespace(optimizer_name="muon", optimizer_params={}), model)
        halves = [(of_muon, [p for p in trained if vars(p)["use_muon"] is of_muon]) for of_muon in (True, False)]
        groups = [{"params": half, "use_muon": of_muon} | options for of_muon, half in halves if half]
        options = {"adam_optimizer": torch.optim.AdamW, "adam_optimizer_kwargs": {"fused": True}}
    elif settings.optimizer == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit as kind
    else:
        kind, more = OPTIMIZERS[settings.optimizer]
        options |= more
    if with_master:
        kind = type(f"Master{kind.__name__}", (Master, kind), {})
    return kind(groups, **options)


class Master(Optimizer):
    """Keeps an fp32 master copy of bf16 weights, as DeepSpeed does, in arms without DeepSpeed.

    With AdamW, per parameter: 2 bytes of weight and 2 of gradient in the model, 4 of master copy and 8 of moments here,
    as in the ZeRO paper (section 3.1); and 4 more during an update, for the gradient in fp32.
    """

    def __init__(self, groups: list[dict], **options):
        self.weights = [weight for group in groups for weight in group["params"]]
        of_copies = [
            group | {"params": [weight.detach().float().requires_grad_() for weight in group["params"]]}
            for group in groups
        ]
        self.master = [copy for group in of_copies for copy in group["params"]]
        super().__init__(of_copies, **options)

    @torch.no_grad()
    def step(self, closure=None):
        for master, weight in zip(self.master, self.weights, strict=True):
            if weight.grad is not None:
                master.grad = weight.grad.float()
        super().step(closure)
        # The local parts of FSDP2's parameters: they are DTensors, which _foreach_copy_ does not take.
        torch._foreach_copy_(tensors_in(self.weights), tensors_in(self.master))
        for master in self.master:
            master.grad = None

    def zero_grad(self, set_to_none: bool = True):
        for weight in self.weights:
            weight.grad = None
