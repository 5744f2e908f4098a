"""Compares several hosts before a run on all of them: versions, clocks, GPUs, disks, and the links between pairs.

Each host runs `study/extras/hosts/probe.py`, started through ssh or another command.
"""

import contextlib
import itertools
import json
import select
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from study.errors import Stop
from study.extras.hosts.probe import ANSWER
from study.io.numbers import size

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 {host}"
ANSWERS_WITHIN_S = 60
CLOCK_TRIES = 5
MOST_CLOCK_S = 1.0
LINK_S = 0.5  # how long each link is measured, in each direction
SLOW_LINK = 0.5  # of the median link
LOW_DISK_BYTES = 10e9
COMPARED = ("python", "torch", "deepspeed", "accelerate", "transformers")


class Unreachable(Exception):
    """A host that does not answer, with the reason."""


Links = dict[tuple[str, str], float | None]  # bytes per second from one to the other; None: no connection


@dataclass(frozen=True)
class Clock:
    """The seconds by which a host's clock is ahead of this machine's, and the error of that."""

    ahead_s: float
    error_s: float


@dataclass
class Host:
    """A host: its name for ssh, its address for the other hosts, and what its probe has answered."""

    name: str
    address: str
    seen: dict = field(default_factory=dict)  # the description by its probe
    clock: Clock | None = None  # None: it does not answer


@dataclass(frozen=True)
class Probe:
    """The program `probe.py` on a host."""

    input: IO[bytes]
    output: IO[bytes]
    errors: IO[bytes]
    process: subprocess.Popen[bytes]

    def ask(self, *request: object) -> Any:
        """Send a request to the host's probe, and wait for the answer."""
        try:
            self.input.write(json.dumps(request).encode() + b"\n")
            self.input.flush()
        except OSError:
            raise Unreachable(self._last_words()) from None
        for line in self._lines(time.monotonic() + ANSWERS_WITHIN_S):
            if line.startswith(ANSWER):
                answer = json.loads(line.removeprefix(ANSWER))
                if "error" in answer:
                    raise OSError(answer["error"])
                return answer["value"]
        raise Unreachable(self._last_words())

    def _lines(self, deadline: float) -> Iterator[str]:
        while select.select([self.output], [], [], max(0, deadline - time.monotonic()))[0]:
            if not (line := self.output.readline()):
                return
            yield line.decode(errors="replace")

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(1)
            self.errors.seek(0)
            lines = self.errors.read().decode(errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}, no message")
        return f"no answer within {ANSWERS_WITHIN_S} s"


@contextlib.contextmanager
def probing(host: Host, reach: str, python: str) -> Iterator[Probe]:
    """Run the host's probe for a while."""
    command = [part.replace("{host}", host.name) for part in shlex.split(reach)]
    words = [*command, python, "-m", "study.extras.hosts.probe"]
    pipe = subprocess.PIPE
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(words, bufsize=0, stdin=pipe, stdout=pipe, stderr=errors)
        except OSError as error:
            raise Stop(f"{command[0]} cannot be started ({error.strerror})", "give another --reach") from None
        assert process.stdin
        assert process.stdout
        try:
            yield Probe(process.stdin, process.stdout, errors, process)
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()  # the probe ends with its input
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()  # nothing to do if it has ended
            process.wait()
            process.stdout.close()


@dataclass
class Comparison:
    """The descriptions of all hosts, and a sentence for each problem."""

    hosts: list[Host]
    links: Links
    problems: list[str]


