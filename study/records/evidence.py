"""The records that may count as evidence: audited, in agreement with each other, and sealed or of this machine."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from study.io.numbers import number_of, part_of
from study.machine.gpus import measured_flops
from study.records import agreement, audit, seal, store
from study.records.runs import Run, Runs
from study.records.schema import MEASURE_VERSION
from study.spec.arms import ROOT, all_paths

SEAL = "study keep RUNS --into reports/YOUR-MACHINE seals them"
ELSEWHERE = f"{{}} neither sealed nor of this machine: no evidence. {SEAL}"
HERE = "{} not sealed, but of this machine: evidence here"
UNCHECKED = "{} of a commit that could not be checked"


@dataclass(frozen=True)
class Evidence:
    """The runs that may count, and a sentence for each that may not."""

    runs: tuple[Run, ...] = ()
    set_aside: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what could not be checked, and which runs decide nothing

    @functools.cached_property
    def arms(self) -> list[str]:
        """Return the arms of the study, and those of the runs."""
        return list(dict.fromkeys([*all_paths(), *(run.arm for run in self.runs)]))


def default_folders() -> list[Path]:
    """Return where runs are if no folders are named: runs/, and the runs kept in reports/."""
    return [path for path in (Path("runs"), *sorted((ROOT / "reports").glob("*/runs"))) if path.is_dir()]


def gather(runs: Runs) -> Evidence:
    """Return the runs that have ended, pass the audit and agree with each other. Say what does not count, and why."""
    all_ended = sorted((run for run in runs if run.status != "running"), key=lambda run: run.folder)
    ended = [run for run in all_ended if not run.record.is_watched]
    unknown = store.unknown_commits(frozenset(run.record.commit for run in ended if run.record.commit))
    wrong = {run: faults for run in ended if (faults := _faults(run, unknown or set()))}
    wrong |= agreement.disagreements(run for run in ended if run not in wrong)
    fit = tuple(run for run in ended if run not in wrong)
    faulty = [f"{run.name}: {'; '.join(wrong[run])}" for run in ended if run in wrong]
    doubtful = {
        ELSEWHERE: [run for run in fit if not may_decide(run)],
        HERE: [run for run in fit if may_decide(run) and not run.sealed],
        UNCHECKED: [run for run in fit if unknown is None or run.record.commit is None],
    }
    words = [text.format(part_of(len(some), len(fit), "records")) for text, some in doubtful.items() if some]
    if watched := len(all_ended) - len(ended):
        words.append(f"{number_of(watched, 'records')} of other people's scripts: no evidence")
    return Evidence(fit, (*runs.set_aside, *faulty), (*_without_manifest(fit, runs.folders), *words))


@functools.cache  # called for every run and claim
def may_decide(run: Run) -> bool:
    """Return whether a run may decide: its record is sealed, or of this machine."""
    return run.sealed or seal.is_of_this_machine(run.record)


def _without_manifest(runs: Iterable[Run], tops: Iterable[Path]) -> Iterator[str]:
    """Yield a sentence for each folder with records of other machines, of which no manifest seals any."""
    for top in map(Path.resolve, tops):
        inside = [run for run in runs if run.folder.is_relative_to(top)]
        if not any(run.sealed for run in inside) and not all(map(may_decide, inside)):
            words = "Restore it from the history, or ask where the records are from"
            yield f"NO MANIFEST seals the {number_of(len(inside), 'records')} in {top.parent.name}/{top.name}. {words}"


def _faults(run: Run, unknown_commits: set[str]) -> list[str]:
    record = run.record
    try:
        faults = audit.faults(record, measured_flops(record.model_dump(), run.folder))
    except Exception as error:  # numbers beyond every float, for example
        faults = [f"the audit cannot compute with this record ({type(error).__name__}: {error})"]
    if record.commit in unknown_commits:
        faults.append(f"its commit {str(record.commit)[:40]} is not in the history of this study")
    return faults


def notes_on(runs: list[Run]) -> list[str]:
    """Return what to know about runs that count."""
    counts = {
        "from another version of the instruments": sum(run.record.measure_version != MEASURE_VERSION for run in runs),
        "from a changed source tree": sum(bool(run.record.dirty) for run in runs),
        "not sealed, but of this machine": sum(not run.sealed for run in runs),
    }
    return [f"{part_of(count, len(runs), 'runs')} {reason}" for reason, count in counts.items() if count]
