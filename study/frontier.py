"""How far an arm goes: the largest value of a setting that survives, found by bracketing with real runs."""

from collections.abc import Callable

from study.protocol import Cell

ANSWERS = {"done": True, "oom": False, "host_oom": False}  # any other status tells nothing of memory


def bracket(survives: Callable[[int], bool | None], count: int) -> tuple[int, int]:
    """The last of `count` rungs that survives and the first that does not: -1 or `count` where there is none.

    Goes up by doubling and then halves what is between, until the two are an eighth apart. What needs more memory on a
    higher rung than on a lower one is taken for granted. None for an answer (it was neither) ends the search.
    """
    good, bad = -1, count
    while bad - good > max(1, (good + 1) // 8):
        rung = min(2 * good + 1, count - 1) if bad == count else (good + bad) // 2
        rung = max(rung, good + 1)
        answer = survives(rung)
        if answer is None:
            break
        good, bad = (rung, bad) if answer else (good, rung)
    return good, bad


def search(cell: Cell, attempt: Callable[[Cell], dict]) -> tuple[list[dict], str]:
    """Every record that the search for a cell's frontier made, and what it found, in words."""
    made = []

    def survives(rung: int) -> bool | None:
        made.append(attempt(cell.at(rung)))
        if made[-1]["status"] == "unavailable" and any(one["status"] == "done" for one in made):
            return False  # the machine has what it takes for a smaller one: what it lacks is room
        return ANSWERS.get(made[-1]["status"])

    good, bad = bracket(survives, len(cell.rungs))
    found = [f"{cell.rungs[good]} survives" if good >= 0 else "none survives"]
    if bad < len(cell.rungs):
        found.append(f"{cell.rungs[bad]} does not")
    elif made[-1]["status"] not in ANSWERS:
        found.append(f"the search ended at a run that is {made[-1]['status']}")
    else:
        found.append("which is the last to try")
    return made, f"{cell.part} {cell.arm}, {cell.frontier}: {', '.join(found)}"
