"""What a script does beside its updates: evaluation, by loaders whose batches train nothing, and saving.

A moment is a stretch of the log of storages, so that its peak is known afterwards, without what the host keeps.
"""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from study.measure.memory import MemoryWatch
from study.rehearsal.request import Moment, Request

MOST_BATCHES = 4  # of an evaluation; what it keeps of each is seen by then
MORE_UPDATES = 20  # after the counted ones: for a loop that has no loader which could end
COARSE = 0.005  # sorting takes as long as many operations, and a first peak is not known before


class Enough(BaseException):
    """The script has done what was asked."""


@dataclass
class Use:
    """What the batches of one iterator of a loader are for."""

    number: int
    taken: int = 0
    trains: bool = False
    is_alone: bool = False  # a model was called that keeps nothing for a backward pass
    left: int | None = None  # batches that were not run

    @property
    def evaluates(self) -> bool:
        return self.is_alone and not self.trains


class Moments:
    """Follows loaders and saves, and ends loaders once nothing new would come."""

    def __init__(self, request: Request, watch: MemoryWatch):
        self.request = request
        self.watch = watch
        self.done: list[Moment] = []
        self.is_over = False  # the updates that were asked for are made
        self.ends_loaders = False  # a loader gave fewer batches than it has
        self.on_host = False  # what an operation makes now is the host's
        self._uses: weakref.WeakKeyDictionary[Any, Use] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._current: Use | None = None
        self._open: Moment | None = None
        self._saves = 0  # nested
        self._more = 0  # updates after the counted ones

    # --- evaluation

    def begin_batch(self, loader) -> None:
        """Note that an iterator is asked for a batch. Raise StopIteration if it has given enough."""
        self.close()
        if loader not in self._uses:
            self._uses[loader] = Use(next(self._numbers))
        use = self._uses[loader]
        ends = use.trains and self.is_over
        if use.evaluates and (self.request.evaluate or self.is_over) and use.taken >= MOST_BATCHES:
            with contextlib.suppress(TypeError):  # a stream of rows has no length
                use.left = len(loader._index_sampler) - use.taken
            ends = True
        self._current = use
        self._begin("evaluation")
        if ends:
            self.ends_loaders = True
            raise StopIteration
        use.taken += 1

    def called(self, trains: bool) -> None:
        """Note a pass of a model."""
        if self._current is not None:
            self._current.trains |= trains
            self._current.is_alone |= not trains

    def _begin(self, kind: str, what: str | None = None) -> None:
        self._open = Moment(kind, begin=len(self.watch.log or ()), what=what)
        if self.is_over:
            self.watch.sort_from_here(COARSE)

    def close(self) -> None:
        """End the moment that is open, and keep it if it was one."""
        moment, use = self._open, self._current
        self._open = None
        if moment is None or (moment.kind == "evaluation" and not (use and use.evaluates)):
            return
        moment.end = len(self.watch.log or ())
        moment.parts = self.watch.at_peak if self.is_over else None
        if not self.is_over:
            self.watch.peak = self.watch.total  # what it held is not an update's
        if use is not None and moment.kind == "evaluation":
            moment.loader, moment.batches_left = use.number, use.left
        self.done.append(moment)

    # --- saving

    @contextlib.contextmanager
    def saving(self, what: str) -> Iterator[None]:
        """The outermost of the functions that save, or that gather what is saved."""
        if self._saves == 0:
            self.close()
            self._begin("saving", what)
        self._saves += 1
        try:
            yield
        finally:
            self._saves -= 1
            if self._saves == 0:
                self.close()

    def wrap(self, owner, *names: str) -> None:
        """Let functions of a class or module count as saving."""
        for name in names:
            setattr(owner, name, self._wrapped(getattr(owner, name), name))

    def _wrapped(self, function: Callable, name: str) -> Callable:
        @functools.wraps(function)
        def save(*args, **kwargs):
            with self.saving(name):
                return function(*args, **kwargs)

        return save

    @contextlib.contextmanager
    def made_on_host(self) -> Iterator[None]:
        """What is made within is the host's."""
        self.on_host = True
        try:
            yield
        finally:
            self.on_host = False

    @property
    def copies_to_host(self) -> bool:
        """Whether a tensor that goes to the host is copied. In training the names of both are the same."""
        return bool(self._saves or (self._current and self._current.evaluates))

    # --- the end

    def updated(self) -> Any:
        """Note an update: the batches of this iterator train. Return it."""
        self._open = None
        if self._current is None:
            return None
        self._current.trains = True  # perhaps a model in evaluation mode: its batches were no evaluation
        self.done = [each for each in self.done if each.loader != self._current.number]
        return next((loader for loader, use in self._uses.items() if use is self._current), None)

    def end_if_seen(self) -> None:
        """After the counted updates: go on until each moment that was asked for was seen, but not for ever."""
        self.is_over = True
        self._more += 1
        wanted = {
            kind for kind, asked in (("evaluation", self.request.evaluate), ("saving", self.request.save)) if asked
        }
        if wanted <= {moment.kind for moment in self.done} or self._more > MORE_UPDATES:
            raise Enough
