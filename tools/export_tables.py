"""Writes the records in reports/, claims and answers of releases as tables that others load: Parquet, and one card.

python tools/export_tables.py DIR

Every value is a number, a text or a truth value; nested values are JSON. Unknown is null. `columns.toml` has the
meaning and the unit of each column.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import pandas as pd

from study.conform import releases
from study.core import files
from study.core.arms import ROOT
from study.core.errors import exit_on_stop
from study.core.text import say
from study.ledger import texts
from study.records import metrics, runs
from study.records.runs import Run, Runs
from study.records.schema import Record

CARD = Path(__file__).with_name("card.md")
COLUMNS = Path(__file__).with_name("columns.toml").read_text()
FORMS = files.from_toml(COLUMNS)  # of each table
DTYPES = {"text": "string", "integer": "Int64", "number": "Float64", "boolean": "boolean"}


def export(folder: Path) -> None:
    """Write the tables and the card into a folder. An earlier export in it is replaced."""
    files.refuse_foreign(folder)  # before the work
    loaded = runs.load(sorted(ROOT.glob("reports/*/runs")), to_share=True)
    frames = all_tables(loaded)
    with files.replaced(folder) as out:
        (out / "data").mkdir()
        for name, frame in frames.items():
            frame.to_parquet(out / f"data/{name}.parquet", compression="zstd", index=False)
        (out / "README.md").write_text(f"{CARD.read_text()}```toml\n{COLUMNS}```\n")
    rows = ", ".join(f"{name} {len(frame)}" for name, frame in frames.items())
    say(f"{folder}: rows: {rows}", *(f"set aside: {each}" for each in loaded.set_aside))


def all_tables(loaded: Runs) -> dict[str, pd.DataFrame]:
    """Return the tables by name, each with its declared columns in their order and with their types."""
    # --- of records: a row for each run, and for its steps and collectives
    counting = {run.folder for run in loaded.counting}
    rows: dict[str, list[dict]] = defaultdict(list)
    for run in loaded:
        machine = run.folder.relative_to(ROOT / "reports").parts[0]
        place = {"run": run.record.run_id, "machine": machine}
        rows["runs"].append(_run(run) | place | {"counts": run.folder in counting})
        rows["steps"] += [place | row for row in _steps(run.record)]
        for rank, kinds in enumerate(run.record.traffic.per_rank):
            for kind, moved in kinds.items():
                rows["collectives"].append(place | dict(moved) | {"rank": rank, "collective": kind})
    # --- of the ledger and of conformance
    rows["claims"] = [claim.model_dump(mode="json", by_alias=True) for claim in texts.claims()]
    rows["releases"] = releases.answers().to_dict("records")
    tables = {}
    for name, form in FORMS.items():
        types = {column: DTYPES[kind] for column, (kind, _) in form["columns"].items()}
        # pandas' nullable types: an integer that is unknown stays an integer column.
        tables[name] = pd.DataFrame(rows[name], columns=[*types], dtype=object).map(_flat).astype(types)
    return tables


def _flat(value: object) -> object:
    """Return nested values as JSON. Parquet could hold them, but CSV and most readers of tables cannot."""
    if isinstance(value, (dict, list)):
        return json.dumps(value, default=str) if value else None
    return value


def _run(run: Run) -> dict:
    """Return all that is known of a run by name, of which a table takes what it declares."""
    record = run.record
    row = run.facts | {name: metrics.value(record, name) for name in metrics.QUANTITIES}
    row |= dict(record) | dict(record.cell) | dict(record.hardware) | record.software
    return row | {
        "first_loss": files.value_at(record, "loss.train.0"),
        "final_loss": metrics.final_train_loss(record),
        "collectives_bytes": sum(metrics.sent(record).values()) or None,
        "error": files.value_at(record, "error.kind"),
        "gpus": record.hardware.gpus_line,
    }


def _steps(record: Record) -> list[dict]:
    """Return the optimizer steps. A run that was resumed timed only its last part: its seconds are left out."""
    rows: dict[int, dict] = defaultdict(dict)
    # A step may have any of the three: losses of steps that were not timed, and evaluations in between.
    for step, loss in enumerate(record.loss.train, start=1):
        rows[step]["train_loss"] = loss
    if record.observed.steps and not record.checkpoints.get("resumes"):
        timed = record.time.step_s
        for step, seconds in enumerate(timed, start=record.observed.steps - len(timed) + 1):
            rows[step]["step_s"] = seconds
    for evaluation in record.loss.eval:
        rows[evaluation.step] |= dict(evaluation)
    return [rows[step] | {"step": step} for step in sorted(rows)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    with exit_on_stop():
        export(parser.parse_args().folder)
