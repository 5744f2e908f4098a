"""The `study` command and the operators' builder, started as a user starts them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from conftest import ROOT

from study import record
from study.arms import NAMES


def study(*words) -> subprocess.CompletedProcess:
    command = [Path(sys.executable).with_name("study"), *words]
    return subprocess.run([str(w) for w in command], capture_output=True, text=True, cwd=ROOT, check=False)


def test_all_arms_are_listed():
    done = study("arms")
    assert done.returncode == 0
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    assert [name for name in listed if name in NAMES] == list(NAMES)
    assert "zero3_textbook" in listed


def test_a_folder_without_runs_is_told_in_a_sentence(tmp_path):
    done = study("runs", tmp_path)
    assert done.returncode != 0
    assert "there is no run below" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_run_is_a_row_also_the_broken(tmp_path, trained):
    shutil.copytree(trained("single").folder, tmp_path / "good")
    failed = record.new("failed", []) | {"status": "failed", "requested": {"arm": "ddp"}}
    failed["error"] = {"kind": "Stop", "message": "it was not to be", "where": None, "what_to_do": "try again"}
    for name, text in (("failed", json.dumps(failed)), ("broken", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(text)
    rows = {row["run"]: row for row in json.loads(study("runs", tmp_path, "--json").stdout)}
    assert {name: row["status"] for name, row in rows.items()} == {
        "good": "done", "failed": "failed", "broken": "unreadable",
    }  # fmt: skip
    assert rows["good"]["loss"] == trained("single").record["loss"]["final_train"]
    assert rows["failed"]["loss"] is None
    assert "it was not to be. What to do: try again." in " ".join(study("runs", tmp_path).stdout.split())


def test_operators_that_are_built_are_not_built_again():
    done = subprocess.run(
        [sys.executable, "-m", "study.operators"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("  cached") >= 3
    assert "  compiled" not in done.stdout
