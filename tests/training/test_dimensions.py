"""Ranks that read the same rows: of a sequence (Ulysses), or of each layer (AutoTP), each has a part."""

import pytest
import torch
from conftest import DECODERS_ALONE, launch, traceback_of_ours
from test_virtual import assert_equal
from wire import wire_bytes_per_rank

from study.core.models.step import FOLLOWING, IGNORED
from study.records.schema import Record
from study.report.of_record import predicted
from study.training.data import part_of_rows

STEPS = 8
SHORT = ("--task", "wikitext", "--model", "llama-micro", "--sequence", "32", "--steps", str(STEPS), "--eval-rows", "8")
ROWS = 8  # of a pass, for both ranks together
TOGETHER, ALONE = ("--micro-batch", str(ROWS)), ("--micro-batch", str(ROWS // 2))
ARMS = [pytest.param(arm, marks=pytest.mark.slow if arm == "zero2_tp" else ()) for arm in DECODERS_ALONE]
TRUTH = {  # stage, ranks that share a sequence, ranks that divide layers
    "zero3_ulysses": (3, 2, None),
    "zero1_tp": (1, None, 2),
    "zero2_tp": (2, None, 2),
}


@pytest.mark.parametrize("arm", ARMS)
def test_losses_equal_ddp_on_the_same_rows(arm, trained):
    """Two ranks share eight rows, where DDP's have four each; the evaluation is over the same rows, too."""
    ours, ddp = trained(arm, *SHORT, *TOGETHER).record, trained("ddp", *SHORT, *ALONE).record
    seen = ours["observed"]
    assert (seen["stage"], seen["sequence_ranks"], seen["tensor_ranks"]) == TRUTH[arm]
    assert (seen["ranks_counted"], seen["rows_per_step"], seen["tokens_per_step"]) == (2, ROWS, ROWS * 32)
    assert seen["weights_checksum"] == ddp["observed"]["weights_checksum"]
    assert len(set(ddp["loss"]["train"])) == STEPS
    assert ours["loss"]["train"] == pytest.approx(ddp["loss"]["train"], abs=1e-5)
    assert ours["loss"]["eval"][-1]["eval_loss"] == pytest.approx(ddp["loss"]["eval"][-1]["eval_loss"], abs=1e-5)


@pytest.mark.parametrize("arm", ARMS)
def test_what_is_moved_and_held_is_what_is_predicted_and_what_the_kernel_counts(arm, trained):
    _compare(trained(arm, *SHORT, *TOGETHER).record)


@pytest.mark.parametrize("precision", ["bf16_pure", pytest.param("bf16_cast", marks=pytest.mark.slow)])
def test_gradients_of_shared_rows_are_reduced_in_fp32(precision, trained):
    """Those of weights in 16 bits, too: DeepSpeed's `seq_parallel_communication_data_type`."""
    record = trained("zero3_ulysses", *SHORT, *TOGETHER, "--precision", precision).record
    counted = _compare(record)
    assert counted["reduce_scatter"].bytes == pytest.approx(4 * record["observed"]["parameters"], rel=0.01)


def _compare(loaded):
    record = Record.model_validate(loaded)
    expected = predicted(record)
    counted = {kind: count for kind, count in record.traffic.per_rank[0].items() if count.bytes > 100}  # not flags
    assert {kind: count.bytes for kind, count in counted.items()} == pytest.approx(expected.traffic, rel=0.01)
    if record.arm == "zero3_ulysses":
        assert counted["all_to_all"].calls == 2 * 4 * 4, "passes, layers, and what attention takes and makes"
    peak_bytes = record.memory.components.per_rank[0].tracked_peak_bytes
    assert expected.peak_bytes == pytest.approx(peak_bytes, rel=0.02)
    for wire, kernel in zip(wire_bytes_per_rank(record), record.traffic.kernel_bytes_written, strict=True):
        assert wire > 1e6
        assert kernel == pytest.approx(wire, rel=0.01)
    return counted


@pytest.mark.parametrize("arm", ARMS)
def test_a_virtual_rank_is_a_real_one(arm, trained):
    virtual = trained(arm, *SHORT, *TOGETHER, "--virtual-ranks", "2")
    assert_equal(virtual.record, trained(arm, *SHORT, *TOGETHER).record)


def test_several_groups_share_rows(trained):
    """Accelerate 1.15 takes the number of groups for 1 unless it is told: four ranks did not start."""
    seen = trained("zero3_ulysses", *SHORT, *TOGETHER, "--virtual-ranks", "4").record["observed"]
    assert (seen["ranks"], seen["sequence_ranks"]) == (4, 2)


@pytest.mark.parametrize(
    ("arm", "flags", "words"),
    [
        (
            "zero1_tp",
            (*SHORT[:4], "--virtual-ranks", "2", "--init", "none"),
            "AutoTP cannot divide layers without values",
        ),
        ("zero3_ulysses", (), "DeepSpeed refuses: 'BertConfig' object has no attribute 'num_key_value_heads'"),
        ("zero3_ulysses", (*SHORT[:4], "--sequence", "33"), "cuts rows into 2 equal parts (got --sequence 33)"),
        ("zero1_tp", ("--task", "wikitext"), "DeepSpeed refuses: AutoTP not supported for model"),
        ("ddp", ("--precision", "fp8"), "Accelerate refuses: Using `fp8` precision requires"),
        ("zero1_tp", (*SHORT[:4], "--virtual-ranks", "3"), "the same rows to groups of 2 ranks (got 3)"),
    ],
)
def test_what_is_refused(arm, flags, words, tmp_path, cache):
    """If a library refuses, the record quotes its error, without a traceback."""
    run = launch(arm, tmp_path / "run", "--steps", "6", *flags, cache=cache)
    assert run.code != 0
    assert words in run.output
    assert not traceback_of_ours(run.output)
    assert run.record["status"] == "failed"


def test_parts_of_rows_have_the_tokens_after_them():
    """The token after a part's last one is the first of the next part. The last token of the row has none."""
    rows = {"input_ids": torch.arange(2 * 3 * 8).view(1, 2, 3, 8)}
    first, second = (part_of_rows(rows, part, 2) for part in (0, 1))
    assert torch.cat([first["input_ids"], second["input_ids"]], -1).equal(rows["input_ids"])
    assert first[FOLLOWING].equal(rows["input_ids"][..., 1:5])
    assert second[FOLLOWING][..., :-1].equal(rows["input_ids"][..., 5:])
    assert (second[FOLLOWING][..., -1] == IGNORED).all()
    assert second["position_ids"].tolist() == [[[[4, 5, 6, 7]]] * 2]
