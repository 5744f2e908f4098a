"""The paper: a text in Typst whose numbers, tables and figures come from records and claims. `make paper` builds it.

`paper/paper.typ` asks for a number by its name, `#n("runs.total")`. A name that is not computed here stops the build.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd

from study.bench import first_scores
from study.bench.prediction import predicted
from study.errors import Stop
from study.io.numbers import nats, percent, size
from study.io.tables import say
from study.io.words import joined
from study.ledger import words
from study.ledger.ledger import counted
from study.ledger.verdict import INCONCLUSIVE, OWN, PREDICTED, REFUTED, SUPPORTED, VERDICTS
from study.predictor.outside import stored
from study.publishing.project import project, version
from study.records import runs as records
from study.records.runs import Runs
from study.report import answers, grouping, readme, style
from study.report.topics import claims, conformance, killed, losses, predictions, traffic
from study.report.topics.claims import Judged
from study.spec.arms import NAMES, ROOT

FOLDER = ROOT / "paper"
RUNS = ROOT / "reports" / "cpu-2core" / "runs"
SOFTWARE = ("torch", "deepspeed", "accelerate", "transformers")
CLOSE = 0.01  # share of a peak
TRACED = ("smoke", "guelph", "h100", "at_scale")  # the others have models that are traced for a minute
PAPERS_OWN = ("consistent", "contradicts itself")
BOARD = ["quantity", "predictor", "numbers", "answered"]


def numbers(judged: Judged) -> dict[str, str]:
    """Return every number of the text by its name."""
    groups = {
        "cite": _cite(),
        "arms": {"count": len(NAMES)},
        "runs": _runs(judged.runs),
        "machine": _machine(judged.runs),
        "software": _software(judged.runs),
        "claims": _claims(judged.table),
        "losses": _losses(judged.runs),
        "time": _time(),
        "published": _published(),
        "memory": _memory(judged.runs),
        "traffic": _traffic(judged.runs),
        "peaks": _peaks(judged.runs),
        "outside": _outside(),
        "releases": _releases(),
        "conform": _conform(),
        "oom": _threads(),
        "hangs": _hangs(),
        "loading": _loading(),
    } | _documents(judged)
    return {f"{group}.{name}": str(value) for group, facts in groups.items() for name, value in facts.items()}


def tables(judged: Judged) -> dict[str, list[list[str]]]:
    """Return every table of the text by its name. The first line is the head."""
    central = claims.headline(judged.table)[["claim", "claimed", "found", "finding", "certainty", "rests on"]]
    documents = claims.by_document(judged.table)
    own = documents[list(PAPERS_OWN)].sum(axis=1)
    documents = documents[["document", "title", SUPPORTED, REFUTED, "understated", INCONCLUSIVE]].assign(own=own)
    return {
        "central": _lines(central.rename(columns={"claim": "", "rests on": "by"})),
        "documents": _lines(documents.rename(columns={"document": "", "title": "text", "understated": "under-stated"})),
        "refuted": _lines(_refuted(judged)),
        "board": _lines(_board()),
    }


def images(runs: Runs) -> dict[str, str]:
    """Return the figures of the text as SVG, by the names of their files."""
    drawn = readme.picture(runs)
    if not drawn:
        raise Stop("the runs lack losses, memory or traffic of the first figure", answers.AT_SCALE)
    compared = predictions.figure(predictions.table())
    return {"headline.svg": drawn, "predictions.svg": style.svg(compared, "Predictions beside what others measured")}


def _lines(table: pd.DataFrame) -> list[list[str]]:
    return [[*map(str, table.columns)], *table.astype(str).to_numpy().tolist()]


# --- the study -----------------------------------------------------------------------------------------------------


def _cite() -> dict[str, Any]:
    """Return who wrote it, and which version it is. A date that is unknown is not invented."""
    authors = [author.name or f"{author.given} {author.family}" for author in project().author]
    return {"author": joined(authors), "version": version(), "date": project().released or "not released yet"}


def _runs(runs: Runs) -> dict[str, int]:
    kinds = Counter(run.kind for run in runs)
    return {"total": len(runs)} | {kind: kinds[kind] for kind in ("real", "virtual", "capped", "emulated")}


def _machine(runs: Runs) -> dict[str, Any]:
    """Return the machine that made most runs."""
    hardware = Counter((run.record.hardware.cores, run.record.hardware.host_memory_bytes) for run in runs.done)
    (cores, memory_bytes), _ = hardware.most_common(1)[0]
    if not memory_bytes:
        raise Stop("most runs do not say how much memory their machine has", "name other runs")
    return {"cores": cores, "memory": size(memory_bytes)}


def _software(runs: Runs) -> dict[str, Any]:
    """Return the versions with which most runs were made."""
    return {name: Counter(run.record.software.get(name) for run in runs.done).most_common(1)[0][0] for name in SOFTWARE}


def _losses(runs: Runs) -> dict[str, Any]:
    rows = answers.trained(runs)
    worst = losses.furthest(rows)
    if worst is None:
        raise Stop("no two arms have trained on the same rows", "study sweep smoke --runs runs/smoke")
    curve = rows.groupby("step")["loss"].mean()
    return {
        "arms": rows[rows["difference"].notna()]["arm"].nunique(),
        "worst": nats(worst["difference"]),
        "furthest": worst["arm"],
        "steps": len(curve),
        "first": f"{curve.iloc[0]:.2f}",
        "last": f"{curve.iloc[-1]:.2f}",
    }


def _memory(runs: Runs) -> dict[str, str]:
    rows = answers.of_memory(runs).rows
    largest = rows[rows["model"] == rows["model"].iloc[0]]
    return {arm: size(peak_bytes) for arm, peak_bytes in answers.totals(largest, answers.VIRTUAL).items()}


def _traffic(runs: Runs) -> dict[str, str]:
    sent = traffic.by_arm(answers.sent(runs), traffic.COUNTED)
    return {arm: f"{moved / sent['ddp']:.2g}" for arm, moved in sent.items()}


def _time() -> dict[str, str]:
    rows = answers.steps()
    ours = rows[(rows["setting"] == rows["setting"].iloc[0]) & (rows["basis"] == answers.PREDICTED)]
    seconds = grouping.sums(ours, "arm", "seconds")
    shares = {arm: f"{taken / seconds['ddp']:.3g}" for arm, taken in seconds.items()}
    return {"setting": rows["setting"].iloc[0].partition(" x ")[2]} | shares


def _published() -> dict[str, str]:
    rows = answers.steps()
    seconds = grouping.sums(rows[rows["basis"] == answers.PUBLISHED], "arm", "seconds")
    return {arm: f"{taken / seconds['zero1']:.2g}" for arm, taken in seconds.items()}


# --- claims --------------------------------------------------------------------------------------------------------


def _claims(table: pd.DataFrame) -> dict[str, int]:
    """Return how many claims there are, and how many of those about the world got which verdict."""
    every = grouping.records(table)
    undecided = [row for row in claims.unsuspected(table) if row["verdict"] == INCONCLUSIVE]
    return claims.outcome(table) | {
        "texts": table["document"].nunique(),
        "total": len(counted(every)),
        "inconclusive": len(undecided),
        "predicted_open": sum(row["basis"] == PREDICTED for row in undecided),
        "by_construction": int(table["by_construction"].sum()),
    }


def _documents(judged: Judged) -> dict[str, dict[str, Any]]:
    """Return what single sentences name: counts of a document, and the finding of a claim."""
    table = claims.by_document(judged.table).set_index("document")
    groups: dict[str, dict[str, Any]] = {
        f"d{name}": {verdict: table.loc[name, verdict] for verdict in VERDICTS if verdict in table}
        for name in ("000", "001", "002", "003")
    }
    findings: dict[str, Any] = {verdict.claim.id: verdict.found for verdict in judged.verdicts}
    by_basis = claims.by_basis(judged.table).set_index("basis")["claims"]
    suspected = [row for row in counted(judged.rows) if row["suspected"] and row["basis"] != OWN]
    groups["d001"]["flops"] = f"{findings['S001-47']:.0%}"
    groups["guelph"] = {"engines": f"{max(findings['S002-25']):g}"}
    papers = table[table.index.str.fullmatch(r"P\d")].sum(numeric_only=True)
    groups["papers"] = {str(verdict): count for verdict, count in papers.items()}
    groups["states"] = {"bytes": f"{sum(findings['P1-01']):g}"}
    groups["basis"] = {str(name): count for name, count in by_basis.items()}
    refuted = sum(row["verdict"] == REFUTED for row in suspected)
    return groups | {"suspected": {"total": len(suspected), "refuted": refuted}}


def _refuted(judged: Judged) -> pd.DataFrame:
    """Return the refuted claims that count, with what was found instead."""
    rows = [row for row in counted(judged.rows) if row["verdict"] == REFUTED and row["basis"] != OWN]
    chosen = {row["claim"]: row for row in rows if not row["suspected"]}
    return pd.DataFrame(
        {
            "": verdict.claim.id,
            "claimed": ("may imply: " if verdict.claim.premise else "") + verdict.claim.says,
            **{name: words.summary(verdict)[name] for name in ("found", "certainty")},
            "by": claims.RESTS_ON[verdict.basis],
        }
        for verdict in judged.verdicts
        if verdict.claim.id in chosen
    )


# --- beyond the claims ---------------------------------------------------------------------------------------------


def _peaks(runs: Runs) -> dict[str, Any]:
    """Return how close the predicted peaks are, in the protocols whose models are traced in the repository."""
    mine = [run for run in runs.done if run.record.cell.protocol in TRACED]
    chosen = [run for run in mine if run.kind in ("real", "virtual") and run.components]
    pairs = [(run.record.memory.components, predicted(run.record)) for run in chosen]
    errors = [estimate.peak_bytes / memory.per_rank[0].tracked_peak_bytes - 1 for memory, estimate in pairs if estimate]
    worst = max(errors, key=abs)
    return {"count": len(errors), "close": sum(abs(each) <= CLOSE for each in errors), "worst": f"{abs(worst):.1%}"}


def _outside() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for quantity, each in stored.read()["accuracy"].items():
        facts |= {quantity: percent(each["median_error"])}
        facts |= {f"{quantity}_rows": each["rows"], f"{quantity}_sources": each["sources"]}
    for name in ("memory", "time"):
        facts[f"first_{name}"] = percent(first_scores.latest(name).median_error)
    facts["first_time_refused"] = percent(first_scores.latest("time").refused)
    return facts | {"inside": percent(stored.read()["accuracy"]["time"]["inside"])}


def _board() -> pd.DataFrame:
    board = predictions.board()
    shares = {name: board[name].map(percent) for name in ("error", "median of answered")}
    return board[BOARD].assign(**shares)


def _releases() -> dict[str, int]:
    return dict(zip(("tried", "wrong"), conformance.counted_releases(), strict=True))


def _conform() -> dict[str, int]:
    bugs, planted = conformance.kept("bugs"), conformance.kept("faults")
    return {
        "properties": conformance.table()["property"].nunique(),
        "bugs": len(bugs),
        "caught": sum(row["caught"] for row in bugs),
        "planted": len(planted),
        "found": sum(bool(row["caught_by"]) for row in planted),
    }


def _threads() -> dict[str, str]:
    rows = killed.threads()
    hits = {str(half): f"{mine['hit'].sum()} of {len(mine)}" for half, mine in rows.groupby("half", sort=False)}
    return hits | {"last": [*hits.values()][-1]}


def _hangs() -> dict[str, int]:
    rows = killed.hangs()
    hung = rows[rows["outcome"] == "hangs"]
    return {"total": len(rows), "hang": len(hung), "named": int(hung["named"].sum())}


def _loading() -> dict[str, Any]:
    rows = killed.loading()
    close = (rows["ratio"] - 1).abs() <= killed.CLOSE
    held_out = rows["held_out"]
    return {
        "close": close.sum(),
        "total": len(rows),
        "held_out": f"{close[held_out].sum()} of {held_out.sum()}",
        "limit": f"{killed.CLOSE:.0%}",
    }


# --- building ------------------------------------------------------------------------------------------------------


def write(judged: Judged, folder: Path = FOLDER) -> None:
    """Write numbers, tables and figures into the folder `build` beside the text."""
    build = folder / "build"
    build.mkdir(exist_ok=True)
    content = {"numbers": numbers(judged), "tables": tables(judged)}
    (build / "data.json").write_text(json.dumps(content, indent=1) + "\n")
    for name, image in images(judged.runs).items():
        (build / name).write_text(image)


def compiled(folder: Path = FOLDER) -> Path:
    """Return the PDF of the text, with what `write` computed."""
    try:
        import typst
    except ImportError:
        raise Stop("typst is not installed", "pip install 'zero-study[paper]', or: make paper", "unavailable") from None
    fonts = Path(matplotlib.get_data_path(), "fonts", "ttf")  # those of the figures
    try:
        typst.compile(folder / "paper.typ", output=folder / "paper.pdf", root=folder, font_paths=[fonts])
    except typst.TypstError as error:
        raise Stop(f"the paper cannot be built: {error}", "give the number in study/publishing/paper.py") from None
    return folder / "paper.pdf"


if __name__ == "__main__":
    write(claims.judge(records.load([RUNS])))
    say(str(compiled()))
