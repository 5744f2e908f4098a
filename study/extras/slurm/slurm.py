"""Slurm: reads a cluster file, writes the batch script of a cell, and submits, lists and cancels jobs.

`examples/cluster.toml` shows a cluster file. A job has one task on each of its nodes, and that task becomes the node's
`accelerate launch` (study/extras/hosts/multinode.py).
"""

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

import study
from study.errors import Stop
from study.io import files
from study.io import parsing as texts
from study.io.validation import sentence
from study.records import store
from study.spec import arms
from study.sweeps.launches import Turn, flags
from study.sweeps.protocol import Cell, Table

TIME = re.compile(r"(\d+-)?\d+(:\d{2}){0,2}")  # as sbatch takes it: minutes, 02:00:00, 1-12:00:00
RANKS_WITHOUT_GPU = 2
ANSWERS_WITHIN_S = 60
FORGOTTEN = "FORGOTTEN"  # our own state: a job that Slurm no longer knows
OVER = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT", FORGOTTEN),
)
MAX_BYTES = 2**16  # of a cluster file
PORT = "$((20000 + SLURM_JOB_ID % 10000))"  # below the kernel's own ports; jobs may share a node
# NodeAddr is the address by which Slurm reaches a node. Other nodes need not know its name.
HOSTS = """\
hosts=$(for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  scontrol show node --oneliner "$node" | grep -o ' NodeAddr=[^ ]*' | cut -d= -f2
done | paste -s -d,)"""


def _time(text: str) -> str:
    if not TIME.fullmatch(text):
        raise ValueError(f"must be a time as sbatch takes it, such as '02:00:00' (got {text!r})")
    return text


def _directive(line: str) -> str:
    if not line.startswith("#SBATCH ") or not line.isprintable():
        raise ValueError(f"must hold lines that begin with '#SBATCH ' (got {line!r})")
    return line


class Cluster(Table):
    """A cluster file: what a job requests from Slurm, and how a node runs it."""

    nodes: PositiveInt = 1  # the most nodes for a cell
    gpus_per_node: NonNegativeInt
    ranks_per_node: PositiveInt | None = None  # for nodes without GPUs; otherwise one rank for each GPU
    cpus_per_node: PositiveInt | None = None
    partition: str | None = None
    account: str | None = None
    time: Annotated[str, AfterValidator(_time)] | None = None  # by default --timeout-s
    lines: list[Annotated[str, AfterValidator(_directive)]] = Field(default_factory=list)  # more #SBATCH lines
    setup: str | None = None  # shell commands before the launch: modules, variables, an environment
    srun: list[str] = Field(default_factory=list)  # options of srun, such as Pyxis's --container-image
    container: str | None = None  # a command in front of the launch on each node: apptainer exec --nv study.sif
    python: str | None = None  # on a node; by default the one that runs the sweep
    node_dir: str | None = None  # on each node's own disk: for compiled operators and offloading
    max_jobs: Annotated[int, Field(ge=1)] = 50  # the most jobs in the queue

    @model_validator(mode="after")
    def _has_ranks(self):
        if self.gpus_per_node and self.ranks_per_node not in (None, self.gpus_per_node):
            raise ValueError("ranks_per_node is for nodes without a GPU; with GPUs each has one rank")
        return self

    @property
    def per_node(self) -> int:
        return self.gpus_per_node or self.ranks_per_node or RANKS_WITHOUT_GPU

    @property
    def software_is_ours(self) -> bool:
        """Return whether the nodes use the Python environment of this process, and so the same versions."""
        return not (self.container or self.setup or self.python or self.srun)


def read(path: Path) -> Cluster:
    """Read and check a cluster file."""
    try:
        return Cluster.model_validate(texts.from_toml(files.read(path, MAX_BYTES)))
    except OSError as error:
        what = f"the cluster file {path} cannot be read ({error.strerror})"
        raise Stop(what, "name one with --cluster-file; examples/cluster.toml is one to start from") from None
    except ValidationError as error:
        what = sentence(error, Cluster.model_fields, name=lambda where: f"{path.name}: {' '.join(where)}".rstrip(": "))
        raise Stop(what.rstrip("?"), "correct the file; examples/cluster.toml explains its keys") from None
    except ValueError as error:
        raise Stop(f"{path} is not valid TOML: {error}", "correct the file") from None


def layout(cell: Cell, cluster: Cluster) -> tuple[int, int]:
    """The nodes of a cell, and the ranks on each. A Stop if the cluster file has too few."""
    if cell.value("hosts"):
        raise Stop("this cell runs over an emulated cluster", "run it without --on slurm", "unavailable")
    arm = arms.read(arms.all_paths()[cell.arm])
    if cell.value("virtual_ranks") or arm.distributed_type == "NO" or cell.script != "train":
        return 1, cell.ranks or 1
    ranks = cell.ranks or cluster.nodes * cluster.per_node
    if not cluster.gpus_per_node and cell.scale != "tiny":
        raise Stop(f"scale {cell.scale} needs GPUs, and the cluster file has none", "give --scale tiny", "unavailable")
    if ranks <= cluster.per_node:
        return 1, ranks
    nodes, rest = divmod(ranks, cluster.per_node)
    if rest:
        what = f"{ranks} ranks do not fill nodes of {cluster.per_node}"
        raise Stop(what, "give nodes with another number of GPUs", "unavailable")
    if nodes > cluster.nodes:
        what = f"{ranks} ranks need {nodes} nodes of {cluster.per_node}, and the cluster file has {cluster.nodes}"
        raise Stop(what, "give it more nodes", "unavailable")
    return nodes, cluster.per_node


