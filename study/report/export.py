"""`study export`: the records, claims and answers of releases as tables that others load: Parquet, and one card.

Every value is a number, a text or a truth value; nested values are JSON. Unknown is null. `columns.toml` has the
meaning and the unit of each column.
"""

import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd
import tyro
import yaml
from pydantic import BaseModel

from study.conform import releases
from study.core import files
from study.core.arms import ROOT
from study.core.errors import Stop
from study.core.files import from_toml
from study.core.text import say
from study.ledger import texts
from study.records import metrics, runs, store
from study.records.runs import Run, Runs

CARD = Path(__file__).parent / "templates" / "card.md"
COLUMNS = Path(__file__).with_name("columns.toml")
MAX_BYTES = 2**20
LIBRARIES = ("python", "torch", "deepspeed", "accelerate", "transformers")
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
        (out / "README.md").write_text(_card(frames))
    size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    rows = ", ".join(f"{name} {len(frame)}" for name, frame in frames.items())
    say(f"{folder}: {size_bytes / 1e6:.1f} MB; rows: {rows}", *(f"set aside: {each}" for each in loaded.set_aside))


def _card(frames: dict[str, pd.DataFrame]) -> str:
    """Return the card of the data set: the head that the Hugging Face Hub reads, and the meaning of each column."""
    configs = [{"config_name": name, "data_files": f"data/{name}.parquet"} for name in frames]
    parts = []
    for name, table in forms().items():
        lines = [f"| `{column}` | {kind} | {meaning} |" for column, (kind, meaning) in table.columns.items()]
        parts.append(
            "\n".join([f"## {name}", "", table.about, "", "| column | type | meaning |", "|---|---|---|", *lines])
        )
    commit = store.commit_of_this_tree()[0] or "unknown"
    head = yaml.safe_dump({"configs": configs}, sort_keys=False)
    return CARD.read_text().format(configs=head, commit=commit, tables="\n\n".join(parts))


def all_tables(loaded: Runs) -> dict[str, pd.DataFrame]:
    """Return the tables by name."""
    counted = {run.folder for run in loaded.counting}
    rows: dict[str, Iterable[dict]] = {
        "runs": (_place(run, loaded) | {"counts": run.folder in counted} | _run(run) for run in loaded),
        "steps": (_place(run, loaded) | row for run in loaded for row in _steps(run)),
        "collectives": (_place(run, loaded) | row for run in loaded for row in _collectives(run)),
        "claims": map(_claim, texts.claims()),
    }
    frames = {name: pd.DataFrame(list(each)) for name, each in rows.items()}
    frames["releases"] = releases.answers()
    return {name: _typed(name, frames[name]) for name in forms()}


class Table(BaseModel):
    """What columns.toml says of a table."""

    about: str
    columns: dict[str, tuple[str, str]]  # type and meaning


@functools.cache
def forms() -> dict[str, Table]:
    """Return the declared form of each table by its name."""
    content = from_toml(files.read(COLUMNS, MAX_BYTES))
    return {name: Table.model_validate(each) for name, each in content.items()}


def _typed(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table with the declared columns, in their order and with their types."""
    columns = forms()[name].columns
    if odd := sorted({*frame} ^ {*columns}):
        raise Stop(f"the table {name} and {COLUMNS.name} differ in {', '.join(odd)}", "correct the file")
    return frame[[*columns]].astype({column: DTYPES[kind] for column, (kind, _) in columns.items()})


def _as_json(value: object) -> str | None:
    return None if value in (None, {}, []) else json.dumps(value, default=str)


# --- records -------------------------------------------------------------------------------------------------------


def _place(run: Run, loaded: Runs) -> dict[str, str]:
    """Return the name of a run, and of its machine: of reports/NAME/runs it is NAME."""
    folders = [folder.resolve() for folder in loaded.folders]
    top = next(folder for folder in folders if run.folder.is_relative_to(folder))
    return {"run": run.record.run_id, "machine": top.parent.name if top.name == "runs" else top.name}


def _run(run: Run) -> dict:
    """Return the columns of a run: computed here, a part of its record, a property or setting, or a quantity."""
    record = run.record
    row: dict = {
        "first_loss": run.record.loss.train[0] if run.record.loss.train else None,
        "gpus": record.hardware.gpus_line,
    }
    row |= {
        "final_loss": run.record.loss.train[-1] if run.record.loss.train else None,
        "error": record.error.kind if record.error else None,
    }
    row |= {
        "tracked_peak_bytes": metrics.tracked_peak_bytes(run.record),
        "collectives_bytes": sum(metrics.sent(run.record).values()) or None,
    }
    row |= dict(record.cell) | dict(record.hardware) | dict.fromkeys(LIBRARIES) | record.software
    row |= {name: getattr(record, name) for name in ("started_utc", "commit", "dirty", "measure_version")}
    others = [name for name in forms()["runs"].columns if name not in (*row, "run", "machine", "counts")]
    row |= {name: metrics.value(record, name) if name in metrics.QUANTITIES else run.facts[name] for name in others}
    return {name: value for name, value in row.items() if name in forms()["runs"].columns}


def _steps(run: Run) -> Iterator[dict]:
    """Yield the optimizer steps of a run. A run that was resumed timed only its last part: its seconds are left out."""
    record = run.record
    seconds: dict[int, float] = {}
    count = len(record.time.step_s)
    if count and not record.checkpoints.get("resumes") and record.observed.steps:
        seconds = dict(enumerate(record.time.step_s, start=record.observed.steps - count + 1))
    losses = dict(enumerate(run.record.loss.train, start=1))
    evaluations = {each.step: each for each in record.loss.eval}
    for step in sorted({*losses, *seconds, *evaluations}):
        row = {"step": step, "train_loss": losses.get(step), "step_s": seconds.get(step)}
        evaluation = evaluations.get(step)
        names = ("eval_loss", "accuracy", "perplexity")
        yield row | {name: getattr(evaluation, name) if evaluation else None for name in names}


def _collectives(run: Run) -> Iterator[dict]:
    for rank, kinds in enumerate(run.record.traffic.per_rank):
        for kind, moved in kinds.items():
            row = {"rank": rank, "collective": kind, "calls": moved.calls, "bytes": moved.bytes}
            by = {"bytes_by_dtype": moved.bytes_by_dtype, "bytes_by_group": moved.bytes_by_group}
            yield row | {name: _as_json(value) for name, value in by.items()}


def _claim(claim: texts.Claim) -> dict:
    row = claim.model_dump(mode="json", by_alias=True)
    return row | {"evidence": _as_json(row["evidence"])}
