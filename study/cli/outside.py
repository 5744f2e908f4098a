"""`study outside`: compares our predictions with measurements that others published."""

from collections import Counter
from pathlib import Path
from typing import Literal

from study.errors import Stop
from study.io.numbers import size
from study.io.tables import say, show
from study.predictor.outside import errors, published, side_by_side, stored
from study.predictor.outside.published import Row
from study.predictor.outside.stored import percent
from study.predictor.outside.trainings import Compared, ComparedRow, compare
from study.spec.options import AsJson


def outside(
    *,
    against: Literal["ours"] | None = None,
    file: Path | None = None,
    source: str | None = None,
    verbose: bool = False,
    write: bool = False,
    board: bool = False,
    as_json: AsJson = False,
) -> dict | None:
    """List measurements of training that others published, or compare our predictions with them.

    Args:
        against: ours: show how far our stored predictions are from each measurement. --write renews the predictions.
        file: Predict other rows: a CSV file with the columns of reports/outside/measurements.csv.
        source: Take only the sources whose name contains this text.
        verbose: Print every row as well, and why predictions missed.
        write: Predict all of the project's own rows again, and store the result for the report, advise and estimate.
        board: Score all predictors whose files are in reports/outside/board, on the rows that nothing was fitted to.
        as_json: Print everything as JSON.
    """
    if write:
        if file or source:
            raise Stop("--write renews all of the project's own rows", "leave out --file and --source")
        errors.write()
        stored.read.cache_clear()
        stored.predictions.cache_clear()
        side_by_side.write()
        from study.bench import board as boards  # it needs pandas

        boards.write()
        return None
    if board:
        return _board(as_json)
    rows = _chosen(file, source or "")
    if file is None and not (against or as_json):
        _list(rows)
        return None
    if file is None:
        members = [member for member in stored.predictions() if member.row in rows]
    else:
        members = [compare(row) for row in rows]
    if as_json:
        return {"rows": [member.as_json() for member in members], "summary": errors.lines(members)}
    if verbose:
        _show_rows(members)
    show(errors.lines(members))
    predicted = {member.row.source for member in members if member.quantities}
    if without := Counter(member.row.source for member in members if member.row.source not in predicted):
        say("", "No row has a prediction of (--verbose says why):")
        say(*(f"- {name}: {count} rows" for name, count in without.items()))
    if file is None and source is None:
        say("", stored.accuracy())
    return None


def _board(as_json: bool) -> dict | None:
    """Print the board, or return it."""
    from study.bench import board as boards  # it needs pandas

    scores, own = boards.scores(), boards.on_their_rows()
    if as_json:
        return {"scores": scores, "on_their_rows": own}
    for title, lines in (("", scores), ("Medians on the rows that a simulator published, beside ours there:", own)):
        say(*([title] if title else []))
        show(
            [{name: percent(each) if isinstance(each, float) else each for name, each in row.items()} for row in lines]
        )
    return None


def _chosen(file: Path | None, source: str) -> list[Row]:
    known = published.rows() if file is None else published.read_rows(file)
    rows = [row for row in known if source.lower() in row.source.lower()]
    if not rows:
        raise Stop("there is no such row", "study outside lists the sources" if source else "give a file with rows")
    return rows


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
    say(f"Others published {len(rows)} rows, in {len(lines)} sources. study outside --against ours predicts them.", "")
    show(lines)


def _show_rows(members: list[ComparedRow]) -> None:
    """Print every row, and why predictions missed."""
    lines = []
    for member in members:
        row = member.row
        about = {"source": row.source, "model": row.model, "GPUs": row.n_gpus, "arm": row.arm, "rows": row.micro_batch}
        quantities = [_line(compared) for compared in member.quantities] or [{}]
        lines += [about | quantity | {"why not": member.reason} for quantity in quantities]
    show(lines)
    if missed := errors.misses(members):
        say("", "Off by more than 10 % (memory) or 30 % (time):")
        show(missed)
        say("")


def _line(compared: Compared) -> dict:
    values = {"measured": compared.measured, "predicted": compared.predicted}
    if compared.quantity == "memory":
        shown = {name: size(value) for name, value in values.items()}
    else:
        shown = {name: f"{value:.3g} s" for name, value in values.items()}
    return {"quantity": compared.quantity} | shown | {"off": f"{compared.error:+.0%}"}
