"""A session of tests ends for whoever started it, also for a program that reads what it prints to the end."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.conftest import ROOT

TINY = """
from tests.conftest import fork_server
def test_tiny():
    fork_server()
"""
WITHIN_S = 180  # the server looks for its session only once it has imported everything: 15 s with ten others at work


def servers_of(session: int) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if [str(ROOT / "tests/forkserver.py"), str(session)] == (process.info["cmdline"] or [])[1::2]
    ]


def test_the_server_holds_no_stream_of_its_session_and_ends_with_it(tmp_path):
    """The session stays a zombie, as where `subprocess.run(capture_output=True)` reads to the end before it waits."""
    (tmp_path / "test_tiny.py").write_text(TINY)
    # -s: otherwise what a test starts writes into the file that pytest captures in. A worker starts it before that.
    words = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of a worker
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True) as session:
        try:
            until_s = time.monotonic() + WITHIN_S
            while psutil.Process(session.pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < until_s:
                time.sleep(0.1)
            (server,) = servers_of(session.pid)
            streams = {str(Path(f"/proc/{server.pid}/fd/{number}").readlink()) for number in (0, 1, 2)}
            assert not [stream for stream in streams if stream.startswith("pipe:")]
            assert psutil.wait_procs([server], timeout=WITHIN_S)[1] == []
        finally:
            for process in servers_of(session.pid):
                process.kill()
        assert "1 passed" in session.communicate(timeout=10)[0]
