"""Which of all that a text shows explains most: each has a rank, and the lowest is the answer."""

from collections.abc import Sequence
from enum import IntEnum, auto

from study.configs.pasted.matching import Match
from study.configs.pasted.situations import situations
from study.configs.pasted.tracebacks import ORDER, Seen, messages
from study.known.faults import Fault, named

OF_STEPS = ("loss-", "norm-", "rate-", "steps-", "overflow-")  # the beginnings of signs in the lines of a trainer
FULL = ("memory-was-full", "memory-elsewhere")
OF_NAN = {"forward-broken", "norm-nan-first", "loss-zero", "loss-nan", "norm-sqrt2", "norm-nan"}
# What a rank that waited for a failed one wrote says less than that one's error.
WAITED = ("rank-behind", "rank-missing", "rank-timed-out-first", "nccl-watchdog", "watchdog-stuck", "gloo-timeout")
DUMPED = ("dumps-apart", "dumps-late", "dumps-alike")


class Kind(IntEnum):
    """What explains a text. The first explains most."""

    ERROR = auto()
    FAULT = auto()  # of a library, that shows no error
    SITUATION = auto()  # what words mean beside a setting
    ERROR_WITH_MANY_CAUSES = auto()
    WAIT = auto()  # of a rank, which says who waits, and not why
    MARK = auto()  # of DeepSpeed, which says why a loss is 0
    STEPS = auto()  # other signs in the lines of a trainer
    FAULT_WITHOUT_NAN = auto()  # where the log shows NaN
    FAULT_WITH_ERROR = auto()  # whose error is not in the text


def ordered(shown: Sequence[Seen], faults: Sequence[Match], in_words: Sequence[Seen]) -> list[Seen]:
    """Return what explains a text, the best first."""
    ids = {seen.id for seen in shown}
    is_nan, is_full = not ids.isdisjoint(OF_NAN), not ids.isdisjoint(FULL)
    kinds = [(seen, kind_of(seen)) for seen in shown]
    kinds += [(seen, Kind.SITUATION) for seen in in_words]
    kinds += [(_of_fault(match), _kind_of_fault(match.fault, is_nan)) for match in faults]
    if any(kind in (Kind.ERROR, Kind.ERROR_WITH_MANY_CAUSES) and not seen.follows for seen, kind in kinds):
        # Other ranks ended or waited because of it. Of other errors than full memory it is not sure which came first.
        waited = WAITED if is_full else ()
        kinds = [(seen, kind) for seen, kind in kinds if not seen.follows and seen.id not in waited]
    ranked = sorted(kinds, key=lambda each: _rank(each[0], each[1], is_full))
    return _once([seen for seen, _ in ranked])


def _rank(seen: Seen, kind: Kind, is_full: bool) -> tuple[bool, bool, bool, Kind, int, int]:
    """What follows from others comes last, and what is only possible behind what is likely.

    Beside an error of memory, who waited and what steps show is aside.
    """
    is_aside = is_full and kind >= Kind.WAIT
    return seen.follows, is_aside, seen.sure == "possible", kind, ORDER.index(seen.sure), seen.place


def _once(found: list[Seen]) -> list[Seen]:
    """Return what was found, without signs and situations that tell of the same NaN as something before them."""
    again = {*OF_NAN, *(id for id, each in situations().items() if not OF_NAN.isdisjoint(each.symptoms))}
    told = []
    is_told = False
    for seen in found:
        if is_told and seen.id in again:
            continue
        told.append(seen)
        is_told = is_told or seen.id in again or (seen.id == seen.fault and "nan" in named(seen.fault).symptom)
    return told


def explains(seen: Seen) -> bool:
    """Whether it is an error that explains itself: a person's words say nothing more."""
    return kind_of(seen) == Kind.ERROR and not seen.follows


def kind_of(seen: Seen) -> Kind:
    """Return the kind of what a text shows."""
    if seen.id.startswith(OF_STEPS) and seen.id not in messages():
        return Kind.MARK if seen.id == "norm-sqrt2" else Kind.STEPS
    if seen.id in (*WAITED, *DUMPED):
        return Kind.WAIT
    return Kind.ERROR_WITH_MANY_CAUSES if seen.sure == "possible" else Kind.ERROR


def _kind_of_fault(fault: Fault, is_nan: bool) -> Kind:
    """Return the kind of a fault. Where a log shows NaN, a fault that makes none explains less than the log does."""
    if fault.symptom.startswith("error"):
        return Kind.FAULT_WITH_ERROR
    return Kind.FAULT_WITHOUT_NAN if is_nan and "nan" not in fault.symptom else Kind.FAULT


def _of_fault(match: Match) -> Seen:
    """Return a fault as what a text shows."""
    fault = match.fault
    script = fault.script and f"reproductions/{fault.script}.py"
    evidence = " ".join(filter(None, [fault.rests_on, script, fault.upstream]))
    if match.applies.asks:
        evidence += f". {match.applies.asks}"
    who = f"{fault.package} {fault.releases}"
    return Seen(fault.id, fault.sentence, match.applies.do, match.sure, evidence, who=who, fault=fault.id)
