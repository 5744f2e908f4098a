"""Make a text of any size small: its beginning, its end, what is near words of alarm, and a part of the losses.

A log has its versions and its config at the beginning, how it ended at the end, and lines of losses between them.
"""

import codecs
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from study.core import files
from study.core.errors import Stop

MAX_BYTES = 256 * 2**20
BLOCK = 4 * 2**20  # bytes that are read at once
FIRST, LAST = 2**17, 2**18  # characters that are kept whole
BEFORE, AFTER = 2000, 4000  # characters around a word of alarm
MOST_ODD = 0.1  # of the characters of a text
MOST_ALARMS = 12  # of each word the first few: an error that repeats says nothing new
APART = 1_000_000  # characters between lines of losses that are kept
ALARMS = ("Traceback (most", "Error: ", "atchdog", "ut of memory", "Killed", "CANCELLED", "return code =", "OVERFLOW")
COLOR = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


def content(path: Path) -> str:
    """Return what a file says, condensed. Raise Stop if it cannot be read."""
    try:
        whole = files.read(path, MAX_BYTES)
    except OSError as error:
        remedy = f"name a file, or the end of a large one: `tail -c 200M {path}`"
        raise Stop(f"{str(path)!r:.300} cannot be read ({files.why(error)})", remedy) from None
    text = condensed(whole[begin : begin + BLOCK] for begin in range(0, len(whole), BLOCK))
    # A machine that lost power leaves some in a log. Of a picture or a checkpoint a third is no text.
    if text.count("\0") + text.count("\ufffd") > len(text) * MOST_ODD:
        raise Stop(f"{str(path)!r:.300} is no text", "name a log, a config, a list of releases, or the folder of a run")
    return text


def standard_input(command: str = "diagnose") -> str:
    """Return what is piped into a command, condensed."""
    if sys.stdin is None or sys.stdin.isatty():
        remedy = f"name a file, or pipe one in: `python train.py 2>&1 | study {command} -`"
        raise Stop("nothing is piped in", remedy)
    return condensed(_piped())


def _piped() -> Iterator[bytes]:
    left = MAX_BYTES
    while block := sys.stdin.buffer.read(min(BLOCK, left)):
        yield block
        left -= len(block)


def condensed(blocks: Iterable[bytes]) -> str:
    """Return the text of blocks of bytes: whole if it is short, else its parts that may matter, in their order."""
    parts: list[str] = []
    size = 0
    counts = dict.fromkeys(ALARMS, 0)
    held = ""  # the last characters so far
    for text in _decoded(blocks):
        text = text.replace("\r", "\n")  # as tqdm writes
        if size < FIRST:
            room = FIRST - size
            parts.append(text[:room])
            held = text[room:]
        else:
            held += text
        size += len(text)
        if len(held) > 2 * LAST:
            parts.append(_alarming(held[:-LAST], counts))
            held = held[-LAST:]
    return COLOR.sub("", "".join(parts) + held)


def _decoded(blocks: Iterable[bytes]) -> Iterator[str]:
    blocks = iter(blocks)
    first = next(blocks, b"")
    name = "utf-16" if first[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"  # as PowerShell's > writes
    return codecs.iterdecode(itertools.chain([first], blocks), name, "replace")


def _alarming(text: str, counts: dict[str, int]) -> str:
    """Return the surroundings of words of alarm, and some lines of losses. `counts` has how often each word was met."""
    kept: list[tuple[int, int]] = []
    for word in ALARMS:
        place = text.find(word)
        while place >= 0 and counts[word] < MOST_ALARMS:
            counts[word] += 1
            kept.append((place - BEFORE, place + AFTER))
            place = text.find(word, place + AFTER)
    begin = 0
    while (place := text.find("loss", begin)) >= 0:
        kept.append((text.rfind("\n", 0, place), place + 300))
        begin = (place // APART + 1) * APART
    # --- in their order, and no part twice
    parts = []
    end = 0
    for first, last in sorted(kept):
        first = max(first, end, 0)
        if last > first:
            parts.append(f"\n{text[first:last]}")
            end = last
    return "".join(parts) + "\n"
