"""Releases: what is installed, held to the properties, kept, and said about an upgrade."""

import contextlib
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.version import Version

from study.cli.commands import start
from study.conform import changes, output, releases, suite, trials
from study.conform.suite import PROPERTIES
from study.core.errors import Stop

ROOT = Path(__file__).resolve().parents[1]
PLAN = suite.table("matrix")
PARTS = PLAN["part"]
RESULTS = [
    suite.Result("zero2", "sgd", "holds", ""),
    suite.Result("zero2", "clip", "fails", "the norm is off", kind="differs"),
    suite.Result("zero2", "four-ranks", "refused", "no", ranks=(4,)),
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

        def answer(self, adapter, request):
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
    assert found == RESULTS
    assert versions == {"deepspeed": "1.0"}


# --- the matrix ----------------------------------------------------------------------------------------------------


def test_the_whole_matrix_runs_each_part_and_says_what_changes(pip, monkeypatch, tmp_path):
    part = {"package": "deepspeed", "adapters": ["zero2"], "releases": ["0.1", "0.2", "9.9"]}
    monkeypatch.setattr(releases, "table", lambda name: {"part": [part], "properties": ["sgd"]})
    monkeypatch.setattr(trials, "tried", lambda *given: {})
    fake_ranks(monkeypatch, {"deepspeed": "0.1"})
    with pytest.raises(RuntimeError, match=r"instead of 0\.2"):
        start(["versions", "all", "--overlays", str(tmp_path), "--out", str(tmp_path / "out")])
    fake_ranks(monkeypatch, {"deepspeed": "0.2"})
    start(["versions", "all", "--overlays", str(tmp_path), "--out", str(tmp_path / "out")])
    written = json.loads((tmp_path / "out" / "changes.json").read_text())
    assert written["tables"][0]["releases"] == ["0.1", "0.2", "0.19.8"]
    assert [each["release"] for each in written["unusable"]] == ["9.9"]


def test_every_kept_result_is_of_the_release_of_its_folder():
    for path in changes.RELEASES.glob("*-*/*.json"):
        package, _, release = path.parent.name.rpartition("-")
        if path.name != trials.ANSWERS:
            results, versions = output.load(path)
            assert versions[package] == release
            asked = {result.property for result in results}
            assert asked >= set(PLAN["properties"]) or json.loads(path.read_text())["reason"], path
            assert not [result for result in results if result.kind == "hangs"], path


def test_what_changes_is_what_the_kept_results_say():
    """If not: study versions all --out reports/conform/releases, which runs nothing that is there."""
    now = json.loads(json.dumps(changes.content(changes.RELEASES)))
    assert now == json.loads((changes.RELEASES / "changes.json").read_text())


# --- what changes if I upgrade -------------------------------------------------------------------------------------


def kept(folder, release, statuses, words="the loss is off", package="deepspeed"):
    rows = [
        suite.Result("zero2", name, status, words, kind="differs" if status == "fails" else "")
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
    rows = [suite.Result("zero2", name, "fails", "KeyError", kind="KeyError") for name in ("sgd", "clip")]
    output.keep(upgraded / "deepspeed-0.18.0", suite.ADAPTERS["zero2"], rows, {"deepspeed": "0.18.0"})
    kept(upgraded, "0.18.1", {"sgd": "holds"})
    found = changes.content(upgraded)
    assert [each["release"] for each in found["unusable"]] == ["0.18.0"]
    assert "2 of 2 properties: KeyError" in found["unusable"][0]["reason"]
    assert "0.18.0" not in found["tables"][0]["releases"]


def test_configurations_are_part_of_an_upgrade(upgraded, capsys):
    now = {trials.key(row["trial"]): row["found"] for row in trials.installed().values()}
    (clipping,) = [
        row["trial"]
        for row in trials.installed().values()
        if trials.words(row["trial"]).startswith("gradient_clipping")
    ]
    for release in ("0.17.5", "0.18.3"):
        old = now | {trials.key(clipping): 0.0}
        (upgraded / f"deepspeed-{release}" / trials.ANSWERS).write_text(json.dumps(old))
    start(["versions", "--to", "0.19.8", "--out", str(upgraded)])
    said = " ".join(capsys.readouterr().out.split())
    assert 'gradient_clipping of {"train_batch_size": 1}: 0.0 until 0.18.3, 1.0 since 0.19.8' in said


@pytest.fixture
def asked(monkeypatch):
    """Stand in for the processes that try a release, 0.18.1: every answer is 1. Collects what was asked for."""
    asked = []

    def run(command, input, **_):
        asked.extend(json.loads(input)[1:])
        answers = [{"found": "0.18.1+unknown"}, *[{"found": 1} for _ in json.loads(input)[1:]]]
        return SimpleNamespace(returncode=0, stdout=json.dumps(answers), stderr="")

    class Ranks(contextlib.nullcontext):
        def answer(self, adapter, request):
            asked.append(Path(request["script"]).stem)
            return {"error": "KeyError: 'x'"}

    monkeypatch.setattr(trials.subprocess, "run", run)
    monkeypatch.setattr(trials, "Ranks", lambda overlay, log: Ranks(Ranks()))
    return asked


def test_trials_are_of_the_release_asked_for_and_kept(asked, tmp_path):
    found = trials.tried("deepspeed", "0.18.1", tmp_path, tmp_path / "out")
    assert len(asked) == len(found) == len(trials.concerning("deepspeed"))
    assert [value for value in found.values() if value != 1] == [{"error": "KeyError: 'x'"}] * sum(
        isinstance(each, str) for each in asked
    )
    asked.clear()
    assert trials.tried("deepspeed", "0.18.1", tmp_path, tmp_path / "out") == found
    assert asked == []
    with pytest.raises(RuntimeError, match=r"instead of 0\.18\.2"):
        trials.tried("deepspeed", "0.18.2", tmp_path, tmp_path / "other")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('print(1)\nprint(\'{"found": [1], "more": 2}\')', {"found": [1]}),
        ("import os\nprint('{\"found\": 1}', flush=True)\nos._exit(0)", {"found": 1}),
        ("raise KeyError('x')", {"error": "KeyError: 'x'"}),
        ("print(1)", {"error": "it printed no answer"}),
        ("import time\ntime.sleep(60)", {"error": "it took longer than 1 s"}),
    ],
)
def test_a_script_has_an_answer_or_a_reason(text, answer, ranks, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    request = {"script": str(tmp_path / "mine.py"), "limit_s": 1}
    assert ranks.answer(suite.ADAPTERS["ddp"], request) == answer


def test_a_script_of_the_user_is_halved(pip, monkeypatch, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("")
    run = releases.subprocess.run

    def script(command, env, check):
        overlay = env["PYTHONPATH"].partition(":")[0]
        return subprocess.CompletedProcess(command, int(overlay.endswith(("0.3", "0.4"))))

    monkeypatch.setattr(
        releases.subprocess, "run", lambda command, **more: (script if command[1:2] != ["-m"] else run)(command, **more)
    )
    releases.bisect("script", str(tmp_path / "mine.py"), ("0.1", "0.2", "0.3", "0.4"), overlays=tmp_path)
    assert "changes in deepspeed 0.3: exit code 0 in 0.2, then exit code 1." in capsys.readouterr().out


def test_bisect_halves(pip, monkeypatch, tmp_path, capsys):
    tried = []

    def cell(adapter, properties, release, *_):
        tried.append(release.version)
        status = "fails" if Version(release.version) >= Version("0.10") else "holds"
        return [suite.Result(adapter.name, "sgd", status)]

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
        (["bisect", "script", "absent.py", "0.1", "0.2"], "there is no file absent.py"),
    ],
)
def test_a_mistake_about_releases_is_a_sentence(words, match):
    with pytest.raises(Stop, match=match):
        start(words)
