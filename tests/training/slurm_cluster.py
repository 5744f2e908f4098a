"""A real Slurm on this machine: one controller, and two `slurmd` that share its cores as two nodes.

Everything is in one folder, on ports of its own, and without the system's Slurm. It runs as the user of the tests.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol")
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
STARTS_WITHIN_S, ENDS_WITHIN_S = 30, 15
NODES = ("n1", "n2")
CONFIG = """
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,defer_batch=0
ReturnToService=2
KillWait=5
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores}
PartitionName=short Nodes=n1,n2 Default=YES MaxTime=30 State=UP
"""


def why_not() -> str | None:
    """Why there can be no Slurm here, None if there can."""
    lacking = [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:{SYSTEM_PATH}")]
    return f"no Slurm here: {', '.join(lacking)} not found (apt-get install slurm-wlm munge)" if lacking else None


@contextlib.contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """Within it there is a Slurm with two nodes. Gives the environment in which its commands find it."""
    folder.mkdir(parents=True)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    host = socket.gethostname()
    (folder / "slurm.conf").write_text(
        CONFIG.format(host=host, folder=folder, user=getpass.getuser(), ports=free_ports(3), cores=os.cpu_count())
    )
    env = os.environ | {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:{SYSTEM_PATH}",
    }
    munge = [f"--{name}={folder}/{name.split('-')[0]}" for name in ("pid-file", "seed-file", "log-file")]
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", *munge],
        ["slurmctld", "-D", "-c"],
        *(["slurmd", "-D", "-N", node] for node in NODES),
    ]
    children = []
    try:
        for words in daemons:
            with (folder / f"{words[0]}-{words[-1]}.txt".replace("/", "_")).open("w") as log:
                children.append(subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT))
            if words[0] == "munged":
                _wait_for(lambda: (folder / "munge.socket").exists(), folder)
        _wait_for(lambda: _idle_nodes(env) == len(NODES), folder)
        yield env
    finally:
        subprocess.run(["scancel", f"--user={getpass.getuser()}"], env=env, capture_output=True, check=False)
        with contextlib.suppress(TimeoutError):  # a step tells its daemon that it has ended, and stays until it could
            _wait_for(lambda: _idle_nodes(env) == len(NODES), folder)
        end(children, folder)


def end(children: list[subprocess.Popen], folder: Path) -> None:
    """End the daemons, and the steps that are still there."""
    steps = steps_of(folder)
    for child in reversed(children):
        child.terminate()
    for child in children:
        try:
            child.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    for process in steps:
        with contextlib.suppress(psutil.Error):
            process.kill()


def steps_of(folder: Path) -> list[psutil.Process]:
    """The steps of this Slurm's jobs: no daemon's children, but each listens on a socket in its node's spool folder."""
    steps = []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            if process.info["name"] == "slurmstepd":
                sockets = process.net_connections(kind="unix")
                steps += [process] if any(str(folder) in str(each.laddr) for each in sockets) else []
    return steps


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def _idle_nodes(env: dict[str, str]) -> int:
    words = ["sinfo", "--noheader", "--Node", "--format=%T"]
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False).stdout.split().count("idle")


def _wait_for(condition, folder: Path) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in folder.glob("*.txt"))
            raise TimeoutError(f"Slurm did not start within {STARTS_WITHIN_S} s: {logs}")
        time.sleep(0.1)
