"""All that is predicted of a training, from one engine: its memory, the three kinds of it, and the time of a step."""

import functools

from study.core.gpus import Gpu
from study.predict.allocator import MemoryKinds, kinds_of
from study.predict.engines import engine_of
from study.predict.estimate import Estimate, estimate_of
from study.predict.estimate import memory as memory_of
from study.predict.step_time import Hardware, StepTime, inside_nodes, step_of
from study.predict.training import Training


class Prediction:
    """What is predicted of a training. Each part is made when it is first asked for."""

    def __init__(self, training: Training):
        self.training = training
        self.engine = engine_of(training)
        self._kinds: dict[Gpu | None, MemoryKinds] = {}

    @classmethod
    @functools.cache
    def of(cls, training: Training) -> "Prediction":
        """The prediction of a training, which is kept: callers must not change it."""
        return cls(training)

    @functools.cached_property
    def memory(self) -> Estimate:
        return estimate_of(self.engine)

    def most_bytes(self, when: str) -> int:
        """The most that a rank holds in a pass ("backward") or in the update; at the peak, if there is no such time."""
        _, instants, _ = memory_of(self.engine, self.training.profile)
        sizes = [(moment, int(sum(held.values()))) for moment, held in instants]
        most = max(size for _, size in sizes)
        return self.memory.peak_bytes - most + max((size for moment, size in sizes if moment == when), default=most)

    def kinds(self, gpu: Gpu | None = None) -> MemoryKinds:
        """Memory as PyTorch and nvidia-smi show it. With a GPU, PyTorch gives back unused memory near its limit."""
        if gpu not in self._kinds:  # a replay of the allocator takes long
            self._kinds[gpu] = kinds_of(self.engine, self.memory, gpu)
        return self._kinds[gpu]

    def inside_nodes(self, machine: Hardware) -> dict[str, int]:
        return dict(inside_nodes(self.engine, machine))

    def step(self, machine: Hardware) -> StepTime:
        return step_of(self.engine, machine)


def estimate(training: Training) -> Estimate:
    """Memory and traffic of the first rank in one optimizer step."""
    return Prediction.of(training).memory


def memory_kinds(training: Training, gpu: Gpu | None = None) -> MemoryKinds:
    """The three numbers that people read as a GPU's memory."""
    return Prediction.of(training).kinds(gpu)


def step_time(training: Training, machine: Hardware) -> StepTime:
    """The time of an optimizer step on a machine, with its interval."""
    return Prediction.of(training).step(machine)
