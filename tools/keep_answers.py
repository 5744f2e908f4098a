"""Runs scripts of reproductions/ with the installed libraries, and keeps their answers.

python tools/keep_answers.py reports/cpu-2core [SCRIPT ...]

Without names it runs every script of which reports/cpu-2core/trials.json has an answer: minutes. An answer is kept with
the versions of the libraries and with a digest of the code that gave it. A test refuses answers of older code.
"""

import argparse
import ast
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from study.core import machine

ROOT = Path(__file__).resolve().parents[1]
REPRODUCTIONS = ROOT / "reproductions"
LIMIT_S = 300


def code_of(script: str) -> str:
    """Return a digest of a script without its comments and its docstring, which change nothing."""
    tree = ast.parse((REPRODUCTIONS / f"{script}.py").read_text())
    tree.body = tree.body[ast.get_docstring(tree) is not None :]
    return hashlib.sha256(json.dumps(ast.unparse(tree)).encode()).hexdigest()[:24]


def answer_of(script: str) -> dict:
    """Return what a script prints: its last line that is JSON."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(REPRODUCTIONS / f"{script}.py")]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    values = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    found = values.pop("found")
    details = ", ".join(f"{name} {value}" for name, value in values.items())
    return {"found": found, "told": f"found {found} ({details})" if details else f"found {found}"}


def main(folder: Path, names: list[str]) -> None:
    versions = {name: each.split("+")[0] for name, each in machine.versions().items() if each and name != "python"}
    path = folder / "trials.json"
    rows = {json.dumps(row["trial"], sort_keys=True): row for row in json.loads(path.read_text())}
    for name in names or [row["trial"]["name"] for row in rows.values() if row["trial"]["what"] == "reproduction"]:
        sys.stderr.write(f"{name}\n")
        trial = {"what": "reproduction", "name": name}
        row = {"trial": trial, "versions": versions, "code": code_of(name), **answer_of(name)}
        rows[json.dumps(trial, sort_keys=True)] = row
    path.write_text(json.dumps([rows[key] for key in sorted(rows)], indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT")
    options = parser.parse_args()
    main(options.folder, options.scripts)
