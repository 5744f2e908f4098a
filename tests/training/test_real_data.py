"""A model of real size, on any machine."""

import pytest


@pytest.mark.slow
def test_bert_large_steps_under_stage_3(trained):
    """335 million parameters, two ranks, a machine of 24 GiB: each holds half."""
    run = trained(
        "zero3", "--model", "bert-large", "--steps", "2", "--warmup-steps", "1", "--micro-batch", "1",
        "--sequence", "32", "--train-rows", "8", "--eval-rows", "2", "--no-instruments",
    )  # fmt: skip
    seen = run.record["observed"]
    assert seen["parameters"] == 335143938
    assert max(seen["held_parameters_per_rank"]) < 0.51 * seen["parameters"]
    assert len(run.record["loss"]["train"]) == 2
    assert max(rank["host_peak_bytes"] for rank in run.record["memory"]["per_rank"]) < 10e9
