"""Releases: what is installed, held to the properties, kept, and said about an upgrade."""

import itertools
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.version import Version

from study.cli.commands import start
from study.conform import changes, output, releases, suite, trials, upstream
from study.conform.properties import read
from study.errors import Stop
from study.io.parsing import from_toml
from study.report.topics import conformance

ROOT = Path(__file__).resolve().parents[1]
PROPERTIES = {each.name: each for each in read()}
PLAN = from_toml((ROOT / "study" / "conform" / "matrix.toml").read_bytes())
PARTS = PLAN["part"]
RESULTS = [
    suite.Result("zero2", "sgd", "Says.", "Source", "holds", ""),
    suite.Result("zero2", "clip", "Says.", "Source", "fails", "the norm is off", kind="differs"),
    suite.Result("zero2", "four-ranks", "Says.", "Source", "refused", "no", ranks=(4,)),
]


@pytest.fixture
def pip(monkeypatch):
    """Stand in for pip: release 9.9 is missing, any other is installed. Collects what was asked for."""
    asked = []

    def run(command, **_):
        wanted = Path(command[command.index("-r") + 1]).read_text().split()
        asked.append(wanted)
        if wanted[0].endswith("==9.9"):
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found\n")
        report = {"install": [{"download_info": {"archive_info": {"hashes": {"sha256": "5e"}}}}]}
        Path(command[command.index("--report") + 1]).write_text(json.dumps(report))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(releases.subprocess, "run", run)
    return asked


def test_a_release_is_installed_once_and_later_by_its_hash(pip, tmp_path):
    for _ in range(2):
        assert releases.installed("toy", "1.0", tmp_path) == releases.Release("toy", "1.0", "5e")
    assert pip == [["toy==1.0"]]
    (tmp_path / "toy-1.0.json").unlink()
    releases.installed("toy", "1.0", tmp_path)
    assert pip[1] == ["toy==1.0", "--hash=sha256:5e"]


def test_a_release_that_cannot_be_installed_is_a_cell_with_its_reason(pip, tmp_path):
    release = releases.installed("toy", "9.9", tmp_path)
    (result,) = releases.cell(suite.ADAPTERS["ddp"], [PROPERTIES["sgd"]], release, tmp_path, tmp_path / "out")
    assert result.status == "not applicable"
    assert result.words == "cannot be installed: ERROR: No matching distribution found"
    assert json.loads((tmp_path / "out" / "toy-9.9" / "ddp.json").read_text())["reason"] == result.words


def test_results_that_exist_are_not_run_again(monkeypatch, tmp_path):
    output.keep(tmp_path / "toy-1.0", suite.Adapter("mine", "mine.py"), RESULTS, {"deepspeed": "1.0"})
    monkeypatch.delattr(releases, "Ranks")
    properties = [PROPERTIES["sgd"], PROPERTIES["clip"]]
    found = releases.cell(suite.Adapter("mine", ""), properties, releases.Release("toy", "1.0"), tmp_path, tmp_path)
    assert [result.status for result in found] == [result.status for result in RESULTS]


def fake_ranks(monkeypatch, imported):
    """Stand in for the ranks: they import this version, and every property holds."""

    class Ranks:
        def __init__(self, overlay, log):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def imported(self, adapter):
            return imported

        def ask(self, adapter, name, ranks, case, limit_s=0.0):
            return {"status": "holds", "words": "", "seconds": 0.1}

    monkeypatch.setattr(releases, "Ranks", Ranks)


def test_another_release_than_the_one_asked_for_is_never_a_result(monkeypatch, tmp_path):
    fake_ranks(monkeypatch, {"deepspeed": "0.19.8"})
    cell = (suite.ADAPTERS["zero2"], [PROPERTIES["sgd"]], releases.Release("deepspeed", "0.18.1"), tmp_path, tmp_path)
    with pytest.raises(RuntimeError, match=r"deepspeed 0\.19\.8 was imported instead of 0\.18\.1"):
        releases.cell(*cell)
    assert not list(tmp_path.glob("*/*.json"))
    fake_ranks(monkeypatch, {"deepspeed": "0.18.1+unknown"})
    assert [result.status for result in releases.cell(*cell)] == ["holds"]
    kept = json.loads((tmp_path / "deepspeed-0.18.1" / "zero2.json").read_text())
    assert kept["versions"]["deepspeed"] == "0.18.1"
    assert kept["results"] == [{"property": "sgd"}]


