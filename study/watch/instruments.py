"""The instruments that look at three steps of a loop: at collectives in the first of them, at memory in all."""

import contextlib
import copy

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from study.measure import roles, traffic
from study.measure.components import ComponentLook
from study.records.schema import Collective, RankComponents

ATTEMPTS = 3  # a look at a step with an evaluation in it is repeated


class Instruments:
    """Decide after each step whether the next one is looked at. Every rank decides alone: nothing here waits."""

    def __init__(self, model, optimizer, device_type: str, after: int):
        self.after = after
        self.looked_at: list[int] = []
        self.counts: dict[str, Collective] | None = None
        self.dtypes: dict[str, str] = {}
        self.components: RankComponents | None = None
        self._objects = model, optimizer, device_type
        self._modes = _get_current_dispatch_mode_stack()  # the script's own
        self._attempts = 0
        self._look: ComponentLook | None = None
        self._open = contextlib.ExitStack()

    def step_ended(self, step: int, evaluated: bool) -> bool:
        """Return whether the instruments are done with this step, whose number counts from 1."""
        stack = _get_current_dispatch_mode_stack()
        if self._look is None:
            # Only beside the script's own modes: otherwise another mode would be ended instead.
            if step >= self.after and self._attempts < ATTEMPTS and stack == self._modes:
                self._begin()
            return False
        self.looked_at.append(step)
        self._look.step_ended()
        self._steps += 1
        if self.counts is None:
            traffic.refuse_uncounted(self._counter)
            self.counts = copy.deepcopy(self._counter.counts)
        if stack[-1] is not self._counter:
            return False  # the script began a mode within the step: wait until that has ended
        if evaluated and self._attempts < ATTEMPTS:
            self._open.close()
            self._begin()
        elif self._steps >= self._look.STEPS:
            self.stop()
        return self._look is None

    def stop(self) -> None:
        """Keep the result of an unfinished look, because the loop or its watch is over."""
        self._attempts = ATTEMPTS
        self._open.close()
        if self._look is not None:
            self.components = self._look.components()
        self._look = None

    def _begin(self) -> None:
        model, optimizer, device_type = self._objects
        self._attempts += 1
        self._steps = 0
        self.counts = None
        self._counter = traffic.CollectiveCounter()
        self._open.enter_context(roles.before_each_update(optimizer, self._read_dtypes))
        self._look = self._open.enter_context(ComponentLook(model, optimizer, device_type, exact=False))
        self._open.enter_context(self._counter)

    def _read_dtypes(self) -> None:
        with contextlib.suppress(Exception):  # a mistake here must not end the user's update
            self.dtypes |= {role: dtype for role, dtype in roles.dtypes(*self._objects[:2]).items() if dtype}
