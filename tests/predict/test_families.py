"""Memory of families that the scoreboard does not have, on virtual ranks, and their predictions."""

import json

import pytest

from study.predict.architecture import named
from study.report import of_record
from tests.conftest import launch
from tests.predict.families import SMALL

CELLS = [pytest.param(cell, marks=[pytest.mark.slow] * cell.pop("slow", 0)) for cell in SMALL["cells"]]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell["config"]["model_type"])
def test_memory_of_a_family_is_predicted(tmp_path, cache, monkeypatch, cell):
    (tmp_path / "config.json").write_text(json.dumps(cell["config"]))
    words = f"--model {tmp_path} --init none --steps 2 --warmup-steps 1 {cell['flags']}"
    run = launch(cell["arm"], tmp_path / "run", *words.split(), cache=cache)
    assert run.code == 0, run.output
    monkeypatch.setattr(of_record, "architecture", lambda _: named(str(tmp_path)))  # a record keeps no config
    measured = run.record.memory.components.per_rank[0].tracked_peak_bytes
    assert of_record.predicted(run.record).peak_bytes == pytest.approx(measured, rel=0.001)
