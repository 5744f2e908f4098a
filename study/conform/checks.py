"""The ways in which properties compare a sharded training with the reference. A script of a failure contains them."""

import dataclasses
import functools
from pathlib import Path

import torch
import torch.distributed as dist

from study.conform.cases import (
    Build,
    Case,
    Reference,
    Unequal,
    Weights,
    bound_of_a_pass,
    first_weights,
    hold,
    hold_numbers,
    hold_weights,
    microbatch,
    new_model,
    rows_between,
)


def same_training(build: Build, case: Case, mode: str = "train") -> None:
    hold(build(case, mode=mode).run(), Reference(case).run(), case)


# Half of each loss comes from a pass of the same rows through the module inside the wrapper.
inner_forward = functools.partial(same_training, mode="inner")


def weights_kept(build: Build, case: Case) -> None:
    hold_weights(build(case).weights(), first_weights(case), 0.0, "the weights before any update")


def ranks_agree(build: Build, case: Case) -> None:
    mine = build(case).run().weights()
    everybody: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    hold_weights(mine, everybody[0], 0.0, "the weights on this rank and on rank 0")


def unmoved(build: Build, case: Case) -> None:
    """Frozen parameters, and those with a learning rate of 0, keep their bits."""
    start, after = first_weights(case), build(case).run().weights()
    for name, parameter in new_model(case).named_parameters():
        if not parameter.requires_grad or (case.groups == "zero" and name.startswith("last")):
            hold_weights(after, {name: start[name]}, 0.0, "weights that must not move")


def unfrozen_later(build: Build, case: Case) -> None:
    """A layer is frozen in the first update, and trains from the second on."""
    both = build(case), Reference(case)
    for training in both:
        for update in range(case.updates):
            training.model.get_submodule("blocks.0").requires_grad_(update > 0)
            training.update(update)
    hold(*both, case)


def frozen_weights_leave(build: Build, case: Case) -> None:
    """At the end of a backward pass a rank holds no more of the frozen layers than at its beginning."""
    last, *_, first = build(case).run().model.held  # type: ignore[misc]
    if first > last:
        raise Unequal(f"the rank holds {last} frozen elements before the backward pass, and {first} after it")


def two_backward_passes(build: Build, case: Case, marked: bool = True) -> None:
    """The gradients of two backward passes before a step add up. The adapter is told which is the last."""
    # --- one update of two passes, of which the adapter believes that each is a whole one
    training = build(case)
    for passed in range(2):
        training.one_pass(microbatch(case, 0, passed, dist.get_rank()), last=passed == 1 or not marked)
    training.adapter.step(training.trainer)
    twice = dataclasses.replace(case, passes=2)
    reference = Reference(twice)
    for group in reference.optimizer.param_groups:
        group["lr"] *= 2  # the reference takes the mean of its two passes
    reference.update(0)
    reference.losses = []  # nor has the training any: its passes were called from here
    hold(training, reference, twice)


two_unmarked_passes = functools.partial(two_backward_passes, marked=False)


def passes_between(build: Build, case: Case, mode: str) -> None:
    """Passes of another mode between the updates see the weights of that moment, and change nothing."""
    training, reference = build(case), Reference(case)
    between = []
    expected = []
    for update in range(case.updates):
        batch = rows_between(case, update)
        between.append(training.one_pass(batch, mode=mode))
        expected.append(reference.evaluated(batch))
        training.update(update)
        reference.update(update)
    # The losses of the passes between are held to the same bounds as those of updates.
    training.losses, training.norms = between + training.losses, []
    reference.losses = expected + reference.losses
    hold(training, reference, case)


forward_between = functools.partial(passes_between, mode="forward")
evaluation_between = functools.partial(passes_between, mode="evaluate")


def each_update(build: Build, case: Case) -> None:
    """Each update is that of one process with the weights before it, so the bound is that of few updates."""
    training, reference = build(case), Reference(case)
    short = dataclasses.replace(case, updates=2)  # the momentum has the rounding of earlier updates
    for update in range(case.updates):
        before = training.weights()
        begin_at(reference, before)
        training.forget()
        training.update(update)
        reference.update(update)
        try:
            hold(training, reference, short, start=before)
        except Unequal as difference:
            raise Unequal(f"update {update + 1} of {case.updates}: {difference}") from None


def begin_at(reference: Reference, weights: Weights) -> None:
    with torch.no_grad():
        for name, master in reference.master.named_parameters():
            master.copy_(weights[name])
    reference.use(weights)
    reference.forget()


def moving_scale(build: Build, case: Case) -> None:
    """Updates that overflow are skipped by all ranks, the scale of the loss moves, and the others are right."""
    training, reference = build(case), Reference(case)
    short = dataclasses.replace(case, updates=1)
    scales = []
    made = 0
    for update in range(case.updates):
        before = training.weights()
        training.forget()
        training.update(update)
        scales.append(float(training.adapter.loss_scale(training.trainer)))
        if same_bits(before, training.weights()):
            continue
        made += 1
        begin_at(reference, before)
        reference.update(update)
        hold(training, reference, short, start=before)
    if made < case.updates // 4 or len(set(scales)) < 2:
        raise Unequal(f"{made} of {case.updates} updates were made, with the scales {scales}")


