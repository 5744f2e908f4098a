"""`study pages`: a report as a static site, for GitHub Pages and for a static Space of the Hugging Face Hub."""

import shutil
from pathlib import Path

import tyro

from study.errors import Stop
from study.io.tables import say
from study.machine import output
from study.publishing import documents
from study.publishing.project import project


def pages(report: tyro.conf.Positional[Path], /, *, into: Path) -> None:
    """Copy a report into a folder that GitHub Pages and a static Space publish; a Space begins with the calculator.

    Args:
        report: What `study report` wrote, such as reports/build.
        into: The folder to write. Earlier pages in it are replaced.
    """
    head = documents.filled("space")
    if not (report / head["app_file"]).is_file():
        raise Stop(f"{report} has no {head['app_file']}", "make report writes the pages")
    with output.replaced(into) as out:
        shutil.copytree(report, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns(output.MANIFEST))
        (out / ".nojekyll").touch()
        (out / "README.md").write_text(f"---\n{documents.as_yaml(head)}---\n\n{project().abstract}\n")
    say(f"{into}: publish this folder")
