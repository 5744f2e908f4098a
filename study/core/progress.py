"""Show on stderr what a slow command is doing: on a terminal a line with a clock, elsewhere one plain line."""

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar

_texts: ContextVar[set[str] | None] = ContextVar("texts", default=None)  # None: no command runs that shows it


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Show progress within this block: a command does, a library does not."""
    token = _texts.set(set())
    try:
        yield
    finally:
        _texts.reset(token)


@contextlib.contextmanager
def during(text: str) -> Iterator[None]:
    """Show a text while this block runs."""
    texts = _texts.get()
    if texts is not None and sys.stderr.isatty():
        from rich.console import Console  # they take longer to import than most answers
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            progress.add_task(text)
            yield
        return
    if texts is not None and text not in texts:
        texts.add(text)
        sys.stderr.write(f"{text} ...\n")
    yield
