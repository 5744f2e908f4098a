"""The record as a type: old and new ones are read, mistakes are named, and equal cells have equal keys."""

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from study.core.files import sentence
from study.records import runs
from study.records.schema import SCHEMA, Record
from tests.cases import for_each
from tests.conftest import ROOT
from tests.shaped import changed, finished

# What older records hold and no reader reads: it can be computed, or nobody asked.
IGNORED = re.compile(
    r"^\.(energy|memory\.setup_per_rank|hardware\.disk_|machines\.(interface|hardware\.disk_)|"
    r"requested\.(dies_after|resume|trust_remote_code)|"
    r"observed\.(network|linear_parameters_kept|omp_num_threads|final_weights_checksum|"
    r"runs\.(trained_by|arguments_say_deepspeed|checkpoint_bytes|printed_peak_bytes))|"
    r"traffic\.(per_link|link_steps|gloo_wire_bytes)|loss\.final_(train|eval)|"
    r"time\.(median_step_s|tokens_per_s|samples_per_s|mfu|peak_flops_per_s|training_s)|"
    r"memory\.components\.(weights|optimizer)_home)|\.(host_proportional_bytes|host_pinned_peak_bytes|host_resident_bytes|gloo_copy_bytes|before_per_rank|"
    r"load_s_per_rank|route|tracked_mean_bytes)\b"
)


def written_again(record: Record) -> Record:
    return Record.model_validate_json(record.model_dump_json(by_alias=True))


def known(value, path: str = "") -> dict:
    """Every value that is not null, by where it is."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {} if value is None else {path: value}
    return {name: leaf for key, item in items for name, leaf in known(item, f"{path}.{key}").items()}


def test_every_committed_record_is_read_and_says_the_same():
    """But for what no reader reads any more, which is ignored."""
    loaded = runs.load(ROOT / "reports")
    assert len(loaded) + loaded.copies == len(sorted((ROOT / "reports").rglob("record.json"))) > 200
    (aside,) = loaded.set_aside
    assert "hung/rank0_reduces is half-written" in aside, "that of README's run that hung"
    for run in loaded:
        assert written_again(run.record) == run.record, run.folder
        before = known(json.loads((run.folder / "record.json").read_text())) | {".schema": SCHEMA}
        after = known(run.record.model_dump(mode="json", by_alias=True))
        assert {name: after[name] for name in before if name in after} == {
            name: value for name, value in before.items() if name in after
        }, run.folder
        lost = {re.sub(r"\.\d+", "", name) for name in before.keys() - after.keys()}
        assert {name for name in lost if not IGNORED.search(name)} == set(), run.folder


# What is otherwise in a record that is right, and what is said of it.
MISTAKES = json.loads(Path(__file__).with_name("mistakes.json").read_text())


@for_each(("changes", "words"), MISTAKES)
def test_a_mistake_is_named(changes, words):
    with pytest.raises(ValidationError) as caught:
        Record.model_validate(changed(finished(), **changes))
    assert words in sentence(caught.value)


def test_a_run_that_failed_may_have_a_loss_that_no_training_keeps():
    error = {"kind": "E", "message": "m", "what_to_do": "w"}
    diverged = changed(finished(), loss__train__4=1e308, status="diverged", error=error)
    assert Record.model_validate(diverged).loss.train[4] == 1e308
