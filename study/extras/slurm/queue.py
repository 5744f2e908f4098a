"""Shows how far a sweep on Slurm is: a line for each change of a job, and on a terminal a line that counts jobs."""

from collections import Counter
from pathlib import Path

from study.cli.progress import Screen
from study.errors import Stop
from study.extras.slurm import jobs, slurm
from study.extras.slurm.jobs import Submission
from study.extras.slurm.slurm import Cluster
from study.io.files import safe_join
from study.io.tables import say, show
from study.sweeps.launches import Turn, last_step
from study.sweeps.sweep import Outcome, attempts, done_before, to_resume

HOW_TO_STOP = "stopped; the jobs stay in the queue. Run the same command again to wait for them, or with --cancel"


class Waiting(Screen):
    """What a sweep calls after each look at Slurm's queue, and when a job is over."""

    def __init__(self, turns: int):
        super().__init__()
        self.turns, self.ended, self.states = turns, 0, {}

    def show(self, waiting: list[Submission], left: int) -> None:
        """Print the jobs that have changed since the last call."""
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
            self.redraw("  ".join([", ".join(parts), *running[:1]]))

    def end(self, turn: Turn, outcome: Outcome) -> None:
        self.ended += 1
        reason = f": {outcome.reason}" if outcome.reason else ""
        self.say(f"[{self.ended}/{self.turns}] {turn.name}  {outcome.status}{reason}")


def in_words(submission: Submission) -> str:
    """A job's state: why it waits, or where it runs and how far it is."""
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
    """List what each cell asks Slurm for and its state; or print the batch scripts of cells that are not done."""
    try:
        in_slurm = slurm.queue()
    except Stop:
        in_slurm = {}  # scripts can be printed on a machine without Slurm
    rows = []
    for turn in turns:
        if turn.cell.rungs:  # a search for a frontier: show its first job
            turn = Turn(turn.cell.at(0), turn.repeat)
        runs_before = runs.is_dir()
        done = runs_before and done_before(runs, turn, cluster.software_is_ours)
        submission = jobs.adopted(runs, turn, in_slurm) if runs_before and not done else None
        stop = jobs.why_not(turn, cluster)
        if submission:
            jobs.update(submission, in_slurm)
        if stop is None and not (done or submission) and print_scripts:
            last = max(attempts(runs, turn), default=0) if runs_before else 0
            folder = safe_join(runs, f"{turn.name}.{last + 1}")
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
