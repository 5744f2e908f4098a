"""Where the losses of a log go: a jump that stays, a rise, a plateau, one that vanishes or begins too high."""

import math
import random

import pytest

from study.configs.oom.reading import BETWEEN_TEXTS
from study.configs.pasted.answer import answer
from tests.cases import for_each

TRAINER = "{{'loss': {loss:.4f}, 'grad_norm': {norm:.3f}, 'learning_rate': {rate:.3g}, 'epoch': {epoch:.3f}}}"
PLAIN = "step {step} | loss {loss:.4f} | gnorm {norm:.3f}"


def log(values: list[float], noise: float = 0.01, form: str = TRAINER, epochs: float = 0.9) -> str:
    """Return the lines of a log with these losses, each by a share of noise apart."""
    draw = random.Random(len(values))
    rows = [value * draw.gauss(1, noise) for value in values]
    return "\n".join(
        form.format(step=10 * step, loss=row, norm=draw.uniform(0.8, 2), rate=2e-5, epoch=epochs * step / len(rows))
        for step, row in enumerate(rows, 1)
    )


def falling(count: int, first: float = 2.4, last: float = 1.3) -> list[float]:
    return [last + (first - last) * math.exp(-step / count * 5) for step in range(count)]


LOST = {
    "loss-jumps-and-stays": [
        (falling(50) + [9.8] + 29 * [7.4], TRAINER),
        (falling(30, 10.9, 3.1) + 25 * [6.9], PLAIN),
        (falling(120, 3, 0.9) + [14.0, 11.0] + 20 * [10.6], PLAIN),
        ([1.61, 1.52, 1.49, 7.91, 8.33, 7.95], TRAINER),
    ],
    "loss-goes-up": [
        (20 * [1.9] + [1.9 + 0.15 * step for step in range(50)], TRAINER),
        (falling(40, 4, 2) + [2 * 1.04**step for step in range(40)], PLAIN),
    ],
    "loss-plateau": [(80 * [math.log(128256)], TRAINER), (30 * [math.log(50257)], PLAIN), (25 * [10.37], TRAINER)],
    "loss-vanishes": [
        ([max(7.2 * 0.8**step, 0.0004) for step in range(79)], TRAINER),
        ([max(3.1 * 0.6**step, 0.001) for step in range(40)], PLAIN),
    ],
    "loss-begins-high": [
        (falling(59, 15.7, 9.6), TRAINER),
        (falling(40, 44.0, 21.0), PLAIN),
    ],
}
CASES = [(id, *case) for id, cases in LOST.items() for case in cases]
WELL = {
    "falls": log(falling(80)),
    "falls from untrained": log(falling(80, 10.9, 3.2)),
    "flat, as a trained model": log(80 * [1.21], 0.05),
    "of single rows": log(200 * [1.2], 0.45),
    "one high line": log([*falling(40), 9.8, *falling(40, 1.4, 1.2)]),
    "a jump that heals": log(falling(40) + [5.0 * 0.7**step + 1.3 for step in range(30)]),
    "several epochs, to nothing": log([max(7.2 * 0.8**step, 0.0004) for step in range(79)], epochs=9),
    "labels with few values": log([max(0.69 * 0.8**step, 0.0004) for step in range(79)]),
    "another run below": log(falling(60, 6, 1)) + "\n" + log(falling(12, 6, 4)),
    "untrained, few lines": log(12 * [10.85]),
    "slowly, from untrained": log(falling(60, 10.84, 10.5), 0.002),
    "warms up": "\n".join(
        TRAINER.format(loss=10.85 + step % 3 / 50, norm=1.1 + step / 99, rate=1e-7 * step, epoch=step / 99)
        for step in range(1, 31)
    ),
    "a little higher at the end": log([*falling(60), *[1.3 + 0.01 * step for step in range(30)]]),
    "other rows, somewhat harder": log(30 * [0.9] + 30 * [1.4]),
    "small losses": log(40 * [0.1] + 40 * [0.3]),
    "few lines, a jump that heals": log([1.6, 1.5, 1.5, 7.9, 6.3, 1.6]),
    "few lines, somewhat harder rows": log([1.0, 0.9, 0.9, 1.9, 1.8, 1.9]),
    "two lines that are high": log([1.6, 1.5, 1.5, 7.9, 8.3]),
    "DPO": log(falling(60, 0.693, 0.001)).replace("'epoch'", "'rewards/chosen': 0.2, 'rewards/margins': 0.4, 'epoch'"),
    "GRPO": log(falling(40, 0.01, 0.01) + 30 * [2.0]).replace("'epoch'", "'reward': 0.2, 'reward_std': 0.1, 'epoch'"),
}


