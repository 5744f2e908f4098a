"""The hub, knocked at once, and what is said when a model is not to be had from it. Without torch."""

import functools
import socket
import urllib.parse
import urllib.request
from pathlib import Path

import huggingface_hub.constants

from study.record import Stop
from study.shapes import SHAPES


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


def config(model: str) -> Path:
    """The config.json of a model, from the hub or from what was downloaded before."""
    from huggingface_hub.utils import disable_progress_bars

    knock()
    disable_progress_bars()
    try:
        return Path(huggingface_hub.hf_hub_download(model, "config.json"))
    except Exception as error:  # a dozen kinds; each means that it cannot be had
        stop = not_found(model, error)
        raise Stop(stop.what, f"{stop.remedy}, or --params with --layers and --hidden") from error


def not_found(model: str, error: Exception) -> Stop:
    """That a model is nowhere, and the ways out: its built-in shape is named, never taken in its place."""
    what = f"--model {model} is no built-in shape, no folder with a config.json, and not to be had from the hub"
    hubs = {shape: its["hub"] or "" for shape, its in SHAPES.items()}
    ours = next((shape for shape, name in hubs.items() if model in (name, name.partition("/")[2])), None)
    shapes = f"{ours}, the built-in shape of that model" if ours else f"one of {', '.join(SHAPES)}"
    return Stop(f"{what} ({reason(error)})", f"give {shapes}, or a local folder")


def reason(error: Exception) -> str:
    """Why something cannot be had, in part of a sentence."""
    if huggingface_hub.constants.HF_HUB_OFFLINE and isinstance(error, OSError):
        return "the hub does not answer, and it is not among what was downloaded before"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}{'...' if len(text) > 160 else ''}"