def test_what_is_kept_of_a_release_is_read_back(tmp_path):
    output.keep(tmp_path, suite.ADAPTERS["zero2"], RESULTS, {"deepspeed": "1.0"})
    found, versions = output.load(tmp_path / "zero2.json")
    known = ("adapter", "property", "status", "words", "kind")
    assert [[getattr(each, name) for name in known] for each in found] == [
        [getattr(each, name) for name in known] for each in RESULTS
    ]
    assert versions == {"deepspeed": "1.0"}


# --- the matrix ----------------------------------------------------------------------------------------------------


def test_the_whole_matrix_runs_each_part_and_says_what_changes(pip, monkeypatch, tmp_path):
    part = {"package": "deepspeed", "adapters": ["zero2"], "releases": ["0.1", "0.2", "9.9"]}
    monkeypatch.setattr(releases, "from_toml", lambda content: {"part": [part], "properties": ["sgd"]})
    monkeypatch.setattr(trials, "tried", lambda *given: {})
    fake_ranks(monkeypatch, {"deepspeed": "0.1"})
    with pytest.raises(RuntimeError, match=r"instead of 0\.2"):
        start(["versions", "all", "--overlays", str(tmp_path), "--out", str(tmp_path / "out")])
    fake_ranks(monkeypatch, {"deepspeed": "0.2"})
    start(["versions", "all", "--overlays", str(tmp_path), "--out", str(tmp_path / "out")])
    written = json.loads((tmp_path / "out" / "changes.json").read_text())
    assert written["tables"][0]["releases"] == ["0.1", "0.2", "0.19.8"]
    assert [each["release"] for each in written["unusable"]] == ["9.9"]


def test_the_matrix_is_what_the_issue_asks_for():
    tried = {part["package"]: part["releases"] for part in PARTS}
    assert len(tried["deepspeed"]) >= 20
    assert len(tried["accelerate"]) >= 8
    assert set(PLAN["properties"]) <= set(PROPERTIES)
    for part in PARTS:
        assert part["releases"] == sorted(part["releases"], key=Version)
        assert set(part["adapters"]) <= set(suite.ADAPTERS)


def test_every_kept_result_is_of_the_release_of_its_folder():
    for path in changes.COMMITTED.glob("*-*/*.json"):
        package, _, release = path.parent.name.rpartition("-")
        if path.name != trials.ANSWERS:
            results, versions = output.load(path)
            assert versions[package] == release
            asked = {result.property for result in results}
            assert asked >= set(PLAN["properties"]) or json.loads(path.read_text())["reason"], path
            assert not [result for result in results if result.kind == "hangs"], path


@pytest.mark.parametrize("part", PARTS[:2], ids=lambda part: part["adapters"][0])
def test_the_first_parts_of_the_matrix_are_whole(part):
    for adapter, release in itertools.product(part["adapters"], part["releases"]):
        assert (changes.COMMITTED / f"{part['package']}-{release}" / f"{adapter}.json").is_file(), release


def test_what_changes_is_what_the_kept_results_say():
    """If not: study versions all --out reports/conform/releases, which runs nothing that is there."""
    now = json.loads(json.dumps(changes.content(changes.COMMITTED)))
    assert now == json.loads((changes.COMMITTED / "changes.json").read_text())


def test_the_page_and_the_readme_show_the_changes():
    kept = conformance.over_releases()
    assert 1 <= len(kept["most"]) <= 5
    (table,) = [each for each in kept["tables"] if each["adapter"] == "zero2"]
    (row,) = [each for each in table["rows"] if each["question"] == "accumulation-4"]
    answers = dict(zip(table["releases"], row["answers"], strict=True))
    assert [answers[release] for release in ("0.17.5", "0.17.6", "0.18.2", "0.18.3")] == [
        "holds",
        "fails",
        "fails",
        "holds",
    ]
    assert conformance.headline() in " ".join((ROOT / "README.md").read_text().split())


# --- what changes if I upgrade -------------------------------------------------------------------------------------


def kept(folder, release, statuses, words="the loss is off", package="deepspeed"):
    rows = [
        suite.Result("zero2", name, "", "", status, words, kind="differs" if status == "fails" else "")
        for name, status in statuses.items()
    ]
    output.keep(folder / f"{package}-{release}", suite.ADAPTERS["zero2"], rows, {package: release})


@pytest.fixture
def upgraded(tmp_path):
    """Three releases before the installed one: the middle one is wrong."""
    kept(tmp_path, "0.17.5", {"sgd": "holds", "clip": "holds", "frozen": "refused"})
    kept(tmp_path, "0.17.10", {"sgd": "fails", "clip": "fails", "frozen": "refused"})
    kept(tmp_path, "0.18.3", {"sgd": "holds", "clip": "holds", "frozen": "holds"})
    return tmp_path


