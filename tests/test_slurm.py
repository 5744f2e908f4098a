"""Sweeps on a real Slurm with two nodes on this machine: submitted, shown, adopted, cancelled, collected."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import slurm_cluster
import test_sweep
from conftest import ROOT
from shaped import record as shaped
from test_sweep import Listener

from study.errors import Stop
from study.extras.slurm import jobs, queue, slurm
from study.extras.slurm.slurm import Cluster, Job
from study.records import store
from study.sweeps.launches import Turn

MINI = """about = "one cell on two nodes"
document = "none"
replicates = "nothing"
[[part]]
name = "p"
arm = "ddp"
data = "embedded"
init = "random"
train_rows = 64
eval_rows = 16
sequence = 32
steps = 3
warmup_steps = 1
seed = [1]
[part.tiny]
"""
TWO = "nodes = 2\ngpus_per_node = 0\nranks_per_node = 1\ntime = '5'\n"
CLUSTER = Cluster(nodes=2, gpus_per_node=0, ranks_per_node=1, time="5")


def turns(tmp_path, text: str = MINI) -> list[Turn]:
    return test_sweep.turns(tmp_path, text)


def cluster_file(tmp_path, text: str = TWO) -> Path:
    (tmp_path / "two.toml").write_text(text)
    return tmp_path / "two.toml"


# --- what a job asks for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "ranks", "nodes", "per_node"),
    [("zero3", None, 2, 4), ("ddp", 3, 1, 3), ("single", None, 1, 1)],
)
def test_a_cell_takes_as_many_nodes_as_its_ranks_fill(tmp_path, arm, ranks, nodes, per_node):
    text = MINI.replace('arm = "ddp"', f'arm = "{arm}"' + (f"\nranks = {ranks}" if ranks else ""))
    (turn,) = turns(tmp_path, text)
    cluster = Cluster(nodes=2, gpus_per_node=4, cpus_per_node=32)
    assert slurm.layout(turn.cell, cluster) == (nodes, per_node)
    lines = slurm.script(turn, tmp_path / "run", cluster, 3600).splitlines()
    assert f"#SBATCH --nodes={nodes}" in lines
    assert f"#SBATCH --gres=gpu:{per_node}" in lines
    assert "#SBATCH --cpus-per-task=32" in lines
    assert "#SBATCH --time=60" in lines


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes = 2", "gpus_per_node is missing"),
        ("gpus_per_node = 4\npartitions = 'gpu'", "partitions is not known; did you mean 'partition'"),
        ("gpus_per_node = 4\nlines = ['--exclusive']", "must hold lines that begin with '#SBATCH '"),
        ("gpus_per_node = 4\nranks_per_node = 2", "ranks_per_node is for nodes without a GPU"),
        ("gpus_per_node = ", "is not valid TOML"),
    ],
)
def test_what_is_wrong_with_a_cluster_file_is_one_sentence(tmp_path, text, words):
    with pytest.raises(Stop, match=words):
        slurm.read(cluster_file(tmp_path, text))


def test_the_example_is_a_cluster_file_and_its_script_is_bash(tmp_path):
    cluster = slurm.read(ROOT / "examples" / "cluster.toml")
    (turn,) = turns(tmp_path)
    text = slurm.script(turn, tmp_path / "a folder", cluster, 60)
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=True).stderr == ""
    head = text.partition("hosts=")[0]
    for line in ("--partition=gpu", "--account=my-project", "--time=02:00:00", "--exclusive", "--no-requeue"):
        assert f"#SBATCH {line}\n" in head
    assert "--node-dir '/tmp/zero-study-$USER'" in text  # expanded on the node, not here


def test_nodes_with_another_python_do_not_get_this_ones_operators(tmp_path, monkeypatch):
    monkeypatch.setattr("study.CHOSEN_HERE", True)
    (turn,) = turns(tmp_path)
    other = CLUSTER.model_copy(
        update={"python": "python3", "setup": "module load study", "container": "apptainer exec x"}
    )
    lines = slurm.script(turn, tmp_path / "run", other, 60).splitlines()
    assert lines.index("unset TORCH_EXTENSIONS_DIR") < lines.index("module load study")
    assert any("apptainer exec x python3 -m study.extras.hosts.multinode" in line for line in lines)
    assert "TORCH_EXTENSIONS_DIR" not in slurm.script(turn, tmp_path / "run", CLUSTER, 60)


def test_a_plan_needs_no_slurm(tmp_path, monkeypatch, capsys):
    """Scripts can be read where they are not run, before anything was run."""
    monkeypatch.setenv("PATH", "/nowhere")
    plan = turns(tmp_path, MINI.replace("seed = [1]", "seed = [1]\nranks = [2, 3]"))
    queue.show_plan(plan, tmp_path / "runs", CLUSTER, 60, None, print_scripts=False)
    rows = capsys.readouterr().out
    assert rows.count("to submit") == 1
    assert "no: 3 ranks need 3 nodes of 1" in rows
    queue.show_plan(plan, tmp_path / "runs", CLUSTER, 60, None, print_scripts=True)
    assert capsys.readouterr().out.count("#!/bin/bash") == 1


@pytest.mark.parametrize(
    ("state", "left", "status"),
    [
        ("TIMEOUT", None, "timeout"),
        ("TIMEOUT", "interrupted", "timeout"),  # what the trainer makes of Slurm's SIGTERM
        ("TIMEOUT", "failed", "failed"),  # it failed, and was slow to end
        ("OUT_OF_MEMORY", "failed", "host_oom"),  # the other ranks say that they lost one
        ("NODE_FAIL", "running", "failed"),
        ("CANCELLED", "running", "interrupted"),
        ("FAILED", "running", "failed"),
        (slurm.FORGOTTEN, "running", "failed"),
        ("COMPLETED", "done", "done"),
    ],
)
def test_a_job_that_died_without_a_word_has_slurms_reason(tmp_path, monkeypatch, state, left, status):
    monkeypatch.setattr(jobs, "LATE_S", 0)
    folder = tmp_path / "run"
    folder.mkdir()
    submission = jobs.Submission(turns(tmp_path)[0], folder, Job(7, state, exit_code=1))
    if left == "done":
        store.write(folder, shaped())
    elif left:
        record = store.new("run", [])
        stop = Stop("the trainer's", "nothing", left)
        store.write(folder, record if left == "running" else store.ended(record, stop, "Stop"))
    outcome = jobs.collected(submission)
    assert (outcome.status, store.load(folder).status) == (status, status)
    if state in jobs.ENDS and left != "failed":
        assert "(job 7)" in outcome.reason


# --- a real Slurm -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slurm_env(tmp_path_factory):
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm") / "two"
    with slurm_cluster.running(folder) as env:
        yield env
    assert slurm_cluster.steps_of(folder) == []


@pytest.fixture
def in_slurm(slurm_env, monkeypatch):
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm_env[name])
    monkeypatch.setattr(jobs, "POLL_S", 0.2)
    monkeypatch.setattr(jobs, "LATE_S", 0)
    return slurm_env


@pytest.fixture
def running(monkeypatch, in_slurm):
    """A function that replaces what a job runs by other shell commands."""

    def by(command: str) -> None:
        def script(turn, folder, cluster, timeout_s, nvme_dir=None, resumed=None):
            head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --no-requeue\n"
            return f"{head}#SBATCH --output={folder.resolve()}/output.txt\n{command}\n"

        monkeypatch.setattr(slurm, "script", script)

    return by


def study(tmp_path, *words: str) -> list[str]:
    """The command line of the sweep of one cell on two nodes."""
    (tmp_path / "mini.toml").write_text(MINI)
    files = ["--cluster-file", str(tmp_path / "two.toml"), "--runs", str(tmp_path / "runs")]
    return [sys.executable, "-m", "study.cli", "sweep", str(tmp_path / "mini.toml"), "--on", "slurm", *files, *words]


@pytest.mark.slow  # test_cluster.py trains over two hosts each time
def test_one_cell_trains_on_two_nodes_and_leaves_one_record(tmp_path, in_slurm, cache):
    """What CI runs: a real `accelerate launch` on each of two nodes, started by srun."""
    cluster_file(tmp_path)
    how = {"cwd": ROOT, "env": in_slurm | {"XDG_CACHE_HOME": str(cache)}, "capture_output": True, "text": True}
    first = subprocess.run(study(tmp_path), check=False, **how)
    (folder,) = (tmp_path / "runs").glob("p-ddp-*")
    assert first.returncode == 0, first.stdout + first.stderr + (folder / "output.txt").read_text()
    record = store.load(folder)
    assert (record.status, record.observed.ranks, record.observed.ranks_counted) == ("done", 2, 2)
    assert [machine.ranks for machine in record.machines] == [[0], [1]]
    assert all(machine.hardware.cores and machine.interface for machine in record.machines)
    assert len(record.memory.per_rank) == len(record.traffic.per_rank) == 2
    assert record.cell.protocol == "mini"
    assert "is running on n[1-2]" in first.stdout
    (again,) = jobs.sweep(turns(tmp_path), tmp_path / "runs", CLUSTER, 60, None, Listener())
    assert again.status == "done"
    assert [path.name for path in (tmp_path / "runs").glob("p-ddp-*")] == [folder.name]  # not submitted again


def test_ctrl_c_leaves_the_job_and_cancel_ends_it(tmp_path, in_slurm, capsys):
    site = slurm.read(cluster_file(tmp_path, TWO + "lines = ['#SBATCH --begin=now+1hour']\n"))
    how = {"cwd": ROOT, "env": in_slurm, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(study(tmp_path), **how) as sweeping:
        lines = [sweeping.stdout.readline()]
        while lines[-1] and "is pending" not in lines[-1]:
            lines.append(sweeping.stdout.readline())
        sweeping.send_signal(signal.SIGINT)
        rest = sweeping.communicate(timeout=30)[0]
    assert "is pending" in lines[-1], lines
    assert (sweeping.returncode, "the jobs stay in the queue" in rest) == (130, True), rest

    def planned(print_scripts: bool) -> str:
        queue.show_plan(turns(tmp_path), tmp_path / "runs", site, 60, None, print_scripts)
        return capsys.readouterr().out

    assert "pending (BeginTime)" in planned(print_scripts=False)
    assert planned(print_scripts=True) == ""  # nothing to submit
    (outcome,) = jobs.cancel(turns(tmp_path), tmp_path / "runs", Listener())
    assert outcome.status == "interrupted"
    assert "begin=now+1hour" in planned(print_scripts=True)  # to be submitted again
    assert {job.state for path, job in slurm.queue().items() if str(tmp_path) in path} == {"CANCELLED"}


def test_a_sweep_that_died_is_taken_up_and_its_job_is_not_submitted_again(tmp_path, running):
    running("sleep 3")
    plan, runs = turns(tmp_path), tmp_path / "runs"
    runs.mkdir()
    dead = jobs.Queue(plan, runs, CLUSTER, 60, None)
    dead.advance(Listener())
    (folder,) = runs.glob("p-ddp-*")
    before = json.loads((folder / jobs.STATE).read_text())["job"]
    (folder / jobs.STATE).unlink()  # it may have died before it could write this
    (outcome,) = jobs.sweep(plan, runs, CLUSTER, 60, None, Listener())
    assert json.loads((folder / jobs.STATE).read_text()) == {"job": before, "collected": True}
    assert [path.name for path in runs.glob("p-ddp-*")] == [folder.name]
    assert "no record of why" in outcome.reason  # `sleep` leaves none
    (outcome,) = jobs.sweep(plan, runs, CLUSTER, 60, None, Listener())  # it failed: the next start tries again
    assert len(list(runs.glob("p-ddp-*"))) == 2


def test_what_slurm_refuses_is_one_sentence_and_no_run(tmp_path, in_slurm):
    cluster = CLUSTER.model_copy(update={"partition": "nowhere"})
    with pytest.raises(Stop, match=r"sbatch refuses: .*invalid partition"):
        jobs.sweep(turns(tmp_path), tmp_path / "runs", cluster, 60, None, Listener())
    assert not list((tmp_path / "runs").glob("p-ddp-*"))


def test_a_damaged_state_of_a_job_is_one_sentence(tmp_path):
    """Whether its job still runs is not known, so it is neither taken up nor submitted again."""
    turn = turns(tmp_path)[0]
    folder = tmp_path / f"{turn.name}.1"
    folder.mkdir()
    (folder / jobs.SCRIPT).touch()
    (folder / jobs.STATE).write_text('{"job": ')
    with pytest.raises(Stop, match=r"job\.json"):
        jobs.adopted(tmp_path, turn, {})
    (folder / jobs.STATE).write_text('{"job": 7, "collected": false}')
    assert jobs.adopted(tmp_path, turn, {}).job.id == 7
