"""What a notebook shows: tables, figures, and what is missing.

Where `data` names a folder, the rows behind each table and figure are also written to it.
"""

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
from IPython.display import Markdown, display
from matplotlib.figure import Figure

from study.core.arms import ROOT
from study.core.errors import Stop
from study.core.files import safe_join
from study.core.text import number_of
from study.records import runs as records
from study.records.compare import compare
from study.records.runs import Run, Runs
from study.report.style import png, svg
from study.report.tables import as_html, write_csv

gc.set_threshold(100_000, 50, 50)  # as in `study`: a search for garbage among many small objects takes long

KEPT = "reports/cpu-2core/runs/"
ON_A_GPU = {  # what is kept of these protocols from a GPU, for readers who have none
    "smoke": "reports/h200/runs/predictions",
    "offload": "reports/h100/runs/offload",
    "guelph": "reports/h200/runs/guelph",
    "colab": "reports/h200/runs/guelph",
}
BESIDE_SECONDS = ["task", "train_rows", "eval_rows", "seeds", "peak MB", "peak of", "loss", "eval loss"]
ENDS = {"oom": "out of memory", "timeout": "out of time"}  # of a run that is not done, where its status says little
DEFAULT = "runs"  # of the parameter; a newcomer has no such folder


def protocol_of(run: Run) -> str:
    return run.record.cell.protocol or run.folder.parent.name