def test_an_upgrade_is_said_in_sentences(upgraded, capsys):
    start(["versions", "--from", "0.17.5", "--to", "0.18.3", "--out", str(upgraded)])
    said = " ".join(capsys.readouterr().out.split())
    assert "deepspeed 0.17.5 to 0.18.3, from the results of 3 releases: 0.17.5, 0.17.10, 0.18.3." in said
    assert "Better in 0.18.3: - refused until 0.17.10, holds since 0.18.3: zero2: frozen" in said
    assert "- holds until 0.17.5, fails in 0.17.10, holds since 0.18.3: zero2: sgd and clip" in said
    assert "A wrong result without a message: the loss is off." in said
    assert "Shown by: study bisect zero2 sgd 0.17.5 0.17.10" in said


def test_a_release_in_which_one_message_ends_everything_is_left_out(upgraded, capsys):
    rows = [suite.Result("zero2", name, "", "", "fails", "KeyError", kind="KeyError") for name in ("sgd", "clip")]
    output.keep(upgraded / "deepspeed-0.18.0", suite.ADAPTERS["zero2"], rows, {"deepspeed": "0.18.0"})
    kept(upgraded, "0.18.1", {"sgd": "holds"})
    found = changes.content(upgraded)
    assert [each["release"] for each in found["unusable"]] == ["0.18.0"]
    assert "2 of 2 properties: KeyError" in found["unusable"][0]["reason"]
    assert "0.18.0" not in found["tables"][0]["releases"]


def test_configurations_are_part_of_an_upgrade(upgraded, capsys):
    now = {trials.key(row["trial"]): row["found"] for row in trials.installed()}
    (clipping,) = [
        row["trial"] for row in trials.installed() if trials.words(row["trial"]).startswith("gradient_clipping")
    ]
    for release in ("0.17.5", "0.18.3"):
        old = now | {trials.key(clipping): 0.0}
        (upgraded / f"deepspeed-{release}" / trials.ANSWERS).write_text(json.dumps(old))
    start(["versions", "--to", "0.19.8", "--out", str(upgraded)])
    said = " ".join(capsys.readouterr().out.split())
    assert 'gradient_clipping of {"train_batch_size": 1}: 0.0 until 0.18.3, 1.0 since 0.19.8' in said
    assert "Claim L-15 is right since 0.19.8." in said


def test_a_claim_rests_on_trials_and_is_out_of_date_since_a_release():
    known = {trials.key(row["trial"]) for row in trials.installed()}
    assert len(list(trials.claims(known))) >= 50
    assert not list(trials.claims(set()))
    spans = [("0.1", "0.2", "10"), ("0.3", "0.4", '"none"')]
    assert changes._claim("L-14", ["10"], 0, spans) == "Claim L-14 is out of date since 0.3."
    assert changes._claim("L-14", ["none"], 0, spans) == "Claim L-14 is right since 0.3."
    assert changes._claim("L-14", ["else"], 0, spans) == "Claim L-14 rests on this."
    between = [("0.1", "0.2", "20"), ("0.3", "0.4", "13.1"), ("0.5", "0.6", "0"), ("0.7", "0.7", '"does not run"')]
    assert changes._claim("L-66", [13], 0.01, between) == "Claim L-66 is out of date since 0.5."


def test_trials_are_of_the_release_asked_for(monkeypatch, tmp_path):
    count = len(trials.concerning("deepspeed"))
    answers = [{"found": "0.18.1+unknown"}, {"error": "ValueError: no"}, *[{"found": 1}] * (count - 1)]
    done = SimpleNamespace(returncode=0, stdout=json.dumps(answers), stderr="")
    monkeypatch.setattr(trials.subprocess, "run", lambda *_, **__: done)
    found = trials.tried("deepspeed", "0.18.1", tmp_path, tmp_path / "out")
    assert list(found.values()) == [{"error": "ValueError: no"}, *[1] * (count - 1)]
    monkeypatch.delattr(trials.subprocess, "run")
    assert trials.tried("deepspeed", "0.18.1", tmp_path, tmp_path / "out") == found
    monkeypatch.setattr(trials.subprocess, "run", lambda *_, **__: done, raising=False)
    with pytest.raises(RuntimeError, match=r"instead of 0\.18\.2"):
        trials.tried("deepspeed", "0.18.2", tmp_path, tmp_path / "other")


