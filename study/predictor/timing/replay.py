"""A step on a timeline: tasks on streams, each as early as its stream and the tasks that it waits for allow."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

STREAMS = ("launch", "compute", "communication", "exchange", "host link", "host", "disk")


class Task(NamedTuple):
    """Something that occupies a stream for a while. Tasks of a stream run in the order of the list."""

    name: str
    stream: str
    seconds: float
    after: tuple[int, ...] = ()  # places in the list of the tasks that must end before this one starts
    launched_by: int | None = None  # the task in which the host issues these kernels. This one ends no earlier


class Span(NamedTuple):
    """A task, and when it ran."""

    task: Task
    start_s: float
    end_s: float


def replay(tasks: Sequence[Task]) -> list[Span]:
    """Return when each task runs. Tasks only wait for earlier tasks, so one pass over the list is enough."""
    free_s: dict[str, float] = defaultdict(float)
    spans: list[Span] = []
    for task in tasks:
        start_s = free_s[task.stream]
        for place in task.after:
            start_s = max(start_s, spans[place].end_s)
        end_s = start_s + task.seconds
        if task.launched_by is not None:
            launch = spans[task.launched_by]
            start_s = max(start_s, launch.start_s)
            end_s = max(start_s + task.seconds, launch.end_s)
        free_s[task.stream] = end_s
        spans.append(Span(task, start_s, end_s))
    return spans


def length_s(spans: Sequence[Span]) -> float:
    return max((span.end_s for span in spans), default=0.0)


def busy_s(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds of the tasks of each stream, without waiting."""
    busy = dict.fromkeys(STREAMS, 0.0)
    for span in spans:
        busy[span.task.stream] += span.task.seconds
    return busy
