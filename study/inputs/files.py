"""Files that may come from a stranger: regular, of limited size, and never by way of a link out of their folder.

What cannot be read is an OSError whose `strerror` says why. Below a root each folder is opened by way of the one above
it, and links are refused by the kernel: a file that is replaced meanwhile by a link is refused as well.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from study.inputs.names import safe_name

# NONBLOCK: a pipe is opened and refused, not waited for. NOCTTY: no terminal becomes ours.
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
BLOCK_BYTES = 2**16
LONGEST_REASON = 200
LINK, NO_PATH = "it is a link, and links are not followed", "it is no path"


def below(root: Path, *names: str) -> Path:
    """The path of these names below a folder. Each is one safe name, so that the path cannot leave the folder."""
    return root.joinpath(*map(safe_name, names))


def read(path: Path, most_bytes: int) -> bytes:
    """A file that the user named, or one of a model's folder, where the Hub's cache has links."""
    try:
        file = os.open(path, READ)
    except ValueError:  # a NUL, or half of a character
        raise OSError(errno.EINVAL, NO_PATH, repr(path)) from None
    return _content(file, path, most_bytes)


def read_below(root: Path, name: str | PurePosixPath, most_bytes: int) -> bytes:
    """A file below a folder, by a name from somewhere else. No part of the name may be `..` or a link."""
    with _folder_of(root, name) as (folder, last):
        return _content(os.open(last, READ | os.O_NOFOLLOW, dir_fd=folder), root / name, most_bytes)


def write_below(root: Path, name: str | PurePosixPath, content: bytes, to_disk: bool = True) -> None:
    """Replace a file below a folder in one step. A link on the way is refused, one in its place is replaced.

    `to_disk` waits for the disk, and makes the folder.
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
    """Why something could not be read, for a sentence: short, whatever the text contained."""
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
    """A folder in an open folder, which is closed. The kernel says of a link only that it is no folder."""
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
    """What is in an open file, which is closed. Its size is limited again while it is read: it may grow."""
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a file", str(path))
        content = bytearray()
        with open(file, "rb", closefd=False) as opened:  # in blocks: a read takes the memory that it is allowed at once
            while status.st_size <= most_bytes >= len(content) and (block := opened.read(BLOCK_BYTES)):
                content += block
        if max(status.st_size, len(content)) > most_bytes:
            limit = f"{most_bytes >> 20} MiB" if most_bytes >= 2**20 else f"{most_bytes} bytes"
            raise OSError(errno.EFBIG, f"it has more than {limit}", str(path))
        return bytes(content)
    finally:
        os.close(file)
