"""The laboratory that measures a machine: what it divides by."""

import fcntl
import os

import peaks
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from study.core.models.build import build
from study.core.models.config import load
from study.core.shapes import VOCABULARY
from study.predict.architecture import named
from study.predict.step_time import PHASES, work
from tests.predict.trainings import training_of


class Kernels(TorchDispatchMode):
    """Counts operations that are neither views nor mere memory."""

    count = 0

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        self.count += not (function.is_view or function.namespace == "prim" or "empty" in function.name())
        return function(*args, **(kwargs or {}))


def test_the_pace_of_the_host_is_divided_by_the_kernels_that_run():
    """Gradients of the pass before were added to, in 28 kernels that nothing counted."""
    model = build(load("gpt-tiny"), torch.device("cpu"))
    ids = torch.randint(0, VOCABULARY, (1, peaks.HOST_TOKENS))
    peaks.passes(model, ids)
    with Kernels() as kernels:
        peaks.passes(model, ids)
    ours = training_of(named("gpt-tiny"), micro_batch=1, sequence=peaks.HOST_TOKENS)
    assert kernels.count / peaks.PASSES == pytest.approx(sum(work(ours, phase).kernels for phase in PHASES), rel=0.05)


def test_all_bytes_are_written_past_the_cache_and_read_back(tmp_path, monkeypatch):
    written, read = [], []

    def watched_write(file, request, start):
        assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT
        assert list(tmp_path.iterdir()) == [], "not even while it runs: it may be killed"
        written.extend(request)
        return len(request)

    monkeypatch.setattr(os, "pwrite", watched_write)
    monkeypatch.setattr(os, "preadv", lambda file, into, at: read.append(at) or len(into[0]))
    assert min(peaks.by_direct_io(tmp_path, 4 * peaks.REQUEST_BYTES)) > 0
    assert read == [number * peaks.REQUEST_BYTES for number in range(4)]
    assert (len(written), len(set(written))) == (4 * peaks.REQUEST_BYTES, 256), "zeros would flatter some disks"
