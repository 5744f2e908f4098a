"""What killed a run: hangs, whether `study oom` names what threads about memory name, and host memory while loading."""

import json
from pathlib import Path

import pandas as pd

from study.core.arms import ROOT
from study.predict.front import Load, named, peaks
from study.records.collectives import RankLog
from study.watch import hangs as waits
from study.watch.findings import texts

KEPT = ROOT / "reports" / "cpu-2core"
HANGS, LOADING, WATCH_COST = KEPT / "hangs.jsonl", KEPT / "loading.jsonl", KEPT / "watch_cost.json"
THREADS = ROOT / "reports" / "oom_threads.json"
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
COMMAND = "python reproductions/laboratories/hangs.py reports/cpu-2core/hangs.jsonl"
LOADING_COMMAND = "python reproductions/laboratories/loading.py reports/cpu-2core/loading.jsonl"


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def hangs() -> pd.DataFrame:
    """Return a row for each way and arm of the hang laboratory, with what `study diagnose` says of its ranks."""
    rows = []
    for row in _lines(HANGS):
        logs = [RankLog.model_validate(log) for log in row["logs"]]
        causes = waits.causes(logs)
        known = [texts("hangs.toml")[cause.id or ""]["ways"] for cause in causes]
        said = {f"rank {rank} says": message or "it trained to its end" for rank, message in row["messages"].items()}
        said["study diagnose"] = ". ".join(each.sentence for each in (*causes, *waits.hangs(logs)))
        said["what to do"] = "".join(cause.remedy or "" for cause in causes)
        named = any(row["way"] in names for names in known)
        rows.append({name: row[name] for name in ("way", "arm", "outcome")} | {"named": named} | said)
    return pd.DataFrame(rows)


def threads() -> pd.DataFrame:
    """Return a row for each public thread about memory: its cause, and the one that `study oom` lists first."""
    return pd.DataFrame(json.loads(THREADS.read_text()))


def loading() -> pd.DataFrame:
    """Return a row for each cell of the load observatory: private host memory of all ranks at the peak, in GB."""
    rows = []
    for row in _lines(LOADING):
        phases = {name: row["phases"][name] for name in ("from_pretrained", "prepare") if name in row["phases"]}
        if not {"prepare", row["last"]} & {*row["phases"]}:
            continue
        saved, loaded = ELEMENT_BYTES[row["saved"]], ELEMENT_BYTES[row["dtype"]]
        # Each model of the cells has a head that is tied to its embedding.
        reads_whole = row["files"] == "legacy"
        load = Load(named(row["model"]), row["way"], row["ranks"], saved, loaded, reads_whole=reads_whole)
        predicted = max(peaks(load)[name] for name in phases)
        measured = max(phase["peak_bytes"] + phase["shared_bytes"] for phase in phases.values())
        about = {name: row[name] for name in ("way", "model", "files", "saved", "dtype", "ranks", "held_out")}
        about |= {"measured_gb": measured / 1e9, "predicted_gb": predicted / 1e9, "ratio": predicted / measured}
        rows.append(about)
    return pd.DataFrame(rows).sort_values(["way", "model", "ranks"])


def watch_cost() -> pd.DataFrame:
    """Return the shares of CPU time and of time that the watch adds: medians of pairs of blocks in one run."""
    kept = json.loads(WATCH_COST.read_text())
    return pd.DataFrame(
        [{"of": name} | kept[name] | {"pairs": kept["pairs"]} for name in ("added_cpu_share", "added_wall_share")]
    )
