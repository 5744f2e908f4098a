"""Templates to files, and tables for people and for spreadsheets: how a column is headed and a value is written.

Everything that a template shows is escaped: records come from anybody.
"""

import functools
import itertools
import re
from collections.abc import Iterable
from pathlib import Path

import jinja2
import pandas as pd

from study.core.numbers import quantity, short, size
from study.records.keeping import redact
from study.records.runs import Run
from study.report.grouping import records
from study.report.style import conditions

SOFTWARE = ("torch", "deepspeed", "accelerate")
MARKUP = re.compile(r"[\\`<>\[\]|]")  # what begins code, HTML, a link or a column
TEMPLATES = Path(__file__).resolve().parent / "templates"
FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")  # the last four: in East Asian width
# Headings of columns whose names are too short for a reader; CSV files keep the names. Of others, _ is a space.
HEADINGS = {
    "n": "runs",
    "micro_batch": "rows per pass",
    "rows_per_step": "rows per step",
    "accumulation": "passes",
    "step_s": "s per step",
    "median": "s per step",
    "low": "from",
    "high": "to",
    "plainly": "in words",
    "against": "compared with",
    "message": "error message",
    "vs_a": "over A's",
    "mbit": "Mbit/s",
}
UNITS = {"_s": " s", "_mb": " MB", "_gb": " GB", "_bytes": ""}  # at the end of a name


# --- templates -----------------------------------------------------------------------------------------------------


def write_page(path: Path, template: str, **values) -> None:
    """Fill in a template."""
    # Half of a surrogate pair, as JSON may hold, cannot be encoded.
    path.write_text(_templates().get_template(template).render(values), errors="replace")


@functools.cache
def _templates() -> jinja2.Environment:
    """Return one environment for all pages: it keeps the templates that it has compiled."""
    loader = jinja2.FileSystemLoader(TEMPLATES)
    templates = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    templates.policies["json.dumps_kwargs"] = {}  # arms and parts keep their order
    templates.filters |= {
        "short": short,
        "size": size,
        "prose": prose,
        "inline": inline,
        "conditions": conditions,
        "redact": redact,
    }
    templates.filters |= {"to_claims": to_claims, "heading": heading, "cell": cell}
    return templates


def to_claims(table: str, claims: set[str]) -> str:
    """Return a table of a notebook in which the names of claims lead to their places."""
    page = '<td><a href="claims.html#{0}">{0}</a></td>'
    return re.sub(r"<td>([\w-]+)</td>", lambda cell: page.format(cell[1]) if cell[1] in claims else cell[0], table)


def inline(text: str) -> str:
    """Return Markdown within a sentence, such as **bold** words, as HTML without a paragraph around it."""
    return prose(text).strip().removeprefix("<p>").removesuffix("</p>")


def prose(text: str) -> str:
    """Return Markdown as HTML. Records come from anybody: HTML is shown as text, and nothing leads out of the site."""
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    class Renderer(IPythonRenderer):
        def link(self, text: str, url: str, title: str | None = None) -> str:
            return text if ":" in url or url.startswith("//") else super().link(text, url, title)

        def image(self, text: str, url: str, title: str | None = None) -> str:
            return text

    page = MarkdownWithMath(renderer=Renderer(escape=True, anchor_link_text="")).render(text)
    page = re.sub(r'<a class="anchor-link"[^>]*/>', "", page)  # not closed in HTML: it would hold the rest
    page = page.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
    return re.sub(r"(?<![\w.-])(\d[\d.]*e-\d+)(?![\w.-])", r'<span class="whole">\1</span>', page)


def literal(text: str) -> str:
    """Return a text of a record, escaped for Markdown: it makes no link, HTML, column or line."""
    return MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def machine(run: Run) -> str:
    """Return the machine and the software of a run, in one line."""
    software = run.record.software
    versions = ", ".join(f"{name} {software[name]}" for name in SOFTWARE if software.get(name))
    return literal(f"{run.record.machine_line}; {versions}")


# --- tables --------------------------------------------------------------------------------------------------------


def heading(name: str) -> str:
    """Return the words above a column."""
    if name in HEADINGS:
        return HEADINGS[name]
    for suffix, unit in UNITS.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix).replace("_", " ") + unit
    return name.replace("_", " ")


def cell(value: object, name: str) -> str:
    """Return a value as a table shows it: four significant digits, sizes with a unit, a dash for what is not known."""
    if value is None or value == "":
        return short(None)
    if name == "group":
        return conditions(str(value))
    return quantity(value, "bytes") if name.endswith("_bytes") else short(value)


def as_html(rows: pd.DataFrame, columns: Iterable[str] = ()) -> str:
    """Return a table for people. Where rows of one group follow each other, the group is a heading above them."""
    names = [str(name) for name in (list(columns) or rows)]
    every = records(rows)
    together = [(group, list(mine)) for group, mine in itertools.groupby(every, lambda row: row.get("group"))]
    if "group" in names and 2 * len(together) <= len(every):
        names.remove("group")
    else:
        together = [(None, every)]
    return _templates().get_template("table.html").render(names=names, groups=together)


def write_csv(path: Path, rows: pd.DataFrame) -> None:
    """Write a table as CSV, every digit of it."""
    texts = rows.select_dtypes(exclude="number").astype(object).map(no_formula)
    rows.assign(**{str(name): texts[name] for name in texts}).rename(columns=no_formula).to_csv(path, index=False)


def no_formula(value: object) -> object:
    """Return a value for a CSV file that no spreadsheet takes for a formula: those begin with one of FORMULA."""
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
