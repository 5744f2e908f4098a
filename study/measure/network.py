"""Reads the emulated network of a rank from the kernel: the limits of its link, and the bytes that it sent."""

import json
import os
import subprocess
from pathlib import Path

import psutil

from study.records.schema import LinkTraffic, Network


def interface() -> str | None:
    """The network interface that gloo uses."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def host() -> str:
    """An identifier of this host in an emulated cluster: its network namespace."""
    return str(Path("/proc/self/ns/net").readlink())


def seen_from_here() -> dict:
    """The host of this rank, its interface and the limits of its link."""
    command = ["tc", "-json", "qdisc", "show", "dev", str(interface())]
    disciplines = json.loads(subprocess.run(command, capture_output=True, text=True).stdout or "[]")
    by_kind = {discipline["kind"]: discipline.get("options", {}) for discipline in disciplines}
    rate_bytes = by_kind.get("tbf", {}).get("rate")
    return {
        "host": host(),
        "interface": interface(),
        "bandwidth_mbit": rate_bytes and rate_bytes * 8 / 1e6,
        "limited_by": "tbf" if rate_bytes else None,
        "delayed_by": "netem" if "netem" in by_kind else None,
    }


def describe(ranks: list[dict]) -> Network:
    """The network as its ranks see it. Of the links, which are all declared alike, the slowest counts."""
    hosts = {rank["host"]: rank for rank in ranks}.values()
    limits = [host["bandwidth_mbit"] for host in hosts]
    return Network(
        hosts=len(hosts),
        interfaces=[str(host["interface"]) for host in hosts],
        bandwidth_mbit=min(filter(None, limits), default=None),
        limited_by=next((host["limited_by"] for host in hosts if host["limited_by"]), None),
        delayed_by=next((host["delayed_by"] for host in hosts if host["delayed_by"]), None),
    )


def counters() -> LinkTraffic | None:
    """What this host's interface has sent and received so far. None outside an emulated cluster."""
    counted = psutil.net_io_counters(pernic=True).get(str(interface()))
    return counted and LinkTraffic(
        sent_bytes=counted.bytes_sent,
        sent_packets=counted.packets_sent,
        received_bytes=counted.bytes_recv,
        dropped_packets=counted.dropin + counted.dropout,
    )


def since(before: LinkTraffic | None) -> LinkTraffic | None:
    """What it has sent and received since then."""
    now = counters()
    return before and now and LinkTraffic(**{name: getattr(now, name) - value for name, value in before})
