"""`study calibrate`: how fast this machine is, by a few steps of its own."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import psutil

from study.core import doctor, machine
from study.core.arms import load_arm
from study.core.errors import Stop
from study.core.gpus import gpu_named, gpus_here
from study.core.settings import MACHINE
from study.core.text import during, rounded, say, say_wrapped, show
from study.predict.front import CalibratedMachine, MeasuredStep, calibration, step_time
from study.records.store import now_utc
from study.sweeps import launches
from study.sweeps.protocol import Cell

TIMED = ("single", "zero2", "fsdp2", "zero2_cpu")
BUSY = 0.5  # processes that wait for a core, for each core
UNSTEADY = 1.5  # times the median: a longer step says that something else computed
SHARED = {"task": "wikitext", "data": "embedded", "init": "in_place", "instruments": False, "eval_rows": 4}
ON_GPU = SHARED | {"model": "gpt2-medium", "precision": "bf16", "micro_batch": 4, "sequence": 512, "steps": 16}
ON_CPU = SHARED | {"model": "gpt-tiny", "precision": "fp32", "micro_batch": 8, "sequence": 64, "steps": 24}


def calibrate(*, out: Path = Path("machine.json"), disk: Path | None = None) -> dict:
    """Time a few steps on this machine, so that predictions know its host: a minute on a GPU, two without.

    A plain step, and the same with ZeRO-2, with FSDP2, and with the optimizer on the host; with several GPUs ZeRO-2
    on all of them. `advise`, `estimate`, `virtual` and `sweep --dry-run` take the file with --machine, or from the
    variable ZERO_STUDY_MACHINE, and records of runs then carry it. It judges nothing: the exit code is 0, or 2 if no
    step of ZeRO-2 can be timed.

    With --json: the content of the file. Example: `study calibrate --out machine.json`

    Args:
        out: The file to write.
        disk: Also write and read a file of 1 GiB in this folder.
    """
    if out.is_dir():
        raise Stop(f"--out {out} is a folder", "name the file to write, such as machine.json")
    if stop := launches.lacking():
        raise stop
    gpus = gpus_here()
    is_busy = psutil.getloadavg()[0] > BUSY * machine.usable_cores()
    steps = timed_steps(len(gpus))
    here = CalibratedMachine(
        measured_utc=now_utc(),
        gpu=gpu_named(gpus[0].name) if gpus else None,
        cpu=machine.fields("/proc/cpuinfo").get("model name"),
        cores=machine.usable_cores(),
        busy=is_busy or any(step.high_s > UNSTEADY * step.step_s for step in steps),
        disk_bytes_per_s=machine.disk_bytes_per_s(disk) if disk else None,
        steps=steps,
    )
    out.write_text(json.dumps(here.model_dump(), indent=1) + "\n")
    _show(here, out)
    return here.model_dump()


def timed_steps(gpus: int) -> list[MeasuredStep]:
    """Time each arm that can run here; with several GPUs ZeRO-2 on all of them as well."""
    steps = [_timed(arm, 1 if gpus or arm == "single" else 2, gpus) for arm in TIMED]
    if gpus > 1:
        steps.append(_timed("zero2", gpus, gpus))
    known = [step for step in steps if step]
    if not any(step.arm == "zero2" for step in known):
        raise Stop("no step of zero2 could be timed, by which a host is known", "study doctor says what is missing")
    return known


def _timed(arm: str, ranks: int, gpus: int) -> MeasuredStep | None:
    """Run an arm for some steps. Return their times; None if it cannot run here, and say why."""
    settings = ON_GPU if gpus else ON_CPU
    during(f"timing {arm} on {ranks} rank(s)")
    if stop := doctor.why_not(load_arm(arm), gpus, ranks):
        say(f"{arm}: not timed ({stop.what})")
        return None
    cell = Cell("", "calibrate", "one_gpu" if gpus else "tiny", arm, ranks, settings)
    with tempfile.TemporaryDirectory() as folder:
        record = launches.run(cell, Path(folder, "run"), 300)
    seconds = record.time.step_s
    if record.error or not seconds:
        why = record.error.message if record.error else "no step was timed"
        say(f"{arm}: not timed ({why})")
        return None
    about = {name: settings[name] for name in ("model", "precision", "micro_batch", "sequence")}
    spread = {"step_s": median(seconds), "low_s": min(seconds), "high_s": max(seconds)}
    return MeasuredStep.model_validate({"arm": arm, "ranks": ranks} | about | spread)


def _show(here: CalibratedMachine, out: Path) -> None:
    """Print each step beside what is predicted of it, before and with this machine's constants."""
    known = calibration.known(here)
    rows = []
    for step, timed in zip(here.steps, calibration.timed(here), strict=True):
        hardware = calibration.hardware(known, step.ranks)
        before = step_time(timed.training, replace(hardware, pace=None)).seconds
        after = step_time(timed.training, hardware).seconds
        ends = f"{rounded(step.low_s, '.2g')} to {rounded(step.high_s, '.2g')}"
        rows.append(
            {
                "arm": step.arm,
                "ranks": step.ranks,
                "a step": f"{rounded(step.step_s, '.3g')} s ({ends})",
                "predicted before": f"{rounded(before, '.3g')} s",
                "with its constants": f"{rounded(after, '.3g')} s",
            }
        )
    say(f"{here.gpu or 'This CPU'}: {len(rows)} trainings timed; written to {out}.", "")
    show(rows)
    if here.busy:
        say_wrapped("", "This machine is busy, or its steps vary: time it again when nothing else computes.")
    say_wrapped("", f"Give the file with --machine, or set {MACHINE}.")
