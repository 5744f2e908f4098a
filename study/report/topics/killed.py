"""What killed a run: hangs, whether `study oom` names what threads about memory name, and host memory while loading."""

import json
from pathlib import Path

import pandas as pd

from study.core.arms import ROOT
from study.predict.front import Load, named, peaks
from study.records.collectives import RankLog
from study.records.runs import Runs
from study.watch import hangs as waits
from study.watch.findings import texts

HANGS = ROOT / "reports" / "cpu-2core" / "hangs.jsonl"
LOADING = ROOT / "reports" / "cpu-2core" / "loading.jsonl"
THREADS = ROOT / "reports" / "oom_threads.json"
HALVES = {
    "looked_at": "ten, drawn from the 76 that were looked at while the rules were written; of all 76, 61 are named",
    "last": "collected after the first rules were final, which named 14; simplified since, on the other 76 alone",
}
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
FIRST_SCORE = "Of the held-out half 16 were close at first. Then a mistake was mended: a single rank has DDP too"
RELEASES = LOADING.with_name("loading_releases.jsonl")
WATCH_COST = LOADING.with_name("watch_cost.json")
CLOSE = 0.05  # of what was measured
COMMAND = "python reproductions/laboratories/hangs.py reports/cpu-2core/hangs.jsonl"
LOADING_COMMAND = "python reproductions/laboratories/loading.py reports/cpu-2core/loading.jsonl"


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def hangs(path: Path = HANGS) -> pd.DataFrame:
    """Return a row for each way and arm of the hang laboratory, with what `study diagnose` says of its ranks."""
    return pd.DataFrame([row | _diagnosed(row) for row in _lines(path)])


def _diagnosed(row: dict) -> dict:
    logs = [RankLog.model_validate(log) for log in row["logs"]]
    causes = waits.causes(logs)
    explained = [texts("hangs.toml")[cause.id or ""]["ways"] for cause in causes]
    findings = [finding.sentence for finding in waits.hangs(logs)]
    return {"findings": findings, "causes": causes, "named": any(row["way"] in names for names in explained)}


