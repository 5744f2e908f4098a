"""What the user sees of a run: lines on the screen and in log.txt, and each step's values in steps.jsonl."""

import contextlib
import logging
import os
import statistics
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import transformers

from study.core.arms import Arm
from study.core.settings import Settings
from study.measure import hardware
from study.records import metrics, store
from study.records.schema import Record
from study.records.sections import Evaluation

if TYPE_CHECKING:
    from study.training.run import History, Run

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


def announce(settings: Settings, arm: Arm, num_ranks: int, folder: Path) -> None:
    """Print what is about to run."""
    kind = "virtual ranks" if settings.virtual_ranks else "ranks"
    ranks = f"{num_ranks} {kind}" if num_ranks > 1 else "1 rank"
    names = {"embedded": "the embedded corpus", "synthetic": "random rows of its own shape"}
    data = names.get(settings.data, f"{settings.task} from {settings.data}")
    device = hardware.device_name() or "CPU"
    say(folder, f"{arm.name}: {settings.model} on {data}, {settings.precision}, {ranks} on {device}")


def write_step(run: "Run", step: int, values: dict) -> None:
    """Append values of a step to the run's file. Only called between windows."""
    store.append_step(run.folder, {"step": step} | values)


def print_window(run: "Run", window: range, history: "History", losses: list[float]) -> None:
    """Print the last loss of a window, and the median time of its steps."""
    speed = "warm-up"
    if not run.has_values:
        speed = "no values"
    elif window.stop > run.timed_from:
        step_s = history.clock.step_s
        speed = f"{statistics.median(step_s[-len(window) :]):.3f} s/step"
    loss = f"loss {losses[-1]:.4f}" if losses else f"virtual, rank 0 of {run.settings.virtual_ranks}"
    say(run.folder, f"  step {window.stop:>5} of {run.steps}  {loss}  {speed}")


def report(run: "Run", result: Evaluation) -> None:
    """Write and print an evaluation."""
    values = result.model_dump(exclude_none=True, exclude={"step"})
    write_step(run, result.step, values)
    texts = [f"{name} {value:.4f}" for name, value in values.items()]
    say(run.folder, f"  step {result.step:>5}  {'  '.join(texts)}")


def print_summary(run: "Run") -> None:
    """On the first rank, print a summary of the run and the path of its record."""
    record = run.record
    if not run.accelerator.is_main_process:
        return
    parts = [f"loss {record.loss.train[0]:.4f} -> {record.loss.train[-1]:.4f}"] if record.loss.train else []
    if run.is_virtual:
        parts = [f"virtual, rank 0 of {run.settings.virtual_ranks}: no loss"]
    for name in ("accuracy", "perplexity"):
        if (value := metrics.value(record, name)) is not None:
            parts.append(f"{name} {value:.4f}")
    if speed := metrics.tokens_per_s(record):
        parts.append(f"{speed:.0f} tokens/s")
    say(run.folder, f"done: {', '.join(parts + _memory_and_traffic(record))}")
    for part in ("save", "instruments"):
        if reason := getattr(record.observed, f"{part}_failed"):
            say(run.folder, f"but without its {part} ({reason})")
    say(run.folder, str(run.folder / "record.json"))


def _memory_and_traffic(record: Record) -> list[str]:
    parts = []
    peaks = [rank.peak_allocated_bytes or rank.host_peak_bytes for rank in record.memory.per_rank]
    if known := [peak for peak in peaks if peak]:
        where = "device" if record.hardware.devices else "host"
        parts.append(f"{max(known) / 1e9:.2f} GB {where} peak per rank")
    if record.traffic.per_rank:
        moved_bytes = sum(count.bytes for count in record.traffic.per_rank[0].values())
        parts.append(f"{moved_bytes / 1e6:.1f} MB in collectives per step and rank")
    return parts
