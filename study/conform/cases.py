"""One training as a property asks for it, and the same in one process: the reference that every way is held to.

A script of a failure contains these definitions, so this module imports nothing of the study.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from study.conform.models import FEATURES, Plain

ROUNDOFF = {"fp32": 2.0**-24, "autocast": 2.0**-8, "bf16": 2.0**-8, "bf16_pure": 2.0**-8}
Weights = dict[str, Tensor]
RATE = 0.02
ADAM_EPSILON = 0.1  # an update is at most 1 / epsilon as steep as the gradient


class Difference(Exception):
    """The sharded training is not equal to the reference."""


@dataclasses.dataclass(frozen=True)
class Case:
    """The settings of a training. The defaults are the simplest."""

    model: type[Plain] = Plain
    width: int = 8
    layers: int = 2
    updates: int = 3
    passes: int = 1  # microbatches of an update, on each rank
    clip: float = 0.0  # the largest norm of the gradients; 0 does not clip
    optimizer: str = "sgd"  # sgd, momentum, adamw
    groups: str = ""  # decay: none for vectors; rate, zero: another rate, or 0, for the last layer
    falling: bool = False  # the learning rate, once for each update
    precision: str = "fp32"  # autocast, bf16 (fp32 master weights), bf16_pure (no master weights)
    rounded: bool = True  # with bf16: all weights begin as values that bf16 has
    bucket: int = 64  # elements that a collective may move at once; 0 is the library's default
    lengths: tuple[int, ...] = (3,)  # of sequences, update by update


@dataclasses.dataclass(frozen=True)
class Options(Case):
    """What an adapter has to pass to its library: of a case passes, clip, precision and bucket, and this."""

    unused: bool = False  # some parameters may get no gradient
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    settings: dict[str, object] = dataclasses.field(default_factory=dict)  # of the adapter's ways to shard


# --- a case --------------------------------------------------------------------------------------------------------


def new_model(case: Case, seed: int = 0) -> Plain:
    torch.manual_seed(seed)
    model = case.model(case.width, case.layers)
    if case.precision.startswith("bf16") and case.rounded:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
    return model


def new_optimizer(case: Case, model: nn.Module) -> Optimizer:
    rate, decay = RATE, 0.1 if case.groups == "decay" else 0.0
    if case.optimizer == "adamw":
        rate = RATE / 10
    changed = {"decay": {"weight_decay": 0.0}, "rate": {"lr": rate / 5}, "zero": {"lr": 0.0}}.get(case.groups, {})
    groups: list[dict] = [{"params": []}, {"params": []} | changed]
    for name, parameter in model.named_parameters():
        apart = parameter.dim() < 2 if case.groups == "decay" else name.startswith("last")
        if parameter.requires_grad:
            groups[1 if changed and apart else 0]["params"].append(parameter)
    groups = [group for group in groups if group["params"]]
    if case.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=rate, eps=ADAM_EPSILON, weight_decay=decay)
    return torch.optim.SGD(groups, lr=rate, momentum=0.5 if case.optimizer == "momentum" else 0.0, weight_decay=decay)


def scheduler_of(case: Case) -> Callable[[Optimizer], LRScheduler] | None:
    if not case.falling:
        return None
    return lambda optimizer: LambdaLR(optimizer, lambda update: 1 / (1 + update))


def microbatch(case: Case, update: int, passed: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the rows of one rank in one pass. Those of even ranks begin with a positive value, the others' not."""
    random = torch.Generator().manual_seed(1 + 1000 * update + 10 * passed + rank)
    shape = (2, case.lengths[update % len(case.lengths)], FEATURES)
    inputs, targets = torch.randn(shape, generator=random), torch.randn(shape, generator=random)
    inputs[0, 0, 0] = inputs[0, 0, 0].abs() * (1 - 2 * (rank % 2))
    return inputs, targets


def first_weights(case: Case) -> Weights:
    return copies(new_model(case).named_parameters())


def copies(weights: Iterable[tuple[str, Tensor]]) -> Weights:
    return {name: weight.detach().float().clone() for name, weight in weights}


# --- the two trainings ---------------------------------------------------------------------------------------------


