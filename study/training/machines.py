"""A run on several machines: describes each machine, and passes on why a rank on another machine ended.

The run folder need not exist on the other machines, and a lock on it works on one machine only. So a rank writes its
reason into torchrun's rendezvous store, which outlives the ranks. The first rank, which writes the record, reads it.
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
    """Whether torchrun started this run on several machines. Virtual ranks are many ranks on one machine."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1


def name_of(rank: int) -> str:
    """A rank's name in messages. On several machines it includes the machine's number, as torchrun assigns it."""
    return f"rank {rank} on machine {os.environ['GROUP_RANK']}" if several() else f"rank {rank}"


@dataclass(frozen=True)
class Seen:
    """A rank's description of its machine."""

    number: int
    hardware: dict
    software: dict
    interface: str | None


def describe(run: Run) -> list[Machine]:
    """The machines of a run with their ranks, in order. Empty for a single machine and for emulated hosts."""
    if not several() or run.settings.hosts:
        return []
    folder = next(path for path in (run.folder, *run.folder.parents) if path.exists())
    interface = os.environ.get(f"{dist.get_backend().upper()}_SOCKET_IFNAME")
    number, content = int(os.environ["GROUP_RANK"]), hardware.describe(folder).model_dump()
    seen_here = Seen(number, content, hardware.versions(), interface)
    return merged([Seen(**seen) for seen in run.gathered(asdict(seen_here))])


def merged(ranks: list[Seen]) -> list[Machine]:
    """One entry for each machine. Different versions of a package on two machines are a Stop."""
    first, machines = ranks[0], {}
    for rank, seen in enumerate(ranks):
        for package, version in seen.software.items():
            if version != first.software[package]:
                what = f"the machines have different versions of {package} ({first.software[package]} and {version})"
                raise Stop(
                    what, "install the same versions; study doctor --cluster compares them", "unavailable", "prepare"
                )
        machine = Machine(hardware=seen.hardware, interface=seen.interface)
        machines.setdefault(seen.number, machine).ranks.append(rank)
    return list(machines.values())


def leave_reason(stop: Stop) -> bool | None:
    """Store why this rank ends. Returns whether it is the first to do so; None on one machine, or without a store."""
    reason = json.dumps([stop.what, stop.remedy, stop.status, stop.where])
    store = _store()
    try:
        return None if store is None else store.compare_set(REASON, "", reason).decode() == reason
    except RuntimeError:  # torchrun on the first rank's machine has ended meanwhile
        return None


def earlier_reason() -> Stop | None:
    """The reason that another rank stored before; None if there is none."""
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
