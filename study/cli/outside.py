"""`study outside`: compares our predictions with measurements that others published."""

from collections import defaultdict
from pathlib import Path
from typing import Literal

from study.errors import Stop
from study.io.numbers import size
from study.io.tables import say, show
from study.predictor.outside import errors, published, side_by_side, stored, tables
from study.predictor.outside.errors import Compared, ComparedRow
from study.predictor.outside.published import Row
from study.spec.options import AsJson


def outside(
    *,
    against: Literal["ours"] | None = None,
    file: Path | None = None,
    source: str | None = None,
    verbose: bool = False,
    write: bool = False,
    as_json: AsJson = False,
) -> dict | None:
    """List measurements of training that others published, or compare our predictions with them.

    Args:
        against: ours: show how far our stored predictions are from each measurement. --write renews the predictions.
        file: Predict other rows: a CSV file with the columns of reports/outside/measurements.csv.
        source: Take only the sources whose name contains this text.
        verbose: Print every row as well, and why predictions missed.
        write: Predict all of the project's own rows again, and store the result for the report, advise and estimate.
        as_json: Print everything as JSON.
    """
    if write:
        if file or source:
            raise Stop("--write renews all of the project's own rows", "leave out --file and --source")
        stored.write()
        side_by_side.write()
        return None
    rows = _chosen(file, source or "")
    if file is None and not (against or as_json):
        _list(rows)
        return None
    if file is None:
        members = [member for member in stored.predictions() if member.row in rows]
    else:
        members = [errors.compare(row) for row in rows]
    if as_json:
        return stored.as_json(members)
    if verbose:
        _show_rows(members)
    _show_errors(members)
    if file is None and source is None:
        say("", stored.accuracy())
    return None


def _chosen(file: Path | None, source: str) -> list[Row]:
    known = published.rows() if file is None else published.read_rows(file)
    rows = [row for row in known if source.lower() in row.source.lower()]
    if not rows:
        raise Stop("there is no such row", "study outside lists the sources" if source else "give a file with rows")
    return rows


def _list(rows: list[Row]) -> None:
    """Print the sources: how many rows each has, and with which quantities."""
    by_source: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_source[row.source].append(row)
    show([_line_of_source(name, of_source) for name, of_source in by_source.items()])
    say("", f"{len(rows)} rows of {len(by_source)} sources. study outside --against ours predicts them.")


def _line_of_source(name: str, rows: list[Row]) -> dict:
    source = published.sources()[name]
    return {
        "source": name,
        "rows": len(rows),
        "with memory": sum(row.memory_GB is not None for row in rows),
        "with time": sum(row.step_s is not None for row in rows),
        "tier A": sum(row.tier == "A" for row in rows),
        "role": ", ".join(sorted({row.role for row in rows if row.role})) or None,
        "licence": source.licence,
        "what it is": source.what,
    }


def _show_rows(members: list[ComparedRow]) -> None:
    """Print every row, and why predictions missed."""
    show([line for member in members for line in _lines(member)])
    if missed := errors.misses(members):
        say("", "Off by more than 10 % (memory) or 30 % (time):")
        show(tables.misses(missed))
        say("")


def _show_errors(members: list[ComparedRow]) -> None:
    groups = stored.as_json(members)["summary"]
    show(tables.lines(groups))
    if without := tables.unpredicted(groups):
        say("", "No row has a prediction of (--verbose says why):")
        say(*(f"- {each['source']}: {each['rows']} rows" for each in without))


def _lines(member: ComparedRow) -> list[dict]:
    row = member.row
    about = {"source": row.source, "model": row.model, "GPUs": row.n_gpus, "arm": row.arm, "rows": row.micro_batch}
    if not member.quantities:
        return [about | {"why not": member.reason}]
    return [about | _line(compared) | {"why not": member.reason} for compared in member.quantities]


def _line(compared: Compared) -> dict:
    return {
        "quantity": compared.quantity,
        "measured": _human(compared.quantity, compared.measured),
        "predicted": _human(compared.quantity, compared.predicted),
        "off": f"{compared.error:+.0%}",
    }


def _human(quantity: str, value: float) -> str:
    return size(value) if quantity == "memory" else f"{value:.3g} s"
