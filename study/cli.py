"""The `study` command: what there is to run, and what was run.

study arms            the arms: what each file says, and whether it can run here
study doctor          what this machine has and lacks
study sweep NAME      run a declared experiment; start it again to go on
study runs DIR        the runs below a folder, as a table
study compare DIR...  time and memory of equal cells, in one folder or in several
"""

import dataclasses
import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.extras import SubcommandApp

from study import compare as comparing
from study import doctor as examining
from study import protocol, record
from study import sweep as sweeping
from study.arms import ROOT, all_paths, read
from study.record import Stop

app = SubcommandApp()
AsJson = Annotated[bool, tyro.conf.arg(name="json")]

NO_ANSWER = {"failed", "timeout", "interrupted"}  # out of memory is an answer: a run told how much is too much


def main() -> None:
    """The console script. A user's mistake is one sentence and an exit code that is not 0."""
    # The environment's own programs (ninja, for one) are found whether it was activated or not.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        app.cli(prog="study", description=__doc__.partition("\n")[0])
    except Stop as stop:
        sys.exit(f"{stop.what}. What to do: {stop.remedy}.")


@app.command
def arms() -> None:
    """List the arms and what their files say."""
    homes = {"none": "device", "cpu": "host", "nvme": "disk"}
    gpus = sweeping.num_gpus()
    rows = []
    for name, path in all_paths().items():
        arm = read(path)
        stop = examining.why_not(arm, gpus)
        rows.append(
            {
                "arm": name,
                "stage": arm.stage,
                "optimizer states": homes[arm.offload_optimizer],
                "weights": homes[arm.offload_param],
                "file": path.relative_to(ROOT),
                "here": "yes" if stop is None else f"no: {stop.what}; {stop.remedy}",
            }
        )
    show(rows)


@app.command
def doctor(*, nvme_dir: Path = Path("runs")) -> None:
    """Say what this machine has and lacks, and what to do about it. Exit code 1 if anything is lacking.

    Args:
        nvme_dir: Where arms that offload to disk would write: its speed is measured.
    """
    findings = examining.examine(nvme_dir)
    show([{"": "ok" if one.fine else "NO", "what": one.what, "found": one.found} for one in findings])
    for one in findings:
        if not one.fine:
            sys.stdout.write(f"{one.what}: {one.remedy}\n")
    sys.exit(0 if all(one.fine for one in findings) else 1)


@app.command
def runs(folder: tyro.conf.Positional[Path], /, *, as_json: AsJson = False) -> None:
    """List the runs below a folder.

    Args:
        folder: Any folder with runs in it, at any depth.
        as_json: Print the rows as JSON instead of a table.
    """
    paths = sorted(folder.glob("**/record.json"))
    rows = [row(path.parent) for path in paths]
    if not rows:
        raise Stop(f"there is no run below {folder}", "name a folder that holds run folders")
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return
    show(rows)
    for path, values in zip(paths, rows, strict=True):
        if values["status"] != "done":
            sys.stdout.write(f"{values['run']}: {_why(path.parent)}\n")


@app.command
def compare(folders: tyro.conf.Positional[tuple[Path, ...]], /, *, as_json: AsJson = False) -> None:
    """Hold time and memory of equal cells side by side, over folders and machines; unlike ones are never pooled.

    Args:
        folders: Folders with runs in them, at any depth.
        as_json: Print what was found as JSON instead of a table.
    """
    found = comparing.compare(list(folders))
    text = json.dumps(dataclasses.asdict(found), indent=1) if as_json else "\n".join(comparing.lines(found))
    sys.stdout.write(text + "\n")


