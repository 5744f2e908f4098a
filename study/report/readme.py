"""The parts of a README that are generated from records, between two markers that name the runs.

    <!-- answers:start reports/cpu-2core/runs -->       a picture, the answers, how many claims hold
    <!-- answers:end -->

`central` in place of `answers` gives the central claims, and `verdicts` the tables of verdicts. `study report --runs
FOLDER --readme README.md` renews these parts, and a test fails if the text and the records disagree.
"""

import re
from pathlib import Path

import pandas as pd

from study.core import files
from study.core.errors import Stop
from study.ledger import texts
from study.records import runs as records
from study.records.runs import Runs
from study.report import answer_figures, answers, side_by_side, style
from study.report.templating import literal, machine
from study.report.topics import claims

MARKED = re.compile(r"(<!-- (verdicts|answers|central):start (\S+) -->\n)(.*?)(<!-- \2:end -->)", re.DOTALL)
ADVISE = f"study advise --model {side_by_side.ADVISED} --gpus 8 --gpu H100"
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


def loaded(text: str, known: dict[str, Runs] | None = None) -> dict[str, Runs]:
    """Return the runs of every folder that the marked parts of a text name; `known` are read already."""
    by_folder = dict(known or {})
    for folder in dict.fromkeys(marked[3] for marked in MARKED.finditer(text)):
        if folder not in by_folder:
            by_folder[folder] = records.load(folder)
    return by_folder


def renew(readme: Path, known: dict[str, Runs] | None = None) -> None:
    """Renew the marked parts of a file, and the figures beside the runs that each names."""
    text = check(readme)
    by_folder = loaded(text, known)
    files.write_below(readme.parent, readme.name, renewed(text, by_folder).encode())
    for folder, runs in by_folder.items():
        if image := picture(runs):
            (Path(folder).parent / PICTURE).write_text(image)


def picture(runs: Runs) -> str:
    """Return the README's picture as SVG; empty if the runs lack something that it shows."""
    answered = answers.answers(runs)
    if not _has_picture(answered):
        return ""
    losses, memory, _, traffic = answered
    memory_rows = memory.rows[memory.rows["model"] == memory.rows["model"].iloc[0]]
    return style.svg(answer_figures.picture(losses.rows, memory_rows, traffic.rows), CAPTION)


def _has_picture(answered: list[answers.Answer]) -> bool:
    losses, memory, _, traffic = answered
    return bool(losses.figure and traffic.figure and answers.VIRTUAL in memory.bases)


def renewed(text: str, by_folder: dict[str, Runs]) -> str:
    """Return the text with every marked part generated again."""
    parts = {"verdicts": verdict_tables, "answers": findings, "central": central}
    return MARKED.sub(lambda marked: f"{marked[1]}{parts[marked[2]](marked[3], by_folder[marked[3]])}{marked[5]}", text)


def findings(folder: str, runs: Runs) -> str:
    """Return the picture, the answers, each with its basis, and the findings as Markdown."""
    answered = answers.answers(runs)
    lines = [f"![{CAPTION}]({Path(folder).parent / PICTURE})", ""] if _has_picture(answered) else []
    shown = [each for each in answered if each.figure]
    lines += [f"- {each.question} {each.sentence} ({each.bases[0]})" for each in shown]
    lines += [f"- {text} (`study claims {name}`)" for name, text in answers.BEYOND_PAPERS.items()]
    lines += ["", texts.in_words(texts.claims()), "", f"**Which arm for my model?** `{ADVISE}` (predicted)", ""]
    lines += [f"> {line}\\" for line in answers.advice()]
    return "\n".join(lines).strip("\n\\") + "\n"


def central(_: str, runs: Runs) -> str:
    """Return the claim that each text stands for most, as Markdown."""
    return "\n".join(markdown(claims.headline().rename(columns=str.capitalize))) + "\n"


def verdict_tables(folder: str, runs: Runs) -> str:
    """Return the verdicts by document, the runs and the machines, as Markdown."""
    lines = [texts.in_words(texts.claims()), "", *markdown(pd.DataFrame(texts.by_document())), ""]
    lines += [f"From {len(runs)} runs below `{folder}`, on:", ""]
    lines += [f"- {place}" for place in dict.fromkeys(map(machine, runs.done))]
    return "\n".join(lines).strip() + "\n"


def markdown(rows: pd.DataFrame) -> list[str]:
    """Return rows as a table in Markdown."""
    lines = [[*rows], ["---"] * len(rows.columns), *rows.astype(str).to_numpy().tolist()]
    return [f"| {' | '.join(map(literal, line))} |" for line in lines]
