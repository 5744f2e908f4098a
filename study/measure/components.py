"""Measures a rank's memory by component, at the peak of a step and after it."""

import contextlib

from study.measure import memory
from study.measure.roles import before_each_update, claimed_storages
from study.records.sections import RankComponents

LOOKS = 2  # the first look misses the components at the peak if its step peaks lower than the step before


class ComponentLook:
    """Memory at the peak of a step and after it, by role, from STEPS untimed steps in a row under `MemoryWatch`.

    `exact` collects garbage and resets the allocator's peak counters, so that a step's own peak is known. Without it,
    the counters of a user's own loop stay untouched, and the loop does not wait.
    """

    STEPS = 1 + LOOKS

    def __init__(self, model, optimizer, device_type: str, exact: bool = True):
        self.mode = memory.MemoryWatch(device_type, lambda: claimed_storages(model, optimizer), collect=exact)
        self._optimizer = optimizer
        self._exact = exact
        self._looks: list[RankComponents] = []
        self._peak_before: int | None = None
        self._after: dict[str, int] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "ComponentLook":
        # At the update every gradient exists. DDP's buckets outlive the gradients in them.
        self._stack.enter_context(before_each_update(self._optimizer, self._mark))
        self._stack.enter_context(self.mode)
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    def _mark(self) -> None:
        try:
            self.mode.mark()
        except Exception as error:  # a mistake here must not end the user's update
            self.mode.failed = self.mode.failed or error

    def step_ended(self) -> None:
        """Call this after each of the steps. Every rank takes the same number: a step has collectives."""
        if self._peak_before is not None:  # else this was the step that only finds how high the peak is
            look = RankComponents(
                at_peak=self.mode.at_peak,
                tracked_peak_bytes=self.mode.peak,
                tracked_peak_step_before_bytes=self._peak_before,
                # Of the same step, by the allocator: includes libraries' memory.
                allocator_peak_bytes=memory.peaks().peak_allocated_bytes if self._exact else None,
            )
            self._looks.append(look)
        self._peak_before = self.mode.peak
        self._after = self.mode.by_role()
        if len(self._looks) < LOOKS:
            self.mode.look_again()
            if self._exact:
                memory.reset_peaks()

    def components(self) -> RankComponents | None:
        """Return the result. None if no step was followed to its end, as when a loop ends early."""
        if self._peak_before is None:
            return None
        looks = self._looks or [RankComponents(tracked_peak_bytes=self._peak_before)]
        # The look that found the components; of two, the one with the higher peak.
        result = max(looks, key=lambda each: (each.at_peak is not None, each.tracked_peak_bytes))
        result.after_step = self._after
        return result


def memory_by_component(step, model, optimizer, device_type: str) -> RankComponents | None:
    """Return memory at the peak of a step and after it, by role. Takes three untimed steps, on every rank."""
    with ComponentLook(model, optimizer, device_type) as look:
        for _ in range(look.STEPS):
            step()
            look.step_ended()
    if look.mode.failed:
        raise look.mode.failed
    return look.components()