def script(
    turn: Turn,
    folder: Path,
    cluster: Cluster,
    timeout_s: float,
    nvme_dir: Path | None = None,
    resumed: Path | None = None,
) -> str:
    """The batch script of a cell. `resumed` is an earlier try that left a checkpoint to resume from."""
    nodes, ranks = layout(turn.cell, cluster)
    head = {
        "job-name": f"study-{folder.name}",
        "nodes": nodes,
        "ntasks-per-node": 1,
        "gres": f"gpu:{ranks}" if cluster.gpus_per_node else None,  # known to older Slurms too, unlike --gpus-per-node
        "cpus-per-task": cluster.cpus_per_node,
        "partition": cluster.partition,
        "account": cluster.account,
        "time": cluster.time or f"{max(1, round(timeout_s / 60))}",
        "chdir": arms.ROOT,
        "output": folder.resolve() / "output.txt",
    }
    # --no-requeue: Slurm would run the job again in the same folder, but the sweep repeats it in a new folder.
    lines = [f"#SBATCH --{name}={value}" for name, value in head.items() if value is not None]
    python = shlex.quote(cluster.python or sys.executable)
    launch = ["--processes", str(ranks)]
    launch += ["--node-dir", cluster.node_dir] if cluster.node_dir else []
    launch += [
        str(arms.all_paths()[turn.cell.arm]),
        *flags(turn.cell, folder.resolve(), nvme_dir, resumed and resumed.resolve()),
    ]
    # Without --cpu-bind=none, a task may have one core, which all ranks of its node would share.
    srun = ["srun", "--kill-on-bad-exit=1", "--cpu-bind=none", *(["--label"] if nodes > 1 else []), *cluster.srun]
    command = " ".join(
        [shlex.join(srun), *filter(None, [cluster.container]), python, "-m study.extras.hosts.multinode"]
    )
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "#SBATCH --no-requeue",
            *cluster.lines,
            # sbatch passes on the environment, and this process has set the variable for itself.
            *([] if cluster.software_is_ours or not study.CHOSEN_HERE else ["unset TORCH_EXTENSIONS_DIR"]),
            *([cluster.setup.strip()] if cluster.setup else []),
            HOSTS,
            f"export {store.CELL}={shlex.quote(turn.declared.model_dump_json())}",
            f'exec {command} --hosts "$hosts" --port "{PORT}" \\',
            f"  {shlex.join(launch)}",
            "",
        ]
    )


# --- Slurm's commands -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A job by Slurm's answer. The reason is why it waits, or why it ended."""

    id: int
    state: str
    reason: str | None = None
    exit_code: int | None = None
    nodes: str | None = None

    @property
    def is_over(self) -> bool:
        return self.state in OVER


def submit(path: Path) -> int:
    """Submit a batch script. Returns the job's id."""
    answer = _slurm("sbatch", "--parsable", str(path))
    return int(answer.strip().partition(";")[0])  # id;cluster where there are several


def queue() -> dict[str, Job]:
    """This user's jobs that wait, run, or ended in the last minutes, by the path of their batch script."""
    lines = _slurm("squeue", "--me", "--states=all", "--noheader", "--format=%i|%T|%r|%N|%o").splitlines()
    jobs = {}
    for number, state, reason, nodes, path in (line.split("|", 4) for line in lines):
        if number.isdigit():  # not a part of an array
            jobs[path] = Job(int(number), state, _known(reason), None, _known(nodes))
    return jobs


def ended(number: int) -> Job | None:
    """A job that is no longer in the queue. None if Slurm has forgotten it."""
    if lines := _try("sacct", "--jobs", str(number), "--allocations", "--parsable2", "--noheader",
                     "--format=State,ExitCode,NodeList"):  # fmt: skip
        state, code, nodes = lines.splitlines()[0].split("|", 2)
        return Job(number, state.split()[0], None, _exit_code(code), _known(nodes))  # CANCELLED by 1000
    if line := _try("scontrol", "--oneliner", "show", "job", str(number)):
        fields = dict(word.partition("=")[::2] for word in line.split())
        state, reason, nodes = (fields.get(name, "") for name in ("JobState", "Reason", "NodeList"))
        return Job(number, state, _known(reason), _exit_code(fields["ExitCode"]), _known(nodes))
    return None


def _exit_code(text: str) -> int:
    """Return the exit code in `code:signal`."""
    return int(text.partition(":")[0])


def cancel(numbers: list[int]) -> None:
    if numbers:
        _slurm("scancel", *map(str, numbers))


def _known(text: str) -> str | None:
    return None if text in ("", "None", "(null)", "None assigned") else text


def _try(*words: str) -> str:
    """The output of a command; empty if it fails, as sacct does without accounting."""
    try:
        return _slurm(*words)
    except Stop:
        return ""


def _slurm(*words: str) -> str:
    try:
        answer = subprocess.run(
            words, capture_output=True, text=True, timeout=ANSWERS_WITHIN_S, check=True, stdin=subprocess.DEVNULL
        )
        return answer.stdout
    except FileNotFoundError:
        raise Stop(f"there is no {words[0]} here", "use a login node of the cluster, or --print") from None
    except subprocess.TimeoutExpired:
        raise Stop(f"{words[0]} does not answer", "start the sweep again when Slurm does") from None
    except subprocess.CalledProcessError as error:
        reason = " ".join((error.stderr or error.stdout).split())
        raise Stop(f"{words[0]} refuses: {reason}", "correct the cluster file, or ask who runs the cluster") from None
