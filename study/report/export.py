"""`study export`: the records, claims and answers of releases as tables that others load: Parquet, and one card.

Every value is a number, a text or a truth value; nested values are JSON. Unknown is null. `columns.toml` has the
meaning and the unit of each column.
"""

import json
from collections import defaultdict
from pathlib import Path

import pandas as pd
import tyro
import yaml

from study.conform import releases
from study.core import files
from study.core.arms import ROOT
from study.core.text import say
from study.ledger import texts
from study.records import metrics, runs
from study.records.runs import Run, Runs
from study.records.schema import Record

CARD = Path(__file__).parent / "templates" / "card.md"
FORMS = files.from_toml(Path(__file__).with_name("columns.toml").read_text())  # of each table
DTYPES = {"text": "string", "integer": "Int64", "number": "Float64", "boolean": "boolean"}


def export(folder: tyro.conf.Positional[Path], /, *, from_runs: tuple[Path, ...] = ()) -> None:
    """Write the records, claims and answers of releases as Parquet tables, with a card.

    Args:
        folder: The folder to write. An earlier export in it is replaced.
        from_runs: Folders that contain runs. Default: the runs/ of every folder in reports/.
    """
    files.refuse_foreign(folder)  # before the work
    loaded = runs.load(from_runs or sorted(ROOT.glob("reports/*/runs")), to_share=True)
    frames = all_tables(loaded)
    with files.replaced(folder) as out:
        (out / "data").mkdir()
        for name, frame in frames.items():
            frame.to_parquet(out / f"data/{name}.parquet", compression="zstd", index=False)
        (out / "README.md").write_text(_card())
    rows = ", ".join(f"{name} {len(frame)}" for name, frame in frames.items())
    say(f"{folder}: rows: {rows}", *(f"set aside: {each}" for each in loaded.set_aside))


def _card() -> str:
    """Return the card of the data set: the head that the Hugging Face Hub reads, and the meaning of each column."""
    configs = [{"config_name": name, "data_files": f"data/{name}.parquet"} for name in FORMS]
    # --- a table of columns for each table
    lines = []
    for name, form in FORMS.items():
        lines += [f"## {name}", "", form["about"], "", "| column | type | meaning |", "|---|---|---|"]
        lines += [f"| `{column}` | {kind} | {meaning} |" for column, (kind, meaning) in form["columns"].items()]
        lines += [""]
    # --- the head, between lines that the template has
    head = yaml.safe_dump({"configs": configs}, sort_keys=False)
    return CARD.read_text().format(configs=head, tables="\n".join(lines))


def all_tables(loaded: Runs) -> dict[str, pd.DataFrame]:
    """Return the tables by name, each with its declared columns in their order and with their types."""
    # --- of records: a row for each run, and for its steps and collectives
    counting = {run.folder for run in loaded.counting}
    rows: dict[str, list[dict]] = defaultdict(list)
    for run in loaded:
        place = {"run": run.record.run_id, "machine": _machine(run, loaded)}
        rows["runs"].append(_run(run) | place | {"counts": run.folder in counting})
        rows["steps"] += [place | row for row in _steps(run.record)]
        for rank, kinds in enumerate(run.record.traffic.per_rank):
            for kind, moved in kinds.items():
                rows["collectives"].append(place | dict(moved) | {"rank": rank, "collective": kind})
    # --- of the ledger and of conformance
    rows["claims"] = [claim.model_dump(mode="json", by_alias=True) for claim in texts.claims()]
    rows["releases"] = releases.answers().to_dict("records")
    return {name: _typed(rows[name], form["columns"]) for name, form in FORMS.items()}


def _machine(run: Run, loaded: Runs) -> str:
    """Return the folder of a machine: of reports/NAME/runs it is NAME."""
    # Several folders may be given: the one that holds this run counts.
    top = next(top.resolve() for top in loaded.folders if run.folder.is_relative_to(top.resolve()))
    return [part for part in top.parts if part != "runs"][-1]


def _typed(rows: list[dict], columns: dict[str, tuple[str, str]]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=[*columns], dtype=object).map(_flat)
    # pandas' nullable types: an integer that is unknown stays an integer column.
    return table.astype({column: DTYPES[kind] for column, (kind, _) in columns.items()})


def _flat(value: object) -> object:
    """Return nested values as JSON. Parquet could hold them, but CSV and most readers of tables cannot."""
    if not isinstance(value, (dict, list)):
        return value
    return json.dumps(value, default=str) if value else None


def _run(run: Run) -> dict:
    """Return all that is known of a run by name, of which a table takes what it declares."""
    record = run.record
    row = run.facts | {name: metrics.value(record, name) for name in metrics.QUANTITIES}
    row |= dict(record) | dict(record.cell) | dict(record.hardware) | record.software
    return row | {
        "first_loss": next(iter(record.loss.train), None),
        "final_loss": next(reversed(record.loss.train), None),
        "collectives_bytes": sum(metrics.sent(record).values()) or None,
        "error": record.error and record.error.kind,
        "gpus": record.hardware.gpus_line,
    }


def _steps(record: Record) -> list[dict]:
    """Return the optimizer steps. A run that was resumed timed only its last part: its seconds are left out."""
    seconds: dict[int, float] = {}
    if record.observed.steps and not record.checkpoints.get("resumes"):
        timed = record.time.step_s
        seconds = dict(enumerate(timed, start=record.observed.steps - len(timed) + 1))
    # A step may have any of the three: losses of steps that were not timed, and evaluations in between.
    losses = dict(enumerate(record.loss.train, start=1))
    evaluations = {each.step: dict(each) for each in record.loss.eval}
    return [
        evaluations.get(step, {}) | {"step": step, "train_loss": losses.get(step), "step_s": seconds.get(step)}
        for step in sorted({*losses, *seconds, *evaluations})
    ]
