"""What a notebook shows: figures, tables and sentences, and what is missing.

Where `data` names a folder, the rows behind each figure and table are also written to it. From it come the verdicts
and the scoreboard, which `study report` makes once; without it a notebook judges the claims itself.
"""

import functools
import html
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args, get_type_hints

import pandas as pd
from IPython.display import Markdown, display

from study.errors import Stop
from study.io.files import safe_join
from study.io.numbers import quantity, short
from study.ledger import evidence
from study.records import runs as records
from study.report import grouping
from study.report.style import conditions, svg
from study.report.topics import claims, losses
from study.spec.arms import all_paths
from study.spec.settings import Settings

FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")  # the last four: in East Asian width
NAME = "study_name"  # in the metadata of an output: its file in the data folder, without the suffix
VERDICTS, SCORES = "verdicts.json", "scores.json"  # in the data folder
TASKS = get_args(get_type_hints(Settings)["task"])
PARITY = ["group", "line", "against", "largest difference", "seeds differ by", "final loss", "steps", "n"]
CLAIMS = ["claim", "verdict", "basis", "plainly", "quote"]  # the page of a claim has the rest
# Headings of columns whose names are too short for a reader; CSV files keep the names.
HEADINGS = {
    "n": "runs",
    "s/step": "s per step",
    "plainly": "in words",
    "against": "compared with",
    "words": "error message",
}
OUTCOMES = {"oom": "out of memory", "host_oom": "out of host memory"}  # other outcomes are words


class Book:
    """One notebook over some runs."""

    def __init__(self, name: str, runs: str, data: str = ""):
        self.name, self.data = name, Path(data) if data else None
        # A report gives the same data folder to all notebooks, and its runs do not change while it is made.
        self.runs = _loaded(runs) if data else records.load_to_share(runs)
        for folder in self.runs.folders:
            if not folder.is_dir():
                known = ", ".join(map(str, evidence.default_folders())) or "none: study sweep smoke makes some"
                raise Stop(f"runs = {str(folder)!r} is not a folder", f"give folders with runs (there are {known})")

    def inventory(self) -> None:
        """Say how many runs were read, how they ended, and what could not be read."""
        counts = Counter(run.status for run in self.runs)
        where = ", ".join(f"`{folder}`" for folder in self.runs.folders)
        outcomes = ", ".join(f"{count} {OUTCOMES.get(status, status)}" for status, count in counts.items())
        text = f"**{len(self.runs)} runs** below {where}: {outcomes or 'none'}."
        if len({run.environment for run in self.runs}) > 1:
            text += " An environment is a machine with its software and commit; the notebook `machines` lists them."
        say(text)
        if self.runs.set_aside:
            say("Set aside:\n\n" + "\n".join(f"- {sentence}" for sentence in set_aside(self.runs)))

    def chosen(self, baseline: str, tasks: str) -> list[str]:
        """The tasks that were chosen, as a list. A baseline or a task that does not exist is a Stop."""
        chosen = [task.strip() for task in tasks.split(",") if task.strip()]
        arms, names = {run.arm for run in self.runs}, {run.task for run in self.runs} - {None}
        wanted = [("baseline", baseline, arms, all_paths()), *(("tasks", task, names, TASKS) for task in chosen)]
        for name, value, present, known in wanted:
            if value not in {*present, *known}:
                raise Stop(f"{name} = {value!r} is not known", f"choose from {', '.join(sorted(present or known))}")
        return chosen

    def figure(self, draw: Callable, rows: list[dict], name: str, command: str = "", **options) -> None:
        """Draw rows as a figure, or say which command makes them."""
        if not rows:
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

    def figures(self, draw: Callable, rows: list[dict], name: str, command: str = "", most: int = 4, **options) -> None:
        """One figure per group, those with the most arms first, and a sentence about the groups that are not drawn."""
        groups = {row["group"] for row in rows}
        for number, mine in enumerate(grouping.largest_groups(rows, most) or [[]], 1):
            self.figure(draw, mine, f"{name}-{number}" if len(groups) > 1 else name, command, **options)
        if len(groups) > most:
            which = "group of runs" if most == 1 else f"{most} groups of runs"
            say(f"Drawn: the {which} with the most arms, of {len(groups)}.")

    def table(
        self, rows: list[dict], name: str, command: str = "", columns: list | dict | None = None, most: int = 60
    ) -> None:
        """Rows as a table, or which command makes them. `columns` may be a dictionary of columns and headings."""
        if not rows:
            return missing(f"the table “{name}”", command)
        self._write(name, rows)
        text = as_html(rows[:most], columns or list(pd.DataFrame(rows)))
        display({"text/html": text, "text/plain": f"table {name}"}, raw=True, metadata={NAME: f"{self.name}-{name}"})
        if len(rows) > most:
            say(f"Shown: the first {most} of {len(rows)} rows. The CSV file of the report has all of them.")

    def losses(self, rows: list[dict], command: str, most: int = 2) -> None:
        """The losses of `losses.table`: a sentence, figures, and how far each arm is from the baseline."""
        parity = losses.parity(rows)
        say(losses.sentence(parity))
        self.figures(losses.figure, rows, "losses", command, most)
        self.table(parity, "parity", command, PARITY)

    def claims(self, document: str) -> None:
        """The verdicts on the claims of one document; `study claims ID` shows the rest of each."""
        rows = self.verdicts(document)
        say(claims.sentence(rows))
        self.table(rows, "claims", columns=CLAIMS, most=len(rows))

    def _write(self, name: str, rows: list[dict]) -> None:
        if self.data:
            write_csv(safe_join(self.data, f"{self.name}-{name}.csv"), rows)

    def verdicts(self, document: str | None = None) -> list[dict]:
        """The claims of one document, or of all, with their verdicts. If a claims file is wrong, it says so."""
        if rows := self._kept(VERDICTS):
            return [row for row in rows if document in (None, row["document"])]
        try:
            return claims.table(self.runs, document)
        except Stop as stop:
            say(f"> **Not here:** {stop.what}. What to do: {stop.remedy}.")
            return []

    def scores(self) -> list[dict]:
        """The cells of the scoreboard. Only the report makes them, because that needs DeepSpeed."""
        return self._kept(SCORES)

    def _kept(self, name: str) -> list[dict]:
        return json.loads((self.data / name).read_text()) if self.data and (self.data / name).exists() else []


