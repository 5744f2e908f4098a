"""Follow a user's own training loop by hooks, which are removed at the end.

The optimizer or the engine shows the end of a step. Nothing here reads a value of a tensor, so no step waits for a GPU.
A script repeats its mistakes in each step, so what costs time to look at is looked at in the first steps only.
"""

import contextlib
import functools
import hashlib
import itertools
import math
import threading
import time
from collections.abc import Callable

import torch
from torch._C._distributed_c10d import Work
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.utils.data.dataloader import _BaseDataLoaderIter

from study.measure import roles
from study.measure.readback import device_of
from study.watch.steps import Step, StepLog

READ_PASSES = 6  # whose inputs are read, before the steps that are timed
READ_ELEMENTS = 4096  # of each input
CHECKED_STEPS = 20  # in which cleared gradients are looked for


class Loop:
    """The hooks on a loop. `on_step` is called after each update with the step, `on_error` with a mistake of a hook."""

    def __init__(
        self,
        accelerator,
        model,
        optimizer,
        log: StepLog,
        on_step: Callable[[Step], None],
        on_error: Callable[[Exception], None],
    ):
        self.accelerator = accelerator
        self.model = model
        self.log = log
        self.on_step = on_step
        self.on_error = on_error
        self.inner = roles.inner_optimizer(optimizer)
        self.step = Step()
        self.clipped_at: float | None = None  # by torch's own function, which DeepSpeed does not call
        self.wants_clipping: float | None = None  # the value that the script gave Accelerate, whether that clips or not
        self.autocast: torch.dtype | None = None
        self.loss_parts: int | None = None  # the library divides the loss of each pass by it
        self.loss_divisor: float | None = None  # the script's own division of the loss
        self.inputs: list[str] = []  # shapes and digests, of the first passes
        self.rows_per_pass = math.nan  # of the first one
        self.cleared: list[int] = []  # passes with cleared gradients, in each of the first steps
        is_plain = not hasattr(model, "zero_optimization_stage") and roles.fsdp_version(model) is None
        self._trained = list(model.parameters()) if is_plain else []  # others keep gradients elsewhere
        self._with_gradient: torch.nn.Parameter | None = None
        self._mark = self._guarded(log.mark)
        self._begin_backward = self._guarded(self._add_loss)
        self._end_backward = self._guarded(self._end_pass)
        self._device = device_of(model).type
        self._undo = contextlib.ExitStack()

    def attach(self) -> None:
        if getattr(self.model, "_compiled_call_impl", None) is None:  # a hook would become part of what is compiled
            forward = self._guarded(self._forward)
            self._undo.callback(self.model.register_forward_pre_hook(forward, with_kwargs=True).remove)
        if hasattr(self.model, "zero_optimization_stage"):
            self._replace(self.model, "step", self._engine_step)
            self._replace(self.model, "backward", self._engine_backward)
        else:
            end = self._guarded(lambda *_: self._end_step(self._rate()))
            self._undo.callback(self.inner.register_step_post_hook(end).remove)
            if self.accelerator is not None:
                self._replace(self.accelerator, "backward", self._accelerator_backward)
            else:
                self._replace(torch.Tensor, "backward", self._tensor_backward)
        if self.accelerator is not None:
            self._replace(self.accelerator, "clip_grad_norm_", self._accelerator_clip)
        if hasattr(clip_grad, "_clip_grads_with_norm_"):
            self._replace(clip_grad, "_clip_grads_with_norm_", self._clip)
        self._replace(_BaseDataLoaderIter, "__next__", self._next_batch)
        if self._device == "cpu":  # on a GPU a collective is waited for on the device
            self._replace(Work, "wait", self._wait)
        if isinstance(self.model, DistributedDataParallel):  # waits for its collectives outside Python
            first = next(each for each in self.model.parameters() if each.requires_grad)  # its gradient comes last
            hook = first.register_post_accumulate_grad_hook(lambda _: self._mark("backward"))
            self._undo.callback(hook.remove)

    def detach(self) -> None:
        self._undo.close()

    def _replace(self, owner, name: str, wrapper: Callable) -> None:
        """Until `detach`, `owner.name` is `wrapper`, which gets the original as its first argument."""
        is_own = name in vars(owner)
        original = getattr(owner, name)

        @functools.wraps(original)
        def replacement(*args, **kwargs):  # a function, so that a tensor gets itself as well
            return wrapper(original, *args, **kwargs)

        setattr(owner, name, replacement)
        self._undo.callback(lambda: setattr(owner, name, original) if is_own else delattr(owner, name))

    def _guarded(self, hook: Callable) -> Callable:
        """Return a hook whose mistakes end the watch, and not the training."""

        @functools.wraps(hook)
        def guarded(*args, **kwargs) -> None:
            try:
                hook(*args, **kwargs)
            except Exception as error:
                self.on_error(error)

        return guarded

    def _next_batch(self, original, *args):
        if threading.current_thread() is not threading.main_thread():  # something fetches ahead
            return original(*args)
        self._mark("outside")
        try:
            return original(*args)
        finally:
            self._mark("data")

    def _wait(self, original, *args, **kwargs):
        begun_s = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            self.log.waited_s += time.perf_counter() - begun_s

    def _end_step(self, rate: float) -> None:
        self.log.mark("update")
        self._look_for_cleared()
        self._with_gradient = None
        step = self.step
        self.step = Step()
        step.rate = rate
        if len(self.cleared) < CHECKED_STEPS:
            self.cleared.append(step.cleared)
        else:
            self._trained = []
        self.on_step(step)

    def _rate(self) -> float:
        rate = self.inner.param_groups[0].get("lr")
        return rate if isinstance(rate, float) else math.nan  # a tensor may be on a GPU

    def _forward(self, module, args, kwargs) -> None:
        if not (module.training and torch.is_grad_enabled()):
            self.step.evaluated = True
            return
        self.log.mark("outside")
        inputs = _tensors([*args, *kwargs.values()])
        rows, tokens = _size_of(inputs)
        self.step.forwards += 1
        self.step.rows += rows
        self.step.tokens += tokens
        if len(self.inputs) < READ_PASSES:
            self._read(inputs, rows)

    def _read(self, inputs: list[torch.Tensor], rows: float) -> None:
        if not self.inputs:
            self.rows_per_pass = rows
        self.inputs.append(_digest(inputs))
        if torch.is_autocast_enabled(self._device):
            self.autocast = torch.get_autocast_dtype(self._device)

    def _backward(self, loss, parts: int, original, *args, **kwargs):
        """Mark a backward pass, and keep its loss as a part of the step's."""
        self._begin_backward(loss, parts)
        result = original(*args, **kwargs)
        self._end_backward()
        return result

    def _add_loss(self, loss, parts: int) -> None:
        self.log.mark("forward")
        self._look_for_cleared()
        self.step.backwards += 1
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            if self.loss_parts is None:
                self.loss_parts = parts
                self.loss_divisor = _divisor(loss)
            loss = loss.detach()
            self.step.losses.append(loss if parts == 1 else loss / parts)

    def _end_pass(self) -> None:
        self.log.mark("waiting" if self.log.phase == "backward" else "backward")  # the hook of DDP marked the end
        self._with_gradient = next((each for each in self._trained if each.grad is not None), None)

    def _look_for_cleared(self) -> None:
        if self._with_gradient is not None and self._with_gradient.grad is None:
            self.step.cleared = self.step.backwards

    def _accelerator_backward(self, original, loss, *args, **kwargs):
        return self._backward(loss, self.accelerator.gradient_accumulation_steps, original, loss, *args, **kwargs)

    def _engine_backward(self, original, *args, **kwargs):
        given = dict(zip(("loss", "retain_graph", "scale_wrt_gas"), args, strict=False)) | kwargs
        parts = self.model.gradient_accumulation_steps() if given.get("scale_wrt_gas", True) else 1
        return self._backward(given.get("loss"), parts, original, *args, **kwargs)

    def _tensor_backward(self, original, loss, *args, **kwargs):
        scaled = self.autocast is torch.float16  # by a GradScaler, with an unknown scale
        return self._backward(None if scaled else loss, 1, original, loss, *args, **kwargs)

    def _engine_step(self, original, *args, **kwargs):
        before = self.model.global_steps
        rate = self._rate()
        result = original(*args, **kwargs)
        if self.model.global_steps != before:  # unchanged after a pass within a step
            self._guarded(self._end_step)(rate)
        return result

    def _accelerator_clip(self, original, parameters, max_norm, *args, **kwargs):
        self.wants_clipping = _clipping(max_norm)
        return original(parameters, max_norm, *args, **kwargs)

    def _clip(self, original, parameters, max_norm, *args, **kwargs):
        self.clipped_at = _clipping(max_norm)
        return original(parameters, max_norm, *args, **kwargs)