def same_bits(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def not_finite(build: Build, case: Case) -> None:
    """A gradient of one rank is not finite: all ranks skip the update, all fail, or no weight is finite."""
    if dist.get_world_size() == 1:
        case = dataclasses.replace(case, infinite_rank=0)
    training, reference = build(case), Reference(case)
    for update in range(case.infinite):
        training.update(update)
        reference.update(update)
    before = training.weights()
    error = None
    try:
        training.update(case.infinite)
        after = training.weights()
    except Exception as raised:
        error, after = raised, {}
    seen: list = [None] * dist.get_world_size()
    dist.all_gather_object(seen, "fails" if error else _fate(before, after))
    if set(seen) == {"skips"}:
        training.forget()
        reference.forget()
        for update in range(case.infinite + 1, case.updates):
            training.update(update)
            reference.update(update)
        hold(training, reference, case)
    elif set(seen) not in ({"fails"}, {"is not finite"}):
        raise Unequal(
            f"a gradient of rank {case.infinite_rank} is not finite, and what each rank does: {', '.join(seen)}"
        )


def _fate(before: Weights, after: Weights) -> str:
    finite = [bool(tensor.isfinite().all()) for tensor in after.values()]
    if same_bits(before, after):
        return "skips"
    return "updates finite weights" if any(finite) else "is not finite"


def mode_between(build: Build, case: Case) -> None:
    """Evaluations between the updates leave them in training mode."""
    training, reference = build(case), Reference(case)
    for update in range(case.updates):
        batch = rows_between(case, update)
        loss = training.one_pass(batch, mode="evaluate")
        expected = []
        for is_training in (False, True):  # an adapter may leave the mode to its library
            reference.model.train(is_training)
            expected.append(reference.evaluated(batch))
        nearest = min(expected, key=lambda each: abs(each - loss))
        hold_numbers([loss], [nearest], lambda _: 8 * bound_of_a_pass(case), "an evaluation's loss")
        training.update(update)
        reference.update(update)
    hold(training, reference, case)


def random_numbers(build: Build, case: Case) -> None:
    """No number that the script draws comes twice: a wrapper that seeds again gives each update the same dropout."""
    training = build(case)
    drawn = []
    for update in range(case.updates):
        training.update(update)
        drawn.append(torch.rand(()).item())
        training.one_pass(rows_between(case, update), mode="evaluate")
        drawn.append(torch.rand(()).item())
    if len({*drawn}) < len(drawn):
        raise Unequal(f"random numbers that were drawn between updates and evaluations come again: {drawn}")


def weights_in_use(build: Build, case: Case) -> None:
    """An evaluation uses the weights that the training says it has, and not older ones."""
    training = build(case).run()
    weights = training.weights()
    reference = Reference(case)  # one process with these weights: each rank holds its own loss to it
    batch = microbatch(case, case.updates, 0, dist.get_rank())
    reference.use(weights)
    seen = training.one_pass(batch, mode="evaluate")
    hold_numbers([seen], [reference.evaluated(batch)], lambda _: bound_of_a_pass(case), "the loss with these weights")


def unwritten_memory(build: Build, case: Case) -> None:
    """The training is right if PyTorch fills all new memory with values that are not numbers."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.utils.deterministic.fill_uninitialized_memory
    same_training(build, case)


def checkpoint_whole(build: Build, case: Case, weights_only: bool = False) -> None:
    """Save in the first launch. In the second, in the same folder, load into another model, and train on."""
    facts_file = Path("facts.pt")
    if not facts_file.exists():
        training = build(case)
        facts = {"weights": training.run().weights(), "ranks": dist.get_world_size()}
        training.adapter.save(training.trainer, "saved")
        if dist.get_rank() == 0:
            torch.save(facts, facts_file)
        return
    # --- the second launch, perhaps with another number of ranks
    facts = torch.load(facts_file, weights_only=True)
    training = build(case, seed=1)  # with other weights: those of the checkpoint must replace them
    training.adapter.load(training.trainer, "saved", weights_only=weights_only)
    hold_weights(training.weights(), facts["weights"], 0.0, "the weights after loading")
    # --- the reference trains through, and changes its number of ranks where the checkpoint was
    reference = Reference(case, facts["ranks"]).run()
    middle = reference.weights()
    if weights_only:
        reference.optimizer.state.clear()  # as a new optimizer begins
    reference.ranks = dist.get_world_size()
    reference.forget()
    seen, expected = training.run(start=case.updates), reference.run(start=case.updates)
    # Rounding has grown over the updates of both launches, and weights moved since the checkpoint.
    hold(seen, expected, dataclasses.replace(case, updates=2 * case.updates), start=middle)


checkpoint_of_weights = functools.partial(checkpoint_whole, weights_only=True)


def checkpoint_changes_nothing(build: Build, case: Case) -> None:
    training = build(case)
    training.adapter.save(training.trainer, "saved")
    hold(training.run(), Reference(case).run(), case)
