"""Emulates a cluster: network namespaces as hosts, joined by a bridge in another namespace, with limited links.

Each namespace belongs to a process that only holds it. When that process ends, the kernel removes the namespace and its
interfaces. So only processes can be left behind, and their command lines have a mark: the path of the cluster's state
file. No interface, address or rule of the machine's own network is read or changed.

The network is emulated: its bandwidth is as declared, and its hosts share processors and memory.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from study.errors import Stop

MOST_HOSTS = 4
MARK = "zero-study-cluster"
HOLD = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
HUB = "hub"
BRIDGE = "zsbridge"
PORT = "zsport"
INTERFACE = "zshost"
TOOLS = ("ip", "tc", "unshare", "nsenter", "setsid")
ENDS_WITHIN_S = 10
# The bytes that may pass at once, and how long a packet waits before the next one is dropped, as in a switch. The burst
# must be at least the largest packet of a namespace (64 KiB), or tbf cuts each packet into frames.
BURST_BYTES = 128 * 1024
QUEUE_MS = 50
UNLIMITED = "unlimited"
UNITS = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
Bandwidth = float | Literal["unlimited"]


@dataclass(frozen=True)
class Host:
    """A network namespace, the process that holds it, and its address in the cluster's network."""

    name: str
    pid: int
    interface: str = ""  # the hub has none
    address: str = ""


@dataclass(frozen=True)
class Cluster:
    """The content of the state file, which is written before the first namespace exists, so that `down` finds it."""

    bandwidth_mbit: Bandwidth
    delay_ms: float | None
    as_root: bool  # False: inside a user namespace
    hub: Host | None = None
    hosts: tuple[Host, ...] = ()

    def enter(self, host: Host) -> list[str]:
        """The command that runs another command in a host."""
        user = [] if self.as_root else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(host.pid), *user, "--net", "--"]


def state_path() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return cache.resolve() / "zero-study" / "cluster.json"


def bandwidth(text: str) -> Bandwidth:
    """A bandwidth as one writes it for tc, in Mbit/s: "200mbit", "1.5gbit"; or "unlimited"."""
    if text == UNLIMITED:
        return "unlimited"
    if not (match := re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())) or float(match[1]) == 0:
        raise Stop(f"{text!r} is not a bandwidth", "give a number with a unit, such as 200mbit or 1gbit, or unlimited")
    return float(match[1]) * UNITS[match[2]]


# --- commands ------------------------------------------------------------------------------------------------------


def holding(name: str, state: Path, cluster: Cluster) -> list[str]:
    """The command of a process that holds a new namespace. Without root, the hub's user namespace owns all of them."""
    hold = [sys.executable, "-S", "-c", HOLD, f"{MARK}:{name}:{state}"]
    if cluster.as_root:
        return ["unshare", "--net", "--", *hold]
    if cluster.hub is None:
        return ["unshare", "--user", "--map-root-user", "--net", "--", *hold]
    user_only = [option for option in cluster.enter(cluster.hub) if option != "--net"]
    return [*user_only, "unshare", "--net", "--", *hold]


