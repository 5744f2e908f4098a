"""A test over a whole table runs every case, and fails for each that fails."""

import os
import sys

import pytest

from tests import cases
from tests.cases import for_each


def test_every_case_runs_and_each_that_fails_is_named():
    ran = []

    @for_each("number", [1, 2, 3, 4, 5], ids=["one", "two", "three", "four", "five"])
    def judged(number):
        ran.append(number)
        if number == 3:
            pytest.skip("a case is no test that may be left out")
        if number == 5:
            pytest.fail("said")
        assert number != 2

    with pytest.raises(BaseExceptionGroup, match=r"^3 of 5 cases fail, 1: 'two', 2: 'three', 4: 'five'") as told:
        judged()
    assert ran == [1, 2, 3, 4, 5]
    first, *_ = told.value.exceptions
    assert first.__notes__ == ["That was the case 'two' of judged."]


def test_tables_one_over_another_are_run_through_and_named():
    @for_each("left", "ab")
    @for_each("right", {"x": 1, "y": 2})
    def judged(left, right):
        assert (left, right) != ("b", "y")

    with pytest.raises(BaseExceptionGroup, match=r"^1 of 2 cases fail, 1: 'b'") as told:
        judged()
    assert "1 of 2 cases fail, 1: 'y'" in str(told.value.exceptions[0])


def test_k_with_the_name_of_a_case_runs_it_alone(monkeypatch):
    ran = []
    both = ["loss-nan", "loss-zero"]
    judged = for_each("name", both)(lambda name: ran.append(name))
    for word, expected in (
        ("NaN", ["loss-nan"]),
        ("", ["loss-nan", "loss-zero"]),
        ("judged", ["loss-nan", "loss-zero"]),
    ):
        monkeypatch.setitem(cases.asked, "-k", word)
        ran.clear()
        judged()
        assert ran == expected
    assert {"loss-nan", "loss-zero"} <= vars(judged).keys(), "pytest asks there whether -k has a test"


@for_each("number", [1, 2])
def test_a_case_has_a_folder_patches_and_printed_lines_of_its_own(number, tmp_path, monkeypatch, capsys):
    assert [*tmp_path.iterdir()] == []
    assert "OF_A_CASE" not in os.environ
    (tmp_path / "file").touch()
    monkeypatch.setenv("OF_A_CASE", "1")
    sys.stdout.write(f"{number}")
    assert capsys.readouterr().out == f"{number}"
    sys.stdout.write("what nobody reads")


def test_a_table_without_cases_is_refused():
    with pytest.raises(AssertionError, match="no case of name"):
        for_each("name", [])
