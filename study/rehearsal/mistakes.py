"""What calls and steps of a script tell of its mistakes: by the watch's own hooks, and by what a rehearsal sees alone.

The rules that judge by it are those of `study diagnose`.
"""

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from study.measure import roles
from study.records.schema import Record
from study.records.sections import Watched
from study.watch.loop import WatchedLoop

# The length of a schedule, by the names that schedulers of PyTorch give it.
LENGTHS = ("T_max", "total_steps", "total_iters")


class NoLog:
    """What a loop's hooks write to. Losses have no values here, and seconds are not a GPU's."""

    count = 10**9  # updates: values, which a rehearsal lacks, are looked at in the first ones alone
    marks = (("", 0.0),)
    passes: int | None = None  # of the last step

    def mark(self, phase: str) -> None:
        pass

    def add(self, step) -> None:
        self.passes = step.backwards or step.forwards


class NoInstruments:
    looked_at: tuple[int, ...] = ()
    is_looking = True  # so that no weights are read

    def step_ended(self, number: int, evaluated: bool) -> None:
        pass


class NoWeights:
    trained_share = 1.0


class Mistakes:
    """Notes of a script's first updates, for the record."""

    def __init__(self) -> None:
        self.outermost: nn.Module | None = None  # that was called first
        self.log = NoLog()
        self.loader: Any = None  # the iterator whose batches train
        self._trained: list[tuple[str, torch.Tensor]] = []
        self._with_gradient: set[int] = set()
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
        self.outermost = module
        # FSDP1's parameters are views of a flat one, which alone gets a gradient: that of its whole unit.
        units = {id(each): flat for flat in roles.flat_parameters(module) for each in flat._params or ()}
        for name, tensor in module.named_parameters():
            held = units.get(id(tensor), tensor)
            # FSDP2's own hooks take gradients of tensors that exist only within a pass.
            if tensor.requires_grad and held.requires_grad and type(held).__name__ != "DTensor":
                self._trained.append((name.replace("_fsdp_wrapped_module.", ""), held))
        for held in {id(held): held for _, held in self._trained}.values():
            held.register_post_accumulate_grad_hook(lambda held: self._with_gradient.add(id(held)))

    def look(self, record: Record, model, optimizer, accelerator) -> None:
        """After the first update: note what was prepared, and follow the loop as the watch does."""
        watched = record.watched
        without = [name for name, tensor in self._trained if id(tensor) not in self._with_gradient]
        watched.without_gradient = [name.removeprefix("module.") for name in without[:3]]
        watched.without_gradient_tensors = len(without)
        waits = isinstance(model, DistributedDataParallel) and not (model.find_unused_parameters or model.static_graph)
        if without and waits:  # in C++, which does not happen in the fake group
            what = "Expected to have finished reduction in the prior iteration before starting a new one"
            names = ", ".join(watched.without_gradient)
            raise RuntimeError(f"{what}: DDP waits for gradients of {names}, which get none")
        if not hasattr(model, "zero_optimization_stage"):
            groups = roles.inner_optimizer(optimizer).param_groups
            updated = {id(tensor) for group in groups for tensor in group["params"]}
            trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
            watched.not_optimized_tensors = sum(id(tensor) not in updated for tensor in trained)
        log: Any = self.log
        instruments: Any = NoInstruments()
        weights: Any = NoWeights()
        loop = WatchedLoop(model, optimizer, accelerator, record, log, instruments, weights, self._gave_up)
        loop._updated.clear()  # their gradients have no values to read
        loop.attach()

    def _gave_up(self, error: Exception) -> None:
        """A mistake of a hook of ours does not end the script."""

    def updated(self, watched: Watched | None) -> None:
        """Note an update."""
        steps, self._scheduled = max(self._scheduled.values(), default=0), {}
        if watched is None:
            return
        watched.schedule_steps_in_update = steps or None
        watched.schedule_length = max(filter(None, map(length_of, self._schedulers.values())), default=None)
        with contextlib.suppress(TypeError, AttributeError):  # a stream of rows has no length
            watched.passes_in_epoch = len(self.loader._index_sampler)
            watched.data_rows = len(self.loader._dataset)


def length_of(scheduler) -> int | None:
    """Return after how many of its own steps a schedule ends. None if it does not say so."""
    lambdas = getattr(scheduler, "lr_lambdas", None) or [None]
    steps = (getattr(lambdas[0], "keywords", None) or {}).get("num_training_steps")
    found = [steps, *(getattr(scheduler, name, None) for name in LENGTHS)]
    return next((each for each in found if isinstance(each, int) and each > 0), None)
