"""How far a sweep on Slurm is: a line for each job that changes its state, and on a terminal one that counts them."""

import sys
from collections import Counter
from pathlib import Path

from rich.live import Live
from rich.text import Text

from study.errors import Stop
from study.inputs.files import below
from study.sweeps import jobs, slurm
from study.sweeps.jobs import Submission
from study.sweeps.launches import Turn, last_step
from study.sweeps.slurm import Cluster
from study.sweeps.sweep import Outcome, attempts, done_before, to_resume
from study.text.tables import console, say, show

HOW_TO_STOP = "stopped; the jobs stay in the queue. Start it again to go on, or with --cancel to cancel them"


class Waiting:
    """What a sweep calls when it has asked Slurm, and when a job is over."""

    def __init__(self, turns: int):
        self.turns, self.ended, self.states = turns, 0, {}
        self.console = console()
        self.live = Live(console=self.console, auto_refresh=False, transient=True) if sys.stdout.isatty() else None

    def __enter__(self) -> "Waiting":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_) -> None:
        if self.live:
            self.live.stop()

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)
        sys.stdout.flush()

    def show(self, waiting: list[Submission], left: int) -> None:
        """Say what has changed since the last time."""
        for submission in waiting:
            job = submission.job
            if self.states.get(job.id) != (job.state, job.nodes):
                self.states[job.id] = job.state, job.nodes
                self.say(f"{submission.folder.name}: job {job.id} is {in_words(submission)}")
        if self.live:
            counts = Counter(submission.job.state.lower() for submission in waiting)
            parts = [f"{self.ended} of {self.turns} over", *(f"{count} {state}" for state, count in counts.items())]
            parts += [f"{left} to submit"] if left else []
            running = [position(each.folder) for each in waiting if each.job.state == "RUNNING"]
            self.live.update(Text("  ".join([", ".join(parts), *running[:1]]), no_wrap=True), refresh=True)

    def end(self, turn: Turn, outcome: Outcome) -> None:
        self.ended += 1
        reason = f": {outcome.reason}" if outcome.reason else ""
        self.say(f"[{self.ended}/{self.turns}] {turn.name}  {outcome.status}{reason}")


def in_words(submission: Submission) -> str:
    """A job's state, with why it waits or where it runs and how far it is."""
    job = submission.job
    if job.state == "PENDING":
        return f"pending ({job.reason})" if job.reason else "pending"
    if job.state == "RUNNING":
        return f"running on {job.nodes}, {position(submission.folder)}"
    return job.state.lower()


def position(folder: Path) -> str:
    newest = last_step(folder)
    return f"step {newest['step']}" if newest else "starting"


def show_plan(
    turns: list[Turn], runs: Path, cluster: Cluster, timeout_s: float, nvme_dir: Path | None, print_scripts: bool
) -> None:
    """What each cell would ask Slurm for, and what is known of it already; or the batch scripts of what is not done."""
    try:
        in_slurm = slurm.queue()
    except Stop:
        in_slurm = {}  # a machine without Slurm can show scripts as well
    rows = []
    for turn in turns:
        if turn.cell.rungs:  # a search, whose first job this is
            turn = Turn(turn.cell.at(0), turn.repeat)
        runs_before = runs.is_dir()
        done = runs_before and done_before(runs, turn, cluster.software_is_ours)
        submission = jobs.adopted(runs, turn, in_slurm) if runs_before and not done else None
        stop = jobs.why_not(turn, cluster)
        if submission:
            jobs.update(submission, in_slurm)
        if stop is None and not (done or submission) and print_scripts:
            last = max(attempts(runs, turn), default=0) if runs_before else 0
            folder = below(runs, f"{turn.name}.{last + 1}")
            before = to_resume(runs, turn) if runs_before else None
            say(f"# {folder / jobs.SCRIPT}", slurm.script(turn, folder, cluster, timeout_s, nvme_dir, before))
        nodes, ranks = slurm.layout(turn.cell, cluster) if stop is None else (None, None)
        state = (
            done.status if done else f"job {submission.job.id}: {in_words(submission)}" if submission else "to submit"
        )
        rows.append(
            {"cell": turn.name, "nodes": nodes, "ranks per node": ranks, "state": f"no: {stop.what}" if stop else state}
        )
    if not print_scripts:
        show(rows)
