"""Tests of the board of predictors."""

import pandas as pd
import pytest

from study.bench import board
from study.cli.outside import outside
from study.predictor.library import Library
from study.predictor.outside.described import library_of
from study.predictor.outside.trainings import FLAT, compare


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A board with one predictor; return the function that writes its predictions."""
    monkeypatch.setattr(board, "BOARD", tmp_path)
    entry = {"name": "mine", "file": "mine.csv", "fitted": "nothing"}
    monkeypatch.setattr(board, "predictors", lambda: {"mine": entry})

    def write(lines: list[tuple], columns: tuple[str, ...] = board.COLUMNS) -> None:
        pd.DataFrame(lines, columns=[*columns]).to_csv(tmp_path / "mine.csv", index=False)
        board.predictions.cache_clear()

    yield write
    board.predictions.cache_clear()


def test_our_predictions_are_those_of_the_code():
    """On the smallest row of each way in which a library differs."""
    ours = board.predictions("ours").dropna(subset=["predicted"]).groupby("row")
    rows = {key: row for key, row in board.tests().items() if key in ours.groups and (row.params or 0) < 2e9}
    usual, kinds = vars(Library()), {}
    for key, row in sorted(rows.items(), key=lambda each: -(each[1].params or 2e9)):
        kinds |= {name: key for name, value in vars(library_of(row)).items() if value != usual[name]}
    assert {"adapter_units", "fused_adapters", "bitsandbytes", "experts_loop"} <= kinds.keys()
    for key in set(kinds.values()):
        predicted = {each.quantity: each.predicted for each in compare(rows[key]).quantities}
        assert dict(ours.get_group(key)[["quantity", "predicted"]].values).items() <= predicted.items(), key


def test_refusing_costs_as_much_as_being_off_by_all(mine):
    numbers = board.measured().query("quantity == 'time'").head(10)
    exact = [
        (each.row, "time", each.measured, each.measured * 0.9, each.measured * 1.1) for each in numbers.itertuples()
    ]
    mine(exact)
    (score,) = board.scores()
    assert (score["answered"], score["median of answered"], score["in interval"]) == (10, 0, 1)
    assert score["error"] == pytest.approx(score["refused"]) == pytest.approx(1 - 10 / score["numbers"])
    mine([(row, name, 3 * value, None, None) for row, name, value, _, _ in exact])
    assert board.scores()[0]["error"] == 1, "off by 200 % counts as 100 %"


def test_the_order_is_of_rows_of_one_table(mine):
    table = board.measured().query("quantity == 'time'").groupby("table").filter(lambda rows: len(rows) > 3)
    table = table[table["table"] == table["table"].iloc[0]]
    mine([(each.row, "time", each.measured, None, None) for each in table.itertuples()])
    assert board.scores()[0]["in order"] == 1
    mine([(each.row, "time", 1 / each.measured**9, None, None) for each in table.itertuples()])
    assert board.scores()[0]["in order"] < 0.5


def test_the_command_and_simulators_on_their_own_rows(capsys):
    answer = outside(board=True, as_json=True)
    (phantora,) = [line for line in answer["on_their_rows"] if line["rows of"] == "Phantora"]
    assert phantora["numbers"] == 7
    assert phantora["ours"] < phantora["its own"] < phantora[FLAT]
    outside(board=True)
    assert "flat 40 % MFU" in capsys.readouterr().out
