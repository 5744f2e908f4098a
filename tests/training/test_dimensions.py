"""Ranks that read the same rows: of a sequence (Ulysses), or of each layer (AutoTP), each has a part."""

import pytest

from study.report.of_record import predicted
from tests.conftest import launch, table, traceback_of_ours
from tests.training.test_virtual import ROWS, SHARING, SHORT
from tests.wire import wire_bytes_per_rank

TRUTH = table("training/truth.toml")["shares"]
ARMS = [pytest.param(arm, marks=pytest.mark.slow if arm == "zero2_tp" else ()) for arm in TRUTH]


@pytest.mark.parametrize("arm", ARMS)
def test_losses_equal_ddp_on_the_same_rows(arm, trained):
    """Two ranks share eight rows, where DDP's have four each; the evaluation is over the same rows, too."""
    ours, ddp = trained(arm, *SHARING).record, trained("ddp", *SHORT, "--micro-batch", str(ROWS // 2)).record
    seen = ours.observed
    assert f"{seen.stage} {seen.sequence_ranks} {seen.tensor_ranks}" == TRUTH[arm]
    assert (seen.ranks_counted, seen.rows_per_step, seen.tokens_per_step) == (2, ROWS, ROWS * 32)
    assert seen.weights_checksum == ddp.observed.weights_checksum
    assert len(set(ddp.loss.train)) == 8
    assert ours.loss.train == pytest.approx(ddp.loss.train, abs=1e-5)
    assert ours.loss.eval[-1].eval_loss == pytest.approx(ddp.loss.eval[-1].eval_loss, abs=1e-5)


# Of the second also the gradients are reduced in fp32: seq_parallel_communication_data_type.
@pytest.mark.parametrize("flags", [(), ("--precision", "bf16_pure")])
def test_what_ulysses_moves_and_holds_is_what_is_predicted(flags, trained):
    record = trained("zero3_ulysses", *SHARING, *flags).record
    expected = predicted(record)
    counted = {kind: count for kind, count in record.traffic.per_rank[0].items() if count.bytes > 100}  # not flags
    assert {kind: count.bytes for kind, count in counted.items()} == pytest.approx(expected.traffic, rel=0.01)
    assert counted["all_to_all"].calls == 2 * 4 * 4, "passes, layers, and what attention takes and makes"
    assert counted["reduce_scatter"].bytes == pytest.approx(4 * record.observed.parameters, rel=0.01)
    peak_bytes = record.memory.components.per_rank[0].tracked_peak_bytes
    assert expected.peak_bytes == pytest.approx(peak_bytes, rel=0.02)


@pytest.mark.parametrize("arm", ARMS)
def test_what_is_counted_is_what_the_kernel_counts(arm, trained):
    record = trained(arm, *SHARING).record
    for wire, kernel in zip(wire_bytes_per_rank(record), record.traffic.kernel_bytes_written, strict=True):
        assert wire > 1e6
        assert kernel == pytest.approx(wire, rel=0.01)


def test_several_groups_share_rows(trained):
    """Accelerate 1.15 takes the number of groups for 1 unless it is told: four ranks did not start."""
    seen = trained("zero3_ulysses", *SHARING, "--virtual-ranks", "4").record.observed
    assert (seen.ranks, seen.sequence_ranks) == (4, 2)


@pytest.mark.parametrize(("arm", "flags", "words"), table("training/refused.toml")["launches"])
def test_what_is_refused(arm, flags, words, tmp_path, cache):
    """If a library refuses, the record quotes its error, without a traceback."""
    run = launch(arm, tmp_path / "run", "--steps", "6", *flags.split(), cache=cache)
    assert run.code != 0
    assert words in run.output
    assert not traceback_of_ours(run.output)
    assert run.record.status == "failed"
