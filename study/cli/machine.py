"""`study arms` and `study doctor`: what this machine can run and what it lacks."""

import contextlib
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

from study.core import doctor as examination
from study.core import operators
from study.core.arms import NAMES, all_paths, first_sentence, is_file_name, load_arm, mistakes_of
from study.core.doctor import Examined
from study.core.errors import Stop
from study.core.gpus import num_gpus
from study.core.shapes import is_local
from study.core.text import number_of, say, say_wrapped, show
from study.known.findings import with_id
from study.records.groups import grouped
from study.sweeps import launches

# Where an arm keeps something, by the word that DeepSpeed's config has for the offloading.
HOMES = {"none": "device", "cpu": "host", "nvme": "disk"}
COLUMNS = ("stage", "optimizer states", "weights", "here")


def arms(names: tuple[str, ...] = (), /) -> list[dict]:
    """List the arms, what their files say, and whether this machine can run them. With --json: the rows.

    The exit code is 1 if a file cannot be an arm. Example: `study arms`

    Args:
        names: Arms, or .yaml files of yours. Default: all arms.
    """
    names = names or tuple(all_paths())
    gpus = num_gpus()
    rows = [_row(name, gpus) for name in names]
    is_of_study = not all(map(is_file_name, names))
    if is_of_study:
        counts = []
        for kind in ("arm", "variant"):
            here = [row["here"] == "yes" for row in rows if _kind(row) == kind]
            counts += [f"{sum(here)} of {number_of(len(here), f'{kind}s')}"] if here else []
        say(f"{' and '.join(counts)} can run on this machine.", "")
    for row in rows:
        if "mistakes" in row:
            _tell_mistakes(row["arm"], row["mistakes"])
    _show_table([row for row in rows if "mistakes" not in row])
    if is_of_study:
        say("")
        for name, path in all_paths().items():
            if name in names:
                say_wrapped(f"{name}: {first_sentence(path)}", indent="    ")
        variants = [name for name in all_paths() if name not in NAMES]
        say_wrapped(
            "",
            f"{len(NAMES)} arms: accelerate_configs/NAME.yaml. {len(variants)} variants of them, in "
            f"accelerate_configs/variants/: {', '.join(variants)}.",
        )
    return rows


def _tell_mistakes(name: str, mistakes: list[str]) -> None:
    """Print each mistake of a file that cannot be an arm, and by whose rules it is one."""
    rules = ""
    if is_file_name(name) and is_local(name):
        rules = f" These are the rules of study/train.py; `study diagnose {name}` judges for any trainer."
    say_wrapped(f"{name} cannot be an arm: {number_of(len(mistakes), 'mistakes')}.{rules}")
    for number, said in enumerate(mistakes, 1):
        say_wrapped(said, indent="    ", first=f"{number:>2}. ")
    say("")


def _kind(row: dict) -> str:
    return "variant" if row["arm"] in all_paths().keys() - {*NAMES} else "arm"


def _show_table(rows: list[dict]) -> None:
    """Print what the files of arms say, then of variants, and below each reason why some cannot run here, once."""
    for kind, alike in grouped(rows, _kind).items():
        shown = [{kind: row["arm"]} | {name: row[name] for name in COLUMNS} for row in alike]
        show([row | {"here": row["here"].partition(":")[0]} for row in shown])
        say("")
    for here, alike in grouped(rows, itemgetter("here")).items():
        if here != "yes":
            who = "all" if len(alike) == len(rows) > 1 else ", ".join(row["arm"] for row in alike)
            say_wrapped(f"{who}: {here}", indent="    ")


def _row(name: str, gpus: int) -> dict[str, Any]:
    """Return what an arm's file says. One that is refused stops no other."""
    try:
        arm = load_arm(name)
    except Stop as refused:
        what = refused.what.removeprefix(f"{name}: ")  # its row begins with the name
        mistakes = [f"{what}: {refused.remedy}"]  # if they cannot be read at all
        with contextlib.suppress(Stop):
            mistakes = [f"{each.file.name}: {each.said}" for each in mistakes_of(name)] or mistakes
        return {"arm": name, "here": f"no: {what}; {refused.remedy}", "fine": False, "mistakes": mistakes}
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
