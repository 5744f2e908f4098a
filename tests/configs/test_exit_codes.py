"""What a log says of a process's end is one thing, whoever wrote it: a launcher, Python, a shell or a container."""

import pytest

from study.configs.oom.by_text import by_text
from study.configs.pasted.answer import answer

# By signal: the answers that may come, as a launcher that names a SIGTERM first has its own.
SIGNALS = {
    4: ("SIGILL", {"sigill"}),
    6: ("SIGABRT", {"sigabrt"}),
    7: ("SIGBUS", {"memory-elsewhere"}),
    8: ("SIGFPE", {"sigfpe"}),
    9: ("SIGKILL", {"process-killed"}),
    11: ("SIGSEGV", {"segfault"}),
    15: ("SIGTERM", {"sigterm", "sigterm-first"}),
}
WRITTEN = (
    "[ERROR] [launch.py:325:sigkill_handler] ['/usr/bin/python', 'train.py'] exits with return code = -{number}",
    "multiprocessing.api:failed (exitcode: -{number}) local_rank: 0 (pid: 123) of binary: /usr/bin/python",
    "  exitcode  : -{number} (pid: 4711)",
    "  traceback : Signal {number} ({name}) received by PID 4711",
    "subprocess.CalledProcessError: Command '['python', 'train.py']' died with <Signals.{name}: {number}>.",
    "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status {shell}.",
    "Process finished with exit code {shell} (interrupted by signal {number}: {name})",
    "ProcessExitedException: process 0 terminated with signal {name}",
    "exit code -{number}",
    "exit code {shell}",
    "Exit Code: {shell}",
    "return code = {shell}",
    "the container ended with exit status {shell}",
    '"exitCode": {shell},',
)
ONES = {
    "exits with return code = 1": "child-failed",
    "Process finished with exit code 1": "child-failed",
    "exit code 1": "child-failed",
    "exit code: 120": "flush-at-exit",
    "returned non-zero exit status 120.": "flush-at-exit",
}


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_known_however_it_is_written(number):
    name, ids = SIGNALS[number]
    for form in WRITTEN:
        text = form.format(number=number, shell=128 + number, name=name)
        told = answer(text, by_text=by_text)
        assert told.id in ids, text
        assert told.found[0].remedy


@pytest.mark.parametrize(("text", "id"), ONES.items())
def test_an_exit_code_is_known(text, id):
    assert answer(text, by_text=by_text).id == id


@pytest.mark.parametrize("text", ["exit code 0", "exit code -40", "exit code 1370", "exit status 13", "exit code 90"])
def test_other_numbers_are_no_signals(text):
    assert not answer(text, by_text=by_text).found
