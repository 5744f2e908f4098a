"""The ways in which properties compare a sharded training with the reference.

Each takes an adapter, a case, an empty folder of the property, and the number of the launch (0, then 1 for a property
that loads in a second launch). It raises Difference if the property fails. A script of a failure contains these
definitions.
"""

import dataclasses
import functools
import gc
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from study.conform.cases import (
    ROUNDOFF,
    Case,
    Difference,
    Reference,
    chain,
    hold,
    hold_numbers,
    hold_weights,
    in_order,
    mean_over_ranks,
    microbatch,
    new_model,
    new_training,
    one_update,
    sharded,
    whole,
)


def same_training(adapter: SimpleNamespace, case: Case, folder: Path, launch: int) -> None:
    """Losses, norms and weights are those of the reference."""
    hold(sharded(adapter, case, folder), Reference(case, dist.get_world_size()).run(), case)


def weights_kept(adapter: SimpleNamespace, case: Case, folder: Path, launch: int) -> None:
    """To build the training does not change a weight."""
    start = in_order(dict(new_model(case).named_parameters()), new_model(case))
    hold_weights(whole(adapter, new_training(adapter, case, folder), case), start, 0.0, "the weights before any update")


def ranks_agree(adapter: SimpleNamespace, case: Case, folder: Path, launch: int) -> None:
    """All ranks see the same weights, to the bit."""
    mine = sharded(adapter, case, folder).weights
    everybody: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    hold_weights(mine, everybody[0], 0.0, "the weights on this rank and on rank 0")


def repeats(adapter: SimpleNamespace, case: Case, folder: Path, launch: int) -> None:
    """A second run gives the same bits."""
    first = sharded(adapter, case, folder / "first")
    second = sharded(adapter, case, folder / "second")
    hold_numbers(second.losses, first.losses, lambda update: 0.0, "the loss in the second run")
    hold_weights(second.weights, first.weights, 0.0, "the weights of the second run")


