"""The look at three steps of a watched loop: what each rank holds, and what it sends."""

import contextlib
import copy

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from study.measure import traffic
from study.measure.memory import ComponentLook
from study.records.sections import Collective, RankComponents

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

    @property
    def is_looking(self) -> bool:
        return self._look is not None

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
