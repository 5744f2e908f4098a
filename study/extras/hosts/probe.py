"""`study doctor --cluster` runs this on each host: it answers requests, one line of JSON each, until its input ends.

python -m study.extras.hosts.probe
"""

import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from study.errors import Stop
from study.machine import linux, software
from study.machine.gpus import gpus_here

ANSWER = "study-probe "  # begins each answer, because a login may print other lines
BLOCK = bytes(2**20)
CONNECTS_WITHIN_S = 5


def describe(folder: str) -> dict:
    """The description of this host that the doctor compares."""
    try:
        gpus = [gpu.name for gpu in gpus_here()]
    except Stop as stop:
        gpus = [stop.what]
    path = Path(os.path.expandvars(folder)).absolute()
    existing = next(each for each in (path, *path.parents) if each.exists())
    return {
        "software": software.versions(),
        "gpus": gpus,
        "cpu": linux.fields("/proc/cpuinfo").get("model name"),
        "cores": linux.usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "free_bytes": shutil.disk_usage(existing).free,
    }


def listen() -> int:
    """Count the bytes that one connection sends, and reply with the number. Returns the port."""
    server = socket.create_server(("", 0))

    def receive() -> None:
        with server, server.accept()[0] as connection:
            total = 0
            while count := len(connection.recv(2**20)):
                total += count
            connection.sendall(str(total).encode())

    threading.Thread(target=receive, daemon=True).start()
    return server.getsockname()[1]


def send(address: str, port: int, seconds: float) -> float:
    """Bytes per second over TCP to another host, from the first byte to its reply that it has all of them."""
    with socket.create_connection((address, port), timeout=CONNECTS_WITHIN_S) as connection:
        connection.settimeout(10 * seconds + CONNECTS_WITHIN_S)
        started = time.perf_counter()
        total = 0
        while time.perf_counter() < started + seconds:
            connection.sendall(BLOCK)
            total += len(BLOCK)
        connection.shutdown(socket.SHUT_WR)
        arrived = int(connection.recv(64))
        if arrived != total:
            raise OSError(f"{total - arrived} of {total} bytes were lost")
        return total / (time.perf_counter() - started)


REQUESTS: dict[str, Callable[..., object]] = {"describe": describe, "time": time.time, "listen": listen, "send": send}


def main() -> None:
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"value": REQUESTS[name](*arguments)}
        except OSError as error:
            answer = {"error": error.strerror or str(error)}
        sys.stdout.write(f"{ANSWER}{json.dumps(answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
