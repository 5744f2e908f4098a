"""`study arms` and `study doctor`: what this machine can run and what it lacks."""

import sys
from pathlib import Path
from typing import Any

import tyro

from study.core import doctor as examination
from study.core import operators
from study.core.arms import NAMES, all_paths, load_arm
from study.core.doctor import Examined
from study.core.errors import Stop
from study.core.gpus import num_gpus
from study.core.text import number_of, say, say_wrapped, show
from study.known.findings import with_id
from study.sweeps import launches

# Where an arm keeps something, by the word that DeepSpeed's config has for the offloading.
HOMES = {"none": "device", "cpu": "host", "nvme": "disk"}


def arms(names: tyro.conf.Positional[tuple[str, ...]] = (), /) -> list[dict]:
    """List the arms, what their files say, and whether this machine can run them. With --json: the rows.

    The exit code is 1 if a file cannot be an arm. Example: `study arms`

    Args:
        names: Arms, or .yaml files of yours. Default: all arms.
    """
    gpus = num_gpus()
    rows = [_row(name, gpus) for name in names or all_paths()]
    # The reasons are sentences, too wide for a table.
    missing = [f"{row['arm']}: {row['here']}" for row in rows if row["here"] != "yes"]
    say(f"{len(rows) - len(missing)} of {number_of(len(rows), 'arms')} can run on this machine.", "")
    columns = ("arm", "stage", "optimizer states", "weights", "here")
    show([{name: row.get(name) for name in columns} | {"here": row["here"].partition(":")[0]} for row in rows])
    variants = len(all_paths()) - len(NAMES)
    files = f"{len(NAMES)} arms: accelerate_configs/NAME.yaml. {variants} variants: accelerate_configs/variants/."
    say_wrapped("", files, *missing, indent="    ")
    return rows


def _row(name: str, gpus: int) -> dict[str, Any]:
    """Return what an arm's file says. One that is refused stops no other."""
    try:
        arm = load_arm(name)
    except Stop as refused:
        what = refused.what.removeprefix(f"{name}: ")  # its row begins with the name
        return {"arm": name, "here": f"no: {what}; {refused.remedy}", "fine": False}
    stop = launches.lacking() or examination.why_not(arm, gpus)
    return {
        "arm": arm.name,
        "stage": arm.stage,
        "optimizer states": HOMES[arm.offload_optimizer],
        "weights": HOMES[arm.offload_param],
        "here": f"no: {stop.what}; {stop.remedy}" if stop else "yes",
    }


def doctor(*, fix: tuple[str, ...] | None = None) -> dict:
    """List what this machine has, what is missing, and what to do. The exit code is 1 if anything is missing.

    With --json: the findings. Example: `study doctor`

    Args:
        fix: Only compile the DeepSpeed operators that are missing: those that these arms need, or all. The exit code is
            1 if a compilation fails.
    """
    if fix is not None:
        for name in fix:
            load_arm(name)  # a misspelt name is refused before anything is compiled
        sys.exit(operators.compile_missing(fix))
    # This writes and reads 128 MiB in runs/, so it takes a second or two.
    return show_findings(examination.examine(Path("runs")))


def show_findings(findings: list[Examined]) -> dict:
    lacking = [finding for finding in findings if not finding.fine]
    first = "This machine has everything that the study needs."
    if lacking:
        first = f"This machine needs: {', '.join(finding.what for finding in lacking)}."
    say_wrapped(first, "")
    # A word and not a colour: the table may go into a file or an issue.
    show([{"": "ok" if each.fine else "NO", "what": each.what, "found": each.found} for each in findings])
    say(*[with_id(f"{finding.what}: {finding.remedy}", finding.id) for finding in lacking])
    return {"fine": not lacking, "findings": [vars(each) | {"fine": each.fine} for each in findings]}
