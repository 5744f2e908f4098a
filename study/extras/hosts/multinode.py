"""Launches over several machines: the same `accelerate launch` on each, except for the machine's number.

python -m study.extras.hosts.multinode --hosts a,b --machine-rank 0 --processes 4 accelerate_configs/zero3.yaml \\
    study/train.py --run-dir runs/first

The machines meet at the first host (torchrun's c10d rendezvous). That needs these options, for these reasons:

- DeepSpeed's default on several machines is pdsh, which logs in to them; `standard` is torchrun on each.
- The arms have `main_process_port: 0`, any free port. Each machine would choose another one.
- Accelerate counts processes over all machines; `--processes` is per machine.
- torchrun decides by its host's name whether it hosts the rendezvous, and gives the others that name. Neither works
  if names are equal or mean 127.0.1.1, so both are given. Ranks are numbered in the order of the addresses.
- gloo and NCCL guess a network interface; here it is the one on the route to the other machines.
"""

import argparse
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from study.errors import Stop, exit_on_stop
from study.machine import software
from study.spec import arms

PORT = 29500
RESOLVES_WITHIN_S = 60  # a name may be known later than its machine, as in Kubernetes
MEETS_WITHIN_S = 600  # machines may start at different moments


@dataclass(frozen=True)
class Place:
    """A machine's place in a launch over several: its number, its address, and that of the first machine."""

    machines: int
    rank: int
    processes: int  # on each machine
    head: str  # the address of machine 0
    port: int
    address: str  # of this machine, as the others see it
    interface: str | None  # which network card has that address


def options(place: Place) -> list[str]:
    """The options of `accelerate launch` on this machine, besides its config file."""
    if place.machines == 1:
        return ["--num_processes", str(place.processes)]
    meeting = {"is_host": place.rank == 0, "join_timeout": MEETS_WITHIN_S, "read_timeout": MEETS_WITHIN_S}
    values = {
        "num_machines": place.machines,
        "machine_rank": place.rank,
        "num_processes": place.machines * place.processes,
        "main_process_ip": place.head,
        "main_process_port": place.port,
        "rdzv_backend": "c10d",
        "rdzv_conf": ",".join(f"{name}={value}".lower() for name, value in meeting.items()),
        "deepspeed_multinode_launcher": "standard",
    }
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def environment(place: Place) -> dict[str, str]:
    """The variables that the libraries read. An interface that the user has set stays."""
    if place.machines == 1:
        return {}
    names = {"PET_LOCAL_ADDR": place.address}  # torchrun's --local-addr, which Accelerate 1.15 does not take
    for library in ("GLOO", "NCCL"):
        variable = f"{library}_SOCKET_IFNAME"
        if interface := os.environ.get(variable, place.interface):
            names[variable] = interface
    return names


def command(config: Path, place: Place, *words: str) -> list[str]:
    """The `accelerate launch` of a script with its flags on this machine."""
    if place.machines * place.processes > 1 and arms.read(config).distributed_type == "NO":
        what = f"{config.stem} is an arm for one process (got {place.machines} x {place.processes})"
        raise Stop(what, "choose an arm for several, such as ddp")
    return [*arms.launcher(config), *options(place), *words]


def find_place(hosts: list[str], rank: int, processes: int, port: int) -> Place:
    """The place of this machine among the hosts, with its address and its interface towards the others."""
    if not 0 <= rank < len(hosts):
        what = f"--machine-rank must be from 0 to {len(hosts) - 1} (got {rank})"
        raise Stop(what, "give each host once in --hosts, and --machine-rank from 0 on")
    if processes < 1:
        raise Stop(f"--processes must be at least 1 (got {processes})", "give how many ranks each machine has")
    if len(hosts) == 1:
        return Place(1, 0, processes, "127.0.0.1", port, "127.0.0.1", None)
    other = resolve(hosts[1 if rank == 0 else 0])
    address = address_towards(other)
    return Place(len(hosts), rank, processes, address if rank == 0 else other, port, address, interface_of(address))


def resolve(host: str) -> str:
    """The IPv4 address of a host. Accelerate 1.15 joins address and port with a colon, so IPv6 does not work."""
    deadline = time.monotonic() + RESOLVES_WITHIN_S
    while True:
        try:
            return str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])
        except OSError as error:
            if getattr(error, "errno", None) != socket.EAI_AGAIN or time.monotonic() > deadline:
                what = f"the host {host} has no IPv4 address here ({error.strerror})"
                raise Stop(what, "give names that each of the machines can look up, or addresses") from None
        time.sleep(1)


def address_towards(other: str) -> str:
    """This machine's address on the route to another one. Connecting a UDP socket finds the route and sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, PORT))
        except OSError as error:
            what = f"there is no route to {other} ({error.strerror})"
            raise Stop(what, "check the network between the machines") from None
        return probe.getsockname()[0]


def interface_of(address: str) -> str | None:
    """The network interface with an address. None if the address is translated, as in some containers."""
    cards = psutil.net_if_addrs().items()
    return next((name for name, entries in cards if any(entry.address == address for entry in entries)), None)


def own_folders(node_dir: str) -> tuple[str, str]:
    """This machine's folders for operators, which it compiles for its own processor, and for offloading."""
    base = Path(os.path.expandvars(node_dir)).expanduser()
    if "$" in str(base) or not base.is_absolute():
        raise Stop(f"the node's folder {base} is not an absolute path here", "give one that exists on each machine")
    return str(base / software.operators_folder().name), str(base / "nvme")


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line of this program."""
    parser = argparse.ArgumentParser(
        prog="python -m study.extras.hosts.multinode", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--hosts", required=True, help="all machines, comma-separated; they meet at the first")
    parser.add_argument("--machine-rank", type=int, default=os.environ.get("SLURM_NODEID", 0), help="this one's number")
    parser.add_argument("--processes", type=int, required=True, help="ranks on each machine")
    parser.add_argument("--port", type=int, default=PORT, help="a free port of the first machine")
    parser.add_argument("--node-dir", help="a folder on each machine's own disk: its variables are expanded there")
    parser.add_argument("config", type=Path, help="an arm's yaml")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="script", help="and its flags")
    return parser.parse_args(words)


def main() -> None:
    """Become the `accelerate launch` of this machine."""
    given = arguments()
    with exit_on_stop():
        place = find_place(given.hosts.split(","), given.machine_rank, given.processes, given.port)
        words = command(given.config, place, *given.words)
        os.environ |= environment(place)
        if given.node_dir:
            os.environ["TORCH_EXTENSIONS_DIR"], disk = own_folders(given.node_dir)
            words += ["--nvme-dir", disk]
        sys.stdout.flush()
        os.execv(words[0], words)


if __name__ == "__main__":
    main()