class Reference:
    """The training in one process, with the arithmetic of DDP: each rank's passes are summed, then the ranks.

    It keeps the loss of each update (the mean over ranks and passes) and the norm of its gradients.
    """

    def __init__(self, case: Case, ranks: int | None = None) -> None:
        self.case, self.losses, self.norms = case, list[float](), list[float]()
        self.ranks = ranks or dist.get_world_size()
        self.model = new_model(case)
        self.master = new_model(case) if case.precision == "bf16" else self.model
        if case.precision in ("bf16", "bf16_pure"):
            self.model = self.model.bfloat16()
        self.optimizer = new_optimizer(case, self.master)
        scheduler = scheduler_of(case)
        self.scheduler = scheduler(self.optimizer) if scheduler else None
        self.copy_master()

    def copy_master(self) -> None:
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.master.parameters(), strict=True):
                parameter.copy_(master)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.precision == "autocast"):
            return self.model(inputs, targets)

    def gradients(self, update: int) -> float:
        """Sum the gradients of an update into the parameters, and return its loss."""
        losses = []
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        sums: dict[int, Tensor] = {}
        for rank in range(self.ranks):
            self.model.zero_grad(set_to_none=True)
            for passed in range(self.case.passes):
                loss = self.loss(*microbatch(self.case, update, passed, rank))
                (loss / self.case.passes).backward()
                losses.append(loss.item())
            for number, parameter in enumerate(parameters):
                if parameter.grad is not None:
                    part = parameter.grad.float() / self.ranks
                    sums[number] = sums[number] + part if number in sums else part
        trained = [parameter for parameter in self.master.parameters() if parameter.requires_grad]
        for number, parameter in enumerate(trained):
            parameter.grad = sums[number].to(parameter.dtype) if number in sums else None
        return sum(losses) / len(losses)

    def update(self, update: int) -> None:
        self.losses.append(self.gradients(update))
        limit = self.case.clip or math.inf
        self.norms.append(nn.utils.clip_grad_norm_(self.master.parameters(), limit).item())
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.copy_master()

    def weights(self) -> Weights:
        return copies(self.master.named_parameters())

    def run(self, start: int = 0) -> Self:
        for update in range(start, start + self.case.updates):
            self.update(update)
        return self


class ShardedTraining:
    """The training of an adapter. All ranks start from the same weights."""

    def __init__(self, adapter: Any, settings: dict, folder: Path, case: Case, seed: int = 0) -> None:
        self.adapter, self.folder, self.case = adapter, folder, case
        self.losses, self.norms = list[float](), list[float]()  # no norms: the adapter does not know them
        model = new_model(case, seed)
        unused = case.model.__name__ in ("Unused", "OneRank", "Experts")
        options = Options(**vars(case), unused=unused, scheduler=scheduler_of(case), settings=settings)
        self.trainer = adapter.build(model, new_optimizer(case, model), options)

    def one_pass(self, batch: tuple[Tensor, Tensor], **how: bool | str) -> float:
        return float(self.adapter.forward_backward(self.trainer, batch, **how))

    def update(self, update: int) -> None:
        losses = []
        for passed in range(self.case.passes):
            batch = microbatch(self.case, update, passed, dist.get_rank())
            losses.append(self.one_pass(batch, last=passed == self.case.passes - 1))
        self.adapter.step(self.trainer)
        self.losses.append(mean_over_ranks(sum(losses) / len(losses)))
        norm = self.adapter.gradient_norm(self.trainer) if hasattr(self.adapter, "gradient_norm") else None
        if norm is not None:
            self.norms.append(float(norm))

    def weights(self) -> Weights:
        """Return copies of the weights by the names that the model gives them. A tied one appears once."""
        weights = self.adapter.whole_weights(self.trainer)
        return copies((name, weights[name]) for name, _ in new_model(self.case).named_parameters())

    def run(self, start: int = 0) -> Self:
        for update in range(start, start + self.case.updates):
            self.update(update)
        return self


Build = Callable[..., ShardedTraining]  # of a case