@functools.cache
def _loaded(runs: str) -> records.Runs:
    return records.load_to_share(runs)


def write_csv(path: Path, rows: list[dict]) -> None:
    """Rows as a CSV file, every digit of them."""
    pd.DataFrame(rows, dtype=object).map(no_formula).rename(columns=no_formula).to_csv(path, index=False)


def set_aside(runs: records.Runs) -> list[str]:
    """What could not be read, with paths relative to the given folders: no page shows paths of the machine."""
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


def as_html(rows: list[dict], columns: list | dict) -> str:
    """Rows as a table for people: four significant digits, sizes with a unit, a dash for what is not known.

    Where rows of one group follow each other, the group is a heading above them and no column.
    """
    headings = dict(columns) if isinstance(columns, dict) else {name: HEADINGS.get(name, name) for name in columns}
    together = [(name, list(mine)) for name, mine in itertools.groupby(rows, lambda row: row.get("group"))]
    if "group" in headings and 2 * len(together) <= len(rows):
        del headings["group"]
    else:
        together = [(None, rows)]
    lines = ["<table>", f"<thead><tr>{_cells('th', map(html.escape, headings.values()))}</tr></thead>"]
    for group, mine in together:
        lines.append("<tbody>")
        if group is not None:
            words = html.escape(conditions(group))
            lines.append(
                f'<tr class="group"><th colspan="{len(headings)}" scope="rowgroup"><span>{words}</span></th></tr>'
            )
        lines += [f"<tr>{_cells('td', (_cell(name, row.get(name)) for name in headings))}</tr>" for row in mine]
        lines.append("</tbody>")
    return "\n".join([*lines, "</table>"])


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{text}</{tag}>" for text in texts)


def no_formula(value):
    """A text for a CSV file that no spreadsheet takes for a formula: those begin with one of these."""
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def _cell(name: str, value) -> str:
    if name == "verdict":
        return f"<span class='verdict {value.partition(' ')[0]}'>{html.escape(value)}</span>"
    if name == "group" and value is not None:
        return html.escape(conditions(value))
    return html.escape(quantity(value, "bytes") if name.endswith(" bytes") and value is not None else short(value))
