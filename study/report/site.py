"""Runs in, a small static site out: every notebook executed, every run a page, the verdicts first. No network.

Templates, the style sheet and the script are in `templates/`.
"""

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import nbformat
import psutil

from study.claims import ledger, words
from study.claims.ledger import Verdict
from study.claims.verdict import VERDICTS
from study.errors import Stop
from study.machine import output
from study.records import runs as records
from study.records import store
from study.records.privacy import without_paths
from study.records.runs import Runs
from study.report import calculator, captions, claim_pages, figures, notebook, run_pages, style, tables
from study.report import readme as digest
from study.report.templating import TEMPLATES, write_page
from study.spec.arms import ROOT
from study.text.tables import say

REPLICATIONS = ("replicate_000", "replicate_001", "replicate_002", "replicate_003")
NOTEBOOKS = ("claims", "compare", "fsdp2", *REPLICATIONS, "machines", "predictions")
SCOREBOARD = ("-m", "study.cli", "scoreboard", "--json", "--no-tracker", "-")
KERNEL_TRIES = 3


def command(runs: tuple[Path, ...], out: Path, readme: Path | None) -> int:
    """What `study report` does. The exit code is 1 where a notebook failed."""
    if readme:
        digest.check(readme)  # before the minutes that a build takes
    failed = build(list(runs), out)
    if readme:
        digest.renew(readme)
    return 1 if failed else 0


def build(folders: list[Path], out: Path, say: Callable[[str], None] = say) -> list[str]:
    """Judge the claims, execute the notebooks, write the pages. Returns the notebooks that failed.

    The flow goes one way: runs, verdicts, data files, notebooks that read them, pages.
    """
    started, runs = time.monotonic(), records.load(folders)
    check(runs, out)
    with output.replaced(out) as site:
        for name in ("notebooks", "data", "run"):
            (site / name).mkdir()
        judged = tables.judged(runs)
        verdicts = [tables.verdict(each) for each in judged]
        for name, rows in ((notebook.VERDICTS, verdicts), (notebook.SCORES, score(runs, say))):
            (site / "data" / name).write_text(json.dumps(without_paths(rows), indent=1) + "\n")
        say(f"{len(runs)} runs, {len(runs.set_aside)} set aside; executing {len(NOTEBOOKS)} notebooks")
        failed = execute(folders, site / "notebooks", site / "data", say)
        write_pages(runs, judged, site, failed)
    say(f"{out / 'index.html'}  ({time.monotonic() - started:.0f} s)")
    return failed


def check(runs: Runs, out: Path) -> None:
    """A Stop where there is nothing to report, or where the site would replace the runs."""
    for folder in runs.folders:
        if not folder.is_dir():
            raise Stop(f"--runs {folder} is not a folder", "give folders with runs")
        if folder.resolve().is_relative_to(out.resolve()):
            raise Stop(f"--out {out} is or holds the runs in {folder}", "give an --out beside or below them")
    if not len(runs):
        first = f": {runs.set_aside[0]}" if runs.set_aside else ""
        folders = ", ".join(map(str, runs.folders))
        raise Stop(f"no run can be read below {folders}{first}", "give folders with runs as --runs")


def score(runs: Runs, say: Callable[[str], None]) -> list[dict]:
    """The cells of the scoreboard, from a process of its own, because it needs DeepSpeed; none where that fails."""
    folders = sorted(f"{run.folder}\n" for run in runs.done if run.components)
    if not folders:
        return []
    command = [sys.executable, *SCOREBOARD]
    scored = subprocess.run(command, input="".join(folders), capture_output=True, text=True, check=False)
    if scored.returncode != 0:
        last = (scored.stderr.strip().splitlines() or [f"it ended with {scored.returncode}"])[-1]
        say(f"there is no scoreboard of memory predictors in this report: {last}")
        return []
    return json.loads(scored.stdout)


