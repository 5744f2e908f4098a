"""Real reviews and real text, on machines that have them beside the repository; BERT-large on any machine."""

import pytest
from conftest import SHARED

needs_data = pytest.mark.skipif(
    not (SHARED / "data" / "imdb").is_dir(), reason=f"real data and vocabularies are not there: {SHARED}"
)


@pytest.mark.slow  # what it trains on is held to the rows in test_tasks
@needs_data
def test_real_reviews_train(trained):
    """The source document's rows, from a folder, with BERT's vocabulary. So small a model learns them by heart."""
    run = trained(
        "single", "--data", str(SHARED / "data" / "imdb"), "--model", "bert-tiny", "--sequence", "64",
        "--train-rows", "48", "--epochs", "10",
        "--tokenizer", str(SHARED / "models" / "bert-large-uncased"), "--dropout", "0", "--no-instruments",
    )  # fmt: skip
    made = run.record
    losses = made["loss"]["train"]
    assert made["observed"]["data_source"].startswith("imdb ")
    assert len(losses) == 60
    assert sum(losses[:20]) / 20 > 0.6
    assert sum(losses[-20:]) / 20 < 0.3


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
