"""The tasks of an optimizer step, in the order in which the host issues them. Tasks on different streams overlap.

The order was read in PyTorch's FSDP and DDP and in DeepSpeed 0.19.8. Sharded weights are gathered a block ahead.
Gradients are reduced block by block, either beside the backward pass or while it waits.
"""

from math import inf

from study.machine.gpus import GPUS, LINKS
from study.predictor import papers
from study.predictor.estimate import disk_bytes
from study.predictor.memory import sequence, tensor
from study.predictor.memory.engine import Engine
from study.predictor.setup import Setup
from study.predictor.timing.machine import Links, Machine, collective_s
from study.predictor.timing.pace import OfBlocks, Pace
from study.predictor.timing.replay import Task
from study.predictor.timing.work import Block

DDP_BUCKET_BYTES = 25 * 2**20  # torch.nn.parallel.DistributedDataParallel, bucket_cap_mb
# Bytes of memory traffic for each parameter that a GPU updates: the gradient is read for its norm and for Adam, weights
# and two moments are read and written. With bf16_cast the gradient is first copied to fp32 (6), the new weight is
# rounded (2), and the old gradient is set to zero (2).
UPDATE_BYTES = {"fp32": 36, "bf16": 36, "fp16": 36, "bf16_cast": 42, "bf16_pure": 18}
SEPARATE = ("foreach", "single_tensor")  # AdamWs of several kernels


