"""Write a report: a small static site whose first page has the answers, with the executed notebooks and every claim.

Papermill executes the notebooks and nbconvert turns them into HTML. Templates, the style sheet and the script are in
`templates/`. Nothing is loaded from a network.
"""

import difflib
import functools
import html
import json
import os
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

# Matplotlib looks into IPython wherever it is imported, also while a thread that executes a notebook still imports it.
import IPython  # noqa: F401
import jinja2
import nbformat
import papermill
from nbconvert import HTMLExporter
from papermill.exceptions import PapermillExecutionError

from study.configs.sentences import sentences
from study.core import arms, files, glossary
from study.core.arms import ROOT
from study.core.errors import Stop
from study.core.text import say
from study.known import faults, osv
from study.ledger import texts, verdicts
from study.ledger.search import ENDING, MEANT, OF_VERDICTS
from study.records import runs as records
from study.records import store
from study.records.keeping import redact
from study.records.runs import Runs
from study.report import answers, browser, calculator, contributed, stacks, style
from study.report.answers import PageAnswer
from study.report.tables import as_html, write_csv
from study.report.topics import documents

TEMPLATES = Path(__file__).resolve().parent / "templates"
PAGES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
PAGES.policies["json.dumps_kwargs"] = {}  # arms keep their order
NOTEBOOKS = {"stages": "The stages", "compare": "Compare arms", "replicate": "By document"}  # with what leads to them
BY_HAND = ("one_process", "data_parallel", "stage1", "stage2", "stage3")  # each is the file before plus one idea
BY_HAND_FOLDER = ROOT / "examples" / "zero_by_hand"
IN_NAVIGATION = {  # the doors of README, around them the answers and what was measured
    "": {"index": "Answers"},
    "Understand ZeRO": {"by_hand": "ZeRO by hand", "stages": NOTEBOOKS["stages"]},
    "Your training": {
        "calculator": "Calculator",
        "paste": "Read my log",
        "stack": "Is my stack right?",
        "sentences": "Messages explained",
        "guide": "Guide",
    },
    "Published claims": {"claims": "All claims", "replicate": NOTEBOOKS["replicate"]},
    "Our runs": {"compare": NOTEBOOKS["compare"], "gpu": "On a GPU"},
}
PAGES.globals |= {"doors": IN_NAVIGATION, "paste": False}
ANSWERS = ROOT / "reports" / "answers"
GUIDE = ROOT / "GUIDE.md"
PREVIEW = ROOT / "reports" / "h200" / "preview.png"  # that a link to the pages shows
ADDED = {"injected-parameters", "papermill-error-cell-tag", "kept"}  # cells of papermill, and of `make outputs`
# In the browser: a function that gives for a text what `study diagnose` prints.
READER = """
import contextlib, io
from study.cli.pasted import tell
from study.configs.pasted.answer import answer
def told(text):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        tell(answer(text), False)
    return printed.getvalue()
told
"""
AT_ONCE = 2  # notebooks: a kernel is one process
MANY = 9  # sections, from which on a page lists them at its top
# A kernel warns that it talks over TCP, and says that it was told to end
QUIETLY = {"progress_bar": False, "kernel_name": "python3", "extra_arguments": ["--log-level=CRITICAL"]}