@pytest.mark.parametrize(("id", "values", "form"), CASES)
def test_a_log_whose_loss_goes_wrong_is_described_and_never_surely_explained(id, values, form):
    told = answer(log(values, 0.002, form))
    assert (told.id, told.sure) == (id, "possible")
    assert [each.id for each in told.found] == [id]


def with_norms(losses: list[float], norms: dict[int, float]) -> str:
    return "\n".join(
        TRAINER.format(loss=loss, norm=norms.get(at, 1.1), rate=2e-5, epoch=at / 100) for at, loss in enumerate(losses)
    )


def test_a_spike_that_comes_back_is_told_with_its_norm():
    losses = [*falling(40), 7.9, 6.1, 4.0, 2.1, 1.6, *falling(20, 1.4)]
    told = answer(with_norms(losses, {40: 38.0}))
    assert (told.id, told.sure) == ("loss-spikes", "possible")
    assert "at epoch 0.4 from 1.31 to 7.9 with grad_norm 38, and is back after 4 lines" in told.found[0].sentence
    assert answer(with_norms(losses, {40: 10.0})).found == ()
    assert answer(with_norms([*losses[:40], 1.9, *losses[45:]], {40: 38.0})).found == ()


# A loss is a logarithm: what counts is how much is lost, or that random weights are better, and not a factor.
@pytest.mark.parametrize(
    ("losses", "norms", "model", "is_lost"),
    [
        ([7.1, 7.0, 6.9, 6.8, 6.7, 6.6, 6.5, *5 * [9.8]], [*7 * [1.9], *5 * [211.0]], "", True),
        ([5.1, 5.0, 4.9, 4.8, 4.7, 4.6, 4.5, *5 * [9.8]], [*7 * [1.9], *5 * [91.0]], "", True),
        ([7.1, 7.0, 6.9, 6.8, 6.7, 6.6, 6.5, *5 * [9.8]], 12 * [1.9], "", True),
        ([*falling(40, 11, 6.5), *20 * [9.1]], 60 * [1.9], "", True),
        ([*falling(40, 11, 9.5), *20 * [11.2]], 60 * [1.9], "model: gpt2\n", True),
        ([*falling(40, 11, 9.5), *20 * [11.2]], 60 * [1.9], "", False),
        ([*falling(40, 11, 6.5), *20 * [7.4]], 60 * [1.9], "", False),
        ([*falling(40, 88, 52), *20 * [60]], 60 * [1.9], "", False),  # a sum over micro-batches
        ([7.1, 7.0, 6.9, 6.8, 6.7, 7.9, 7.9], [*5 * [1.9], *2 * [211.0]], "", False),
    ],
)
def test_a_loss_is_lost_by_how_far_it_rises(losses, norms, model, is_lost):
    lines = [PLAIN.format(step=step, loss=loss, norm=norms[step] + step % 3 / 9) for step, loss in enumerate(losses)]
    told = answer(model + "\n".join(lines)).found
    assert any(each.id in ("loss-jumps-and-stays", "loss-goes-up") for each in told) == is_lost
    later = [PLAIN.format(step=100 + step, loss=9.8, norm=211) for step in range(20)]  # another run's
    first = "\n".join(lines[: losses.index(min(losses)) + 1])
    assert answer(first + BETWEEN_TEXTS + "\n".join(later)).found == ()


