"""Where things come from: the hub, and the cache, where things stand whole or not at all."""

import hashlib
import json
import tempfile
from pathlib import Path

import datasets
import huggingface_hub

from study import hub

OFFLINE = "give --data embedded with a built-in --model, or local folders (--data, --model, --tokenizer, --init random)"


def knock() -> None:
    """Knock at the hub once, for the data sets' library as well."""
    hub.knock()
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        datasets.config.HF_HUB_OFFLINE = True


def find(name: str) -> str:
    """A name as the libraries take it. If it is no local folder, the hub is knocked at first."""
    if not Path(name).exists():
        knock()
    return name


class MadeBeside:
    """A path to make a file or folder at, which takes its name only once it is whole, even if two make it at once."""

    def __init__(self, target: Path):
        self.target = target

    def __enter__(self) -> Path:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.scratch = tempfile.TemporaryDirectory(dir=self.target.parent, prefix="part-")
        return Path(self.scratch.name) / self.target.name

    def __exit__(self, kind, error, trace):
        try:
            if kind is None:
                (Path(self.scratch.name) / self.target.name).replace(self.target)
        except OSError:
            if not self.target.exists():  # otherwise another process was first, with the same content
                raise
        finally:
            self.scratch.cleanup()


def fingerprint(thing) -> str:
    return hashlib.sha256(json.dumps(thing, sort_keys=True, default=str).encode()).hexdigest()[:16]