def build(folders: list[Path], out: Path, address: str = "", paste: bool = False) -> list[str]:
    """Write the site, which will stand at an address; with `paste` its page of pasted texts works.

    Return what failed: notebooks, or "records" if none is usable.
    """
    if not BY_HAND_FOLDER.exists():  # a wheel has neither examples nor records nor notebooks
        raise Stop("a report needs the checkout", "clone the repository, and run `make report` in it")
    # Of this build, and on each page: the picture of a link needs the address, and with `paste` there is one page more.
    PAGES.globals |= {"address": address, "paste": paste}
    runs = records.load(folders, every_folder_has_runs=True, to_share=True)
    for folder in folders:
        if folder.resolve().is_relative_to(out.resolve()):
            raise Stop(f"--out {out} contains the runs in {folder}", "choose a folder that does not contain them")
    # The kernel of this environment, not one of its name that the user has installed.
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    with files.replaced(out) as site, tempfile.TemporaryDirectory() as executed, ThreadPoolExecutor(AT_ONCE) as pool:
        (site / "data").mkdir()
        parameters = {"runs": ",".join(map(str, folders)), "data": str(site / "data")}
        # The notebooks run while the other pages are written.
        problems = pool.map(lambda name: execute(name, Path(executed), parameters), NOTEBOOKS)
        # Papers first, and of these the ones that were read.
        in_order = sorted(texts.texts(), key=lambda text: (text.document.startswith("S"), text.is_read_in_part))
        write(
            site,
            "claims",
            texts=in_order,
            ledger=texts,
            verdicts=verdicts,
            meant=MEANT,
            ending=ENDING.pattern,
            of_verdicts=OF_VERDICTS,
            records=documents.kept_records(),
        )
        write(site, "sentences", sentences=sentences())
        (site / "faults.json").write_text(faults.table().model_dump_json(indent=1))
        (site / "osv.json").write_text(json.dumps(osv.records(datetime.now(UTC)), indent=1))
        write(site, "stack", stacks=stacks)
        write(site, "faults", "stack", stacks=stacks, alone=True)
        if paste:
            write(site, "paste", archives=browser.fetch(site / "python"), program=READER)
        answered = _answered(site, "index", answers.answers(runs))
        write(site, "calculator", **calculator.values())
        write_by_hand(site)
        write_answers(site)
        guide = linked(GUIDE.read_text(encoding="utf-8"), GUIDE.parent)
        write_texts(site, "guide", [guide], "Guide", GUIDE.name, "get-a-clone")
        write(site, "contributed", **contributions([]))
        write(site, "gpu", answers=_answered(site, "gpu", answers.of_gpu()))
        shutil.copyfile(PREVIEW, site / PREVIEW.name)
        ended = dict(zip(NOTEBOOKS, problems, strict=True))
        for name, problem in ended.items():
            write_notebook(site, Path(executed) / f"{name}.ipynb", problem)
            say(f"{name} {problem or 'is executed'}")
        failed = list(filter(ended.get, ended))
        # The first page names the notebooks that failed, so it is the last that is written.
        write_index(site, runs, folders, answered, failed)
        link_ids(site)
        copy_files(site)
        for name in ("site.css", "site.js", "calculator.js", "stack.js"):
            shutil.copyfile(TEMPLATES / name, site / name)
    say(str(out / "index.html"))
    return failed if len(runs) else [*failed, "records"]


def write_index(site: Path, runs: Runs, folders: list[Path], answered: dict[str, dict], failed: list[str]) -> None:
    # Records are named by their resolved paths: the page shows them below the folder that was given.
    set_aside = list(runs.set_aside)
    for folder in map(Path.resolve, folders):
        set_aside = [text.replace(f"{folder}/", f"{folder.name}/") for text in set_aside]
    write(
        site,
        "index",
        questions=answers.questions(),
        words=glossary.meanings(),
        arms={name: glossary.of_arms()[name] for name in arms.NAMES},
        answers=answered,
        failed=failed,
        run_count=len(runs),
        ended=[run.record for run in runs if run.record.error],
        problems=redact(set_aside),
        built_utc=store.now_utc(),
    )


def contributions(own: list[Path]) -> dict[str, Any]:
    """Return what fills in the page of contributions: the rows of own folders, then everybody's."""
    everybody = contributed.all_folders()
    titled = [("yours", "Your hour", own), ("everybody", "Everybody's", everybody)]
    tables = [
        ({"id": name, "text": title}, as_html(contributed.table(folders))) for name, title, folders in titled if folders
    ]
    lead = f"Contributions so far: {len(everybody)}."
    return {"tables": tables, "lead": lead}


def write_contributed(out: Path, own: list[Path]) -> Path:
    """Write the page of contributions alone, with these folders' rows first. Return its path."""
    out.mkdir(parents=True, exist_ok=True)
    write(out, "contributed", **contributions(own), alone=True)
    return out / "contributed.html"


def _answered(site: Path, page: str, page_answers: list[PageAnswer]) -> dict[str, dict]:
    """Return the tables and figures of a page as HTML, and write their rows beside it."""
    answered = {}
    for name, command, table, rows, figure in page_answers:
        image = style.svg(figure, f"{page}-{name}", name) if figure else ""
        answered[name] = {"image": image, "table": as_html(table), "command": command}
        write_csv(site / "data" / f"{page}-{name}.csv", rows)
    return answered


def execute(name: str, into: Path, parameters: dict[str, str]) -> str:
    """Execute a notebook. Return what went wrong, which is nothing if it went well."""
    source, path = ROOT / "notebooks" / f"{name}.ipynb", into / f"{name}.ipynb"
    try:
        papermill.execute_notebook(source, path, parameters, **QUIETLY)
    except PapermillExecutionError as error:
        return f"FAILED: {error.ename}: {error.evalue}"
    return ""


