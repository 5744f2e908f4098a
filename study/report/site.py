"""Write a report: a small static site with every notebook executed, a page for each run and claim, verdicts first.

Templates, the style sheet and the script are in `templates/`. Nothing is loaded from a network.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat

from study.errors import Stop
from study.io.files import safe_join
from study.io.tables import say
from study.ledger import ledger, words
from study.ledger.verdict import VERDICTS
from study.machine import output
from study.records import runs as records
from study.records import store
from study.records.privacy import redact
from study.records.runs import Runs
from study.report import (
    answers,
    calculator,
    claim_pages,
    notebook,
    run_pages,
    style,
)
from study.report import readme as digest
from study.report.answers import Answer
from study.report.execution import executing
from study.report.templating import TEMPLATES, as_html, write_csv, write_page, write_zipped
from study.report.topics import claims, conformance
from study.report.topics.claims import Judged
from study.spec.arms import ROOT

REPLICATIONS = ("replicate_000", "replicate_001", "replicate_002", "replicate_003")
NOTEBOOKS = (
    "stages",
    "claims",
    "compare",
    "fsdp2",
    "optimizers",
    "resume",
    *REPLICATIONS,
    "machines",
    "predictions",
    "killed",
)
UNLISTED = ("kind", "peak_of", "task", "eval_loss", "accumulation", "seed")  # a run's page has them, and a desk no room
SCOREBOARD = ("-m", "study.cli", "scoreboard", "--json", "--no-tracker", "-")


def command(runs: tuple[Path, ...], out: Path, readme: Path | None) -> int:
    """Write the site and renew a README. Return 1 if a notebook failed."""
    if readme:
        digest.check(readme)  # before the minutes that a build takes
    judged, failed = build(list(runs), out)
    if readme:
        digest.renew(readme, {str(folder): judged for folder in runs if len(runs) == 1})
    return 1 if failed else 0


def build(folders: list[Path], out: Path, say: Callable[[str], None] = say) -> tuple[Judged, list[str]]:
    """Write the site. Return what was judged, and the names of notebooks that failed.

    Runs are loaded once and claims judged once, here; the notebooks read the verdicts from a file.
    """
    started = time.monotonic()
    runs = records.load_to_share(folders)
    check(runs, out)
    with output.replaced(out) as site:
        for name in ("notebooks", "data", "run"):
            (site / name).mkdir()
        with ThreadPoolExecutor(1) as pool:
            scores = pool.submit(score, runs, say)
            judged = claims.judge(runs)
        for name, rows in ((notebook.VERDICTS, judged.rows), (notebook.SCORES, scores.result())):
            (site / "data" / name).write_text(json.dumps(redact(rows), separators=(",", ":")) + "\n")
        say(f"{len(runs)} runs, {len(runs.set_aside)} set aside; executing {len(NOTEBOOKS)} notebooks")
        paths = [ROOT / "notebooks" / f"{name}.ipynb" for name in NOTEBOOKS]
        parameters = {"runs": ",".join(map(str, folders)), "data": str(site / "data")}
        with executing(paths, site / "notebooks", parameters, say) as executed:
            pages, problems = write_run_and_claim_pages(judged, site, titles_of(paths))
            answered = [(each, _draw(each, site)) for each in answers.answers(runs)]
            failed = executed.result()
        write_notebook_pages(site, judged, failed)
        write_index(site, judged, failed, answered, pages, [*notebook.set_aside(runs), *judged.notes, *problems])
        for path in [*(site / "data").iterdir()]:
            if path.suffix == ".csv":
                write_zipped(path.with_name(f"{path.name}.zip"), path.name, path.read_bytes())
            path.unlink()  # the pages have the figures, and the tables of the page `claims` have all of the JSON
    say(f"{out / 'index.html'}  ({time.monotonic() - started:.0f} s)")
    return judged, failed


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
    """Return the cells of the scoreboard, from a process of its own, because it needs DeepSpeed; none if that fails."""
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


# --- pages -----------------------------------------------------------------------------------------------------------


def _draw(answer: Answer, out: Path) -> str:
    """Return the figure of an answer as SVG. Write its rows as a file."""
    if answer.figure is None:
        return ""
    image = style.svg(answer.figure, f"index-{answer.name}", f"{answer.sentence} {answer.more}".replace("**", ""))
    write_csv(safe_join(out / "data", f"index-{answer.name}.csv"), answer.rows)
    return image


def titles_of(paths: list[Path]) -> dict[str, str]:
    """Return the titles of notebooks by their names."""
    first = {path.stem: nbformat.read(path, 4).cells[0].source for path in paths if path.exists()}
    return {name: source.partition("\n")[0].removeprefix("# ") for name, source in first.items()}


def write_run_and_claim_pages(judged: Judged, site: Path, titles: dict[str, str]) -> tuple[list[dict], list[str]]:
    """Write the pages of runs and claims. Return those of runs, and a sentence for each run that has none."""
    slugs = run_pages.slugs(judged.runs)
    pages, problems = run_pages.write(judged.runs, slugs, judged.verdicts, site / "run", titles)
    with_page = {page["slug"] for page in pages}
    claim_pages.write(judged.verdicts, {run: slug for run, slug in slugs.items() if slug in with_page}, site, titles)
    calculator.write(site, titles)
    write_conformance(site, titles)
    return pages, problems


def write_conformance(site: Path, titles: dict[str, str]) -> None:
    """Write the pages of the conformance suite, from its committed results."""
    rows = conformance.table()
    how = "An adapter trains tiny models its own way, and must give what one process gives. `study conform` runs it."
    why = "`study/conform/explained.toml` says why."
    pages = {
        "conformance": (
            "Conformance",
            conformance.sentence(rows),
            [
                ("Adapters", how, conformance.counts(rows)),
                ("Properties that do not hold everywhere", why, conformance.differing(rows)),
            ],
        ),
        "releases": (
            "Over releases",
            f"{conformance.headline()} {conformance.power()}",
            [
                ("Bugs before and after their fix", "Both releases were held to one property.", conformance.bugs()),
                ("Planted faults", conformance.PLANTED, conformance.faults()),
            ],
        ),
    }
    for name, (title, lead, sections) in pages.items():
        tables = [(heading, text, as_html(table)) for heading, text, table in sections if len(table)]
        values = {"title": title, "lead": lead, "sections": tables, "kept": conformance.over_releases()}
        template = "releases.html" if name == "releases" else "tables.html"
        write_page(site / f"{name}.html", template, titles=titles, here=name, **values)


def write_notebook_pages(site: Path, judged: Judged, failed: list[str]) -> None:
    """Write a page for each executed notebook."""
    paths = sorted((site / "notebooks").glob("*.ipynb"), key=lambda path: NOTEBOOKS.index(path.stem))
    titles = titles_of(paths)
    known = {each.claim.id for each in judged.verdicts}
    for path in paths:
        cells = nbformat.read(path, 4).cells
        texts = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        headings = re.findall(r"^## (.*)$", texts.replace("`", ""), re.MULTILINE)
        about = {"title": titles[path.stem], "headings": headings, "failed": path.stem in failed, "claims": known}
        write_page(site / f"{path.stem}.html", "notebook.html", cells=cells, titles=titles, here=path.stem, **about)
        _without_outputs(path)


def _without_outputs(path: Path) -> None:
    """Leave the cells of an executed notebook: its page has what they show, and twice would be a third of a report."""
    book = nbformat.read(path, 4)
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    book.cells[0].source += f"\n\nWhat it shows is on [its page](../{path.stem}.html), until it is executed again."
    nbformat.write(book, path)


def write_index(
    site: Path,
    judged: Judged,
    failed: list[str],
    answered: list[tuple[Answer, str]],
    pages: list[dict],
    problems: list[str],
) -> None:
    """Write the first page: the answers, the verdicts, every run."""
    verdicts = judged.rows
    present = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    values = {
        "answers": answered,
        "present": present,
        "advice": answers.advice()[0],
        "findings": answers.beyond_papers(verdicts),
        "central": as_html(claims.headline(judged.table), []),
        "known": {each.claim.id for each in judged.verdicts},
        "headline": claims.sentence(judged.table),
        "documents": ledger.by_document(verdicts),
        "bases": ledger.by_basis(verdicts),
        "meanings": words.WHAT_A_BASIS_IS,
        "verdicts": VERDICTS,
        "folders": [redact(str(folder)) for folder in judged.runs.folders],
        "problems": redact(problems),
        "failed": failed,
        "runs": pages,
        "checks": list(dict.fromkeys(check for page in pages for check in page["checks"])),
        "columns": [name for name in pages[0]["row"] if name not in UNLISTED] if pages else [],
        "built_utc": store.now_utc(),
    }
    titles = titles_of([site / "notebooks" / f"{name}.ipynb" for name in NOTEBOOKS])
    write_page(site / "index.html", "index.html", titles=titles, here="index", **values)
    for name in ("site.css", "site.js", calculator.SCRIPT):
        shutil.copyfile(TEMPLATES / name, site / name)
