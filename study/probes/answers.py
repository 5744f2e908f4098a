"""Asks the installed libraries, and keeps their answers. `worker` tries configurations in its own process.

An answer is kept for a trial, the code that tries it and the versions of the libraries. If the trial itself fails (a
time limit, a crash), nothing is kept. All trials take minutes, so the reports contain the answers for the pinned
versions, in one file for each machine. `study runs --keep` renews them. They decide before a user's own.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

from study.errors import Stop
from study.io.validation import nearest
from study.machine import cache, software
from study.probes import worker
from study.records.privacy import redact
from study.spec import arms
from study.spec.settings import cache_home

REPRODUCTIONS = arms.ROOT / "reproductions"
REPORTS = arms.ROOT / "reports"
KEPT = "trials.json"  # beside the records of a machine
REPRODUCTION = "reproduction"
WORKER = [sys.executable, "-m", "study.probes.worker"]
LIMIT_S = 300
NEEDED = ("deepspeed", "accelerate", "torch")
# The modules that trials may ask about, with their classes and functions. Nothing else is imported.
MODULES = (
    *("accelerate", "accelerate.utils", "torch.distributed.fsdp", "torch.nn.utils", "transformers"),
    *("deepspeed.autotuning.constants", "deepspeed.runtime.constants"),
    *("deepspeed.runtime.zero.config", "deepspeed.runtime.zero.offload_config"),
)
CONSTRUCTED = ("accelerate.utils.FullyShardedDataParallelPlugin",)  # other classes read files that their arguments name


class Answer(BaseModel):
    """What a trial found, as a value and in words. The file of a machine also has the trial, versions and code."""

    trial: dict = {}
    versions: dict[str, str] = {}
    code: str = ""  # the digest of the code that tried it
    found: object
    told: str

    @property
    def key(self) -> str:
        return _digest([self.trial, self.code, self.versions])

    def __str__(self) -> str:
        return f"the answer of {self.trial.get('name') or json.dumps(self.trial):.150}"


def refusal(trial: dict) -> Stop | None:
    """Return why a trial is not run, or None.

    Anybody may write a claims file, so it cannot run other scripts, import other modules, read the files that it names,
    or show private values of the libraries.
    """
    what = trial["what"]
    path = str(trial.get("of", "torch.nn.utils"))
    name = trial.get("name")
    if what == REPRODUCTION and name not in scripts():
        return Stop(f"there is no reproduction {name}", nearest(str(name), scripts()))
    bases = ("plain", *arms.all_paths())
    if trial.get("base", "plain") not in bases:
        return Stop(f"there is no arm {trial['base']}", nearest(trial["base"], bases))
    if not {path, path.rpartition(".")[0]} & set(MODULES):
        return Stop(f"{path:.200} is in none of the modules that claims may ask about", f"choose from {MODULES}")
    if what == "constructed" and path not in CONSTRUCTED:
        return Stop(f"{path:.200} may not be constructed", f"choose from {', '.join(CONSTRUCTED)}")
    words = ".".join(str(trial.get(key, "")) for key in ("of", "look", "field", "name")).split(".")
    if private := [word for word in words if word.startswith("_")]:
        return Stop(f"{private[0]:.80} is private to a library", "name a public attribute")
    if read := [key for key in _keys(trial.get("change")) if key.endswith(("file", "path")) and "nvme" not in key]:
        return Stop(f"{read[0]:.80} names a file", "give the content of the file as deepspeed_config")
    return None


def _keys(change: object) -> list[str]:
    """Return the keys of the changes to a config, at any depth."""
    table = change if isinstance(change, dict) else {}
    return [*table, *(key for value in table.values() for key in _keys(value))]


def scripts() -> dict[str, Path]:
    """Return the reproductions by name."""
    return {path.stem: path for path in sorted(REPRODUCTIONS.glob("*.py"))}


@functools.cache
def not_installed() -> tuple[str, ...]:
    return tuple(name for name in NEEDED if importlib.util.find_spec(name) is None)


def prepare(trials: list[dict]) -> None:
    """Try what has no answer yet; the configurations share one process."""
    if not not_installed():
        ask(trials)


def keep_in(reports: Path, trials: list[dict]) -> int:
    """Write this machine's answers to these trials beside its records. Return how many there are."""
    new = []
    for trial in {key(trial): trial for trial in trials}.values():
        if own := _own(key(trial)):
            values = redact(own.model_dump(include={"found", "told"}))
            new.append(Answer(trial=trial, versions=versions(), code=code(trial), **values))
    if new:
        replaced = [(each.trial, each.versions) for each in new]  # one of older code is not kept
        old = [each for each in _read(reports / KEPT).values() if (each.trial, each.versions) not in replaced]
        in_order = sorted([*old, *new], key=lambda answer: json.dumps(answer.trial, sort_keys=True))
        (reports / KEPT).write_text(json.dumps([entry.model_dump() for entry in in_order], indent=1) + "\n")
        _read.cache_clear()
    return len(new)


