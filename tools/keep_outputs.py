# /// script
# dependencies = ["zero-study[report]"]
# ///
"""Runs the notebooks over the kept records, and keeps what they show: make outputs

Whoever opens one on GitHub sees its tables and figures. GitHub shows no SVG and runs no script, so figures are kept as
PNG, and a drawing with sliders as a still picture. A test compares `digest` with the cells, so a cell or an output that
somebody changes is noticed.
"""

import argparse
import hashlib
import json
import re
from datetime import UTC, datetime
from pathlib import Path

import nbformat
import papermill
from nbformat import NotebookNode

from study.core.arms import ROOT
from study.records.keeping import redact
from study.report.site import QUIETLY

RECORDS = "reports/cpu-2core/runs"
RUNS = {"stages": RECORDS, "compare": f"{RECORDS}/smoke", "replicate": RECORDS, "claims": RECORDS}
RUNS |= {"by_hand": "examples/zero_by_hand", "colab": "runs/colab"}
WITHOUT_A_GPU = {"colab": {"scale": "tiny", "source": "."}}  # it trains
ABOUT = (
    "*What the cells show was made on {day} by `make outputs`, which ran this notebook over `{runs}`:\n"
    "on two CPU cores, without a GPU. To run it yourself: `make notebook`.*"
)
MOVES = "A drawing with sliders, which moves in Jupyter (make notebook) and on the page of this notebook (make report)."
AROUND = re.compile(r'<div class="scroll" tabindex="0">|</div><p class="links"></p>')  # of a table, for our own pages


def digest(book: NotebookNode) -> str:
    """Return what changes with each source and each output of a notebook."""
    cells = [[cell.source, cell.outputs] for cell in book.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(cells, sort_keys=True).encode()).hexdigest()[:16]


def as_kept(output: NotebookNode) -> NotebookNode:
    """Return an output in the forms that GitHub shows, with a text for readers that show neither HTML nor pictures."""
    if output.output_type == "stream" and output.name == "stdout":  # of a command
        return nbformat.v4.new_output("display_data", {"text/plain": redact(output.text.replace("\r\n", "\n"))})
    if output.output_type not in ("display_data", "execute_result"):
        raise SystemExit(f"a cell has an output of another kind, which is not kept: {output}")
    forms = output.data
    if "<script" in forms.get("text/html", ""):
        forms = {name: form for name, form in forms.items() if name == "image/png"} | {"text/plain": MOVES}
    elif "image/png" in forms:
        forms = {"image/png": forms["image/png"], "text/plain": forms["text/plain"]}
    elif "text/markdown" in forms:
        forms = {"text/markdown": forms["text/markdown"], "text/plain": forms["text/markdown"]}
    elif "text/html" in forms:
        forms = {**forms, "text/html": AROUND.sub("", forms["text/html"])}
    output.data, output.metadata = forms, {}
    return output


def keep(path: Path, runs: str, day: str) -> None:
    """Run a notebook, and write what its cells show into it."""
    parameters = {"runs": runs} | WITHOUT_A_GPU.get(path.stem, {})
    executed = papermill.execute_notebook(path, None, parameters, cwd=ROOT, coalesce_streams=True, **QUIETLY)
    shown = {cell.id: cell for cell in executed.cells if cell.cell_type == "code"}
    book = nbformat.read(path, 4)
    book.cells = [cell for cell in book.cells if "kept" not in cell.metadata.get("tags", [])]
    for number, cell in enumerate((cell for cell in book.cells if cell.cell_type == "code"), 1):
        cell.outputs = [as_kept(each) for each in shown[cell.id].outputs]
        cell.execution_count = number
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = number
    about, tags = ABOUT.format(day=day, runs=runs), {"tags": ["kept"]}
    book.cells.append(nbformat.v4.new_markdown_cell(about, id=f"{path.stem}-kept", metadata=tags))
    book.metadata["kept"] = digest(book)
    path.write_text(nbformat.writes(book) + "\n")


if __name__ == "__main__":
    today = f"{datetime.now(UTC):%d %B %Y}"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default="all", choices=["all", *RUNS])
    names = parser.parse_args().names
    for name in RUNS if "all" in names else names:
        keep(ROOT / "notebooks" / f"{name}.ipynb", RUNS[name], today)
        print(f"notebooks/{name}.ipynb is kept with its outputs")
