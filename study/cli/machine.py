"""`study arms` and `study doctor`: what this machine can run and what it lacks."""

import sys
from pathlib import Path

from study.core import doctor as examination
from study.core.arms import ROOT, Arm, all_paths, read
from study.core.errors import Stop, nearest
from study.core.gpus import num_gpus
from study.core.options import AsJson
from study.core.text import number_of, say, say_wrapped, show
from study.sweeps import launches
from study.watch import sources
from study.watch.differences import mistakes

HOMES = {"none": "device", "cpu": "host", "nvme": "disk"}


def arms(*, as_json: AsJson = False) -> list[dict] | None:
    """List the arms, what their files say, and whether this machine can run them.

    Args:
        as_json: Print the rows as JSON instead of a table.
    """
    gpus = num_gpus()
    rows: list[dict] = []
    for name, path in all_paths().items():
        arm = read(path)
        rows.append(
            {
                "arm": name,
                "stage": arm.stage,
                "optimizer states": HOMES[arm.offload_optimizer],
                "weights": HOMES[arm.offload_param],
                "file": path.relative_to(ROOT),
                "here": _support(arm, gpus),
            }
        )
    if as_json:
        return rows
    missing = [f"{row['arm']}: {row['here']}" for row in rows if row["here"] != "yes"]
    say(f"{len(rows) - len(missing)} of {len(rows)} arms can run on this machine.", "")
    show([row | {"file": row["file"].name, "here": row["here"].partition(":")[0]} for row in rows])
    say_wrapped(
        "",
        "Files: accelerate_configs/ (the arms of the README) and accelerate_configs/variants/.",
        *missing,
        indent="    ",
    )
    return None


def _support(arm: Arm, gpus: int) -> str:
    """Return yes if this machine can run an arm, or why not."""
    if stop := launches.lacking() or examination.why_not(arm, gpus):
        return f"no: {stop.what}; {stop.remedy}"
    if arm.for_cuda_alone and not gpus:
        return f"no: DeepSpeed has {arm.for_cuda_alone} only for NVIDIA GPUs"
    return "yes"


def doctor(
    *,
    nvme_dir: Path = Path("runs"),
    config: Path | None = None,
    fix: tuple[str, ...] | None = None,
    as_json: AsJson = False,
) -> dict | None:
    """List what this machine has and lacks, and what to do about it. The exit code is 1 if anything is missing.

    Args:
        nvme_dir: The folder for arms that offload to disk. The speed of its disk is measured.
        config: Look also for mistakes in this config: an Accelerate yaml, a DeepSpeed json or arguments of the Trainer.
        fix: Only compile the DeepSpeed operators that are missing: those that these arms need, or all. The exit code is
            1 if a compilation fails.
        as_json: Print the findings as JSON instead of a table.
    """
    if fix is not None:
        if unknown := [name for name in fix if name not in all_paths()]:
            raise Stop(f"{unknown[0]!r} is not an arm", nearest(unknown[0], all_paths()))
        sys.exit(examination.compile_missing(fix))
    mistakes = _mistakes(config)
    examined = examination.examine(nvme_dir)
    findings = [*mistakes, *examined]
    fine = all(each.fine for each in findings)
    if as_json:
        rows = [{"what": each.what, "found": each.found, "fine": each.fine, "remedy": each.remedy} for each in findings]
        return {"fine": fine, "findings": rows}
    lacking = ", ".join(each.what for each in examined if not each.fine)
    answer = f"This machine lacks: {lacking}." if lacking else "This machine has everything that the study needs."
    if config and (wrong := sum(not each.fine for each in mistakes)):
        answer = f"{config.name} has {number_of(wrong, 'mistakes')}. {answer}"
    say_wrapped(answer, "")
    show([{"": "ok" if finding.fine else "NO", "what": finding.what, "found": finding.found} for finding in findings])
    say(*[f"{finding.what}: {finding.remedy}" for finding in findings if not finding.fine])
    sys.exit(0 if fine else 1)


def _mistakes(config: Path | None) -> list[examination.Finding]:
    """Return the mistakes in a config; a finding without a remedy if there is none."""
    if config is None:
        return []
    source = sources.read(config)
    findings = [examination.Finding(config.name, each.sentence, each.remedy) for each in mistakes(source)]
    return findings or [examination.Finding(config.name, source.words)]
