"""The board: predictors beside each other on the same published rows. reports/outside/board/README.md has the rules.

A predictor is a CSV file of its predictions and an entry in predictors.toml. Scoring reads these and predicts nothing.
"""

import csv
import functools
import tomllib
from collections import defaultdict
from itertools import combinations

import pandas as pd

from study.errors import Stop
from study.predictor.outside.published import FOLDER, Row, read_rows, rows
from study.predictor.outside.trainings import FLAT, Compared, compare_all, key_of

BOARD = FOLDER / "board"
COLUMNS = ("row", "quantity", "predicted", "low", "high")
LIMITS = {"memory": 0.1, "time": 0.3}
DIFFERENT = 0.02  # speeds that are nearer have no order


@functools.cache
def tests() -> dict[str, Row]:
    """Return the rows of the board by key: frozen rows, and own rows that decided no constant and no interval.

    Splits that no predictor has met stay off the board until they are scored: splits.toml says `on_board = false`.
    """
    path = FOLDER / "frozen.csv"
    with path.open(newline="") as file:
        splits = [line["split"] for line in csv.DictReader(file)]
    off = _splits_off_the_board()
    frozen = [row for row, split in zip(read_rows(path), splits, strict=True) if split not in off]
    return {key_of(row): row for row in [*frozen, *(row for row in rows() if row.role == "test")]}


def _splits_off_the_board() -> set[str]:
    content = tomllib.loads((FOLDER / "splits.toml").read_text())
    return {split["name"] for split in content["split"] if not split.get("on_board", True)}


@functools.cache
def measured() -> pd.DataFrame:
    """Return the published numbers of the board, a line each."""
    lines = []
    for key, row in tests().items():
        about = (row.source, row.model, row.gpu, row.n_gpus, row.seq)
        known = {"row": key, "source": row.source, "table": str(about), "rows_per_s": row.rows_per_s}
        numbers = {"memory": row.memory_bytes, "time": row.step_s}
        lines += [known | {"quantity": name, "measured": value} for name, value in numbers.items() if value]
    return pd.DataFrame(lines)


@functools.cache
def predictors() -> dict[str, dict]:
    """Return the entries of predictors.toml by name."""
    return {each["name"]: each for each in tomllib.loads((BOARD / "predictors.toml").read_text())["predictor"]}


@functools.cache
def predictions(name: str) -> pd.DataFrame:
    """Return a predictor's predictions beside what was measured. Numbers that it refuses are None."""
    file = BOARD / predictors()[name]["file"]
    try:
        content = pd.read_csv(file)
    except (OSError, ValueError) as error:
        raise Stop(f"{file} cannot be read ({error})", "write it as board/README.md says") from None
    if missing := [column for column in COLUMNS if column not in content]:
        raise Stop(f"{file.name} lacks the column {', '.join(missing)}", f"give {', '.join(COLUMNS)}")
    if content.duplicated(["row", "quantity"]).any():
        raise Stop(f"{file.name} predicts a number twice", "give one line for each row and quantity")
    both = measured().merge(content[[*COLUMNS]], on=["row", "quantity"], how="left")
    both["error"] = both["predicted"] / both["measured"] - 1
    return both


def scores() -> list[dict]:
    """Return the score of each predictor on all rows, for each quantity. The lowest error is the best."""
    rows = []
    for quantity in LIMITS:
        lines = [_score(name, quantity) for name in predictors()]
        lines = [{"quantity": quantity} | line for line in lines if line["answered"]]
        rows += sorted(lines, key=lambda line: line["error"])
    return rows


def _score(name: str, quantity: str) -> dict:
    """Return a predictor's figures. A refused number counts as off by 100 %, and so does what is off by more."""
    both = predictions(name)
    numbers = both[both["quantity"] == quantity]
    off = numbers["error"].abs()
    answered = off.dropna()
    bounded = numbers.dropna(subset=["predicted", "low", "high"])
    inside = (bounded["low"] <= bounded["measured"]) & (bounded["measured"] <= bounded["high"])
    right, pairs = _order(numbers)
    return {
        "predictor": name,
        "numbers": len(numbers),
        "answered": len(answered),
        "refused": 1 - len(answered) / len(numbers),
        "error": off.fillna(1.0).clip(upper=1.0).mean(),
        "median of answered": answered.median(),
        "near": (answered <= LIMITS[quantity]).mean(),
        "in order": right / pairs if pairs else None,
        "in interval": inside.mean() if len(bounded) else None,
    }


def _order(numbers: pd.DataFrame) -> tuple[int, int]:
    """Return the pairs of a table's rows that are predicted in their order of speed, and all such pairs."""
    answered = numbers[numbers["quantity"] == "time"].dropna(subset=["predicted", "rows_per_s"])
    right = pairs = 0
    for _, table in answered.groupby("table"):
        speeds = zip(table["rows_per_s"], table["rows_per_s"] * table["measured"] / table["predicted"], strict=True)
        for (one, predicted), (other, also_predicted) in combinations(speeds, 2):
            if abs(one / other - 1) > DIFFERENT:
                pairs += 1
                right += (one > other) == (predicted > also_predicted)
    return right, pairs


def on_their_rows() -> list[dict]:
    """Return the figures of each simulator on the rows that it published, beside ours and the flat share's there."""
    lines = []
    for name, entry in predictors().items():
        if not entry.get("published"):
            continue
        theirs = predictions(name).dropna(subset=["predicted"])
        for quantity, mine in theirs.groupby("quantity"):
            line = {"rows of": name, "quantity": quantity, "numbers": len(mine)}
            for other in (name, "ours", FLAT):
                same = predictions(other).merge(mine[["row", "quantity"]], on=["row", "quantity"])
                off = same["error"].abs().median()
                line["its own" if other == name else other] = None if pd.isna(off) else off
            lines.append(line)
    return lines


def write() -> None:
    """Predict the rows again, and write what follows from the rows alone: ours, the flat share, and simulators'."""
    ours: list[tuple] = []
    flat: list[tuple] = []
    simulated: dict[str, list[tuple]] = defaultdict(list)
    rows = tests()
    for (key, row), compared in zip(rows.items(), compare_all([*rows.values()]), strict=True):
        for each in compared.quantities:
            ours.append(_line(key, each))
            if FLAT in each.others:
                flat.append((key, "time", each.others[FLAT], None, None))
        theirs = {"memory": row.simulated_memory_GB and row.simulated_memory_GB * 1e9, "time": row.simulated_step_s}
        lines = [(key, name, value, None, None) for name, value in theirs.items() if value]
        simulated[row.source] += lines
    files = {"ours": ours, FLAT: flat}
    files |= {name: simulated[each["published"]] for name, each in predictors().items() if "published" in each}
    for name, lines in files.items():
        pd.DataFrame(lines, columns=[*COLUMNS]).to_csv(BOARD / predictors()[name]["file"], index=False)


def _line(key: str, each: Compared) -> tuple:
    low, high = each.interval or (None, None)
    return key, each.quantity, each.predicted, low, high
