"""Templates to files. Everything that a template shows is escaped: records come from anybody."""

import functools
import re
from pathlib import Path

import jinja2

from study.io.numbers import short, size

TEMPLATES = Path(__file__).resolve().parent / "templates"


def write_page(path: Path, template: str, **values) -> None:
    """Fill a template in. `up` leads to the site's root from where the page is."""
    text = _templates().get_template(template).render(**{"up": ""} | values)
    path.write_text(text, errors="replace")  # half of a surrogate pair, as JSON may hold, cannot be encoded


@functools.cache
def _templates() -> jinja2.Environment:
    """One environment for all pages: it keeps the templates that it has compiled."""
    loader = jinja2.FileSystemLoader(TEMPLATES)
    templates = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    templates.policies["json.dumps_kwargs"] = {}  # arms and parts keep their order
    templates.filters |= {"short": short, "size": size, "prose": prose, "inline": inline, "to_claims": to_claims}
    return templates


def to_claims(table: str, claims: set[str]) -> str:
    """A table of a notebook in which the names of claims lead to their pages."""
    page = '<td><a href="claims/{0}.html">{0}</a></td>'
    return re.sub(r"<td>([\w-]+)</td>", lambda cell: page.format(cell[1]) if cell[1] in claims else cell[0], table)


def inline(text: str) -> str:
    """Markdown within a sentence, such as **bold** words, as HTML without a paragraph around it."""
    return prose(text).strip().removeprefix("<p>").removesuffix("</p>")


def prose(text: str) -> str:
    """Markdown as HTML. Records come from anybody: HTML is shown as text, and nothing leads out of the site."""
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    class Renderer(IPythonRenderer):
        def link(self, text: str, url: str, title: str | None = None) -> str:
            return text if ":" in url or url.startswith("//") else super().link(text, url, title)

        def image(self, text: str, url: str, title: str | None = None) -> str:
            return text

    page = MarkdownWithMath(renderer=Renderer(escape=True, anchor_link_text="")).render(text)
    page = re.sub(r'<a class="anchor-link"[^>]*/>', "", page)  # not closed in HTML: it would hold the rest
    return re.sub(r"(?<![\w.-])(\d[\d.]*e-\d+)(?![\w.-])", r'<span class="whole">\1</span>', page)
