"""Memory of families that the scoreboard does not have, on virtual ranks, and their predictions."""

import json
from statistics import median

import pytest
from conftest import launch
from families import EXPERTS, GROUPED, SEES, TEXT

from study.predict.architecture import named
from study.records.schema import Record
from study.report import of_record

SETTINGS = ("precision", "micro_batch", "accumulation", "sequence")
CELLS = [  # family, its sizes, arm, ranks, then SETTINGS
    ("smollm3", GROUPED, "zero3", 4, "bf16", 3, 2, 48),
    ("glm4", GROUPED, "zero3_hpz", 64, "bf16", 2, 2, 64),
    ("starcoder2", GROUPED, "zero1_cpu", 64, "bf16_cast", 2, 1, 32),
    ("cohere2", GROUPED, "zero2_cpu", 64, "bf16_cast", 1, 2, 32),
    ("nemotron", GROUPED, "fsdp2", 2, "bf16", 1, 2, 48),
    ("olmoe", EXPERTS, "zero3_cpu", 4, "bf16", 2, 1, 48),
    ("biogpt", TEXT, "fsdp2", 8, "bf16", 1, 2, 64),
    ("roberta", TEXT, "zero2", 4, "bf16_pure", 2, 1, 48),
    ("electra", TEXT | {"embedding_size": 64}, "ddp", 64, "fp32", 3, 2, 64),
    ("deit", SEES, "zero3", 64, "bf16", 1, 2, 64),
]


def off(folder, cache, family: str, sizes: dict, arm: str, ranks: int, *settings) -> float:
    """Run a cell, and return how far off its predicted peak is."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": family} | sizes))
    flags = ["--model", str(folder), "--init", "none", "--virtual-ranks", str(ranks)]
    flags += ["--steps", "2", "--warmup-steps", "1"]
    for name, value in zip(SETTINGS, settings, strict=True):
        flags += [f"--{name.replace('_', '-')}", str(value)]
    run = launch(arm, folder / "run", *flags, cache=cache)
    assert run.code == 0, run.output
    seen = Record.model_validate(run.record)
    with pytest.MonkeyPatch.context() as patch:  # a record does not keep a model's config
        patch.setattr(of_record, "architecture", lambda _: named(str(folder)))
        return of_record.predicted(seen).peak_bytes / seen.memory.components.per_rank[0].tracked_peak_bytes - 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_memory_of_other_families_is_predicted(tmp_path, cache):
    errors = [abs(off(tmp_path / cell[0], cache, *cell)) for cell in CELLS]
    assert median(errors) < 0.001
    assert max(errors) < 0.03


def test_the_peak_of_fsdp_in_a_forward_pass_is_predicted(tmp_path, cache):
    """With few tokens, and whole gradients of the first pass, it is where the second pass gathers the last layer."""
    sizes = GROUPED | {"hidden_size": 128, "intermediate_size": 512}
    error = off(tmp_path / "cell", cache, "llama", sizes, "fsdp2", 4, "fp32", 1, 2, 8)
    assert error == pytest.approx(0, abs=0.001)
