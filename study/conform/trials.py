"""What a release answers to trials of libraries: defaults, what is accepted, and what reproductions find."""

import functools
import hashlib
import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from study.conform.suite import ADAPTERS, Ranks, environment, table
from study.core.arms import PACKAGE, ROOT
from study.core.errors import Stop
from study.core.parsing import from_json, from_toml

KEPT = "trials.json"
ANSWERS = "configurations.json"  # beside the results of the properties
REPRODUCTION = "reproduction"
REPRODUCTIONS = ROOT / "reproductions"
WORKER = [sys.executable, "-P", "-m", "study.conform.worker"]
LIMIT_S = 3600
SCRIPT_LIMIT_S = 120  # a busy machine takes so long for 20 s
CONFIG = "deepspeed_config"  # a trial: what DeepSpeed reads in a config


@functools.cache
def installed() -> dict[str, dict]:
    """Return the trials by their keys, each with what the installed libraries answer."""
    rows = [row for path in sorted(ROOT.glob(f"reports/*/{KEPT}")) for row in from_json(path.read_bytes())]
    return {key(row["trial"]): row for row in rows}


@functools.cache
def concerning(package: str) -> dict[str, dict]:
    """Return the trials for releases of a package: all configurations, and the reproductions that are not too long."""
    every = {name: row["trial"] for name, row in installed().items()}
    long = table("matrix")["long"]
    return {
        name: trial
        for name, trial in every.items()
        if trial["what"] != REPRODUCTION or (owner(trial) == package and trial["name"] not in long)
    }


def owner(trial: dict) -> str:
    """Return the package that a trial is about. A reproduction that uses Accelerate is about that."""
    if trial["what"] != REPRODUCTION:
        return "deepspeed" if trial["what"] == CONFIG else trial["of"].partition(".")[0]
    source = (REPRODUCTIONS / f"{trial['name']}.py").read_text(encoding="utf-8").lower()
    return "accelerate" if "accelerate" in source else "deepspeed"


def key(trial: dict) -> str:
    return hashlib.sha256(json.dumps(trial, sort_keys=True).encode()).hexdigest()[:12]


def words(trial: dict) -> str:
    """Return what a trial asks, in a line."""
    if trial["what"] == REPRODUCTION:
        return trial["name"]
    if trial["what"] == CONFIG:
        return f"{trial['look']} of {json.dumps(trial['config'])}"
    return f"{trial['of'].rpartition('.')[2]}.{trial['field']}"


def tried(
    package: str, version: str, overlay: Path, folder: Path, only: Collection[str] | None = None
) -> dict[str, object]:
    """Return the answers of a release by the keys of the trials: from its file, and what that lacks is tried now.

    `only` limits what is tried to these keys.
    """
    path = folder / ANSWERS
    known = from_json(path.read_bytes()) if path.exists() else {}
    wanted = concerning(package)
    names = wanted.keys() if only is None else wanted.keys() & set(only)
    lacking = {name: wanted[name] for name in wanted if name in names - known.keys()}
    if not lacking:
        return known
    configurations = {name: trial for name, trial in lacking.items() if trial["what"] != REPRODUCTION}
    known |= dict(zip(configurations, _configured(package, version, overlay, configurations), strict=True))
    with Ranks(overlay, overlay.with_suffix(".log")) as ranks:
        for name in lacking.keys() - configurations.keys():
            script = str(REPRODUCTIONS / f"{lacking[name]['name']}.py")
            answer = ranks.answer(ADAPTERS["accelerate-ddp"], {"script": script, "limit_s": SCRIPT_LIMIT_S})
            known[name] = answer.get("found", answer)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=0) + "\n", encoding="utf-8")
    return known


def _configured(package: str, version: str, overlay: Path, trials: dict[str, dict]) -> list:
    """Return how a release reads configurations, or the error. They are tried in a process of their own."""
    text = json.dumps([{"what": "default", "of": package, "field": "__version__"}, *trials.values()])
    env = environment(overlay)
    done = subprocess.run(WORKER, input=text, env=env, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode:
        raise Stop(f"the trials ended: {done.stderr.strip().splitlines()[-1]:.300}", "look at the release")
    imported, *answers = json.loads(done.stdout)
    require(package, version, imported.get("found"))
    return [answer.get("found", answer) for answer in answers]


def require(package: str, version: str, imported: str | None) -> None:
    """Raise RuntimeError unless this version of a package was imported: never keep the answers of another one."""
    if (imported or "").partition("+")[0] != version:
        raise RuntimeError(f"{package} {imported} was imported instead of {version}")


@functools.cache
def faults() -> dict[str, str]:
    """Return the faults of libraries in the ledger: the id of each by its script."""
    content = from_toml((PACKAGE / "ledger" / "faults.toml").read_bytes())
    return {fault["script"]: fault["id"] for fault in content["fault"]}
