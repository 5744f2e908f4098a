"""Reads and writes files that may come from a stranger: regular, of limited size, never through a link out of a folder.

If a file cannot be read, there is an OSError whose `strerror` says why. Below a root, each folder is opened through the
folder above it, and the kernel refuses links. So a file that is replaced by a link in the meantime is refused as well.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import reprlib
import secrets
import shutil
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from study.core.errors import LONGEST_NAME, Stop, nearest

# NONBLOCK: a pipe is opened and refused without waiting. NOCTTY: no terminal becomes the controlling one.
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
BLOCK_BYTES = 2**16
LONGEST_REASON = 200
LONGEST_NAME_BYTES = 200  # file systems take 255, and the report adds a suffix
LINK = "it is a link, and links are not followed"
NO_PATH = "it is not a valid path"


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


def read(path: Path, most_bytes: int) -> bytes:
    """The content of a file that the user named, or of one in a model's folder, where the Hub's cache has links."""
    try:
        file = os.open(path, READ)
    except ValueError:  # a NUL, or half of a character
        raise OSError(errno.EINVAL, NO_PATH, repr(path)) from None
    return _content(file, path, most_bytes)


def read_below(root: Path, name: str | PurePosixPath, most_bytes: int) -> bytes:
    """The content of a file below a folder, by a name that may be foreign. No part of it may be `..` or a link."""
    with _folder_of(root, name) as (folder, last):
        return _content(os.open(last, READ | os.O_NOFOLLOW, dir_fd=folder), root / name, most_bytes)


def write_below(root: Path, name: str | PurePosixPath, content: bytes, to_disk: bool = True) -> None:
    """Replace a file below a folder in one step. A link among its folders is refused; a link in its place is replaced.

    `to_disk` makes the root folder, and waits until the content is on disk.
    """
    if to_disk:
        root.mkdir(parents=True, exist_ok=True)
    with _folder_of(root, name, create=True) as (folder, last):
        partial = f".{secrets.token_hex(8)}.part"
        try:
            with os.fdopen(os.open(partial, NEW, 0o666, dir_fd=folder), "wb") as file:
                file.write(content)
                file.flush()
                if to_disk:
                    os.fsync(file.fileno())
            os.rename(partial, last, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:  # a full disk, or Ctrl-C
            with contextlib.suppress(OSError):
                os.unlink(partial, dir_fd=folder)
            raise


def why(error: Exception) -> str:
    """Return why something could not be read, as part of a sentence. It is short, whatever the error contains."""
    text = " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."


@contextlib.contextmanager
def _folder_of(root: Path, name: str | PurePosixPath, create: bool = False) -> Iterator[tuple[int, str]]:
    """The open folder of a file below a root, and the last part of its name."""
    *above, last = _parts(name)
    folder = os.open(root, FOLDER)
    try:
        for part in above:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            folder = _entered(folder, part)
        yield folder, last
    except ValueError:
        raise OSError(errno.EINVAL, NO_PATH, repr(name)) from None
    except OSError as error:
        what = LINK if error.errno == errno.ELOOP else error.strerror
        raise OSError(error.errno, what, str(root / name)) from None
    finally:
        os.close(folder)


def _entered(folder: int, part: str) -> int:
    """Open a folder in an open folder, and close the latter. For a link the kernel only says that it is no folder."""
    try:
        inner = os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, LINK) from None
        raise
    os.close(folder)
    return inner


def _parts(name: str | PurePosixPath) -> list[str]:
    parts = str(name).split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise OSError(errno.EINVAL, "the name leads out of its folder", str(name))
    return parts


def _content(file: int, path: Path, most_bytes: int) -> bytes:
    """Read an open file and close it. Its size is limited again during the reading, because the file may grow."""
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a file", str(path))
        content = bytearray()
        with open(file, "rb", closefd=False) as opened:  # in blocks: a read allocates its whole limit at once
            while status.st_size <= most_bytes >= len(content) and (block := opened.read(BLOCK_BYTES)):
                content += block
        if max(status.st_size, len(content)) > most_bytes:
            limit = f"{most_bytes >> 20} MiB" if most_bytes >= 2**20 else f"{most_bytes} bytes"
            raise OSError(errno.EFBIG, f"it has more than {limit}", str(path))
        return bytes(content)
    finally:
        os.close(file)


# --- Reads JSON, TOML and YAML from a stranger as plain values. Every fault of a text is a ValueError

MAX_DEPTH = 30  # of nested lists and tables: configs of DeepSpeed have 5
MAX_VALUES = 200_000  # in one text: the longest claims file has 12,000
MAX_CHARACTERS = 100_000  # of one string
MAX_BITS = 1000  # of a whole number: larger ones do not fit a float, and 4,300 digits cannot be printed
ODD = (AttributeError, KeyError, IndexError, TypeError, OverflowError)  # from a tag whose value does not fit
MAX_ALIASES = 10  # of a yaml file: a few aliases can stand for gigabytes
TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"
TOO_MANY = f"it has more than {MAX_VALUES:,} values"
# A word is only tried from its first letter: the time grew with the square of its length.
KEY = r"(?:(?<![\w-])[\w-]++|\"[^\"\n]*+\"|'[^'\n]*+')"
DOTTED = re.compile(rf"{KEY}(?:[ \t]*+\.[ \t]*+{KEY}){{{MAX_DEPTH}}}")  # in a TOML file: a.b.c = 1 means nested tables


def from_json(content: str | bytes, most_values: int = MAX_VALUES) -> Any:
    """Standard JSON, without NaN and infinity."""
    return _limited(lambda text: json.loads(text, parse_constant=_refuse_constant), content, most_values)


def from_toml(content: str | bytes) -> dict:
    def parse(text: str) -> dict:
        if DOTTED.search(text):  # the parser's time grows with the square of the keys
            raise ValueError(TOO_DEEP)
        return tomllib.loads(text)

    return _limited(parse, content)


def from_yaml(content: str | bytes) -> Any:
    import yaml  # not at the top: this module is used before packages are installed

    def parse(text: str) -> Any:
        try:
            depth = aliases = 0
            for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                aliases += isinstance(event, yaml.AliasEvent)
                if depth > MAX_DEPTH:  # not later: the parser's time grows with the square of the depth
                    raise ValueError(TOO_DEEP)
                if aliases > MAX_ALIASES:
                    raise ValueError(f"it uses more than {MAX_ALIASES} yaml aliases")
                if count > MAX_VALUES:
                    raise ValueError(TOO_MANY)
            return yaml.safe_load(text)
        except (yaml.YAMLError, *ODD) as error:
            raise ValueError(getattr(error, "problem", None) or why(error)) from None

    return _limited(parse, content)


def refuse_excess(value: Any, most_values: int = MAX_VALUES) -> None:
    """A ValueError if a value is nested too deeply, or has too many or too long parts. It does not recurse."""
    level = [value]
    depth = 0
    count = 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(TOO_DEEP)
        deeper: list = []
        for each in level:
            if isinstance(each, dict):
                deeper += [*each, *each.values()]
            elif isinstance(each, (list, tuple, set)):
                deeper += each
            else:
                _refuse_odd(each)
        count += len(level)
        if count + len(deeper) > most_values:
            raise ValueError(f"it has more than {most_values:,} values")
        level = deeper
        depth = depth + 1


def _refuse_odd(value: Any) -> None:
    """A ValueError for a string or number that cannot be written again."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError(f"it has a number of more than {MAX_BITS * 3 // 10} digits")
    if isinstance(value, str):
        if len(value) > MAX_CHARACTERS:
            raise ValueError(f"it has a text of {len(value):,} characters; the limit is {MAX_CHARACTERS:,}")
        if not value.isascii():
            value.encode()  # half of a character, as JSON's escapes can write it, is a UnicodeEncodeError


def _limited(parse: Callable[[str], Any], content: str | bytes, most_values: int = MAX_VALUES) -> Any:
    try:
        text = content if isinstance(content, str) else content.decode().removeprefix("\ufeff")
        value = parse(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    refuse_excess(value, most_values)
    return value


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
    """Yield an empty folder to write to. It replaces `out` if the block succeeds; otherwise it is removed."""
    try:
        out = out.resolve()
        refuse_foreign(out)
        old = out.with_name(f".{out.name}.replaced")
        new = out.with_name(f".{out.name}.being-made")
        if not out.exists() and old.exists():  # a build was killed between two renames
            old.rename(out)
        new.mkdir(parents=True, exist_ok=True)
        with _locked(new, out):
            try:
                yield new
                files = {str(path.relative_to(new)): _checksum(path) for path in _contents(new) if path.is_file()}
                (new / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n")
                refuse_foreign(out)  # again: the build took its time
                _remove(old)
                _swap(new, out, old)
            except BaseException:
                shutil.rmtree(new, ignore_errors=True)
                raise
            _remove(old)
    except OSError as error:
        reason = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        raise Stop(f"{out} cannot be written ({reason})", "give another --out") from None


def refuse_foreign(out: Path) -> None:
    """Raise Stop if the folder contains anything that no earlier build has written."""
    if not out.exists():
        return
    if not out.is_dir():
        raise Stop(f"{out} is a file", "give a folder as --out")
    if any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise Stop(f"{out} is not empty and was not made by this command", "give another --out, or remove it yourself")
    if foreign := _foreign(out):
        names = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        what = f"{out} holds files that this command did not write, or that were changed since ({names})"
        raise Stop(what, "move them away, or give another --out")


def _foreign(folder: Path) -> list[str]:
    """Return the files in a folder that differ from its manifest or are not in it. A link is never ours."""
    try:
        known = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    files = [path for path in _contents(folder) if path.is_symlink() or not path.is_dir()]
    names = {str(path.relative_to(folder)): path for path in files}
    return [name for name, path in names.items() if path.is_symlink() or known.get(name) != _checksum(path)]


def _contents(folder: Path) -> list[Path]:
    """Return everything below a folder except its manifest; the content of a folder comes before the folder."""
    return [path for path in sorted(folder.rglob("*"), reverse=True) if path != folder / MANIFEST]


def _checksum(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


@contextlib.contextmanager
def _locked(new: Path, out: Path) -> Iterator[None]:
    """Lock a folder, and remove what a killed build left in it. The kernel unlocks it when this process ends."""
    lock = os.open(new, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(lock), new.stat())  # another build may have put it in its place
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours:
            raise Stop(f"{out} is being written by another process", "wait until it has ended, or give another --out")
        if any(new.iterdir()) and not (new / MANIFEST).is_file():
            raise Stop(f"{new} is in the way and was not made by this command", "move it away")
        for path in new.iterdir():
            if path.name != MANIFEST:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        (new / MANIFEST).write_text('{"files": {}}')  # from now on the folder is known as ours
        yield
    finally:
        os.close(lock)


def _swap(new: Path, out: Path, old: Path) -> None:
    """Replace the old folder by the new one. If that fails, the old one is restored."""
    if out.exists():
        out.rename(old)
    try:
        new.rename(out)
    except BaseException:
        if old.exists():
            old.rename(out)
        raise


def _remove(folder: Path) -> None:
    """Remove a folder with only our files, the manifest last: what a killed removal leaves is still known as ours."""
    if not folder.exists():
        return
    refuse_foreign(folder)
    for path in _contents(folder):
        path.rmdir() if path.is_dir() else path.unlink()
    (folder / MANIFEST).unlink(missing_ok=True)
    folder.rmdir()
