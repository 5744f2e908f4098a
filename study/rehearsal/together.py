"""Whether two ranks of a script call the same collectives. Where they do not, a real rank waits for ever."""

import linecache
from pathlib import Path

from study.rehearsal.request import Answer, Failure


def apart(first: Answer, second: Answer, script: Path) -> Failure | None:
    """Return where rank 0 and rank 1 part. None if they do not, as far as rank 1 could be followed."""
    second_is_cut = second.is_cut or second.failure is not None
    pairs = list(zip(first.collectives, second.collectives, strict=False))
    names_differ = any(mine[0] != other[0] for mine, other in pairs)
    rank_0_lacks = len(first.collectives) < len(second.collectives) and not first.is_cut
    rank_1_lacks = len(second.collectives) < len(first.collectives) and not second_is_cut
    if not (names_differ or rank_0_lacks or rank_1_lacks):
        return None
    place = next((place for place, (mine, other) in enumerate(pairs) if mine != other), len(pairs))
    mine, other = _at(first, place), _at(second, place)
    calls = mine or other or ("", None)  # of the rank that still calls something
    if mine and other:
        what = f"rank 0 calls {mine[0]} there, and rank 1 comes to {other[0]} at {other[1]}"
    else:
        what = f"rank {0 if mine else 1} calls {calls[0]} there, and the other rank has ended"
    code = None
    where = calls[1]
    if where is not None:
        code = linecache.getline(str(script.parent / where.partition(":")[0]), int(where.partition(":")[2])).strip()
    return Failure("hang", what, where, code)


def _at(answer: Answer, place: int) -> tuple[str, str | None] | None:
    return answer.collectives[place] if place < len(answer.collectives) else None
