"""`study cluster up | status | down`: emulate a small cluster on this machine."""

from typing import Annotated, Literal

import tyro

from study.extras.cluster import cluster as emulated
from study.extras.cluster.cluster import Cluster
from study.io.tables import say


def cluster(
    what: tyro.conf.Positional[Literal["up", "status", "down"]],
    /,
    *,
    hosts: Annotated[int, tyro.conf.arg(metavar="2..4")] = 2,
    bandwidth: str = emulated.UNLIMITED,
    delay_ms: float | None = None,
) -> None:
    """Emulate a small cluster on this machine: network namespaces as hosts, joined by links with a bandwidth limit.

    `study sweep ... --cluster` then trains over it. The hosts share this machine's processors and memory; only the
    network between them is emulated. This needs root or user namespaces, and changes no network interface of yours.

    Args:
        what: up starts a cluster, in place of a different or broken one. status shows it. down removes it.
        hosts: The number of hosts.
        bandwidth: The limit of each host's link in each direction: 50mbit, 1gbit, or unlimited.
        delay_ms: The round-trip delay in milliseconds. It needs a kernel with netem.
    """
    if what == "down":
        ended = emulated.down()
        return say(f"removed {ended} hosts" if ended else "no cluster is up: nothing to take down")
    if what == "up":
        return say(_words(emulated.up(hosts, emulated.bandwidth(bandwidth), delay_ms)))
    standing = emulated.read()
    say(_words(standing) if standing else "no cluster is up; start one: study cluster up --hosts 2 --bandwidth 200mbit")


def _words(standing: Cluster) -> str:
    """Describe a cluster, and say how to run a command in its first host."""
    limit = standing.bandwidth_mbit
    link = "links without a limit" if limit == emulated.UNLIMITED else f"links of {limit:g} Mbit/s"
    delay = f", {standing.delay_ms:g} ms there and back" if standing.delay_ms else ""
    addresses = ", ".join(f"{host.name} {host.address}" for host in standing.hosts)
    inside = " ".join(standing.enter(standing.hosts[0]))
    count = len(standing.hosts)
    return f"{count} emulated hosts, {link}{delay}: {addresses}\nto run a command in the first: {inside} COMMAND"
