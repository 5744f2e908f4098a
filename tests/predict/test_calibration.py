"""Machines whose own steps were timed: four with a GPU and this study's CPU, each known by steps that are left out."""

import json
import math
from statistics import fmean, median

import fit
import pytest

from study.cli import calibrate
from study.core.errors import Stop
from study.core.gpus import CPU
from study.core.settings import MACHINE
from study.measure import hardware
from study.predict import calibration
from study.predict.architecture import named
from study.predict.calibration import Timed
from study.predict.pace import pace
from study.predict.prediction import step_time
from study.predict.question import PlaceFlags, Question, TrainingFlags
from study.records import metrics, runs
from study.records.schema import Record
from study.report.of_record import training_of
from tests.conftest import ROOT
from tests.shaped import changed, finished

STEP = {
    "arm": "zero2",
    "ranks": 1,
    "model": "gpt2",
    "precision": "bf16",
    "micro_batch": 4,
    "sequence": 512,
    "step_s": 0.2,
    "low_s": 0.19,
    "high_s": 0.3,
}
HERE = {"measured_utc": "2026", "gpu": "H200", "cpu": None, "cores": 4, "busy": False, "disk_bytes_per_s": 5e9}
HERE |= {"steps": [STEP, STEP | {"arm": "zero2_cpu", "step_s": 0.5}]}


@pytest.fixture
def path(tmp_path):
    (tmp_path / "machine.json").write_text(json.dumps(HERE))
    return tmp_path / "machine.json"


def test_four_machines_are_predicted_by_up_to_four_of_their_steps():
    """26 % and 68 % with nothing known of the host: tests/predict/test_on_gpus.py."""
    off = [abs(1 / over - 1) for rows in fit.known_hosts().values() for over in rows]
    assert len(off) >= 56
    assert median(off) < 0.13
    assert fmean(each <= 0.35 for each in off) > 0.85
    assert fit.next_source(fit.known_hosts()) == pytest.approx(calibration.INTERVAL, rel=0.001)


def test_a_cpu_is_predicted_by_four_of_its_steps():
    timed = []
    for run in runs.load([ROOT / "reports/cpu-2core/runs/smoke"]).done:
        training, seconds = training_of(run.record), metrics.value(run.record, "step_s")
        if training and run.record.arm != "zero3_nvme":
            timed.append(Timed(run.record.arm, training, seconds))
    references = [each for each in timed if each.arm in calibrate.TIMED and each.training.model.name == "gpt-tiny"]
    assert len(references) == 4
    known = calibration.fitted(CPU, references)
    others = [each for each in timed if each not in references]
    off = [
        abs(
            step_time(each.training, calibration.hardware(known, each.training.placement.ranks)).seconds / each.seconds
            - 1
        )
        for each in others
    ]
    assert len(off) >= 23
    assert median(off) < 0.25


def test_a_known_host_changes_seconds_and_their_interval(path):
    unknown, known = (
        Question.of(named("gpt2"), TrainingFlags(gpus=1), PlaceFlags(gpu="H200", machine=machine))
        for machine in (None, path)
    )
    assert known.disk_bytes_per_s == 5e9
    machine = calibration.read(path)
    for timed in calibration.timed(machine):
        steps = [step_time(timed.training, question.machine) for question in (unknown, known)]
        assert steps[1].seconds == pytest.approx(timed.seconds, rel=1e-6)
        assert steps[0].seconds < 0.7 * timed.seconds
        assert (steps[1].low_s, steps[1].high_s) == pytest.approx(
            [end * steps[1].seconds for end in calibration.INTERVAL]
        )


def test_the_kind_of_gpu_is_that_of_the_machine(path):
    assert Question.of(named("gpt2"), TrainingFlags(), PlaceFlags(machine=path)).gpu.kind == "H200"


def test_zero_2_on_all_gpus_says_how_fast_links_are(path):
    several = STEP | {"ranks": 8, "step_s": 0.25}
    machine = calibration.Machine.model_validate(HERE | {"steps": [STEP, several]})
    known = calibration.known(machine)
    training = calibration.timed(machine)[1].training
    assert step_time(training, calibration.hardware(known, 8)).seconds == pytest.approx(0.25, rel=1e-6)
    assert known.pace.link < pace().link


def test_a_machine_of_a_cpu_says_nothing_of_gpus(tmp_path, capsys):
    cpu = tmp_path / "machine.json"
    cpu.write_text(json.dumps(HERE | {"gpu": None}))
    assert Question.of(named("gpt2"), TrainingFlags(), PlaceFlags(gpu="H100", machine=cpu)).pace is None
    assert "is of a CPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": [STEP | {"step_s": -1}]}, "step_s"),
        ({"steps": [STEP | {"arm": "zero9"}]}, "'zero9', which is unknown"),
        ({"gpu": "H9000"}, "'H9000', which is unknown"),
        ({"cores": "many"}, "cores"),
    ],
)
def test_a_file_that_is_no_machine_is_refused(path, changes, says):
    path.write_text(json.dumps(HERE | changes))
    with pytest.raises(Stop) as stop:
        calibration.read(path)
    assert says in stop.value.what


def test_records_carry_the_machine(path, monkeypatch):
    monkeypatch.setenv(MACHINE, str(path))
    assert hardware.describe().calibration == HERE
    monkeypatch.setenv(MACHINE, str(path.with_name("gone.json")))
    assert hardware.describe().calibration is None


def test_a_busy_machine_is_said_to_be(tmp_path, monkeypatch, capsys):
    """A step that took twice the median, and a load of all cores."""
    record = training_record(0.1, 0.1, 0.25)
    monkeypatch.setattr(calibrate.launches, "run", lambda *_: record)
    monkeypatch.setattr(calibrate.psutil, "getloadavg", lambda: (0.0, 0.0, 0.0))
    content = calibrate.calibrate(out=tmp_path / "machine.json")
    assert [step["arm"] for step in content["steps"]] == [*calibrate.TIMED]
    assert content["busy"]
    assert "This machine is busy, or its steps vary" in capsys.readouterr().out
    monkeypatch.setattr(calibrate.launches, "run", lambda *_: training_record(0.1, 0.1, 0.11))
    assert not calibrate.calibrate(out=tmp_path / "machine.json")["busy"]
    monkeypatch.setattr(calibrate.psutil, "getloadavg", lambda: (math.inf, 0.0, 0.0))
    assert calibrate.calibrate(out=tmp_path / "machine.json")["busy"]


def training_record(*step_s: float) -> Record:
    return Record.model_validate(changed(finished(), time__step_s=[*step_s]))
