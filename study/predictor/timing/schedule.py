"""The tasks of an optimizer step, in the order in which the host issues them. Tasks on different streams overlap.

The order was read in PyTorch's FSDP and DDP and in DeepSpeed 0.19.8. Sharded weights are gathered a block ahead.
Gradients are reduced block by block, either beside the backward pass or while it waits.
"""

import functools
from dataclasses import dataclass, field, replace

from study.predictor.memory import deepspeed_memory, sequence, tensor
from study.predictor.memory.engine import Engine
from study.predictor.setup import Setup
from study.predictor.timing.pace import Links, OfBlocks, Pace, collective_s
from study.predictor.timing.replay import Task
from study.predictor.timing.work import Block

DDP_BUCKET_BYTES = 25 * 2**20  # torch.nn.parallel.DistributedDataParallel, bucket_cap_mb
# Bytes of memory traffic for each parameter that a GPU updates: the gradient is read for its norm and for Adam, weights
# and two moments are read and written. With bf16_cast the gradient is first copied to fp32 (6), the new weight is
# rounded (2), and the old gradient is set to zero (2).
UPDATE_BYTES = {"fp32": 36, "bf16": 36, "fp16": 36, "bf16_cast": 42, "bf16_pure": 18}


@dataclass(frozen=True)
class Sharing:
    """The weights that a rank gathers and the gradients that it reduces, by its arm."""

    stage: int  # 3: weights are gathered for each pass, as also under FSDP
    gathers_again: float  # the share of the weights that the backward pass gathers again
    reduces_each_pass: bool
    overlaps: bool  # reductions run beside the backward pass
    reduce: str  # the collective
    reduced_bytes: int  # of an element of the gradients
    gathered_bytes: int  # of an element of the weights
    bucket_bytes: float
    # DeepSpeed's stage 3: Python gathers and releases the weights of each module with a tensor of more elements.
    # Smaller tensors stay whole (stage3_param_persistence_threshold). None: Python does nothing for a module.
    hooks_above: int | None
    # Size of the groups of ranks that gather weights, in the forward and in the backward pass; and of the groups that
    # reduce gradients, before they are reduced between groups. None: all ranks.
    gathers_within: tuple[int | None, int | None] = (None, None)
    reduces_within: int | None = None

    @classmethod
    @functools.cache
    def from_setup(cls, setup: Setup) -> "Sharing":
        if setup.fsdp:
            again = 1.0 if setup.fsdp == "full_shard" else 0.0
            size = setup.product_bytes
            each_pass = setup.fsdp_by == "torch"
            sharing = cls(3, again, each_pass, True, "reduce_scatter", size, size, float("inf"), None)
            return replace(sharing, gathers_within=(setup.group, setup.group), reduces_within=setup.group)
        engine = Engine(setup)
        w = setup.weight_bytes
        if engine.stage == 0:
            return cls(0, 0.0, False, True, "all_reduce", w, w, DDP_BUCKET_BYTES, None)
        bucket = engine.bucket_elements * w
        if engine.stage < 3:
            kind = "all_reduce" if engine.reduces_by_all_reduce else "reduce"
            sharing = cls(engine.stage, 0.0, engine.stage == 2, engine.overlap, kind, w, w, bucket, None)
            return replace(sharing, gathers_within=(setup.group, None))
        again = deepspeed_memory.refetched(engine) / max(1, engine.part * engine.ranks)
        sharing = cls(
            3, min(1.0, again), True, engine.overlap, "reduce_scatter", w, w, bucket, engine.persistent_elements
        )
        return replace(sharing, gathers_within=(None, setup.second_partition))


