"""What is asked of the person who gave a text: what would make the answer surer, or give one."""

from study.configs.pasted import matching, memory, own_loops, resumed
from study.configs.pasted.lines import MANY
from study.configs.pasted.one_rank import OF_SCRIPTS
from study.configs.pasted.ranking import DUMPED, FULL
from study.configs.pasted.read import Pasted
from study.configs.pasted.said import numbers
from study.configs.pasted.tracebacks import Seen

RELEASES = "the releases"
WHICH_RELEASES = "Which releases? Give the output of `pip freeze` as well"
LAST_LINE = "What does the last line of the traceback say? Paste the rest of it"
RESUMED = "What do three lines of the log before the resume say, and three after it? Paste them"
ASKED = {"stage": "the stage of ZeRO or FSDP", "passes": "gradient accumulation", "ranks": "the number of GPUs"}


def not_said(pasted: Pasted, possible: list[matching.Match]) -> tuple[str, ...]:
    """Return what faults that may apply depend on, and the text does not say."""
    wanted = set().union(*(each.applies.unknown for each in possible)) - {*pasted.said}
    conditions = {} if pasted.is_of_another_framework else ASKED
    unsaid = [what for condition, what in conditions.items() if condition in wanted]
    return tuple(unsaid if pasted.is_released else [*unsaid, RELEASES])


def to_be_surer(found: list[Seen], asks_releases: bool, seen: set[str]) -> list[str]:
    """Return what to ask where something was found."""
    first = found[0]
    asked = matching.asks(seen) if first.id == memory.FULL else []
    if first.follows:  # as all others then
        asked.append("What is the first Traceback of any rank? Paste the lines above")
    # An error that explains itself is the same in all releases, as is a line of a script.
    of_script = (*OF_SCRIPTS, *own_loops.MAKES)
    if asks_releases and first.sure != "sure" and first.id not in (*FULL, *DUMPED, *of_script, "process-killed"):
        asked.append(WHICH_RELEASES)
    return asked


def to_know(pasted: Pasted, unsaid: tuple[str, ...], asks_releases: bool, seen: set[str]) -> list[str]:
    """Return what to ask where nothing was found: what is seen, releases, then what faults in question ask."""
    if pasted.is_strange:
        return []
    asked = [LAST_LINE] if pasted.is_cut else [RESUMED] if resumed.is_cut(pasted.log) else []
    asked += matching.asks(seen - {"loss"} if len(pasted.log.lines) >= MANY else seen)
    if asks_releases:
        asked.append(WHICH_RELEASES)
    several = {what: numbers(condition, pasted.text) for condition, what in ASKED.items() if what in unsaid}
    for what, values in several.items():
        if len(values) > 1:
            asked.append(f"Which counts? You gave several values of {what}: {', '.join(map(str, sorted(values)))}")
    if missing := [what for what, values in several.items() if len(values) <= 1]:
        asked.append(f"Paste the config or the launch command: nothing here says {', '.join(missing)}")
    if not pasted.written.strip():
        asked.append('What was seen? Say it with --symptom "..."')
    return asked
