"""Predictions against every committed record that has one.

Most need no torch, because their traces are committed. The others, of small models of many families, are slow: they are
traced anew for a minute where the cache is empty.
"""

from collections import defaultdict

import numpy as np
import pytest

from study.core.errors import Stop
from study.predict.estimate import Estimate
from study.predict.trace import transformer
from study.records import metrics, runs
from study.records.runs import Run
from study.report.of_record import predicted
from tests.conftest import ROOT, forget_traces


def kept() -> list[tuple[Run, Estimate]]:
    done = runs.load([ROOT / "reports/cpu-2core/runs"]).done
    pairs = [(run, predicted(run.record)) for run in done]
    return [(run, estimate) for run, estimate in pairs if estimate and metrics.components(run.record)]


@pytest.fixture(scope="module")
def committed(tmp_path_factory) -> list[tuple[Run, Estimate]]:
    """As where there is no torch, and nothing in the cache."""

    def lacking(*asked):
        raise Stop("torch is not installed", "install it", "unavailable")

    with pytest.MonkeyPatch.context() as patch:
        forget_traces(patch, tmp_path_factory.mktemp("cache"))
        patch.setattr(transformer, "_kept", lacking)
        return kept()


@pytest.fixture(scope="module")
def every() -> list[tuple[Run, Estimate]]:
    return kept()


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


def by_arm(pairs: list[tuple[Run, Estimate]]) -> str:
    groups = defaultdict(list)
    for run, estimate in pairs:
        groups[folder_of(run), run.record.arm].append((run, estimate))
    lines = ["protocol, arm: runs, within 1 %, worst error of the peak, traffic as counted"]
    for (protocol, arm), group in sorted(groups.items()):
        errors = np.array([peak_error(*pair) for pair in group])
        worst = errors[np.abs(errors).argmax()]
        counted = [agrees for pair in group if (agrees := traffic_agrees(*pair)) is not None]
        traffic = f"{sum(counted)} of {len(counted)}"
        lines.append(f"{protocol} {arm}: {len(group)}, {(np.abs(errors) <= 0.01).sum()}, {worst:+.2%}, {traffic}")
    return "\n".join(lines)


def test_no_error_of_a_prediction_from_committed_traces_grows(committed, golden):
    assert len(committed) > 300
    golden("kept-predictions-committed.txt", by_arm(committed))


@pytest.mark.slow
def test_no_error_of_a_kept_prediction_grows(every, golden):
    golden("kept-predictions.txt", by_arm(every))
