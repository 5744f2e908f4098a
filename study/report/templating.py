"""Templates to files. Everything that a template shows is escaped: records come from anybody."""

import functools
import re
from pathlib import Path

import jinja2

from study.io.numbers import short, size
from study.records.runs import Run
from study.report.tables import heading

SOFTWARE = ("torch", "deepspeed", "accelerate")
MARKUP = re.compile(r"[\\`<>\[\]|]")  # what begins code, HTML, a link or a column
TEMPLATES = Path(__file__).resolve().parent / "templates"


def write_page(path: Path, template: str, **values) -> None:
    """Fill in a template. `up` leads to the site's root from where the page is."""
    text = _templates().get_template(template).render(**{"up": ""} | values)
    path.write_text(text, errors="replace")  # half of a surrogate pair, as JSON may hold, cannot be encoded


@functools.cache
def _templates() -> jinja2.Environment:
    """Return one environment for all pages: it keeps the templates that it has compiled."""
    loader = jinja2.FileSystemLoader(TEMPLATES)
    templates = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    templates.policies["json.dumps_kwargs"] = {}  # arms and parts keep their order
    templates.filters |= {"short": short, "size": size, "prose": prose, "inline": inline}
    templates.filters |= {"to_claims": to_claims, "heading": heading}
    return templates


def to_claims(table: str, claims: set[str]) -> str:
    """Return a table of a notebook in which the names of claims lead to their pages."""
    page = '<td><a href="claims/{0}.html">{0}</a></td>'
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
    return re.sub(r"(?<![\w.-])(\d[\d.]*e-\d+)(?![\w.-])", r'<span class="whole">\1</span>', page)


def literal(text: str) -> str:
    """Return a text of a record, escaped for Markdown: it makes no link, HTML, column or line."""
    return MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def machine(run: Run) -> str:
    """Return the machine and the software of a run, in one line."""
    software = run.record.software
    versions = ", ".join(f"{name} {software[name]}" for name in SOFTWARE if software.get(name))
    return literal(f"{run.record.machine_line}; {versions}")
