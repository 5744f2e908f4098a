"""Public scripts, unchanged, as rank 0 of N: python -m tests.rehearsal.public FOLDER [PART_OF_A_PATH]

The folder has checkouts by their repositories' names, at the commits of public.toml. Prints what each script does.
"""

import json
import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from unittest import mock

from tests.rehearsal.material import make
from tests.rehearsal.warm import study

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = tomllib.loads(Path(__file__).with_name("public.toml").read_text())["script"]


def rehearse(script: dict, checkouts: Path, material: Path) -> dict:
    """Rehearse a script of the list in the folder of what it names, and return the answer."""
    path = checkouts.resolve() / script["repository"].rpartition("/")[2] / script["path"]
    for name in script.get("copies", ()):  # that it opens in the folder where it is started
        shutil.copy(path.with_name(name), material)
    command = ["virtual", script.get("module", path), f"--ranks={script['ranks']}"]
    if "arm" in script:
        command.append(f"--config_file={script['arm']}.yaml")
    words = [each.replace("{code}", str(checkouts.resolve())) for each in script.get("words", ())]
    folders = [ROOT, *(checkouts.resolve() / each for each in script.get("imports", ()))]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")])),
        "HF_MODULES_CACHE": str(material / ".modules"),
    }
    with mock.patch.dict(os.environ, environment):
        done = study(*command, "--json", "--", *words, folder=material)
    if not done.stdout.startswith("{"):
        raise AssertionError(done.stdout + done.stderr)
    return json.loads(done.stdout)


def main() -> None:
    checkouts, part = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    with tempfile.TemporaryDirectory() as temporary:
        make(Path(temporary))
        for script in SCRIPTS:
            if part in script["path"]:
                answer = rehearse(script, checkouts, Path(temporary))
                error = answer.get("error")
                did = f"{error['where']}: {error['message']}" if error else f"{answer['peak_bytes']} bytes"
                sys.stdout.write(f"{script['path']}: {did}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
