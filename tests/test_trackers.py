"""Trackers: off unless asked for, an error for one that is not installed, and they get what the record has."""

import pytest
from conftest import TRAINED
from test_train import TRACKED

from study.core.errors import Stop
from study.training.display import tracker_options


def test_without_one_accelerate_gets_none(tmp_path, trained):
    assert tracker_options(None, tmp_path) == {}
    record = trained("single", *TRAINED).record
    assert record["requested"]["log_with"] is None
    assert record["observed"]["trackers"] == []


def test_one_that_is_not_installed_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Stop, match="--log-with comet_ml needs comet-ml, which is not installed") as caught:
        tracker_options("comet_ml", tmp_path)
    assert caught.value.remedy == "pip install comet-ml"


def test_tensorboard_gets_what_the_record_has(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trained("single", *TRACKED)
    assert run.record["observed"]["trackers"] == ["tensorboard"]
    events = EventAccumulator(str(run.folder / "zero-study")).Reload()
    assert {"loss", "lr", "eval_loss", "s/step"} <= set(events.Tags()["scalars"])
    seen = events.Scalars("loss")
    assert [event.step for event in seen] == list(range(1, 101))
    assert [event.value for event in seen] == pytest.approx(run.record["loss"]["train"], rel=1e-6)