def mean_over_ranks(value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# --- how equal is equal --------------------------------------------------------------------------------------------


def chain(case: Case) -> int:
    """Return how many rounded terms lie on the longest way through the model. `bound` says why."""
    layers = case.layers + 3
    if case.precision == "fp32":
        return layers * (2 * (case.width + FEATURES + 6) + 2 * max(case.lengths))
    return round(math.sqrt(3 * layers))


def bound(case: Case, ranks: int, updates: int = 1) -> float:
    """Return how far losses, gradients and updates of two right trainings may differ, as a share of the largest.

    A sum of n terms, each rounded, is off by at most g(n) = n u / (1 - n u) of the sum of their sizes, in any order
    (Higham, Accuracy and Stability of Numerical Algorithms, 3.1 and 4.2); u is the unit roundoff of the dtype. Two
    orders differ by at most twice that. Along the longest chain of an update, errors add to first order. For each
    layer, the chain has a product over its inputs and a few elementwise operations, forward and backward, and a sum
    over the tokens for the gradient of its weights; then the sums over passes and ranks, the norm's factor, and the
    optimizer.

    In 16 bits, products are summed in fp32, and only results are rounded to 16 bits: three for each layer. Both
    trainings call the same kernels with the same rows, so these errors are those of a few weights that were rounded to
    the other side. They are independent, and add as the square root of their number (Higham and Mary, 2019).

    A step of gradient descent amplifies an earlier difference by at most 1 + rate x L, where L is the largest
    eigenvalue of the Hessian. The learning rates keep rate x L below 1 (a test computes it), so n updates amplify by at
    most 2^n - 1. AdamW has a tenth of the rate, and its epsilon of 0.1 makes an update at most ten times as steep in
    the gradient. Clipping and means do not amplify.
    """
    share = (chain(case) + case.passes * ranks + 4) * ROUNDOFF[case.precision]
    return 2 * (2.0**updates - 1) * share / (1 - min(share, 0.5))


def norm_bound(case: Case, ranks: int, updates: int = 1) -> float:
    """Return the bound of a gradient's norm: that of the gradients, and of the sum of squares over all parameters."""
    elements = sum(parameter.numel() for parameter in new_model(case).parameters())
    return bound(case, ranks, updates) + elements * ROUNDOFF["fp32"]


def largest(tensors: Iterable[Tensor]) -> float:
    return max((tensor.abs().max().item() for tensor in tensors if tensor.numel()), default=0.0)


def hold_weights(seen: Weights, expected: Weights, allowed: float, what: str) -> None:
    """Raise Difference unless each parameter is within an allowed distance of what is expected. 0 means: equal bits."""
    for name, tensor in expected.items():
        if seen[name].shape != tensor.shape:
            raise Difference(f"{what}: {name} has shape {tuple(seen[name].shape)} instead of {tuple(tensor.shape)}")
    distances = {name: largest([seen[name] - tensor]) for name, tensor in expected.items()}
    worst = max(distances, key=lambda name: math.inf if math.isnan(distances[name]) else distances[name])
    if not distances[worst] <= allowed:
        raise Difference(f"{what}: {worst} is {distances[worst]:.2g} off, and {allowed:.2g} is allowed")


def hold_numbers(seen: list[float], expected: list[float], share: Callable[[int], float], what: str) -> None:
    """Raise Difference unless the numbers of each update are within a share of what is expected."""
    for update, (one, other) in enumerate(zip(seen, expected, strict=True), 1):
        allowed = share(update) * abs(other)
        if not abs(one - other) <= allowed:
            text = f"{one:.6g} instead of {other:.6g}, and {allowed:.2g} is allowed"
            raise Difference(f"{what} of update {update}: {text}")


def hold(seen: ShardedTraining, expected: Reference, case: Case, before: Weights | None = None) -> None:
    """Raise Difference unless losses, norms and weights are equal within the bound.

    The bound is a share of how far the weights moved. To store a weight rounds it, once for each update.
    """
    ranks = dist.get_world_size()
    weights, end = seen.weights(), expected.weights()
    hold_numbers(seen.losses, expected.losses, lambda update: bound(case, ranks, update), "the loss")
    if len(seen.norms) == len(expected.norms):
        hold_numbers(seen.norms, expected.norms, lambda update: norm_bound(case, ranks, update), "the gradient norm")
    start = first_weights(case) if before is None else before
    moved = largest(end[name] - start[name] for name in start)
    stored = ROUNDOFF["bf16" if case.precision == "bf16_pure" else "fp32"] * largest(end.values())
    allowed = bound(case, ranks, case.updates) * moved + 2 * case.updates * stored
    hold_weights(weights, end, allowed, "the weights after the last update")
