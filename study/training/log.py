"""Decides what the user sees and what goes to the run's log.txt."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import transformers

LIBRARIES = ("DeepSpeed", "huggingface_hub", "transformers", "datasets", "accelerate", "torch")
_NOWHERE = Path(os.devnull).open("w")  # noqa: SIM115  stays open: DeepSpeed keeps the stream that it finds on import


def say(folder: Path | None, text: str) -> None:
    """Print a line, and append it to the run's log."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    if folder is not None:
        with contextlib.suppress(OSError), (folder / "log.txt").open("a") as log:
            log.write(text + "\n")


def log_to(folder: Path | None) -> None:
    """Send the libraries' log messages and warnings to this folder's log.txt, or nowhere, instead of the screen."""
    handler = logging.FileHandler(folder / "log.txt") if folder else logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    # At every step DeepSpeed 0.19 calls functions that torch 2.13 has deprecated: a warning each in the timed window.
    warnings.simplefilter("ignore", FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    _remove_handlers()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what DeepSpeed prints while it starts."""
    with contextlib.redirect_stdout(_NOWHERE):
        yield
    _remove_handlers()  # DeepSpeed adds its own on import


def _remove_handlers() -> None:
    for name in LIBRARIES:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
