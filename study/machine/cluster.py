"""A cluster in a box: network namespaces as hosts, joined by a bridge in a namespace of its own, with shaped links.

Each namespace belongs to a process that does nothing but hold it. When that process ends, the kernel removes the
namespace with its interfaces, so nothing can be left behind but processes, and those carry a mark: the path of the
cluster's state file. No interface, address or rule of the machine's own network is read or changed.

The network is emulated: its bandwidth is what was declared, its hosts share processors and memory.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
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
HUB, BRIDGE, PORT, INTERFACE = "hub", "zsbridge", "zsport", "zshost"
TOOLS = ("ip", "tc", "unshare", "nsenter", "setsid")
ENDS_WITHIN_S = 10
# How many bytes may pass at once, and for how long a packet waits before the next one is dropped, as in a switch. The
# first must hold the largest packet that a namespace hands over (64 KiB), or tbf cuts each into frames.
BURST_BYTES, QUEUE_MS = 128 * 1024, 50
UNLIMITED = "unlimited"
UNITS = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
Bandwidth = float | Literal["unlimited"]


@dataclass(frozen=True)
class Host:
    """A network namespace, the process that holds it, and its address in the cluster's network."""

    name: str
    pid: int
    interface: str | None = None  # None: the hub
    address: str | None = None


@dataclass(frozen=True)
class Cluster:
    """What the state file says. It is written before the first namespace exists, so that `down` always finds it."""

    bandwidth_mbit: Bandwidth
    delay_ms: float | None
    as_root: bool  # False: inside a user namespace
    hub: Host | None = None
    hosts: tuple[Host, ...] = ()

    def enter(self, host: Host) -> list[str]:
        """The words that run a command in a host."""
        user = [] if self.as_root else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(host.pid), *user, "--net", "--"]


def state_path() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return cache.resolve() / "zero-study" / "cluster.json"


def bandwidth(text: str) -> Bandwidth:
    """A bandwidth as one writes it for tc, in Mbit/s: "200mbit", "1.5gbit"; or "unlimited"."""
    if text == UNLIMITED:
        return text
    if not (match := re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())) or float(match[1]) == 0:
        raise Stop(f"{text!r} is no bandwidth", "give one such as 200mbit or 1gbit, or unlimited")
    return float(match[1]) * UNITS[match[2]]


# --- what is typed -------------------------------------------------------------------------------------------------


def holding(name: str, state: Path, cluster: Cluster) -> list[str]:
    """Start a process that holds a new network namespace. Without root, the hub's user namespace owns all of them."""
    hold = [sys.executable, "-S", "-c", HOLD, f"{MARK}:{name}:{state}"]
    if cluster.as_root:
        return ["unshare", "--net", "--", *hold]
    if cluster.hub is None:
        return ["unshare", "--user", "--map-root-user", "--net", "--", *hold]
    user_only = [word for word in cluster.enter(cluster.hub) if word != "--net"]
    return [*user_only, "unshare", "--net", "--", *hold]


def wiring(cluster: Cluster) -> dict[Host, list[str]]:
    """What `ip` has to do in each namespace."""
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
    """What `tc` has to do in each namespace: both ends of each link send no faster than the declared bandwidth."""
    ends = [(cluster.hub, f"{PORT}{number}") for number in range(len(cluster.hosts))]
    ends += [(host, host.interface) for host in cluster.hosts]
    lines: dict[Host, list[str]] = {}
    for place, device in ends:
        lines.setdefault(place, []).extend(_shaped(device, cluster))
    return lines


def _shaped(device: str, cluster: Cluster) -> list[str]:
    lines, parent = [], "root"
    if cluster.bandwidth_mbit != UNLIMITED:
        rate = f"{round(cluster.bandwidth_mbit * 1e6)}bit"
        lines.append(f"qdisc add dev {device} root handle 1: tbf rate {rate} burst {BURST_BYTES} latency {QUEUE_MS}ms")
        parent = "parent 1:1"
    if cluster.delay_ms:  # half of it on each of the two links of a way
        lines.append(f"qdisc add dev {device} {parent} handle 10: netem delay {cluster.delay_ms / 4:g}ms")
    return lines


# --- up, status, down ----------------------------------------------------------------------------------------------