def set_aside() -> list[str]:
    """Return a sentence for each kept answer that does not count, because other code gave it."""
    sentences = []
    for path in sorted(REPORTS.glob(f"*/{KEPT}")):
        current = [each for each in _read(path).values() if each.versions == versions() and not refusal(each.trial)]
        old = [each for each in current if each.code != code(each.trial)]
        words = "was given by other code, which has changed since. It does not count"
        sentences += [f"{path.parent.name}/{KEPT}: {each} {words}" for each in old]
    return sentences


def ask(trials: list[dict]) -> list[Answer | str]:
    """Return the answer to each trial, kept or new. If the trial itself failed: why."""
    keys = [key(trial) for trial in trials]
    known: dict[str, Answer | str] = {name: answer for name in keys if (answer := _kept(name))}
    missing = {name: trial for name, trial in zip(keys, trials, strict=True) if name not in known}
    if len(missing) > 1:
        sys.stderr.write(f"trying {len(missing)} configurations and scripts; answers are kept\n")
    for name, new in _new(missing):
        known[name] = new
        if isinstance(new, Answer):
            cache.keep(_folder(), name, new.model_dump(mode="json", include={"found", "told"}))
    return [known[name] for name in keys]


def _new(missing: dict[str, dict]) -> Iterator[tuple[str, Answer | str]]:
    """Yield new answers by key. Configurations share a process."""
    scripts = {name: trial for name, trial in missing.items() if trial["what"] == REPRODUCTION}
    together = [name for name in missing if name not in scripts]
    if together:
        yield from zip(together, _try([missing[name] for name in together]), strict=True)
    for name, trial in scripts.items():
        yield name, _run(trial["name"])


def key(trial: dict) -> str:
    """Return a digest of a trial, the code that tries it, and the versions of the libraries."""
    return _digest([trial, code(trial), versions()])


def code(trial: dict) -> str:
    """Return a digest of what tries it: a script; or the worker, with the arm that the trial begins with."""
    if trial["what"] == REPRODUCTION:
        return _digest(_code_of(scripts()[trial["name"]].read_text()))
    arm = arms.digest(trial["base"]) if trial.get("base") in arms.all_paths() else None
    return _digest([_code_of(Path(worker.__file__).read_text()), arm])


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


@functools.cache
def _code_of(text: str) -> str:
    """Return the code of a script without comments and docstring, which change nothing."""
    tree = ast.parse(text)
    tree.body = tree.body[ast.get_docstring(tree) is not None :]
    return ast.unparse(tree)


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the libraries without the name of the build: trials only use their Python code."""
    versions = software.versions().items()
    return {name: version.split("+")[0] for name, version in versions if version and name != "python"}


def _folder() -> Path:
    return cache_home().expanduser() / "trials"


def _own(name: str) -> Answer | None:
    """Return the answer in the user's cache. A file without an answer is ignored."""
    with contextlib.suppress(ValueError):
        return Answer.model_validate(cache.answer(_folder(), name))
    return None


def _kept(name: str) -> Answer | None:
    """Return the answer that decides: the repository's before the user's own."""
    for path in sorted(REPORTS.glob(f"*/{KEPT}")):
        if answer := _read(path).get(name):
            return Answer(found=answer.found, told=f"{answer.told} (tried on {path.parent.name}, with these versions)")
    return _own(name)


@functools.cache
def _read(path: Path) -> dict[str, Answer]:
    """Return the answers in a file by key."""
    if not path.exists():
        return {}
    try:
        entries = TypeAdapter(list[Answer]).validate_json(path.read_bytes())
    except ValueError as error:
        raise Stop(f"{path} is no list of answers: {error}", "restore it from the history") from error
    return {each.key: each for each in entries}


def _try(trials: list[dict]) -> list[Answer | str]:
    printed, reason = _process(WORKER, json.dumps(trials), arms.ROOT)
    if printed is None:
        return [reason] * len(trials)
    return [entry["error"] if "error" in entry else Answer(**entry) for entry in json.loads(printed)]


def _run(name: str) -> Answer | str:
    """Return the answer of a reproduction, run in its own process and folder: the last line that is JSON."""
    sys.stderr.write(f"  {name}\n")
    with tempfile.TemporaryDirectory() as folder:
        printed, reason = _process([sys.executable, str(scripts()[name])], "", Path(folder))
    return last_answer(printed or "") or reason or "it printed no answer"


def last_answer(printed: str) -> Answer | None:
    """Return the last line that is JSON, of what a reproduction printed."""
    for line in reversed(printed.splitlines()):
        with contextlib.suppress(ValueError):
            values = json.loads(line)
            if isinstance(values, dict) and "found" in values:
                value = values.pop("found")
                details = ", ".join(f"{name} {detail}" for name, detail in values.items())
                return Answer(found=value, told=f"found {value} ({details})" if details else f"found {value}")
    return None


def _process(command: list[str], text: str, folder: Path) -> tuple[str | None, str]:
    """Return what a process printed; or None, and why. The process can import this study in any folder."""
    path = os.pathsep.join([str(arms.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    try:
        ended = run(command, input=text, cwd=folder, env=environment)
    except subprocess.TimeoutExpired:
        return None, f"it took longer than {LIMIT_S} s"
    if ended.returncode != 0:
        return None, (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    return ended.stdout, ""
