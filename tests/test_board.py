"""Tests of the board of predictors."""

import pandas as pd
import pytest

from study.bench import board
from study.cli.outside import outside
from study.errors import Stop
from study.predictor.outside import published
from study.predictor.outside.trainings import FLAT

KEYS = [*board.tests()]


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


def test_rows_that_no_predictor_has_met_are_off_the_board(tmp_path, monkeypatch):
    for name in ("frozen.csv", "splits.toml"):
        (tmp_path / name).write_text((published.FOLDER / name).read_text())
    splits = tmp_path / "splits.toml"
    splits.write_text(splits.read_text().replace("on_board = false\n", ""))
    monkeypatch.setattr(board, "FOLDER", tmp_path)
    everything = board.tests.__wrapped__()
    splits.write_text(splits.read_text().replace('name = "lora"\n', 'name = "lora"\non_board = false\n'))
    fewer = board.tests.__wrapped__()
    assert len(everything) - len(fewer) == 129, "the rows of the split, as splits.toml counts them"


def test_no_row_of_the_board_decided_anything():
    roles = {row.role for row in published.rows() if board.key_of(row) in set(KEYS)}
    assert roles == {"test"}
    assert all(entry["fitted"] and entry["address"] for entry in board.predictors().values())


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


def test_a_wrong_file_is_a_sentence(mine):
    mine([(KEYS[0], "time", 1, 1, 1)] * 2)
    with pytest.raises(Stop, match="twice"):
        board.scores()
    mine([(KEYS[0], 1)], ("row", "predicted"))
    with pytest.raises(Stop, match="lacks the column quantity, low, high"):
        board.scores()


def test_the_command_and_simulators_on_their_own_rows(capsys):
    answer = outside(board=True, as_json=True)
    (phantora,) = [line for line in answer["on_their_rows"] if line["rows of"] == "Phantora"]
    assert phantora["numbers"] == 7
    assert phantora["ours"] < phantora["its own"] < phantora[FLAT]
    outside(board=True)
    assert "flat 40 % MFU" in capsys.readouterr().out
