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
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from study.errors import Stop
from study.io.files import below
from study.io.tables import say
from study.ledger import ledger, words
from study.ledger.ledger import Verdict
from study.ledger.verdict import VERDICTS
from study.machine import output
from study.records import runs as records
from study.records import store
from study.records.privacy import without_paths
from study.records.runs import Runs
from study.report import (
    answers,
    calculator,
    claim_pages,
    headline,
    notebook,
    run_pages,
    style,
)
from study.report import readme as digest
from study.report.answers import Answer
from study.report.templating import TEMPLATES, write_page
from study.report.topics import claims
from study.spec.arms import ROOT

REPLICATIONS = ("replicate_000", "replicate_001", "replicate_002", "replicate_003")
NOTEBOOKS = ("claims", "compare", "fsdp2", "network", "optimizers", "resume", *REPLICATIONS, "machines", "predictions")
SCOREBOARD = ("-m", "study.cli", "scoreboard", "--json", "--no-tracker", "-")


def command(runs: tuple[Path, ...], out: Path, readme: Path | None) -> int:
    """What `study report` does. The exit code is 1 if a notebook failed."""
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
    started, runs = time.monotonic(), records.load_to_share(folders)
    check(runs, out)
    with output.replaced(out) as site:
        for name in ("notebooks", "data", "run"):
            (site / name).mkdir()
        judged = claims.judged(runs)
        verdicts = [claims.row(each) for each in judged]
        for name, rows in ((notebook.VERDICTS, verdicts), (notebook.SCORES, score(runs, say))):
            (site / "data" / name).write_text(json.dumps(without_paths(rows), separators=(",", ":")) + "\n")
        say(f"{len(runs)} runs, {len(runs.set_aside)} set aside; executing {len(NOTEBOOKS)} notebooks")
        failed = execute(folders, site / "notebooks", site / "data", say)
        write_pages(runs, judged, site, failed)
    say(f"{out / 'index.html'}  ({time.monotonic() - started:.0f} s)")
    return failed


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


def score(runs: Runs, say: Callable[[str], None]) -> list[dict]:
    """The cells of the scoreboard, from a process of its own, because it needs DeepSpeed; none if that fails."""
    folders = sorted(f"{run.folder}\n" for run in runs.done if run.components)
    if not folders:
        return []
    command = [sys.executable, *SCOREBOARD]
    scored = subprocess.run(command, input="".join(folders), capture_output=True, text=True, check=False)
    if scored.returncode != 0:
        last = (scored.stderr.strip().splitlines() or [f"it ended with {scored.returncode}"])[-1]
        say(f"this report has no scoreboard of memory predictors: {last}")
        return []
    return json.loads(scored.stdout)


def execute(folders: list[Path], into: Path, data: Path | None, say: Callable[[str], None]) -> list[str]:
    """Execute every notebook in a process of its own. A notebook that fails keeps its outputs and its error."""
    failed, parameters = [], {"runs": ",".join(map(str, folders)), "data": str(data or "")}
    # Forked, because a kernel for each would import everything anew, four seconds of it. In their own sessions, because
    # Ctrl-C is for this process, which ends them.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(os.cpu_count(), fork, initializer=os.setsid) as pool, _ended_with_us():
        name_of = {pool.submit(_execute, ROOT / "notebooks", name, into, parameters): name for name in NOTEBOOKS}
        for number, done in enumerate(as_completed(name_of), 1):
            elapsed_s, problem = done.result()
            failed += [name_of[done]] if problem else []
            problem = f"  FAILED: {problem}" if problem else ""
            say(f"[{number}/{len(NOTEBOOKS)}] {name_of[done]}  {elapsed_s:.1f} s{problem}")
    return failed


