"""Memory of families that the scoreboard does not have, on virtual ranks, and their predictions."""

import json

import pytest
from conftest import launch
from families import EXPERTS, GROUPED, TEXT

from study.predict.architecture import named
from study.records.schema import Record
from study.report import of_record

SLOW = pytest.mark.slow
WIDE = GROUPED | {"hidden_size": 128, "intermediate_size": 512}
CELLS = [  # family, its sizes, arm, ranks, precision, rows, passes and tokens
    # With few tokens, and whole gradients of the first pass, the peak is where the second pass gathers the last layer.
    ("llama", WIDE, "fsdp2", 4, "fp32", 1, 2, 8),
    # With an output matrix as large as the rest, the peak is its gradient beside a layer that is gathered ahead; and of
    # a model that scales its logits, both of them beside the matrix and the buffer that it was gathered into.
    ("llama", GROUPED | {"vocab_size": 4096}, "fsdp2", 8, "fp32", 1, 1, 32),
    ("granite", GROUPED | {"vocab_size": 4096}, "fsdp2", 8, "fp32", 1, 1, 32),
    pytest.param("smollm3", GROUPED, "zero3", 4, "bf16", 3, 2, 48, marks=SLOW),
    pytest.param("glm4", GROUPED, "zero3_hpz", 64, "bf16", 2, 2, 64, marks=SLOW),
    pytest.param("olmoe", EXPERTS, "zero3_cpu", 4, "bf16", 2, 1, 48, marks=SLOW),
    pytest.param("biogpt", TEXT, "fsdp2", 8, "bf16", 1, 2, 64, marks=SLOW),
]


@pytest.mark.parametrize(("family", "sizes", "arm", "ranks", "precision", "rows", "passes", "tokens"), CELLS)
def test_memory_of_a_family_is_predicted(
    tmp_path, cache, monkeypatch, family, sizes, arm, ranks, precision, rows, passes, tokens
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family} | sizes))
    words = f"--model {tmp_path} --init none --virtual-ranks {ranks} --steps 2 --warmup-steps 1 --micro-batch {rows} "
    words += f"--precision {precision} --accumulation {passes} --sequence {tokens}"
    run = launch(arm, tmp_path / "run", *words.split(), cache=cache)
    assert run.code == 0, run.output
    seen = Record.model_validate(run.record)
    monkeypatch.setattr(of_record, "architecture", lambda _: named(str(tmp_path)))  # a record keeps no config
    measured = seen.memory.components.per_rank[0].tracked_peak_bytes
    assert of_record.predicted(seen).peak_bytes == pytest.approx(measured, rel=0.001)
