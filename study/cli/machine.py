"""`study arms` and `study doctor`: what this machine can run and what it lacks."""

import sys
from pathlib import Path

from study.core import doctor as examination
from study.core.arms import Arm, all_paths, load_arm
from study.core.gpus import num_gpus
from study.core.options import AsJson
from study.core.text import say, say_wrapped, show
from study.sweeps import launches

# Where an arm keeps something, by the word that DeepSpeed's config has for the offloading.
HOMES = {"none": "device", "cpu": "host", "nvme": "disk"}
# A word and not a colour: the table may go into a file or an issue.
MARKS = {True: "ok", False: "NO"}


def arms(*, as_json: AsJson = False) -> list[dict] | None:
    """List the arms, what their files say, and whether this machine can run them.

    Args:
        as_json: Print the rows as JSON instead of a table.
    """
    gpus = num_gpus()
    rows: list[dict] = []
    for name in all_paths():
        arm = load_arm(name)
        rows.append(
            {
                "arm": name,
                "stage": arm.stage,
                "optimizer states": HOMES[arm.offload_optimizer],
                "weights": HOMES[arm.offload_param],
                "here": _support(arm, gpus),
            }
        )
    if as_json:
        return rows
    # The reasons are sentences: they would make the table wider than a screen, so they come below it.
    missing = [f"{row['arm']}: {row['here']}" for row in rows if row["here"] != "yes"]
    say(f"{len(rows) - len(missing)} of {len(rows)} arms can run on this machine.", "")
    show([row | {"here": row["here"].partition(":")[0]} for row in rows])
    files = "Files: accelerate_configs/NAME.yaml (the arms of the README) and accelerate_configs/variants/NAME.yaml."
    say_wrapped("", files, *missing, indent="    ")
    return None


def _support(arm: Arm, gpus: int) -> str:
    """Return yes if this machine can run an arm, or why not."""
    # What a user can install or compile comes before what only another machine would change.
    if stop := launches.lacking() or examination.why_not(arm, gpus):
        return f"no: {stop.what}; {stop.remedy}"
    if arm.for_cuda_alone and not gpus:
        return f"no: DeepSpeed has {arm.for_cuda_alone} only for NVIDIA GPUs"
    return "yes"


def doctor(
    *, nvme_dir: Path = Path("runs"), fix: tuple[str, ...] | None = None, as_json: AsJson = False
) -> dict | None:
    """List what this machine has and lacks, and what to do about it. The exit code is 1 if anything is missing.

    Args:
        nvme_dir: The folder for arms that offload to disk. The speed of its disk is measured.
        fix: Only compile the DeepSpeed operators that are missing: those that these arms need, or all. The exit code is
            1 if a compilation fails.
        as_json: Print the findings as JSON instead of a table.
    """
    if fix is not None:
        for name in fix:
            load_arm(name)  # a misspelt name is refused before anything is compiled
        sys.exit(examination.compile_missing(fix))
    # This writes and reads 128 MiB in --nvme-dir, so it takes a second or two.
    findings = examination.examine(nvme_dir)
    lacking = [finding for finding in findings if not finding.fine]
    if as_json:
        # The exit code follows from `fine`, after the JSON has been printed.
        return {"fine": not lacking, "findings": [vars(each) | {"fine": each.fine} for each in findings]}
    if lacking:
        say_wrapped(f"This machine lacks: {', '.join(finding.what for finding in lacking)}.", "")
    else:
        say("This machine has everything that the study needs.", "")
    show([{"": MARKS[finding.fine], "what": finding.what, "found": finding.found} for finding in findings])
    say(*[f"{finding.what}: {finding.remedy}" for finding in lacking])
    sys.exit(int(bool(lacking)))
