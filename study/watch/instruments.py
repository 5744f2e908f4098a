"""The instruments that look at a few steps of a loop: one step for collectives, then some for memory."""

import contextlib
from collections.abc import Callable

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from study.measure import memory, roles, traffic
from study.measure.components import ComponentLook
from study.records.schema import Collective, RankComponents

ATTEMPTS = 3  # a look at a step with an evaluation in it is repeated


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
