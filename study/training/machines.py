"""A run on several machines: what each of them is, and why a rank on another one has ended.

The run folder need not exist on the other machines, and a lock on it holds on one machine only. So a rank tells why it
ends to the store through which torchrun brought the machines together: it outlives the ranks, and the first rank, which
writes the record, reads the reason there.
"""

import datetime
import json
import os
from dataclasses import asdict, dataclass

import torch.distributed as dist

from study.errors import Stop
from study.measure import hardware
from study.records.schema import Machine
from study.training.run import Run

REASON = "zero-study/why-it-ended"
ANSWERS_WITHIN_S = 5
CLOCKS_DIFFER_S = 60  # more than clocks of one cluster do


def several() -> bool:
    """Whether torchrun started this run on several machines. Virtual ranks have a large world on one."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1


def name_of(rank: int) -> str:
    """Where something happened: on several machines with the machine's number, which torchrun gives by address."""
    return f"rank {rank} on machine {os.environ['GROUP_RANK']}" if several() else f"rank {rank}"


@dataclass(frozen=True)
class Seen:
    """What one rank sees of its machine."""

    number: int
    hardware: dict
    software: dict
    interface: str | None


def describe(run: Run) -> list[Machine]:
    """The machines of a run with their ranks, in the order of the ranks. Empty for one, and for emulated hosts."""
    if not several() or run.settings.hosts:
        return []
    folder = next(path for path in (run.folder, *run.folder.parents) if path.exists())
    interface = os.environ.get(f"{dist.get_backend().upper()}_SOCKET_IFNAME")
    mine = Seen(int(os.environ["GROUP_RANK"]), hardware.describe(folder).model_dump(), hardware.versions(), interface)
    return merged([Seen(**seen) for seen in run.gathered(asdict(mine))])


def merged(ranks: list[Seen]) -> list[Machine]:
    """One entry for each machine. Machines that would compute with other code are refused."""
    first, machines = ranks[0], {}
    for rank, seen in enumerate(ranks):
        for package, version in seen.software.items():
            if version != first.software[package]:
                what = f"the machines have different versions of {package} ({first.software[package]} and {version})"
                raise Stop(what, "install the same: study doctor --cluster compares them", "unavailable", "prepare")
        machine = Machine(hardware=seen.hardware, interface=seen.interface)
        machines.setdefault(seen.number, machine).ranks.append(rank)
    return list(machines.values())


def tell(stop: Stop) -> bool | None:
    """Leave the reason why this rank ends. Says whether it is the first; None: one machine, or nobody to tell."""
    reason = json.dumps([stop.what, stop.remedy, stop.status, stop.where])
    store = _store()
    try:
        return None if store is None else store.compare_set(REASON, "", reason).decode() == reason
    except RuntimeError:  # torchrun on the first rank's machine has ended meanwhile
        return None


def told() -> Stop | None:
    """The reason that a rank has left before, None if there is none."""
    store = _store()
    try:
        if store is None or not store.check([REASON]):
            return None
        return Stop(*json.loads(store.get(REASON)))
    except RuntimeError:
        return None


def _store() -> dist.TCPStore | None:
    if not several():
        return None
    timeout = datetime.timedelta(seconds=ANSWERS_WITHIN_S)
    try:
        return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
    except (RuntimeError, KeyError):  # DistStoreError, DistNetworkError
        return None
