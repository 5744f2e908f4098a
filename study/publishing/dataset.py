"""`study export`: the records, claims and verdicts as a data set that others load, cite and check.

It has Parquet tables, a card for the Hugging Face Hub, `croissant.json` (Croissant 1.1) with checksums and provenance,
the schema in words, and for each machine its records as an RO-Crate.
"""

import gzip
import hashlib
import json
from collections import defaultdict
from datetime import date
from pathlib import Path

import pandas as pd
import tyro

from study.io import files
from study.io.parsing import from_json
from study.io.tables import say
from study.machine import output
from study.predictor.outside import published
from study.publishing import documents, tables
from study.publishing.project import project, version
from study.records import evidence, runs, store
from study.records.privacy import redact
from study.records.runs import Run
from study.report.topics import claims
from study.spec.arms import ROOT

TEMPLATES = Path(__file__).with_name("templates")
CROISSANT_TYPES = {"text": "sc:Text", "integer": "sc:Integer", "number": "sc:Float", "boolean": "sc:Boolean"}
CONTEXT = Path(__file__).with_name("croissant_context.json")


def export(folder: tyro.conf.Positional[Path], /, *, from_runs: tuple[Path, ...] = ()) -> None:
    """Write the records, claims, verdicts, measurements of others and predictions as a data set: Parquet, with a card.

    Args:
        folder: The folder to write. An earlier export in it is replaced.
        from_runs: Folders that contain runs. Default: the runs/ of every folder in reports/.
    """
    loaded = runs.load_to_share(from_runs or sorted((ROOT / "reports").glob("*/runs")))
    judged = claims.judge(loaded)
    frames = tables.all_tables(loaded, judged, evidence.gather(loaded))
    with output.replaced(folder) as out:
        (out / "data").mkdir()
        for name, frame in frames.items():
            frame.to_parquet(out / "data" / f"{name}.parquet", compression="zstd", index=False)
        for top in loaded.folders:
            mine = [run for run in loaded if run.folder.is_relative_to(top.resolve())]
            _write_machine(out / "machines" / tables.machine_of(top), top, mine)
        (out / "README.md").write_text(_card(frames))
        (out / "SCHEMA.md").write_text(_schema())
        _write_json(out / "croissant.json", _croissant(out))
    size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    rows = ", ".join(f"{name} {len(frame)}" for name, frame in frames.items())
    say(f"{folder}: {size_bytes / 1e6:.1f} MB; rows: {rows}", *(f"set aside: {each}" for each in loaded.set_aside))


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


# --- words ---------------------------------------------------------------------------------------------------------


def _card(frames: dict[str, pd.DataFrame]) -> str:
    """Return the card of the data set, with the head that the Hub reads."""
    head = documents.filled("card") | {
        "configs": [{"config_name": name, "data_files": f"data/{name}.parquet"} for name in frames]
    }
    lines = [f"| `{name}` | {len(frame)} | {tables.forms()[name].about} |" for name, frame in frames.items()]
    words = {"tables": "\n".join(["| table | rows | |", "|---|---|---|", *lines]), "version": version()}
    words |= {"abstract": project().abstract, "bibtex": documents.bibtex().replace("\n", "\n    ")}
    text = (TEMPLATES / "card.md").read_text().format(commit=store.commit_of_this_tree()[0] or "unknown", **words)
    return f"---\n{documents.as_yaml(head)}---\n\n{text}"


def _schema() -> str:
    """Return the meaning of every column in words."""
    parts = ["# The tables and their columns\n\nNull is unknown, or does not apply.\n"]
    for name, table in tables.forms().items():
        lines = [f"| `{column}` | {kind} | {meaning} |" for column, (kind, meaning) in table.columns.items()]
        parts.append(
            "\n".join([f"## {name}", "", table.about, "", "| column | type | meaning |", "|---|---|---|", *lines])
        )
    return "\n\n".join(parts) + "\n"


# --- Croissant -----------------------------------------------------------------------------------------------------


