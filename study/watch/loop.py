"""Follow a user's own training loop by hooks, which are removed at the end.

The optimizer or the engine shows the end of a step. Nothing here reads a value of a tensor, so no step waits for a GPU.
A script repeats its mistakes in each step, so what costs time to look at is looked at in the first steps only.
"""

import contextlib
import copy
import functools
import hashlib
import math
import statistics
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.data.dataloader import _BaseDataLoaderIter

from study.core.recipes import AUTOCAST
from study.core.text import is_number
from study.measure import roles, traffic
from study.measure.memory import ComponentLook
from study.measure.readback import device_of
from study.records.schema import Record
from study.records.sections import Collective, RankComponents
from study.watch.steps import Step, StepLog

READ_PASSES = 6  # whose inputs are read, before the steps that are timed
READ_ELEMENTS = 4096  # of each input
NAMES = {getattr(torch, dtype): name for name, dtype in AUTOCAST.items()}


def is_engine(model) -> bool:
    """Return whether a model is a DeepSpeed engine, which has an optimizer of its own."""
    return hasattr(model, "zero_optimization_stage")


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
    instruments: "Instruments"
    on_error: Callable[[Exception], None]
    active: bool = False
    step: Step = field(default_factory=Step)
    inputs: list[str] = field(default_factory=list)  # shapes and digests, of the first passes
    rate: float = 0.0  # the largest

    def __post_init__(self) -> None:
        self._inner = roles.inner_optimizer(self.optimizer)
        self._is_engine = is_engine(self.model)
        is_plain = not self._is_engine and roles.fsdp_version(self.model) is None  # others keep gradients elsewhere
        self._trained = [tensor for tensor in self.model.parameters() if tensor.requires_grad and is_plain]
        self._with_gradient: torch.nn.Parameter | None = None
        self._cleared: deque[int] = deque(maxlen=20)  # of the last steps
        self._device = device_of(self.model).type
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
            self._replace(self.accelerator or torch.Tensor, "backward", self._backward)
        # --- what the loop does besides
        if self.accelerator is not None:
            clip = functools.partial(self._clip, self.record.watched, "clip_grad_norm")  # whether that clips or not
            self._replace(self.accelerator, "clip_grad_norm_", clip)
        # Torch's clip_grad_norm_ ends in it (clip_grad.py:231), and Accelerate's ends in torch's (accelerator.py:2960).
        clip = functools.partial(self._clip, self.record.observed, "clipping")  # DeepSpeed does not call this function
        self._replace(clip_grad, "_clip_grads_with_norm_", clip)
        # Accelerate fetches one batch ahead, to know which is the last (data_loader.py:588): the wait within a step is
        # for the next step's rows.
        self._replace(_BaseDataLoaderIter, "__next__", self._next_batch)
        # DDP waits for its collectives in C++, after the last gradient, which is that of the first parameter. Without
        # this mark the waiting would count as a rank's own work.
        if isinstance(self.model, DistributedDataParallel):
            first = self._trained[0]
            self._undo.callback(first.register_post_accumulate_grad_hook(lambda _: self._mark("backward")).remove)
        self.active = True

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

    # --- what happens in a step

    def _next_batch(self, original, *args):
        # Something may fetch ahead in a thread, which costs the loop no time.
        if threading.current_thread() is not threading.main_thread():
            return original(*args)
        self._mark("outside")
        try:
            return original(*args)
        finally:
            self._mark("data")

    def _backward(self, original, *args, **kwargs):
        self._begin_backward(*args, **kwargs)
        result = original(*args, **kwargs)
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

    def _clip(self, section, name: str, original, parameters, max_norm, *args, **kwargs):
        """Note the value; 0 means off. The Trainer gives infinity to get only the norm. A tensor may be on a GPU."""
        value = max_norm if is_number(max_norm) else None
        setattr(section, name, 0.0 if value == math.inf else value)
        return original(parameters, max_norm, *args, **kwargs)

    @guarded
    def _mark(self, phase: str) -> None:
        self.log.mark(phase)

    @guarded
    def _forward(self, module, args, kwargs) -> None:
        if not (module.training and torch.is_grad_enabled()):
            self.step.evaluated = True
            return
        self.log.mark("outside")
        # What a row and a token is goes by shapes alone: a value on a GPU would have to be waited for.
        inputs = [leaf for leaf in tree_leaves([args, kwargs]) if torch.is_tensor(leaf) and leaf.ndim]
        tokens = [tensor for tensor in inputs if tensor.ndim == 2 and tensor.dtype in (torch.int64, torch.int32)]
        self.step.forwards += 1
        if inputs:
            rows = (tokens or inputs)[0].shape[0]
            self.step.rows += rows
            self.record.watched.rows_per_pass = self.record.watched.rows_per_pass or rows
        if len(self.inputs) < READ_PASSES:
            self.inputs.append(_digest(inputs))
            if torch.is_autocast_enabled(self._device):
                self.record.observed.autocast = NAMES.get(torch.get_autocast_dtype(self._device))

    @guarded
    def _begin_backward(self, loss=None, *_, scale_wrt_gas: bool = True, **__) -> None:
        """Mark the forward pass, and keep the loss as a part of the step's."""
        self.log.mark("forward")
        self._look_for_cleared()
        self.step.backwards += 1
        # The library divides the loss of each pass by this, so that their sum is the loss of the step.
        parts = 1
        if self._is_engine:
            # The engine divides within backward (runtime/engine.py:3413), so the loss that arrives here is not divided
            # yet.
            parts = self.model.gradient_accumulation_steps() if scale_wrt_gas else 1
        elif self.accelerator is not None:
            # The same in Accelerator.backward (accelerator.py:2851). Without both, a plain loop has to divide by
            # itself.
            parts = self.accelerator.gradient_accumulation_steps
        elif self.record.observed.autocast == "fp16":
            return  # a GradScaler scales the loss, with an unknown scale
        if torch.is_tensor(loss) and loss.numel() == 1:
            # In the first pass: the mode of a look cannot read a Python number.
            if self.record.watched.loss_parts is None:
                self.record.watched.loss_parts = parts
                self.record.watched.loss_divisor = _divisor(loss)
            self.step.losses.append(loss.detach() / parts)

    @guarded
    def _end_backward(self) -> None:
        last_phase = self.log.marks[-1][0]
        self.log.mark("waiting" if last_phase == "backward" else "backward")  # the hook of DDP marked the end
        # Only gradients that become None are noticed, as zero_grad makes them by default
        # (torch/optim/optimizer.py:1024): zeros could only be seen by reading values, which waits for a GPU.
        self._with_gradient = None
        for parameter in self._trained:
            if parameter.grad is not None:
                self._with_gradient = parameter
                break

    @guarded
    def _end_step(self) -> None:
        self._look_for_cleared()
        self._with_gradient = None
        # The usual value of 20 steps: a script may clear gradients once on purpose, such as after an overflow.
        self._cleared.append(self.step.cleared)
        self.record.watched.passes_cleared = statistics.mode(self._cleared)
        rates = [group["lr"] for group in self._inner.param_groups]
        self.rate = max([self.rate, *filter(is_number, rates)])
        number = self.log.count + 1
        self.instruments.step_ended(number, self.step.evaluated)
        looked_at = self.instruments.looked_at  # the step after a look is slower, too
        self.step.clean = not (self.step.evaluated or number in looked_at or number - 1 in looked_at)
        self.log.add(self.step)
        self.step = Step()

    def _look_for_cleared(self) -> None:
        if self._with_gradient is not None and self._with_gradient.grad is None:
            self.step.cleared = self.step.backwards


