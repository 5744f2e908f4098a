"""Runs a sweep on Slurm, each cell as a job. Cells that are done or queued are not submitted again.

Each run folder has the batch script `job.sh`, and `job.json` with the job's id. Slurm lists the path of a job's script.
So a job is recognised even if its sweep died before it wrote the id.
"""

import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from study.errors import Stop
from study.extras.slurm import slurm
from study.extras.slurm.slurm import Cluster, Job
from study.io.files import safe_join, write_below
from study.io.load import load
from study.records.schema import Record
from study.sweeps import outcomes
from study.sweeps.launches import Turn
from study.sweeps.protocol import Cell
from study.sweeps.sweep import Outcome, attempts, done_before, lock_runs_folder, not_run, search, to_resume

SCRIPT = "job.sh"
STATE = "job.json"
POLL_S = 10.0
LATE_S = 30  # a network file system may show a node's record so much later
# By a job's state: the status, the reason and the remedy for a run whose trainer could not record them.
TIME = ("timeout", "Slurm ended it at its time limit", "give more time in the cluster file")
NODE = ("failed", "one of its nodes failed", "start the sweep again")
CANCELLED = ("interrupted", "its job was cancelled or preempted", "start the sweep again")
ENDS = {
    "TIMEOUT": TIME,
    "DEADLINE": TIME,
    "OUT_OF_MEMORY": (
        "host_oom",
        "Slurm ended it because it used more host memory than it had asked for",
        "ask for more, such as lines = ['#SBATCH --mem=0'], or give a smaller model",
    ),
    "NODE_FAIL": NODE,
    "BOOT_FAIL": NODE,
    "CANCELLED": CANCELLED,
    "PREEMPTED": CANCELLED,
    "REVOKED": CANCELLED,
    slurm.FORGOTTEN: ("failed", "Slurm does not know its job any more", "see its output.txt; start the sweep again"),
}


DAMAGED = "see in squeue whether its job still runs, then remove this run's folder"
MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class State:
    """The job of a run folder, as its file keeps it."""

    job: int
    collected: bool


@dataclass
class Submission:
    """A submitted turn: its run folder and its job."""

    turn: Turn
    folder: Path
    job: Job  # by Slurm's last answer
    over_since: float | None = None

    def write(self, collected: bool = False) -> None:
        text = json.dumps(asdict(State(self.job.id, collected))) + "\n"
        write_below(self.folder, STATE, text.encode())


def script_of(folder: Path) -> str:
    return str((folder / SCRIPT).resolve())


def sweep(
    turns: list[Turn], runs: Path, cluster: Cluster, timeout_s: float, nvme_dir: Path | None, progress
) -> list[Outcome]:
    """Submit the turns that are not done, and wait for all of them. `progress` is called at each change."""
    outcomes: list[Outcome] = []

    def run(wanted: list[Turn]) -> None:
        queue = Queue(wanted, runs, cluster, timeout_s, nvme_dir)
        while not queue.is_empty:
            for turn, outcome in queue.advance(progress):
                outcomes.append(outcome)
                progress.end(turn, outcome)
            if not queue.is_empty:
                progress.show(queue.waiting, len(queue.to_submit))
                time.sleep(POLL_S)

    def frontier(turn: Turn) -> str:
        def run_and_wait(cell: Cell) -> str:
            run([Turn(cell, turn.repeat)])
            return outcomes[-1].status

        return search(turn.cell, run_and_wait)

    with lock_runs_folder(runs):
        run([turn for turn in turns if not turn.cell.rungs])
        for turn in turns:
            if turn.cell.rungs:
                progress.say(frontier(turn))
    return outcomes


