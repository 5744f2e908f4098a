"""Where things come from: the hub, knocked at once, and the cache, where things stand whole or not at all."""

import functools
import hashlib
import json
import socket
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path

import datasets
import huggingface_hub

OFFLINE = "give --data embedded with a built-in --model, or local folders (--data, --model, --tokenizer, --init random)"


@functools.cache
def knock() -> None:
    """Knock once. Where nobody answers, use what was downloaded before: the libraries would retry for minutes."""
    if urllib.request.getproxies():
        return  # reached through somebody else, who is not to be tried in this way
    endpoint = urllib.parse.urlsplit(huggingface_hub.constants.ENDPOINT)
    port = endpoint.port or {"http": 80}.get(endpoint.scheme, 443)
    try:
        socket.create_connection((endpoint.hostname, port), timeout=5).close()
    except OSError:
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True


def find(name: str) -> str:
    """A name as the libraries take it. If it is no local folder, the hub is knocked at first."""
    if not Path(name).exists():
        knock()
    return name


def reason(error: Exception) -> str:
    """Why something cannot be had, in part of a sentence."""
    if huggingface_hub.constants.HF_HUB_OFFLINE and isinstance(error, OSError):
        return "the hub does not answer, and it is not among what was downloaded before"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}{'...' if len(text) > 160 else ''}"


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
