"""Versions of the software that can change a number, and the folder for operators compiled for them."""

import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path

PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "evaluate", "tokenizers", "numpy")
COMPILED_FOR = ("torch", "deepspeed")


def version(package: str) -> str | None:
    """Return a package's version; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    return {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}


def pins(constraints: Path) -> dict[str, str]:
    """Return the versions that a constraints file pins, by package."""
    return dict(re.findall(r"^([\w.-]+)==([^\s;#]+)", constraints.read_text(), re.MULTILINE))


def put_programs_on_path() -> None:
    """Let this process and its children find the environment's own programs, such as ninja, if nobody activated it."""
    folder = str(Path(sys.executable).parent)
    paths = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if folder not in paths:
        os.environ["PATH"] = os.pathsep.join([*paths, folder])


def operators_folder() -> Path:
    """Return the folder for DeepSpeed's compiled operators: in the Python environment of their PyTorch.

    PyTorch's default is one folder for all environments of a user, which would overwrite each other's operators. The
    versions are in the name because ninja does not know that the build depends on PyTorch's headers.
    """
    environment = Path(sys.prefix)
    if os.access(environment, os.W_OK):
        base = environment / "torch_extensions"
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        base = cache / "zero-study" / "torch_extensions" / str(environment).strip("/").replace("/", "-")
    return base / "-".join(f"{package}-{version(package) or 'none'}" for package in COMPILED_FOR)