def _croissant(out: Path) -> dict:
    """Return the description of all files and tables after Croissant 1.1."""
    paths = sorted(path for path in out.rglob("*") if path.is_file() and path.name != output.MANIFEST)
    sources = published.sources().values()
    head = {"@context": from_json(CONTEXT.read_bytes())} | documents.filled("croissant", bibtex=documents.bibtex())
    return head | {
        "prov:wasDerivedFrom": [{"@id": each.address.split()[0], "prov:label": each.name} for each in sources],
        "distribution": [_file(path, path.relative_to(out).as_posix()) for path in paths],
        "recordSet": [_record_set(name, table) for name, table in tables.forms().items()],
    }


ENCODINGS = {".parquet": "application/x-parquet", ".md": "text/markdown", ".json": "application/ld+json"}
ENCODINGS |= {".gz": "application/gzip", ".jsonl": "application/jsonlines"}


def _file(path: Path, name: str) -> dict:
    content = path.read_bytes()
    about = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return documents.filled("file", file=name, encoding=ENCODINGS[path.suffix], **about)


def _record_set(name: str, table: tables.Table) -> dict:
    fields = [
        documents.filled("field", table=name, column=column, meaning=meaning, type=CROISSANT_TYPES[kind])
        for column, (kind, meaning) in table.columns.items()
    ]
    return documents.filled("record_set", table=name, about=table.about, fields=fields)


# --- machines ------------------------------------------------------------------------------------------------------


def _write_machine(out: Path, top: Path, mine: list[Run]) -> None:
    """Write the records of a machine, a file for each experiment, and describe them as an RO-Crate."""
    (out / "records").mkdir(parents=True)
    experiments: dict[str, list[Run]] = defaultdict(list)
    for run in mine:
        relative = run.folder.relative_to(top.resolve())
        experiments[relative.parts[0] if len(relative.parts) > 1 else "runs"].append(run)
    for name, some in experiments.items():
        lines = [_line(run, top) for run in sorted(some, key=lambda run: run.folder)]
        content = "".join(f"{line}\n" for line in lines).encode()
        (out / "records" / f"{name}.jsonl.gz").write_bytes(gzip.compress(content, mtime=0))
    if (path := top.parent / "README.md").is_file():
        (out / path.name).write_bytes(path.read_bytes())
    _write_json(out / "ro-crate-metadata.json", _crate(out, mine, experiments))


def _line(run: Run, top: Path) -> str:
    """Return a record and its place."""
    path = run.folder / store.RECORD
    record = redact(from_json(files.read(path, store.MAX_BYTES)))
    return json.dumps({"file": path.relative_to(top.resolve()).as_posix(), "record": record})


def _crate(out: Path, mine: list[Run], experiments: dict[str, list[Run]]) -> dict:
    """Return a machine's RO-Crate: its files, the code at each commit, and an action for each experiment."""
    names = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    creators = [{"@id": f"#{each['name']}"} | each for each in documents.filled("codemeta.json")["author"]]
    root = documents.filled(
        "crate_root",
        machine=out.name,
        about="; ".join(sorted({run.record.machine_line for run in mine})),
        day=str(project().released or date.today()),
        creator=[{"@id": each["@id"]} for each in creators],
        files=[{"@id": name} for name in names],
        experiments=[{"@id": f"#{name}"} for name in experiments],
    )
    graph = [documents.filled("crate_about"), root, *creators, documents.filled("crate_licence")]
    graph += [documents.filled("crate_file", file=name, encoding=ENCODINGS[Path(name).suffix]) for name in names]
    graph += [documents.filled("crate_code", code=commit) for commit in _commits(mine)]
    graph += [_action(name, some) for name, some in experiments.items()]
    return documents.filled("crate", graph=graph)


def _action(name: str, some: list[Run]) -> dict:
    return documents.filled(
        "crate_action",
        experiment=name,
        count=len(some),
        instruments=[{"@id": f"#commit-{commit}"} for commit in _commits(some)],
        start=min(run.record.started_utc for run in some),
        end=max(run.record.finished_utc or run.record.started_utc for run in some),
    )


def _commits(some: list[Run]) -> list[str]:
    return sorted({run.record.commit for run in some if run.record.commit})
