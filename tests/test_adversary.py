"""An adversary with an hour: ways to bend a copy of the kept evidence, and which are noticed without its history.

The ways in WAYS leave the seals as they are. After those in RESEALED, the adversary seals everything again. What is not
noticed then is in EXPECTED_MISSES, and in SECURITY.md. The copy has a few kept records of each kind, all claims, the
answers of the libraries and the measurements of others.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import shaped
from conftest import ROOT
from test_cited_values import stands_in

from study.errors import Stop
from study.ledger import files, trial_checks
from study.machine import cache
from study.probes import answers
from study.records import evidence, seal, store
from study.records.runs import load

KEPT = ROOT / "reports" / "cpu-2core"
SMOKE = ("ddp-9d0fa33e", "zero1-9502bd8f", "zero2-5228df76", "zero2-72420bc1", "zero3-46126d78")
FOLDERS = [*(f"smoke/arms-{name}-r1.1" for name in SMOKE)]
ZERO2, ZERO3, DDP = (f"smoke/arms-{name}-r1.1" for name in ("zero2-5228df76", "zero3-46126d78", "ddp-9d0fa33e"))
SAVED = "stages/init-and-save-zero2-059c2590-r1.1"
SCRIPT = "as_printed/script-single-498a885a-r1.1"  # as published: no training is of DeepSpeed's engine
REMOVED = object()

Way = Callable[[Path], object]


# --- the copy ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Path:
    """A small copy of the evidence, laid out and sealed as the repository is."""
    root = tmp_path_factory.mktemp("evidence")
    runs = root / "reports" / "box" / "runs"
    lines = (KEPT / "runs" / seal.MANIFEST).read_text().splitlines()
    chosen = [line for line in lines if _is_chosen(json.loads(line)["file"])]
    for line in chosen:
        name = json.loads(line)["file"]
        (runs / name).parent.mkdir(parents=True)
        shutil.copy(KEPT / "runs" / name, runs / name)
    (runs / seal.MANIFEST).write_text("\n".join(chosen) + "\n")
    shutil.copy(KEPT / answers.KEPT, root / "reports" / "box" / answers.KEPT)
    shutil.copy(ROOT / "reports" / "verdicts.json", root / "reports")
    shutil.copytree(ROOT / "reports" / "outside", root / "reports" / "outside")
    shutil.copytree(files.FOLDER, claims_of(root))
    seal.add_inputs(root)
    return root


def _is_chosen(name: str) -> bool:
    return name.startswith(("as_printed/", "stages/init-and-save")) or str(Path(name).parent) in FOLDERS


def runs_of(root: Path) -> Path:
    return root / "reports" / "box" / "runs"


def claims_of(root: Path) -> Path:
    return root / "study" / "ledger" / "claims"


@pytest.fixture
def root(original, tmp_path, monkeypatch) -> Path:
    """A copy to tamper with, read on another machine and without the history."""
    shutil.copytree(original, tmp_path / "copy")
    monkeypatch.setattr(answers, "REPORTS", tmp_path / "copy" / "reports")
    monkeypatch.setattr(answers, "_folder", lambda: tmp_path / "cache")
    entries = json.loads((KEPT / answers.KEPT).read_text())
    monkeypatch.setattr(answers, "versions", lambda: entries[0]["versions"])
    monkeypatch.setattr(seal, "is_of_this_machine", lambda record: False)
    monkeypatch.setattr(store, "unknown_commits", lambda commits: None)
    monkeypatch.setattr(store, "first_days", lambda pattern: None)
    return tmp_path / "copy"


def reseal(root: Path) -> None:
    """Seal everything again, on both levels."""
    runs = runs_of(root)
    names = [path.relative_to(runs).as_posix() for path in sorted(runs.rglob(store.RECORD))]
    lines = [{"file": name, "sha256": hashlib.sha256((runs / name).read_bytes()).hexdigest()} for name in names]
    (runs / seal.MANIFEST).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    seal.add_inputs(root)


def notices(root: Path, original: Path) -> set[str]:
    """Whatever `study claims` says of the evidence, and what the tests say of a claim that was changed."""
    gathered = evidence.gather(load([runs_of(root)]))
    words = {*gathered.set_aside, *answers.set_aside(), *gathered.notes, *seal.changed_inputs(root)}
    for path in sorted(claims_of(root).glob("*.toml")):
        if path.read_bytes() != (claims_of(original) / path.name).read_bytes():
            words |= {*_wrong_claims(path)}
    return {sentence for sentence in words if "of a commit that" not in sentence}


def _wrong_claims(path: Path) -> Iterator[str]:
    try:
        checks = [check for claim in files.read(path) for check in claim.checks if check.check == "cited"]
    except Stop as stop:
        yield stop.what
        return
    for given in (check.arguments for check in checks):
        if given.get("value") is not None and not stands_in(given["value"], given["sentence"], given["where"]):
            yield f"{given['value']} does not stand in {given['sentence']}"


# --- ways to tamper ------------------------------------------------------------------------------------------------


def at(place, path: str):
    """The place above the last name of a path, and that name; a number is a place in a list."""
    *above, last = [int(name) if name.isdigit() else name for name in path.split(".")]
    for name in above:
        place = place[name]
    return place, last


def record(name: str, **changes) -> Way:
    """Change fields of a record. A function of the old value gives the new one; __ stands for a dot."""

    def tamper(root: Path) -> None:
        path = runs_of(root) / name / store.RECORD
        fields = json.loads(path.read_text())
        for field, value in changes.items():
            place, last = at(fields, field.replace("__", "."))
            place[last] = value(place[last]) if callable(value) else value
        path.write_text(json.dumps(fields))

    return tamper


def times(factor: float) -> Callable:
    """Multiply a number, or all numbers of a list or a table."""

    def multiply(value):
        if isinstance(value, dict):
            return {name: multiply(each) for name, each in value.items()}
        if isinstance(value, list):
            return [multiply(each) for each in value]
        return type(value)(value * factor) if isinstance(value, (int, float)) else value

    return multiply


def ranks(part: str, factor: float, where: str) -> Callable:
    """Multiply a component of memory on all ranks; at the peak, the peak changes with it."""

    def change(per_rank: list) -> list:
        for rank in per_rank:
            rank[where][part] = int(rank[where][part] * factor)
            rank["tracked_peak_bytes"] = sum(rank["at_peak"].values())
        return per_rank

    return change


def removed(name: str) -> Way:
    return lambda root: (root / name).unlink()


def text(name: str, old: str, new: str) -> Way:
    """Replace a text in a file, where it stands first."""

    def tamper(root: Path) -> None:
        content = (root / name).read_text()
        assert old in content
        (root / name).write_text(content.replace(old, new, 1))

    return tamper


def exchanged(root: Path) -> None:
    paths = [runs_of(root) / name / store.RECORD for name in (ZERO2, ZERO3)]
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, reversed(contents), strict=True):
        path.write_bytes(content)


def copied(root: Path) -> None:
    """A run under another name, an hour later."""
    shutil.copytree(runs_of(root) / ZERO2, runs_of(root) / "smoke" / "arms-zero2-copy")
    record("smoke/arms-zero2-copy", run_id="arms-zero2-copy", started_utc="2026-11-20T00:00:00.000+00:00")(root)


def manifest(change: Callable[[list[str]], list[str]]) -> Way:
    def tamper(root: Path) -> None:
        path = runs_of(root) / seal.MANIFEST
        path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))

    return tamper


def answer(sealed: bool = False, **changes) -> Way:
    """Change the answer of a script; with `sealed`, its own seal too."""

    def tamper(root: Path) -> None:
        path = root / "reports" / "box" / answers.KEPT
        entries = json.loads(path.read_text())
        entry = next(each for each in entries if each["trial"].get("name") == "zero3_init_flag_ignored")
        entry |= changes
        if sealed:
            entry["seal"] = answers.Answer(**entry).digest
        path.write_text(json.dumps(entries))

    return tamper


def put(**settings) -> Way:
    """Add a record that passes the audit and is not sealed."""
    return lambda root: shaped.put(runs_of(root) / "more", shaped.finished("more-0", "zero2", **settings))


CLAIMS = "study/ledger/claims/"
OUTSIDE = "reports/outside/"
MANY = 10**13  # bytes
COMPONENTS = "memory__components__per_rank"
WAYS: dict[str, Way] = {
    # records
    "a loss in the middle": record(ZERO2, loss__train__12=times(0.97)),
    "all times halved": record(ZERO2, time=times(0.5)),
    "all memory halved": record(ZERO2, memory=times(0.5)),
    "an arm renamed": record(ZERO3, requested__arm="zero2", observed__arm="zero2"),
    "a device added": record(ZERO2, hardware__devices=[shaped.GPU] * 2),
    "another clock": record(ZERO2, started_utc="2026-10-01T00:00:00.000+00:00"),
    "a record removed": removed(f"reports/box/runs/{ZERO2}/record.json"),
    "two records exchanged": exchanged,
    "a success called a failure": record(ZERO2, status="oom", error={"kind": "E", "message": "m", "what_to_do": "w"}),
    "losses of the published script": record(SCRIPT, observed__runs__1__losses=times(0.97)),
    "a commit invented": record(ZERO2, commit="deadbeef" * 5),
    # manifests
    "the manifest removed": removed(f"reports/box/runs/{seal.MANIFEST}"),
    "a line of the manifest removed": manifest(lambda lines: lines[1:]),
    "a sum in the manifest": manifest(lambda lines: [lines[0].replace('"sha256": "', '"sha256": "0'), *lines[1:]]),
    "a manifest that cannot be read": manifest(lambda lines: ["{"]),
    "the seal of claims and answers removed": removed(f"reports/{seal.INPUTS}"),
    # records that nobody sealed
    "a record of a GPU": put(gpu=True),
    "a record of another machine": put(),
    # answers of the libraries
    "another answer": answer(found=False),
    "other words of an answer": answer(told="found False"),
    "an answer for other versions": answer(versions={"deepspeed": "0.1"}),
    "all answers removed": removed(f"reports/box/{answers.KEPT}"),
    # claims
    "a tolerance": text(f"{CLAIMS}001.toml", "tolerance = 0.1\n", "tolerance = 0.5\n"),
    "a value": text(f"{CLAIMS}001.toml", "value = 28\n", "value = 15\n"),
    "a quote": text(f"{CLAIMS}001.toml", "38 petaFLOPs", "18 petaFLOPs"),
    "what a source says": text(f"{CLAIMS}001.toml", "agrees = false", "agrees = true"),
    "a cited value": text(f"{CLAIMS}001.toml", "value = 15, sentence", "value = 28, sentence"),
    "a claim made a premise": text(f"{CLAIMS}001.toml", "value = 28\n", "value = 28\npremise = true\n"),
    "a day moved": text(f"{CLAIMS}000.toml", "fixed = 2026-11-20", "fixed = 2020-01-01"),
    "a committed verdict": text("reports/verdicts.json", '"supported"', '"refuted"'),
    "a file of claims removed": removed(f"{CLAIMS}zeropp.toml"),
    # measurements of others
    "a measurement of others": text(f"{OUTSIDE}measurements.csv", "1", "2"),
    "the role of a source": text(f"{OUTSIDE}sources.toml", 'role = "test"', 'role = "fit"'),
    "a prediction of such a measurement": text(f"{OUTSIDE}predictions.json", "1", "2"),
}
RESEALED: dict[str, Way] = {
    "all losses doubled": record(ZERO2, loss__train=times(2.0)),
    "other initial weights": record(ZERO2, observed__weights_checksum="other"),
    "another seed": record(ZERO2, requested__seed=43),
    "a copy of a run": copied,
    "an arm renamed": WAYS["an arm renamed"],
    "an arm renamed throughout, with its file": record(
        ZERO3, requested__arm="zero2", observed__arm="zero2", observed__stage=2, requested__config_file="zero2.yaml"
    ),
    "moments at the peak": record(ZERO2, **{COMPONENTS: ranks("moments", 0.5, "at_peak")}),
    "moments after a step": record(ZERO2, **{COMPONENTS: ranks("moments", 2, "after_step")}),
    "weights after a step": record(DDP, **{COMPONENTS: ranks("weights", 0.5, "after_step")}),
    "gradients after a step": record(ZERO3, **{COMPONENTS: ranks("gradients", 2, "after_step")}),
    "all memory halved": WAYS["all memory halved"],
    "traffic halved": record(ZERO2, traffic__per_rank=times(0.5)),
    "no calls": record(ZERO2, traffic__per_rank__0__all_reduce__calls=0),
    "the kernel's count": record(ZERO2, traffic__kernel_bytes_written=times(0.5)),
    "fewer saved bytes": record(SAVED, observed__saved__bytes=times(0.9)),
    "more saved bytes": record(SAVED, observed__saved__bytes=times(1.1)),
    "a call of deepspeed.initialize": record(SCRIPT, observed__runs__1__deepspeed_initialize_calls=1),
    "memory 0": record(ZERO2, memory=times(0)),
    "a loss of 0": record(ZERO2, loss__train__12=0.0),
    "a loss of 1e308": record(ZERO2, loss__train__12=1e308),
    "a negative loss": record(ZERO2, loss__eval__0__eval_loss=-1.0),
    "more memory than the host has": record(ZERO2, memory__per_rank__0__host_peak_bytes=MANY),
    "times that do not fit into the run": record(ZERO2, time=times(100)),
    "more ranks": record(ZERO2, observed__ranks=4, observed__ranks_counted=4),
    "a virtual run": record(ZERO2, requested__virtual_ranks=8, observed__virtual_ranks=8),
    "another precision": record(ZERO2, requested__precision="bf16"),
    "a loss removed": record(ZERO2, loss__train=lambda losses: losses[1:]),
    "an end before the start": record(ZERO2, finished_utc="2026-01-01T00:00:00.000+00:00"),
    "an answer of other code": answer(sealed=True, found=False, code="0" * 24),
    "a tolerance without a reason": text(f"{CLAIMS}001.toml", "tolerance = 0.1\n", "tolerance = 0.37\n"),
    "a cited value": WAYS["a cited value"],
    "a check that does not exist": text(f"{CLAIMS}001.toml", 'check = "cited"', 'check = "agreed"'),
    # not noticed
    "a loss in the middle": WAYS["a loss in the middle"],
    "losses of the published script": WAYS["losses of the published script"],
    "times and windows doubled": record(ZERO2, time__step_s=times(2.0), time__window_s=times(2.0)),
    "another answer, with its seal": answer(sealed=True, found=False),
    "a tolerance that has a reason": text(f"{CLAIMS}001.toml", "tolerance = 0.1\n", "tolerance = 0.05\n"),
    "a record of a GPU": put(gpu=True),
}
# Once everything is sealed again, only the history of the repository shows these. SECURITY.md says the same in words.
EXPECTED_MISSES = {
    "a loss in the middle": "nothing else in a record depends on it",
    "losses of the published script": "its losses are compared with no other run",
    "times and windows doubled": "a run may have been this slow; its wall time has room for it",
    "another answer, with its seal": "asking the library again would show it: remove the file, then study claims",
    "a tolerance that has a reason": "only the committed verdicts and the README show it",
    "a record of a GPU": "it is a record in agreement with itself, and nobody else has that machine",
}


def test_without_tampering_nothing_is_noticed(root, original):
    assert notices(root, original) == set()
    reseal(root)
    assert notices(root, original) == set()


@pytest.mark.parametrize("name", WAYS)
def test_what_a_seal_shows(root, original, name):
    WAYS[name](root)
    assert notices(root, original), name


@pytest.mark.parametrize("name", RESEALED)
def test_what_shows_although_all_is_sealed_again(root, original, name):
    """If a check learns to notice one of the expected misses, remove it from the table and from SECURITY.md."""
    RESEALED[name](root)
    reseal(root)
    assert bool(notices(root, original)) != (name in EXPECTED_MISSES), name


def test_an_answer_in_the_users_cache_is_told(root, monkeypatch):
    trial = {"what": "reproduction", "name": "zero3_init_flag_ignored"}
    monkeypatch.setattr(answers, "not_installed", lambda: ())
    before = trial_checks.reproduction(name=trial["name"])
    cache.keep(answers._folder(), answers.key(trial), {"found": "planted", "told": "planted"})
    after = trial_checks.reproduction(name=trial["name"])
    assert after.value == before.value
    assert "your own cache differs: planted" in after.working


def test_nine_of_ten_ways_are_noticed():
    total = len(WAYS) + len(RESEALED) + 1  # and the answer in a user's cache
    assert total >= 40
    assert len(EXPECTED_MISSES) <= 0.1 * total
    security = (ROOT / "SECURITY.md").read_text()
    assert [name for name in EXPECTED_MISSES if f"*{name}*" not in security] == []


def test_the_repository_is_as_it_was_sealed(request):
    """Claims that were changed on purpose are sealed again by study claims --keep, or by pytest --refresh-golden."""
    if request.config.getoption("--refresh-golden"):
        seal.add_inputs()
    assert seal.changed_inputs() == []
