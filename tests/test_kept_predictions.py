"""Predictions against every committed record that has one. They need no torch: the traces are committed, too."""

from collections import defaultdict
from functools import cache

import numpy as np
from conftest import ROOT

from study.bench.prediction import predicted
from study.predictor.estimate import Estimate
from study.records import runs
from study.records.runs import Run


@cache
def kept() -> list[tuple[Run, Estimate]]:
    done = runs.load([ROOT / "reports" / "cpu-2core" / "runs"]).done
    pairs = [(run, predicted(run.record)) for run in done]
    return [(run, estimate) for run, estimate in pairs if estimate and run.record.memory.components]


def folder_of(run: Run) -> str:
    """Return the folder of the protocol that a run was kept in."""
    return run.folder.parent.name


def peak_error(run: Run, estimate: Estimate) -> float:
    return estimate.peak_bytes / run.record.memory.components.per_rank[0].tracked_peak_bytes - 1


def traffic_agrees(run: Run, estimate: Estimate) -> bool | None:
    """Return None if the record counts no bytes. Below 100 bytes: losses, norms and flags, which are not predicted."""
    counted = {kind: moved.bytes for kind, moved in run.record.traffic.per_rank[0].items() if moved.bytes > 100}
    if not counted:
        return None
    return counted.keys() == estimate.traffic.keys() and all(
        abs(estimate.traffic[kind] / moved_bytes - 1) <= 0.01 for kind, moved_bytes in counted.items()
    )


def test_the_scoreboard_is_as_good_as_the_readme_says():
    errors = [abs(peak_error(run, estimate)) for run, estimate in kept() if folder_of(run) == "scoreboard"]
    assert len(errors) == 253
    assert sum(error <= 0.01 for error in errors) >= 240
    assert max(errors) < 0.0755


def test_no_error_of_a_kept_prediction_grows(golden):
    groups = defaultdict(list)
    for run, estimate in kept():
        groups[folder_of(run), run.arm].append((run, estimate))
    lines = ["protocol, arm: runs, within 1 %, worst error of the peak, traffic as counted"]
    for (protocol, arm), pairs in sorted(groups.items()):
        errors = np.array([peak_error(*pair) for pair in pairs])
        worst = errors[np.abs(errors).argmax()]
        counted = [agrees for pair in pairs if (agrees := traffic_agrees(*pair)) is not None]
        traffic = f"{sum(counted)} of {len(counted)}"
        lines.append(f"{protocol} {arm}: {len(pairs)}, {(np.abs(errors) <= 0.01).sum()}, {worst:+.2%}, {traffic}")
    golden("kept-predictions.txt", "\n".join(lines))
