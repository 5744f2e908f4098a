"""An engine: what a rank holds all the time and at each moment of a step, and what it sends. Each kind has a class."""

import functools
from collections.abc import Iterable, Iterator, Sequence

from study.predict.optimizer_states import moments_bytes, update_makes_bytes
from study.predict.trace.tape import Profile, Tensor
from study.predict.training import Training

# The name of a phase of the step, and what is held then besides the states.
Instant = tuple[str, dict[str, float]]


def elements_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.elements for tensor in tensors)


class Engine:
    """How a rank's training is held and sent.

    Sizes are in bytes. `part`, `owned`, `refetched`, `sub_groups`, and what ends in `elements` count elements.
    """

    # --- what is sent, for the seconds of a step. `traffic` counts the bytes as records do
    reduce_kind = "all_reduce"  # of gradients
    reduces_each_pass = False  # else only the sum of all passes of a step
    gathers_updated = False  # the update ends with a gather of the new weights
    gathered_again: float | None = None  # the share of the weights that the backward pass gathers; None: ranks have all
    update_ranks = 1  # those that divide the update
    python: str | None = None  # whose Python handles each tensor: a class in pace.toml
    # --- what leaves the device
    updates_here = True
    on_host: Sequence[str] = ()  # the roles whose bytes are on the host, or on a disk
    beside_on_host_bytes = 0
    swapped_bytes = 0  # on a disk: read and written once in a step

    # --- what each kind of engine sets
    pieces: Sequence[Tensor]  # the tensors as the optimizer has them
    master_bytes: int

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
        self.padding = 1.0  # of what is gathered and reduced: times its elements

    def share(self, tensor: Tensor) -> int:
        """The elements of a tensor that a rank keeps."""
        return tensor.elements

    @functools.cached_property
    def moments_bytes(self) -> int:
        return moments_bytes(self.training.optimizer, self.pieces, self.recipe.moment_bytes)

    @functools.cached_property
    def made_bytes(self) -> int:
        """What an update makes beside weights, gradients and moments."""
        return update_makes_bytes(self.training.optimizer, self.pieces, self.recipe.moment_bytes)

    @functools.cached_property
    def handled(self) -> dict[str, int]:
        """How many tensors Python handles in each phase of a pass, also if no rank sends anything for them."""
        if self.gathered_again is None:  # ranks have all weights: once for each gradient, in a hook
            return {"forward": 0, "backward": len(self.tensors)}
        # What is computed again is gathered again.
        training = self.training
        again = sum(training.computes_again(tensor.block) for tensor in training.tensors)
        return {"forward": len(training.tensors), "backward": len(training.tensors) + again}

    @property
    def standing(self) -> dict[str, int]:
        """Bytes that stay during the whole step. `host_`: what an offloading engine keeps with the optimizer states."""
        training = self.training
        weights = sum(self.share(tensor) * training.kept_bytes(tensor) for tensor in training.tensors)
        weights += training.scales_bytes
        return {"weights": weights, "master": self.master_bytes, "moments": self.moments_bytes}

    @property
    def after_step(self) -> dict[str, int]:
        """What stays until the next step, besides what is standing."""
        return {}

    def instants(self, profile: Profile) -> Iterator[Instant]:
        """Yield the instants of a step's last pass and of its update, each with what is held besides the states.

        Instants of the forward pass are called "backward", too.
        """
        yield from (("backward", now) for now in self.in_pass(profile))
        if self.updates_here:
            yield from (("update", now) for now in self.in_update())

    def in_pass(self, profile: Profile) -> Iterable[dict]:
        raise NotImplementedError

    def in_update(self) -> Iterable[dict]:
        raise NotImplementedError

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes by collective of an optimizer step. As in records, each collective counts its whole tensor."""
        raise NotImplementedError
