"""A small process beside each rank, which outlives it and records that it died.

A rank that is killed or crashes in native code cannot write anything itself, and signal handlers would change how the
script reacts to signals. This process imports nothing until it is needed.
"""

import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path

ALL_WELL = b"."


def start(folder: Path, rank: int) -> subprocess.Popen:
    """Start the process beside this rank. It ends with the rank, or when it is dismissed."""
    command = [sys.executable, __file__, str(folder), str(rank), str(os.getpid())]
    null = subprocess.DEVNULL
    # A session of its own: Ctrl-C and a launcher that ends its group do not reach it.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True)


def dismiss(witness: subprocess.Popen) -> None:
    """End the process, because the record is complete."""
    with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
        witness.communicate(ALL_WELL, timeout=5)


def main(folder: Path, rank: int, watched: int) -> None:
    """Wait for the end of a rank, and record it unless that is dismissal.

    A closed pipe is not enough: processes that the rank has forked, such as those of a loader, keep it open.
    """
    while os.getppid() == watched:
        if select.select([0], [], [], 1)[0]:
            if os.read(0, 1) == ALL_WELL:
                return
            break
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from study.core.errors import Stop
    from study.records import store

    what = "the process ended without a message: it was killed, crashed in native code, or called os._exit"
    remedy = "look for a signal in the launcher's output, and for the kernel's out-of-memory killer in its log"
    store.end_badly(folder, Stop(what, remedy, "interrupted", f"rank {rank}"), "Died")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
