"""Which properties of sharded training hold with which library and release, and what the suite that asks them finds.

The results are committed in `reports/conform/`; `study conform` and `study versions` make them. What is in
`known/` was measured once, in November 2026, by code that git keeps (study/conform/gauntlet.py).
"""

import pandas as pd

from study.io.parsing import from_json
from study.io.words import joined
from study.spec.arms import ROOT

KEPT = ROOT / "reports" / "conform"
PLANTED = (
    "Each is one changed line of a library. With 10 of the 40, the libraries' own tests that pass here on CPUs ran "
    "as well, up to the first that fails, or for 100 s. DeepSpeed's are of its repository (edaa722), with 0.19.8; "
    "its tests of checkpoints and those that compare with DDP do not pass here. What others find is not known."
)
GPU = "does a GPU take the same path"
STATUSES = ("holds", "fails", "refused", "not applicable")


def table() -> pd.DataFrame:
    """Return a row for each property and adapter, with its status under the installed releases."""
    kept = [from_json(path.read_bytes()) for path in sorted(KEPT.glob("*.json"))]
    return pd.DataFrame(
        [{"adapter": each["adapter"], "status": "holds"} | row for each in kept for row in each["results"]]
    )


def counts(rows: pd.DataFrame) -> pd.DataFrame:
    """Return how many properties have which status, for each adapter that can be tried here."""
    if rows.empty:
        return rows
    numbers = pd.crosstab(rows["adapter"], rows["status"]).reindex(columns=list(STATUSES), fill_value=0)
    return numbers[numbers["holds"] > 0].reset_index()


def differing(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the properties that do not hold everywhere, with the adapters that fail or refuse each."""
    if rows.empty:
        return rows
    known = rows[rows["adapter"].isin(counts(rows)["adapter"])]
    table = known.pivot_table(index="property", columns="status", values="adapter", aggfunc=", ".join)
    table[GPU] = pd.Series(over_releases()["on_a_gpu"], dtype=object)
    return table.reindex(columns=["fails", GPU, "refused"]).dropna(how="all", subset=["fails", "refused"]).reset_index()


def over_releases() -> dict:
    """Return what changes between releases, as `study versions all` wrote it. An installed wheel has no results."""
    path = KEPT / "releases" / "changes.json"
    if not path.exists():
        return {"most": [], "changes": [], "tables": [], "unusable": [], "on_a_gpu": {}, "counted": []}
    return from_json(path.read_bytes())


def bugs() -> pd.DataFrame:
    """Return the bugs that a release mended, and what a property said before and after."""
    names = {"before": "release", "then": "seen there", "after": "later release", "now": "seen later"}
    columns = ["thread", "sentence", "property", *names, "words"]
    return pd.DataFrame(kept("bugs"), columns=columns).rename(columns=names)


def faults() -> pd.DataFrame:
    """Return the faults that were planted into the installed libraries, and what found each."""
    names = {"tried": "properties", "caught_by": "found by", "tests": "own tests", "failing": "the first that fails"}
    return pd.DataFrame(kept("faults"), columns=["sentence", "adapter", *names]).rename(columns=names)


def kept(name: str) -> list[dict]:
    """Return the known bugs or the planted faults, and what found each."""
    path = KEPT / "known" / f"{name}.csv"
    return pd.read_csv(path, keep_default_na=False).to_dict("records") if path.exists() else []


def sentence(rows: pd.DataFrame) -> str:
    """Return which adapters hold everything that applies to them, and which fails the most."""
    every = counts(rows)
    if every.empty:
        return ""
    clean = [str(row.adapter) for row in every.itertuples() if row.fails == 0]
    worst = every.sort_values("fails").iloc[-1]
    share = f"{worst['fails']} of {rows['property'].nunique()} properties fail with {worst['adapter']}"
    return f"**Nothing fails with {joined(clean)}; {share}.**"


def power() -> str:
    """Return how many known bugs and planted faults the suite finds."""
    known, planted = kept("bugs"), kept("faults")
    seen = sum(row["caught"] for row in known)
    caught = sum(bool(row["caught_by"]) for row in planted)
    return (
        f"Of {len(known)} bugs that a release mended, {seen} are seen before the fix and not after it. "
        f"Of {len(planted)} faults planted into the installed libraries, {caught} are found."
    )


def counted_releases() -> tuple[int, int]:
    """Return how many releases of DeepSpeed were tried, and how many of them train something wrongly in silence."""
    tried, wrong, *_ = over_releases()["counted"] or (0, 0)
    return tried, wrong


def headline() -> str:
    """Return the sentence about releases that surprises most."""
    counted = over_releases()["counted"]
    if not counted:
        return "No results of releases are here: a clone of the repository has them."
    tried, wrong, asked, properties = counted
    return (
        f"**Of {tried} releases of DeepSpeed, {wrong} (0.17.4 to 0.18.2) train something wrongly without a message** "
        f"that another of them trains rightly: over {asked} of {properties} properties, on CPUs, and without "
        "DeepSpeed's own learning-rate schedules. 0.17.6 to 0.18.2 compute wrong gradients under stage 2 without "
        "offloading, where an update has more than one pass. Pull request 7509 made them, one line of 7665 mended "
        "them, and issue 7718 is open. 0.17.4 and 0.17.5 report a wrong norm with torch_autocast, and clip by it."
    )
