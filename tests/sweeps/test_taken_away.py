"""A sweep on a machine that is taken away again and again, before any of its trainings could end."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from study.records import store
from tests.conftest import ROOT

STEPS, SAVED, WINDOW = 200, 30, 70  # of a training; between checkpoints; steps that a machine stays
PROTOCOL = f"""
about = "two arms, longer than the machine stays"
document = "none"
replicates = "nothing"

[[part]]
name = "away"
arm = ["ddp", "zero2"]
task = "wikitext"
data = "embedded"
model = "gpt-tiny"
micro_batch = 1
sequence = 16
train_rows = 200
eval_rows = 8
eval_every = 50
threads = 1
instruments = false
steps = {STEPS}
save_every = SAVED

[part.tiny]
ranks = 2
"""


def sweep(protocol: Path, runs: Path) -> subprocess.Popen:
    words = [sys.executable, "-m", "study.cli", "sweep", str(protocol), "--runs", str(runs)]
    with runs.with_suffix(".txt").open("a") as output:
        return subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=output)


def steps_in(runs: Path) -> int:
    """The steps that each try of a training has made itself. The first lines of one that continues are copies."""
    made = 0
    for folder in runs.glob("*/"):
        resumes = (
            store.load(folder).checkpoints.get("resumes", [{"step": 0}]) if (folder / "record.json").exists() else []
        )
        steps = [line["step"] for line in store.read_steps(folder) if "loss" in line]
        if resumes and steps:
            made += max(0, steps[-1] - resumes[0]["step"])
    return made


def take_away(sweeping: subprocess.Popen, runs: Path) -> None:
    """Wait until it has made some steps, and end all its processes at once; or until it has ended."""
    begun = steps_in(runs)
    while sweeping.poll() is None and steps_in(runs) < begun + WINDOW:
        time.sleep(0.1)
    if sweeping.poll() is None:
        trainers = psutil.Process(sweeping.pid).children(recursive=True)
        sweeping.kill()  # first, so that it cannot write how they ended
        for process in trainers:
            process.kill()
        psutil.wait_procs(trainers)
        sweeping.wait()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_sweep_ends_although_no_machine_stays_as_long_as_a_training(tmp_path, monkeypatch, cache):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    losses = {}
    for name, every in (("away", str(SAVED)), ("stays", str(STEPS))):
        protocol = tmp_path / f"{name}.toml"
        protocol.write_text(PROTOCOL.replace("SAVED", every))
        runs = tmp_path / name
        windows = 0
        code = None
        while code is None or code < 0:
            sweeping = sweep(protocol, runs)
            if name == "away":
                take_away(sweeping, runs)
            code = sweeping.wait()
            windows += 1
            assert windows < 20, "it makes no progress"
        assert code == 0, runs.with_suffix(".txt").read_text()
        done = [store.load(path.parent) for path in runs.rglob("record.json")]
        losses[name] = {each.requested.arm: each.loss for each in done if each.status == "done"}
        assert windows >= (4 if name == "away" else 1), runs.with_suffix(".txt").read_text()
    assert losses["away"].keys() == {"ddp", "zero2"}
    assert losses["away"] == losses["stays"], "to the bit"
