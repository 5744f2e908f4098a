"""`study arms` and `study doctor`: what this machine can run and what it lacks."""

import sys
from pathlib import Path
from typing import Any

import tyro

from study.core import doctor as examination
from study.core import operators
from study.core.arms import NAMES, all_paths, is_file_name, load_arm, mistakes_of
from study.core.doctor import Examined
from study.core.errors import Stop
from study.core.gpus import num_gpus
from study.core.shapes import is_local
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
    ours = [name for name in names or all_paths() if not is_file_name(name)]
    ready = [row for row in rows if row["here"] == "yes"]
    if ours:
        say(f"{len(ready)} of {number_of(len(rows), 'arms')} can run on this machine.", "")
    _tell_refused([row for row in rows if "mistakes" in row])
    listed = [row for row in rows if "mistakes" not in row]
    if listed:
        columns = ("arm", "stage", "optimizer states", "weights", "here")
        show([{name: row[name] for name in columns} | {"here": row["here"].partition(":")[0]} for row in listed])
    if ours:
        variants = len(all_paths()) - len(NAMES)
        files = f"{len(NAMES)} arms: accelerate_configs/NAME.yaml. {variants} variants: accelerate_configs/variants/."
        say_wrapped("", files)
    # The reasons are sentences, too wide for a table.
    say_wrapped(*(f"{row['arm']}: {row['here']}" for row in listed if row not in ready), indent="    ")
    return rows


def _tell_refused(rows: list[dict]) -> None:
    """Print each mistake of files that cannot be arms, and which command reads those of another trainer."""
    for row in rows:
        say_wrapped(f"{row['arm']} cannot be an arm: {number_of(len(row['mistakes']), 'mistakes')}.")
        for number, said in enumerate(row["mistakes"], 1):
            say_wrapped(said, indent="    ", first=f"{number:>2}. ")
        if is_file_name(row["arm"]) and is_local(row["arm"]):
            other = f"A file for a trainer of your own may name its precision: `study diagnose {row['arm']}`."
            say_wrapped("", other)
        say("")


def _row(name: str, gpus: int) -> dict[str, Any]:
    """Return what an arm's file says. One that is refused stops no other."""
    try:
        arm = load_arm(name)
    except Stop as refused:
        what = refused.what.removeprefix(f"{name}: ")  # its row begins with the name
        here = f"no: {what}; {refused.remedy}"
        return {"arm": name, "here": here, "fine": False, "mistakes": _mistakes(name, refused)}
    stop = launches.lacking() or examination.why_not(arm, gpus)
    return {
        "arm": arm.name,
        "stage": arm.stage,
        "optimizer states": HOMES[arm.offload_optimizer],
        "weights": HOMES[arm.offload_param],
        "here": f"no: {stop.what}; {stop.remedy}" if stop else "yes",
    }


def _mistakes(name: str, refused: Stop) -> list[str]:
    """Return each mistake of an arm that is refused, with its file."""
    if not is_file_name(name) and name not in all_paths():
        return [f"{refused.what}: {refused.remedy}"]
    try:
        return [f"{each.file.name}: {each.said}" for each in mistakes_of(name)]
    except Stop as unread:
        return [f"{unread.what}: {unread.remedy}"]


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
