"""Claims and their verdicts."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import pandas as pd
from matplotlib.figure import Figure

from study.io.numbers import number_of
from study.io.words import joined
from study.ledger import ledger, words
from study.ledger.certainty import LEVELS
from study.ledger.files import doubts, read_all
from study.ledger.judging import Verdict
from study.ledger.ledger import bases, counted
from study.ledger.verdict import FAILS, HOLDS, MEASURED, OWN, PREDICTED, READ, SUPPORTED, TRIED, VERDICTS, VIRTUAL
from study.ledger.words import plainly
from study.probes import answers
from study.records import evidence
from study.records.runs import Runs
from study.report import style
from study.report.claim_pages import label
from study.report.grouping import parts, records

COUNTED = ("claim", "document", "verdict", "basis", "premise", "by_construction", "contradiction")
MOST_CENTRAL = 7  # rows of a table that a reader takes in at a glance
RESTS_ON = {MEASURED: "real runs", VIRTUAL: "virtual ranks", TRIED: "the library itself", PREDICTED: "a formula"}
RESTS_ON |= {OWN: "its own numbers", READ: "a source"}
OTHER_BASES = {VIRTUAL: "virtual ranks", TRIED: "trying the libraries", PREDICTED: "formulas", READ: "reading sources"}


@dataclass(frozen=True)
class Judged:
    """Runs, and the verdicts over them."""

    runs: Runs
    verdicts: list[Verdict]
    notes: tuple[str, ...] = ()  # what does not count as evidence, besides what could not be read, and why

    @cached_property
    def rows(self) -> list[dict]:
        """The verdicts as rows."""
        return [
            ledger.row(each) | {"plainly": plainly(each), "suspected": each.claim.suspected} | _central(each)
            for each in self.verdicts
        ]

    @property
    def table(self) -> pd.DataFrame:
        """The verdicts as a table."""
        return pd.DataFrame(self.rows)


def _central(verdict: Verdict) -> dict:
    """Return what a table of central claims shows; `central` is empty for all other claims."""
    summary = words.summary(verdict) if verdict.claim.central else {}
    return {"central": verdict.claim.central or "", "summary": summary}


def judge(runs: Runs, document: str | None = None) -> Judged:
    """Judge the claims of one document, or of all, by these runs."""
    chosen = [claim for claim in read_all() if document in (None, claim.document)]
    gathered = evidence.gather(runs)
    doubtful = (*gathered.set_aside, *answers.set_aside(), *gathered.notes, *doubts(chosen))
    notes = tuple(each for each in doubtful if each not in runs.set_aside)
    return Judged(runs, ledger.judge_all(chosen, gathered), notes)


def tallied(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Return verdicts with only the columns that a figure needs to count them."""
    return verdicts[list(COUNTED)] if len(verdicts) else verdicts


