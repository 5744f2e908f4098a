"""Applies the instruments to a few steps of a user's loop: one step for collectives, then some for memory."""

import contextlib

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from study.measure import memory, roles, traffic
from study.measure.components import ComponentLook
from study.records.schema import Collective, RankComponents

ATTEMPTS = 3  # a look at a step with an evaluation in it is repeated


class CollectiveLook:
    """Records the collectives of a step, the bytes that the kernel counted as written, and the dtypes at the update."""

    STEPS = 1

    def __init__(self, model, optimizer):
        self.mode, self.dtypes = traffic.CollectiveCounter(), {}
        self.written_bytes: int | None = None
        self._reading = roles.before_each_update(optimizer, lambda: self._read(model, optimizer))

    def __enter__(self) -> None:
        self._reading.__enter__()
        self._before = memory.written_bytes()
        self.mode.__enter__()

    def __exit__(self, *error) -> None:
        self.mode.__exit__(*error)
        self._reading.__exit__(*error)

    def step_ended(self) -> None:
        after = memory.written_bytes()
        self.written_bytes = None if None in (self._before, after) else after - self._before

    def _read(self, model, optimizer) -> None:
        with contextlib.suppress(Exception):  # a mistake here must not end the user's update
            self.dtypes |= {role: dtype for role, dtype in roles.dtypes(model, optimizer).items() if dtype}


class Looks:
    """Decides after each step which instrument looks at the next one. Every rank decides alone: nothing here waits."""

    def __init__(self, model, optimizer, device_type: str, after: int):
        self.model, self.optimizer, self.device_type, self.after = model, optimizer, device_type, after
        self.looked_at: list[int] = []
        self.counts: dict[str, Collective] | None = None
        self.written_bytes: int | None = None
        self.dtypes: dict[str, str] = {}
        self.components: RankComponents | None = None
        self._modes = _get_current_dispatch_mode_stack()  # the script's own
        self._plan = [self._collectives, self._memory]
        self._look, self._left, self._attempts = None, 0, 0

    @property
    def looking(self) -> bool:
        return self._look is not None

    @property
    def over(self) -> bool:
        return not (self._plan or self._look)

    def step_ended(self, step: int, evaluated: bool) -> None:
        """`step` is the number of the step that has just ended."""
        if self._look is not None:
            self.looked_at.append(step)
            self._look.step_ended()
            self._left -= 1
            if self._left <= 0 or evaluated:
                self._finish(again=evaluated)
        if self._look is None and self._plan and step >= self.after and self._undisturbed():
            self._look = self._plan[0]()
            self._look.__enter__()
            self._left = self._look.STEPS

    def stop(self) -> None:
        """The loop or its watch is over: keep the result of an unfinished look."""
        if isinstance(self._look, CollectiveLook):
            self._look.__exit__(None, None, None)  # its only step has not ended
        elif self._look is not None:
            self._finish(again=False)
        self._look, self._plan = None, []

    def _undisturbed(self) -> bool:
        """Whether only the script's own modes are active. Otherwise another mode would be ended in place of ours."""
        return _get_current_dispatch_mode_stack() == self._modes

    def _finish(self, again: bool) -> None:
        stack = _get_current_dispatch_mode_stack()
        if not stack or stack[-1] is not self._look.mode:
            return  # the script began a mode within the step: wait until that has ended
        look, self._look = self._look, None
        look.__exit__(None, None, None)
        self._attempts += 1
        if again and self._attempts < ATTEMPTS:
            return
        self._attempts = 0
        del self._plan[0]
        if isinstance(look, CollectiveLook):
            traffic.refuse_uncounted(look.mode)
            self.counts, self.written_bytes, self.dtypes = look.mode.counts, look.written_bytes, look.dtypes
        else:
            self.components = look.components()

    def _collectives(self) -> CollectiveLook:
        return CollectiveLook(self.model, self.optimizer)

    def _memory(self) -> ComponentLook:
        return ComponentLook(self.model, self.optimizer, self.device_type, exact=False)
