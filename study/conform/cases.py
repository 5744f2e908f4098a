"""One training as a property asks for it, and the same in one process: the reference that every way is held to.

A script of a failure contains this file, so it imports nothing of the study but the models.
"""

import collections
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from study.conform.models import FEATURES, Plain

Weights = dict[str, Tensor]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# By precision: the dtypes of weights and of master weights, and the unit roundoff of what is computed.
PRECISIONS = {
    "fp32": (FP32, FP32, 2.0**-24),
    "autocast": (FP32, FP32, 2.0**-8),
    # Muon's updates: five iterations in bf16, which stretch rounding.
    "fp32 and bf16": (FP32, FP32, 2.0**-7),
    "bf16": (BF16, FP32, 2.0**-8),
    "bf16_pure": (BF16, BF16, 2.0**-8),
    "fp16": (FP16, FP32, 2.0**-11),
}
FIXED_SCALE = 1024.0  # of the reference's losses in fp16, so that no gradient is too small for it
RATE = 0.02  # small enough for what `bound` says of the Hessian
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": RATE}),
    "momentum": (torch.optim.SGD, {"lr": RATE, "momentum": 0.5}),
    # An update is at most 1 / epsilon, ten times, as steep as the gradient: hence a tenth of the rate.
    "adamw": (torch.optim.AdamW, {"lr": RATE / 10, "eps": 0.1}),
    # It keeps the moments of rows and columns. They are at least a hundredth, so an update is a hundred times as steep.
    "adafactor": (torch.optim.Adafactor, {"lr": RATE / 100, "eps": (0.01, 0.001)}),
    "muon": (torch.optim.Muon, {"lr": RATE / 10}),
}
# By groups: the weight decay, which parameters are apart, and what is different for them.
GROUPS: dict[str, tuple] = {
    "": (0.0, lambda name, parameter: False, {}),
    "decay": (1.0, lambda name, parameter: parameter.dim() < 2, {"weight_decay": 0.0}),
    "rate": (0.0, lambda name, parameter: name.startswith("last"), {"lr": RATE / 5}),
    "zero": (0.0, lambda name, parameter: name.startswith("last"), {"lr": 0.0}),
}
# By curve: the factor of the learning rate in each update. The last three are those of DeepSpeed's own schedules, as
# its adapter sets them. Their warm-up gives the first two updates 0: it is set to 0 first, and counts steps from 0.
CURVES: dict[str, Callable[[int], float]] = {
    "": lambda update: 1.0,
    "falling": lambda update: 1 / (1 + update),
    "warmup": lambda update: min(1.0, max(0, update - 1) / 2),
    "cosine": lambda update: max(0, update - 1) / 2,  # what comes before the cosine
    "stairs": lambda update: 0.2 + 0.4 * (update // 2),
}


class Unequal(Exception):
    """The sharded training is not equal to the reference."""


@dataclasses.dataclass(frozen=True)
class Case:
    """The settings of a training. Adapters pass on to their library: passes, clip, precision, bucket and settings."""

    model: type[Plain] = Plain
    width: int = 8
    layers: int = 2
    updates: int = 3
    passes: int = 1  # microbatches of an update, on each rank
    clip: float = 0.0  # the largest norm of the gradients; 0 does not clip
    optimizer: str = "sgd"  # sgd, momentum, adamw, adafactor, muon
    groups: str = ""  # decay: none for vectors; rate, zero: another rate, or 0, for the last layer
    curve: str = ""  # of the learning rate, one of CURVES
    precision: str = "fp32"  # autocast, bf16, fp16 (fp32 master weights), bf16_pure (no master weights)
    window: int = 1000  # updates in fp16 without an overflow, after which the scale rises
    rounded: bool = True  # with bf16: all weights begin as values that bf16 has
    bucket: int = 64  # elements that a collective may move at once; 0 is the library's default
    lengths: Sequence[int] = (3,)  # of sequences, update by update
    unequal: bool = False  # each rank has one row, and one token in a row, more than the rank before
    infinite: int = -1  # the update in which the rows of one rank have an infinite value
    infinite_rank: int = 1
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the adapter's way to shard

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, CURVES[self.curve])


def new_model(case: Case, seed: int = 0) -> Plain:
    torch.manual_seed(seed)
    model = case.model(case.width, case.layers)
    if case.precision.startswith("bf16") and case.rounded:
        model.bfloat16().float()
    return model


def new_optimizer(case: Case, model: nn.Module) -> Optimizer:
    kind, options = OPTIMIZERS[case.optimizer]
    decay, is_apart, changed = GROUPS[case.groups]
    apart, others = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if is_apart(name, parameter):
            apart.append(parameter)
        else:
            others.append(parameter)
    groups = [{"params": others}, {"params": apart} | changed]
    return kind([group for group in groups if group["params"]], **options, weight_decay=decay)  # type: ignore[arg-type]


