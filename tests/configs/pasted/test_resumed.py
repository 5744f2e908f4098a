"""A schedule or a loss that does not go on after a resume is found; a training that goes on has no sign."""

import math
from collections.abc import Callable, Iterable

import pytest

from study.configs.oom.reading import BETWEEN_TEXTS
from study.configs.pasted.answer import answer
from tests.cases import for_each

STEPS, WARM_UP, PEAK = 1000, 100, 2e-5
Of = Callable[[int], float]  # a step
RESUMED = """  Continuing training from checkpoint, will skip to saved global_step
  Continuing training from epoch 1
  Continuing training from global step {}
"""


def left(step: int) -> float:
    return max(0.0, (STEPS - step) / (STEPS - WARM_UP))


def linear(step: int) -> float:
    return PEAK * min(step / WARM_UP, left(step))


def cosine(step: int) -> float:
    return PEAK * min(step / WARM_UP, 0.5 - 0.5 * math.cos(math.pi * left(step)))


def constant(step: int) -> float:
    return PEAK * min(1, step / WARM_UP)


def falling(step: int) -> float:
    """A loss with some noise."""
    return 1.2 + 1.8 * math.exp(-step / 150) + 0.05 * math.sin(7 * step)


def trainer(steps: Iterable[int], rate: Of, loss: Of = falling) -> str:
    line = "{{'loss': {:.4f}, 'grad_norm': {:.3f}, 'learning_rate': {:.6e}, 'epoch': {:.2f}}}\n"
    return "".join(line.format(loss(step), 1 + step % 7 / 10, rate(step), step / 100) for step in steps)


def own_loop(steps: Iterable[int], rate: Of, loss: Of = falling) -> str:
    return "".join(f"step {step} loss {loss(step):.3f} lr {rate(step):.2e}\n" for step in steps)


def again(of: Of, at: int = 500) -> Of:
    """What a step has that counts from the resume on."""
    return lambda step: of(step - at)


BEFORE, AFTER = range(10, 510, 10), range(510, 710, 10)
FOUND = {
    "linear, warm-up again": ("rate-begins-again", linear, again(linear), falling),
    "cosine, warm-up again": ("rate-begins-again", cosine, again(cosine), falling),
    "constant, warm-up again": ("rate-begins-again", constant, again(constant), falling),
    "without a warm-up": ("rate-begins-again", lambda step: PEAK * (1 - step / 560), again(left), falling),
    "steps of two ranks": ("rate-falls-on-resume", linear, lambda step: linear(2 * step - 80), falling),
    "fewer steps": ("rate-falls-on-resume", cosine, lambda step: cosine(step + 400), falling),
    "other weights": ("loss-jumps-on-resume", linear, linear, again(falling)),
    "fresh states": (
        "loss-jumps-on-resume",
        cosine,
        cosine,
        lambda step: falling(step) + 0.7 * math.exp((500 - step) / 60),
    ),
    "all anew": ("rate-begins-again", linear, again(linear), again(falling)),
}


@for_each("log", [trainer, own_loop])
@for_each("case", FOUND.values(), ids=FOUND)
def test_what_does_not_go_on_after_a_resume_is_found(case, log):
    id, before, after, loss = case
    told = answer(log(BEFORE, before) + RESUMED.format(500) + log(AFTER, after, loss))
    assert (told.id, told.sure) == (id, "likely")
    assert told.found[0].line.startswith(log([510], after, loss)[:30])


@pytest.mark.parametrize(
    "line", ["resume from checkpoint-500", "Resuming from checkpoint out/500", "resume from step 500"]
)
def test_a_resume_is_seen_by_the_line_of_a_loop(line):
    told = answer(f"{trainer(BEFORE, linear)}{line}\n{trainer(AFTER, linear, lambda step: falling(step) + 1)}")
    assert told.id == "loss-jumps-on-resume"


@pytest.mark.parametrize(
    "end", ["slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2025 DUE TO TIME LIMIT ***", "JOB 7 DUE TO PREEMPTION"]
)
def test_what_a_resumed_job_shows_comes_before_how_the_job_before_it_ended(end):
    first, resumed = trainer(BEFORE, linear) + end, RESUMED.format(500) + trainer(AFTER, linear)
    ends_too = answer(f"{first}\n{resumed}{end}\n").id
    assert answer(first).id == ends_too != ""
    assert answer(f"{first}\n{trainer(AFTER, linear)}").id == ends_too  # what was printed before it, and came late
    jumps = RESUMED.format(500) + trainer(AFTER, linear, lambda step: falling(step) + 1)
    assert answer(f"{first}\n{jumps}").id == "loss-jumps-on-resume"
    assert answer(f"{first}\n{resumed}").found == ()
    assert answer(f"{first}\n{resumed}RuntimeError: mat2 must be a matrix, got 1-D tensor").id == "matrix-not-gathered"


