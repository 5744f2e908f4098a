"""The parts of a README that are generated from records, between two markers that name the runs.

    <!-- answers:start reports/cpu-2core/runs -->       a picture, five findings, how many claims got which verdict
    <!-- answers:end -->

`verdicts` in place of `answers` gives the tables of verdicts. `study report --runs FOLDER --readme README.md` renews
these parts, and a test fails if the text and the records disagree.
"""

import re
from pathlib import Path

from study.errors import Stop
from study.io import files
from study.ledger import ledger
from study.ledger.verdict import VERDICTS
from study.ledger.words import WHAT_A_BASIS_IS
from study.records import runs as records
from study.report import answer_figures, answers, style
from study.report.templating import literal, machine
from study.report.topics import claims
from study.report.topics.claims import Judged

MARKED = re.compile(r"(<!-- (verdicts|answers):start (\S+) -->\n)(.*?)(<!-- \2:end -->)", re.DOTALL)
PICTURE, CAPTION = "headline.svg", "Compared with DDP: the same losses, less GPU memory, more traffic"


def check(readme: Path) -> str:
    """Return the text of a file that has a marked part. Raise Stop for any other file."""
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
    files.write_below(readme.parent, readme.name, renewed(text, by_folder).encode())
    for folder, judged in by_folder.items():
        (Path(folder).parent / "verdicts.svg").write_text(drawn(judged))
        if shown := answers.headline(judged.runs):
            (Path(folder).parent / PICTURE).write_text(picture(shown))


def picture(shown: answers.Headline) -> str:
    """Return the README's picture as SVG."""
    return style.svg(answer_figures.picture(shown.losses, shown.memory, shown.traffic), CAPTION)


def renewed(text: str, by_folder: dict[str, Judged]) -> str:
    """Return the text with every marked part generated again."""
    parts = {"verdicts": verdict_tables, "answers": findings}
    return MARKED.sub(lambda marked: f"{marked[1]}{parts[marked[2]](marked[3], by_folder[marked[3]])}{marked[5]}", text)


def drawn(judged: Judged) -> str:
    """Return the verdicts by document as a figure."""
    return style.svg(claims.figure(judged.table), "Verdicts by document")


def findings(folder: str, judged: Judged) -> str:
    """Return the picture and the findings as Markdown. Where records lack what it shows, the verdicts alone."""
    lines = [claims.sentence(judged.table)]
    if shown := answers.headline(judged.runs):
        numbered = enumerate(answers.findings(shown, judged.rows), 1)
        image = f"![{CAPTION}]({Path(folder).parent / PICTURE})"
        lines = [image, "", *(f"{number}. {text}" for number, text in numbered), "", *lines]
    return "\n".join(lines) + "\n"


def verdict_tables(folder: str, judged: Judged) -> str:
    """Return the verdicts by document, how many runs they rest on, and the machines, as Markdown."""
    documents = [
        {name: count for name, count in row.items() if name != "title"} for row in ledger.by_document(judged.rows)
    ]
    bases = []
    for row in ledger.by_basis(judged.rows):
        basis = {"rests on": f"{row['basis']}: {WHAT_A_BASIS_IS[row['basis']]}"}
        bases.append(basis | {name: row[name] for name in VERDICTS})
    lines = [claims.sentence(judged.table), "", *table(documents), "", *table(bases), ""]
    lines += [f"From {len(judged.runs)} runs below `{folder}`, on:", ""]
    lines += [f"- {place}" for place in dict.fromkeys(map(machine, judged.runs.done))]
    return "\n".join(lines).strip() + "\n"


def table(rows: list[dict]) -> list[str]:
    """Return rows as a table in Markdown."""
    if not rows:
        return []
    cells = [list(rows[0]), ["---"] * len(rows[0]), *([str(each) for each in row.values()] for row in rows)]
    return [f"| {' | '.join(map(literal, line))} |" for line in cells]