class Schedule:
    """Builds the list of tasks, in the order in which they are issued."""

    def __init__(self, setup: Setup, machine: Machine, constants: Pace, seconds: OfBlocks, blocks: tuple[Block, ...]):
        engine = Engine(setup)
        self.setup = setup
        self.machine = machine
        self.links = machine.links(setup.ranks).between(setup.tensor_ranks)  # of ranks with the same part of each layer
        self.constants = constants
        self.seconds = seconds
        self.blocks = blocks
        self.engine = engine
        self.stage = 3 if setup.fsdp else engine.stage  # 3: weights are gathered for each pass
        self.gathers_again = 1.0  # the share of the weights that the backward pass gathers again
        self.reduces_each_pass = engine.stage > 1
        self.reduce_kind = engine.reduce_kind
        self.overlaps = engine.stage == 0 or engine.overlap  # reductions run beside the backward pass
        self.bucket_bytes: float = engine.bucket_elements * setup.reduced_bytes if engine.stage else DDP_BUCKET_BYTES
        if setup.fsdp:
            self.gathers_again = 1.0 if setup.fsdp == "full_shard" else 0.0
            self.reduces_each_pass = setup.fsdp_by == "torch" and not setup.library.fsdp_waits
            self.reduce_kind = "reduce_scatter"
            self.bucket_bytes = inf
        if engine.stage == 3:
            self.gathers_again = min(1.0, engine.refetched / max(1, (engine.part + engine.frozen_part) * engine.ranks))
            self.reduce_kind = "reduce_scatter"
        # Size of the groups of ranks that gather weights, in the forward and in the backward pass; and of the groups
        # that reduce gradients, before they are reduced between groups. None: all ranks.
        self.gathers_within = (setup.group, setup.group if setup.fsdp else setup.second_partition)
        self.reduces_within = setup.group if setup.fsdp else None
        self.parts = setup.state_ranks if self.stage else 1  # into which ranks divide what their hosts hold
        self.updates_on_host = engine.offloads or setup.fsdp_offload
        self.weights_on_host = engine.weights_home != "none" or setup.fsdp_offload
        self.tasks: list[Task] = []
        self.slowed_s = 0.0  # added to the next kernels, because collectives run beside them

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
        launch = self.add(f"{phase} {block.name}", "launch", seconds.launching + self.hooks_s(block, phase, passes))
        slowed_s, self.slowed_s = self.slowed_s, 0.0
        if block.is_layer and self.setup.sequence_ranks * self.setup.tensor_ranks > 1:
            after = (*after, self.exchange(block, phase, passes, *after))
        waits_s = self.constants.module_s * block.trained_tensors if self.setup.library.adapter_units else 0.0
        on_gpu_s = seconds.on_gpu + slowed_s + waits_s + self.copies_s(block, phase)
        return self.add(f"{phase} {block.name}", "compute", on_gpu_s, *after, launched_by=launch)

    def hooks_s(self, block: Block, phase: str, passes: int) -> float:
        """Return the seconds of Python that keeps and restores activations, gathers weights, or reduces gradients."""
        hooked = block.forward.kernels if passes == 2 and not self.setup.library.recomputes_whole_layers else 0
        seconds = self.constants.checkpoint_share * self.constants.kernel_s * hooked
        if self.setup.fsdp:
            return seconds + self.constants.unit_s * block.is_layer
        if self.engine.stage == 3:  # tensors that always stay whole need no hook
            return seconds + self.constants.module_s * block.modules_above(self.engine.persistent_elements) * passes
        reduces = self.engine.stage > 0 and phase == "backward" and self.reducing
        return seconds + self.constants.gradient_s * block.trained_tensors * reduces

    def copies_s(self, block: Block, phase: str) -> float:
        """Return the seconds in which FSDP2 copies gathered weights into tensors, and gradients out of them.

        Both are between the model's kernels (split_with_sizes_copy and chunk_cat in PyTorch's `_fsdp_collectives.py`).
        """
        if not self.setup.fsdp or self.setup.library.fsdp_views:
            return 0.0
        copied = block.elements * (self.gathers_again if phase == "backward" else 1)
        if phase == "backward" and self.reducing:
            copied += block.trained
        bandwidth = GPUS[self.machine.gpu].memory_bytes_per_s * self.constants.update_share
        return 2 * copied * self.setup.weight_bytes / bandwidth

    def exchange(self, block: Block, phase: str, passes: int, *after: int | None) -> int:
        """Add what ranks that share rows or layers exchange for a layer. Their process group has its own stream."""
        setup = self.setup
        links = self.machine.links(setup.ranks).within(setup.sequence_ranks * setup.tensor_ranks)
        kind = "all_to_all"
        pairs = [(sequence.EXCHANGES * passes, passes * sequence.layer_bytes(setup))]
        if setup.tensor_ranks > 1:  # a layer that is recomputed sums as in the forward pass
            kind = "all_reduce"
            phases = [phase] + ["forward"] * (passes - 1)
            pairs = [tensor.layer_bytes(setup, each) for each in phases]
        seconds = sum(calls * collective_s(kind, size / calls, links, self.constants) for calls, size in pairs)
        return self.add(f"{kind} {block.name}", "exchange", seconds, *after)

    def collective(self, kind: str, block: Block, size_bytes: float, links: Links, *after: int | None) -> int:
        seconds = self.called_s(kind, size_bytes, links)
        self.slowed_s += seconds * self.constants.contention
        return self.add(f"{kind} {block.name}", "communication", seconds, *after)

    def called_s(self, kind: str, size_bytes: float, links: Links) -> float:
        """Seconds of a collective, bucket by bucket."""
        calls = max(1, size_bytes / self.bucket_bytes)
        return calls * collective_s(kind, size_bytes / calls, links, self.constants)

    def gathered_pass(self, order: tuple[Block, ...], phase: str, share: float, last: int | None) -> int:
        """Add a pass over blocks. Their weights are gathered one block ahead, if they are sharded."""
        ends: dict[str, int] = {}
        waits: dict[str, int | None] = {}
        links = self.links.within(self.gathers_within[phase == "backward"])

        def fetch(place: int) -> None:
            if place >= len(order) or self.stage < 3 or share == 0 or not order[place].elements:
                return
            before = ends.get(order[place - 2].name) if place >= 2 else last
            size = order[place].elements * self.setup.weight_bytes
            up = self.offloaded("weights", order[place], size * share, before) if self.weights_on_host else None
            waits[order[place].name] = self.collective("all_gather", order[place], size * share, links, before, up)

        fetch(0)
        for place, block in enumerate(order):
            fetch(place + 1)
            last = ends[block.name] = self.compute(block, phase, waits.get(block.name), last)
            if phase == "backward" and self.reducing:
                reduced = self.reduce(block, last)
                if not self.overlaps:
                    last = reduced
        return ends[order[-1].name]

    def reduce(self, block: Block, computed: int) -> int:
        size = block.trained * self.setup.reduced_bytes
        done = computed
        group = self.reduces_within
        if self.links.ranks > 1:
            done = self.collective(self.reduce_kind, block, size, self.links.within(group), done)
        if group and self.links.ranks > group:
            done = self.collective("all_reduce", block, size / group, self.links.between(group), done)
        if not self.updates_on_host:
            return done
        sums = 1 if self.setup.accumulation == 1 else 2  # with several passes, the sum so far is fetched first
        return self.offloaded("gradients", block, sums * block.trained * self.setup.weight_bytes, done)

    def offloaded(self, name: str, block: Block, size_bytes: float, *after: int | None) -> int:
        """Move a rank's part of a block's weights or gradients between the GPU and its host."""
        return self.add(f"{name} {block.name}", "host link", self.host_link_s(size_bytes / self.parts), *after)

    def host_link_s(self, size_bytes: float) -> float:
        link = LINKS[GPUS[self.machine.gpu].host_link]
        return size_bytes / (link.bytes_per_s * self.constants.host_link_share)

    def microbatch(self, is_last: bool, last: int | None) -> int:
        self.reducing = is_last or self.reduces_each_pass
        last = self.gathered_pass(self.blocks, "forward", 1.0, last)
        return self.gathered_pass(self.blocks[::-1], "backward", self.gathers_again, last)

    def update(self) -> None:
        """Add the update, once all gradients are there. Stages 1 and 2 then gather the new weights."""
        last_of_stream = {task.stream: place for place, task in enumerate(self.tasks)}
        setup = self.setup
        owned = setup.model.trained / (setup.sharing_ranks if self.stage else 1)
        if self.updates_on_host:
            done = self.update_on_host(owned, *last_of_stream.values())
        else:
            seconds = update_s(setup, owned, self.machine.gpu, self.constants)
            launch = self.add("update", "launch", self.calls_s())
            done = self.add("update", "compute", seconds, *last_of_stream.values(), launched_by=launch)
        if self.stage in (1, 2) and self.links.ranks > 1:
            size = sum(block.trained for block in self.blocks) * setup.weight_bytes
            links = self.links.within(self.gathers_within[0])
            self.add("all_gather weights", "communication", self.called_s("all_gather", size, links), done)

    def calls_s(self) -> float:
        """Return the host's seconds for an update tensor by tensor. DeepSpeed and FSDP1 have few flat tensors."""
        flat = self.stage and not (self.setup.fsdp and not self.setup.library.fsdp_views)
        if flat or self.setup.optimizer not in SEPARATE:
            return 0.0
        return self.constants.tensor_s * sum(block.trained_tensors for block in self.blocks)

    def update_on_host(self, owned: float, *after: int) -> int:
        """Add the update of the parts of all ranks of a host, whose speed is published. A disk feeds it meanwhile."""
        local = min(self.setup.ranks, self.machine.gpus_per_node)
        done = self.add("update", "host", owned * local / 1e9 * papers.CPU_ADAM_S_PER_BILLION, *after)
        moved = disk_bytes(self.engine)
        moved_bytes = local * (moved["read_per_step"] + moved["written_per_step"])
        read = None
        if moved_bytes and self.machine.disk_bytes_per_s:
            read = self.add("optimizer states", "disk", moved_bytes / self.machine.disk_bytes_per_s, *after)
        if self.weights_on_host:
            return done
        return self.add("weights", "host link", self.host_link_s(owned * self.setup.weight_bytes), done, read)


def update_s(setup: Setup, elements: float, gpu: str, constants: Pace) -> float:
    """Return the seconds in which a GPU updates so many parameters.

    Fused kernels have the full bandwidth: so they are in the rows that constants are fitted to.
    """
    share = constants.update_share if setup.optimizer in SEPARATE else 1
    return update_bytes(setup) * elements / (GPUS[gpu].memory_bytes_per_s * share)


def update_bytes(setup: Setup) -> float:
    """Bytes of memory traffic for each parameter in an update: those of AdamW, less what smaller moments save.

    Other AdamWs read and write 21 elements, a kernel after the other, where the fused kernel needs 7. Muon's products
    are not counted.
    """
    adam, others = (papers.RECIPES[papers.recipe_of(setup.precision, name)][2] for name in ("fused", setup.optimizer))
    again = 14 * setup.state_bytes if setup.optimizer in SEPARATE else 0
    return UPDATE_BYTES[setup.precision] - 2 * (adam - others) + again
