"""The runs that may count as evidence: those that have ended, and are not of other people's scripts."""

from dataclasses import dataclass
from pathlib import Path

from study.core.arms import ROOT
from study.core.numbers import number_of
from study.records.runs import Run, Runs


@dataclass(frozen=True)
class Evidence:
    """The runs that may count, and a sentence for each that may not."""

    runs: tuple[Run, ...] = ()
    set_aside: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # which runs decide nothing


def default_folders() -> list[Path]:
    """Return where runs are if no folders are named: runs/, and the runs kept in reports/."""
    return [path for path in (Path("runs"), *sorted((ROOT / "reports").glob("*/runs"))) if path.is_dir()]


def gather(runs: Runs) -> Evidence:
    """Return the runs that have ended. Say what does not count."""
    ended = sorted((run for run in runs if run.status != "running"), key=lambda run: run.folder)
    counting = tuple(run for run in ended if not run.record.is_watched)
    watched = len(ended) - len(counting)
    notes = [f"{number_of(watched, 'records')} of other people's scripts: no evidence"] if watched else []
    return Evidence(counting, runs.set_aside, tuple(notes))
