"""What calls and steps of a script tell of its mistakes: by the watch's own hooks, and by what a rehearsal sees alone.

The rules that judge by it are those of `study diagnose`.
"""

import contextlib
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import RandomSampler, SequentialSampler

from study.measure.roles import is_engine
from study.records.schema import Record
from study.records.sections import Watched
from study.watch.loop import WatchedLoop

# The length of a schedule, by the names that schedulers of PyTorch give it.
LENGTHS = ("T_max", "total_steps", "total_iters")

# Layers that compute otherwise in evaluation mode.
CHANGED = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)


class NoLog:
    """What a loop's hooks write to. Losses have no values here, and seconds are not a GPU's."""

    count = 10**9  # updates: values, which a rehearsal lacks, are looked at in the first ones alone
    marks = (("", 0.0),)
    passes: int | None = None  # of the last step

    def mark(self, phase: str) -> None:
        pass

    def add(self, step) -> None:
        self.passes = step.backwards or step.forwards


class KeptGradient:
    """The steps that begin with the gradient that the step before left: nobody cleared it. Of one tensor.

    The watch reads values for that (study/watch/cleared.py), which do not exist here.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._zeroed = 0  # tensors; `grad.data.zero_()` leaves a gradient's version
        self._tensor: nn.Parameter | None = None
        self._left: tuple[int, int, int] | None = None  # its gradient, as an update left it
        set_to_zero = torch.Tensor.zero_

        def zero(tensor):
            self._zeroed += 1
            return set_to_zero(tensor)

        torch.Tensor.zero_ = zero  # type: ignore[method-assign]

    def follow(self, tensor: nn.Parameter) -> None:
        """Follow this tensor, if it is the first."""
        if self._tensor is None:
            self._tensor = tensor
            tensor.register_hook(self._begin_backward)

    def updated(self) -> None:
        self._left = self._gradient()

    def _begin_backward(self, _) -> None:
        """Look before a gradient is accumulated."""
        self.steps += self._left is not None and self._left == self._gradient()
        self._left = None

    def _gradient(self) -> tuple[int, int, int] | None:
        """Return what changes once the gradient is cleared, by whatever call. None without one."""
        gradient = self._tensor.grad if self._tensor is not None else None
        return None if gradient is None else (id(gradient), gradient._version, self._zeroed)


class Mistakes:
    """Notes of a script's first updates, for the record."""

    def __init__(self) -> None:
        self.outermost: nn.Module | None = None  # that was called first
        self.log = NoLog()
        self.loader: Any = None  # the iterator whose batches train
        self.most_rows: int | None = None  # of its batch
        self._inputs: list[str] = []  # digests of those of the first passes
        self._kept = KeptGradient()
        self._begun: nn.Module | None = None  # whose gradients are followed
        self._trained: dict[str, torch.Tensor] = {}
        self._with_gradient: set[str] = set()
        self._scheduled: dict[int, int] = {}  # steps of each scheduler since the last update
        self._schedulers: dict[int, Any] = {}
        take_step = torch.optim.lr_scheduler.LRScheduler.step

        def step(scheduler, *args, **kwargs):
            self._schedulers[id(scheduler)] = scheduler
            self._scheduled[id(scheduler)] = self._scheduled.get(id(scheduler), 0) + 1
            return take_step(scheduler, *args, **kwargs)

        torch.optim.lr_scheduler.LRScheduler.step = step  # type: ignore[method-assign, assignment]

    def begin(self, module: nn.Module) -> None:
        """Follow the gradients of the model that trains."""
        self.outermost = self._begun = module
        in_units = set()
        for flat, fqns in units_of(module):
            tensors = flat._params or [flat] * len(fqns)
            in_units |= set(map(id, tensors))
            self._trained |= {name: each for name, each in zip(fqns, tensors, strict=True) if each.requires_grad}
        for name_in_wrappers, tensor in module.named_parameters():
            name = plain(name_in_wrappers)
            if tensor.requires_grad and id(tensor) not in in_units:
                self._trained[name] = tensor
                # FSDP2 gives its own a gradient itself, which stays until the update.
                if type(tensor).__name__ != "DTensor":
                    self._kept.follow(tensor)
                    tensor.register_post_accumulate_grad_hook(lambda _, name=name: self._with_gradient.add(name))

    def follow_views(self, handle) -> None:
        """Follow the gradients of an FSDP1 unit's tensors: views of a flat one, whose gradient is that of all."""
        for flat, fqns in units_of(self.outermost or nn.Module()):
            if flat is not handle.flat_param:
                continue
            for name, (attribute, owner, _) in zip(fqns, flat._param_infos, strict=True):
                view = getattr(owner, attribute)
                if view.requires_grad:
                    view.register_hook(lambda gradient, name=name: self._note(name, gradient))

    def _note(self, name: str, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._with_gradient.add(name)

    def look(self, record: Record, model, optimizer, accelerator) -> None:
        """After the first update: note what was prepared, and follow the loop as the watch does."""
        watched = record.watched
        without = [
            name
            for name, tensor in self._trained.items()
            if name not in self._with_gradient and (type(tensor).__name__ != "DTensor" or tensor.grad is None)
        ]
        begun = map(id, self._begun.parameters()) if self._begun else ()
        if {id(tensor) for tensor in model.parameters()}.isdisjoint(begun):  # a GAN's other network, which may be next
            without = []
        watched.without_gradient = without[:3]
        watched.without_gradient_tensors = len(without)
        waits = isinstance(model, DistributedDataParallel) and not (model.find_unused_parameters or model.static_graph)
        if without and waits:  # in C++, which does not happen in the fake group
            what = "Expected to have finished reduction in the prior iteration before starting a new one"
            names = ", ".join(watched.without_gradient)
            raise RuntimeError(f"{what}: DDP waits for gradients of {names}, which get none")
        if not is_engine(model):
            optimizers = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
            updated = {
                id(tensor)
                for each in optimizers
                for group in getattr(each, "param_groups", ())
                for tensor in group["params"]
            }
            trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
            watched.not_optimized_tensors = sum(id(tensor) not in updated for tensor in trained)
        note_modes(record, model)
        log: Any = self.log
        # Always looking, so that no weights are read.
        instruments: Any = SimpleNamespace(looked_at=(), is_looking=True, step_ended=lambda *_: None)
        weights: Any = SimpleNamespace(trained_share=1.0)
        # A mistake of a hook of ours does not end the script.
        loop = WatchedLoop(model, optimizer, accelerator, record, log, instruments, weights, lambda _: None)
        self._inputs = loop.inputs
        loop._updated.clear()  # their gradients have no values to read
        loop.attach()

    def updated(self, watched: Watched | None) -> None:
        """Note an update."""
        self._kept.updated()
        steps, self._scheduled = max(self._scheduled.values(), default=0), {}
        if watched is None:
            return
        watched.gradients_kept = self._kept.steps
        if len(set(self._inputs)) > 1:  # those without values look alike
            watched.inputs_per_rank = [self._inputs]
        watched.schedule_steps_in_update = steps or None
        watched.schedule_length = max(filter(None, map(length_of, self._schedulers.values())), default=None)
        with contextlib.suppress(TypeError, AttributeError):  # a stream of rows has no length
            batches = self.loader._index_sampler
            watched.passes_in_epoch = len(batches)
            reads_all = type(getattr(batches, "sampler", None)) in (SequentialSampler, RandomSampler)
            if not reads_all:  # otherwise nobody divides the rows among ranks, and they may be this rank's alone
                watched.data_rows = len(self.loader._dataset)
            # Its tensors have other first sizes than rows if graphs or packed sequences follow each other in them.
            self.most_rows = batches.batch_size


def note_modes(record: Record, model: nn.Module) -> None:
    """Note the layers that evaluation mode changes, and whether those that should recompute are in training mode."""
    layers = [*model.modules()]
    changed = [each for each in layers if isinstance(each, CHANGED) and getattr(each, "p", 1.0) > 0]
    record.watched.layers_in_evaluation = sum(not each.training for each in changed)
    # transformers' layers recompute `if self.gradient_checkpointing and self.training` (modeling_layers.py).
    asked = [each for each in layers if getattr(each, "gradient_checkpointing", False)]
    if record.observed.checkpointing and asked and not any(each.training for each in asked):
        record.promised.checkpointing, record.observed.checkpointing = True, False


def units_of(model: nn.Module) -> Iterator[tuple[Any, list[str]]]:
    """Return the flat parameter of each unit of FSDP1, and the names of what it consists of."""
    for prefix, module in model.named_modules():
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)
        if flat is not None:
            yield flat, [plain(f"{prefix}.{name}") for name in flat._fqns]


def plain(name: str) -> str:
    """Return a tensor's name without the wrappers around its model."""
    return name.replace("_fsdp_wrapped_module.", "").removeprefix(".").removeprefix("module.")


def length_of(scheduler) -> int | None:
    """Return after how many of its own steps a schedule ends. None if it does not say so, or warms up to its full rate.

    These are `ConstantLR`, and `LinearLR` as it is by default.
    """
    if hasattr(scheduler, "factor") or getattr(scheduler, "end_factor", 0) > getattr(scheduler, "start_factor", 0):
        return None
    lambdas = getattr(scheduler, "lr_lambdas", None) or [None]
    steps = (getattr(lambdas[0], "keywords", None) or {}).get("num_training_steps")
    found = [steps, *(getattr(scheduler, name, None) for name in LENGTHS)]
    return next((each for each in found if isinstance(each, int) and each > 0), None)