class Book:
    """One notebook over some runs."""

    def __init__(self, name: str, runs: str | list, data: str = "", counted: bool = True):
        remedy = "give folders with runs, as text; study sweep smoke makes some"
        several: list[object] = [*runs] if isinstance(runs, list) else [runs]
        if not all(isinstance(each, (str, Path)) for each in several):
            raise Stop(f"runs = {runs!r} is not a folder", remedy)
        self.name = name
        self.data = Path(data) if data else None
        if runs == DEFAULT and not Path(runs).is_dir():
            runs = str(ROOT / DEFAULT)  # Jupyter starts a notebook in its own folder
        self.runs = records.load(runs, to_share=True)  # all that is shown may be published
        for folder in self.runs.folders:
            if not folder.is_dir() and folder != ROOT / DEFAULT:
                raise Stop(f"runs = {str(folder)!r} is not a folder", remedy)
        first = str(several[0]).partition(",")[0]
        self.own = DEFAULT if "reports" in Path(first).parts else first  # where new runs go: not among kept records
        others = Counter(run.record.status for run in self.runs if run.record.status != "done")
        ended = ["", *(f"{number} {ENDS.get(status, status)}" for status, number in others.items())]
        said = f"Shown here: **{number_of(len(self.runs), 'runs')}**, each a recorded training. "
        said += f"{len(self.runs.done)} ended as planned{', '.join(ended)}."
        if self.runs.set_aside:
            said += f" {number_of(len(self.runs.set_aside), 'records')} set aside: something is wrong with them."
        if counted or self.runs.set_aside:
            say(said)

    def of(self, *protocols: str) -> Runs:
        """Return the runs of some protocols; before records named theirs, by the folder that `study sweep` made."""
        chosen = [run for run in self.runs if protocol_of(run) in protocols]
        return self._or_kept(replace(self.runs, runs=tuple(chosen)), records.kept(*protocols))

    def select(self, protocol: str, **wanted) -> Runs:
        """Return the runs that have all of these, the protocol's first; if there are none, those kept of it."""
        ordered = tuple(sorted(self.runs, key=lambda run: protocol_of(run) != protocol))
        return self._or_kept(replace(self.runs, runs=ordered).select(**wanted), records.kept(protocol).select(**wanted))

    def _or_kept(self, mine: Runs, kept: Runs) -> Runs:
        if mine.done or not kept.done:
            return mine
        where = " and ".join(sorted({run.folder.parent.name for run in kept}))
        say(f"> **Kept records:** there are no such runs here. These are of {KEPT}{where}, from two CPU cores.")
        return kept

    def machines(self) -> None:
        """Say on what machines the runs were made: what is the same everywhere, and a table of what differs."""
        machines = pd.DataFrame.from_dict(self.runs.environments, orient="index")
        if machines.empty:
            return
        differ = machines.map(str).nunique() > 1
        if differ.any():
            self.table(machines.loc[:, differ].reset_index(names="environment"), "machines")
        same = [f"{name} {value}" for name, value in machines.iloc[0][~differ].items()]
        say(f"The same everywhere: {', '.join(same) or 'nothing'}.")

    def seconds(self, chosen: Runs, name: str, protocol: str) -> None:
        """Show the seconds of a step on a GPU, or kept ones. Those of a CPU say nothing about one."""
        on_a_gpu = chosen.select(device="cuda", virtual=False)
        folder = ROOT / ON_A_GPU[protocol]
        if not on_a_gpu.done:
            yours = f"On a machine with a GPU, `study sweep {protocol} --runs {self.own}` makes yours."
            if not folder.is_dir():  # a wheel has no records
                return say(f"> **Needs a GPU:** the table “{name}”. {yours}")
            on_a_gpu = records.load([folder]).select(device="cuda", virtual=False)
            kind = " and ".join(sorted({each["devices"] for each in on_a_gpu.environments.values()}))
            say(f"> **Kept records:** no run here is of a GPU. These are of {ON_A_GPU[protocol]}, from {kind}. {yours}")
        rows = pd.DataFrame(compare(on_a_gpu).rows).drop(columns=BESIDE_SECONDS, errors="ignore")
        return self.table(rows.dropna(axis=1, how="all"), name)

    def figures(self, draw: Callable[..., Figure], rows: pd.DataFrame, name: str, command: str = "") -> None:
        """Draw one figure for each of the two groups with the most arms, or say which command makes them."""
        if rows.empty:
            return missing(f"the figure “{name}”", command)
        # The first line of a figure function's docstring is its caption.
        purpose = (draw.__doc__ or "").partition("\n")[0]
        arms = rows.groupby("group", sort=False)["arm"].nunique()
        for number, group in enumerate(arms.nlargest(2).index, 1):
            mine = rows[rows["group"] == group]
            file = f"{name}-{number}"
            drawing = draw(mine)
            image = svg(drawing, file, purpose)  # the label is for a reader who does not see it
            caption = f"{purpose}{self._written(mine, file)}"
            figure = f"<figure>{image}<figcaption>{caption}</figcaption></figure>"
            forms = {"text/html": figure, "text/plain": purpose}
            if not self.data:  # a page of a report has the SVG
                forms["image/png"] = png(drawing)
            show(forms, file)
        return None

    def table(self, rows: pd.DataFrame, name: str, command: str = "") -> None:
        """Show rows as a table, or say which command makes them."""
        if rows.empty:
            return missing(f"the table “{name}”", command)
        table = f'<div class="scroll" tabindex="0">{as_html(rows)}</div>'
        return show({"text/html": f'{table}<p class="links">{self._written(rows, name)}</p>'}, name)

    def _written(self, rows: pd.DataFrame, name: str) -> str:
        if not self.data:
            return ""
        # The page of a notebook lies beside the folder `data`, so the link is relative.
        write_csv(safe_join(self.data, f"{self.name}-{name}.csv"), rows)
        return f' <a href="data/{self.name}-{name}.csv">data as CSV</a>'


def show(forms: dict[str, str], name: str) -> None:
    """Show one thing in several forms: a reader such as Jupyter takes the first that it can show."""
    display(forms, raw=True, metadata={"study_name": name})


def say(text: str) -> None:
    display(Markdown(text))


def missing(what: str, command: str) -> None:
    if command:
        command = f" To make it: `{command}`."
    say(f"> **Not here yet:** {what}.{command}")
