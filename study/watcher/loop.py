"""Follows a user's own training loop with hooks: where its steps end, and what went into each step.

The optimizer or the engine shows the end of a step. The hooks are removed at the end. Nothing here reads a value of a
tensor, so no step waits for a GPU.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn.utils import clip_grad

from study.measure.readback import device_of
from study.measure.roles import inner_optimizer


@dataclass
class Step:
    """What went into one step."""

    losses: list[torch.Tensor] = field(default_factory=list)  # as they were differentiated: they sum to the step's loss
    backwards: int = 0
    forwards: int = 0
    rows: list[int | None] = field(default_factory=list)  # of each pass
    tokens: int | None = 0
    evaluated: bool = False  # the model also ran outside training, or the step was to be left out
    rate: float | None = None

    @property
    def passes(self) -> int:
        return self.backwards or self.forwards

    @property
    def loss(self) -> torch.Tensor | None:
        """The loss, on the device. None if a pass has no known loss."""
        if not self.losses or len(self.losses) != self.passes:
            return None
        return self.losses[0] if len(self.losses) == 1 else torch.stack([x.float() for x in self.losses]).sum()


class Loop:
    """The hooks on a loop. `on_step` is called after each update with the step."""

    def __init__(self, accelerator, model, optimizer, on_step: Callable[[Step], None]):
        self.accelerator, self.model, self.on_step = accelerator, model, on_step
        self.inner = inner_optimizer(optimizer)
        self.is_engine = hasattr(model, "zero_optimization_stage")
        self.step = Step()
        self.clipped_at: float | None = None  # by torch's own function, which DeepSpeed does not call
        self.wants_clipping: float | None = None  # the value that the script gave Accelerate, whether that clips or not
        self.autocast: torch.dtype | None = None
        self._device = device_of(model).type
        self._undo = contextlib.ExitStack()

    def attach(self) -> None:
        if getattr(self.model, "_compiled_call_impl", None) is None:  # a hook would become part of what is compiled
            hook = self.model.register_forward_pre_hook(self._forward, with_kwargs=True)
            self._undo.callback(hook.remove)
        if self.is_engine:
            self._replace(self.model, "step", self._engine_step)
            self._replace(self.model, "backward", self._engine_backward)
        else:
            self._undo.callback(self.inner.register_step_post_hook(lambda *_: self._ended(self._rate())).remove)
            if self.accelerator is not None:
                self._replace(self.accelerator, "backward", self._accelerator_backward)
            else:
                self._replace(torch.Tensor, "backward", self._tensor_backward)
        if self.accelerator is not None:
            self._replace(self.accelerator, "clip_grad_norm_", self._accelerator_clip)
        if hasattr(clip_grad, "_clip_grads_with_norm_"):
            self._replace(clip_grad, "_clip_grads_with_norm_", self._clip)

    def detach(self) -> None:
        self._undo.close()

    def _replace(self, owner, name: str, wrapper: Callable) -> None:
        """Until `detach`, `owner.name` is `wrapper`, which gets the original as its first argument."""
        own, original = name in vars(owner), getattr(owner, name)
        if owner is torch.Tensor:  # it gets the tensor as well

            @functools.wraps(original)
            def replacement(tensor, *args, **kwargs):
                return wrapper(original, tensor, *args, **kwargs)
        else:
            replacement = functools.wraps(original)(functools.partial(wrapper, original))
        setattr(owner, name, replacement)
        self._undo.callback(lambda: setattr(owner, name, original) if own else delattr(owner, name))

    def _ended(self, rate: float | None) -> None:
        step, self.step = self.step, Step()
        step.rate = rate
        self.on_step(step)

    def _rate(self) -> float | None:
        rate = self.inner.param_groups[0].get("lr")
        return rate if isinstance(rate, float) else None  # a tensor may be on a GPU

    def _forward(self, module, args, kwargs) -> None:
        if not (module.training and torch.is_grad_enabled()):
            self.step.evaluated = True
            return
        self.step.forwards += 1
        rows, tokens = _size_of([*args, *kwargs.values()])
        self.step.rows.append(rows)
        self.step.tokens = None if tokens is None or self.step.tokens is None else self.step.tokens + tokens
        if self.autocast is None and torch.is_autocast_enabled(self._device):
            self.autocast = torch.get_autocast_dtype(self._device)

    def _backward_of(self, loss, parts: int) -> None:
        self.step.backwards += 1
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            loss = loss.detach()
            self.step.losses.append(loss if parts == 1 else loss / parts)

    def _accelerator_backward(self, original, loss, *args, **kwargs):
        self._backward_of(loss, self.accelerator.gradient_accumulation_steps)
        return original(loss, *args, **kwargs)

    def _engine_backward(self, original, *args, **kwargs):
        given = dict(zip(("loss", "retain_graph", "scale_wrt_gas"), args, strict=False)) | kwargs
        parts = self.model.gradient_accumulation_steps() if given.get("scale_wrt_gas", True) else 1
        self._backward_of(given.get("loss"), parts)
        return original(*args, **kwargs)

    def _tensor_backward(self, original, loss, *args, **kwargs):
        scaled = self.autocast is torch.float16  # by a GradScaler, with an unknown scale
        self._backward_of(None if scaled else loss, 1)
        return original(loss, *args, **kwargs)

    def _engine_step(self, original, *args, **kwargs):
        before, rate = self.model.global_steps, self._rate()
        result = original(*args, **kwargs)
        if self.model.global_steps != before:  # unchanged after a pass within a step
            self._ended(rate)
        return result

    def _accelerator_clip(self, original, parameters, max_norm, *args, **kwargs):
        self.wants_clipping = _clipping(max_norm)
        return original(parameters, max_norm, *args, **kwargs)

    def _clip(self, original, parameters, max_norm, *args, **kwargs):
        self.clipped_at = _clipping(max_norm)
        return original(parameters, max_norm, *args, **kwargs)


def _clipping(max_norm) -> float | None:
    """The clipping value; 0 means off. The Trainer gives infinity to get only the norm. None for a tensor, which may
    be on a GPU."""
    if not isinstance(max_norm, (int, float)):
        return None
    return 0.0 if math.isinf(max_norm) else float(max_norm)


def _size_of(inputs: list) -> tuple[int | None, int | None]:
    """Rows and tokens of a pass, by the shapes of its inputs. Tokens are those of a two-dimensional integer tensor."""
    tensors = []
    for value in inputs:
        values = value.values() if isinstance(value, dict) else [value]
        tensors += [tensor for tensor in values if isinstance(tensor, torch.Tensor) and tensor.ndim]
    ids = next((tensor for tensor in tensors if tensor.ndim == 2 and tensor.dtype in (torch.int64, torch.int32)), None)
    first = ids if ids is not None else next(iter(tensors), None)
    return None if first is None else first.shape[0], None if ids is None else ids.numel()
