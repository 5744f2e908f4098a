"""Compare our predictions with measurements that others published: python -m study.cli.outside --help"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Literal

from study.bench import published_errors
from study.cli.commands import call
from study.errors import Stop, exit_on_stop
from study.io.load import load
from study.io.numbers import number_of, percent
from study.io.tables import say, say_wrapped, show
from study.io.validation import nearest
from study.io.words import joined
from study.predictor.outside import published, stored
from study.predictor.outside.published import Row
from study.predictor.outside.trainings import ComparedRow, compare_all
from study.report import outside as in_words
from study.report import side_by_side
from study.spec.options import AsJson


def outside(
    *,
    against: Literal["ours"] | None = None,
    file: Path | None = None,
    says: Path | None = None,
    source: str | None = None,
    write: bool = False,
    board: bool = False,
    as_json: AsJson = False,
) -> dict | None:
    """List measurements of training that others published, or compare our predictions with them.

    Args:
        against: ours: show how far our stored predictions are from each measurement. --write renews the predictions.
        file: Predict other rows: a CSV file with the columns of reports/outside/measurements.csv.
        says: What holds for all rows of --file: a TOML file with lines such as `attention = "sdpa"`. It fills in empty
            fields.
        source: Take only the sources whose name contains this text.
        write: Predict all of the project's own rows again, and store the result for the report, advise and estimate.
        board: Score all predictors whose files are in reports/outside/board, on the rows that nothing was fitted to.
        as_json: Print everything as JSON, also each row, and why it has no prediction.
    """
    if write:
        if file or says or source:
            raise Stop("--write renews all of the project's own rows", "leave out --file, --says and --source")
        _write()
        return None
    if board:
        return _board(as_json)
    rows = _chosen(file, says, source or "")
    if file is None and not (against or as_json):
        _list(rows)
        return None
    kept = [] if file else stored.predictions()
    members = compare_all(rows) if file else [member for member in kept if member.row in rows]
    if as_json:
        return {"rows": [member.as_json() for member in members], "summary": in_words.lines(members)}
    _show(members, is_whole=not (file or source))
    return None


def _show(members: list[ComparedRow], *, is_whole: bool) -> None:
    """Print how far off the predictions are, over all rows and source by source."""
    lines = in_words.lines(members)
    say_wrapped(in_words.accuracy() if is_whole else _answer(lines), "")
    show(lines)
    predicted = {member.row.source for member in members if member.quantities}
    if without := Counter(member.row.source for member in members if member.row.source not in predicted):
        say("", "No row has a prediction of (--json says why):")
        say(*(f"- {name}: {number_of(count, 'rows')}" for name, count in without.items()))


def _write() -> None:
    """Predict all rows again, and store what others read."""
    from study.bench import board as boards  # it needs pandas

    published_errors.write()
    stored.read.cache_clear()
    stored.predictions.cache_clear()
    side_by_side.write()
    boards.write()


def _answer(lines: list[dict]) -> str:
    """Return how far off the predictions of all these rows are."""
    every = [line for line in lines if line["source"] == "all"]
    off = [
        f"{line['quantity']} is {line['off by']} off in the median of {number_of(line['rows'], 'rows')}"
        for line in every
    ]
    return f"Compared with these measurements, {joined(off)}." if off else "None of these rows can be predicted."


def _board(as_json: bool) -> dict | None:
    """Print the board, or return it."""
    from study.bench import board as boards  # it needs pandas

    scores, own = boards.scores(), boards.on_their_rows()
    if as_json:
        return {"scores": scores, "on_their_rows": own}
    apart = "Medians on the rows that a simulator published, beside ours there:"
    for title, lines in ((_nearest(scores), scores), (apart, own)):
        say_wrapped(title, "")
        show(
            [{name: percent(each) if isinstance(each, float) else each for name, each in row.items()} for row in lines]
        )
    return None


def _nearest(scores: list[dict]) -> str:
    """Return the predictor with the least error of each quantity. The scores have the nearest of a quantity first."""
    nearest: dict[str, dict] = {}
    for score in scores:
        nearest.setdefault(score["quantity"], score)
    texts = [f"{each['predictor']} for {name}, off by {percent(each['error'])}" for name, each in nearest.items()]
    return f"The nearest: {joined(texts)}, where no answer counts as 100 % off."


def _chosen(file: Path | None, says: Path | None, source: str) -> list[Row]:
    if says and file is None:
        raise Stop("--says is about the rows of --file", "give --file, too")
    settings = read_settings(says) if says else {}
    known = published.read_rows(file, settings) if file else published.rows()
    rows = [row for row in known if source.lower() in row.source.lower()]
    if not rows:
        raise Stop(
            "there is no such row",
            "python -m study.cli.outside lists the sources" if source else "give a file with rows",
        )
    return rows


def read_settings(path: Path) -> dict:
    """Return what a source says of all its rows: a TOML file with values by column. A table becomes JSON."""
    remedy, most_bytes = 'write lines such as attention = "sdpa"', published.MAX_BYTES
    content = load(path, dict, what="a table of settings", remedy=remedy, most_bytes=most_bytes, links=True)
    if unknown := [name for name in content if name not in Row.model_fields]:
        raise Stop(f"{path}: {unknown[0]!r} is not a column of measurements.csv", nearest(unknown[0], Row.model_fields))
    return {name: json.dumps(value) if isinstance(value, dict) else value for name, value in content.items()}


def _list(rows: list[Row]) -> None:
    """Print the sources: how many rows each has, and with which quantities."""
    lines = []
    for name in dict.fromkeys(row.source for row in rows):
        mine = [row for row in rows if row.source == name]
        source = published.sources()[name]
        lines.append(
            {
                "source": name,
                "rows": len(mine),
                "with memory": sum(row.memory_GB is not None for row in mine),
                "with time": sum(row.step_s is not None for row in mine),
                "tier A": sum(row.tier == "A" for row in mine),
                "role": ", ".join(sorted({row.role for row in mine if row.role})) or None,
                "licence": source.licence,
                "what it is": source.what,
            }
        )
    say(f"Others published {len(rows)} rows, in {len(lines)} sources. --against ours predicts them.", "")
    show(lines)


if __name__ == "__main__":
    with exit_on_stop():
        call("study.cli.outside", "outside", "python -m study.cli.outside", sys.argv[1:])