def central(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Return the central claims: what is claimed, what was found, and how certain that is."""
    chosen = verdicts[verdicts["central"] != ""] if len(verdicts) else verdicts
    table = pd.DataFrame([{"claim": row["claim"]} | row["summary"] for row in records(chosen)])
    return table.replace({"rests on": RESTS_ON})


def headline(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Return the central claim of each text that was decided with the most certainty, for at most seven texts.

    A claim that was compared with the text's own numbers only says nothing about the world, so it is left out.
    """
    table = central(verdicts)
    if table.empty:
        return table
    documents = verdicts.set_index("claim")["document"]
    decided = table[(table["certainty"] != "") & (table["rests on"] != RESTS_ON[OWN])]
    order = decided.assign(
        document=documents.reindex(decided["claim"]).to_numpy(),
        level=decided["certainty"].map(LEVELS.index),
        basis=-decided["rests on"].map(list(RESTS_ON.values()).index),
    ).sort_values(["level", "basis"], ascending=False, kind="stable")
    chosen = order.drop_duplicates("document")[:MOST_CENTRAL]
    return table[table["claim"].isin(chosen["claim"])]


def answer(verdicts: pd.DataFrame) -> str:
    """Return whether what a text stands for holds, and how many of its central claims do."""
    table = central(verdicts)
    if table.empty:
        return ""
    failing, holding = (int(table["finding"].isin(names).sum()) for names in (FAILS, HOLDS))
    outcome = {(True, True): "In part", (True, False): "No", (False, True): "Yes, as far as it can be decided here"}
    counts = {"supported": holding, "refuted": failing, "open": len(table) - holding - failing}
    words = joined([f"{count} {'is' if count == 1 else 'are'} {name}" for name, count in counts.items() if count])
    answer_in_short = outcome.get((failing > 0, holding > 0), "Nothing could be decided here")
    levels = Counter(level for level in table["certainty"] if level)
    certainty = joined([f"{level} ({levels[level]})" for level in LEVELS if levels[level]]) or "none"
    text = f"**{answer_in_short}: of {number_of(len(table), 'claims')} that this text stands for, {words}; certainty:"
    text += f" {certainty}.**"
    refuted = joined([f"“{claimed}”" for claimed in table[table["finding"].isin(FAILS)]["claimed"]])
    return text + f" Refuted: {refuted}." * (failing > 0)


def by_document(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Return how many claims of each document got which verdict."""
    return pd.DataFrame(ledger.by_document(records(verdicts)))


def by_basis(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Return how many claims got which verdict, by what the verdicts rest on."""
    return pd.DataFrame(ledger.by_basis(records(verdicts)))


def sentence(verdicts: pd.DataFrame) -> str:
    """Return how many claims got which verdict, and what the verdicts rest on."""
    mine = counted(records(verdicts))
    if not mine:
        return ""
    world = _about_the_world(mine)
    suspected = Counter(row["verdict"] for row in world if row["suspected"])
    resting = bases([row for row in world if not row["suspected"]])
    chosen = Counter(row["verdict"] for row in world if not row["suspected"])
    own = Counter(row["verdict"] for row in mine if row["basis"] == OWN)
    others = [f"{name} ({resting[basis]})" for basis, name in OTHER_BASES.items() if resting[basis]]
    texts = [
        f"Of {sum(chosen.values())} claims: {_counts(chosen)}.",
        f"This rests on {joined([f'**real runs ({resting[MEASURED]})**', *others])}.",
    ]
    apart = {
        "Sentences of library documentation, chosen because we suspected them": suspected,
        "Compared only with other numbers of the same text": own,
    }
    texts += [f"{name} ({sum(counts.values())}): {_counts(counts)}." for name, counts in apart.items() if counts]
    if certain := int(verdicts["by_construction"].sum()):
        texts.append(f"Not counted, because our check of them cannot fail: {certain}.")
    return " ".join(texts)


def unsuspected(verdicts: pd.DataFrame) -> list[dict]:
    """Return the claims about the world that count, without those that were chosen because we suspected them."""
    return [row for row in _about_the_world(counted(records(verdicts))) if not row["suspected"]]


def outcome(verdicts: pd.DataFrame) -> dict[str, int]:
    """Return how many published claims hold, how many do not, and how many verdicts rest on real runs."""
    rows = unsuspected(verdicts)
    counts = Counter(row["verdict"] for row in rows)
    hold, fail = (sum(counts[name] for name in names) for names in (HOLDS, FAILS))
    return {
        "counted": len(rows),
        "hold": hold,
        "fail": fail,
        "open": len(rows) - hold - fail,
        "real": bases(rows)[MEASURED],
    }


def in_one_sentence(verdicts: pd.DataFrame) -> str:
    """Return the outcome of all published claims as one sentence."""
    mine = outcome(verdicts)
    if not mine["counted"]:
        return ""
    counted_words = f"{mine['hold']} hold, {mine['fail']} do not, and {mine['open']} could not be decided here"
    return f"Of {mine['counted']} published claims **{counted_words}**; {mine['real']} verdicts rest on real runs."


def _about_the_world(rows: list[dict]) -> list[dict]:
    """Leave out claims that were compared only with other numbers of the same text."""
    return [row for row in rows if row["basis"] != OWN]


def _counts(counts: Counter) -> str:
    return ", ".join(f"**{counts[name]} {name}**" for name in VERDICTS if counts[name])


@style.figure
def figure(verdicts: pd.DataFrame) -> Figure:
    """Claims of each document by verdict: those about the world, and comparisons of its own numbers with each other."""
    mine = pd.DataFrame(counted(records(verdicts)))
    documents = parts(mine, "document")
    titles = {False: "Claims about the world", True: "The document's own numbers compared with each other"}
    panels = {title: parts(mine[(mine["basis"] == OWN) == is_own], "document") for is_own, title in titles.items()}
    panels = {title: of_panel for title, of_panel in panels.items() if of_panel}
    drawing, axes = style.panels([0.6 + 0.36 * len(of_panel) for of_panel in panels.values()], sharex=True)
    least_named = 0.03 * max(map(len, documents.values()))
    for ax, (title, of_panel) in zip(axes, panels.items(), strict=True):
        ax.set_title(title)
        for place, of_document in enumerate(of_panel.values()):
            counts = Counter(of_document["verdict"])
            pieces = [(counts[verdict], tone) for verdict, tone in style.VERDICTS.items() if counts[verdict]]
            style.stack(ax, place, pieces)
            middle = 0.0
            for count, tone in pieces:
                if count >= least_named:
                    ink = style.ON_DARK if tone == style.VERDICTS[SUPPORTED] else style.ON_BRIGHT
                    ax.text(middle + count / 2, place, str(count), va="center", ha="center", color=ink)
                middle += count
        style.name_bars(ax, [label(document) for document in of_panel])
    axes[-1].set_xlabel("number of claims")
    text = "A contradiction counts once, even if several claims contain it. Our own premises do not count."
    return style.finished(drawing, style.patches(style.VERDICTS), text)
