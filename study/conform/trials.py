"""What a release answers to the trials of the ledger: defaults, what is accepted, and what reproductions find.

`study.probes.reproducing` tries them in a process of its own, which uses the release.
"""

import functools
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from study.conform.suite import environment
from study.errors import Stop
from study.io.parsing import from_json, from_toml
from study.spec.arms import PACKAGE, ROOT

KEPT = "trials.json"
ANSWERS = "configurations.json"  # beside the results of the properties
WORKER = [sys.executable, "-P", "-m", "study.probes.reproducing"]
LIMIT_S = 3600
# They take longer than 5 s of processor time, or compile an operator: not repeated for each release.
LEFT_OUT = (
    *("allgather_partitions_unread", "comms_logger_counts", "cpu_adam_equals_adamw", "cpu_adam_speed"),
    *("elastic_checkpoint_of_stage3", "fsdp_on_a_cpu_is_ddp", "fsdp_on_a_cpu_is_none", "max_grad_norm_unused"),
    *("nvme_checkpoint_loads_no_weights", "reduce_scatter_is_all_reduce", "stage2_nvme_writes_nothing"),
    *("two_trainings_without_gpu", "zenflow_changes_weights", "zero2_estimator_at_the_update"),
    "zero3_init_flag_and_precision",
)
DEFAULTS: dict[str, dict] = {
    "deepspeed_config": {"look": "accepted", "ranks": 1},
    "accelerate_yaml": {"look": "accepted"},
}  # of the worker's functions
SHORT = {"deepspeed_config": "config", "accelerate_yaml": "change", "constructed": "arguments"}


@functools.cache
def installed() -> tuple[dict, ...]:
    """Return the trials of the ledger, with what the installed libraries answer."""
    rows = [row for path in sorted(ROOT.glob(f"reports/*/{KEPT}")) for row in from_json(path.read_bytes())]
    return tuple({key(row["trial"]): row for row in rows}.values())


def is_reproduction(trial: dict) -> bool:
    return trial["what"] == "reproduction"


def concerning(package: str) -> list[dict]:
    """Return the trials for releases of a package: all configurations, and its own reproductions."""
    return [row["trial"] for row in installed() if not is_reproduction(row["trial"]) or _of(row["trial"], package)]


def _of(trial: dict, package: str) -> bool:
    """Return whether a reproduction is about this package. One that uses Accelerate is about that."""
    source = (PACKAGE / "reproductions" / f"{trial['name']}.py").read_text(encoding="utf-8")
    owner = next((name for name in ("accelerate", "deepspeed") if name in source.lower()), "")
    return owner == package and trial["name"] not in LEFT_OUT


def key(trial: dict) -> str:
    return hashlib.sha256(json.dumps(trial, sort_keys=True).encode()).hexdigest()[:12]


def words(trial: dict) -> str:
    """Return what a trial asks, in a line."""
    if is_reproduction(trial):
        return trial["name"]
    if trial["what"] in SHORT:
        return f"{trial['look']} of {json.dumps(trial[SHORT[trial['what']]])}"
    return f"{trial['of'].rpartition('.')[2]}.{trial.get('field') or trial.get('name')}"


def tried(package: str, version: str, overlay: Path, folder: Path) -> dict[str, object]:
    """Return the answers of a release by the keys of the trials: from its file, and what that lacks is tried now."""
    path = folder / ANSWERS
    known = from_json(path.read_bytes()) if path.exists() else {}
    trials = [trial for trial in concerning(package) if key(trial) not in known]
    if not trials:
        return known
    text = json.dumps([{"what": "default", "of": package, "field": "__version__"}, *trials])
    env = environment(overlay)
    done = subprocess.run(WORKER, input=text, env=env, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode:
        raise Stop(f"the trials ended: {done.stderr.strip().splitlines()[-1]:.300}", "look at the release")
    imported, *answers = json.loads(done.stdout)
    if imported.get("found", "").partition("+")[0] != version:
        raise RuntimeError(f"{package} {imported} was imported instead of {version}")
    new = {key(trial): answer.get("found", answer) for trial, answer in zip(trials, answers, strict=True)}
    by_key = known | new
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(by_key, indent=0) + "\n", encoding="utf-8")
    return by_key


def claims(keys: set[str]) -> Iterator[tuple[str, list, float]]:
    """Yield each claim that rests on some of these trials, with the values that it expects, and its tolerance."""
    known = {row["trial"]["what"] for row in installed()}
    for path in sorted((PACKAGE / "ledger" / "claims").glob("*.toml")):
        for claim in from_toml(path.read_bytes()).get("claim", []):
            if claim.get("with", {}).get("what") in known and "relation" not in claim:
                names = [key(trial) for trial in _each(claim["with"])]
                values = claim["value"] if isinstance(claim["value"], list) else [claim["value"]] * len(names)
                if expected := [value for value, name in zip(values, names, strict=True) if name in keys]:
                    yield claim["id"], expected, claim.get("tolerance", 0)


def _each(given: dict) -> Iterator[dict]:
    """Yield the trials of a check: one, or one for each element of its lists."""
    count = max(len(value) if isinstance(value, list) else 1 for value in given.values())
    for number in range(count):
        own = {name: value[number] if isinstance(value, list) else value for name, value in given.items()}
        yield DEFAULTS.get(given["what"], {}) | own
