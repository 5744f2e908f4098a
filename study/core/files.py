"""Reads and writes files that may come from a stranger: regular, of limited size, never through a link out of a folder.

If a file cannot be read, there is an OSError whose `strerror` says why. Below a root, each folder is opened through the
folder above it, and the kernel refuses links. So a file that is replaced by a link in the meantime is refused as well.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from study.core.errors import Stop

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