def _clipping(max_norm) -> float | None:
    """Return the clipping value; 0 means off. The Trainer gives infinity to get only the norm.

    None for a tensor, which may be on a GPU.
    """
    if not isinstance(max_norm, (int, float)):
        return None
    return 0.0 if math.isinf(max_norm) else float(max_norm)


def _divisor(loss: torch.Tensor) -> float | None:
    """Return the number by which a script has divided its loss; None if that was not its last operation."""
    if loss.grad_fn is None or loss.grad_fn.name() != "DivBackward0":
        return None
    other = getattr(loss.grad_fn, "_saved_other", None)
    if not isinstance(other, torch.Tensor) or other.ndim or other.device.type != "cpu" or other.requires_grad:
        return None
    return float(other)


def _tensors(inputs: list) -> list[torch.Tensor]:
    nested = [list(value.values()) if isinstance(value, dict) else [value] for value in inputs]
    return [each for each in itertools.chain(*nested) if isinstance(each, torch.Tensor) and each.ndim]


def _digest(tensors: list[torch.Tensor]) -> str:
    """Return the shapes of inputs, and a digest of their first elements."""
    digest = hashlib.sha256()
    with contextlib.suppress(RuntimeError, TypeError):  # a sparse tensor, or one without memory
        for tensor in tensors:
            first = tensor.detach().reshape(-1)[:READ_ELEMENTS].cpu()
            digest.update(first.contiguous().view(torch.uint8).numpy().tobytes())
    shapes = " ".join("x".join(map(str, tensor.shape)) for tensor in tensors)
    return f"{shapes} {digest.hexdigest()[:12]}"


def _size_of(tensors: list[torch.Tensor]) -> tuple[float, float]:
    """Return the rows and tokens of a pass, by the shapes of its inputs; NaN if unknown.

    Tokens are two-dimensional and integers.
    """
    for tensor in tensors:
        if tensor.ndim == 2 and tensor.dtype in (torch.int64, torch.int32):
            return tensor.shape[0], tensor.numel()
    return (tensors[0].shape[0] if tensors else math.nan), math.nan