def as_code(text: str) -> str:
    """Return HTML in which the words between backticks are code, and paths that are a page."""
    pages = "|".join(map(re.escape, pages_of()))
    return re.sub(rf"`([^`]+)`|(?<![\w/.-])({pages})(?![\w/])", r"<code>\1\2</code>", html.escape(text))


PAGES.filters["as_code"] = as_code


def write(site: Path, name: str, template: str = "", **values) -> None:
    """Fill in a template."""
    page = PAGES.get_template(f"{template or name}.html").render(values | {"here": name})
    # Half of a surrogate pair, as JSON may hold, cannot be encoded.
    (site / f"{name}.html").write_text(page, errors="replace")


@functools.cache
def pages_of() -> dict[str, str]:
    """Return the pages that are made from a file of the repository, by its path."""
    pages = {"GUIDE.md": "guide.html", "examples/zero_by_hand/README.md": "by_hand.html"}
    pages |= {f"reports/answers/{each['name']}.md": f"answer-{each['name']}.html" for each in answers.questions()}
    return pages | {f"notebooks/{name}.ipynb": f"{name}.html" for name in NOTEBOOKS}


def link_ids(site: Path) -> None:
    """Let each id of a claim, a fault or a sentence, and each file that is a page, lead there if it is no link yet."""
    places: dict[str, str] = {}
    pages = pages_of()
    for page in ("sentences.html", "claims.html"):
        places |= dict.fromkeys(re.findall(r'<li id="(\w+[-_][\w-]+)"', (site / page).read_text()), page)
    places.pop("data-parallel", None)  # an ordinary word as well

    def link(found: re.Match) -> str:
        if page := pages.get(found["file"]):
            return f'<a href="{page}">{found[0]}</a>'
        id = found["id"]
        return f'<a href="{places[id]}#{id}">{id}</a>' if id in places else found[0]

    # A file; a tag, or all of an element whose text stays as it is; or else a word.
    whole = r"<(?P<name>a|script|style|svg|title|option|footer)\b.*?</(?P=name)>"
    file = f"<code>(?P<file>{'|'.join(map(re.escape, pages))})</code>"
    parts = re.compile(rf"(?s){file}|{whole}|<[^>]+>|(?<![\w-])(?P<id>\w[\w-]+)")
    for path in site.glob("*.html"):
        if path.stem != "faults":  # which works without the others
            path.write_text(parts.sub(link, path.read_text()))


def copy_files(site: Path) -> None:
    """Copy the scripts to which pages lead."""
    pages = "".join(page.read_text() for page in site.glob("*.html"))
    for name in {*re.findall(r'href="sources/([^"]+)"', pages)}:
        (site / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, site / "sources" / name)


def linked(text: str, folder: Path) -> str:
    """Let the links of a Markdown file lead to pages of the site, and to copies of scripts.

    Those to other files become words and a path in the repository.
    """
    pages = pages_of() | {"README.md": "index.html", "notebooks/by_hand.ipynb": "by_hand.html"}

    def on_the_site(link: re.Match) -> str:
        words, address = link.groups()
        file, _, heading = address.partition("#")
        path = os.path.relpath(folder / file, ROOT)
        if path == "WORDS.md":  # all of them stand in one fold
            return f"[{words}](index.html#words)"
        if path.startswith("reports/answers/claims/"):  # all cards stand on one page
            return f"[{words}](claims.html#{words})"
        if path in pages:
            return f"[{words}]({pages[path]}{heading and '#' + heading})"
        if path.endswith(".py"):
            return f"[{words}](sources/{path})"
        return f"{words} (in the repository)" if Path(path).name in words else f"{words} (`{path}` in the repository)"

    return re.sub(r"(?<!!)\[([^]]+)\]\((?!https://|#)([^)]+)\)", on_the_site, text)


def write_texts(site: Path, name: str, cells: list[str], title: str, source: str, later: str = "") -> None:
    """Write a page of Markdown. A phone folds its sections from the heading `later` on."""
    book = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_markdown_cell, cells)))
    body = as_page(book)
    write(site, name, "notebook", body=body, title=title, source=source, later=later, contents=contents(body))


