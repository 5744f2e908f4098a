"""Shows how far a sweep is: on a terminal a line that is redrawn, elsewhere plain lines."""

import sys
import time
from pathlib import Path
from typing import Self

from rich.live import Live
from rich.text import Text

from study.core.text import console
from study.sweeps.launches import Turn, last_step
from study.sweeps.sweep import Outcome


class Progress:
    """What a sweep calls at each start, step and end of a turn.

    It prints lines; on a terminal also a last line that is redrawn. It is redrawn only when asked: no thread draws.
    """

    def __init__(self, turns: int):
        self.console = console()
        self.live = Live(console=self.console, auto_refresh=False, transient=True) if sys.stdout.isatty() else None
        self.turns = turns
        self.ended = 0
        self.ran = 0
        self.started = time.monotonic()
        self.ran_now = False  # whether this turn was run; False if its run was done before

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_) -> None:
        if self.live:
            self.live.stop()

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)
        sys.stdout.flush()

    def start(self, turn: Turn) -> None:
        self.turn = turn
        if self.live:
            self._draw(self.live, "")
        else:
            self.say(f"{self._position(turn)}{self.left()}")

    def step(self, folder: Path, seconds: float) -> None:
        if self.live:
            position = "starting"
            if newest := last_step(folder):
                loss = newest["loss"]  # None of a virtual rank, and where it is not finite
                position = f"step {newest['step']}" + ("" if loss is None else f"  loss {loss:.4f}")
            self._draw(self.live, f"  {position}  {seconds:.0f} s")

    def end(self, turn: Turn, outcome: Outcome) -> None:
        self.ran_now |= outcome.ran
        status = outcome.status if outcome.ran or outcome.status != "done" else "done before"
        reason = f": {outcome.reason}" if outcome.reason else ""
        self.say(f"{self._position(turn)}  {status}{reason}")

    def next(self) -> None:
        """Go on to the next turn. A search for a frontier is one turn with many runs."""
        self.ended += 1
        self.ran += self.ran_now
        self.ran_now = False

    def left(self) -> str:
        """The time that remains, by the mean of the turns that were run so far; empty before the first."""
        if not self.ran:
            return ""
        minutes = (time.monotonic() - self.started) / self.ran * (self.turns - self.ended) / 60
        return f"  about {minutes:.0f} min left" if minutes >= 1 else "  under a minute left"

    def _position(self, turn: Turn) -> str:
        what = [str(turn.cell.value(name)) for name in ("arm", "task", "model") if turn.cell.value(name)]
        return f"[{self.ended + 1}/{self.turns}] {', '.join(what)}"

    def _draw(self, live: Live, text: str) -> None:
        live.update(Text(f"{self._position(self.turn)}{text}{self.left()}", no_wrap=True), refresh=True)
