"""The launch commands in a text: which script each starts, and the flags of its launcher and of the script."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.configs.settings import AUTO
from study.configs.sources import plain

COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#.*$")  # what stands before it keeps its line
ASSIGNED = re.compile(r"(?m)^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;\"']*)")
# What stands before it is the launcher's.
SCRIPT = re.compile(r"(?<!\S)[\"']?([\w./${}-]+\.py|llamafactory-cli train|swift \w+)[\"']?(?=\s|$)")
FLAG = re.compile(r"(?<!\S)--([\w-]+)(?:(?:=|[ \t]+(?!--?[A-Za-z]))(\"[^\"\n]*\"|'[^'\n]*'|[^\s;|&]+))?")


@dataclass(frozen=True)
class Command:
    """A launch command, on one line, with what its variables hold."""

    line: str
    script: str  # its file
    launcher: Mapping[str, Any]  # flags before it
    flags: Mapping[str, Any]  # and behind it
    places: Mapping[str, str]


def commands_in(name: str, text: str) -> Iterator[Command]:
    """Yield the commands of a shell script, or the one that was given as words."""
    if name.endswith((".py", ".json", ".yaml", ".yml")):
        return
    bare = COMMENT.sub("", text)
    one_line = bare.replace("\\\n", " ")
    assigned = ASSIGNED.findall(one_line)
    names = [each for each, _ in assigned]
    variables = {each: " ".join(value.strip("\"'").split()) for each, value in assigned if names.count(each) == 1}
    for line in re.split(r"\n|;|&&|\|", ASSIGNED.sub("", one_line)):
        for _ in range(3):  # a variable may hold others
            line = re.sub(r"\$\{?(\w+)\b\}?", lambda match: variables.get(match[1], match[0]), line)
        if script := SCRIPT.search(line):
            places = {}
            for flag, _ in FLAG.findall(line, script.end()):
                begin = max(0, bare.find(f"--{flag}"))
                number = bare.count("\n", 0, begin) + 1
                places[flag.replace("-", "_")] = f"{name}:{number}" if "\n" in bare.strip() else name
            yield Command(
                line, Path(script[1]).name, _flags(line[: script.start()]), _flags(line[script.end() :]), places
            )


def _flags(line: str) -> dict[str, Any]:
    values = {name.replace("-", "_"): value.strip("\"'") or "true" for name, value in FLAG.findall(line)}
    return {name: AUTO if "$" in value else plain(value) for name, value in values.items()}
