"""Claims and their verdicts."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from matplotlib.figure import Figure

from study.io.words import joined
from study.ledger import ledger
from study.ledger.files import read_all
from study.ledger.ledger import Verdict, bases, counted
from study.ledger.verdict import MEASURED, OWN, PREDICTED, READ, SUPPORTED, TRIED, VERDICTS, VIRTUAL
from study.ledger.words import plainly
from study.records.groups import by
from study.records.runs import Runs
from study.report import style
from study.report.claim_pages import label
from study.report.style import FAINT, INK

COUNTED = ("claim", "document", "verdict", "basis", "premise", "contradiction")
OTHER_BASES = {VIRTUAL: "virtual ranks", TRIED: "trying the libraries", PREDICTED: "formulas", READ: "reading sources"}


@dataclass(frozen=True)
class Judged:
    """Runs, and the verdicts over them."""

    runs: Runs
    verdicts: list[Verdict]

    @cached_property
    def rows(self) -> list[dict]:
        """The verdicts as rows."""
        return [row(each) for each in self.verdicts]


def judge(runs: Runs, document: str | None = None) -> list[Verdict]:
    """Judge the claims of one document, or of all, by these runs."""
    return ledger.judge_all([claim for claim in read_all() if document in (None, claim.document)], runs)


def row(verdict: Verdict) -> dict:
    """A verdict as a row."""
    return ledger.row(verdict) | {"plainly": plainly(verdict)}


def table(runs: Runs, document: str | None = None) -> list[dict]:
    """The claims of one document, or of all, with their verdicts over these runs."""
    return [row(each) for each in judge(runs, document)]


def tallied(verdicts: list[dict]) -> list[dict]:
    """Verdicts with only the columns that a figure needs to count them."""
    return [{name: row[name] for name in COUNTED} for row in verdicts]


def sentence(rows: list[dict]) -> str:
    """How many claims got which verdict, and what the verdicts rest on."""
    mine, resting = counted(rows), bases(rows)
    if not mine:
        return ""
    own = Counter(row["verdict"] for row in mine if row["basis"] == OWN)
    counts = Counter(row["verdict"] for row in mine if row["basis"] != OWN)
    text = f"Of {sum(counts.values())} claims about the world: {_counts(counts, VERDICTS)}."
    others = [f"{OTHER_BASES[basis]} ({resting[basis]})" for basis in OTHER_BASES if resting[basis]]
    text += f" The verdicts rest on {joined([f'**real runs ({resting[MEASURED]})**', *others])}."
    if own:
        text += f" {sum(own.values())} more were compared with their document's own numbers: {_counts(own, VERDICTS)}."
    premises = sum(row["premise"] for row in rows)
    ours = "premises of our own are" if premises > 1 else "premise of our own is"
    return text + (f" {premises} {ours} not counted." if premises else "")


def _counts(counts: Counter, names: Iterable[str]) -> str:
    return ", ".join(f"**{counts[name]} {name}**" for name in names if counts[name])


@style.figure
def figure(rows: list[dict]) -> Figure:
    """Claims of each document by verdict: those about the world, and comparisons of its own numbers with each other."""
    documents = by(counted(rows), "document")
    height, most = 0.6 + 0.36 * len(documents), max(map(len, documents.values()))
    drawing, (above, below) = style.panels([height, height], sharex=True)
    for ax, is_own in ((above, False), (below, True)):
        for place, mine in enumerate(documents.values()):
            left, counts = 0, Counter(row["verdict"] for row in mine if (row["basis"] == OWN) == is_own)
            for verdict, tone in style.VERDICTS.items():
                if not (count := counts[verdict]):
                    continue
                ax.barh(place, count, 0.72, left, color=tone, edgecolor=FAINT, linewidth=0.8)
                if count >= 0.03 * most:
                    tone_of_text = "white" if verdict == SUPPORTED else INK  # on each the one with more contrast
                    ax.text(left + count / 2, place, count, va="center", ha="center", color=tone_of_text)
                left += count
        style.name_bars(ax, [label(document) for (document,) in documents])
    above.set_title("Claims about the world")
    below.set_title("The document's own numbers compared with each other")
    below.set_xlabel("number of claims")
    text = "A contradiction counts once, even if several claims contain it. Our own premises do not count."
    return style.finished(drawing, style.patches(style.VERDICTS), text)