def test_a_rate_that_is_higher_after_a_resume_may_begin_again_where_the_log_has_no_higher_one():
    at_end = trainer(range(480, 510, 10), lambda step: 4.9e-6) + RESUMED.format(500)
    answered = answer(at_end + trainer(range(510, 540, 10), lambda step: 1e-5))
    assert (answered.id, answered.sure) == ("rate-begins-again", "possible")
    assert "is 1e-05, and 4.9e-06 before" in answered.found[0].sentence
    assert answer(at_end + trainer(range(510, 540, 10), lambda step: 5.5e-6)).found == ()


def test_a_loss_as_at_the_beginning_is_told_from_a_jump():
    before = trainer(BEFORE, linear) + "Resuming from checkpoint out/checkpoint-500\n"
    assert "weights were not loaded" in answer(before + trainer(AFTER, linear, again(falling))).found[0].sentence
    jumps = trainer(AFTER, linear, lambda step: falling(step) + 0.7)
    assert "a state was not loaded" in answer(before + jumps).found[0].sentence


def test_all_of_a_training_that_begins_anew_is_told():
    text = trainer(BEFORE, linear) + RESUMED.format(500) + trainer(AFTER, again(linear), again(falling))
    assert [seen.id for seen in answer(text).found] == ["rate-begins-again", "loss-jumps-on-resume"]


HEALTHY = {
    "linear": (BEFORE, AFTER, linear),
    "cosine": (BEFORE, AFTER, cosine),
    "constant": (BEFORE, AFTER, constant),
    "in the warm-up": (range(2, 60, 2), range(60, 98, 2), linear),
    "end, linear": (range(10, 960, 10), range(960, 1001, 10), linear),
    "end, cosine": (range(10, 960, 10), range(960, 1001, 10), cosine),
    "behind its checkpoint": (range(10, 720, 10), AFTER, cosine),
    "few lines": (range(100, 901, 100), range(925, 1001, 25), linear),
    "from the first checkpoint": (range(10, 510, 10), range(20, 300, 10), linear),
    "lines left out": (range(10, 300, 10), range(700, 1001, 10), cosine),
}


@for_each("log", [trainer, own_loop])
@for_each("case", HEALTHY.values(), ids=HEALTHY)
def test_a_training_that_goes_on_has_no_sign(case, log):
    before, after, rate = case
    text = log(before, rate) + RESUMED.format(after[0]) + log(after, rate)
    assert answer(text).found == ()
    assert answer(log(before, rate) + log(after, rate)).found == ()


def test_without_a_line_on_a_resume_two_logs_are_not_joined():
    assert answer(trainer(BEFORE, linear) + trainer(AFTER, linear, lambda step: falling(step) + 0.5)).found == ()


@pytest.mark.parametrize("log", [trainer, own_loop])
def test_a_warm_up_in_the_middle_is_seen_without_a_line_on_a_resume(log):
    """Only as possible, within one file, and where steps go on. A schedule that restarts by plan only rises."""
    before, after = log(BEFORE, linear), log(AFTER, again(linear), lambda step: falling(step) + 0.7)
    told = answer(f"{before}***** Running training *****\n{after}").found
    assert [(each.id, each.sure) for each in told] == [
        ("rate-begins-again", "possible"),
        ("loss-jumps-on-resume", "possible"),
    ]
    assert "resume" not in " ".join(each.sentence for each in told)
    for well in (
        before + BETWEEN_TEXTS + after,
        before + log(AFTER, again(left)),
        after + before,
        before + "".join(after.splitlines(True)[:2]),
    ):
        assert answer(well).found == ()


def test_too_few_lines_beside_a_resume_are_asked_for():
    lines = trainer(range(480, 510, 10), linear).splitlines(keepends=True)
    after = trainer(range(510, 540, 10), again(linear))
    cut = answer("".join(lines[1:]) + "Resuming from checkpoint out/checkpoint-500\n" + after)
    assert cut.found == ()
    assert "three lines of the log before the resume" in cut.questions[0]
    assert answer("".join(lines) + "Resuming from checkpoint out/checkpoint-500\n" + after).id == "rate-begins-again"