def _divisor(loss: torch.Tensor) -> float | None:
    """Return the number by which a script has divided its loss; None if that was not its last operation."""
    divided: Any = loss.grad_fn
    if type(divided).__name__ == "DivBackward0" and divided._saved_other.is_cpu:  # a Python number is there, too
        return float(divided._saved_other)
    return None


def _digest(tensors: list[torch.Tensor]) -> str:
    """Return the shapes of inputs, and a digest of their first elements."""
    shapes = " ".join("x".join(map(str, tensor.shape)) for tensor in tensors)
    with contextlib.suppress(RuntimeError, TypeError):  # a sparse tensor, or one without memory
        first = [tensor.detach().reshape(-1)[:READ_ELEMENTS].tolist() for tensor in tensors]
        return f"{shapes} {hashlib.sha256(repr(first).encode()).hexdigest()[:12]}"
    return shapes


# Steps before the look at three steps. DDP rebuilds its buckets once, after the first backward pass
# (c10d/reducer.hpp:147), and that step sends more. Stage 3 records the order of its fetches before it fetches ahead
# (zero/partitioned_param_coordinator.py:180).
AFTER = 5
MOST_LOOKS = 9  # steps: a look at a step with an evaluation in it begins again


class Instruments:
    """Decide after each step whether the next one is looked at. Every rank decides alone: nothing here waits."""

    def __init__(self, model, optimizer, device_type: str):
        self.looked_at: list[int] = []
        self.counts: dict[str, Collective] | None = None
        self.components: RankComponents | None = None
        self._objects = model, optimizer, device_type
        self._modes = _get_current_dispatch_mode_stack()  # the script's own
        self._look: ComponentLook | None = None
        self._open = contextlib.ExitStack()

    def step_ended(self, step: int, evaluated: bool) -> None:
        """Look at the next step, or end a look. The numbers of steps count from 1."""
        stack = _get_current_dispatch_mode_stack()
        if self._look is None:
            # Dispatch modes are a stack, of which each ends the one on top. Only beside the script's own modes:
            # otherwise another mode would be ended instead. A mode's __exit__ pops whatever is on top
            # (torch/utils/_python_dispatch.py:177), without asking whether that is itself.
            if step >= AFTER and self.components is None and stack == self._modes:
                self._begin(step)
            return
        self.looked_at.append(step)
        self._look.step_ended()
        if self.counts is None:
            traffic.refuse_uncounted(self._counter)
            self.counts = copy.deepcopy(self._counter.counts)
        # --- leave the look, or begin it again if the memory of an evaluation is in it
        if stack[-1] is not self._counter:
            return  # the script began a mode within the step: wait until that has ended
        if evaluated and len(self.looked_at) < MOST_LOOKS:
            self._open.close()
            self._begin(step)
        elif step >= self._last:
            self.stop()

    def stop(self) -> None:
        """Keep the result of an unfinished look, because the loop or its watch is over."""
        self._open.close()
        if self._look is not None:
            self.components = self._look.components()
        self._look = None

    def _begin(self, step: int) -> None:
        self.counts = None
        self._counter = traffic.CollectiveCounter()
        self._look = self._open.enter_context(ComponentLook(*self._objects, exact=False))
        self._last = step + self._look.STEPS
        # The last one entered is on top of the stack: step_ended knows by that whether the script has begun a mode
        # since.
        self._open.enter_context(self._counter)
