"""Records of tests: kept runs of this study under other names, and a few fields otherwise.

What they then say of arms is what the tests want them to say.
"""

import json
import zlib
from pathlib import Path

import pandas as pd

from study.core.arms import ROOT
from study.records.runs import Run
from study.records.schema import MEASURE_VERSION, Record

KEPT = [json.loads(path.read_text()) for path in (ROOT / "reports/cpu-2core/runs/smoke").glob("*/record.json")]
OF_ARM = {fields["requested"]["arm"]: fields for fields in KEPT if fields["requested"]["task"] == "wikitext"}
COMMIT = OF_ARM["zero2"]["commit"]
GPU = {"name": "NVIDIA H200", "memory_bytes": 150 * 10**9}
BYTES_ON_GPU = {"peak_allocated_bytes": 10**8, "peak_reserved_bytes": 2 * 10**8, "device_used_bytes": 10**9}


def finished(
    run_id: str = "run",
    arm: str = "zero2",
    ranks: int = 2,
    seed: int = 42,
    loss: float = 2.0,
    gpu: bool = False,
    virtual: bool = False,
    **changes,
) -> dict:
    """A run of an arm that is done, as JSON. Its losses fall to `loss`; see `changed` for `changes`."""
    fields = changed(OF_ARM[arm], run_id=run_id, requested__seed=seed, requested__run_dir=f"runs/{run_id}")
    fields["measure_version"] = MEASURE_VERSION
    number = zlib.crc32(run_id.encode()) % 10**6  # runs that start at once are copies of each other
    fields["started_utc"] = f"2026-01-02T03:04:05.{number:06}+00:00"
    observed, rows = fields["observed"], ranks * fields["requested"]["micro_batch"]
    observed |= {"ranks": ranks, "ranks_counted": ranks, "rows_per_step": rows, "tokens_per_step": 64 * rows}
    if virtual:
        fields["requested"]["virtual_ranks"] = observed["virtual_ranks"] = ranks
        observed["ranks_counted"], fields["loss"] = None, {}
    else:
        fields["loss"] = {"train": [7 + seed / 1000, 1.5 * loss, 1.2 * loss, 1.1 * loss, loss]}
        fields["loss"]["eval"] = [{"step": 5, "eval_loss": loss}]
    memory = fields["memory"]
    if gpu:
        observed |= {"device": "cuda", "backend": "nccl"}
        fields["hardware"]["devices"] = [GPU] * ranks
        memory["per_rank"][0] |= BYTES_ON_GPU
    for section in (memory, memory["components"], fields["traffic"]):
        section["per_rank"] = section["per_rank"][:1] * (1 if virtual else ranks)
    return changed(fields, **changes)


def changed(fields: dict, **changes) -> dict:
    """The same with some fields otherwise, each named by its path, as in time__mfu=2; a number is a place in a list."""
    fields = json.loads(json.dumps(fields))  # ranks that are equal are not the same dict any more
    for path, value in changes.items():
        *above, last = path.split("__")
        place = fields
        for name in above:
            place = place[int(name)] if name.isdigit() else place[name]
        place[int(last) if last.isdigit() else last] = value
    return fields


def failed(run_id: str, status: str = "oom", **settings) -> dict:
    """A run that ended early: all that is known is what was asked for."""
    empty = {name: {} for name in ("loss", "time", "memory", "traffic")}
    error = {"kind": "MemoryError", "message": "no more memory", "where": "rank 0", "what_to_do": "ask for less"}
    return finished(run_id, **settings) | empty | {"status": status, "error": error}


def put(folder: Path, *records: dict) -> Path:
    """Each record in a run folder of its own."""
    for fields in records:
        place = folder / fields["run_id"]
        place.mkdir(parents=True)
        (place / "record.json").write_text(json.dumps(fields))
    return folder


def record(fields: dict | None = None, **settings) -> Record:
    """The same as a record, of `finished`, or of these fields."""
    return Record.model_validate(finished(**settings) if fields is None else changed(fields, **settings))


def run(fields: dict | None = None, environment: str = "A", **settings) -> Run:
    checked = record(fields, **settings)
    return Run(Path("runs") / checked.run_id, checked, environment)


def rows(table: pd.DataFrame) -> list[dict]:
    """The rows of a table; what is not known is None."""
    known = table.astype(object).where(table.notna(), None)
    return [{str(name): value for name, value in row.items()} for row in known.to_dict("records")]
