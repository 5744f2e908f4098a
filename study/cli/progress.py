"""How far a sweep is, and how it ended: what `study sweep` and `study hour` print, and their exit codes."""

import contextlib
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from study.core.text import number_of, say
from study.sweeps.launches import last_step
from study.sweeps.protocol import Cell
from study.sweeps.sweep import Outcome

# Of a sweep with a cell that ended so; the largest wins. The same command continues with those that are left or killed.
# Out of memory is an answer: it shows how much is too much.
EXIT_CODES = {"failed": 1, "timeout": 1, "left": 3, "killed": 3}


@contextlib.contextmanager
def stoppable(say: Callable[[str], None] = say) -> Iterator[None]:
    """Let signals that end a program end it as Ctrl-C does: with a sentence."""
    # In the background SIGINT starts ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:  # the cell that ran has its record already: status killed
        say("stopped; run the same command again to continue")
        sys.exit(130)


def counted(outcomes: Sequence[Outcome]) -> str:
    """`3 done, 1 left`."""
    counts = Counter(outcome.status for outcome in outcomes)
    return ", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing to do"


def exit_code(outcomes: Sequence[Outcome]) -> int:
    return max((EXIT_CODES.get(outcome.status, 0) for outcome in outcomes), default=0)


CLEAR = "\r\x1b[K"  # the line of a terminal


class Progress:
    """What a sweep calls at each start, step and end of a turn. On a terminal its last line moves at each step."""

    def __init__(self, turns: int, after: Callable[[], object] = lambda: None):
        self.turns = turns
        self.after = after  # each turn that was run
        self.ended = 0
        self.done_before = 0  # since the last line: cells that an earlier sweep ran share one
        self.is_terminal = sys.stdout.isatty()  # a file gets no line for each step

    def say(self, text: str) -> None:
        say(f"{CLEAR}{text}" if self.is_terminal else text)

    def say_done_before(self) -> None:
        if self.done_before:
            self.say(f"{number_of(self.done_before, 'cells')} done before")
        self.done_before = 0

    def start(self, turn: Cell) -> None:
        self.say_done_before()
        self.turn = turn  # of the line that moves
        if not self.is_terminal:
            self.say(self._position(turn))

    def step(self, folder: Path, seconds: float) -> None:
        if not self.is_terminal:
            return
        newest = last_step(folder)
        step = f"step {newest['step']}" if newest else "starting"
        line = f"{self._position(self.turn)}  {step}  {seconds:.0f} s"
        # The cursor goes back to the start of the line: whatever is written next, an error too, takes its place.
        sys.stdout.write(f"{CLEAR}{line[: shutil.get_terminal_size().columns - 1]}\r")
        sys.stdout.flush()

    def end(self, turn: Cell, outcome: Outcome) -> None:
        if outcome.status == "done" and not outcome.ran:
            self.done_before += 1
        else:
            reason = f": {outcome.reason}" if outcome.reason else ""
            self.say_done_before()
            self.say(f"{self._position(turn)}  {outcome.status}{reason}")
        self.ended += 1
        if outcome.ran:
            self.after()

    def _position(self, turn: Cell) -> str:
        what = filter(None, map(turn.value, ("arm", "task", "model")))
        return f"[{self.ended + 1}/{self.turns}] {', '.join(map(str, what))}"
