"""The runs that may decide a claim: chosen by their settings, and comparable to the claim's conditions.

A claim's kind says in which conditions evidence may differ and still count: bytes do not depend on the device, seconds
do. Every difference is reported.
"""

import functools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from study.ledger.arguments import as_list
from study.ledger.verdict import MEASURED, VIRTUAL, Finding
from study.records.evidence import Evidence, notes_on
from study.records.facts import facts, refuse_impossible
from study.records.runs import Run
from study.spec.shapes import shape_of

# The conditions that a claim may state. If no record has one of them (link, nodes), records cannot decide the claim.
SCALE = {"model", "parameters", "sequence", "micro_batch", "batch"}
PLACE = {"ranks", "nodes", "device", "device_memory", "link"}
RECIPE = {"precision", "accumulation", "checkpointing", "attention", "optimizer", "offload"}
CONDITIONS = sorted(SCALE | PLACE | RECIPE | {"task", "data", "virtual", "software"})
# In which conditions evidence may differ and still count, by the claim's kind.
ALWAYS = {"data", "software"}
TRANSFERS = {
    "bytes": ALWAYS | SCALE | PLACE | {"task", "precision", "virtual"},
    "memory": ALWAYS | {"device", "link", "nodes", "task", "virtual"},
    "time": ALWAYS,
    "capacity": ALWAYS,
    "convergence": ALWAYS,
    "configuration": set(CONDITIONS),
}
# Further conditions that may differ if the finding is relative: a share, or whether two numbers are equal.
RELATIVE = {"memory": SCALE, "convergence": SCALE | PLACE | {"task", "accumulation"}}
SAME_PRECISION = {"bf16": ("bf16", "bf16_cast")}  # a document that says bf16 may mean either
ABOUT = 0.1  # tolerance for parameters and a device's memory, which documents round
# Settings that nearly every document takes for granted. Other runs count only for claims that name the setting.
USUAL: dict[str, tuple[str | None, ...]] = {
    "optimizer": (None, "adamw"),
    "lora_rank": (None,),
    "train_only": (None,),
    "precision": (None, "fp32", "bf16", "fp16", "bf16_cast"),
}


class Claimed(Protocol):
    """What the checks of records need to know of a claim."""

    @property
    def kind(self) -> str: ...

    @property
    def conditions(self) -> dict: ...


@dataclass(frozen=True)
class Chosen:
    """The runs that count for a claim, those that match but in other conditions, and the differences."""

    runs: tuple[Run, ...]
    others: tuple[Run, ...]
    differs: tuple[str, ...]  # of the runs that count, or of the others if none count

    def finding(self, working: str, **more) -> Finding:
        """Return a finding that rests on these runs. It has no value unless one is given."""
        unreal = any(run.virtual or run.record.requested.init == "none" for run in self.runs)
        names = tuple(run.name for run in self.runs or self.others)
        basis = VIRTUAL if unreal else MEASURED
        about = {"value": None, "evidence": names, "differs": self.differs, "basis": basis}
        return Finding(**about | {"working": working} | more)


def choose(
    evidence: Evidence, claim: Claimed, where: dict, relative: bool = False, statuses: tuple[str, ...] = ("done",)
) -> Chosen:
    """Return the runs that match `where`, divided into those that count under the claim's conditions and the others.

    A list in `where` means any of its values. Virtual runs never count for time or loss. Runs over an emulated network
    count for time only if `where` names its hosts or its bandwidth.
    """
    wanted = {name: as_list(value) for name, value in where.items()}
    for name, values in wanted.items():
        refuse_impossible(name, values, evidence.arms)
    named = {*where, *claim.conditions}
    transfers = _transfers(claim, where, relative)
    counting: list[Run] = []
    others: list[Run] = []
    tolerated: Counter[str] = Counter()
    decisive: Counter[str] = Counter()
    for run in evidence.runs:
        if run.status not in statuses or not _matches(run, wanted, named):
            continue
        differs = differences(run, claim)
        decide = [words for name, words in differs.items() if name not in transfers]
        if decide:
            others.append(run)
            decisive.update(decide)
        else:
            counting.append(run)
            tolerated.update(differs.values())
    frequent = (tolerated if counting else decisive).most_common()
    return Chosen(tuple(counting), tuple(others), (*(words for words, _ in frequent), *notes_on(counting)))


def _transfers(claim: Claimed, where: dict, relative: bool) -> set[str]:
    """Return the conditions in which runs may differ from the claim and still count."""
    links = {"link"} if {"hosts", "bandwidth_mbit"} & where.keys() else set()
    return TRANSFERS[claim.kind] | links | (RELATIVE.get(claim.kind, set()) if relative else set())


def _matches(run: Run, wanted: dict[str, list], named: set[str]) -> bool:
    """Return whether a run has these facts, and usual settings apart from those that the claim names."""
    known = facts(run)
    requested = run.record.requested
    if not all(known[name] in values for name, values in wanted.items()):
        return False
    return all(name in named or getattr(requested, name) in values for name, values in USUAL.items())


def _is_same(name: str, has: Any, wanted: list) -> bool:
    """Return whether a run meets a condition, in one of its values."""
    if name == "model":
        return _model(has) in map(_model, wanted)
    if name == "precision":
        return any(has in SAME_PRECISION.get(each, (each,)) for each in wanted)
    if name in ("parameters", "device_memory"):
        return has is not None and any(abs(has - each) <= ABOUT * each for each in wanted)
    return has in wanted


def differences(run: Run, claim: Claimed) -> dict[str, str]:
    """Return the conditions in which a run differs from the claim, in words."""
    known = facts(run)
    differs = {}
    expected = {"virtual": False} | ({"link": None} if known["link"] else {}) | claim.conditions
    for name, value in expected.items():
        wanted = as_list(value)
        has = known.get(name)  # no record has the link or the nodes of a real network
        if not _is_same(name, has, wanted):
            differs[name] = _in_words(name, has, wanted)
    return differs


def _in_words(name: str, has: object, wanted: list) -> str:
    if name == "virtual":
        return "virtual ranks: a single real rank, whose collectives move nothing" if has else "real ranks"
    if name == "link" and has:
        return f"a network between hosts that is emulated, {has}"
    values = " or ".join(map(str, wanted))
    return f"{name} {values}: not recorded" if has is None else f"{name} {has} instead of {values}"


@functools.lru_cache
def _model(name: str | None) -> str | None:
    """Return one name for a built-in shape and for the last part of its hub name or folder."""
    return Path(shape_of(name.lower())).name if name else None
