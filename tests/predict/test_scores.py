"""Scores of predictions against published measurements."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import pytest

from study.predict.outside import published, scores
from study.predict.outside.predicting import of_row, training_of
from study.predict.outside.scores import Number
from study.predict.setup import Library, Setup
from study.predict.step_time import Machine
from study.report.advice import accuracy


def test_every_number_of_the_rows_is_stored_once():
    rows = [(row.key, name, float(f"{value:.6g}")) for row in published.rows() for name, value in row.measured.items()]
    assert [(each.key, each.quantity, each.measured) for each in scores.numbers()] == rows


def test_stored_predictions_are_those_of_the_code():
    """On the smallest row for each setting that is not the usual one."""
    stored = {(each.key, each.quantity): each for each in scores.numbers()}
    usual = {field.name: field.default for form in (Setup, Library, Machine) for field in fields(form)}
    kinds = {}
    for row in sorted(published.rows(), key=lambda row: -(row.params or math.inf)):
        if (row.params or 0) < 2e9 and (training := training_of(row)) and training.machine:
            about = vars(training.setup) | vars(training.setup.library) | vars(training.machine)
            kinds |= {name: row for name in usual if about[name] != usual[name]}
    assert {"fsdp", "quantized", "keeps_cache"} <= kinds.keys()
    for row in {row.key: row for row in kinds.values()}.values():
        for quantity, predicted in of_row(row).items():
            for name, value in vars(predicted).items():
                assert getattr(stored[row.key, quantity], name) == pytest.approx(value, rel=1e-5), row


def test_scores_are_what_they_are_by_hand():
    about = {"key": "k", "set": "known", "source": "s", "quantity": "time", "measured": 1.0}
    score = scores.score([Number(ours=ours, **about) for ours in (1.05, 0.8, 0.5, None)])
    assert (score["numbers"], score["refused"]) == (4, 0.25)
    assert (score["median error"], score["near"], score["too low"]) == (pytest.approx(0.2), 2 / 3, 2 / 3)
    assert [*scores.score([Number(**about)])] == ["numbers", "refused"]


def test_first_predictions_have_the_published_figures():
    lines = {(line["quantity"], line["set"]): line for line in scores.by_set()}
    first = [round(lines["time", str(number)]["first median error"], 3) for number in range(2, 7)]
    assert first == [0.309, 0.311, 0.32, 0.202, 0.237]
    words = accuracy()
    assert f"half are predicted within {lines['time', '6']['median error']:.0%}" in words


def test_writing_keeps_first_predictions_and_gives_a_new_set_its_own(tmp_path, monkeypatch):
    rows = [row for row in published.rows() if row.set == "lora_5" and row.measured]
    row = min(rows, key=lambda row: row.params or 0)
    later = row.model_copy(update={"set": "lora_7", "notes": "another"})
    kept = tuple(each for each in scores.numbers() if each.key == row.key)
    monkeypatch.setattr(published, "rows", lambda: (row, later))
    monkeypatch.setattr(scores, "FILE", tmp_path / "predictions.csv")
    monkeypatch.setattr(scores, "numbers", scores.functools.cache(lambda: kept))
    monkeypatch.setattr(scores, "ProcessPoolExecutor", lambda mp_context: ThreadPoolExecutor())
    scores.store_predictions()
    again = published.read(scores.FILE, Number)
    assert [each.first for each in again if each.set == "lora_5"] == [each.first for each in kept]
    assert all(each.first == each.ours for each in again if each.set == "lora_7")
