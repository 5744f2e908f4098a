"""Which cells of a protocol fit a machine, before any launch: the free T4 of Colab."""

import pytest

from study.predict.memory.loading import HOST_PROCESS_BYTES
from study.report.topics import capacity
from study.sweeps import protocol

T4_BYTES, HOST_BYTES = 15360 * 2**20, int(12.7 * 2**30)


def test_a_t4_holds_bert_large_and_its_host_not_every_offload():
    cells = [cell for cell in protocol.cells(protocol.read("colab"), "paper") if cell.value("precision") == "fp16"]
    rows = {cell.arm: capacity.room(capacity.needed_by(cell, "cuda"), T4_BYTES, HOST_BYTES) for cell in cells}
    assert list(rows) == ["single", "zero2_cpu", "zero3_cpu"]
    assert rows["single"]["fits"]
    assert not rows["zero3_cpu"]["fits"], "its host part is larger than a free runtime's 12.7 GiB"
    assert rows["zero3_cpu"]["host_memory"].endswith("of 13.6 GB")
    roomy = capacity.room(capacity.needed_by(cells[2], "cuda"), T4_BYTES, 4 * HOST_BYTES)
    assert roomy["fits"]
    tiny_gpu = capacity.room(capacity.needed_by(cells[0], "cuda"), 4 * 10**9, 4 * HOST_BYTES)
    assert not tiny_gpu["fits"]


def test_here_without_a_gpu_the_host_holds_everything(monkeypatch):
    monkeypatch.setattr(capacity, "gpus_here", list)
    rows = capacity.fitting("colab", "tiny", "fp32").to_dict("records")
    assert [row["arm"] for row in rows] == ["single", "zero2_cpu", "zero3_cpu"]
    assert all(row["gpu_memory"] == "there is no GPU" and row["fits"] for row in rows)
    assert capacity.fitting("colab", "tiny", "fp16").empty, "the tiny scale has no such cells"


def test_what_the_host_needs_has_its_process():
    cells = protocol.cells(protocol.read("colab"), "paper")
    needed = capacity.needed_by(cells[0], "cuda")
    assert needed.host_bytes == 0
    assert capacity.room(needed, T4_BYTES, int(HOST_PROCESS_BYTES))["fits"]
    assert not capacity.room(needed, T4_BYTES, int(HOST_PROCESS_BYTES) - 1)["fits"]
    assert needed.peak_bytes == pytest.approx(5.7e9, rel=0.5)
