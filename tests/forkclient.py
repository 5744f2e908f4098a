"""In the place of `accelerate launch`: asks the fork server for the launch, prints what it prints, and ends as it does.

It imports nothing that takes time. Its words are the server's address, and those of a launch after `-m`.
"""

import json
import os
import socket
import sys
from pathlib import Path

address, _, config, *words = sys.argv[1:]
script = next(place for place, word in enumerate(words) if word.endswith(".py"))
request = {"config": config, "launcher": words[:script], "script": words[script], "flags": words[script + 1 :]}
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(f"\0{address}")
    request |= {"env": dict(os.environ), "output": str(Path("/proc/self/fd/1").readlink())}
    server.send(json.dumps(request).encode())
    answer = json.loads(server.recv(1000))
sys.exit(answer["code"])
