"""What a notebook shows: figures, tables and sentences, and what is missing.

Where `data` names a folder, the rows behind each figure and table are also written to it.
"""

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pandas as pd
from IPython.display import Markdown, display
from matplotlib.figure import Figure

from study.core.arms import all_paths
from study.core.errors import Stop
from study.core.files import safe_join
from study.core.settings import Settings
from study.core.words import joined
from study.ledger import texts
from study.records import runs as records
from study.records.runs import Run, Runs
from study.report import grouping
from study.report.style import svg
from study.report.templating import as_html, write_csv
from study.report.topics import claims, losses

NAME = "study_name"  # in the metadata of an output: its file in the data folder, without the suffix
TASKS = get_args(get_type_hints(Settings)["task"])
PARITY = ("group", "line", "against", "largest_difference", "seeds_differ_by", "final_loss", "steps", "n")
gc.set_threshold(100_000, 50, 50)  # as in `study`: a search for garbage among many small objects takes long
OUTCOMES = {"oom": "out of memory"}  # other outcomes are words


class Book:
    """One notebook over some runs."""

    def __init__(self, name: str, runs: str, data: str = "", protocols: Collection[str] = ()):
        self.name = name
        self.protocols = protocols
        self.data = Path(data) if data else None
        self.runs = records.load(runs, to_share=True)
        if protocols:
            mine = tuple(run for run in self.runs if protocol_of(run) in protocols)
            self.runs = replace(self.runs, runs=mine)
        for folder in self.runs.folders:
            if not folder.is_dir():
                known = ", ".join(map(str, records.default_folders())) or "none: study sweep smoke makes some"
                raise Stop(f"runs = {str(folder)!r} is not a folder", f"give folders with runs (there are {known})")

    def inventory(self) -> None:
        """Say how many runs were read, how they ended, and what could not be read."""
        counts = Counter(run.record.status for run in self.runs)
        where = ", ".join(f"`{folder}`" for folder in self.runs.folders)
        outcomes = ", ".join(f"{count} {OUTCOMES.get(status, status)}" for status, count in counts.items())
        sweeps = f" of {joined([f'`study sweep {name}`' for name in self.protocols])}" if self.protocols else ""
        say(f"**{len(self.runs)} runs** below {where}{sweeps}: {outcomes or 'none'}.")
        if self.runs.set_aside:
            say("Set aside:\n\n" + "\n".join(f"- {sentence}" for sentence in set_aside(self.runs)))

    def chosen(self, baseline: str, tasks: str) -> list[str]:
        """Return the tasks that were chosen. Raise Stop if a baseline or a task does not exist."""
        chosen = [task.strip() for task in tasks.split(",") if task.strip()]
        _check("baseline", baseline, {run.record.arm for run in self.runs}, all_paths())
        for task in chosen:
            _check("tasks", task, {run.record.requested.task for run in self.runs} - {None}, TASKS)
        return chosen

    def figure(
        self, draw: Callable[..., Figure], rows: pd.DataFrame, name: str, command: str = "", **options: object
    ) -> None:
        """Draw rows as a figure, or say which command makes them."""
        if rows.empty:
            return missing(f"the figure “{name}”", command)
        purpose = (draw.__doc__ or "").partition("\n")[0]
        drawing = draw(rows, **options)
        seen = " ".join(drawing.axes[0].get_title("left").split())
        label = f"{seen}. {purpose}" if seen else purpose  # for a reader who does not see it
        image = svg(drawing, name, label)
        self._write(name, rows)
        if self.data:
            safe_join(self.data, f"{self.name}-{name}.svg").write_text(image)
        metadata = {NAME: f"{self.name}-{name}", "caption": purpose}
        display({"image/svg+xml": image, "text/plain": f"figure {name}"}, raw=True, metadata=metadata)

    def figures(
        self,
        draw: Callable[..., Figure],
        rows: pd.DataFrame,
        name: str,
        command: str = "",
        most: int = 4,
        which: str = "",
        **options: bool,
    ) -> None:
        """Draw one figure per group, those with the most arms first, and say how many groups are not drawn."""
        groups = 0 if rows.empty else rows["group"].nunique()
        for number, mine in enumerate(grouping.largest_groups(rows, most) or [rows], 1):
            self.figure(draw, mine, f"{name}-{number}" if groups > 1 else name, command, **options)
        if groups > most:
            say(f"Drawn: {most} of {groups} groups of runs{which}, those with the most arms.")

    def table(
        self, rows: pd.DataFrame, name: str, command: str = "", columns: Iterable[str] = (), most: int = 60
    ) -> None:
        """Show rows as a table, or say which command makes them."""
        if rows.empty:
            return missing(f"the table “{name}”", command)
        self._write(name, rows)
        text = as_html(rows[:most], columns)
        display({"text/html": text, "text/plain": f"table {name}"}, raw=True, metadata={NAME: f"{self.name}-{name}"})
        if len(rows) > most:
            say(f"Shown: the first {most} of {len(rows)} rows. The CSV file of the report has all of them.")

    def losses(self, rows: pd.DataFrame, command: str, most: int = 2) -> None:
        """Show the losses of `losses.table`: a sentence, figures, and how far each arm is from the baseline."""
        parity = losses.parity(rows)
        say(losses.sentence(parity))
        shown = losses.learning(rows)
        self.figures(
            losses.figure, shown, "losses", command, most, " in which the loss falls" * (len(shown) < len(rows))
        )
        self.table(parity, "parity", command, PARITY)

    def central(self, document: str, answer: str = "") -> None:
        """Show the claims that a document stands for."""
        say(answer)
        self.table(claims.table(each for each in claims.of(document) if each.central), "central")

    def claims(self, document: str) -> None:
        """Show the claims of one document; `study claims ID` shows the rest of each."""
        rows = claims.of(document)
        say(texts.in_words(rows))
        self.table(claims.table(rows), "claims", most=len(rows))

    def _write(self, name: str, rows: pd.DataFrame) -> None:
        if self.data:
            write_csv(safe_join(self.data, f"{self.name}-{name}.csv"), rows)


def protocol_of(run: Run) -> str:
    """Return the protocol that a run is of; before records named it, that of its folder, as `study sweep` makes it."""
    return run.record.cell.protocol or run.folder.parent.name


def _check(name: str, value: str, present: set, known: Iterable[str]) -> None:
    if value not in {*present, *known}:
        raise Stop(f"{name} = {value!r} is not known", f"choose from {', '.join(sorted(present or known))}")


def set_aside(runs: Runs) -> list[str]:
    """Return what could not be read, with paths relative to the given folders: no page shows paths of the machine."""
    sentences = list(runs.set_aside)
    for folder in runs.folders:
        sentences = [text.replace(f"{folder.resolve()}/", f"{folder.resolve().name}/") for text in sentences]
    return sentences


def say(text: str) -> None:
    """Show text as Markdown; nothing if it is empty."""
    if text:
        display(Markdown(text))


def missing(what: str, command: str) -> None:
    """Say what is missing, and the command that makes it."""
    say(f"> **Not here yet:** {what}." + (f" To make it: `{command}`." if command else ""))