def by_arm(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each way: what happens under each arm."""
    if rows.empty:
        return rows
    wide = rows.pivot_table(index="way", columns="arm", values="outcome", aggfunc="first", sort=False)
    return wide.rename(index=lambda name: name.replace("_", " ")).reset_index()


def messages(rows: pd.DataFrame) -> pd.DataFrame:
    """Return what the ranks say at the end of each training that did not end well, and what `study diagnose` says."""
    if rows.empty:
        return rows
    bad = rows[rows["outcome"] != "trains"]
    listed = [
        {
            "way": row["way"].replace("_", " "),
            "arm": row["arm"],
            "rank 0 says": row["messages"]["0"] or "it trained to its end",
            "rank 1 says": row["messages"]["1"] or "it trained to its end",
            "study diagnose": ". ".join([*(cause.sentence for cause in row["causes"]), *row["findings"]]),
            "what to do": "".join(cause.remedy for cause in row["causes"]),
        }
        for _, row in bad.iterrows()
    ]
    return pd.DataFrame(listed)


def hangs_in_words(rows: pd.DataFrame) -> str:
    """Return how many trainings hang, and in how many of them the cause is named."""
    if rows.empty:
        return ""
    hung = rows[rows["outcome"] == "hangs"]
    return (
        f"**{len(hung)} of {len(rows)} trainings hang** ({rows['way'].nunique()} ways under {rows['arm'].nunique()} "
        f"arms); `study diagnose` names the cause of {int(hung['named'].sum())}. Its patterns were written on these "
        "very trainings, so they may name fewer of others."
    )


def ended_badly(runs: Runs) -> pd.DataFrame:
    """Return a row for each run that did not end well, with its own reason."""
    rows = [
        {
            "run": run.record.run_id,
            "arm": run.record.arm,
            "status": run.record.status,
            "error": error.message,
            "what to do": error.what_to_do,
        }
        for run in runs
        if (error := run.record.error) is not None
    ]
    return pd.DataFrame(rows)


def threads(path: Path = THREADS) -> pd.DataFrame:
    """Return a row for each public thread about memory: its cause, and the one that `study oom` lists first."""
    return pd.DataFrame(json.loads(path.read_text())) if path.exists() else pd.DataFrame()


def scores(rows: pd.DataFrame) -> pd.DataFrame:
    """Return how many threads of each half are named as their solutions name them."""
    if rows.empty:
        return rows
    grouped = rows.groupby("half", sort=False)["hit"].agg(["sum", "count"])
    table = [
        {
            "threads": half,
            "which are": HALVES[str(half)],
            "named": f"{named} of {count}",
            "share": f"{named / count:.0%}",
        }
        for half, (named, count) in grouped.iterrows()
    ]
    return pd.DataFrame(table)


def misses(rows: pd.DataFrame) -> pd.DataFrame:
    """Return each thread whose cause is not listed first."""
    if rows.empty:
        return rows
    missed = rows[~rows["hit"]]
    return missed[["half", "url", "cause", "why", "named"]].rename(
        columns={"cause": "its cause", "why": "in the thread's words", "named": "study oom lists first"}
    )


def loading(path: Path = LOADING) -> pd.DataFrame:
    """Return a row for each cell of the load observatory: private host memory at the peak, measured and predicted."""
    rows = [row | _peaks(row) for row in _lines(path) if {"prepare", row["last"]} & {*row["phases"]}]
    return pd.DataFrame(rows).sort_values(["way", "model", "ranks"]) if rows else pd.DataFrame()


def _peaks(row: dict) -> dict[str, float]:
    """Return the highest private memory of all ranks until they have prepared the model, in GB."""
    saved, loaded = ELEMENT_BYTES[row["saved"]], ELEMENT_BYTES[row["dtype"]]
    legacy = row["files"] == "legacy"
    # Each model of the cells has a head that is tied to its embedding.
    load = Load(named(row["model"]), row["way"], row["ranks"], saved, loaded, reads_whole=legacy)
    phases = {name: row["phases"][name] for name in ("from_pretrained", "prepare") if name in row["phases"]}
    predicted = max(peaks(load)[name] for name in phases)
    measured = max(phase["peak_bytes"] + phase["shared_bytes"] for phase in phases.values())
    before = sum(row["phases"]["imports"]["private_bytes"])
    return {
        "measured_gb": measured / 1e9, "predicted_gb": predicted / 1e9, "ratio": predicted / measured,
        "beyond": (predicted - before) / (measured - before),
        "cache_gb": max(phase["cache_rank_peak_bytes"] for phase in phases.values()) / 1e9,
    }  # fmt: skip


def loading_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the cells for readers."""
    if rows.empty:
        return rows
    table = rows.assign(half=rows["held_out"].map({True: "held out", False: "looked at"}))
    names = {"measured_gb": "measured GB", "predicted_gb": "predicted GB", "ratio": "predicted / measured"}
    names |= {"beyond": "ratio without libraries", "cache_gb": "mapped by a rank, GB"}
    return table[["way", "model", "files", "saved", "dtype", "ranks", "half", *names]].rename(columns=names)


def loading_in_words(rows: pd.DataFrame) -> str:
    """Return how many predictions are close, in each half, and for which ways they are not."""
    if rows.empty:
        return ""
    close = (rows["ratio"] - 1).abs() <= CLOSE
    halves = [
        f"{int(close[half].sum())} of {int(half.sum())} {name}"
        for name, half in (("looked at", ~rows["held_out"]), ("held out", rows["held_out"]))
    ]
    far = ", ".join(sorted(rows["way"][~close].unique())) or "none"
    return (
        f"**{int(close.sum())} of {len(rows)} peaks are predicted within {CLOSE:.0%}**: {', '.join(halves)}. "
        f"Ways with misses: {far}. {FIRST_SCORE}."
    )


def releases(path: Path = RELEASES) -> pd.DataFrame:
    """Return the private memory that loading adds, in whole models, by release of transformers and Accelerate.

    A line is a cell that was run with several releases. `prepare` is on a CPU, so its peak holds the states too.
    """
    others = [row for row in _lines(path) if row["outcome"] == "loads"]
    names = {row["cell"] for row in others}
    rows = [*others, *(row for row in _lines(LOADING) if row["cell"] in names)]
    table = pd.DataFrame([_release(row) for row in rows])
    return table.sort_values(["way", "transformers", "accelerate"]) if rows else table


def _release(row: dict) -> dict:
    size = row["parameters"] * ELEMENT_BYTES[row["dtype"]]
    first, *rest = _added(row["phases"], "from_pretrained")
    return {
        "way": row["way"],
        "transformers": row["software"]["transformers"],
        "accelerate": row["software"]["accelerate"],
        "whole models on rank 0": first / size,
        "on each other rank": max(rest) / size,
        "on all ranks at prepare": sum(_added(row["phases"], "prepare")) / size,
    }


def _added(phases: dict, name: str) -> list[int]:
    pairs = zip(phases[name]["rank_peak_bytes"], phases["imports"]["private_bytes"], strict=True)
    return [peak - before for peak, before in pairs]


def watch_cost(path: Path = WATCH_COST) -> str:
    """Return what the watch costs, with its spread."""
    if not path.exists():
        return ""
    kept = json.loads(path.read_text())
    kinds = [
        f"{share['median']:.2%} of the {name} ({share['low']:.2%} to {share['high']:.2%})"
        for name, share in (("CPU time", kept["added_cpu_share"]), ("clock", kept["added_wall_share"]))
    ]
    step_ms = 1e3 * kept["step_cpu_s"]["median"]
    return (
        f"**The watch adds {' and '.join(kinds)}** to steps of {step_ms:.0f} ms: medians of {kept['pairs']:,} pairs of "
        "blocks in one run, with and without it in random order. It is one rank, on a CPU."
    )
