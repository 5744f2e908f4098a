"""A pipeline's schedule: 1F1B, or interleaved where a rank has several chunks of layers (Megatron-LM, schedules.py)."""

from typing import NamedTuple

from study.predictor.parallel.layout import Layout
from study.predictor.timing.replay import Task


class Pass(NamedTuple):
    """A pass of a microbatch over a stage."""

    phase: str
    stage: int
    microbatch: int

    @property
    def before(self) -> "list[Pass]":
        """Return the passes whose outputs this pass needs. Stages that do not exist need none."""
        step = -1 if self.phase == "forward" else 1
        needed = [Pass(self.phase, self.stage + step, self.microbatch)]
        return needed if self.phase == "forward" else [Pass("forward", self.stage, self.microbatch), *needed]


def warm_up(layout: Layout, place: int, microbatches: int) -> int:
    """Forward passes of a rank before its first backward pass."""
    ahead = layout.pipeline - place - 1
    if layout.chunks > 1:
        ahead = 2 * ahead + (layout.chunks - 1) * layout.pipeline
    return min(ahead, microbatches * layout.chunks)


def in_flight(layout: Layout, place: int, microbatches: int) -> int:
    """Return the most passes over a chunk of a rank whose activations wait for their backward pass."""
    return min(warm_up(layout, place, microbatches) + 1, microbatches * layout.chunks)


def order(layout: Layout, place: int, microbatches: int) -> list[Pass]:
    """Return the passes of a rank: forward passes to warm up, then one of each kind by turns, then the rest."""
    total = microbatches * layout.chunks
    forward = []
    backward = []
    for number in range(total):  # as many microbatches as stages go through a chunk, then through the next one
        group, within = divmod(number, layout.stages)
        chunk, rest = divmod(within, layout.pipeline)
        microbatch = group * layout.pipeline + rest
        forward.append(Pass("forward", chunk * layout.pipeline + place, microbatch))
        backward.append(Pass("backward", (layout.chunks - 1 - chunk) * layout.pipeline + place, microbatch))
    first = warm_up(layout, place, microbatches)
    turns = [each for pair in zip(forward[first:], backward, strict=False) for each in pair]
    return forward[:first] + turns + backward[total - first :]


def tasks(layout: Layout, microbatches: int, seconds: dict[str, list[float]]) -> list[Task]:
    """Return the passes of all ranks as tasks, each rank a stream. `seconds` are of a pass over each stage."""
    queues = [order(layout, place, microbatches)[::-1] for place in range(layout.pipeline)]
    places: dict[Pass, int] = {}
    tasks: list[Task] = []
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue and all(each in places for each in queue[-1].before if 0 <= each.stage < layout.stages):
                now = queue.pop()
                after = tuple(places[each] for each in now.before if each in places)
                places[now] = len(tasks)
                name = f"{now.phase} {now.stage}.{now.microbatch}"
                tasks.append(Task(name, f"rank {rank}", seconds[now.phase][now.stage], after))
    return tasks
