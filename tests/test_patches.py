"""Changes to libraries: they last as long as they should, and have names that the record gives."""

import contextlib
import math
import types

import torch

from study.measure import readback, roles
from study.training import patches


def test_a_patch_ends_with_its_block_and_keeps_its_name(monkeypatch):
    monkeypatch.setattr(patches, "applied", set())
    with patches.patched(math, "tau", "ours", "some_patch"):
        assert math.tau == "ours"
    assert math.tau == 2 * math.pi
    assert patches.applied == {"some_patch"}


def test_a_hook_before_updates_is_gone_when_a_step_fails():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer, calls = torch.optim.SGD([parameter], lr=0.1), []
    wrapped = types.SimpleNamespace(optimizer=optimizer)
    with contextlib.suppress(ZeroDivisionError), roles.before_each_update(wrapped, lambda: calls.append(1)):
        optimizer.step()
        raise ZeroDivisionError
    optimizer.step()
    assert calls == [1]


def test_a_config_with_odd_numbers_can_be_written():
    config = {"a": math.inf, "b": [-math.inf, math.nan], "c": 1.5, 4: None}
    assert readback._plain(config) == {"a": "never", "b": ["-inf", "nan"], "c": 1.5, "4": None}
