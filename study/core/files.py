"""Reads and writes files that may come from a stranger: regular, of limited size, never through a link.

If a file cannot be read, there is an OSError whose `strerror` says why. Content that is not valid is
a ValueError.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import reprlib
import secrets
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from study.core.errors import LONGEST_NAME, Stop, nearest

# NONBLOCK: a pipe is opened and refused without waiting. NOCTTY: no terminal becomes the controlling one.
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
LONGEST_REASON = 200
LONGEST_NAME_BYTES = 200  # file systems take 255, and the report adds a suffix
LINK = "it is a link, and links are not followed"


def safe_name(name) -> str:
    """Return the name itself, if it is a valid file name and cannot lead out of its folder."""
    if not isinstance(name, str) or not name.isprintable() or name in ("", ".", "..") or "/" in name or "\\" in name:
        raise Stop(f"{name!r:.80} cannot be the name of a file", "give a name without slashes and control characters")
    if len(name.encode(errors="replace")) > LONGEST_NAME_BYTES:
        raise Stop(f"{name!r:.80} is too long for the name of a file", f"give at most {LONGEST_NAME_BYTES} bytes")
    return name


def safe_join(root: Path, *names: str) -> Path:
    """Return the path of these names below a folder. Each must be a safe name, so the path cannot leave the folder."""
    return root.joinpath(*map(safe_name, names))


def read(path: Path, most_bytes: int, flags: int = READ) -> bytes:
    """The content of a file that the user named, or of one in a model's folder, where the Hub's cache has links."""
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a file", str(path))
            if status.st_size > most_bytes:
                raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
            return file.read(status.st_size)  # read(n) reserves n bytes, also of a small file
    except ValueError:  # a NUL, or half of a character
        raise OSError(errno.EINVAL, "it is not a valid path", repr(path)) from None


def read_below(root: Path, name: str | PurePosixPath, most_bytes: int) -> bytes:
    """The content of a file below a folder, by a name that may be foreign. No part of it may be `..` or a link."""
    path = _below(root, name)
    if path.is_symlink():
        raise OSError(errno.ELOOP, LINK, str(path))
    return read(path, most_bytes, READ | os.O_NOFOLLOW)


def write_below(root: Path, name: str | PurePosixPath, content: bytes, to_disk: bool = True) -> None:
    """Replace a file below a folder in one step. A link among its folders is refused; a link in its place is replaced.

    `to_disk` waits until the content is on disk.
    """
    path = _below(root, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            if to_disk:
                os.fsync(file.fileno())
        partial.replace(path)
    finally:  # a full disk, or Ctrl-C
        partial.unlink(missing_ok=True)


def _below(root: Path, name: str | PurePosixPath) -> Path:
    """Return the path of a file below a folder. The folders between them are no links."""
    parts = str(name).split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise OSError(errno.EINVAL, "the name leads out of its folder", str(name))
    if "\0" in str(name):
        raise OSError(errno.EINVAL, "it is not a valid path", repr(name))
    path = root
    for part in parts[:-1]:
        path = path / part
        if path.is_symlink():
            raise OSError(errno.ELOOP, LINK, str(path))
    return path / parts[-1]


def why(error: Exception) -> str:
    """Return why something could not be read, as part of a sentence. It is short, whatever the error contains."""
    text = " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."


# --- Reads JSON, TOML and YAML as plain values. Every fault of a text is a ValueError

# What PyYAML raises, also for a tag whose value does not fit.
ODD = (yaml.YAMLError, AttributeError, KeyError, IndexError, TypeError, OverflowError)


def from_json(content: str | bytes) -> Any:
    """Standard JSON, without NaN and infinity."""
    return _parsed_text(functools.partial(json.loads, parse_constant=_refuse_constant), content)


def from_toml(content: str | bytes) -> dict:
    return _parsed_text(tomllib.loads, content)


def from_yaml(content: str | bytes) -> Any:
    return _parsed_text(yaml.safe_load, content)


def _parsed_text(parse: Callable[[str], Any], content: str | bytes) -> Any:
    text = content if isinstance(content, str) else content.decode().removeprefix("\ufeff")
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ODD as error:
        raise ValueError(getattr(error, "problem", None) or why(error)) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


# --- Turns pydantic's errors into one sentence: where the mistake is, what was expected, and what came

TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "dict": "a table",
    "model": "a table",
    "list": "a list",
    "tuple": "a list",
    "date": "a date such as 2026-11-20, in TOML without quotes",
    "path": "a path",
    "is_instance_of": "a path",
}

SHOWN = reprlib.Repr()
SHOWN.maxstring = SHOWN.maxother = 80
LONGEST_SENTENCE = 600

PLAINER = {"Input should be": "must be", "greater than or equal to": "at least", "less than or equal to": "at most"}


def sentence(error: ValidationError, known: Iterable[str] = (), name=".".join) -> str:
    """The first mistake as a sentence. `known` are the possible field names; `name` turns a location into text."""
    first = error.errors(include_url=False)[0]
    where = name([str(part) for part in first["loc"] if not str(part).endswith((")", "]"))])
    text = f"{where[-LONGEST_NAME:]} {_problem(first, known)}".strip()
    return text if len(text) <= LONGEST_SENTENCE else f"{text[:LONGEST_SENTENCE]}..."


def _problem(first: ErrorDetails, known: Iterable[str]) -> str:
    kind = first["type"]
    message = first["msg"]
    came = first.get("input")
    if kind == "missing":
        return "is missing"
    if kind == "string_too_long":
        return f"must have at most {first['ctx']['max_length']:,} characters (got {len(str(came)):,})"
    if kind == "extra_forbidden":
        return f"is not known; {nearest(str(first['loc'][-1]), known)}" if known else "is not known"
    if kind.startswith(("literal", "greater_than", "less_than", "finite")):
        for words, plainer in PLAINER.items():
            message = message.replace(words, plainer)
        return f"{message} (got {SHOWN.repr(came)})"
    expected = next((words for prefix, words in TYPES.items() if kind.startswith(prefix)), None)
    return f"must be {expected} (got {SHOWN.repr(came)})" if expected else message.removeprefix("Value error, ")


# --- Reads a file into a type. Every fault of a file is one sentence: which file, what is wrong, and what to do

T = TypeVar("T")


def load(
    path: Path,
    model: type[T],
    *,
    what: str,
    remedy: str,
    most_bytes: int,
    links: bool = False,
    missing: str = "",
    known: Iterable[str] = (),
) -> T:
    """Return the content of a JSON, TOML or YAML file as a type. Raise Stop if it cannot be read, or is not valid.

    `what` names the content: "a record". `missing` is what to do if there is no such file. Links are followed only if
    the user named the file, and never where it may be a stranger's. `known` are the names that the content may have.
    """
    try:
        content = read(path, most_bytes) if links else read_below(path.parent, path.name, most_bytes)
    except OSError as error:
        absent = isinstance(error, FileNotFoundError) and missing
        raise Stop(f"{str(path)!r:.300} cannot be read ({why(error)})", missing if absent else remedy) from None
    try:
        return _parsed(path.suffix, content, model)
    except ValidationError as error:
        raise Stop(f"{path} is not {what}: {sentence(error, known)}", remedy) from None
    except (ValueError, RecursionError) as error:
        raise Stop(f"{str(path)!r:.300} cannot be read ({why(error)})", remedy) from None


def _parsed(suffix: str, content: bytes, model: type[T]) -> T:
    adapter = TypeAdapter(model)
    if suffix == ".json" and model is not Any:  # in one pass, as records are many
        return adapter.validate_json(content)
    parse = {".json": from_json, ".toml": from_toml}.get(suffix, from_yaml)
    return adapter.validate_python(parse(content))


# --- Writes an output folder as a whole: beside the old one, which it then replaces

MANIFEST = "study-manifest.json"


@contextlib.contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """Yield an empty folder to write to. It replaces `out` if the block succeeds; otherwise it is removed.

    A manifest in the folder lists every file that was written, with its checksum. A folder with anything else belongs
    to somebody else, and is refused.
    """
    try:
        out = out.resolve()
        refuse_foreign(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
            new = Path(scratch, "new")
            new.mkdir()
            yield new
            (new / MANIFEST).write_text(json.dumps({"files": _checksums(new)}, indent=1) + "\n")
            refuse_foreign(out)  # again: the build took its time
            if out.exists():
                out.rename(Path(scratch, "old"))
            new.rename(out)
    except OSError as error:
        raise Stop(f"{out} cannot be written ({why(error)})", "give another --out") from None


def refuse_foreign(out: Path) -> None:
    """Raise Stop if the folder contains anything that no earlier build has written, or that was changed since."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        known = json.loads((out / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise Stop(f"{out} was not made by this command", "give another --out, or remove it yourself") from None
    foreign = [name for name, checksum in _checksums(out).items() if known.get(name) != checksum]
    if foreign:
        what = f"{out} holds files that this command did not write, or that were changed since"
        raise Stop(f"{what} ({len(foreign)}, such as {foreign[0]})", "move them away, or give another --out")


def _checksums(folder: Path) -> dict[str, str]:
    """Return the checksum of each file below a folder, except its manifest. A link is never ours."""
    checksums = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            checksums[name] = "link"
        elif path.is_file() and name != MANIFEST:
            checksums[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return checksums
