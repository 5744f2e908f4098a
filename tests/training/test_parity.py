"""Equal losses: once the arms are made equal, how training is distributed changes nothing a loss curve could show.

The quick selection runs everywhere. The whole table (both tasks, accumulation 1 and 4, three precisions, seven ZeRO
arms and three of FSDP2) is marked slow: `make parity`.
"""

import sys

import pytest

from tests.conftest import RANKS, STEPS, TRAINED
from tests.training import test_train
from tests.training.test_checkpoints import FLAGS as ACCUMULATING
from tests.training.test_train import FSDP, ZERO, components

of = test_train.of  # a fixture
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}


def flags_for(task: str, precision: str, accumulation: int, sequence: int = 32, steps: int = STEPS) -> tuple:
    """Dropout on, as short as they can be without losing a feature.

    At 5e-4 the loss falls within them, but not so steeply that it amplifies rounding: at 1e-3, with four times the rows
    of accumulation, bf16 (whose weights jump when fp32 noise crosses a rounding border) differs by up to 8e-3 where
    fp32 differs by 5e-6. See reports/log.md.
    """
    flags = ("--task", task, "--steps", str(steps), "--precision", precision, "--accumulation", str(accumulation))
    flags = (*flags, "--lr", "5e-4", "--micro-batch", "4", "--sequence", str(sequence))
    return (*flags, "--train-rows", "800", "--epochs", "9")


def largest_difference(trained, arm: str, flags: tuple, ranks: int = 2) -> float:
    ddp, run = (trained(name, *flags, ranks=ranks).record for name in ("ddp", arm))
    assert run.observed.weights_checksum == ddp.observed.weights_checksum
    ours, theirs = run.loss.train, ddp.loss.train
    assert len(ours) == len(theirs) >= STEPS
    assert len(set(ours)) > len(ours) / 2, "a loss that never changes proves nothing"
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


SLOW = ("zero3_hpz", "hsdp")  # `make study` trains hsdp as well


@pytest.mark.parametrize(
    "arm", [pytest.param(arm, marks=pytest.mark.slow if arm in SLOW else ()) for arm in (*ZERO, *FSDP, "hsdp")]
)
def test_losses_equal_ddp_in_fp32(arm, trained):
    """The arms as `test_train` ran them: imdb, no accumulation."""
    assert largest_difference(trained, arm, TRAINED, RANKS.get(arm, 2)) <= TOLERANCE["fp32"]


@pytest.mark.parametrize("arm", ["zero2", "zero3", "fsdp2"])
def test_losses_equal_ddp_with_accumulation(arm, trained):
    """The arms as `test_checkpoints` ran them."""
    assert trained(arm, *ACCUMULATING).record.observed.accumulation == 2
    assert largest_difference(trained, arm, ACCUMULATING) <= TOLERANCE["fp32"]


BF16 = (*flags_for("wikitext", "bf16", 1), "--no-instruments")
CAST = (*flags_for("wikitext", "bf16_cast", 1), "--save")


def test_losses_equal_ddp_in_bf16(of, trained):
    seen = of("zero3", *BF16).observed
    assert seen.autocast == of("ddp", *BF16).observed.autocast == "bf16"
    assert seen.dtypes["weights"] == seen.dtypes["moments"] == "float32"
    assert largest_difference(trained, "zero3", BF16) <= TOLERANCE["bf16"]


def test_bf16_cast_holds_what_it_says_and_is_another_algorithm(of):
    """Weights and gradients in bf16, master and moments in fp32: in DDP by our optimizer, in ZeRO by DeepSpeed's."""
    ddp, zero2 = of("ddp", *CAST), of("zero2", *CAST)
    for record in (ddp, zero2):
        dtypes = record.observed.dtypes
        assert (dtypes["weights"], dtypes["master"], dtypes["moments"]) == ("bfloat16", "float32", "float32")
        reduced = record.traffic.per_rank[0]["all_reduce"].bytes_by_dtype["bfloat16"]
        assert reduced == pytest.approx(2 * record.observed.parameters, rel=0.001)
    held = [components(ddp)[role] for role in ("weights", "gradients", "master", "moments")]
    assert held == pytest.approx([2, 2, 4, 8], rel=0.01), "16 bytes a parameter, as the paper counts"
    # By the time of its update, DeepSpeed has let go of the bf16 gradients, and holds its part of them in fp32.
    assert (ddp.observed.dtypes["gradients"], zero2.observed.dtypes["gradients"]) == ("bfloat16", "float32")
    apart = [abs(a - b) for a, b in zip(of("ddp", *BF16).loss.train, ddp.loss.train, strict=True)]
    assert max(apart) > 1e-5, "the recipes are not the same"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_cast"])
@pytest.mark.parametrize("task", ["imdb", "wikitext"])
def test_the_whole_table(task, precision, accumulation, trained, capsys):
    flags = flags_for(task, precision, accumulation, sequence=64, steps=60)
    differences = {arm: largest_difference(trained, arm, flags) for arm in (*ZERO, *FSDP)}
    table = "  ".join(f"{arm} {value:.1e}" for arm, value in differences.items())
    with capsys.disabled():
        sys.stdout.write(f"\n{task} {precision} accumulation {accumulation}: {table}\n")
    if precision in TOLERANCE:
        assert max(differences.values()) <= TOLERANCE[precision]
