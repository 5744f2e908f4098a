"""Follow a user's own training loop: hooks show where its steps end, and instruments look at a few of them.

The optimizer or the engine shows the end of a step. The hooks are removed at the end. Nothing here reads a value of a
tensor, so no step waits for a GPU.
"""

import contextlib
import functools
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from study.measure import memory, roles, traffic
from study.measure.clock import now, seconds_between
from study.measure.components import ComponentLook
from study.measure.readback import device_of
from study.records.schema import Collective, RankComponents

CHUNK = 256  # losses that are kept one by one
ATTEMPTS = 3  # a look at a step with an evaluation in it is repeated


@dataclass
class Step:
    """The step in progress."""

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
        self.accelerator = accelerator
        self.model = model
        self.on_step = on_step
        self.inner = roles.inner_optimizer(optimizer)
        self.step = Step()
        self.clipped_at: float | None = None  # by torch's own function, which DeepSpeed does not call
        self.wants_clipping: float | None = None  # the value that the script gave Accelerate, whether that clips or not
        self.autocast: torch.dtype | None = None
        self._device = device_of(model).type
        self._undo = contextlib.ExitStack()

    def attach(self) -> None:
        if getattr(self.model, "_compiled_call_impl", None) is None:  # a hook would become part of what is compiled
            self._undo.callback(self.model.register_forward_pre_hook(self._forward, with_kwargs=True).remove)
        if hasattr(self.model, "zero_optimization_stage"):
            self._replace(self.model, "step", self._engine_step)
            self._replace(self.model, "backward", self._engine_backward)
        else:
            self._undo.callback(self.inner.register_step_post_hook(lambda *_: self._end_step(self._rate())).remove)
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
        is_own = name in vars(owner)
        original = getattr(owner, name)

        @functools.wraps(original)
        def replacement(*args, **kwargs):  # a function, so that a tensor gets itself as well
            return wrapper(original, *args, **kwargs)

        setattr(owner, name, replacement)
        self._undo.callback(lambda: setattr(owner, name, original) if is_own else delattr(owner, name))

    def _end_step(self, rate: float | None) -> None:
        step = self.step
        self.step = Step()
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
        self.step.tokens = _sum([self.step.tokens, tokens])
        if self.autocast is None and torch.is_autocast_enabled(self._device):
            self.autocast = torch.get_autocast_dtype(self._device)

    def _add_loss(self, loss, parts: int) -> None:
        self.step.backwards += 1
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            loss = loss.detach()
            self.step.losses.append(loss if parts == 1 else loss / parts)

    def _accelerator_backward(self, original, loss, *args, **kwargs):
        self._add_loss(loss, self.accelerator.gradient_accumulation_steps)
        return original(loss, *args, **kwargs)

    def _engine_backward(self, original, *args, **kwargs):
        given = dict(zip(("loss", "retain_graph", "scale_wrt_gas"), args, strict=False)) | kwargs
        parts = self.model.gradient_accumulation_steps() if given.get("scale_wrt_gas", True) else 1
        self._add_loss(given.get("loss"), parts)
        return original(*args, **kwargs)

    def _tensor_backward(self, original, loss, *args, **kwargs):
        scaled = self.autocast is torch.float16  # by a GradScaler, with an unknown scale
        self._add_loss(None if scaled else loss, 1)
        return original(loss, *args, **kwargs)

    def _engine_step(self, original, *args, **kwargs):
        before = self.model.global_steps
        rate = self._rate()
        result = original(*args, **kwargs)
        if self.model.global_steps != before:  # unchanged after a pass within a step
            self._end_step(rate)
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


def _size_of(inputs: list) -> tuple[int | None, int | None]:
    """Return the rows and tokens of a pass, by the shapes of its inputs. Tokens are two-dimensional and integers."""
    nested = [list(value.values()) if isinstance(value, dict) else [value] for value in inputs]
    tensors = [each for each in itertools.chain(*nested) if isinstance(each, torch.Tensor) and each.ndim]
    ids = [tensor for tensor in tensors if tensor.ndim == 2 and tensor.dtype in (torch.int64, torch.int32)]
    if ids:
        return ids[0].shape[0], ids[0].numel()
    return (tensors[0].shape[0] if tensors else None), None


def _sum(values: list[int | None]) -> int | None:
    """Return the sum. None if a value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


class Counts(NamedTuple):
    """Numbers of a step that has ended."""

    passes: int
    rows: int | None
    tokens: int | None
    evaluated: bool
    rate: float | None


class Marks:
    """Seconds per step of a user's own loop: a mark after each step, without waiting."""

    FAR = 256  # after so many steps a GPU has passed a mark, so that reading it does not wait

    def __init__(self):
        self._marks = [now()]
        self._step_s: list[float] = []

    def tick(self) -> None:
        self._marks.append(now())
        if len(self._marks) > 2 * self.FAR:  # a long run does not keep all its events
            self._step_s += seconds_between(self._marks[: self.FAR + 1])
            del self._marks[: self.FAR]

    def read(self) -> list[float]:
        """Return the seconds of every step, including the first. On a GPU this waits for the last step."""
        if isinstance(last := self._marks[-1], torch.cuda.Event):
            last.synchronize()
        return self._step_s + seconds_between(self._marks)


