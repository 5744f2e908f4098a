"""Memory of families that the scoreboard does not have: cells of `drawn.py` on virtual ranks, and their predictions."""

import json
from statistics import median

import pytest
from conftest import launch
from drawn import cells

from study.predict.architecture import named
from study.records.schema import Record
from study.report import of_record

SETTINGS = ("precision", "micro_batch", "accumulation", "sequence")


def off(cell: dict, folder, cache) -> float | None:
    """Run a cell, and return how far off its predicted peak is. None: it cannot run."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(cell["config"]))
    flags = [word for name in SETTINGS for word in (f"--{name.replace('_', '-')}", str(cell[name]))]
    flags += ["--checkpointing"] * cell["checkpointing"] + ["--model", str(folder), "--init", "none", "--steps", "2"]
    flags += ["--virtual-ranks", str(cell["ranks"]), "--warmup-steps", "1"]
    run = launch(cell["arm"], folder / "run", *flags, cache=cache)
    if run.code:  # the draw has impossible trainings, such as offloading with bf16_pure
        return None
    seen = Record.model_validate(run.record)
    with pytest.MonkeyPatch.context() as patch:  # a record does not keep a model's config
        patch.setattr(of_record, "architecture", lambda _: named(str(folder)))
        return of_record.predicted(seen).peak_bytes / seen.memory.components.per_rank[0].tracked_peak_bytes - 1


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_memory_of_drawn_cells_is_predicted(tmp_path, cache):
    tried = [off(cell, tmp_path / str(place), cache) for place, cell in enumerate(cells())]
    errors = [abs(error) for error in tried if error is not None]
    assert len(errors) >= 41
    assert median(errors) < 0.001
    assert max(errors) < 0.03


def test_the_peak_of_fsdp_in_a_forward_pass_is_predicted(tmp_path, cache):
    """With few tokens, and whole gradients of the first pass, it is where the second pass gathers the last layer."""
    sizes = {"vocab_size": 500, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2}
    config = {"model_type": "llama", "num_attention_heads": 4, **sizes}
    cell = {"config": config, "arm": "fsdp2", "ranks": 4, "precision": "fp32", "checkpointing": False}
    error = off(cell | {"micro_batch": 1, "accumulation": 2, "sequence": 8}, tmp_path / "cell", cache)
    assert error == pytest.approx(0, abs=0.001)