def refusal(delay_ms: float | None = None) -> Stop | None:
    """Why this machine can emulate no cluster, in a sentence; None if it can."""
    if not sys.platform.startswith("linux"):
        return Stop("network namespaces exist on Linux only", "use a Linux machine", "unavailable")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        remedy = "install iproute2 and util-linux"
        return Stop(f"an emulated cluster needs {' and '.join(missing)}", remedy, "unavailable")
    as_root = os.geteuid() == 0
    user = [] if as_root else ["--user", "--map-root-user"]
    inside = "ip link add zstest type veth || exit 3; "
    inside += f"tc qdisc add dev zstest root handle 1: tbf rate 1mbit burst {BURST_BYTES} latency 50ms || exit 4; "
    inside += "tc qdisc add dev zstest parent 1:1 netem delay 1ms || exit 5" if delay_ms else ""
    tried = subprocess.run(["unshare", *user, "--net", "--", "sh", "-c", inside], capture_output=True, text=True)
    said = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
    whats = {
        0: None,
        3: (f"this kernel joins no namespaces with veth pairs ({said})", "use a kernel with CONFIG_VETH"),
        4: (f"this kernel cannot limit a link's bandwidth ({said})", "use a kernel with CONFIG_NET_SCH_TBF"),
        5: (f"this kernel cannot delay packets ({said})", "leave --delay-ms out, or use one with CONFIG_NET_SCH_NETEM"),
    }
    lacks = "root" if as_root else "root or user namespaces"
    otherwise = (f"an emulated cluster needs {lacks} ({said})", "run as root, or allow user namespaces")
    what = whats.get(tried.returncode, otherwise)
    return what and Stop(*what, "unavailable")


def up(hosts: int, bandwidth_mbit: Bandwidth, delay_ms: float | None = None) -> Cluster:
    """Bring a cluster up. One that stands and is the same is kept; any other, whole or half, is taken down first."""
    if not 2 <= hosts <= MOST_HOSTS:
        raise Stop(f"a cluster has 2 to {MOST_HOSTS} hosts (got {hosts})", "give such a number")
    standing = read()
    wanted = (bandwidth_mbit, delay_ms, hosts)
    if standing and (standing.bandwidth_mbit, standing.delay_ms, len(standing.hosts)) == wanted:
        return standing
    if stop := refusal(delay_ms):
        raise stop
    down()
    state, cluster = state_path(), Cluster(bandwidth_mbit, delay_ms, os.geteuid() == 0)
    state.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write(state, cluster)
        cluster = replace(cluster, hub=Host(HUB, _hold(HUB, state, cluster)))
        for number in range(hosts):
            name = f"host{number}"
            host = Host(name, _hold(name, state, cluster), f"{INTERFACE}{number}", f"10.77.0.{number + 1}")
            cluster = replace(cluster, hosts=(*cluster.hosts, host))
        for tool, lines in (("ip", wiring(cluster)), ("tc", shaping(cluster))):
            for place, batch in lines.items():
                _batch(cluster, place, tool, batch)
        _write(state, cluster)
    except BaseException:
        down()
        raise
    return cluster


def _write(state: Path, cluster: Cluster) -> None:
    state.write_text(json.dumps(asdict(cluster), indent=1) + "\n")


def _hold(name: str, state: Path, cluster: Cluster) -> int:
    """Start a holder, which is nobody's child, wait until its namespace exists, and give its process id."""
    words = ["setsid", "--fork", *holding(name, state, cluster)]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as starting:
        pid = starting.stdout.readline()
        if not pid:
            why = " ".join(starting.stderr.read().decode().split())
            raise Stop(f"no namespace for {name} ({why})", "see study cluster --help", "unavailable")
    return int(pid)


def _batch(cluster: Cluster, host: Host, tool: str, lines: list[str]) -> None:
    words = [*cluster.enter(host), tool, "-batch", "-"]
    ran = subprocess.run(words, input="\n".join(lines) + "\n", capture_output=True, text=True)
    if ran.returncode:
        raise Stop(f"{tool} failed in {host.name}: {' '.join(ran.stderr.split())}", "see study cluster --help")


def read() -> Cluster | None:
    """The cluster that stands; None if there is none, or if one of its namespaces is gone."""
    try:
        content = json.loads(state_path().read_text())
        hub, hosts = content["hub"] and Host(**content["hub"]), tuple(Host(**host) for host in content["hosts"])
        cluster = Cluster(**content | {"hub": hub, "hosts": hosts})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    holders = {process.pid for process in _holders()}
    whole = cluster.hub and {cluster.hub.pid, *(host.pid for host in cluster.hosts)} == holders
    return cluster if whole and len(cluster.hosts) > 1 else None


def down() -> int:
    """Take down all that carries this cluster's mark, whole or not, and whatever runs in it. Says how many hosts."""
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
