"""Records that were tampered with: each kind is set aside and named, or listed as impossible to catch.

The records are nine that agree: three arms, three seeds of each. Tampering changes one of them, zero2 with seed 1, and
none of the others is set aside for it. CONTRIBUTING has the list of what no test of records can catch.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import shaped
from conftest import ROOT
from shaped import changed, finished, put

from study.cli import keep
from study.ledger.choosing import choose
from study.records import evidence, seal, store

ARMS, SEEDS, TARGET = ("ddp", "zero2", "zero3"), (0, 1, 2), "zero2-1"
TIMES = ("time.step_s.*", "time.window_s")
LOSSES = ("loss.train.*", "loss.eval.*.eval_loss")

Edit = Callable[[dict], dict]


def scaled(factor: float, *paths: str) -> Edit:
    """Multiply the numbers at these paths; * is every place of a list or section."""

    def multiply(value, names: list[str]):
        if value is None or not names:
            return value and type(value)(value * factor)
        places = range(len(value)) if isinstance(value, list) else list(value)
        for place in places if names[0] == "*" else [int(names[0]) if names[0].isdigit() else names[0]]:
            value[place] = multiply(value[place], names[1:])
        return value

    return lambda fields: [multiply(fields, path.split(".")) for path in paths] and fields


def put_in(**changes) -> Edit:
    return lambda fields: changed(fields, **changes)


def activations(fields: dict) -> dict:
    """The activations doubled, and the peak with them."""
    for part in fields["memory"]["components"]["per_rank"]:
        part["at_peak"]["activations"] *= 2
        part["tracked_peak_bytes"] = sum(part["at_peak"].values())
    return fields


def sends(fields: dict) -> dict:
    """A collective that no stage needs."""
    for kinds in fields["traffic"]["per_rank"]:
        kinds["send"] = {"calls": 1, "bytes": 10**6, "bytes_by_dtype": {"float32": 10**6}}
    return fields


GPU_IN_NAME = {"hardware__devices": [shaped.GPU] * 2}
CAUGHT = {
    "activations and the peak x 2": (activations, "the tracked peak is"),
    **{f"losses x {x}": (scaled(x, *LOSSES), "the first loss is") for x in (0.9, 1.1)},
    **{f"all times x {x}": (scaled(x, *TIMES), "set-up and steps|the median") for x in (100, 0.001)},
    "a collective that no stage needs": (sends, "what a step moves is"),
    "another seed's curve": (lambda fields: fields | {"loss": of("zero2-2")["loss"]}, "those of another seed"),
    "another seed's weights": (put_in(observed__weights_checksum="seed2"), "those of another seed"),
    "other weights than the other arms": (put_in(observed__weights_checksum="other"), "starts from other weights"),
    "another run's times": (lambda fields: fields | {"time": of("zero2-2")["time"]}, "its step times are those"),
    "a commit that never was": (put_in(commit="deadbeef" * 5), "is not in the history"),
    "a commit that is a name": (put_in(commit="HEAD"), "is not in the history"),
    "a number beyond every float": (put_in(traffic__kernel_bytes_written__0=10**400), "cannot compute"),
    "memory beyond every float": (put_in(memory__per_rank__0__host_peak_bytes=10**400), "host_peak_bytes is more than"),
}
# What is not caught, and why. CONTRIBUTING says the same in words.
NOT_CAUGHT = {
    "all times x 2": (scaled(2, *TIMES), "a run may have been this much slower; its wall time has room for it"),
    "step times x 2": (scaled(2, "time.step_s.*"), "with two ranks, slow steps may overlap in a window"),
    "one loss in the middle": (scaled(1.1, "loss.train.5"), "nothing else in a record depends on it"),
    "a GPU in name": (put_in(**GPU_IN_NAME), "a record of a GPU decides nothing unless it is sealed"),
    "another model": (put_in(requested__model="bert-tiny"), "the audit has no formulas of models"),
}


def of(run_id: str) -> dict:
    arm, _, seed = run_id.partition("-")
    step = 0.1 + (1 + ARMS.index(arm) * 3 + int(seed)) / 1000  # no two runs take the same times
    return finished(run_id, arm, seed=int(seed), step=step, loss=2.0 + int(seed) / 100)


@pytest.fixture
def records(tmp_path) -> Path:
    return put(tmp_path / "records", *(of(f"{arm}-{seed}") for arm in ARMS for seed in SEEDS))


def tamper(records: Path, edit: Edit, run_id: str = TARGET) -> None:
    path = records / run_id / "record.json"
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))


def gathered(*folders: Path) -> evidence.Evidence:
    return evidence.gather(shaped.runs(*folders))


def kept(found: evidence.Evidence) -> set[str]:
    return {run.folder.name for run in found.runs}


ALL = {f"{arm}-{seed}" for arm in ARMS for seed in SEEDS}


def test_what_was_not_tampered_with_counts(records):
    seen = gathered(records)
    assert (seen.set_aside, kept(seen)) == ((), ALL)


@pytest.mark.parametrize("kind", CAUGHT)
def test_what_was_tampered_with_is_set_aside(records, kind):
    edit, words = CAUGHT[kind]
    tamper(records, edit)
    seen = gathered(records)
    assert any(each in sentence for each in words.split("|") for sentence in seen.set_aside), seen.set_aside
    assert TARGET not in kept(seen)
    copied_from = {"zero2-2"} if kind == "another run's times" else set()  # which of two is the copy, nobody can say
    assert kept(seen) >= ALL - {TARGET} - copied_from


@pytest.mark.parametrize("kind", NOT_CAUGHT)
def test_what_cannot_be_caught_is_listed(records, kind):
    """If a check learns to catch one, move it to the other table and remove it from CONTRIBUTING.md."""
    tamper(records, NOT_CAUGHT[kind][0])
    assert kept(gathered(records)) == ALL


def test_the_losses_of_a_whole_arm(records):
    for seed in SEEDS:
        tamper(records, scaled(0.9, *LOSSES), f"zero2-{seed}")
    assert kept(gathered(records)) == {name for name in ALL if not name.startswith("zero2")}


# --- copies --------------------------------------------------------------------------------------------------------


def copy(records: Path, edit: Edit) -> None:
    put(records, edit(of(TARGET) | {"run_id": "a-copy"}))


def test_a_copy_under_another_name_counts_once(records):
    copy(records, put_in(argv=["other", "words"]))
    assert len(gathered(records).runs) == 9


@pytest.mark.parametrize("edit", [put_in(started_utc="2026-01-01T00:00:00+00:00"), scaled(1.1, "loss.train.5")])
def test_a_copy_that_was_changed_counts_as_little_as_what_it_copies(records, edit):
    copy(records, edit)
    assert kept(gathered(records)) == ALL - {TARGET}


def test_a_sealed_record_is_not_harmed_by_its_copy(records, tmp_path):
    keep.keep([records], tmp_path / "machine")
    put(tmp_path / "forged", of(TARGET) | {"run_id": "a-copy", "started_utc": "2026-01-01T00:00:00+00:00"})
    put(tmp_path / "forged", scaled(0.5, *LOSSES)(of("zero2-2")))
    seen = gathered(tmp_path / "forged", tmp_path / "machine")
    assert kept(seen) == ALL
    assert all(run.sealed for run in seen.runs)
    assert "a-copy: its step times are those of zero2-1" in " ".join(seen.set_aside)


def test_an_error_in_the_audit_itself_ends_nothing(records, monkeypatch):
    def broken(record, reached):
        return [1 / 0] if record.run_id == TARGET else []

    monkeypatch.setattr(evidence.audit, "faults", broken)
    seen = gathered(records)
    assert kept(seen) == ALL - {TARGET}
    assert "the audit cannot compute with this record (ZeroDivisionError" in seen.set_aside[0]


# --- seals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(records, tmp_path) -> Path:
    keep.keep([records], tmp_path / "machine")
    return tmp_path / "machine"


def test_keep_seals(machine, records):
    seen = gathered(machine / "runs")
    assert kept(seen) == {run.folder.name for run in seen.runs if run.sealed} == ALL
    line = json.loads((machine / "runs" / seal.MANIFEST).read_text().splitlines()[0])
    assert line["file"] == f"{records.name}/ddp-0/record.json"
    assert (len(line["sha256"]), line["commit"]) == (64, shaped.COMMIT)
    assert line["machine"] == "no GPU, 2 cores (Some CPU), 23 GiB"
    assert not any(run.sealed for run in gathered(records).runs)
    one_folder = gathered(machine / "runs" / records.name / TARGET)
    assert [run.sealed for run in one_folder.runs] == [True], "the manifest may be above the folder that was named"


def test_a_seal_shows_what_nothing_else_does(machine, records):
    top = machine / "runs" / records.name
    tamper(top, NOT_CAUGHT["all times x 2"][0])
    seen = gathered(machine)
    assert kept(seen) == ALL - {TARGET}
    assert f"{TARGET}/record.json was changed after it was sealed" in seen.set_aside[0]
    count, left_out = keep.keep([top], machine)
    assert (count, len(left_out)) == (8, 1), "keeping it again does not seal the change"
    assert kept(gathered(machine)) == ALL - {TARGET}


def test_a_gpu_that_was_never_there_decides_nothing(tmp_path):
    """Even a forgery that passes the audit does not count while it is not sealed. Once sealed, it counts."""
    put(tmp_path / "runs", finished("forged", gpu=True), of("zero2-1"))
    claim = SimpleNamespace(kind="bytes", conditions={})
    seen = gathered(tmp_path / "runs")
    chosen = choose(seen, claim, {"arm": "zero2"})
    assert [run.name for run in chosen.runs] == ["zero2-1"]
    assert [run.name for run in chosen.others] == ["forged"]
    assert "1 of 2 records is neither sealed nor of this machine: no evidence" in " ".join(seen.notes)
    keep.keep([tmp_path / "runs"], tmp_path / "machine")
    chosen = choose(gathered(tmp_path / "machine"), claim, {"arm": "zero2"})
    assert len(chosen.runs) == 2


# --- commits -------------------------------------------------------------------------------------------------------


def test_outside_a_checkout_commits_are_a_note(records, tmp_path, monkeypatch):
    tamper(records, put_in(commit="deadbeef" * 5))
    monkeypatch.setattr(store, "ROOT", tmp_path)
    store.unknown_commits.cache_clear()
    seen = gathered(records)
    assert kept(seen) == ALL
    assert "9 of 9 records are of a commit that could not be checked" in seen.notes
    store.unknown_commits.cache_clear()


def test_the_kept_records_are_sealed_and_pass():
    seen = gathered(*sorted((ROOT / "reports").glob("*/runs")))
    assert seen.set_aside == ()
    assert len(seen.runs) >= 242
    assert all(run.sealed for run in seen.runs)
