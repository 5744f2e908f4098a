"""The `study` command: what there is to run, and what was run.

study arms          the arms: what each file says
study runs DIR      the runs below a folder, as a table
"""

import json
import statistics
import sys
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Column, Table
from tyro.extras import SubcommandApp

from study import record
from study.arms import ROOT, all_paths, read
from study.record import Stop

app = SubcommandApp()


def main() -> None:
    """The console script. A user's mistake is one sentence and exit code 2."""
    try:
        app.cli(prog="study", description=__doc__)
    except Stop as stop:
        sys.exit(f"{stop.what}. What to do: {stop.remedy}.")


@app.command
def arms() -> None:
    """List the arms and what their files say."""
    table = Table("arm", "stage", "optimizer states", "weights", Column("file", overflow="fold"), box=None)
    for name, path in all_paths().items():
        arm = read(path)
        homes = {"none": "device", "cpu": "host", "nvme": "disk"}
        stage = "-" if arm.stage is None else str(arm.stage)
        where = path.relative_to(ROOT)
        table.add_row(name, stage, homes[arm.offload_optimizer], homes[arm.offload_param], str(where))
    Console().print(table)


@app.command
def runs(folder: tyro.conf.Positional[Path], /, *, as_json: bool = False) -> None:
    """List the runs below a folder.

    Args:
        folder: Any folder with runs in it, at any depth.
        as_json: Print the rows as JSON instead of a table.
    """
    rows = [row(path.parent) for path in sorted(folder.glob("**/record.json"))]
    if not rows:
        raise Stop(f"there is no run below {folder}", "name a folder that holds run folders")
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return
    table = Table(*rows[0], box=None)
    for values in rows:
        table.add_row(*(_cell(value) for value in values.values()))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    for values in rows:
        if values["status"] != "done":
            Console().print(f"{values['run']}: {_why(folder, values['run'])}", highlight=False, markup=False)


def row(folder: Path) -> dict:
    """One run as a line of a table. What a run does not know is None."""
    try:
        made = record.load(folder)
    except Stop:
        return {"run": folder.name, "status": "unreadable"}
    asked, seen = made["requested"] or {}, made["observed"] or {}
    loss, time, memory = made["loss"] or {}, made["time"] or {}, made["memory"] or {}
    final, traffic = loss.get("final_eval") or {}, (made["traffic"] or {}).get("per_rank") or []
    components = ((memory.get("components") or {}).get("per_rank") or [{}])[0]
    written = [rank.get("nvme_written_bytes") for rank in memory.get("per_rank") or []]
    return {
        "run": folder.name,
        "status": made["status"],
        "arm": asked.get("arm"),
        "task": asked.get("task"),
        "precision": asked.get("precision"),
        "ranks": seen.get("ranks"),
        "stage": seen.get("stage"),
        "loss": loss.get("final_train"),
        "eval loss": final.get("eval_loss"),
        "s/step": statistics.median(time["step_s"]) if time.get("step_s") else None,
        "tracked peak MB": _mega(components.get("tracked_peak_bytes")),
        "collectives MB": _mega(sum(entry["bytes"] for entry in traffic[0].values())) if traffic else None,
        "to disk MB": _mega(sum(written)) if written and None not in written else None,
    }


def _mega(value: float | None) -> float | None:
    return None if value is None else value / 1e6


def _cell(value) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _why(folder: Path, run: str) -> str:
    path = next(path for path in folder.glob("**/record.json") if path.parent.name == run)
    try:
        error = record.load(path.parent)["error"]
    except Stop as stop:
        return stop.what
    return f"{error['message']}. What to do: {error['what_to_do']}." if error else "still running, or killed"
