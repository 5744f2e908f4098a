"""One training over the hosts of the emulated cluster: an `accelerate launch` in each, started and ended together.

    python -m study.sweeps.over_hosts RANKS accelerate-launch ... study/train.py ...

`accelerate launch` starts one machine's ranks. So each host gets its own, which says how many machines there are, which
one it is, and where the first one listens.
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
from study.machine import cluster
from study.machine.cluster import Cluster, Host
from study.machine.linux import die_with_parent
from study.sweeps.protocol import Cell

PORT = 29500  # free in a namespace of its own
GRACE_S = 30  # how long the other hosts may take to end once one of them has failed
POLL_S = 0.1


def host_words(standing: Cluster, host: Host, ranks: int, words: list[str]) -> list[str]:
    """The launch of one host, from that of one machine: `words` begin with the launcher and its config file.

    Accelerate's --num_processes is the total of all machines. The port must be the same on all of them, and the arms'
    files ask for any free one. With several machines Accelerate starts DeepSpeed through pdsh, unless told not to.
    """
    place = words.index("--config_file") + 2
    several = {
        "num_machines": len(standing.hosts),
        "machine_rank": standing.hosts.index(host),
        "num_processes": ranks,
        "main_process_ip": standing.hosts[0].address,
        "main_process_port": PORT,
        "rdzv_backend": "static",
        "deepspeed_multinode_launcher": "standard",
    }
    options = [word for name, value in several.items() for word in (f"--{name}", str(value))]
    return [*standing.enter(host), *words[:place], *options, *words[place:]]


def run(standing: Cluster, ranks: int, words: list[str]) -> int:
    """Start all hosts, wait for them, and give the first exit code that is not 0. None outlives the others."""
    launches = [
        subprocess.Popen(
            host_words(standing, host, ranks, words),
            # Without the interface, gloo would look up the machine's name, whose address no host has.
            env=os.environ | {"GLOO_SOCKET_IFNAME": host.interface, "CUDA_VISIBLE_DEVICES": ""},
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
    """Exit codes in the order of the ends. Once a launch has failed, the others get some time and then a SIGTERM."""
    codes, running, failed_at = [], list(launches), None
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
    """The cells over the cluster that stands, but for those that say which cluster they need."""
    if standing is None and not all(cell.value("hosts") for cell in cells):
        raise Stop("no emulated cluster stands", "study cluster up --hosts 2 --bandwidth 200mbit")
    here = standing and {"hosts": len(standing.hosts), "bandwidth_mbit": standing.bandwidth_mbit}
    return [cell if cell.value("hosts") else replace(cell, settings=cell.settings | here) for cell in cells]


@contextlib.contextmanager
def left_as_it_was() -> Iterator[None]:
    """Restore afterwards the cluster that stands now, or none."""
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
            raise Stop("no emulated cluster stands", "study cluster up --hosts 2 --bandwidth 200mbit")
        ranks, *words = sys.argv[1:]
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            sys.exit(run(standing, int(ranks), words))
        sys.exit(130)


if __name__ == "__main__":
    main()
