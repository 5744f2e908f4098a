"""What the user sees of a run: lines on the screen and in log.txt, and each step's values in steps.jsonl."""

import contextlib
import logging
import os
import statistics
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import transformers

from study.core.text import say as print_line
from study.core.text import size
from study.records import metrics, store
from study.records.sections import Evaluation

if TYPE_CHECKING:
    from study.training.run import History, OpenRun

LIBRARIES = ("DeepSpeed", "huggingface_hub", "transformers", "datasets", "accelerate", "torch")
_NOWHERE = Path(os.devnull).open("w")  # noqa: SIM115  stays open: DeepSpeed keeps the stream that it finds on import


def say(folder: Path | None, text: str) -> None:
    """Print a line, and append it to the run's log."""
    print_line(text)
    if folder is not None:
        # A full disk must not end a run that only has something to say.
        with contextlib.suppress(OSError), (folder / "log.txt").open("a") as log:
            log.write(text + "\n")


def log_to(folder: Path | None) -> None:
    """Send the libraries' log messages and warnings to this folder's log.txt, or nowhere, instead of the screen."""
    # Of a rank without a folder nothing is kept: libraries say the same on every rank.
    handler = logging.FileHandler(folder / "log.txt") if folder else logging.NullHandler()
    text = "%(asctime)s %(name)s %(levelname)s %(message)s"
    logging.basicConfig(handlers=[handler], format=text, level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    # At every step DeepSpeed 0.19 calls functions that torch 2.13 has deprecated: a warning each in the timed window.
    warnings.simplefilter("ignore", FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    _remove_handlers()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what DeepSpeed prints while it starts."""
    with contextlib.redirect_stdout(_NOWHERE):  # not its errors, which go to stderr
        yield
    _remove_handlers()  # DeepSpeed adds its own on import


def _remove_handlers() -> None:
    for logger in map(logging.getLogger, LIBRARIES):
        logger.handlers.clear()
        logger.propagate = True


def announce(run: "OpenRun") -> None:
    """On the first rank, print what is about to run."""
    if run.accelerator.is_main_process:
        settings = run.settings
        what = f"{settings.model} on {settings.task} ({settings.data}), {settings.precision}"
        say(run.folder, f"{run.arm.name}: {what}, {run.accelerator.num_processes} rank(s)")


def print_window(run: "OpenRun", window: range, history: "History", losses: list[float]) -> None:
    """Print the last loss of a window, and the median time of its steps."""
    speed = "not timed"  # the warm-up: kernels are chosen, and stage 3 learns its order of fetches
    if run.has_values and window.stop > run.timed_from:
        speed = f"{statistics.median(history.clock.step_s[-len(window) :]):.3f} s/step"
    loss = f"loss {losses[-1]:.4f}" if losses else "virtual: no loss"
    say(run.folder, f"  step {window.stop:>5} of {run.steps}  {loss}  {speed}")


def report(run: "OpenRun", result: Evaluation) -> None:
    """Write and print an evaluation."""
    values = result.model_dump(exclude_none=True, exclude={"step"})
    store.append_step(run.folder, {"step": result.step} | values)
    texts = [f"{name} {value:.4f}" for name, value in values.items()]
    say(run.folder, f"  step {result.step:>5}  {'  '.join(texts)}")


# Quantities of a record, and how the summary shows each.
SUMMARY: dict[str, Callable[[float], str]] = {
    "train_loss": "loss {:.4f}".format,
    "tokens_per_s": "{:.0f} tokens/s".format,
    "peak_bytes": lambda peak_bytes: f"{size(peak_bytes)} at the peak of a rank",
}


def print_summary(run: "OpenRun") -> None:
    """On the first rank, print a summary of the run and the path of its record."""
    if not run.accelerator.is_main_process:
        return
    values = {name: metrics.value(run.record, name) for name in SUMMARY}
    known = [SUMMARY[name](value) for name, value in values.items() if value is not None]
    say(run.folder, f"done: {', '.join(known)}")
    say(run.folder, str(run.folder / "record.json"))
