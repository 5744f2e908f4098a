"""`study outside`: compares our predictions with measurements that others published."""

from pathlib import Path
from typing import Literal

from study.errors import Stop
from study.io.numbers import size
from study.io.tables import say, show
from study.predictor.outside import rows, side_by_side, sources, summary, words, written
from study.predictor.outside.compare import Compared, compared
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
        written.write()
        side_by_side.write()
        return None
    known = rows.own() if file is None else rows.read(file)
    chosen = [row for row in known if (source or "").lower() in row.source.lower()]
    if not chosen:
        raise Stop("there is no such row", "study outside lists the sources" if source else "give a file with rows")
    if file is None and not (against or as_json):
        _list(chosen)
        return None
    kept = {each.row: each for each in written.own()} if file is None else {}
    everything = [kept.get(row) or compared(row) for row in chosen]
    groups = written.as_json(everything)
    if as_json:
        return groups
    if verbose:
        show([line for each in everything for line in _lines(each)])
    if verbose and (missed := words.misses(summary.misses(everything))):
        say("", "Off by more than 10 % (memory) or 30 % (time):")
        show(missed)
        say("")
    show(words.lines(groups["summary"]))
    if without := words.unpredicted(groups["summary"]):
        say("", "No row has a prediction of (--verbose says why):")
        say(*(f"- {each['source']}: {each['rows']} rows" for each in without))


def _list(chosen: list[rows.Row]) -> None:
    """A table of the sources: how many rows each has, and with which quantities."""
    known = sources.own()
    by_source: dict[str, list[rows.Row]] = {}
    for row in chosen:
        by_source.setdefault(row.source, []).append(row)
    show(
        [
            {
                "source": name,
                "rows": len(of_source),
                "with memory": sum(row.memory_GB is not None for row in of_source),
                "with time": sum(row.step_s is not None for row in of_source),
                "tier A": sum(row.tier == "A" for row in of_source),
                "role": ", ".join(sorted({role for row in of_source if (role := known[name].role_of(row))})) or None,
                "licence": known[name].licence,
                "what it is": known[name].what,
            }
            for name, of_source in by_source.items()
        ]
    )
    say("", f"{len(chosen)} rows of {len(by_source)} sources. study outside --against ours predicts them.")


def _lines(each: Compared) -> list[dict]:
    row = each.row
    said = {"source": row.source, "model": row.model, "GPUs": row.n_gpus, "arm": row.arm, "rows": row.micro_batch}
    if not each.quantities:
        return [said | {"why not": each.reason}]
    return [
        said
        | {
            "quantity": quantity.quantity,
            "measured": _human(quantity.quantity, quantity.measured),
            "predicted": _human(quantity.quantity, quantity.predicted),
            "off": f"{quantity.error:+.0%}",
            "why not": each.reason,
        }
        for quantity in each.quantities
    ]


def _human(name: str, value: float) -> str:
    return size(value) if name == "memory" else f"{value:.3g} s"
