"""A condition is written as one, and not as a dictionary that is asked at once."""

import runpy

import pytest

from tests.conftest import ROOT

disguises = runpy.run_path(str(ROOT / ".ci" / "disguises.py"))["disguises"]


@pytest.mark.parametrize(
    "code",
    [
        'home = {True: "cpu"}.get(offloads, "none")',
        'home = {True: "cpu", False: "none"}[offloads]',
        "size = {weight_bytes: 0}.get(state_bytes)",
        "call({1: 'one'}[number])",
    ],
)
def test_refused(code):
    assert disguises(f"import math\n{code}") == [2]


@pytest.mark.parametrize(
    "code",
    [
        'home = "cpu" if offloads else "none"',
        'speed = {"m": 1e6, "b": 1e9}[unit]',
        "held = {**states, 'other': 1}[role]",
        "version = {'torch': '2.13'}.get",
    ],
)
def test_allowed(code):
    assert disguises(code) == []