@app.command
def sweep(
    name: tyro.conf.Positional[str],
    /,
    *,
    scale: Literal["paper", "one_gpu", "tiny"] = "tiny",
    runs: Path = Path("runs"),
    only: tuple[str, ...] = (),
    repeat: int = 1,
    timeout_s: float = 3600,
    nvme_dir: Path | None = None,
    dry_run: bool = False,
) -> None:
    """Run a declared experiment: each cell a fresh launch, each outcome a record. Start it again to go on.

    Args:
        name: A protocol in study/protocols/, or a .toml file.
        scale: paper: as published. one_gpu: the most that one GPU can do. tiny: minutes on two CPU cores.
        runs: Where the run folders go. What is done there is not done again.
        only: Filters, as in 'arm=zero3*' 'seed=42'. All must hold.
        repeat: How often each cell is run, interleaved.
        timeout_s: Seconds after which a run is ended.
        nvme_dir: Where arms that offload to disk may write.
        dry_run: Show the cells and what each needs, and run nothing.
    """
    cells = sweeping.chosen(protocol.cells(protocol.read(name), scale), only)
    turns = sweeping.plan(cells, repeat)
    if dry_run:
        plan(cells)
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGINT too: in the background it starts ignored
        signal.signal(number, signal.default_int_handler)
    tell = Progress(len(turns))
    try:
        made = sweeping.sweep(turns, runs, timeout_s, nvme_dir, tell)
    except KeyboardInterrupt:
        sys.exit("stopped; start it again to go on")
    counts = Counter(one["status"] for one in made)
    tell.say(", ".join(f"{count} {status}" for status, count in counts.items()) + f"; study runs {runs} shows them")
    sys.exit(1 if set(counts) & NO_ANSWER else 0)


def plan(cells: list[protocol.Cell]) -> None:
    """The cells as a table: what each needs, and why this machine cannot run it, if so."""
    gpus = sweeping.num_gpus()
    axes = [key for key in cells[0].asked if len({str(cell.asked.get(key)) for cell in cells}) > 1] if cells else []
    rows = []
    for cell in cells:
        stop = sweeping.why_not(cell, gpus)
        rows.append(
            {
                "cell": cell.name,
                "ranks": cell.ranks or (1 if cell.arm == "single" else gpus or 2),
                **{key: cell.asked.get(key) for key in axes},
                "here": "yes" if stop is None else f"no: {stop.what}",
            }
        )
    show(rows)


class Progress:
    """Tells a person how far a sweep is: a line that changes on a terminal, plain lines elsewhere."""

    def __init__(self, turns: int):
        self.turns, self.ended, self.ran, self.started = turns, 0, 0, time.monotonic()
        self.ran_now = False  # whether this turn was run, and not found done
        self.live = sys.stdout.isatty()

    def say(self, text: str, end: str = "\n") -> None:
        sys.stdout.write(("\r\x1b[K" if self.live else "") + text + end)
        sys.stdout.flush()

    def start(self, turn: sweeping.Turn) -> None:
        self.turn = turn
        if not self.live:
            self.say(f"[{self.ended + 1}/{self.turns}] {turn.name}{self.left()}")

    def step(self, folder: Path, seconds: float) -> None:
        if self.live:
            now = sweeping.last_step(folder)
            at = f"step {now['step']}  loss {now['loss']:.4f}" if now else "starting"
            self.say(f"[{self.ended + 1}/{self.turns}] {self.turn.name}  {at}  {seconds:.0f} s{self.left()}", end="")

    def left(self) -> str:
        """What remains, from the turns of this sweep that were run: nothing before there is one."""
        if not self.ran:
            return ""
        minutes = (time.monotonic() - self.started) / self.ran * (self.turns - self.ended) / 60
        return f"  about {minutes:.0f} min left" if minutes >= 1 else "  under a minute left"

    def end(self, turn: sweeping.Turn, made: dict, ran: bool) -> None:
        self.ran_now |= ran
        word = made["status"] if ran or made["status"] != "done" else "done before"
        why = "" if made["status"] == "done" else f": {made['error']['message']}"
        self.say(f"[{self.ended + 1}/{self.turns}] {turn.name}  {word}{why}")

    def next(self) -> None:
        """On to the next turn. One that looks for a frontier has many runs, and is over when all of them are."""
        self.ended, self.ran, self.ran_now = self.ended + 1, self.ran + self.ran_now, False


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
        "ranks": f"{seen['ranks']} virtual" if seen.get("virtual_ranks") else seen.get("ranks"),
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


def _why(folder: Path) -> str:
    try:
        error = record.load(folder)["error"]
    except Stop as stop:
        return stop.what
    return f"{error['message']}. What to do: {error['what_to_do']}." if error else "still running, or killed"


def show(rows: list[dict]) -> None:
    """A table in plain text: columns as wide as they need, what is not known a dash."""
    if not rows:
        return
    columns = {}
    for row in rows:
        columns |= dict.fromkeys(row)
    lines = [list(columns), *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    sys.stdout.write(text + "\n")
