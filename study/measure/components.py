"""Measures a rank's memory by component, at the peak of a step and after it."""

import contextlib
from dataclasses import dataclass

from study.measure import memory
from study.measure.roles import before_each_update, claimed_storages
from study.records.schema import RankComponents

LOOKS = 2  # the first look misses the components at the peak if its step peaks lower than the step before


@dataclass(frozen=True)
class Look:
    """Memory at the peak of one step."""

    at_peak: dict[str, int] | None
    peak_bytes: int
    step_before_bytes: int | None = None  # the peak of the step before
    allocated_bytes: int | None = None


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
        self._looks: list[Look] = []
        self._peak_before: int | None = None
        self._after: dict[str, int] = {}

    def __enter__(self) -> "ComponentLook":
        # At the update every gradient exists. DDP's buckets outlive the gradients in them.
        with contextlib.ExitStack() as stack:
            stack.enter_context(before_each_update(self._optimizer, self._mark))
            stack.enter_context(self.mode)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    def _mark(self) -> None:
        try:
            self.mode.mark()
        except Exception as error:  # a mistake here must not end the user's update
            self.mode.failed = self.mode.failed or error

    def step_ended(self) -> None:
        """Call this after each of the steps. Every rank takes the same number."""
        if self._peak_before is not None:
            allocated_bytes = memory.peaks().peak_allocated_bytes if self._exact else None
            self._looks.append(Look(self.mode.at_peak, self.mode.peak, self._peak_before, allocated_bytes))
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
        looks = self._looks or [Look(None, self._peak_before)]
        look = max(looks, key=lambda each: (each.at_peak is not None, each.peak_bytes))
        return RankComponents(
            at_peak=look.at_peak,
            after_step=self._after,
            tracked_peak_bytes=look.peak_bytes,
            tracked_peak_step_before_bytes=look.step_before_bytes,
            allocator_peak_bytes=look.allocated_bytes,  # of the same step, by the allocator: includes libraries' memory
            tracked_mean_bytes=self.mode.mean if len(self._looks) == LOOKS else None,
            gloo_copy_bytes=self.mode.gloo_copy_bytes,
        )


def memory_by_component(step, model, optimizer, device_type: str) -> RankComponents | None:
    """Return memory at the peak of a step and after it, by role. Takes three untimed steps, on every rank."""
    with ComponentLook(model, optimizer, device_type) as look:
        for _ in range(look.STEPS):
            step()
            look.step_ended()
    if look.mode.failed:
        raise look.mode.failed
    return look.components()