@pytest.mark.parametrize("end", [math.nan, 0.0, math.inf])
def test_a_loss_that_rises_and_ends_in_nan_began_to_rise_before(end):
    """The Trainer prints 0 for NaN."""
    rises = [*falling(40), *[1.3 * 1.2**step for step in range(1, 26)]]
    told = answer(with_norms([*rises, *5 * [end]], {at: math.nan for at in range(66, 70)}))
    assert told.id == "loss-goes-up"
    assert "rises from epoch 0.43 on" in told.found[0].sentence
    assert "and then NaN" in told.found[0].sentence
    assert not any(each.id in ("loss-nan", "loss-zero") for each in told.found)
    at_once = answer(with_norms([*falling(40), *5 * [end]], {}))
    assert at_once.id != "loss-goes-up"


@for_each("case", WELL)
def test_a_log_that_is_well_has_none(case):
    assert answer(WELL[case]).found == ()


def test_the_line_and_the_numbers_are_those_of_the_log():
    told = answer(log(falling(50) + [9.8] + 29 * [7.4], 0))
    assert "at epoch 0.574 from 1.3" in told.found[0].sentence
    assert "to 9.8 and stays high (7.4 at the end" in told.found[0].sentence
    assert told.found[0].line.startswith("{'loss': 9.8000")
    assert "lower learning rate than 2e-05" in told.found[0].remedy
    plateau = answer(log([math.log(128256) + step % 3 / 1000 - 0.001 for step in range(80)], 0)).found[0]
    assert "stays at 11.76 in all 80 lines: about the logarithm of 128,256" in plateau.sentence


def test_a_log_that_was_given_is_not_asked_for():
    told = answer(log(falling(79)), "loss spikes and then stays high")
    assert not any("ten lines of the log" in question for question in told.questions)


@pytest.mark.parametrize("loss", [0.6931, 0.5, 1.0])
@pytest.mark.parametrize("keys", ["", "'rewards/chosen': 0.0, 'rewards/margins': 0.0, ", "'rewards/rejected': '0', "])
def test_a_loss_of_pairs_that_stands_still_is_told(loss, keys):
    line = f"{{'loss': {loss}, 'grad_norm': 0.0, 'learning_rate': 5e-06, {keys}'epoch': 0.0}}"
    told = answer("\n".join(line.replace("'epoch': 0.0", f"'epoch': {step / 99:.2f}") for step in range(59)))
    assert told.id == "loss-stands-still"
    assert "norm-zero" in [each.id for each in told.found]


@pytest.mark.parametrize(
    ("losses", "model", "is_told"),
    [
        ((11.93, 11.92), "Qwen/Qwen2.5-7B", True),
        ((11.934, 11.93, 11.92), "Qwen/Qwen2.5-7B", True),
        ((11.93, 11.92), "another", False),
        ((11.93, 11.4), "Qwen/Qwen2.5-7B", False),
        ((1.93, 1.92), "Qwen/Qwen2.5-7B", False),
    ],
)
def test_two_lines_are_the_logarithm_of_a_vocabulary_where_the_model_is_known(losses, model, is_told):
    lines = "".join(f"{{'loss': {loss}, 'grad_norm': 2.{at}}}\n" for at, loss in enumerate(losses))
    told = answer(f"model: {model}\n{lines}")
    assert (told.id == "loss-plateau") == is_told
    assert not is_told or "the logarithm of 152,064" in told.found[0].sentence


@pytest.mark.parametrize(
    ("before", "losses", "is_told"),
    [
        ("Some weights of the model checkpoint at ./m were not used when initializing M\n", (11.79, 11.71, 11.4), True),
        ("Loading checkpoint shards: 100%\nmodel: Qwen/Qwen2.5-7B\n", (11.95, 11.8), True),
        ("Loading checkpoint shards: 100%\nmodel: Qwen/Qwen2.5-7B\n", (11.76, 11.7), False),
        ("Loading checkpoint shards: 100%\n", (11.76, 6.7, 4.4), False),
        ("Loading checkpoint shards: 100%\n", (2.76, 2.7, 2.4), False),
        ("", (11.79, 11.71, 11.4), False),  # a training from the start begins so
    ],
)
def test_a_fine_tuning_that_begins_as_random_weights_do_has_not_loaded_its_own(before, losses, is_told):
    lines = "".join(f"{{'loss': {loss}, 'grad_norm': 2.{at}}}\n" for at, loss in enumerate(losses))
    assert ("loss-begins-random" in [each.id for each in answer(before + lines).found]) == is_told