@contextlib.contextmanager
def _ended_with_us() -> Iterator[None]:
    """If this process is interrupted, the processes of the pool and their children end at once."""
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
    """The seconds that a notebook took, and what it failed with. The parameters become a cell, as papermill's do."""
    started, problem, path = time.monotonic(), None, into / f"{name}.ipynb"
    book = nbformat.read(notebooks / path.name, as_version=4)
    (place,) = (at for at, cell in enumerate(book.cells, 1) if "parameters" in cell.metadata.get("tags", []))
    assignments = "\n".join(f"{key} = {value!r}" for key, value in parameters.items())
    book.cells.insert(place, nbformat.v4.new_code_cell(f"# Parameters\n{assignments}"))
    shell = _shell()
    for number, cell in enumerate((cell for cell in book.cells if cell.cell_type == "code"), 1):
        cell.execution_count = number
        cell.outputs, problem = _run(shell, cell.source)
        if problem:
            break
    store.replace(path, json.dumps(without_paths(book), separators=(",", ":"), ensure_ascii=False) + "\n")
    return time.monotonic() - started, problem


def _shell() -> InteractiveShell:
    """IPython with no names in it, which keeps no history."""
    os.environ.pop("VIRTUAL_ENV", None)  # of another environment, whose packages IPython would add to ours
    shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    shell.reset()
    return shell


def _run(shell: InteractiveShell, source: str) -> tuple[list[nbformat.NotebookNode], str | None]:
    """What a cell shows, and what it failed with."""
    errors: list[nbformat.NotebookNode] = []
    shell._showtraceback = lambda kind, error, lines: errors.append(  # what a kernel does with it
        nbformat.v4.new_output("error", ename=kind.__name__, evalue=str(error), traceback=lines)
    )
    with capture_output() as shown:
        shell.run_cell(source)
    streams = [(name, text) for name, text in (("stdout", shown.stdout), ("stderr", shown.stderr)) if text]
    outputs = [nbformat.v4.new_output("stream", name=name, text=text) for name, text in streams]
    for each in shown.outputs:
        outputs.append(nbformat.v4.new_output("display_data", data=each.data, metadata=each.metadata))
    return outputs + errors, f"{errors[0].ename}: {errors[0].evalue}" if errors else None


# --- pages ---------------------------------------------------------------------------------------------------------


def _answer(answer: Answer, out: Path) -> dict:
    """An answer with its figure as SVG, and links to pages that are there; its rows are written as a file beside it."""
    data = out / "data"
    pages = {link: below(out, *link[0].partition("#")[0].split("/")) for link in answer.links}
    links = [link for link, page in pages.items() if page.exists()]
    image = answer.figure and style.svg(answer.figure, f"index-{answer.name}", answer.sentence.replace("**", ""))
    if image:
        below(data, f"index-{answer.name}.svg").write_text(image)
        notebook.write_csv(below(data, f"index-{answer.name}.csv"), answer.rows)
    return {"about": answer, "image": image, "short": answers.first_sentence(answer.sentence), "links": links}


def write_pages(runs: Runs, judged: list[Verdict], out: Path, failed: list[str]) -> None:
    """All pages, from the runs, the verdicts and the executed notebooks."""
    verdicts, slugs = [claims.row(each) for each in judged], run_pages.slugs(runs)
    paths = {name: out / "notebooks" / f"{name}.ipynb" for name in NOTEBOOKS}
    cells_of = {name: nbformat.read(path, 4).cells for name, path in paths.items() if path.exists()}
    titles = {name: cells[0].source.partition("\n")[0].removeprefix("# ") for name, cells in cells_of.items()}
    known = {each.claim.id for each in judged}
    for name, cells in cells_of.items():
        texts = [cell.source for cell in cells if cell.cell_type == "markdown"]
        headings = re.findall(r"^## (.*)$", "\n".join(texts), re.MULTILINE)
        about = {"title": titles[name], "headings": headings, "failed": name in failed, "claims": known}
        write_page(out / f"{name}.html", "notebook.html", cells=cells, titles=titles, here=name, **about)
    rows, problems = run_pages.write(runs, slugs, judged, out / "run", titles)
    with_page = {run: slug for run, slug in slugs.items() if below(out / "run", f"{slug}.html").exists()}
    claim_pages.write(judged, with_page, out, titles)
    calculator.write(out, titles)
    values = {
        "answers": [_answer(each, out) for each in answers.of(runs)],
        "advice": answers.advice(),
        "findings": headline.beyond_papers(verdicts),
        "figure": style.svg(claims.figure(verdicts), "verdicts", claims.figure.__doc__),
        "headline": claims.sentence(verdicts),
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