def read(path: Path) -> list[Host]:
    """The hosts in a file: a name on each line, followed by its address if the other hosts need another name."""
    try:
        lines = [line.partition("#")[0].split() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        what = f"{path} cannot be read ({getattr(error, 'strerror', None) or error})"
        raise Stop(what, "give a file with a host on each line") from None
    words = [line for line in lines if line]
    # A second word with '=' is DeepSpeed's and MPI's `slots=8`.
    hosts = [Host(name, rest[0] if rest and "=" not in rest[0] else name.partition("@")[2] or name)
             for name, *rest in words]  # fmt: skip
    names = [host.name for host in hosts]
    if twice := {name for name in names if names.count(name) > 1}:
        raise Stop(f"{path} names {', '.join(sorted(twice))} twice", "name each host once")
    if not hosts:
        raise Stop(f"{path} names no host", "give a host on each line")
    return hosts


def compare(hosts: list[Host], folder: Path, reach: str = SSH, python: str = sys.executable) -> Comparison:
    """Describe all hosts, and measure the links between those that answer."""
    problems = []
    links: Links = {}
    with contextlib.ExitStack() as stack:
        probes = {host.name: stack.enter_context(probing(host, reach, python)) for host in hosts}
        for host in hosts:
            try:
                host.seen = probes[host.name].ask("describe", str(folder))
                host.clock = clock(probes[host.name])
            except (Unreachable, OSError) as error:
                problems.append(f"{host.name} cannot be used: {error}.")
        answering = [host for host in hosts if host.clock]
        for sender, receiver in itertools.permutations(answering, 2):
            speed = link(probes[sender.name], probes[receiver.name], receiver.address)
            links[sender.name, receiver.name] = speed
    return Comparison(hosts, links, problems + differences(answering) + slow_links(links))


def clock(probe: Probe) -> Clock:
    """Read a host's clock. The error is half the time of the quickest answer."""
    tries = []
    for _ in range(CLOCK_TRIES):
        before_s = time.time()
        host_s = probe.ask("time")
        after_s = time.time()
        tries.append(((after_s - before_s) / 2, host_s - (before_s + after_s) / 2))
    error_s, ahead_s = min(tries)
    return Clock(ahead_s, error_s)


def link(sender: Probe, receiver: Probe, address: str) -> float | None:
    """Return the bytes per second from one host to another; None if they cannot connect."""
    try:
        return sender.ask("send", address, receiver.ask("listen"), LINK_S)
    except (OSError, Unreachable):
        return None


# --- what is wrong ----------------------------------------------------------------------------------------------------


def differences(hosts: list[Host]) -> list[str]:
    """A sentence for each difference between hosts that would break a run or its timings."""
    problems = []
    for package in COMPARED:
        problems += _unlike(hosts, package, lambda host, name=package: host.seen["software"][name] or "not installed")
    problems += _unlike(hosts, "the list of GPUs", lambda host: ", ".join(host.seen["gpus"]) or "empty")
    if unlike := _unlike(hosts, "the processor", lambda host: host.seen["cpu"] or "unknown"):
        problems.append(f"{unlike[0]} Operators are compiled for one of them: give node_dir, or TORCH_EXTENSIONS_DIR.")
    clocks = {host.name: host.clock for host in hosts if host.clock}
    reference_s = statistics.median_low([clock.ahead_s for clock in clocks.values()] or [0.0])
    for name, clock in clocks.items():
        ahead_s = clock.ahead_s - reference_s
        if abs(ahead_s) > MOST_CLOCK_S + clock.error_s:
            side = "ahead of" if ahead_s > 0 else "behind"
            problems.append(f"The clock of {name} is {abs(ahead_s):.1f} s {side} the others: start NTP there.")
    for host in hosts:
        free_bytes = host.seen["free_bytes"]
        if free_bytes < LOW_DISK_BYTES:
            problems.append(f"{host.name} has only {size(free_bytes)} free: make room, or name another disk.")
    return problems


def _unlike(hosts: list[Host], what: str, value) -> list[str]:
    by_value: dict[str, list[str]] = {}
    for host in hosts:
        by_value.setdefault(value(host), []).append(host.name)
    if len(by_value) < 2:
        return []
    parts = [f"{value} on {', '.join(names)}" for value, names in by_value.items()]
    return [f"{what[0].upper()}{what[1:]} differs: {'; '.join(parts)}."]


def slow_links(links: Links) -> list[str]:
    """A sentence for each link that is missing, or slower than half the median."""
    problems = []
    median = statistics.median([speed for speed in links.values() if speed is not None] or [0])
    for (sender, receiver), speed in links.items():
        if speed is None:
            problems.append(f"{sender} cannot connect to {receiver}: open the ports between them, or give its address.")
        elif speed < SLOW_LINK * median:
            problems.append(f"{sender} sends only {size(speed)}/s to {receiver}; the median link has {size(median)}/s.")
    return problems


def rows(comparison: Comparison) -> list[dict[str, object]]:
    """Return a row for each host, as `study doctor` shows it."""
    return [_row(host, comparison.links) for host in comparison.hosts]


def _row(host: Host, links: Links) -> dict[str, object]:
    if host.clock is None:
        return {"host": host.name, "clock": "does not answer"}
    seen = host.seen
    sent = [speed for (sender, _), speed in links.items() if sender == host.name and speed]
    return {
        "host": host.name,
        "clock": f"{host.clock.ahead_s:+.3f} s (within {host.clock.error_s * 1000:.0f} ms)",
        **{package: seen["software"][package] for package in COMPARED},
        "GPUs": f"{len(seen['gpus'])} x {seen['gpus'][0]}" if seen["gpus"] else "none",
        "cores": seen["cores"],
        "memory": size(seen["memory_bytes"]),
        "free disk": size(seen["free_bytes"]),
        "slowest link": f"{size(min(sent))}/s" if sent else None,
    }