@dataclass
class Schedule:
    """Builds the list of tasks, in the order in which they are issued."""

    setup: Setup
    links: Links
    constants: Pace
    seconds: OfBlocks
    blocks: tuple[Block, ...]
    sharing: Sharing
    host: "Host"
    tasks: list[Task] = field(default_factory=list)
    slowed_s: float = 0.0  # added to the next kernels, because collectives run beside them

    def step(self, passes: int) -> list[Task]:
        """The tasks of a step with `passes` microbatches."""
        last = None
        for number in range(passes):
            last = self.microbatch(number == passes - 1, last)
        self.update()
        return self.tasks

    def add(self, name: str, stream: str, seconds: float, *after: int | None, launched_by: int | None = None) -> int:
        awaited = tuple([place for place in after if place is not None])  # three times as fast as from a generator
        self.tasks.append(Task(name, stream, seconds, awaited, launched_by))
        return len(self.tasks) - 1

    def compute(self, block: Block, phase: str, *after: int | None) -> int:
        """Add the kernels of a pass over a block, and their launches."""
        seconds = self.seconds[block.name][phase == "backward"]
        passes = 2 if phase == "backward" and self.setup.computes_again(block.name) else 1
        hooks_s = 0.0
        if self.sharing.hooks_above is not None:
            hooks_s = block.modules_above(self.sharing.hooks_above) * self.constants.module_s * passes
        launch = self.add(f"{phase} {block.name}", "launch", seconds.launching + hooks_s)
        slowed_s = self.slowed_s
        self.slowed_s = 0.0
        if block.is_layer and self.setup.sequence_ranks * self.setup.tensor_ranks > 1:
            after = (*after, self.exchange(block, phase, passes, *after))
        return self.add(f"{phase} {block.name}", "compute", seconds.on_gpu + slowed_s, *after, launched_by=launch)

    def exchange(self, block: Block, phase: str, passes: int, *after: int | None) -> int:
        """Add what ranks that share rows or layers send each other for a layer. The layer waits for it."""
        setup = self.setup
        links = self.links.within(self.setup.sequence_ranks * self.setup.tensor_ranks)
        kind = "all_to_all"
        pairs = [(sequence.EXCHANGES * passes, passes * sequence.layer_bytes(setup))]
        if setup.tensor_ranks > 1:  # a layer that is recomputed sums as in the forward pass
            kind = "all_reduce"
            phases = [phase] + ["forward"] * (passes - 1)
            pairs = [tensor.layer_bytes(setup, each) for each in phases]
        seconds = sum(calls * collective_s(kind, size / calls, links, self.constants) for calls, size in pairs)
        return self.add(f"{kind} {block.name}", "communication", seconds, *after)

    def collective(self, kind: str, block: Block, size_bytes: float, links: Links, *after: int | None) -> int:
        seconds = self.called_s(kind, size_bytes, links)
        self.slowed_s += seconds * self.constants.contention
        return self.add(f"{kind} {block.name}", "communication", seconds, *after)

    def called_s(self, kind: str, size_bytes: float, links: Links) -> float:
        """Seconds of a collective, bucket by bucket."""
        calls = max(1, size_bytes / self.sharing.bucket_bytes)
        return calls * collective_s(kind, size_bytes / calls, links, self.constants)

    def gathered_pass(self, order: list[Block], phase: str, share: float, last: int | None) -> dict[str, int]:
        """Add a pass over blocks. Their weights are gathered one block ahead, if they are sharded."""
        ends: dict[str, int] = {}
        waits: dict[str, int | None] = {}
        links = self.links.within(self.sharing.gathers_within[phase == "backward"])

        def fetch(place: int) -> None:
            if place >= len(order) or self.sharing.stage < 3 or share == 0 or not order[place].elements:
                return
            before = ends.get(order[place - 2].name) if place >= 2 else last
            up = self.host.weights_up(self, order[place], before)
            size = order[place].elements * self.sharing.gathered_bytes * share
            waits[order[place].name] = self.collective("all_gather", order[place], size, links, before, up)

        fetch(0)
        for place, block in enumerate(order):
            fetch(place + 1)
            last = ends[block.name] = self.compute(block, phase, waits.get(block.name), last)
            if phase == "backward" and self.reducing:
                reduced = self.reduce(block, last)
                if not self.sharing.overlaps:
                    last = reduced
        return ends

    def reduce(self, block: Block, computed: int) -> int:
        size = block.trained * self.sharing.reduced_bytes
        done = computed
        group = self.sharing.reduces_within
        if self.links.ranks > 1:
            done = self.collective(self.sharing.reduce, block, size, self.links.within(group), done)
        if group and self.links.ranks > group:
            done = self.collective("all_reduce", block, size / group, self.links.between(group), done)
        return self.host.gradients_down(self, block, done)

    def microbatch(self, is_last: bool, last: int | None) -> int:
        self.reducing = is_last or self.sharing.reduces_each_pass
        ends = self.gathered_pass(list(self.blocks), "forward", 1.0, last)
        last = ends[self.blocks[-1].name]
        ends = self.gathered_pass(list(self.blocks[::-1]), "backward", self.sharing.gathers_again, last)
        return ends[self.blocks[0].name]

    def update(self) -> None:
        """Add the update, once all gradients are there. Stages 1 and 2 then gather the new weights."""
        last_of_stream = {task.stream: place for place, task in enumerate(self.tasks)}
        done = self.host.update(self, *last_of_stream.values())
        if self.sharing.stage in (1, 2) and self.links.ranks > 1:
            size = sum(block.trained for block in self.blocks) * self.sharing.gathered_bytes
            links = self.links.within(self.sharing.gathers_within[0])
            self.add("all_gather weights", "communication", self.called_s("all_gather", size, links), done)


@dataclass(frozen=True)
class Host:
    """Where the optimizer's states are, and what moves between a GPU and its host or disk for them."""

    on_host: bool
    weights_on_host: bool
    owned: float  # parameters that a rank updates
    update_s: float  # of the GPU, or of the whole host
    element_bytes: int
    bytes_per_s: float  # of the host link
    ranks: int
    disk_s: float

    def weights_up(self, schedule: Schedule, block: Block, before: int | None) -> int | None:
        if not self.weights_on_host:
            return None
        size = block.elements * self.element_bytes / self.ranks
        return schedule.add(f"weights {block.name}", "host link", size / self.bytes_per_s, before)

    def gradients_down(self, schedule: Schedule, block: Block, reduced: int) -> int:
        """A rank's part of the gradients goes to the host. With several passes, the sum so far is fetched first."""
        if not self.on_host:
            return reduced
        share = 1 if schedule.setup.accumulation == 1 else 2
        size = share * block.trained * self.element_bytes / self.ranks
        return schedule.add(f"gradients {block.name}", "host link", size / self.bytes_per_s, reduced)

    def update(self, schedule: Schedule, *after: int) -> int:
        if not self.on_host:
            return schedule.add("update", "compute", self.update_s, *after)
        done = schedule.add("update", "host", self.update_s, *after)
        if self.disk_s:  # the disk feeds the update while it runs
            done = schedule.add("optimizer states", "disk", self.disk_s, *after)
        if self.weights_on_host:
            return done
        size = self.owned * self.element_bytes
        return schedule.add("weights", "host link", size / self.bytes_per_s, len(schedule.tasks) - 1, done)