def microbatch(case: Case, update: int, passed: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the rows of one rank in one pass. Those of even ranks begin with a positive value, the others' not."""
    # Each of up to ten ranks and a hundred passes has rows of its own, whatever was drawn before.
    random = torch.Generator().manual_seed(1 + 1000 * update + 10 * passed + rank)
    more = rank * case.unequal
    shape = (2 + more, case.lengths[update % len(case.lengths)] + more, FEATURES)
    inputs, targets = torch.randn(shape, generator=random), torch.randn(shape, generator=random)
    inputs[0, 0, 0].abs_().mul_(1 - 2 * (rank % 2))
    if update == case.infinite and rank == case.infinite_rank:
        targets[0, 0, 0] = math.inf
    return inputs, targets


def rows_between(case: Case, update: int) -> tuple[Tensor, Tensor]:
    """Return rows of this rank that no update has."""
    return microbatch(case, update + 20, 0, dist.get_rank())


def first_weights(case: Case) -> Weights:
    return copies(new_model(case).named_parameters())


def copies(weights: Iterable[tuple[str, Tensor]]) -> Weights:
    return {name: weight.detach().float().clone() for name, weight in weights}


class CaseTraining:
    """A training of a case. It keeps the loss of each update, the mean over ranks and passes, and its gradient norm."""

    update: Callable[[int], None]  # of this number, from 0

    def __init__(self, case: Case) -> None:
        self.case = case
        self.forget()

    def forget(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def run(self, start: int = 0) -> Self:
        for update in range(start, start + self.case.updates):
            self.update(update)
        return self


class Reference(CaseTraining):
    """The training in one process, with the arithmetic of DDP: each rank's passes are summed, then the ranks."""

    def __init__(self, case: Case, ranks: int | None = None) -> None:
        super().__init__(case)
        self.ranks = ranks or dist.get_world_size()
        dtype, master_dtype, _ = PRECISIONS[case.precision]
        self.model, self.master = new_model(case).to(dtype), new_model(case).to(master_dtype)
        self.optimizer = new_optimizer(case, self.master)
        self.scheduler = case.schedule(self.optimizer)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16, enabled=self.case.precision == "autocast"):
            return self.model(inputs, targets)

    def evaluated(self, batch: tuple[Tensor, Tensor]) -> float:
        with torch.no_grad():
            return self.loss(*batch).item()

    def update(self, update: int) -> None:
        losses = []
        # The order of the sums is that of a group that reduces gradients once an update: passes, then ranks.
        sums: dict[nn.Parameter, Any] = collections.defaultdict(float)  # in fp32; without those that get no gradient
        scale = FIXED_SCALE if self.case.precision == "fp16" else 1.0
        buffers = dict(self.model.named_buffers())
        before, first = copy.deepcopy(buffers), buffers
        for rank in range(self.ranks):
            self.model.zero_grad()
            self.model.load_state_dict(before, strict=False)  # each rank has buffers of its own
            for passed in range(self.case.passes):
                loss = self.loss(*microbatch(self.case, update, passed, rank))
                (loss / self.case.passes * scale).backward()
                losses.append(loss.item())
            for parameter, master in zip(self.model.parameters(), self.master.parameters(), strict=True):
                if parameter.grad is not None:
                    sums[master] += parameter.grad.to_dense().float() / scale / self.ranks
            if rank == 0:
                first = copy.deepcopy(buffers)
        self.model.load_state_dict(first, strict=False)  # DDP gives those of the first rank to the others
        for master, gradient in sums.items():
            master.grad = gradient.to(master.dtype)
        self.losses.append(sum(losses) / len(losses))
        # With an infinite limit nothing is clipped, and the norm is computed all the same.
        norm = nn.utils.clip_grad_norm_(self.master.parameters(), self.case.clip or math.inf)
        self.norms.append(norm.item())
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.use(dict(self.master.named_parameters()))  # rounded to the dtype of the weights

    def use(self, weights: Weights) -> None:
        """Compute with these weights from here on. An update moves its own."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])

    def weights(self) -> Weights:
        return copies(self.master.named_parameters())


class ShardedTraining(CaseTraining):
    """The training of an adapter. All ranks start from the same weights. The mode is that of its passes."""

    def __init__(self, adapter: Any, case: Case, seed: int = 0, mode: str = "train") -> None:
        super().__init__(case)
        self.adapter, self.mode = adapter, mode
        self.model = model = new_model(case, seed)
        self.trainer = adapter.build(model, new_optimizer(case, model), case)

    def one_pass(self, batch: tuple[Tensor, Tensor], **how: bool | str) -> float:
        return float(self.adapter.forward_backward(self.trainer, batch, **how))

    def update(self, update: int) -> None:
        losses = []
        for passed in range(self.case.passes):
            batch = microbatch(self.case, update, passed, dist.get_rank())
            losses.append(self.one_pass(batch, last=passed == self.case.passes - 1, mode=self.mode))
        norm = self.adapter.step(self.trainer)  # None if the library does not know it
        total = torch.tensor([sum(losses) / len(losses)], dtype=torch.float64)
        dist.all_reduce(total)
        self.losses.append(total.item() / dist.get_world_size())
        if norm is not None:
            self.norms.append(float(norm))

    def weights(self) -> Weights:
        """Return copies of the weights by the names that the model gives them. A tied one appears once."""
        weights = self.adapter.whole_weights(self.trainer)
        return copies((name, weights[name]) for name, _ in new_model(self.case).named_parameters())


Build = Callable[..., ShardedTraining]  # of a case, and a seed


def chain(case: Case) -> int:
    """Return how many rounded terms lie on the longest way through the model. `bound` says why."""
    layers = case.layers + 3
    if case.precision == "fp32":
        return layers * (2 * (case.width + FEATURES + 6) + 2 * max(case.lengths))
    return round(math.sqrt(3 * layers))


def bound_of_a_pass(case: Case) -> float:
    """Return how far losses of a forward pass may differ, as a share: no update. `bound` has the reasons."""
    return 2 * chain(case) * PRECISIONS[case.precision][-1]


def bound(case: Case, ranks: int, updates: int) -> float:
    """Return how far losses, gradients and updates of two right trainings may differ, as a share of the largest."""
    # A sum of n terms, each rounded, is off by at most g(n) = n u / (1 - n u) of the sum of their sizes, in any order
    # (Higham, Accuracy and Stability of Numerical Algorithms, 3.1 and 4.2); u is the unit roundoff of the dtype. Two
    # orders differ by at most twice that. Along the longest chain of an update, errors add to first order. For each
    # layer, the chain has a product over its inputs and a few elementwise operations, forward and backward, and a sum
    # over the tokens for the gradient of its weights; then the sums over passes and ranks, the norm's factor, and the
    # optimizer. In 16 bits, products are summed in fp32, and only results are rounded to 16 bits: three for each layer.
    # Both trainings call the same kernels with the same rows, so these errors are those of a few weights that were
    # rounded to the other side. They are independent, and add as the root of their number (Higham and Mary, 2019).
    share = (chain(case) + case.passes * ranks + 4) * PRECISIONS[case.precision][-1]
    # A step of gradient descent amplifies an earlier difference by at most 1 + rate x L, where L is the largest
    # eigenvalue of the Hessian. The rates keep rate x L below 1, so n updates amplify by at most 2^n - 1. AdamW has a
    # tenth of the rate, and its epsilon of 0.1 makes an update ten times as steep at most. Clipping does not amplify.
    return 2 * (2.0**updates - 1) * share / (1 - min(share, 0.5))


def largest(tensors: Iterable[Tensor]) -> float:
    return max((tensor.abs().max().item() for tensor in tensors if tensor.numel()), default=0.0)


def hold_weights(seen: Weights, expected: Weights, allowed: float, what: str) -> None:
    """Raise Unequal unless each parameter is within an allowed distance of what is expected. 0 means: equal bits."""
    for name, tensor in expected.items():
        if seen[name].shape != tensor.shape:
            raise Unequal(f"{what}: {name} has shape {tuple(seen[name].shape)} instead of {tuple(tensor.shape)}")
        distance = largest([seen[name] - tensor])
        if not distance <= allowed:  # also if it is no number
            raise Unequal(f"{what}: {name} is {distance:.2g} off, and {allowed:.2g} is allowed")


def hold_numbers(seen: list[float], expected: list[float], share: Callable[[int], float], what: str) -> None:
    """Raise Unequal unless the numbers of each update are within a share of what is expected."""
    for update, (one, other) in enumerate(zip(seen, expected, strict=True), 1):
        allowed = share(update) * abs(other)
        if not abs(one - other) <= allowed:
            raise Unequal(f"{what} of update {update}: {one:.6g}, not {other:.6g}, and {allowed:.2g} is allowed")


def hold(seen: ShardedTraining, expected: Reference, case: Case, start: Weights | None = None) -> None:
    """Raise Unequal unless losses, norms and weights are equal within the bound."""
    share = functools.partial(bound, case, dist.get_world_size())
    weights, end = seen.weights(), expected.weights()
    # --- losses and norms: a wrong one says more than the weights that follow from it
    hold_numbers(seen.losses, expected.losses, share, "the loss")
    # Some libraries do not know them, and with Muon some give that of its updates.
    if len(seen.norms) == len(expected.norms) and case.optimizer != "muon":
        squares = sum(weight.numel() for weight in end.values()) * PRECISIONS["fp32"][-1]
        hold_numbers(seen.norms, expected.norms, lambda update: share(update) + squares, "the gradient norm")
    # --- weights: in absolute numbers, for a weight near zero may be off by more than a share of itself
    start = start or first_weights(case)
    moved = largest(end[name] - start[name] for name in start)
    stored = largest(end.values()) * torch.finfo(PRECISIONS[case.precision][1]).eps / 2  # each update rounds to store
    allowed = share(case.updates) * moved + 2 * case.updates * stored
    hold_weights(weights, end, allowed, "the weights after the last update")
