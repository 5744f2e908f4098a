"""An engine: what a rank holds all the time and at each moment of a step, and what it sends. Each kind has a class."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from study.predict.optimizer_states import moments_bytes, update_makes_bytes
from study.predict.trace.tape import Profile, Tensor
from study.predict.training import Training

# The name of a phase of the step, and what is held then besides the states.
Instant = tuple[str, dict[str, float]]


def elements_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.elements for tensor in tensors)


class Sent(NamedTuple):
    """What a rank sends in a phase, in all passes of a step."""

    phase: str
    kind: str  # of a collective, or "host"
    size_bytes: float
    ranks: int = 1
    apart: int = 1  # 1: they are neighbours. n: each n-th rank, one of each group of n


class Blocks(NamedTuple):
    """Sizes of the blocks that a training takes of PyTorch's allocator beside the tensors of a pass."""

    standing: list[int]  # the states before the first step
    moments: list[int]  # they come with the first update
    in_pass: list[int]  # what an engine holds during a pass besides its states, as at the peak of the backward
    update: list[int]  # the copies that an update makes at once
    in_other_streams: Sequence[int] = ()  # they share no memory with the stream of the passes
    until_update: Sequence[int] = ()  # that each pass leaves to the update
    made_once: Sequence[int] = ()  # while the states are made. The cache keeps its memory, in pieces
    # Buffers of a further stream in their order; 0 gives one back. None: there is no such stream.
    gathers: Sequence[tuple[object, int]] | None = None


class Engine:
    """How a rank's training is held and sent.

    Sizes are in bytes, but for `part`, and for what ends in `elements`.
    """

    # --- for the seconds of a step
    python: str | None = None  # whose Python handles each tensor: a class in pace.toml
    # --- what leaves the device
    updates_here = True
    on_host: Sequence[str] = ()  # the roles whose bytes are on the host, or on a disk
    leaves_gradients = False  # where autograd makes them, until the update
    swapped_bytes = 0  # on a disk: read and written once in a step

    # --- what each kind of engine sets
    pieces: Sequence[Tensor]  # the tensors as the optimizer has them
    master_bytes: int
    part: int  # elements that a rank updates

    def __init__(self, training: Training):
        self.training = training
        self.recipe, self.placement = training.recipe, training.placement
        self.ranks = self.placement.sharing_ranks  # that divide a tensor's states
        self.passes = training.batch.passes
        self.weight_bytes = training.weight_bytes  # of an element of the weights in a pass, and of their gradients
        self.reduced_bytes = self.weight_bytes  # of an element of a gradient in a bucket, and on its way
        self.tensors = tuple(tensor for tensor in training.tensors if tensor.trains)
        self.elements = elements_of(self.tensors)
        self.all_elements = elements_of(training.tensors)  # whether they train or not

    def share(self, tensor: Tensor) -> int:
        """The elements of a tensor that a rank keeps."""
        return tensor.elements

    @property
    def moments_bytes(self) -> int:
        return moments_bytes(self.training.optimizer, self.pieces, self.recipe.moment_bytes)

    @property
    def made_bytes(self) -> int:
        """What an update makes beside weights, gradients and moments."""
        return update_makes_bytes(self.training.optimizer, self.pieces, self.recipe.moment_bytes)

    @property
    def handled(self) -> dict[str, float]:
        """How many tensors Python handles in each phase of a pass, also if no rank sends anything for them."""
        # Ranks have all weights: once for each gradient, in a hook.
        return {"forward": 0, "backward": len(self.tensors)}

    @property
    def standing(self) -> dict[str, int]:
        """Bytes that stay during the whole step. `host_`: what an offloading engine keeps with the optimizer states."""
        training = self.training
        weights = sum(self.share(tensor) * training.kept_bytes(tensor) for tensor in training.tensors)
        weights += training.scales_bytes
        return {"weights": weights, "master": self.master_bytes, "moments": self.moments_bytes}

    @property
    def beside_on_host(self) -> dict[str, int]:
        """What an engine that offloads has on a GPU's host besides the roles of `on_host`."""
        return {}

    @property
    def after_step(self) -> dict[str, int]:
        """What stays until the next step, besides what is standing."""
        return {}

    def instants(self, profile: Profile) -> Iterator[Instant]:
        """Yield the instants of a step's last pass and of its update, each with what is held besides the states.

        Instants of both passes are called "backward".
        """
        yield from (("backward", now) for now in self.in_pass(profile))
        if self.updates_here:
            yield from (("update", now) for now in self.in_update())

    def in_pass(self, profile: Profile) -> Iterable[dict]:
        raise NotImplementedError

    def in_update(self) -> Iterable[dict]:
        raise NotImplementedError

    def blocks(self, states: dict[str, int], moments: list[int]) -> Blocks:
        """The blocks of a rank: one for each kind of state, and two moments, unless an engine has more of them.

        The states are those that stay on the device from step to step, without the moments.
        """
        raise NotImplementedError

    def blocks_of_tensors(self, states: dict[str, int]) -> Blocks:
        """With the tensors as a rank has their moments."""
        optimizer, recipe = self.training.optimizer, self.recipe
        pieces = self.pieces if self.updates_here else ()  # with offloading the host has the moments, and updates
        # Copies of an update: gradients in fp32 for the master copy, and the roots of all second moments at once.
        update = [recipe.master_bytes * piece.elements for piece in pieces if recipe.master_bytes]
        if optimizer == "foreach":
            update += [recipe.moment_bytes * piece.elements for piece in pieces]
        both = [moments_bytes(optimizer, [piece], recipe.moment_bytes) // 2 for piece in pieces]
        return Blocks([*states.values()], [size for size in both for _ in range(2)], [], update)

    def blocks_of_vectors(self, states: dict[str, int], moments: list[int], roles: Iterable[str]) -> Blocks:
        """With flat vectors, and with what is held of these roles at the peak of the backward pass."""
        times = [*self.instants(self.training.profile)]
        in_pass = max((now for when, now in times if when == "backward"), key=lambda held: sum(held.values()))
        update_bytes = max((max(now.values()) for when, now in times if when == "update"), default=0)
        held = [int(in_pass.get(role, 0)) for role in roles]
        return Blocks([*states.values()], moments, held, [int(update_bytes)])

    def sent(self) -> Iterator[Sent]:
        """Yield what a rank sends in a step, but for what ranks that share rows exchange."""
        raise NotImplementedError

    def sent_to_host(self, reductions: int) -> Iterator[Sent]:
        """Yield the gradients to an optimizer on the host, and the new weights from it."""
        if "moments" not in self.on_host:
            return
        # P2 counts 2 bytes of a parameter down and 2 up in a step, the least that is possible. A sum that is fetched,
        # added to and stored again exceeds it (async_accumulate_grad_in_cpu_via_gpu).
        trained_bytes = self.elements * self.weight_bytes / self.ranks
        sums = min(2, self.passes)  # with several passes, the sum so far is fetched first
        yield Sent("backward", "host", reductions * sums * trained_bytes)
        if "weights" not in self.on_host:
            yield Sent("update", "host", trained_bytes)

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes by collective of an optimizer step. As in records, each collective counts its whole tensor."""
        moved: Counter[str] = Counter()
        for each in self.sent():
            if each.kind != "host":
                moved[each.kind] += int(each.size_bytes)
        return moved