def test_a_release_is_asked_what_it_lacks(monkeypatch, tmp_path):
    first, *others = map(trials.key, trials.concerning("accelerate"))
    (tmp_path / trials.ANSWERS).write_text(json.dumps(dict.fromkeys(others, 1)))
    trials_run = []

    def run(command, input, **_):
        trials_run.extend(json.loads(input))
        answers = [{"found": "1.2.1"}, {"found": 2}]
        return SimpleNamespace(returncode=0, stdout=json.dumps(answers), stderr="")

    monkeypatch.setattr(trials.subprocess, "run", run)
    counts = trials.tried("accelerate", "1.2.1", tmp_path, tmp_path)
    assert [trials.key(each) for each in trials_run[1:]] == [first]
    assert counts == dict.fromkeys(others, 1) | {first: 2}


def test_a_reproduction_is_tried_for_the_library_that_it_is_about():
    names = {
        package: {each.get("name") for each in trials.concerning(package)} for package in ("deepspeed", "accelerate")
    }
    assert "mics_is_removed" in names["deepspeed"] - names["accelerate"]
    assert "sgd_becomes_adam" in names["accelerate"] - names["deepspeed"]
    assert set(trials.LEFT_OUT) <= {path.stem for path in upstream.REPRODUCTIONS.glob("*.py")}
    assert not names["deepspeed"] & set(trials.LEFT_OUT)


def test_reproductions_are_part_of_an_upgrade(upgraded, capsys):
    now = {trials.key(row["trial"]): row["found"] for row in trials.installed()}
    (mics,) = [row["trial"] for row in trials.installed() if trials.words(row["trial"]) == "mics_is_removed"]
    for release, value in {"0.17.5": {"error": "KeyError: 'x'"}, "0.18.3": "accepted"}.items():
        (upgraded / f"deepspeed-{release}" / trials.ANSWERS).write_text(json.dumps(now | {trials.key(mics): value}))
    start(["versions", "--to", "0.19.8", "--out", str(upgraded)])
    printed = " ".join(capsys.readouterr().out.split())
    history = '"does not run" until 0.17.5, "accepted" in 0.18.3, "DeepSpeedConfigError" since 0.19.8'
    assert (
        f"mics_is_removed: {history} Shown by: study/reproductions/mics_is_removed.py Does not run: KeyError: 'x'"
        in printed
    )
    (table,) = [each for each in changes.content(upgraded)["tables"] if each["adapter"] == changes.REPRODUCTION]
    assert table["title"] == "deepspeed: what scripts find"
    assert [each["question"] for each in table["rows"]] == ["mics_is_removed"]


def test_a_failure_of_a_kept_release_has_a_script(tmp_path):
    start(["report-bug", "zero2/accumulation-4@deepspeed-0.18.1", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.md")
    assert "deepspeed 0.18.1" in path.read_text()
    assert "#7718" in path.read_text()
    assert not any("@" in name for name in upstream.failures())


def test_bisect_halves(pip, monkeypatch, tmp_path, capsys):
    tried = []

    def cell(adapter, properties, release, *_):
        tried.append(release.version)
        status = "fails" if Version(release.version) >= Version("0.10") else "holds"
        return [suite.Result(adapter.name, "sgd", "Says.", "Source", status, "")]

    monkeypatch.setattr(releases, "cell", cell)
    found = ["0.9", "0.2", "0.10", "0.11", "0.1", "0.3", "0.12", "0.20"]
    releases.bisect("zero2", "sgd", tuple(found), overlays=tmp_path)
    assert "sgd changes in deepspeed 0.10: holds in 0.9, then fails." in capsys.readouterr().out
    assert len(set(tried)) <= 5
    with pytest.raises(Stop, match="is the same in"):
        releases.bisect("zero2", "sgd", ("0.1", "0.2"), overlays=tmp_path)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["versions", "zero4", "0.1"], "'zero4' is not an adapter"),
        (["versions", "zero2", "newest"], "Invalid version: 'newest'"),
        (["versions"], "no adapter is named"),
        (["versions", "--from", "0.0.1"], "deepspeed 0.0.1 was not tried"),
        (["versions", "--from", "0.1", "--package", "toy"], "has no results of toy"),
        (["bisect", "zero2", "sgdd", "0.1", "0.2"], "'sgdd' is not a property"),
    ],
)
def test_a_mistake_about_releases_is_a_sentence(words, match):
    with pytest.raises(Stop, match=match):
        start(words)
