"""The runs that may decide a claim: audited, chosen by their settings, and comparable to the claim's conditions.

A claim's kind says in which conditions evidence may differ and still count: bytes do not depend on the device, seconds
do. Every difference is reported.
"""

import difflib
import functools
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from study.errors import Stop
from study.ledger import agreement, audit
from study.ledger.arguments import as_list
from study.ledger.model import CONDITIONS, MEASURED, PLACE, SCALE, VIRTUAL, Claim
from study.ledger.verdict import Finding
from study.machine.gpus import measured_flops
from study.records import store
from study.records.runs import Run
from study.records.schema import MEASURE_VERSION, Record, Requested
from study.spec.arms import ROOT, all_paths
from study.spec.shapes import shape_of
from study.spec.validation import nearest, sentence

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
MISSPELT = 0.75  # similarity to the name of an arm from which on a name counts as misspelt
HOMES = ("nvme", "cpu", "none")
# Settings that nearly every document takes for granted. Other runs count only for claims that name the setting.
USUAL = {
    "optimizer": (None, "adamw"),
    "lora_rank": (None,),
    "train_only": (None,),
    "precision": (None, "fp32", "bf16", "fp16", "bf16_cast"),
}
OBSERVED = ("stage", "wrapper", "optimizer", "parameters", "offload_optimizer", "offload_param", "ranks")
UNSEALED = "they are not sealed. study keep RUNS --into reports/YOUR-MACHINE seals them"
UNKNOWN = Record(run_id="unknown", started_utc="")  # an empty record: it refuses names that no record has


@dataclass(frozen=True)
class Evidence:
    """The runs that may count, and a sentence for each that may not."""

    runs: tuple[Run, ...] = ()
    set_aside: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what could not be checked, and which runs decide nothing

    @functools.cached_property
    def arms(self) -> list[str]:
        """The arms of the study, and those of the runs."""
        return list(dict.fromkeys([*all_paths(), *(run.arm for run in self.runs)]))


@dataclass(frozen=True)
class Chosen:
    """The runs that count for a claim, those that match but in other conditions, and the differences."""

    runs: tuple[Run, ...]
    others: tuple[Run, ...]
    differs: tuple[str, ...]  # of the runs that count, or of the others if none count

    def finding(self, working: str, **more) -> Finding:
        """A finding that rests on these runs. It has no value unless one is given."""
        unreal = any(run.virtual or run.record.requested.init == "none" for run in self.runs)
        about = {"evidence": tuple(run.name for run in self.runs or self.others), "differs": self.differs}
        about |= {"basis": VIRTUAL if unreal else MEASURED}
        return Finding(**{"value": None, "working": working} | about | more)


def default_folders() -> list[Path]:
    """Where runs are if no folders are named: runs/, and the runs kept in reports/."""
    return [path for path in (Path("runs"), *sorted((ROOT / "reports").glob("*/runs"))) if path.is_dir()]


def gather(runs: Iterable[Run]) -> Evidence:
    """The runs that have ended, pass the audit and agree with each other. `runs` is a `Runs`, or some of its runs."""
    all_ended = sorted((run for run in runs if run.status != "running"), key=lambda run: run.folder)
    ended = [run for run in all_ended if not run.record.is_watched]
    unknown = store.unknown_commits(frozenset(run.record.commit for run in ended if run.record.commit))
    wrong = {run: words for run in ended if (words := _faults(run, unknown or set()))}
    wrong |= agreement.faults(run for run in ended if run not in wrong)
    set_aside = [f"{run.name}: {'; '.join(wrong[run])}" for run in ended if run in wrong]
    fit = tuple(run for run in ended if run not in wrong)
    unsealed = sum(run.record.hardware.devices != [] and not run.sealed for run in fit)
    notes = [f"{unsealed} of {len(fit)} records are of a GPU and decide nothing: {UNSEALED}"] if unsealed else []
    if others := len(all_ended) - len(ended):
        notes.append(f"{others} records are of other people's scripts and decide nothing")
    unchecked = len(fit) if unknown is None else sum(run.record.commit is None for run in fit)
    notes += [f"the commits of {unchecked} of {len(fit)} records could not be checked"] if unchecked else []
    return Evidence(fit, (*getattr(runs, "set_aside", ()), *set_aside), tuple(notes))


def _faults(run: Run, unknown_commits: set[str]) -> list[str]:
    try:
        faults = audit.faults(run.record, measured_flops(run.record.model_dump(), run.folder))
        faults += audit.beside(run.record, run.folder)
    except Exception as error:  # a forged record may cause any error
        faults = [f"the audit cannot compute with this record ({type(error).__name__}: {error})"]
    if run.record.commit in unknown_commits:
        faults.append(f"its commit {run.record.commit[:40]} is not in the history of this study")
    return faults


@functools.cache  # called for every run and claim
def facts(run: Run) -> dict:
    """The facts that runs are chosen by: all that was requested, and some of what was observed."""
    record = run.record
    observed, devices = record.observed, record.hardware.devices
    homes = (observed.offload_optimizer, observed.offload_param)
    known = dict(record.requested) | {name: getattr(observed, name) for name in OBSERVED}
    known |= {"virtual": run.virtual, "batch": observed.rows_per_step, "run": run.name}
    known |= {"nodes": run.hosts, "link": f"{run.requested.bandwidth_mbit} Mbit/s" if run.hosts else None}
    known |= {"script": "as_printed" if record.is_script else "train", "protocol_part": record.cell.part}
    on_gpu = devices and observed.device != "cpu"
    known |= {"device": devices[0].name, "device_memory": devices[0].memory_bytes} if on_gpu else NO_DEVICE
    return known | {"offload": next((home for home in HOMES if home in homes), None)}


