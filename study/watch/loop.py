"""Follow a user's own training loop by hooks, which are removed at the end.

The optimizer or the engine shows the end of a step. A script repeats its mistakes in each step, so what costs time to
look at, or reads a value and so waits for a GPU, is looked at in the first steps, and then ever more rarely.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data.dataloader import _BaseDataLoaderIter

from study.core.text import is_number
from study.measure import roles
from study.measure.readback import AUTOCAST_NAMES, device_of
from study.records.schema import Record
from study.watch import targets
from study.watch.between import BetweenUpdates
from study.watch.cleared import ClearedGradients
from study.watch.graph import division_of
from study.watch.instruments import Instruments
from study.watch.loaders import Loaders, digest
from study.watch.steps import Step, StepLog
from study.watch.weights import Weights

READ_PASSES = 6  # whose inputs are read, before the steps that are timed
EVALUATION = 3  # forward passes without gradients, one after the other
SCHEDULES = [
    kind
    for kind in vars(lr_scheduler).values()
    if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and "step" in vars(kind)
]


def guarded(hook: Callable) -> Callable:
    """A mistake of this hook ends the watch, and not the training."""

    @functools.wraps(hook)
    def call(loop: "WatchedLoop", *args, **kwargs) -> None:
        if loop.active:
            try:
                hook(loop, *args, **kwargs)
            except Exception as error:
                loop.on_error(error)

    return call


@dataclass
class WatchedLoop:
    """The hooks on a watched loop. After each update the log gets the step, and the instruments may look at the next.

    `on_error` gets a mistake of a hook.
    """

    model: Any
    optimizer: Any
    accelerator: Any
    record: Record
    log: StepLog
    instruments: Instruments
    weights: Weights
    on_error: Callable[[Exception], None]
    active: bool = False
    step: Step = field(default_factory=Step)
    inputs: list[str] = field(default_factory=list)  # shapes and digests, of the first passes
    rate: float = 0.0  # the largest
    decay: float = 0.0  # the largest product with the weight decay

    def __post_init__(self) -> None:
        self._watched = self.record.watched
        self._inner = roles.inner_optimizer(self.optimizer)
        self._is_engine = roles.is_engine(self.model)
        is_plain = not self._is_engine and roles.fsdp_version(self.model) is None  # others keep gradients elsewhere
        self._shared = {id(tensor) for group in self._inner.param_groups for tensor in group["params"]}
        self._trained = [tensor for tensor in self.model.parameters() if tensor.requires_grad and is_plain]
        self._updated = [tensor for tensor in self._trained if id(tensor) in self._shared]
        self._resumed_without_states = False
        self._plain = roles.plain_model(self.model)  # whose mode counts: a script may change it without the wrapper's
        dropouts = [each for each in self._plain.modules() if isinstance(each, torch.nn.modules.dropout._DropoutNd)]
        self._dropouts = [each for each in dropouts if each.p > 0]
        self.loaders = Loaders()
        self.batch = targets.TokensIn()
        self._passes = 0
        self._autocast: str | None = None  # of the last forward pass with gradients
        self._in_backward = False
        self.special = targets.special_of(self.model)
        self._evaluated = 0  # forward passes without gradients since the last with them, in training mode
        self._watched.has_schedule = hasattr(self._inner.step, "_wrapped_by_lr_sched")
        self._device = device_of(self.model).type
        self.between = BetweenUpdates(self._updated, self._watched, self._device)
        self._cleared = ClearedGradients(self._trained, self._updated, self._watched)
        self._ours = {id(tensor) for tensor in self.model.parameters()}
        sizes = roles.fsdp_sizes(self.model)
        self._is_part = sizes["held_parameters"] < sizes["parameters"]  # what FSDP1 leaves to this rank
        self._undo = contextlib.ExitStack()

    def attach(self) -> None:
        """Follow the loop from here on."""
        # --- the forward pass, the end of a step and the backward pass
        if getattr(self.model, "_compiled_call_impl", None) is None:  # a hook would become part of what is compiled
            self._undo.callback(self.model.register_forward_pre_hook(self._forward, with_kwargs=True).remove)
        if self._is_engine:
            self._replace(self.model, "step", self._engine_step)
            self._replace(self.model, "backward", self._backward)
        else:
            # Accelerate's optimizer calls the inner one only where a step ends (optimizer.py:169), so this hook counts
            # updates and not passes. GradScaler does not call it after an overflow (torch/amp/grad_scaler.py:371): such
            # a step joins the next.
            self._undo.callback(self._inner.register_step_post_hook(lambda *_: self._end_step()).remove)
            self._undo.callback(register_optimizer_step_post_hook(lambda other, *_: self._note_update(other)).remove)
            self._replace(self.accelerator or torch.Tensor, "backward", self._backward)
        # --- what the loop does besides
        if self.accelerator is not None:
            self._before(self.accelerator, "clip_grad_norm_", self._ask_to_clip)  # whether that clips or not
        # Torch's clip_grad_norm_ ends in it (clip_grad.py:231), and Accelerate's ends in torch's (accelerator.py:2960).
        # DeepSpeed does not call this function.
        self._before(clip_grad, "_clip_grads_with_norm_", self._clip)
        # Accelerate fetches one batch ahead, to know which is the last (data_loader.py:588): the wait within a step is
        # for the next step's rows.
        self._replace(_BaseDataLoaderIter, "__next__", self._next_batch)
        for kind in SCHEDULES:
            self._before(kind, "step", self._schedule)
        self._before(torch.amp.GradScaler, "scale", self._scale)
        self._before(torch.amp.GradScaler, "unscale_", self._unscale)
        # DDP waits for its collectives in C++, after the last gradient, which is that of the first parameter. Without
        # this mark the waiting would count as a rank's own work.
        if isinstance(self.model, DistributedDataParallel):
            first = self._trained[0]
            self._undo.callback(first.register_post_accumulate_grad_hook(lambda _: self._mark("backward")).remove)
        self.active = True

    def __deepcopy__(self, _) -> "WatchedLoop":
        """A script may copy its model, and with it the hook. A copy is not watched."""
        return self

    def detach(self) -> None:
        """Leave the loop as it was. It can be followed again."""
        self._undo.close()

    def _replace(self, owner, name: str, wrapper: Callable) -> None:
        """Until `detach`, `owner.name` is `wrapper`, which gets the original as its first argument."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def replacement(*args, **kwargs):  # a function, so that a tensor gets itself as well
            return wrapper(original, *args, **kwargs)

        self._undo.enter_context(mock.patch.object(owner, name, replacement))

    def _before(self, owner, name: str, hook: Callable) -> None:
        """Until `detach`, `hook` is called before `owner.name`, with what that gets."""

        def wrapper(original, *args, **kwargs):
            hook(*args, **kwargs)
            return original(*args, **kwargs)

        self._replace(owner, name, wrapper)

    # --- what happens in a step

    def _next_batch(self, original, *args):
        # Something may fetch ahead in a thread, which costs the loop no time.
        if threading.current_thread() is not threading.main_thread():
            return original(*args)
        self._mark("outside")
        try:
            batch = original(*args)
            self._note_batch(*args, batch)
            return batch
        finally:
            self._mark("data")

    @guarded
    def _note_batch(self, iterator, batch) -> None:
        self.loaders.fetched(iterator, batch, self._plain.training and torch.is_grad_enabled())

    def _backward(self, original, *args, **kwargs):
        # A mode of functions, as `torch.set_default_device` is one, calls `torch.Tensor.backward` once more within it.
        if self._in_backward:
            return original(*args, **kwargs)
        self._begin_backward(*args, **kwargs)
        self._in_backward = True
        try:
            result = original(*args, **kwargs)
        finally:
            self._in_backward = False
        self._end_backward()
        return result

    def _engine_step(self, original, *args, **kwargs):
        # DeepSpeed's own step: Accelerate calls it within `backward`, and the optimizer's does nothing. An engine's
        # step that an overflow skipped counts here (runtime/engine.py:3558); one that GradScaler skips does not.
        before = self.model.global_steps
        result = original(*args, **kwargs)
        if self.model.global_steps != before:  # unchanged after a pass within a step
            self._end_step()
        return result

    @guarded
    def _ask_to_clip(self, parameters, max_norm, *_, **__) -> None:
        self._watched.clip_grad_norm = _limit(max_norm)

    @guarded
    def _clip(self, parameters, max_norm, total_norm, *_, **__) -> None:
        is_of_ours = any(id(each) in self._ours for each in parameters)
        if is_of_ours:
            self._ask_to_clip(parameters, max_norm)
        if self.record.observed.stage:  # ZeRO leaves no `.grad` to clip (zero/stage_1_and_2.py:2398)
            return
        self.record.observed.clipping = limit = _limit(max_norm)
        if limit == 0:
            return
        step = self.step
        step.clipped_in = min(step.backwards, step.clipped_in if step.clipped_in >= 0 else step.backwards)
        if type(total_norm) is torch.Tensor:  # of FSDP2 it is a part of the norm
            step.norm = total_norm.detach()
        if step.scaled and not step.unscaled:
            self._watched.clipped_scaled = True
        if self._is_part and is_of_ours:
            self._watched.clipped_part = True

    @guarded
    def _schedule(self, schedule, *_, **__) -> None:
        optimizer = getattr(schedule, "optimizer", None)
        if optimizer is not None and roles.inner_optimizer(optimizer) is self._inner:
            self._watched.schedule_steps += 1
            self.step.scheduled.add(self.step.backwards)
        else:
            self._watched.other_schedule_steps += 1

    @guarded
    def _scale(self, scaler, *_, **__) -> None:
        self.step.scaled = scaler.is_enabled()

    @guarded
    def _unscale(self, *_, **__) -> None:
        self.step.unscaled = True

    @guarded
    def _mark(self, phase: str) -> None:
        self.log.mark(phase)

    @guarded
    def resumed(self, step: int) -> None:
        """Note that the training goes on from this step of a checkpoint; 0: it begins."""
        self._watched.resumed_in = step or None
        self._resumed_without_states = step > 0 and not self._is_engine and not self._inner.state

    @property
    def moments_lost(self) -> bool:
        """Return whether an optimizer that keeps states, by now, went on from a checkpoint without any."""
        return self._resumed_without_states and bool(self._inner.state)

    @guarded
    def note_inputs(self, batch) -> None:
        """Note the inputs of a training step whose forward pass is not that of the model."""
        self.loaders.ran(trains=True, has_gradients=True)
        self.batch = targets.tokens_in((batch,), {}, _inputs(batch))

    @guarded
    def _forward(self, module, args, kwargs) -> None:
        if module is not self.model:
            return
        step = self.step
        has_gradients = torch.is_grad_enabled()
        trains = self._plain.training and has_gradients
        if has_gradients:
            self._evaluated = 0
            is_autocast = torch.is_autocast_enabled(self._device)
            self._autocast = AUTOCAST_NAMES.get(torch.get_autocast_dtype(self._device)) if is_autocast else None
        else:
            self._evaluated += self._plain.training
            if self._evaluated == EVALUATION and self._dropouts:
                self._watched.evaluations_in_training += 1
        self.loaders.ran(trains, has_gradients)
        if not trains:
            step.evaluated = True
            return
        self.log.mark("outside")
        self.between.forward(self.log.count, step.forwards == 0, step.evaluated, self._dropouts)
        inputs = _inputs([args, kwargs])
        step.forwards += 1
        self.batch = targets.tokens_in(args, kwargs, inputs)
        step.rows += self.batch.rows
        self._watched.rows_per_pass = self._watched.rows_per_pass or self.batch.rows or None
        if len(self.inputs) < READ_PASSES:
            self.inputs.append(digest(inputs))

    @guarded
    def _begin_backward(self, loss=None, *_, scale_wrt_gas: bool = True, **__) -> None:
        """Mark the forward pass, and keep the loss as a part of the step's."""
        self.log.mark("forward")
        self.between.backward()
        step, watched = self.step, self._watched
        self._cleared.begin_backward(self.log.count, step)
        step.backwards += 1
        seen = self.record.observed
        seen.autocast = self._autocast or seen.autocast  # also of a model that trains in evaluation mode
        step.training = min(self._plain.training, step.training >= 1 or step.backwards == 1)
        step.dropouts_off = sum(not each.training for each in self._dropouts)
        # An engine divides the loss of each pass within backward (runtime/engine.py:3413), as Accelerator.backward does
        # (accelerator.py:2851), so that their sum is the loss of the step. A plain loop has to divide by itself.
        parts = 1
        if self._is_engine:
            parts = self.model.gradient_accumulation_steps() if scale_wrt_gas else 1
        elif self.accelerator is not None:
            parts = self.accelerator.gradient_accumulation_steps
        elif step.scaled:
            return  # by a GradScaler, with an unknown scale
        if torch.is_tensor(loss) and loss.numel() == 1:
            # In the first pass: the mode of a look cannot read a Python number.
            if watched.loss_parts is None:
                watched.loss_parts = parts
                division = division_of(loss)
                watched.loss_divisors = division.divisors
                watched.loss_base = division.base
                watched.loss_negated = division.is_negated
                watched.loss_divisor = next(iter(division.divisors), None)
            step.losses.append(loss.detach() / parts)
            self._read_targets(loss)

    def _read_targets(self, loss: torch.Tensor) -> None:
        self._passes += 1
        if targets.is_due(self._passes) and not self.instruments.is_looking and loss.grad_fn is not None:
            with contextlib.suppress(RuntimeError):  # a value that was changed in place, or that a hook has taken away
                targets.read(self._watched.targets, loss, self.batch, self.special)
        self.batch = targets.TokensIn()

    @guarded
    def _end_backward(self) -> None:
        last_phase = self.log.marks[-1][0]
        self.log.mark("waiting" if last_phase == "backward" else "backward")  # the hook of DDP marked the end
        self._cleared.end_backward(self.log.count)
        self.between.gradients(self.log.count, at_update=False)

    @guarded
    def _end_step(self) -> None:
        step, groups = self.step, self._inner.param_groups
        self._cleared.update(self.log.count, step)
        rates = [group["lr"] for group in groups]
        step.rates = [rate if is_number(rate) else math.nan for rate in rates]  # one in a tensor is not read
        self.rate = max([self.rate, *filter(is_number, rates)])
        decays = [(group.get("weight_decay"), group["lr"]) for group in groups]
        products = [decay * rate for decay, rate in decays if is_number(decay) and is_number(rate)]
        self.decay = max([self.decay, *products])
        step.trained = self._watched.trained_share = self.weights.trained_share
        if self._is_engine:
            step.norm = _number(getattr(self.model, "_global_grad_norm", None))
        elif self.record.observed.autocast == "fp16" and not step.scaled:
            self._watched.loss_unscaled = True
        number = self.log.count + 1
        self.between.gradients(self.log.count, at_update=True)
        self.instruments.step_ended(number, step.evaluated)
        self.between.update(step.forwards, self._cleared.has_gradients, self.instruments.is_looking)
        looked_at = self.instruments.looked_at  # the step after a look is slower, too
        step.clean = not (step.evaluated or number in looked_at or number - 1 in looked_at)
        self.log.add(step)
        self.step = Step()

    @guarded
    def _note_update(self, optimizer) -> None:
        if optimizer is not self._inner and optimizer is not self.optimizer:
            tensors = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
            self._watched.updates_by_another += not tensors.isdisjoint(self._shared)
            self.step.other_updated |= tensors.isdisjoint(self._ours)


def _inputs(given) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(given) if torch.is_tensor(leaf) and leaf.ndim]


def _limit(max_norm) -> float | None:
    """Return what gradients are clipped at; 0 means off. The Trainer gives infinity to get only the norm."""
    if not is_number(max_norm):  # a tensor may be on a GPU
        return None
    return 0.0 if max_norm == math.inf else max_norm


def _number(value) -> torch.Tensor | float:
    return value if torch.is_tensor(value) or is_number(value) else math.nan