class Queue:
    """The turns that are not over yet: those to submit, and those that Slurm has."""

    def __init__(self, turns: list[Turn], runs: Path, cluster: Cluster, timeout_s: float, nvme_dir: Path | None):
        self.runs = runs
        self.cluster = cluster
        self.timeout_s = timeout_s
        self.nvme_dir = nvme_dir
        self.waiting: list[Submission] = []
        self.to_submit: list[Turn] = []
        self.over: list[tuple[Turn, Outcome]] = []  # turns that were over at the start
        in_slurm = slurm.queue()
        for turn in turns:
            if record := done_before(runs, turn, cluster.software_is_ours):
                self.over.append((turn, _outcome(record)))
            elif submission := adopted(runs, turn, in_slurm):
                self.waiting.append(submission)
            elif stop := why_not(turn, cluster):
                self.over.append((turn, _outcome(not_run(turn, runs, stop))))
            else:
                self.to_submit.append(turn)

    @property
    def is_empty(self) -> bool:
        return not (self.waiting or self.to_submit or self.over)

    def advance(self, progress) -> list[tuple[Turn, Outcome]]:
        """List Slurm's jobs, collect those that are over, and submit as many as max_jobs allows."""
        over = self.over
        self.over = []
        try:
            over += collect(self.waiting)
        except Stop as stop:  # its controller may be restarting
            progress.say(f"{stop.what}; asking again in {POLL_S:.0f} s")
            return over
        while self.to_submit and len(self.waiting) < self.cluster.max_jobs:
            try:
                self.waiting.append(self.submit(self.to_submit[0]))
            except Stop as stop:
                if not self.waiting:
                    raise
                progress.say(f"{stop.what}; trying again when a job has ended")  # there may be a limit for each user
                self.cluster = self.cluster.model_copy(update={"max_jobs": len(self.waiting)})
                break
            self.to_submit.pop(0)
        return over

    def submit(self, turn: Turn) -> Submission:
        folder = safe_join(self.runs, f"{turn.name}.{max(attempts(self.runs, turn), default=0) + 1}")
        before = to_resume(self.runs, turn)
        text = slurm.script(turn, folder, self.cluster, self.timeout_s, self.nvme_dir, before)
        folder.mkdir()
        (folder / SCRIPT).write_text(text)
        try:
            number = slurm.submit(Path(script_of(folder)))
        except Stop:
            shutil.rmtree(folder)  # there was no run
            raise
        submission = Submission(turn, folder, Job(number, "PENDING"))
        submission.write()
        return submission


def why_not(turn: Turn, cluster: Cluster) -> Stop | None:
    try:
        slurm.layout(turn.cell, cluster)
    except Stop as stop:
        return stop
    return None


def adopted(runs: Path, turn: Turn, in_slurm: dict[str, Job]) -> Submission | None:
    """The job that an earlier sweep submitted for this turn and did not collect. None if there is none."""
    for folder in reversed(attempts(runs, turn).values()):
        if not (folder / SCRIPT).exists():
            continue
        if (folder / STATE).exists():
            state = load(folder / STATE, State, what="the state of a job", remedy=DAMAGED, most_bytes=MAX_BYTES)
            if not state.collected:
                return Submission(turn, folder, Job(state.job, "PENDING"))
            continue
        if job := in_slurm.get(script_of(folder)):  # the sweep died between submitting and writing
            submission = Submission(turn, folder, job)
            submission.write()
            return submission
    return None


def update(submission: Submission, in_slurm: dict[str, Job]) -> None:
    """Update a submission's job from Slurm's answer."""
    number = submission.job.id
    job = in_slurm.get(script_of(submission.folder), Job(number, slurm.FORGOTTEN))
    submission.job = slurm.ended(number) or job if job.is_over else job


def collect(waiting: list[Submission]) -> list[tuple[Turn, Outcome]]:
    """Take the jobs that are over out of the list, and return their outcomes."""
    in_slurm = slurm.queue()
    over = []
    for submission in list(waiting):
        update(submission, in_slurm)
        if outcome := collected(submission):
            waiting.remove(submission)
            over.append((submission.turn, outcome))
    return over


def collected(submission: Submission) -> Outcome | None:
    """The outcome of a job that is over, with its record completed. None if it is not over."""
    if not submission.job.is_over:
        return None
    submission.over_since = submission.over_since or time.monotonic()
    record = outcomes.read(submission.folder)
    folder = submission.folder
    unclear = submission.job.state in ("COMPLETED", "FAILED") and (record is None or record.status == "running")
    if unclear and time.monotonic() < submission.over_since + LATE_S:
        return None
    (folder / "output.txt").touch()
    stop = why(submission.job, record)
    record = outcomes.outcome(submission.turn, folder, submission.job.exit_code, stop, outcomes.OomKills())
    submission.write(collected=True)
    return _outcome(record)


def why(job: Job, record: Record | None) -> Stop | None:
    """Return why a job ended, if Slurm knows more than the record."""
    if job.state not in ENDS or (record and record.status == "failed" and job.state != "OUT_OF_MEMORY"):
        return None
    status, what, remedy = ENDS[job.state]
    return Stop(f"{what} (job {job.id})", remedy, status)


def cancel(turns: list[Turn], runs: Path, progress) -> list[Outcome]:
    """Cancel the jobs of these turns, and collect their outcomes."""
    turns = [Turn(cell, turn.repeat) for turn in turns for cell in turn.cell.every_rung()]
    with lock_runs_folder(runs):
        in_slurm = slurm.queue()
        waiting = [submission for turn in turns if (submission := adopted(runs, turn, in_slurm))]
        slurm.cancel([submission.job.id for submission in waiting])
        outcomes = []
        while waiting:
            for turn, outcome in collect(waiting):
                outcomes.append(outcome)
                progress.end(turn, outcome)
            if waiting:
                time.sleep(1)
    return outcomes


def _outcome(record: Record) -> Outcome:
    error = record.error
    return Outcome(record.status, f"{error.message}. What to do: {error.what_to_do}" if error else None)
