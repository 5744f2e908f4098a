"""The Hugging Face Hub: whether it answers, and the errors if something cannot be loaded. It needs no torch."""

import functools
import hashlib
import json
import re
import socket
import urllib.parse
from pathlib import Path

from study.core import files
from study.core import parsing as texts
from study.core.errors import Stop
from study.core.shapes import MAX_CONFIG_BYTES, SHAPES, is_local, models
from study.core.validation import nearest

TIMEOUT_S = 3
WITHOUT_HUB = (
    "give --data embedded with a built-in --model, or local folders (--data, --model, --tokenizer, --init random)"
)


@functools.cache
def try_to_connect() -> None:
    """Connect to the Hub once, before a library does. If that fails, switch the libraries to offline.

    Otherwise they would retry for minutes before they use earlier downloads. They read HF_HUB_OFFLINE from the
    environment only while they are imported, and this constant afterwards.
    """
    from urllib.request import getproxies

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return  # behind a proxy, a direct connection shows nothing
    try:
        endpoint = urllib.parse.urlsplit(constants.ENDPOINT)
        port = endpoint.port or {"http": 80}.get(endpoint.scheme, 443)
        socket.create_connection((endpoint.hostname, port), timeout=TIMEOUT_S).close()
    except (OSError, ValueError):  # ValueError: HF_ENDPOINT is not an address
        constants.HF_HUB_OFFLINE = True


def prepare_to_load(name: str) -> None:
    """Call this before a library loads `name`, a local path or a name on the Hub."""
    if not is_local(name):
        try_to_connect()


def is_offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def config(model: str) -> Path:
    """Return the config.json of a model, from the Hub or an earlier download."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    try_to_connect()
    disable_progress_bars()
    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # the library raises a dozen types; each means that it cannot be loaded
        stop = not_found(model, error)
        raise Stop(stop.what, f"{stop.remedy}, or --params with --layers and --hidden") from error


def refuse_code(model: str, trust_remote_code: bool = False) -> None:
    """Raise Stop for a folder with Python code that its config.json wants to run. The check does not load the code.

    A folder without such code is read with transformers' own class, or not at all.
    """
    if trust_remote_code or not is_local(model):
        return  # for a hub name, transformers itself checks this
    try:
        values = texts.from_json(files.read(Path(model) / "config.json", MAX_CONFIG_BYTES))
    except (OSError, ValueError):
        return  # the code that reads the config reports the mistake
    wanted = json.dumps(values.get("auto_map") if isinstance(values, dict) else None, ensure_ascii=False)
    modules = sorted({f"{module}.py" for module in re.findall(r'(\w+)\.\w+"', wanted)})  # of "module.Class"
    if {file.name for file in Path(model).glob("*.py")} & set(modules):
        what = f"--model {model} has Python code of its own ({', '.join(modules)}), which was not run"
        own = "take auto_map out of its config.json to use transformers' own class, if it has one"
        raise Stop(what, f"read the code and give --trust-remote-code, or {own}")


def code_digest(model: str) -> str | None:
    """Return a digest of the Python files in a model's folder: other code is another model. None for a hub name."""
    if not is_local(model):
        return None
    modules = sorted(Path(model).glob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in modules)).hexdigest()


def not_found(model: str, error: Exception) -> Stop:
    """Return the error for a model that cannot be loaded. The remedy names its built-in shape, if there is one."""
    what = f"--model {model} is not a built-in shape, nor a folder with a config.json, nor available from the Hub"
    hubs = {shape: config["hub"] or "" for shape, config in SHAPES.items()}
    ours = next((shape for shape, name in hubs.items() if model in (name, name.partition("/")[2])), None)
    known = nearest(model.rpartition("/")[2], models(), most=3).replace("choose one", "give one").removesuffix("?")
    shapes = f"give {ours}, the built-in shape of that model" if ours else known
    return Stop(f"{what} ({reason(model, error)})", f"{shapes}, or a local folder")


def reason(name: str, error: Exception) -> str:
    """Return why a local folder or a name on the Hub cannot be loaded, as part of a sentence."""
    if is_offline() and isinstance(error, OSError) and not is_local(name):
        return "the hub does not answer, and it was not downloaded before"
    if "trust_remote_code" in str(error):
        return "it needs Python code of its own, and the study never runs code from a model or a data set"
    if type(error).__name__ == "HFValidationError":
        return "there is no such folder"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}{'...' if len(text) > 160 else ''}"
