"""Runs in, a small static site out: every notebook executed, every run a page, the verdicts first. No network."""

import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from study import collection, digest, pages, tables, verdicts
from study.arms import ROOT
from study.collection import Collection, Run
from study.record import Stop, now_utc

NOTEBOOKS = ("claims", "compare", "replicate_000", "replicate_001", "replicate_002", "replicate_003", "machines")
KERNEL_TRIES = 3
RAW = ("record.json", "log.txt", "output.txt", "steps.jsonl")  # what of a run folder goes into the site as it is


def command(runs: tuple[Path, ...], out: Path, readme: Path | None) -> int:
    """What `study report` does. The exit code says whether every notebook came to its end."""
    failed = build(list(runs), out, say)
    if readme:
        digest.renew(readme)
    return 1 if failed else 0


def build(runs: list[Path], out: Path, say: Callable[[str], None]) -> list[str]:
    """Execute the notebooks, as many at a time as there are cores, and write the site. Gives those that failed."""
    started, found = time.monotonic(), collection.load(runs)
    if out.exists() and any(out.iterdir()) and not (out / "index.html").exists():
        raise Stop(f"{out} is no report and is not empty", "give another --out")
    shutil.rmtree(out, ignore_errors=True)
    (out / "notebooks").mkdir(parents=True)
    verdicts.prepare()
    say(f"{len(found.runs)} runs, {len(found.problems)} set aside; executing {len(NOTEBOOKS)} notebooks")
    failed = execute(runs, out / "notebooks", say)
    slugs = run_pages(found, out)
    parts = {name: pages.notebook(out, name) for name in NOTEBOOKS if (out / "notebooks" / f"{name}.ipynb").exists()}
    titles = {name: part.title for name, part in parts.items()}
    for name, part in parts.items():
        pages.write(out / f"{name}.html", "notebook.html", page=part, titles=titles, here=name, failed=name in failed)
    judged = pages.data(out, "claims", "claims")  # judged once, in the notebook
    pages.write(
        out / "index.html", "index.html", titles=titles, here="index", failed=failed, problems=found.problems,
        documents=verdicts.by_document(judged), claims=judged, made=now_utc(), folders=[str(path) for path in runs],
        figure=pages.figure(out, "claims", "verdicts"),
        runs=[row | {"slug": slugs[run]} for row, run in zip(tables.runs(found), found.runs, strict=True)],
    )  # fmt: skip
    pages.assets(out)
    say(f"{out / 'index.html'}  ({time.monotonic() - started:.0f} s)")
    return failed


def execute(runs: list[Path], into: Path, say: Callable[[str], None]) -> list[str]:
    """Run every notebook in a kernel of its own. What a failed one came to is kept, with its error."""
    failed, folders = [], ",".join(str(path) for path in runs)
    # Processes, because each thread that executes a notebook would leave an event loop behind.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        paths = {name: (str(ROOT / "notebooks" / f"{name}.ipynb"), str(into / f"{name}.ipynb")) for name in NOTEBOOKS}
        started = {pool.submit(_execute, *pair, folders): name for name, pair in paths.items()}
        for number, done in enumerate(as_completed(started), 1):
            seconds, problem = done.result()
            name = started[done]
            failed += [name] if problem else []
            say(f"[{number}/{len(NOTEBOOKS)}] {name}  {seconds:.1f} s{f'  FAILED: {problem}' if problem else ''}")
    return failed


def _execute(notebook: str, into: str, runs: str) -> tuple[float, str | None]:
    import papermill  # takes two seconds, which nobody else should wait

    started = time.monotonic()
    for _ in range(KERNEL_TRIES):
        problem = None
        try:
            papermill.execute_notebook(
                notebook, into, {"runs": runs}, progress_bar=False, kernel_name="python3",
                extra_arguments=["--IPKernelApp.log_level=50"],  # that a kernel listens is no news
            )  # fmt: skip
        except papermill.PapermillExecutionError as error:
            problem = f"{error.ename}: {error.evalue}"
        except RuntimeError as error:  # it died before it listened: somebody took the port that was chosen for it
            problem = str(error)
            continue
        break
    return time.monotonic() - started, problem


def run_pages(found: Collection, out: Path) -> dict[Run, str]:
    """A page for each run, and its files beside it. Two runs of one name, from two machines, get two pages."""
    slugs: dict[Run, str] = {}
    for run in found.runs:
        taken = sum(other.name == run.name for other in slugs)
        slug = slugs[run] = run.name + f"-{taken + 1}" * bool(taken)
        folder = out / "runs" / slug
        folder.mkdir(parents=True)
        files = [name for name in RAW if (run.folder / name).is_file()]
        for name in files:
            shutil.copyfile(run.folder / name, folder / name)
        text = {name: (run.folder / name).read_text(errors="replace")[-pages.MOST_TEXT :] for name in files}
        pages.write(out / "runs" / f"{slug}.html", "run.html", run=run, files=files, text=text, slug=slug, up="../",
                    settings=run.made["requested"] or {}, observed=_flat(run.made["observed"] or {}),
                    error=run.made["error"], titles={}, here="run",
                    record=json.dumps(run.made, indent=1))  # fmt: skip
    return slugs


def _flat(observed: dict, above: str = "") -> dict:
    """What was observed, nested names joined by dots; long lists by their length."""
    flat = {}
    for name, value in observed.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{above}{name}.")
        else:
            flat[above + name] = f"{len(value)} values" if isinstance(value, list) and len(value) > 8 else value
    return flat


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
