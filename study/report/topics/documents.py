"""What documents print, beside what was measured and predicted here; document S002's script; and the claims."""

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from study.core.arms import ROOT
from study.core.errors import Stop
from study.core.text import short
from study.ledger import comparison, texts, verdicts
from study.ledger.evidence import OfRuns
from study.records.runs import Runs, kept_as_evidence
from study.report import style
from study.report.topics import memory


def named(document: object) -> str:
    """The document that a notebook's parameter names; papermill reads 002 as 2. Empty: all."""
    known = [text.document for text in texts.texts()]
    wanted = str(document).strip().upper()
    if wanted.isdecimal():
        wanted = f"S{int(wanted):03}"
    if wanted not in ("", *known):
        raise Stop(f"no document is called {document!r:.80}", f"choose one of {', '.join(known)}; empty: all")
    return wanted


# Document S000: Gemma2-9B on eight H100, 2048 tokens, bfloat16.
SETTING_000: dict[str, Any] = {"ranks": 8, "sequence": 2048, "precision": "bf16_cast", "micro_batch": 1}
MODEL_000 = "gemma2-9b"
MEMORY_000 = {"ddp": 76e9, "zero2": 45e9, "zero3": 28e9}  # "Memory Utilization"


def memory_000(runs: Runs) -> pd.DataFrame:
    """Return what was measured and predicted in document S000's setting, beside the document's numbers."""
    rows = memory.table(runs.select(model=MODEL_000, arm=[*MEMORY_000], **SETTING_000))
    if rows.empty:
        return rows
    # With activations kept and recomputed alike: the document does not say which.
    printed = rows.drop_duplicates(["group", "line"]).assign(source="the document", part="parts not given")
    printed["bytes"] = printed["arm"].map(MEMORY_000)
    return pd.concat([rows, printed], ignore_index=True)


# --- document S002's own script -------------------------------------------------------------------------------------

REPAIRS = {"none": "as printed", "fresh_model": "with a fresh model", "engaged": "with DeepSpeed engaged"}
OF_TRAINING = ["name", "batch", "weights_from", "deepspeed_initialize_calls"]


def script(runs: Runs) -> pd.DataFrame:
    """Return each training of document S002's script: its first weights, its losses, and whether DeepSpeed was called.

    Losses are medians over seeds, of the first and the last that the Trainer logged.
    """
    rows = []
    for repair, words in REPAIRS.items():
        for run in runs.select(arm="single", repair=repair).done:
            for number, training in enumerate(run.record.observed.runs, 1):
                about = {"script": words, "training": number, **training.model_dump(include={*OF_TRAINING})}
                of_ends = {"median_first_loss": training.losses[0], "median_last_loss": training.losses[-1]}
                rows.append(about | of_ends)
    table = pd.DataFrame(rows)
    if table.empty:
        return table
    return table.groupby(["script", "training", *OF_TRAINING], sort=False).median().reset_index()


# --- claims --------------------------------------------------------------------------------------------------------


# From the strongest: with none of the first two nothing was run by us, or rank 0 alone.
STRONGEST = {
    "runs": "real runs",
    "reproduction": "a script",
    "virtual": "virtual ranks",
    "prediction": "predictions",
    "formula": "a formula",
    "arithmetic": "arithmetic",
    "source": "sources alone",
}
CERTAIN = {
    "high": style.PARTS["weights"],
    "moderate": style.PARTS["gathered weights"],
    "low": style.PARTS["gradients"],
    "open": style.PARTS["other"],
}
BY_EVIDENCE = style.StackedBars("claims", CERTAIN, "{:.0f}".format, "claims, by the strongest kind of their evidence")


def by_evidence(named: str) -> pd.DataFrame:
    """Count claims by the strongest kind of their evidence, and by their `verdict` or `certainty`."""
    rows = []
    for claim in texts.claims():
        kinds = {piece.kind for piece in claim.evidence}
        strongest = next(words for kind, words in STRONGEST.items() if kind in kinds)
        rows.append({"strongest evidence": strongest, named: getattr(claim, named) or "open"})
    table = pd.DataFrame(rows)
    counted = pd.crosstab(table["strongest evidence"], table[named])
    columns = [*(texts.VERDICTS if named == "verdict" else CERTAIN)]
    counted = counted.reindex(index=[*STRONGEST.values()], columns=columns, fill_value=0)
    return counted.reset_index().rename_axis(columns=None)


def evidence_figure(counted: pd.DataFrame) -> Figure:
    """How certain the verdicts are, by the strongest kind of evidence that each has."""
    rows = counted.melt(["group", "arm"], var_name="part", value_name="claims").query("claims > 0")
    order = {words: place for place, words in enumerate(counted["arm"])}
    rows = rows.sort_values("arm", key=lambda words: words.map(order), kind="stable")
    rows = rows.assign(panel="", line=rows["arm"], kind="real", source="measured")
    return style.stacks(rows, BY_EVIDENCE, "A claim counts once. Open: it cannot be decided here.")


def claims() -> pd.DataFrame:
    """Return all claims, those of one verdict together, the surest first."""
    names = ("id", "document", "central", "question", "verdict", "certainty", "answer", "ours", "theirs")
    return pd.DataFrame(
        [{name: getattr(each, name) for name in names} for each in verdicts.surest_first(texts.claims())]
    )


def counted_again(*ids: str) -> pd.DataFrame:
    """Return for each piece of evidence of these claims its value in the ledger, and the same computed now.

    Of runs: from the kept records, on which the ledger rests. The least and the largest, if they differ as it says.
    """
    kept, rows = kept_as_evidence(), []
    for claim in (each for id in ids for each in texts.claims() if each.id == id):
        text = f"“{claim.quote}”"
        for piece in claim.evidence:
            now, ledger = f"{short(piece.computed(kept))} {piece.unit}".rstrip(), piece.shown
            if isinstance(piece, OfRuns) and piece.most is not None:
                ledger = f"{ledger} to {short(piece.most)}"
                now = " to ".join(short(end(piece.values(kept))) for end in (min, max))
            about = {"claim": claim.id, "the text": text, "evidence": piece.kind, "of": piece.what}
            rows.append(about | {"in the ledger": ledger, "computed again": now})
            text = ""  # once
    return pd.DataFrame(rows)


def kept_records() -> dict[str, dict[str, list[str]]]:
    """Return by claim the folders with its records below reports/, and the commands that make runs like them."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in comparison.compared(texts.claims(), kept_as_evidence()):
        of = [Path(run).resolve().parent.relative_to(ROOT) for several in row.runs for run in several.split(" over ")]
        known = found.setdefault(row.claim, {"folders": [], "alike": []})
        known["folders"] = sorted({*known["folders"], *map(str, of)})
        known["alike"] = [*dict.fromkeys([*known["alike"], *row.alike])]
    return found