def execute(folders: list[Path], into: Path, data: Path | None, say: Callable[[str], None]) -> list[str]:
    """Execute every notebook in its own kernel. Of one that fails, what it has shown is kept, with its error."""
    failed, parameters = [], {"runs": ",".join(map(str, folders)), "data": str(data or "")}
    # Processes, because each thread that executes a notebook would leave an event loop behind. They are in their own
    # sessions, because Ctrl-C is for this process, which ends them.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn, initializer=os.setsid) as pool, _ended_with_us():
        name_of = {pool.submit(_execute, ROOT / "notebooks", name, into, parameters): name for name in NOTEBOOKS}
        for number, done in enumerate(as_completed(name_of), 1):
            elapsed_s, problem = done.result()
            failed += [name_of[done]] if problem else []
            problem = f"  FAILED: {problem}" if problem else ""
            say(f"[{number}/{len(NOTEBOOKS)}] {name_of[done]}  {elapsed_s:.1f} s{problem}")
    return failed


@contextlib.contextmanager
def _ended_with_us() -> Iterator[None]:
    """When this process is interrupted, those of the pool and their kernels end at once."""
    try:
        yield
    except BaseException:
        for worker in multiprocessing.active_children():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(worker.pid)
                for each in (*process.children(recursive=True), process):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
        raise


def _execute(notebooks: Path, name: str, into: Path, parameters: dict) -> tuple[float, str | None]:
    """The seconds that a notebook took, and what it failed with."""
    import papermill  # takes two seconds, and only this process needs it

    started, problem, path = time.monotonic(), None, into / f"{name}.ipynb"
    options = {"kernel_name": "python3", "extra_arguments": ["--IPKernelApp.log_level=50"]}  # it logs that it listens
    for _ in range(KERNEL_TRIES):
        try:
            papermill.execute_notebook(notebooks / path.name, path, parameters, progress_bar=False, **options)
            problem = None
        except papermill.PapermillExecutionError as error:
            problem = f"{error.ename}: {error.evalue}"
        except RuntimeError as error:  # it died before it listened: another process took its port
            problem = str(error)
            continue
        break
    if path.exists():  # papermill writes down where everything was
        executed = without_paths(json.loads(path.read_text()))
        store.replace(path, json.dumps(executed, indent=1, ensure_ascii=False) + "\n")
    return time.monotonic() - started, problem


# --- pages ---------------------------------------------------------------------------------------------------------


def write_pages(runs: Runs, judged: list[Verdict], out: Path, failed: list[str]) -> None:
    """All pages, from the runs, the verdicts and the executed notebooks."""
    verdicts, slugs = [tables.verdict(each) for each in judged], run_pages.slugs(runs)
    paths = {name: out / "notebooks" / f"{name}.ipynb" for name in NOTEBOOKS}
    cells_of = {name: _cells(path) for name, path in paths.items() if path.exists()}
    titles = {name: cells[0].source.partition("\n")[0].removeprefix("# ") for name, cells in cells_of.items()}
    for name, cells in cells_of.items():
        texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
        headings = re.findall(r"^## (.*)$", "\n".join(texts), re.MULTILINE)
        about = {"title": titles[name], "headings": headings, "failed": name in failed}
        write_page(out / f"{name}.html", "notebook.html", cells=cells, titles=titles, here=name, **about)
    rows, problems = run_pages.write(runs, slugs, judged, out / "run", titles)
    with_page = {run: slug for run, slug in slugs.items() if (out / "run" / f"{slug}.html").exists()}
    claim_pages.write(judged, with_page, out, titles)
    calculator.write(out, titles)
    values = {
        "figure": style.svg(figures.verdicts(verdicts), "verdicts", figures.verdicts.__doc__),
        "headline": captions.verdicts(verdicts),
        "documents": ledger.by_document(verdicts),
        "bases": ledger.by_basis(verdicts),
        "meanings": words.WHAT_A_BASIS_IS,
        "verdicts": VERDICTS,
        "folders": [without_paths(str(folder)) for folder in runs.folders],
        "problems": without_paths([*notebook.set_aside(runs), *problems]),
    }
    values |= {"failed": failed, "runs": rows, "built_utc": store.now_utc()}
    write_page(out / "index.html", "index.html", titles=titles, here="index", **values)
    for name in ("site.css", "site.js", *calculator.SCRIPTS):
        shutil.copyfile(TEMPLATES / name, out / name)


def _cells(path: Path) -> list[nbformat.NotebookNode]:
    """What was executed, without the cells that papermill adds where one failed: the error is in its place."""
    added = "papermill-error-cell-tag"
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if added not in cell.metadata.get("tags", [])]
