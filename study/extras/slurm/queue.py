"""Shows how far a sweep on Slurm is: a line for each change of a job, and on a terminal a line that counts jobs."""

from collections import Counter
from pathlib import Path

from study.cli.progress import Screen
from study.errors import Stop
from study.extras.slurm import jobs, slurm
from study.extras.slurm.jobs import Submission
from study.extras.slurm.slurm import Cluster, Job
from study.io.files import safe_join
from study.io.tables import say, show
from study.sweeps.launches import Turn, last_step
from study.sweeps.sweep import Outcome, attempts, done_before, to_resume

TO_SUBMIT = "to submit"
HOW_TO_STOP = "stopped; the jobs stay in the queue. Run the same command again to wait for them, or with --cancel"


class Waiting(Screen):
    """What a sweep calls after each look at Slurm's queue, and when a job is over."""

    def __init__(self, turns: int):
        super().__init__()
        self.turns = turns
        self.ended = 0
        self.states: dict[int, tuple[str, str | None]] = {}

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
    # Of a search for a frontier, its first job.
    turns = [Turn(turn.cell.at(0), turn.repeat) if turn.cell.rungs else turn for turn in turns]
    try:
        in_slurm = slurm.queue()
    except Stop:
        in_slurm = {}  # scripts can be printed on a machine without Slurm
    states = [state(turn, runs, cluster, in_slurm) for turn in turns]
    if not print_scripts:
        return show([row(turn, cluster, state) for turn, state in zip(turns, states, strict=True)])
    for turn, state_now in zip(turns, states, strict=True):
        if state_now == TO_SUBMIT:
            folder = safe_join(runs, f"{turn.name}.{max(attempts(runs, turn), default=0) + 1}")
            text = slurm.script(turn, folder, cluster, timeout_s, nvme_dir, to_resume(runs, turn))
            say(f"# {folder / jobs.SCRIPT}", text)


def state(turn: Turn, runs: Path, cluster: Cluster, in_slurm: dict[str, Job]) -> str:
    """Return what has become of a turn so far."""
    if stop := jobs.why_not(turn, cluster):
        return f"no: {stop.what}"
    if record := done_before(runs, turn, cluster.software_is_ours):
        return record.status
    if submission := jobs.adopted(runs, turn, in_slurm):
        jobs.update(submission, in_slurm)
        return f"job {submission.job.id}: {in_words(submission)}"
    return TO_SUBMIT


def row(turn: Turn, cluster: Cluster, state: str) -> dict[str, object]:
    nodes, ranks = (None, None) if state.startswith("no: ") else slurm.layout(turn.cell, cluster)
    return {"cell": turn.name, "nodes": nodes, "ranks per node": ranks, "state": state}
