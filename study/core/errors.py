"""The one exception for what a user can put right, and how a program ends with it."""

import contextlib
import difflib
import re
import sys
from collections.abc import Iterable, Iterator

from study.core.text import say_aside

LONGEST_NAME = 80  # names and values in a file may have any length
FULL_INSTALL = 'pip install ".[train,report]" in the clone, or make setup there'  # the light one is . alone


class Stop(Exception):
    """A run that ends here, for a reason that one sentence can tell. The record keeps it; nobody sees a traceback."""

    def __init__(self, what: str, remedy: str, status: str = "failed", where: str | None = None):
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.status = status
        self.where = where  # the rank that failed, if it is known
        self.add_note(f"What to do: {remedy}")  # Python shows it below a traceback in a script that is not ours

    def __reduce__(self):
        """Let a worker process hand it on: without this Python would make it again of `what` alone."""
        return type(self), (self.what, self.remedy, self.status, self.where)

    @property
    def sentence(self) -> str:
        """Return the sentence that a user reads, on one line, whatever it quotes."""
        # Words of more than 300 characters are no paths.
        return re.sub(
            r"(\S{80})\S{220,}",
            r"\1...",
            " ".join(f"{self.what}. What to do: {self.remedy}.".replace("?.", "?").split()),
        )

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows in place of a traceback: a notebook's user, too, reads one sentence."""
        return [self.sentence]


class BadOption(Stop):
    """A mistake in an option of the command line: the command itself was not asked."""


class NotFollowed(Stop):
    """A pass over a model ended in an error of its own code or of its inputs, so nothing of it can be predicted."""


def refuse_beyond(name: str, value: float | None, most: float) -> None:
    """Raise Stop for the value of an option that is not from 1 to `most`."""
    if value is not None and not 1 <= value <= most:
        raise Stop(f"{name} must be from 1 to {most} (got {value})", "give such a number")


@contextlib.contextmanager
def exit_on_stop() -> Iterator[None]:
    """End this program with one sentence on stderr and exit code 2 for a user's mistake, 130 for Ctrl-C."""
    try:
        yield
    except Stop as stop:
        say_aside(stop.sentence)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        sys.exit(130)


def close_names(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Return at most so many known names that are close to a misspelt one."""
    by_lower = {each.lower(): each for each in known}
    # By itself difflib takes 0.6, at which nan is a typing error of bananas.
    close = difflib.get_close_matches(name[:LONGEST_NAME].lower(), by_lower, n=most, cutoff=0.61)
    return [by_lower[lower] for lower in close]


def nearest(name: str, known: Iterable[str], most: int = 1, otherwise: str | None = None) -> str:
    """Return at most so many known names that are close to a misspelt one, or else `otherwise`, or all names."""
    names = [*known]
    close = close_names(name, names, most)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return otherwise or f"choose one of {', '.join(dict.fromkeys(names))}"
