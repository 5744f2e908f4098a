"""Findings in PyTorch's memory snapshots: torch.cuda.memory._dump_snapshot, or the same dict as JSON."""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from study.records.hangs import Finding
from study.watcher.findings import finding

MOST_BLOCKS = 2_000_000
MOST_EVENTS = 5_000_000
MOST_FRAMES = 200
LONGEST = 200  # characters of a place in the code
OWNERS = 3  # lines of code that are named
SHARE = 0.1  # of what is total: less gets no finding
ALIKE = 100  # so many equal tensors from one line are worth a look
ALIKE_BYTES = 2**16  # unless they are smaller
PACKAGES = re.compile(r"site-packages|dist-packages|<frozen|/lib/python3|\.cpp$|\?\?")


def look(value: dict) -> Iterator[Finding]:
    every = (block for segment in value["segments"] for block in segment["blocks"])
    blocks = list(itertools.islice(every, MOST_BLOCKS + 1))
    if len(blocks) > MOST_BLOCKS:
        raise ValueError(f"it has more than {MOST_BLOCKS:,} blocks")
    for event in itertools.islice(itertools.chain(*(value.get("device_traces") or [])), MOST_EVENTS):
        if event["action"] == "oom":
            yield finding("failed_allocation", asked_bytes=event["size"], free_bytes=event.get("device_free", 0))
            break
    reserved = sum(segment["total_size"] for segment in value["segments"])
    unused = [block["size"] for block in blocks if block["state"] == "inactive"]
    if reserved and sum(unused) >= SHARE * reserved:
        pieces = {"pieces": len(unused), "largest_bytes": max(unused), "share": sum(unused) / reserved}
        yield finding("fragmented", reserved_bytes=reserved, unused_bytes=sum(unused), **pieces)
    yield from _owners([block for block in blocks if block["state"] != "inactive"])


def _owners(blocks: list[dict]) -> Iterator[Finding]:
    """Yield the lines of code that made the most bytes, and those that made very many equal tensors."""
    by_place: defaultdict[str, list[int]] = defaultdict(list)
    for block in blocks:
        by_place[place_of(_frames(block)) or "a line that was not recorded"].append(
            block.get("requested_size", block["size"])
        )
    total = sum(map(sum, by_place.values()))
    largest = sorted(by_place.items(), key=lambda each: -sum(each[1]))[:OWNERS]
    for place, sizes in largest:
        if total and (sum(sizes) >= SHARE * total or place == largest[0][0]):
            about = {"count": f"{len(sizes):,}", "place": place, "largest_bytes": max(sizes)}
            yield finding("largest_owner", held_bytes=sum(sizes), share=sum(sizes) / total, **about)
    for place, sizes in by_place.items():
        ((usual, count),) = Counter(sizes).most_common(1)
        if count >= ALIKE and usual >= ALIKE_BYTES:
            yield finding("many_alike", count=count, size_bytes=usual, place=place, held_bytes=count * usual)


def _frames(block: dict) -> list[dict]:
    """Return the stack of a block. Older snapshots have it in the block's history."""
    if "frames" in block:
        return block["frames"]
    history = block.get("history") or []
    return history[-1].get("frames", []) if history else []


def place_of(frames: Iterable[dict]) -> str | None:
    """Return the first line of a stack that is not in an installed package; the first of all if there is none."""
    places = []
    for frame in itertools.islice(frames, MOST_FRAMES):
        place = f"{Path(frame['filename']).name}:{frame['line']} in {frame['name']}"[:LONGEST]
        if not PACKAGES.search(frame["filename"]):
            return place
        places.append(place)
    return places[0] if places else None
