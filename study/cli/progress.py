"""Shows how far a sweep is: on a terminal a line that is redrawn, elsewhere plain lines."""

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
        self.live = Live(console=self.console, auto_refresh=False, transient=True)  # prints nothing into a file
        self.turns = turns
        self.ended = 0
        self.ran: set[int] = set()  # the turns that were run, and not done before
        self.started = time.monotonic()

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(self, *_) -> None:
        self.live.stop()

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def start(self, turn: Turn) -> None:
        self.turn = turn
        if self.console.is_terminal:
            self._draw("")
        else:
            self.say(f"{self._position(turn)}{self.left()}")

    def step(self, folder: Path, seconds: float) -> None:
        if not self.console.is_terminal:
            return  # a file gets no line for each step
        newest = last_step(folder)
        position = "starting"
        if newest:
            position = f"step {newest['step']}"
        if newest.get("loss") is not None:  # None of a virtual rank, and where it is not finite
            position += f"  loss {newest['loss']:.4f}"
        self._draw(f"  {position}  {seconds:.0f} s")

    def end(self, turn: Turn, outcome: Outcome) -> None:
        if outcome.ran:
            self.ran.add(self.ended)
        text = outcome.status
        if text == "done" and not outcome.ran:
            text = "done before"
        if outcome.reason:
            text += f": {outcome.reason}"
        self.say(f"{self._position(turn)}  {text}")

    def next(self) -> None:
        """Go on to the next turn. A search for a frontier is one turn with many runs."""
        self.ended += 1

    def left(self) -> str:
        """The time that remains, by the mean of the turns that were run so far; empty before the first."""
        if not self.ran:
            return ""
        minutes = (time.monotonic() - self.started) / len(self.ran) * (self.turns - self.ended) / 60
        if minutes < 1:
            return "  under a minute left"
        return f"  about {minutes:.0f} min left"

    def _position(self, turn: Turn) -> str:
        what = [str(turn.cell.value(name)) for name in ("arm", "task", "model") if turn.cell.value(name)]
        return f"[{self.ended + 1}/{self.turns}] {', '.join(what)}"

    def _draw(self, text: str) -> None:
        self.live.update(Text(f"{self._position(self.turn)}{text}{self.left()}", no_wrap=True), refresh=True)
