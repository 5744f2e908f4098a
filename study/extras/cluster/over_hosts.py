"""Runs one training over the hosts of the emulated cluster: a launch in each host, started and ended together.

    python -m study.extras.cluster.over_hosts RANKS accelerate_configs/zero3.yaml study/train.py ...

`study.extras.hosts.multinode` gives each host's `accelerate launch` the options for a launch over several machines.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from study.errors import Stop, exit_on_stop
from study.extras.cluster import cluster
from study.extras.cluster.cluster import Cluster, Host
from study.machine.linux import die_with_parent
from study.sweeps.protocol import Cell

GRACE_S = 30  # how long the other hosts may take to end once one of them has failed
POLL_S = 0.1


def host_words(standing: Cluster, host: Host, ranks: int, words: list[str]) -> list[str]:
    """The launch of one host. `words` are the arm's file, the script and its flags; `ranks` are those of all hosts."""
    options = {
        "--hosts": ",".join(str(each.address) for each in standing.hosts),
        "--machine-rank": str(standing.hosts.index(host)),
        "--processes": str(ranks // len(standing.hosts)),
    }
    options_as_words = [text for pair in options.items() for text in pair]
    launch = [sys.executable, "-m", "study.extras.hosts.multinode", *options_as_words]
    return [*standing.enter(host), *launch, *words]


def run(standing: Cluster, ranks: int, words: list[str]) -> int:
    """Start a launch in each host, wait for all, and return the first exit code that is not 0."""
    launches = [
        subprocess.Popen(
            host_words(standing, host, ranks, words),
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},  # which all hosts would share
            preexec_fn=die_with_parent,
        )
        for host in standing.hosts
    ]
    try:
        codes = wait(launches)
    finally:
        for launch in launches:
            launch.kill()  # nothing to do for those that have ended
    return next((code for code in codes if code), 0)


def wait(launches: list[subprocess.Popen]) -> list[int]:
    """The exit codes in the order of the ends. If a launch fails, the others get SIGTERM after some time."""
    codes = []
    running = list(launches)
    failed_at = None
    while running:
        time.sleep(POLL_S)
        for launch in [launch for launch in running if launch.poll() is not None]:
            running.remove(launch)
            codes.append(launch.returncode)
            failed_at = failed_at or (time.monotonic() if launch.returncode else None)
        if failed_at and time.monotonic() > failed_at + GRACE_S:
            for launch in running:
                launch.terminate()
            failed_at = time.monotonic()
    return codes


def spread(cells: list[Cell], standing: Cluster | None) -> list[Cell]:
    """The cells with the hosts of the cluster that is up, unless they say which cluster they need."""
    if standing is None and not all(cell.value("hosts") for cell in cells):
        raise Stop("no emulated cluster is up", "study cluster up --hosts 2 --bandwidth 200mbit")
    hosts = {"hosts": len(standing.hosts), "bandwidth_mbit": standing.bandwidth_mbit} if standing else {}
    return [cell if cell.value("hosts") else replace(cell, settings=cell.settings | hosts) for cell in cells]


@contextlib.contextmanager
def restore_cluster_afterwards() -> Iterator[None]:
    """Afterwards, restore the cluster that is up now, or none."""
    before = cluster.read()
    try:
        yield
    finally:
        if before is None:
            cluster.down()
        else:
            cluster.up(len(before.hosts), before.bandwidth_mbit, before.delay_ms)


def main() -> None:
    with exit_on_stop():
        standing = cluster.read()
        if standing is None:
            raise Stop("no emulated cluster is up", "study cluster up --hosts 2 --bandwidth 200mbit")
        ranks, *words = sys.argv[1:]
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            sys.exit(run(standing, int(ranks), words))
        sys.exit(130)


def refusal(cell: Cell, gpus: int) -> Stop | None:
    """Return why this machine cannot emulate the hosts of a cell, or None if it can or the cell needs none."""
    hosts = cell.value("hosts")
    if not hosts:
        return None
    if gpus:
        what = "an emulated cluster runs ranks without a GPU, and there are GPUs"
        return Stop(what, "hide them with CUDA_VISIBLE_DEVICES=''", "unavailable")
    ranks = cell.ranks or hosts
    if ranks % hosts:
        return Stop(f"{ranks} ranks cannot be spread evenly over {hosts} hosts", "change either", "unavailable")
    return cluster.refusal()


def bring_up(cell: Cell) -> None:
    """Start the emulated cluster that a cell needs, if it needs one."""
    if hosts := cell.value("hosts"):
        cluster.up(hosts, cell.value("bandwidth_mbit") or "unlimited")


if __name__ == "__main__":
    main()
