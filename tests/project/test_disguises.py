"""A condition is written as one, and not as a dictionary that is asked at once."""

import runpy

import pytest

from tests.conftest import ROOT

disguises = runpy.run_path(str(ROOT / ".ci/disguises.py"))["disguises"]
CODE = """
home = {True: "cpu"}.get(offloads, "none")  # refused
home = {True: "cpu", False: "none"}[offloads]  # refused
size = {weight_bytes: 0}.get(state_bytes)  # refused
call({1: "one"}[number])  # refused
home = "cpu" if offloads else "none"
speed = {"m": 1e6, "b": 1e9}[unit]
held = {**states, "other": 1}[role]
version = {"torch": "2.13"}.get
"""


@pytest.mark.parametrize("line", CODE.strip().splitlines())
def test_a_dictionary_in_place_of_a_condition_is_refused(line):
    assert disguises(f"import math\n{line}") == [2] * line.endswith("refused")