def wiring(cluster: Cluster) -> dict[Host, list[str]]:
    """The commands of `ip` in each namespace."""
    assert cluster.hub
    hub = [f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up"]
    lines = {cluster.hub: hub}
    for number, host in enumerate(cluster.hosts):
        port = f"{PORT}{number}"
        hub += [
            f"link add {port} type veth peer name {host.interface} netns {host.pid}",
            f"link set {port} master {BRIDGE}",
            f"link set {port} up",
        ]
        addressed = [f"address add {host.address}/24 dev {host.interface}", f"link set {host.interface} up"]
        lines[host] = ["link set lo up", *addressed]
    return lines


def shaping(cluster: Cluster) -> dict[Host, list[str]]:
    """The commands of `tc` in each namespace: both ends of each link send at most at the declared bandwidth."""
    assert cluster.hub
    ends = [(cluster.hub, f"{PORT}{number}") for number in range(len(cluster.hosts))]
    ends += [(host, host.interface) for host in cluster.hosts]
    lines: dict[Host, list[str]] = {}
    for host, device in ends:
        lines.setdefault(host, []).extend(_shaped(device, cluster))
    return lines


def _shaped(device: str, cluster: Cluster) -> list[str]:
    lines = []
    parent = "root"
    if isinstance(cluster.bandwidth_mbit, float | int):
        rate = f"{round(cluster.bandwidth_mbit * 1e6)}bit"
        lines.append(f"qdisc add dev {device} root handle 1: tbf rate {rate} burst {BURST_BYTES} latency {QUEUE_MS}ms")
        parent = "parent 1:1"
    if cluster.delay_ms:  # a round trip passes four ends of links
        lines.append(f"qdisc add dev {device} {parent} handle 10: netem delay {cluster.delay_ms / 4:g}ms")
    return lines


# --- up, status, down ----------------------------------------------------------------------------------------------


def refusal(delay_ms: float | None = None) -> Stop | None:
    """Return why this machine cannot emulate a cluster; None if it can."""
    if not sys.platform.startswith("linux"):
        return Stop("network namespaces exist on Linux only", "use a Linux machine", "unavailable")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        remedy = "install iproute2 and util-linux"
        return Stop(f"an emulated cluster needs {' and '.join(missing)}", remedy, "unavailable")
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    inside = "ip link add zstest type veth && "
    inside += f"tc qdisc add dev zstest root handle 1: tbf rate 1mbit burst {BURST_BYTES} latency 50ms"
    inside += " && tc qdisc add dev zstest parent 1:1 netem delay 1ms" if delay_ms else ""
    trial = subprocess.run(["unshare", *user, "--net", "--", "sh", "-c", inside], capture_output=True, text=True)
    if trial.returncode == 0:
        return None
    reason = (trial.stderr.strip().splitlines() or ["no reason given"])[-1]
    remedy = "it needs root or user namespaces, and a kernel with veth and tbf (and netem for --delay-ms)"
    return Stop(f"this machine cannot emulate a cluster ({reason})", remedy, "unavailable")


def up(hosts: int, bandwidth_mbit: Bandwidth, delay_ms: float | None = None) -> Cluster:
    """Start a cluster. If the same cluster is up, it stays; any other, also an incomplete one, is taken down first."""
    if not 2 <= hosts <= MOST_HOSTS:
        raise Stop(f"a cluster has 2 to {MOST_HOSTS} hosts (got {hosts})", "give such a number")
    standing = read()
    wanted = (bandwidth_mbit, delay_ms, hosts)
    if standing and (standing.bandwidth_mbit, standing.delay_ms, len(standing.hosts)) == wanted:
        return standing
    if stop := refusal(delay_ms):
        raise stop
    down()
    state = state_path()
    cluster = Cluster(bandwidth_mbit, delay_ms, os.geteuid() == 0)
    state.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write(state, cluster)
        cluster = replace(cluster, hub=Host(HUB, _hold(HUB, state, cluster)))
        for number in range(hosts):
            name = f"host{number}"
            host = Host(name, _hold(name, state, cluster), f"{INTERFACE}{number}", f"10.77.0.{number + 1}")
            cluster = replace(cluster, hosts=(*cluster.hosts, host))
        for tool, lines in (("ip", wiring(cluster)), ("tc", shaping(cluster))):
            for host, batch in lines.items():
                _batch(cluster, host, tool, batch)
        _write(state, cluster)
    except BaseException:
        down()
        raise
    return cluster


def _write(state: Path, cluster: Cluster) -> None:
    state.write_text(json.dumps(asdict(cluster), indent=1) + "\n")


def _hold(name: str, state: Path, cluster: Cluster) -> int:
    """Start a detached process that holds a namespace, wait until that exists, and return the process id."""
    words = ["setsid", "--fork", *holding(name, state, cluster)]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as starting,
    ):
        assert starting.stdout
        if pid := starting.stdout.readline():
            return int(pid)
        starting.wait()
        errors.seek(0)
        why = " ".join(errors.read().decode().split())
        raise Stop(f"no namespace for {name} ({why})", "see study cluster --help", "unavailable")


def _batch(cluster: Cluster, host: Host, tool: str, lines: list[str]) -> None:
    words = [*cluster.enter(host), tool, "-batch", "-"]
    ran = subprocess.run(words, input="\n".join(lines) + "\n", capture_output=True, text=True)
    if ran.returncode:
        raise Stop(f"{tool} failed in {host.name}: {' '.join(ran.stderr.split())}", "see study cluster --help")


def read() -> Cluster | None:
    """The cluster that is up. None if there is none, or if one of its namespaces is gone."""
    try:
        content = json.loads(state_path().read_text())
        hub = content["hub"] and Host(**content["hub"])
        hosts = tuple(Host(**host) for host in content["hosts"])
        cluster = Cluster(**content | {"hub": hub, "hosts": hosts})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    holders = {process.pid for process in _holders()}
    whole = cluster.hub and {cluster.hub.pid, *(host.pid for host in cluster.hosts)} == holders
    return cluster if whole and len(cluster.hosts) > 1 else None


def down() -> int:
    """End all processes with this cluster's mark and all that run in its hosts. Returns the number of hosts."""
    holders = list(_holders())
    hosts = sum(not _mark(process).startswith(f"{MARK}:{HUB}:") for process in holders)
    inside = {_namespace(process.pid) for process in holders} - {_namespace(os.getpid()), None}
    guests = [process for process in psutil.process_iter() if _namespace(process.pid) in inside]
    for process in {*holders, *guests}:
        with contextlib.suppress(psutil.Error):
            process.kill()
    until = time.monotonic() + ENDS_WITHIN_S
    while any(_holders()) and time.monotonic() < until:
        time.sleep(0.01)
    state_path().unlink(missing_ok=True)
    return hosts


def _holders() -> Iterable[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if _mark(process).endswith(f":{state_path()}"):
                yield process


def _mark(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        if words and words[-1].startswith(f"{MARK}:"):
            return words[-1]
    return ""


def _namespace(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return None
