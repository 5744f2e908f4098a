"""What is read of the machine that runs this."""

import os
import subprocess
import sys

from study.core import machine


def test_a_process_that_has_ended_and_waits_for_its_parent_is_not_alive():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert machine.is_alive(process.pid)
    assert process.stdin
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert not machine.is_alive(process.pid)
    process.wait()
    assert not machine.is_alive(process.pid)
