"""The ways in which properties compare a sharded training with the reference.

Each takes what builds a sharded training of a case, a case, and the number of the launch (0, then 1 for a property that
loads in a second launch). It raises Difference if the property fails. A script of a failure contains these definitions.
"""

import dataclasses
import functools

import torch
import torch.distributed as dist

from study.conform.cases import (
    ROUNDOFF,
    Build,
    Case,
    Difference,
    Reference,
    chain,
    first_weights,
    hold,
    hold_numbers,
    hold_weights,
    mean_over_ranks,
    microbatch,
    new_model,
)


def same_training(build: Build, case: Case, launch: int) -> None:
    """Losses, norms and weights are those of the reference."""
    hold(build(case).run(), Reference(case).run(), case)


def weights_kept(build: Build, case: Case, launch: int) -> None:
    """To build the training does not change a weight."""
    hold_weights(build(case).weights(), first_weights(case), 0.0, "the weights before any update")


def ranks_agree(build: Build, case: Case, launch: int) -> None:
    """All ranks see the same weights, to the bit."""
    mine = build(case).run().weights()
    everybody: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    hold_weights(mine, everybody[0], 0.0, "the weights on this rank and on rank 0")


def repeats(build: Build, case: Case, launch: int) -> None:
    """A second run gives the same bits."""
    first = build(case).run()
    weights = first.weights()
    second = build(case).run()
    hold_numbers(second.losses, first.losses, lambda update: 0.0, "the loss in the second run")
    hold_weights(second.weights(), weights, 0.0, "the weights of the second run")


def one_large_batch(build: Build, case: Case, launch: int) -> None:
    """The passes and ranks of an update give what one pass over all their rows gives."""

    class OneBatch(Reference):
        def gradients(self, update: int) -> float:
            ranks, passes = range(self.ranks), range(self.case.passes)
            parts = [microbatch(self.case, update, passed, rank) for rank in ranks for passed in passes]
            loss = self.loss(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
            loss.backward()
            return loss.item()

    hold(build(case).run(), OneBatch(case).run(), case)


def unmoved(build: Build, case: Case, launch: int) -> None:
    """Frozen parameters, and those with a learning rate of 0, keep their bits, and the others move."""
    start = first_weights(case)
    fixed = {name for name in start if case.groups == "zero" and name.startswith("last")}
    fixed |= {name for name, parameter in new_model(case).named_parameters() if not parameter.requires_grad}
    after = build(case).run().weights()
    kept = {name: start[name] for name in start if name in fixed}
    hold_weights(after, kept, 0.0, "weights that must not move")
    still = [name for name in start if name not in fixed and torch.equal(after[name], start[name])]
    if still:
        raise Difference(f"{still[0]} did not move")


def two_backward_passes(build: Build, case: Case, launch: int, marked: bool = True) -> None:
    """The gradients of two backward passes before a step add up. The adapter is told which is the last."""
    training = build(case)
    for passed in range(2):
        training.one_pass(microbatch(case, 0, passed, dist.get_rank()), last=passed == 1 or not marked)
    training.adapter.step(training.trainer)
    twice = dataclasses.replace(case, passes=2)
    reference = Reference(twice)
    for group in reference.optimizer.param_groups:
        group["lr"] *= 2  # the reference takes the mean of its two passes
    reference.update(0)
    reference.losses = []
    hold(training, reference, twice)


two_unmarked_passes = functools.partial(two_backward_passes, marked=False)


def second_model(build: Build, case: Case, launch: int) -> None:
    """A second model, built and trained beside the first, changes nothing."""
    one = build(case)
    other = build(case, seed=1)
    for update in range(case.updates):
        one.update(update)
        other.update(update + 10)
    one.norms = []
    hold(one, Reference(case).run(), case)


def passes_between(build: Build, case: Case, launch: int, mode: str) -> None:
    """Passes of another mode between the updates see the weights of that moment, and change nothing."""
    training, reference = build(case), Reference(case)
    between: list[float] = []
    expected: list[float] = []
    for update in range(case.updates):
        batch = microbatch(case, update + 20, 0, dist.get_rank())
        between.append(mean_over_ranks(training.one_pass(batch, mode=mode)))
        with torch.no_grad():
            expected.append(mean_over_ranks(reference.loss(*batch).item()))
        training.update(update)
        reference.update(update)
    training.losses, training.norms = between + training.losses, []
    reference.losses = expected + reference.losses
    hold(training, reference, case)


forward_between = functools.partial(passes_between, mode="forward")
evaluation_between = functools.partial(passes_between, mode="evaluate")


def weights_in_use(build: Build, case: Case, launch: int) -> None:
    """An evaluation uses the weights that the training says it has, and not older ones."""
    training = build(case).run()
    weights = training.weights()
    reference = Reference(case, 1)
    batch = microbatch(case, case.updates, 0, dist.get_rank())
    with torch.no_grad():
        for name, parameter in reference.model.named_parameters():
            parameter.copy_(weights[name])
        expected = reference.loss(*batch).item()
    share = 2 * chain(case) * ROUNDOFF[case.precision]
    loss = training.one_pass(batch, mode="evaluate")
    hold_numbers([loss], [expected], lambda update: share, "the loss with these weights")


def unwritten_memory(build: Build, case: Case, launch: int) -> None:
    """The training is right if PyTorch fills all new memory with values that are not numbers."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.utils.deterministic.fill_uninitialized_memory
    same_training(build, case, launch)


def checkpoint_whole(build: Build, case: Case, launch: int, weights_only: bool = False) -> None:
    """Save in the first launch. In the second, load into a model with other weights, and train on.

    If only the weights are loaded, the optimizer starts anew.
    """
    training = build(case, seed=launch)
    path, saved = training.folder / "facts.pt", str(training.folder / "saved")
    if launch == 0:
        facts = {"weights": training.run().weights(), "ranks": dist.get_world_size()}
        training.adapter.save(training.trainer, saved)
        if dist.get_rank() == 0:
            torch.save(facts, path)
        return
    facts = torch.load(path, weights_only=True)
    training.adapter.load(training.trainer, saved, weights_only=weights_only)
    hold_weights(training.weights(), facts["weights"], 0.0, "the weights after loading")
    reference = Reference(case, facts["ranks"]).run()
    middle = reference.weights()
    if weights_only:
        reference.optimizer.state.clear()
    reference.ranks, reference.losses, reference.norms = dist.get_world_size(), [], []
    seen, expected = training.run(start=case.updates), reference.run(start=case.updates)
    hold(seen, expected, dataclasses.replace(case, updates=2 * case.updates), before=middle)


checkpoint_of_weights = functools.partial(checkpoint_whole, weights_only=True)


def checkpoint_changes_nothing(build: Build, case: Case, launch: int) -> None:
    """A training that was saved before its first update goes on as the reference does."""
    training = build(case)
    training.adapter.save(training.trainer, str(training.folder / "saved"))
    hold(training.run(), Reference(case).run(), case)
