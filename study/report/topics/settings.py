"""What each setting changes if only it is varied, and what saving leaves on the disk."""

from study.records import stats
from study.records.groups import by, groups
from study.records.runs import Runs
from study.report import seconds
from study.report.grouping import columns


def table(runs: Runs, setting: str) -> list[dict]:
    """One setting varied with all else equal: losses, seconds, memory and bytes of each of its values."""
    rows = []
    chosen = [run for run in runs.done if run.kind == "real" and not run.record.is_script]
    for group, members in groups(chosen, without=(setting,)).items():
        alike = by(members, *({"arm", "ranks"} - {setting})).values()
        if not any(len({run.value(setting) for run in mine}) > 1 for mine in alike):
            continue  # no arm has two values of it
        for (arm, value, ranks), mine in by(members, "arm", setting, "ranks").items():
            times, run = seconds.of(mine), mine[0]
            place = {"group": group, "arm": arm, setting: value, "ranks": ranks, "n": len(mine)}
            results = {
                "final loss": stats.median([run.losses[-1] for run in mine]) if run.losses else None,
                "s/step": stats.median(times) if times else None,
                "peak MB": run.peak_bytes and max(run.peak_bytes or 0 for run in mine) / 1e6,
                "moved MB": sum(run.traffic.values()) / 1e6 if run.traffic else None,
            }
            rows.append(place | results)
    return rows


def saved(runs: Runs) -> list[dict]:
    """What `--save` left on the disk, and whether the model was built in parts: two settings of document 003."""
    rows = []
    for run in runs.done:
        if saved := run.record.observed.saved:
            about = columns(run, "arm", "precision", "model", "parameters")
            about |= {"built in parts": run.record.observed.built_in_parts, "saved MB": saved.bytes / 1e6}
            rows.append(about | {"parameters saved": saved.parameters, "as": ", ".join(saved.dtypes)})
    return rows
