"""Predictions of 94 trainings on three H200 and an H100: kinds of memory, and what an advice says of smaller cards."""

from dataclasses import replace

import pytest

from study.core.gpus import GPUS, Gpu, gpu_named
from study.predict.advise import fits_on
from study.predict.allocator import CONTEXT_BYTES, outside_bytes
from study.predict.prediction import estimate, memory_kinds, step_time
from study.predict.step_time import Hardware
from study.predict.training import Training
from study.records import metrics, runs
from study.records.runs import Run
from study.report.of_record import training_of
from tests.conftest import ROOT

MACHINES = ("h200", "h200-2", "h200-3", "h100")


@pytest.fixture(scope="module")
def cells() -> list[tuple[Run, Training]]:
    done = runs.load([ROOT / "reports" / name / "runs" for name in MACHINES]).done
    return [(run, training) for run in done if (training := training_of(run.record))]


def gpu_of(run: Run) -> Gpu:
    return GPUS[gpu_named(run.record.hardware.devices[0].name)]


def allocator(run: Run) -> tuple[int, int, float]:
    """Return what was allocated and reserved, and what was outside. Other processes were beside the virtual ranks."""
    memory = run.record.memory.per_rank[0]
    alone = not run.record.is_virtual
    outside = memory.device_used_bytes - memory.peak_reserved_bytes if alone else CONTEXT_BYTES
    return memory.peak_allocated_bytes, memory.peak_reserved_bytes, outside


def test_a_run_with_a_feature_of_cuda_alone_has_no_prediction_of_its_sibling(cells):
    record = next(run.record for run, _ in cells if run.record.arm == "zero3").model_copy(deep=True)
    assert training_of(record)
    record.observed.deepspeed["zero_optimization"]["zero_quantized_weights"] = True
    assert training_of(record) is None


def test_tracked_peaks_and_their_parts_are_predicted(cells):
    """DDP has its buckets on one GPU as well, and Accelerate runs no autocast under FSDP2: 12 to 17 % before."""
    assert len(cells) == 94
    counted = [(run, training) for run, training in cells if metrics.components(run.record)]
    assert len(counted) == 91, "one was interrupted before the instruments had counted, and two had none"
    for run, training in counted:
        measured = run.record.memory.components.per_rank[0]
        assert estimate(training).peak_bytes == pytest.approx(measured.tracked_peak_bytes, rel=0.005), run.record.run_id
        if run.record.arm in ("ddp", "fsdp2", "fsdp2_grad_op"):
            # Inputs are predicted as `other`; on a GPU they arrive in the forward pass, as activations.
            for group in ("activations other", "gradients", "gathered_weights", "temporaries"):
                predicted, seen = (
                    sum(parts.get(part, 0) for part in group.split())
                    for parts in (estimate(training).at_peak, measured.at_peak)
                )
                assert predicted == pytest.approx(seen, rel=0.01, abs=2e6), (run.record.run_id, group)


def test_kinds_of_memory_over_what_was_measured(cells, golden):
    lines = ["predicted over measured: allocated, reserved"]
    for run, training in cells:
        if run.record.observed.allocator:
            continue  # predicted is what the allocator's defaults reserve
        allocated, reserved, outside = allocator(run)
        kinds = memory_kinds(training, gpu_of(run))
        if not run.record.is_virtual:
            assert outside_bytes(training) == pytest.approx(outside, rel=0.03), run.record.run_id
        over = f"{kinds.allocated / allocated:.2f}, {kinds.reserved / reserved:.2f}"
        lines.append(f"{run.folder.relative_to(ROOT / 'reports')}: {over}")
    golden("gpus-memory.txt", "\n".join(lines))


def test_seconds_of_a_host_of_which_nothing_is_known(cells):
    """Beside four hosts. Predicted over measured; within their interval are as many as is written."""
    for machine, where, words in (
        ("h200-2", "h200-2", "{} to {} times that, and {} of {} steps"),
        ("h200", "h200-2", "first set {} to {}, and {} of {}"),
        ("h200-3", "h200-3", "{} to {} times what was measured, and {} of {} steps"),
        ("h100", "h100", "is {} to {} times, and {} of {} steps"),
    ):
        text = " ".join((ROOT / "reports" / where / "README.md").read_text().split())
        over, within = [], 0
        for run, training in cells:
            untimed = run.record.is_virtual or run.record.arm == "zero3_nvme"
            if untimed or run.folder.relative_to(ROOT / "reports").parts[0] != machine:
                continue
            seconds = metrics.value(run.record, "step_s")
            step = step_time(training, Hardware(gpu=gpu_of(run), gpus_per_node=1))
            over.append(step.seconds / seconds)
            within += step.low_s <= seconds <= step.high_s
        assert words.format(f"{min(over):.2f}", f"{max(over):.2f}", within, len(over)) in text


@pytest.mark.parametrize(("share", "says"), [(1.0, {"no"}), (1.05, {"no", "only just"})])
def test_no_advice_says_that_it_fits_where_it_would_have_run_out_of_memory(cells, share, says):
    """A card with a byte less than the tensors and what is outside; and one with so little more that holes fill it."""
    for run, training in cells:
        allocated, _, outside = allocator(run)
        memory_bytes = int(share * (allocated + outside)) - 1
        gpu = gpu_of(run)
        card = replace(gpu, memory_bytes=memory_bytes)
        assert fits_on(card, estimate(training).peak_bytes) in says, run.record.run_id