def one_large_batch(adapter: SimpleNamespace, case: Case, folder: Path, launch: int) -> None:
    """The passes and ranks of an update give what one pass over all their rows gives."""

    class OneBatch(Reference):
        def gradients(self, update: int) -> float:
            ranks, passes = range(self.ranks), range(self.case.passes)
            parts = [microbatch(self.case, update, passed, rank) for rank in ranks for passed in passes]
            loss = self.loss(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
            loss.backward()
            return loss.item()

    hold(sharded(adapter, case, folder), OneBatch(case, dist.get_world_size()).run(), case)


def unmoved(adapter: SimpleNamespace, case: Case, folder: Path, launch: int) -> None:
    """Frozen parameters, and those with a learning rate of 0, keep their bits, and the others move."""
    model = new_model(case)
    start = in_order(dict(model.named_parameters()), model)
    fixed = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    fixed |= {name for name in start if case.groups == "zero" and name.startswith("last")}
    after = sharded(adapter, case, folder).weights
    kept = {name: start[name] for name in start if name in fixed}
    hold_weights(after, kept, 0.0, "weights that must not move")
    still = [name for name in start if name not in fixed and torch.equal(after[name], start[name])]
    if still:
        raise Difference(f"{still[0]} did not move")


def two_backward_passes(adapter: SimpleNamespace, case: Case, folder: Path, launch: int, marked: bool = True) -> None:
    """The gradients of two backward passes before a step add up. The adapter is told which is the last."""
    trainer = new_training(adapter, case, folder)
    for passed in range(2):
        batch = microbatch(case, 0, passed, dist.get_rank())
        adapter.forward_backward(trainer, batch, last=passed == 1 or not marked)
    adapter.step(trainer)
    seen = sharded(adapter, dataclasses.replace(case, updates=0), folder, trainer=trainer)
    twice = dataclasses.replace(case, passes=2)
    reference = Reference(twice, dist.get_world_size())
    for group in reference.optimizer.param_groups:
        group["lr"] *= 2  # the reference takes the mean of its two passes
    expected = reference.run(updates=1)
    hold(seen, dataclasses.replace(expected, losses=[], norms=[]), twice)


two_unmarked_passes = functools.partial(two_backward_passes, marked=False)


def second_model(adapter: SimpleNamespace, case: Case, folder: Path, launch: int) -> None:
    """A second model, built and trained beside the first, changes nothing."""
    one = new_training(adapter, case, folder / "one")
    other = new_training(adapter, case, folder / "other", seed=1)
    losses = []
    for update in range(case.updates):
        losses.append(one_update(adapter, one, case, update))
        one_update(adapter, other, case, update + 10)
    seen = sharded(adapter, dataclasses.replace(case, updates=0), folder, trainer=one)
    reference = Reference(case, dist.get_world_size()).run()
    hold(dataclasses.replace(seen, losses=losses), dataclasses.replace(reference, norms=[]), case)


def passes_between(adapter: SimpleNamespace, case: Case, folder: Path, launch: int, mode: str) -> None:
    """Passes of another mode between the updates see the weights of that moment, and change nothing."""
    trainer = new_training(adapter, case, folder)
    reference = Reference(case, dist.get_world_size())
    seen: list = []
    expected: list = []
    losses = []
    for update in range(case.updates):
        batch = microbatch(case, update + 20, 0, dist.get_rank())
        seen.append(mean_over_ranks(float(adapter.forward_backward(trainer, batch, mode=mode))))
        with torch.no_grad():
            expected.append(mean_over_ranks(reference.loss(*batch).item()))
        losses.append(one_update(adapter, trainer, case, update))
        reference.update(update)
    after = sharded(adapter, dataclasses.replace(case, updates=0), folder, trainer=trainer)
    hold(
        dataclasses.replace(after, losses=seen + losses),
        dataclasses.replace(reference.run(updates=0), losses=expected + reference.seen.losses, norms=[]),
        case,
    )


forward_between = functools.partial(passes_between, mode="forward")
evaluation_between = functools.partial(passes_between, mode="evaluate")


def weights_in_use(adapter: SimpleNamespace, case: Case, folder: Path, launch: int) -> None:
    """An evaluation uses the weights that the training says it has, and not older ones."""
    seen = sharded(adapter, case, folder)
    reference = Reference(case, 1)
    with torch.no_grad():
        for name, parameter in reference.model.named_parameters():
            parameter.copy_(seen.weights[name])
        batch = microbatch(case, case.updates, 0, dist.get_rank())
        expected = [reference.loss(*batch).item()]
    loss = [float(adapter.forward_backward(seen.trainer, batch, mode="evaluate"))]
    hold_numbers(
        loss, expected, lambda update: 2 * chain(case) * ROUNDOFF[case.precision], "the loss with these weights"
    )


def unwritten_memory(adapter: SimpleNamespace, case: Case, folder: Path, launch: int) -> None:
    """The training is right if PyTorch fills all new memory with values that are not numbers."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.utils.deterministic.fill_uninitialized_memory
    same_training(adapter, case, folder, launch)


def overflow(adapter: SimpleNamespace, case: Case, folder: Path, launch: int) -> None:
    """A step whose gradients overflow is skipped and changes no weight. The training goes on after it."""
    trainer = new_training(adapter, case, folder)
    start = whole(adapter, trainer, case)
    one_update(adapter, trainer, dataclasses.replace(case, scale=1e30), 0)
    hold_weights(whole(adapter, trainer, case), start, 0.0, "the weights after a step that overflows")
    for update in range(20):  # the scale of the loss has to fall first
        one_update(adapter, trainer, case, update)
    after = whole(adapter, trainer, case)
    if all(torch.equal(after[name], start[name]) for name in start):
        raise Difference("no weight moved in 20 updates after the one that was skipped")


def checkpoint_whole(
    adapter: SimpleNamespace, case: Case, folder: Path, launch: int, weights_only: bool = False
) -> None:
    """Save in the first launch. In the second, load into a model with other weights, and train on.

    If only the weights are loaded, the optimizer starts anew.
    """
    if launch == 0:
        seen = sharded(adapter, case, folder)
        adapter.save(seen.trainer, str(folder / "saved"))
        if dist.get_rank() == 0:
            facts = {"weights": seen.weights, "ranks": dist.get_world_size()}
            torch.save(facts, folder / "facts.pt")
        return
    facts = torch.load(folder / "facts.pt", weights_only=True)
    trainer = new_training(adapter, case, folder / "second", seed=1)
    adapter.load(trainer, str(folder / "saved"), weights_only=weights_only)
    hold_weights(whole(adapter, trainer, case), facts["weights"], 0.0, "the weights after loading")
    reference = Reference(case, facts["ranks"])
    middle = reference.run().weights
    reference.ranks = dist.get_world_size()
    if weights_only:
        reference.optimizer.state.clear()
    reference.seen.losses, reference.seen.norms = [], []
    seen = sharded(adapter, case, folder, start=case.updates, trainer=trainer)
    expected = reference.run(start=case.updates)
    hold(seen, expected, dataclasses.replace(case, updates=2 * case.updates), before=middle)


checkpoint_of_weights = functools.partial(checkpoint_whole, weights_only=True)


def frozen_memory(adapter: SimpleNamespace, case: Case, folder: Path, launch: int) -> None:
    """Frozen weights cost no gradient, master copy or optimizer state: at most half of their fp32 bytes on top."""
    gc.collect()
    before = live_bytes()
    seen = sharded(adapter, case, folder)
    seen.weights.clear()
    gc.collect()
    model = new_model(case)
    full = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    del model
    own = full // 2 if case.precision.startswith("bf16") else full
    more = live_bytes() - before
    if more > own + full // 2:
        raise Difference(f"{more:,} bytes of tensors are alive on a rank, {more / own:.2f} times those of the weights")


def live_bytes() -> int:
    """Return the bytes of all tensors that Python knows, each storage once, without bytes that are being sent."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.is_floating_point():
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