class History:
    """The steps so far; they count from 1. Losses stay on the device, so that no step waits for it."""

    def __init__(self) -> None:
        self.steps: list[Counts] = []
        self._marks = Marks()
        self._losses: list[torch.Tensor] = []  # each of many steps, and then of one
        self._recent = 0
        self._all_losses = True

    def add(self, step: Step) -> None:
        self._marks.tick()
        rows = _sum(step.rows) or None
        self.steps.append(Counts(step.passes, rows, step.tokens or None, step.evaluated, step.rate))
        loss = step.loss if self._all_losses else None
        if loss is None:
            self._all_losses = False
            return
        self._losses.append(loss.float())
        self._recent += 1
        if self._recent == CHUNK:  # one small tensor in place of many
            self._losses[-CHUNK:] = [torch.stack(self._losses[-CHUNK:])]
            self._recent = 0

    def losses(self) -> list[float]:
        """Return the losses of all steps; an empty list if one is unknown, or if the device has failed."""
        if self._all_losses and self.steps:
            with contextlib.suppress(RuntimeError):
                return torch.cat([loss.reshape(-1) for loss in self._losses]).tolist()
        return []

    @property
    def passes_per_step(self) -> int | None:
        return _typical([step.passes for step in self.steps])

    def measured(self, losses: list[float], timed: list[int]) -> dict[str, Any]:
        """Return the fields of RankMeasurements that the steps give."""
        finite = list(itertools.takewhile(math.isfinite, losses))
        step_s = self._marks.read()
        tokens = {step.tokens for step in self.steps}
        return {
            "steps": len(self.steps),
            "step_s": {step: step_s[step - 1] for step in timed},
            "losses": finite,
            "diverged_in": len(finite) + 1 if len(finite) < len(losses) else None,
            "rows_per_step": _typical([step.rows for step in self.steps]),
            "tokens_per_step": tokens.pop() if len(tokens) == 1 else None,  # not with padded rows
            "timed_rows": _sum([self.steps[step - 1].rows for step in timed]),
            "timed_tokens": _sum([self.steps[step - 1].tokens for step in timed]),
        }


def _typical(values: list) -> int | None:
    """Return the most frequent value, as the last batch of an epoch may be smaller. None if a value is unknown."""
    return statistics.mode(values) if values and None not in values else None


# --- instruments: one step for collectives, then some for memory ---------------------------------------------------


class CollectiveLook:
    """Record the collectives of a step, the bytes that the kernel counted as written, and the dtypes at the update."""

    STEPS = 1

    def __init__(self, model, optimizer):
        self.mode = traffic.CollectiveCounter()
        self.dtypes: dict[str, str] = {}
        self.written_bytes: int | None = None
        self._before_bytes: int | None = None
        self._reading = roles.before_each_update(optimizer, lambda: self._read(model, optimizer))

    def __enter__(self) -> None:
        self._reading.__enter__()
        self._before_bytes = memory.written_bytes()
        self.mode.__enter__()

    def __exit__(self, *error) -> None:
        self.mode.__exit__(*error)
        self._reading.__exit__(*error)

    def step_ended(self) -> None:
        after_bytes = memory.written_bytes()
        if after_bytes is not None and self._before_bytes is not None:
            self.written_bytes = after_bytes - self._before_bytes

    def _read(self, model, optimizer) -> None:
        with contextlib.suppress(Exception):  # a mistake here must not end the user's update
            self.dtypes |= {role: dtype for role, dtype in roles.dtypes(model, optimizer).items() if dtype}


class Instruments:
    """Decide after each step which instrument looks at the next one. Every rank decides alone: nothing here waits."""

    def __init__(self, model, optimizer, device_type: str, after: int):
        self.after = after
        self.looked_at: list[int] = []
        self.counts: dict[str, Collective] | None = None
        self.written_bytes: int | None = None
        self.dtypes: dict[str, str] = {}
        self.components: RankComponents | None = None
        self._modes = _get_current_dispatch_mode_stack()  # the script's own
        self._plan: list[Callable[[], CollectiveLook | ComponentLook]] = [
            lambda: CollectiveLook(model, optimizer),
            lambda: ComponentLook(model, optimizer, device_type, exact=False),
        ]
        self._look: CollectiveLook | ComponentLook | None = None
        self._steps_left = 0
        self._attempts = 0

    def are_over(self) -> bool:
        return not (self._plan or self._look)

    def step_ended(self, step: int, evaluated: bool) -> None:
        """`step` is the number of the step that has just ended."""
        if self._look is not None:
            self.looked_at.append(step)
            self._look.step_ended()
            self._steps_left -= 1
            if self._steps_left <= 0 or evaluated:
                self._finish(self._look, again=evaluated)
        # Only beside the script's own modes: otherwise another mode would be ended instead.
        undisturbed = _get_current_dispatch_mode_stack() == self._modes
        if self._look is None and self._plan and step >= self.after and undisturbed:
            self._look = self._plan[0]()
            self._look.__enter__()
            self._steps_left = self._look.STEPS

    def stop(self) -> None:
        """Keep the result of an unfinished look, because the loop or its watch is over."""
        if isinstance(self._look, CollectiveLook):
            self._look.__exit__(None, None, None)  # its only step has not ended
        elif self._look is not None:
            self._finish(self._look, again=False)
        self._look = None
        self._plan = []

    def _finish(self, look: CollectiveLook | ComponentLook, again: bool) -> None:
        stack = _get_current_dispatch_mode_stack()
        if not stack or stack[-1] is not look.mode:
            return  # the script began a mode within the step: wait until that has ended
        self._look = None
        look.__exit__(None, None, None)
        self._attempts += 1
        if again and self._attempts < ATTEMPTS:
            return
        self._attempts = 0
        del self._plan[0]
        if isinstance(look, CollectiveLook):
            traffic.refuse_uncounted(look.mode)
            self.counts = look.mode.counts
            self.written_bytes = look.written_bytes
            self.dtypes = look.dtypes
        else:
            self.components = look.components()