def write_by_hand(site: Path) -> None:
    """Write the page of ZeRO by hand: its README, and after how to run them its files, of two what they change."""
    code = {name: (BY_HAND_FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in BY_HAND}
    readme = linked((BY_HAND_FOLDER / "README.md").read_text(encoding="utf-8"), BY_HAND_FOLDER)
    readme = re.sub(rf"`({'|'.join(BY_HAND)})\.py`", r"[`\1.py`](#\1.py)", readme)
    lesson, what_they_hold, rest = readme.partition("## What they hold")
    cells = [lesson]
    heading = '<h2 id="{0}.py">{0}.py</h2>'.format
    cells += [f"{heading(name)}\n\n```python\n{code[name]}```" for name in BY_HAND[:3]]
    for before, name in pairwise(BY_HAND[2:]):
        # The idea stands in the file's docstring. A new name in each place that has it is no change.
        _, about, new = code[name].split('"""', 2)
        idea = about.rpartition("\n\n")[2]
        old = code[before].split('"""', 2)[2].replace(before.capitalize(), name.capitalize())
        changed = difflib.unified_diff(old.splitlines(True), new.splitlines(True), n=2)
        lines = "".join(line for line in changed if not line.startswith(("---", "+++")))
        cells.append(f"{heading(name)}\n\n{idea}\nBeside {before}.py:\n\n```diff\n{lines}```")
    cells.append(what_they_hold + rest)
    write_texts(site, "by_hand", cells, "ZeRO by hand", "examples/zero_by_hand", "what-deepspeed-sends")
    shutil.copyfile(BY_HAND_FOLDER / "held.svg", site / "held.svg")


def write_answers(site: Path) -> None:
    """Write the page of each answer, from the text on GitHub."""
    for each in answers.questions():
        text = (ANSWERS / f"{each['name']}.md").read_text(encoding="utf-8")
        text = re.sub(
            r'<picture>.*?<img alt="(.+?)" src="(.+?)".*</picture>', r"![\1](\2)", text
        )  # site.css darkens it
        for image in re.findall(r"\]\((\w+\.svg)\)", text):
            shutil.copyfile(ANSWERS / image, site / image)
        # A phone shows all of a figure, with small words; alone it can be made larger.
        text = re.sub(r"^!\[.+\]\((\w+\.svg)\)$", r"[\g<0>](\1)", linked(text, ANSWERS), flags=re.MULTILINE)
        write_texts(site, f"answer-{each['name']}", [text], each["question"], f"reports/answers/{each['name']}.md")


def write_notebook(site: Path, path: Path, problem: str) -> None:
    """Write the page of an executed notebook: its texts, tables and figures, and the code that it opens."""
    book = nbformat.read(path, 4)
    book.cells = [cell for cell in book.cells if not ADDED & {*cell.metadata.get("tags", [])}]
    for cell in book.cells:
        if cell.cell_type == "markdown":
            cell.source = linked(cell.source, ROOT / "notebooks")
        else:
            cell.metadata["transient"] = {"remove_source": "open" not in cell.metadata.get("tags", [])}
            # An error and a warning name folders of this machine.
            cell.outputs = [each for each in cell.outputs if each.output_type in ("display_data", "execute_result")]
    source = f"notebooks/{path.stem}.ipynb, executed"
    body = as_page(book)
    values = {"body": body, "problem": redact(problem), "title": NOTEBOOKS[path.stem], "source": source}
    write(site, path.stem, "notebook", **values, contents=contents(body))


def contents(body: str) -> list[tuple[str, str]]:
    """Return the sections of a page that has many, by their places."""
    found = re.findall(r'<h2 id="([^"]+)">(.+?)</h2>', body)
    return found if len(found) >= MANY else []


@functools.cache
def _exporter() -> HTMLExporter:
    """Return what turns all notebooks into HTML: a new one compiles its templates again."""
    exporter = HTMLExporter(template_name="basic", exclude_anchor_links=True)
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    return exporter


def as_page(book: nbformat.NotebookNode) -> str:
    """Return HTML without nbconvert's own page around it: style and navigation are ours."""
    body, _ = _exporter().from_notebook_node(book)
    # A long line scrolls, also by keyboard; an empty head of a column is no head.
    body = body.replace("<pre>", '<pre tabindex="0">').replace("<th></th>", "<td></td>")
    body = re.sub(r'(?s)(?<=<pre tabindex="0"><code>).+?(?=</code></pre>)', _by_line, body)
    return redact(re.sub(r"<h(\d)>(.+?)</h\1>", _with_its_name, body))


def _by_line(code: re.Match) -> str:
    """Return code whose lines are elements: on a phone what does not fit of one is indented."""
    return re.sub(r"(?m)^.+$", r"<span>\g<0></span>", code[0])


def _with_its_name(heading: re.Match) -> str:
    """Return a heading as a place, with the name that GitHub gives it."""
    level, words = heading.groups()
    name = re.sub(r"[^\w -]", "", re.sub("<.*?>", "", html.unescape(words)).lower()).replace(" ", "-")
    return f'<h{level} id="{name}">{words}</h{level}>'