NO_DEVICE = {"device": "CPU", "device_memory": None}
FACTS = tuple(facts(Run(Path(), UNKNOWN)))


# --- choosing ------------------------------------------------------------------------------------------------------


def choose(
    evidence: Evidence, claim: Claim, where: dict, relative: bool = False, statuses: tuple[str, ...] = ("done",)
) -> Chosen:
    """The runs that match `where`, divided into those that count under the claim's conditions and the others.

    A list in `where` means any of its values. Virtual runs never count for time or loss. Runs over an emulated network
    count for time only if `where` names its hosts or its bandwidth.
    """
    wanted = [(name, as_list(value)) for name, value in where.items()]
    for name, values in wanted:
        _refuse_impossible(name, values, evidence)
    transfers = TRANSFERS[claim.kind] | (RELATIVE.get(claim.kind, set()) if relative else set())
    transfers = transfers | {"link"} if {"hosts", "bandwidth_mbit"} & where.keys() else transfers
    counting, others, of_counting, of_others = [], [], [], []
    for run in evidence.runs:
        known = facts(run)
        if run.status not in statuses or not all(known[name] in values for name, values in wanted):
            continue
        if not _is_usual(run, {*where, *claim.conditions}):
            continue
        differs = differences(run, claim)
        if differs.keys() <= transfers:
            counting.append(run)
            of_counting += differs.values()
        else:
            others.append(run)
            of_others += [words for name, words in differs.items() if name not in transfers]
    frequent = Counter(of_counting if counting else of_others).most_common()
    return Chosen(tuple(counting), tuple(others), (*(words for words, _ in frequent), *_notes(counting)))


def _is_usual(run: Run, named: set[str]) -> bool:
    """Whether a run has usual settings, apart from those that the claim names."""
    requested = run.record.requested
    return all(name in named or getattr(requested, name) in values for name, values in USUAL.items())


def _refuse_impossible(name: str, values: list, evidence: Evidence) -> None:
    """Refuse a value that no run can have. Otherwise it would seem that the run was not made yet."""
    if name not in FACTS:
        raise Stop(f"records have no {name!r}", nearest(name, FACTS))
    if name == "arm" or name.startswith("offload"):
        known = evidence.arms if name == "arm" else [*HOMES, None]
        for value in values:
            if value not in known and not (name == "arm" and _may_yet_come(value, known)):
                raise Stop(f"{name} cannot be {value!r}", nearest(str(value), filter(None, known)))
    elif name in Requested.model_fields and name not in OBSERVED:
        try:
            _list_of(name).validate_python(values)
        except ValidationError as error:
            raise Stop(f"{name} {sentence(error, name=lambda _: '')}", "give a value that a run can have") from None


def _may_yet_come(arm, known: list[str]) -> bool:
    """Whether it may be the name of a future arm. A name close to that of a known arm is misspelt."""
    return isinstance(arm, str) and not difflib.get_close_matches(arm, known, 1, MISSPELT)


@functools.cache
def _list_of(name: str) -> TypeAdapter:
    return TypeAdapter(list[Requested.model_fields[name].annotation], config=ConfigDict(strict=True))


def differences(run: Run, claim: Claim) -> dict[str, str]:
    """The conditions in which a run differs from the claim, in words."""
    differs, known = {}, facts(run)
    if run.record.hardware.devices and not run.sealed:
        differs["sealed"] = f"records of a GPU that decide nothing: {UNSEALED}"
    expected = {"virtual": False} | ({"link": None} if known["link"] else {}) | claim.conditions
    for name, value in expected.items():
        values, has = as_list(value), known.get(name)  # no record has the link or the nodes of a real network
        if name == "model":
            same = _model(has) in map(_model, values)
        elif name == "precision":
            same = has in itertools.chain(*(SAME_PRECISION.get(value, (value,)) for value in values))
        elif name in ("parameters", "device_memory"):
            same = has is not None and any(abs(has - value) <= ABOUT * value for value in values)
        else:
            same = has in values
        if not same:
            differs[name] = _in_words(name, has, values)
    return differs


def _in_words(name: str, has, wanted: list) -> str:
    if name == "virtual":
        return "virtual ranks: a single real rank, whose collectives move nothing" if has else "real ranks"
    if name == "link" and has:
        return f"a network between hosts that is emulated, {has}"
    values = " or ".join(map(str, wanted))
    return f"{name} {values}: not recorded" if has is None else f"{name} {has} instead of {values}"


@functools.lru_cache
def _model(name: str | None) -> str | None:
    """One name for a built-in shape and for the last part of its hub name or folder."""
    return Path(shape_of(name.lower())).name if name else None


def _notes(runs: list[Run]) -> list[str]:
    """What to know about the runs that count, whatever the claim."""
    old = sum(run.record.measure_version != MEASURE_VERSION for run in runs)
    changed = sum(bool(run.record.dirty) for run in runs)
    unsealed = sum(not run.sealed for run in runs)
    reasons = ((old, "from another version of the instruments"), (changed, "from a changed source tree"))
    reasons = (*reasons, (unsealed, "not sealed"))
    return [f"{count} of {len(runs)} runs are {reason}" for count, reason in reasons if count]
