"""Measures a rank's memory by component, at the peak of a step and after it."""

from study.measure import memory
from study.measure.roles import before_each_update, claimed_storages
from study.records.schema import RankComponents

LOOKS = 2  # the first look misses the components at the peak if its step peaks lower than the step before


class ComponentLook:
    """Memory at the peak of a step and after it, by role, from STEPS untimed steps in a row under `MemoryWatch`.

    `exact` collects garbage and resets the allocator's peak counters, so that a step's own peak is known. Without it,
    the counters of a user's own loop stay untouched, and the loop does not wait.
    """

    STEPS = 1 + LOOKS

    def __init__(self, model, optimizer, device_type: str, exact: bool = True):
        self.mode = memory.MemoryWatch(device_type, lambda: claimed_storages(model, optimizer), collect=exact)
        # At the update every gradient exists. DDP's buckets outlive the gradients in them.
        self._marking = before_each_update(optimizer, self._mark)
        self._exact, self._looks, self._peak_before, self._after = exact, [], None, {}

    def __enter__(self) -> "ComponentLook":
        self._marking.__enter__()
        self.mode.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.mode.__exit__(*error)
        self._marking.__exit__(*error)

    def _mark(self) -> None:
        try:
            self.mode.mark()
        except Exception as error:  # a mistake here must not end the user's update
            self.mode.failed = self.mode.failed or error

    def step_ended(self) -> None:
        """Call this after each of the steps. Every rank takes the same number."""
        if self._peak_before is not None:
            allocated = memory.peaks().peak_allocated_bytes if self._exact else None
            self._looks.append((self.mode.at_peak, self.mode.peak, self._peak_before, allocated))
        self._peak_before, self._after = self.mode.peak, self.mode.by_role()
        if len(self._looks) < LOOKS:
            self.mode.look_again()
            if self._exact:
                memory.reset_peaks()

    def components(self) -> RankComponents | None:
        """The result. None if no step was followed to its end, as when a loop ends early."""
        if self._peak_before is None:
            return None
        looks = self._looks or [(None, self._peak_before, None, None)]
        at_peak, peak, peak_before, allocated = max(looks, key=lambda look: (look[0] is not None, look[1]))
        return RankComponents(
            at_peak=at_peak,
            after_step=self._after,
            tracked_peak_bytes=peak,
            tracked_peak_step_before_bytes=peak_before,
            allocator_peak_bytes=allocated,  # of the same step, by the allocator: includes memory of libraries
            tracked_mean_bytes=self.mode.mean if len(self._looks) == LOOKS else None,
            gloo_copy_bytes=self.mode.gloo_copy_bytes,
        )


def memory_by_component(step, model, optimizer, device_type: str) -> RankComponents:
    """Memory at the peak of a step and after it, by role. Takes three untimed steps, on every rank."""
    with ComponentLook(model, optimizer, device_type) as look:
        for _ in range(look.STEPS):
            step()
            look.step_ended()
    if look.mode.failed:
        raise look.mode.failed
    return look.components()
