"""`study arms` and `study doctor`: what this machine can run and what it lacks."""

import sys
from pathlib import Path

from study.errors import Stop
from study.extras.hosts import hosts
from study.io.numbers import number_of
from study.io.tables import say, say_wrapped, show
from study.io.validation import nearest
from study.machine import doctor as examination
from study.machine import operators as compilation
from study.machine.gpus import num_gpus
from study.spec.arms import ROOT, Arm, all_paths, read
from study.spec.options import AsJson
from study.watcher import sources
from study.watcher.differences import contradictions

MOST_COLUMNS = 8  # more hosts than this have no room in a table of all links
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
    if stop := examination.why_not(arm, gpus):
        return f"no: {stop.what}; {stop.remedy}"
    if arm.for_cuda_alone and not gpus:
        return f"no: DeepSpeed has {arm.for_cuda_alone} only for NVIDIA GPUs"
    return "yes"


def doctor(
    *,
    nvme_dir: Path = Path("runs"),
    config: Path | None = None,
    cluster: Path | None = None,
    reach: str = hosts.SSH,
    python: str = sys.executable,
    fix: tuple[str, ...] | None = None,
    as_json: AsJson = False,
) -> dict | None:
    """List what this machine has and lacks, and what to do about it. The exit code is 1 if anything is missing.

    Args:
        nvme_dir: The folder for arms that offload to disk. The speed of its disk is measured.
        config: Look also for mistakes in this config: an Accelerate yaml, a DeepSpeed json or arguments of the Trainer.
        cluster: Compare several hosts instead: a file with the name of a host on each line. If the other hosts reach it
            by another address, that follows the name.
        reach: With --cluster: the command that runs a command on {host}, such as 'srun --nodelist {host} --nodes 1'.
        python: With --cluster: the Python on the hosts, in whose environment this study is installed.
        fix: Only compile the DeepSpeed operators that are missing: those that these arms need, or all. The exit code is
            1 if a compilation fails.
        as_json: Print the findings as JSON instead of a table.
    """
    if fix is not None:
        if unknown := [name for name in fix if name not in all_paths()]:
            raise Stop(f"{unknown[0]!r} is not an arm", nearest(unknown[0], all_paths()))
        sys.exit(compilation.compile_missing(fix))
    if cluster is not None:
        comparison = hosts.compare(hosts.read(cluster), nvme_dir, reach, python)
        if as_json:
            links = {f"{a} to {b}": speed for (a, b), speed in comparison.links.items()}
            about = {"hosts": hosts.rows(comparison), "links_bytes_per_s": links}
            return {"fine": not comparison.problems} | about | {"problems": comparison.problems}
        _compare(comparison)
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
    parts = [text.rpartition(": ") for text in contradictions(source)]
    findings = [examination.Finding(config.name, problem, remedy) for problem, _, remedy in parts]
    return findings or [examination.Finding(config.name, source.words)]


def _compare(comparison: hosts.Comparison) -> None:
    """Show a comparison of hosts. The exit code is 1 if there is a problem."""
    show(hosts.rows(comparison))
    names = [host.name for host in comparison.hosts]
    if 1 < len(names) <= MOST_COLUMNS and comparison.links:
        say("", "what each host sends to the others, in MB/s over one TCP connection:")
        speeds = {pair: speed and round(speed / 1e6) for pair, speed in comparison.links.items()}
        show([{"from": a} | {f"to {b}": speeds.get((a, b)) for b in names} for a in names])
    say("", *(comparison.problems or ["The hosts are alike, and reach each other."]))
    sys.exit(1 if comparison.problems else 0)
