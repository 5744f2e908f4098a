"""Keeps the records of a sweep as one archive, in its folder and in a folder or bucket elsewhere, and brings it back.

Records leave this machine without private information. A copy that cannot be written ends nothing: the reason is said,
and the next cell tries again. The archive is made in memory, so that a full disk does not keep it from a bucket.
"""

import contextlib
import io
import json
import tarfile
import threading
import zlib
from pathlib import Path
from typing import Any

from study.core import files
from study.core.errors import Stop
from study.core.files import why
from study.records import store
from study.records.keeping import redact, shared
from study.sweeps import outcomes

NAME = "records.tar.gz"
UPLOAD = "STUDY_UPLOAD"  # the environment variable that names where the archive goes
MACHINE = "machine.json"  # what `study calibrate` wrote
MAX_BYTES = 2**28  # of an archive: a record has 13 kB
UPLOAD_S = 60  # a bucket that does not answer would hold the next cell


def records(runs: Path) -> dict[str, bytes]:
    """Return the records of runs that have ended, by their paths in an archive, without private information."""
    members = {}
    for folder in store.run_folders(runs):
        record = outcomes.read(folder)
        if record and record.status != "running":
            text = shared(record).model_dump_json(by_alias=True, indent=1)
            members[f"runs/{folder.name}/{store.RECORD}"] = text.encode()
    return members


def packed(runs: Path, beside: dict[str, bytes]) -> bytes:
    """Return the archive of a folder: its records, the JSON of its machine and scripts, its predictions, and more."""
    members = records(runs)
    for path in sorted(runs.glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            members[path.name] = json.dumps(redact(files.from_json(path.read_bytes())), indent=1).encode()
    members |= {path.name: path.read_bytes() for path in sorted(runs.glob("*.csv"))}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in sorted((members | beside).items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def keep(runs: Path, upload: str | None, beside: dict[str, bytes]) -> list[str]:
    """Write the archive into the folder of runs and to `upload`. Return a sentence for each that did not work."""
    content = packed(runs, beside)
    problems = []
    try:
        files.write_below(runs, NAME, content)
    except OSError as error:
        problems.append(f"{runs / NAME} cannot be written ({why(error)})")
    if upload:
        try:
            _put(upload, content)
        except Exception as error:  # whatever a bucket's library raises: the records are here, and the sweep goes on
            problems.append(f"the archive did not reach {redact(upload)} ({redact(why(error))}); it is tried again")
    return problems


def _put(upload: str, content: bytes) -> None:
    """Write to a folder, or to a bucket within a time limit."""
    if "://" not in upload:
        return files.write_below(Path(upload), NAME, content)
    failed: list[Exception] = []

    def put() -> None:
        try:
            with _opened(upload, "wb") as file:
                file.write(content)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=put, daemon=True)  # one that never returns does not keep the program
    thread.start()
    thread.join(UPLOAD_S)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {UPLOAD_S} s")
    if failed:
        raise failed[0]


def _opened(upload: str, mode: str) -> Any:
    """Open the archive in a bucket. Raise Stop if a package for it is missing."""
    try:
        import fsspec

        return fsspec.open(f"{upload.rstrip('/')}/{NAME}", mode)
    except (ImportError, ValueError) as error:  # also of the package for this kind of bucket, which fsspec names
        kind = upload.partition("://")[0]
        package = {"hf": "huggingface_hub", "s3": "s3fs", "gs": "gcsfs"}.get(kind, "and its package for that kind")
        remedy = f"pip install fsspec {package}, or give a folder"
        raise Stop(f"{kind}:// cannot be used ({why(error)})", remedy) from None


def bring_back(runs: Path, upload: str | None) -> int:
    """Unpack the records of an earlier machine that are not here. Return their number."""
    if not upload:
        return 0
    before = len(store.run_folders(runs))
    try:
        if "://" in upload:
            with _opened(upload, "rb") as file:
                content = file.read(MAX_BYTES)
        else:
            content = files.read_below(Path(upload), NAME, MAX_BYTES)
    except FileNotFoundError:  # the first start
        return 0
    except Stop:
        raise
    except Exception as error:  # whatever a bucket's library raises
        remedy = f"give a folder or a bucket that you may read and write, or leave {UPLOAD} empty"
        raise Stop(f"{redact(upload)} cannot be read ({redact(why(error))})", remedy) from None
    try:
        _unpack(content, runs)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise Stop(f"{NAME} in {redact(upload)} is damaged ({why(error)})", "remove it, and start again") from None
    return len(store.run_folders(runs)) - before


def _unpack(content: bytes, runs: Path) -> None:
    """Write the files that an archive of ours has, and nothing else, below a folder, unless they are there."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            *above, last = Path(member.name).parts
            file = archive.extractfile(member) if member.isfile() else None
            if file and len(above) == 2 and above[0] == "runs" and last == store.RECORD:
                folder = files.safe_join(runs, above[1])
            elif file and not above and last.endswith((".json", ".csv")):
                folder = runs
            else:
                continue
            if not (folder / last).exists():
                files.write_below(folder, last, file.read())
