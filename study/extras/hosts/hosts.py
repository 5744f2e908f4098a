"""Compares several hosts before a run on all of them: versions, clocks, GPUs, disks, and the links between pairs.

Each host runs `study/extras/hosts/probe.py`, started through ssh or another command.
"""

import contextlib
import json
import select
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from study.errors import Stop
from study.extras.hosts.probe import ANSWER
from study.io.numbers import size

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 {host}"
ANSWERS_WITHIN_S = 60
CLOCK_TRIES, MOST_CLOCK_S = 5, 1.0
LINK_S = 0.5  # how long each link is measured, in each direction
SLOW_LINK = 0.5  # of the median link
LOW_DISK_BYTES = 10e9
COMPARED = ("python", "torch", "deepspeed", "accelerate", "transformers")


class Unreachable(Exception):
    """A host that does not answer, with the reason."""


@dataclass
class Host:
    """A host: its name for ssh, and its address for the other hosts."""

    name: str
    address: str
    seen: dict = field(default_factory=dict)  # the description by its probe
    clock_s: float | None = None  # ahead of this machine
    clock_error_s: float | None = None
    process: subprocess.Popen | None = None
    errors: IO[bytes] | None = None  # the output on stderr

    def ask(self, *request) -> object:
        """Send a request to the host's probe, and wait for the answer."""
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise Unreachable(self._last_words()) from None
        deadline = time.monotonic() + ANSWERS_WITHIN_S
        for line in self._lines(deadline):
            if line.startswith(ANSWER):
                answer = json.loads(line.removeprefix(ANSWER))
                if "error" in answer:
                    raise OSError(answer["error"])
                return answer["value"]
        raise Unreachable(self._last_words())

    def _lines(self, deadline: float) -> Iterator[str]:
        while select.select([self.process.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
            if not (line := self.process.stdout.readline()):
                return
            yield line.decode(errors="replace")

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(1)
            self.errors.seek(0)
            lines = [line.strip() for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]
            return lines[-1] if lines else f"exit code {code} without a message"
        return f"no answer within {ANSWERS_WITHIN_S} s"

    @contextlib.contextmanager
    def reached(self, reach: str, python: str) -> Iterator[None]:
        """Run the host's probe for a while."""
        command = [part.replace("{host}", self.name) for part in shlex.split(reach)]
        with tempfile.TemporaryFile() as self.errors:
            try:
                self.process = subprocess.Popen(
                    [*command, python, "-m", "study.extras.hosts.probe"],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self.errors,
                )
            except OSError as error:
                raise Stop(f"{command[0]} cannot be started ({error.strerror})", "give another --reach") from None
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    self.process.stdin.close()  # the probe ends with its input
                try:
                    self.process.wait(5)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    self.process.wait()
                self.process.stdout.close()


@dataclass
class Comparison:
    """The descriptions of all hosts, and a sentence for each problem."""

    hosts: list[Host]
    links: dict[tuple[str, str], float | None]  # bytes per second; None: no connection
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
    problems, links = [], {}
    with contextlib.ExitStack() as stack:
        for host in hosts:
            stack.enter_context(host.reached(reach, python))
        for host in hosts:
            try:
                host.seen = host.ask("describe", str(folder))
                host.clock_s, host.clock_error_s = clock(host)
            except (Unreachable, OSError) as error:
                problems.append(f"{host.name} cannot be used: {error}.")
        answering = [host for host in hosts if host.clock_s is not None]
        for pairs in rounds(answering):
            with ThreadPoolExecutor(len(pairs)) as pool:  # no host is in two pairs of a round
                links |= dict(zip(_names(pairs), pool.map(lambda pair: link(*pair), pairs), strict=True))
    return Comparison(hosts, links, problems + differences(answering) + slow_links(links))


def clock(host: Host) -> tuple[float, float]:
    """How many seconds a host's clock is ahead of ours, and the error: half the time of the quickest answer."""
    tries = []
    for _ in range(CLOCK_TRIES):
        before_s = time.time()
        host_s, after_s = host.ask("time"), time.time()
        tries.append(((after_s - before_s) / 2, host_s - (before_s + after_s) / 2))
    error, ahead = min(tries)
    return ahead, error


def link(sender: Host, receiver: Host) -> float | None:
    """Bytes per second from one host to another; None if they cannot connect."""
    try:
        return sender.ask("send", receiver.address, receiver.ask("listen"), LINK_S)
    except (OSError, Unreachable):
        return None


def rounds(hosts: list[Host]) -> list[list[tuple[Host, Host]]]:
    """All pairs in both directions, in rounds in which each host has one partner (a round-robin)."""
    players: list[Host | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    turns = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = [(a, b) for a, b in zip(players[:half], reversed(players[half:]), strict=True) if a and b]
        turns += [pairs, [(b, a) for a, b in pairs]] if pairs else []
        players = [players[0], players[-1], *players[1:-1]]
    return turns


def _names(pairs: list[tuple[Host, Host]]) -> list[tuple[str, str]]:
    return [(sender.name, receiver.name) for sender, receiver in pairs]


# --- what is wrong ----------------------------------------------------------------------------------------------------


def differences(hosts: list[Host]) -> list[str]:
    """A sentence for each difference between hosts that would break a run or its timings."""
    problems = []
    for package in COMPARED:
        problems += _unlike(hosts, package, lambda host, name=package: host.seen["software"][name] or "not installed")
    problems += _unlike(hosts, "the list of GPUs", lambda host: ", ".join(host.seen["gpus"]) or "empty")
    if unlike := _unlike(hosts, "the processor", lambda host: host.seen["cpu"] or "unknown"):
        problems.append(f"{unlike[0]} Operators are compiled for one of them: give node_dir, or TORCH_EXTENSIONS_DIR.")
    reference = statistics.median_low([host.clock_s for host in hosts] or [0.0])
    for host in hosts:
        ahead = host.clock_s - reference
        if abs(ahead) > MOST_CLOCK_S + host.clock_error_s:
            side = "ahead of" if ahead > 0 else "behind"
            problems.append(f"The clock of {host.name} is {abs(ahead):.1f} s {side} the others: start NTP there.")
        if host.seen["free_bytes"] < LOW_DISK_BYTES:
            problems.append(
                f"{host.name} has only {size(host.seen['free_bytes'])} free: make room, or name another disk."
            )
    return problems


def _unlike(hosts: list[Host], what: str, value) -> list[str]:
    by_value: dict[str, list[str]] = {}
    for host in hosts:
        by_value.setdefault(value(host), []).append(host.name)
    if len(by_value) < 2:
        return []
    parts = [f"{value} on {', '.join(names)}" for value, names in by_value.items()]
    return [f"{what[0].upper()}{what[1:]} differs: {'; '.join(parts)}."]


def slow_links(links: dict[tuple[str, str], float | None]) -> list[str]:
    """A sentence for each link that is missing, or slower than half the median."""
    problems = []
    median = statistics.median([speed for speed in links.values() if speed is not None] or [0])
    for (sender, receiver), speed in links.items():
        if speed is None:
            problems.append(f"{sender} cannot connect to {receiver}: open the ports between them, or give its address.")
        elif speed < SLOW_LINK * median:
            problems.append(f"{sender} sends only {size(speed)}/s to {receiver}; the median link has {size(median)}/s.")
    return problems


def rows(comparison: Comparison) -> list[dict]:
    """A row for each host, as `study doctor` shows it."""
    rows = []
    for host in comparison.hosts:
        if host.clock_s is None:
            rows.append({"host": host.name, "clock": "does not answer"})
            continue
        sent = [speed for (sender, _), speed in comparison.links.items() if sender == host.name and speed]
        seen = host.seen
        rows.append(
            {"host": host.name, "clock": f"{host.clock_s:+.3f} s (within {host.clock_error_s * 1000:.0f} ms)"}
            | {package: seen["software"][package] for package in COMPARED}
            | {
                "GPUs": f"{len(seen['gpus'])} x {seen['gpus'][0]}" if seen["gpus"] else "none",
                "cores": seen["cores"],
                "memory": size(seen["memory_bytes"]),
                "free disk": size(seen["free_bytes"]),
                "slowest link": f"{size(min(sent))}/s" if sent else None,
            }
        )
    return rows
