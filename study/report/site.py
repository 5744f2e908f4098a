"""Write a report: a small static site whose first page has the answers, with the executed notebooks and every claim.

Templates, the style sheet and the script are in `templates/`. Nothing is loaded from a network.
"""

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import papermill
from papermill.exceptions import PapermillExecutionError

from study.core import output
from study.core.arms import ROOT
from study.core.errors import Stop
from study.core.files import safe_join
from study.core.tables import say
from study.ledger import texts
from study.records import runs as records
from study.records import store
from study.records.keeping import redact
from study.records.runs import Runs
from study.report import answers, calculator, claim_pages, notebook, style
from study.report.answers import Answer
from study.report.templating import TEMPLATES, as_html, write_csv, write_page
from study.report.topics import claims

REPLICATIONS = ("replicate_000", "replicate_001", "replicate_002", "replicate_003")  # these show verdicts
NOTEBOOKS = ("stages", "compare", *REPLICATIONS)
ADDED = {"injected-parameters", "papermill-error-cell-tag"}  # cells of papermill
AT_ONCE = 2  # notebooks: a kernel is one process
QUIET = ["--log-level=CRITICAL"]  # a kernel warns that it talks over TCP, and says that it was told to end


def command(runs: tuple[Path, ...], out: Path) -> int:
    """Write the site. Return 1 if a notebook failed."""
    return 1 if build(list(runs), out)[1] else 0


def build(folders: list[Path], out: Path, say: Callable[[str], None] = say) -> tuple[Runs, list[str]]:
    """Write the site. Return the runs, and the names of notebooks that failed."""
    started = time.monotonic()
    runs = records.load(folders, to_share=True)
    check(runs, out)
    # The kernel of this environment, not one of its name that the user has installed.
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(output.replaced(out))
        executed = stack.enter_context(tempfile.TemporaryDirectory())
        pool = ThreadPoolExecutor(AT_ONCE)
        stack.callback(pool.shutdown, cancel_futures=True)
        (site / "data").mkdir()
        parameters = {"runs": ",".join(map(str, folders)), "data": str(site / "data")}
        waiting = {name: pool.submit(executed_page, name, Path(executed), parameters) for name in NOTEBOOKS}
        titles = {name: title_of(nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4)) for name in NOTEBOOKS}
        claim_pages.write(site / "claims.html", titles)
        calculator.write(site, titles)
        answered = [(each, _draw(each, site)) for each in answers.answers(runs)]
        failed = []
        for name, future in waiting.items():
            book, problem = future.result()
            failed += [name] * bool(problem)
            write_notebook_page(site, name, book, problem, titles)
            say(f"{name} {problem or 'is executed'}")
        write_index(site, runs, failed, answered, titles)
    say(f"{out / 'index.html'}  ({time.monotonic() - started:.0f} s)")
    return runs, failed


def check(runs: Runs, out: Path) -> None:
    """Stop if there is nothing to report, or if the site would replace the runs."""
    for folder in runs.folders:
        if not folder.is_dir():
            raise Stop(f"--runs {folder} is not a folder", "give folders with runs")
        if folder.resolve().is_relative_to(out.resolve()):
            raise Stop(f"--out {out} contains the runs in {folder}", "choose a folder that does not contain them")
    if not len(runs):
        first = f": {runs.set_aside[0]}" if runs.set_aside else ""
        folders = ", ".join(map(str, runs.folders))
        raise Stop(f"no run can be read below {folders}{first}", "give folders with runs as --runs")


def executed_page(name: str, into: Path, parameters: dict[str, str]) -> tuple[nbformat.NotebookNode, str]:
    """Execute a notebook. Return it with its outputs, and what went wrong, which is nothing if it went well."""
    path = into / f"{name}.ipynb"
    problem = ""
    try:
        papermill.execute_notebook(
            ROOT / "notebooks" / path.name,
            path,
            parameters,
            progress_bar=False,
            kernel_name="python3",
            extra_arguments=QUIET,
        )
    except PapermillExecutionError as error:
        problem = f"FAILED: {error.ename}: {error.evalue}"
    return nbformat.read(path, 4), problem


def title_of(book: nbformat.NotebookNode) -> str:
    return book.cells[0].source.partition("\n")[0].removeprefix("# ")


# --- pages -----------------------------------------------------------------------------------------------------------


def _draw(answer: Answer, out: Path) -> str:
    """Return the figure of an answer as SVG. Write its rows as a file."""
    if answer.figure is None:
        return ""
    image = style.svg(answer.figure, f"index-{answer.name}", f"{answer.sentence} {answer.more}".replace("**", ""))
    write_csv(safe_join(out / "data", f"index-{answer.name}.csv"), answer.rows)
    return image


def write_notebook_page(
    site: Path, name: str, book: nbformat.NotebookNode, problem: str, titles: dict[str, str]
) -> None:
    """Write the page of an executed notebook."""
    cells = [cell for cell in book.cells if not ADDED & {*cell.metadata.get("tags", [])}]
    texts = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    headings = re.findall(r"^## (.*)$", texts.replace("`", ""), re.MULTILINE)
    values = {"title": titles[name], "headings": headings, "problem": redact(problem), "titles": titles}
    values |= {"claims": known_ids(), "cells": cells, "here": name}
    write_page(site / f"{name}.html", "notebook.html", **values)


def known_ids() -> set[str]:
    """Return what has a place on the page of claims."""
    return {claim.id for claim in texts.claims()} | {fault.id for fault in texts.faults()}


def write_index(
    site: Path, runs: Runs, failed: list[str], answered: list[tuple[Answer, str]], titles: dict[str, str]
) -> None:
    """Write the first page: the answers and the verdicts."""
    values = {
        "answers": answered,
        "advice": answers.advice()[0],
        "findings": answers.BEYOND_PAPERS,
        "central": as_html(claims.headline(), []),
        "known": known_ids(),
        "headline": texts.in_words(texts.claims()),
        "run_count": len(runs),
        "folders": [redact(str(folder)) for folder in runs.folders],
        "problems": redact(notebook.set_aside(runs)),
        "failed": failed,
        "built_utc": store.now_utc(),
    }
    write_page(site / "index.html", "index.html", titles=titles, here="index", **values)
    for name in ("site.css", "site.js", calculator.SCRIPT):
        shutil.copyfile(TEMPLATES / name, site / name)
