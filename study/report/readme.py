"""The parts of a README that are generated from records, between two markers that name the runs.

    <!-- answers:start reports/cpu-2core/runs -->       a picture, five findings, how many claims got which verdict
    <!-- answers:end -->

`verdicts` in place of `answers` gives the tables of verdicts. `study report --runs FOLDER --readme README.md` renews
these parts, and a test fails if the text and the records disagree.
"""

import re
from pathlib import Path

from study.errors import Stop
from study.ledger import ledger
from study.ledger.verdict import VERDICTS
from study.ledger.words import WHAT_A_BASIS_IS
from study.records import runs as records
from study.records import store
from study.records.runs import Run
from study.report import headline, style
from study.report.topics import claims
from study.report.topics.claims import Judged

MARKED = re.compile(r"(<!-- (verdicts|answers):start (\S+) -->\n)(.*?)(<!-- \2:end -->)", re.DOTALL)
MARKUP = re.compile(r"[\\`<>\[\]|]")  # what begins code, HTML, a link or a column
PICTURE, CAPTION = "headline.svg", "Compared with DDP: the same losses, less memory, more traffic"
SOFTWARE = ("torch", "deepspeed", "accelerate")


def check(readme: Path) -> str:
    """The text of a file that has a marked part. Any other file is a Stop."""
    try:
        text = readme.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Stop(f"{readme} cannot be read ({error})", "give a text file as --readme") from None
    if not MARKED.search(text):
        raise Stop(f"{readme} has no marked part", "add <!-- verdicts:start FOLDER --> and <!-- verdicts:end -->")
    return text


def judge(text: str, known: dict[str, Judged] | None = None) -> dict[str, Judged]:
    """Return the runs and verdicts of every folder that the marked parts of a text name; `known` are judged already."""
    by_folder = dict(known or {})
    for folder in dict.fromkeys(marked[3] for marked in MARKED.finditer(text)):
        if folder not in by_folder:
            runs = records.load(folder)
            by_folder[folder] = Judged(runs, claims.judge(runs))
    return by_folder


def renew(readme: Path, known: dict[str, Judged] | None = None) -> None:
    """Renew the marked parts of a file, and the figure beside the runs that each names."""
    text = check(readme)
    by_folder = judge(text, known)
    store.replace(readme, renewed(text, by_folder))
    for folder, judged in by_folder.items():
        (Path(folder).parent / "verdicts.svg").write_text(drawn(judged))
        if answer := headline.of(judged.runs):
            (Path(folder).parent / PICTURE).write_text(style.svg(headline.picture(answer), CAPTION))


def renewed(text: str, by_folder: dict[str, Judged]) -> str:
    """The text, with every marked part generated again."""
    parts = {"verdicts": verdicts, "answers": answers}
    return MARKED.sub(lambda marked: f"{marked[1]}{parts[marked[2]](marked[3], by_folder[marked[3]])}{marked[5]}", text)


def drawn(judged: Judged) -> str:
    """The verdicts by document, as a figure."""
    return style.svg(claims.figure(judged.rows), "Verdicts by document")


def answers(folder: str, judged: Judged) -> str:
    """The picture and the findings, as Markdown. Where records lack what the picture shows, the verdicts alone."""
    lines = [claims.sentence(judged.rows)]
    if answer := headline.of(judged.runs):
        findings = enumerate(headline.findings(answer, judged.rows), 1)
        picture = f"![{CAPTION}]({Path(folder).parent / PICTURE})"
        lines = [picture, "", *(f"{number}. {text}" for number, text in findings), "", *lines]
    return "\n".join(lines) + "\n"


def verdicts(folder: str, judged: Judged) -> str:
    """The verdicts by document, how many runs they rest on, and the machines, as Markdown."""
    runs, rows = judged.runs, judged.rows
    documents = [{name: count for name, count in row.items() if name != "title"} for row in ledger.by_document(rows)]
    bases = [
        {"rests on": f"{row['basis']}: {WHAT_A_BASIS_IS[row['basis']]}"} | {name: row[name] for name in VERDICTS}
        for row in ledger.by_basis(rows)
    ]
    lines = [claims.sentence(rows), "", *table(documents), "", *table(bases), ""]
    lines += [f"From {len(runs)} runs below `{folder}`, on:", ""]
    lines += [f"- {place}" for place in dict.fromkeys(map(machine, runs.done))]
    return "\n".join(lines).strip() + "\n"


def table(rows: list[dict]) -> list[str]:
    """Rows as a table in Markdown."""
    cells = (
        [list(rows[0]), ["---"] * len(rows[0]), *([str(each) for each in row.values()] for row in rows)] if rows else []
    )
    return [f"| {' | '.join(map(literal, line))} |" for line in cells]


def literal(text: str) -> str:
    """A text of a record, escaped for Markdown: it makes no link, HTML, column or line."""
    return MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def machine(run: Run) -> str:
    """The machine and the software of a run, in one line."""
    software = run.record.software
    versions = ", ".join(f"{name} {software[name]}" for name in SOFTWARE if software.get(name))
    return literal(f"{run.record.machine_line}; {versions}")
