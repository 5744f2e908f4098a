"""Answers of releases of a library: kept in one CSV, and compared."""

import bisect
from pathlib import Path

import pandas as pd
from packaging.version import Version

from study.conform.suite import LIBRARIES, PropertyAnswer
from study.core.arms import ROOT
from study.core.errors import Stop, nearest

COMMITTED = ROOT / "reports" / "conform" / "answers.csv"


def answers(path: Path = COMMITTED) -> pd.DataFrame:
    """Return all answers as texts: the columns are those of `Answer`."""
    if not path.exists():
        raise Stop(f"there is no {path}", "run this in a checkout of the study")
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def keep(path: Path, found: list[PropertyAnswer]) -> None:
    """Add answers to a file. They replace earlier ones of the same libraries."""
    frame = pd.DataFrame(found)
    # The first five columns say what was asked, and of which libraries.
    if path.exists():
        frame = pd.concat([answers(path), frame]).drop_duplicates(frame.columns[:5], keep="last")
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, index=False, lineterminator="\n")


def enclosing(name: str, old: Version, new: Version) -> tuple[str, str]:
    """Return the two releases with kept answers that enclose others, as far as there are such."""
    _, _, tried = _tried(name)
    versions = [Version(each) for each in tried]
    before = bisect.bisect_right(versions, old) - 1
    after = bisect.bisect_left(versions, new)
    return tried[max(before, 0)], tried[min(after, len(tried) - 1)]


def _tried(name: str) -> tuple[pd.DataFrame, str, list[str]]:
    """Return the kept answers of an adapter, the library of which several releases were tried, and these."""
    kept = answers()
    rows = kept[kept["adapter"] == name]
    if rows.empty:
        raise Stop(f"no answers of {name!r} are kept", nearest(name, kept["adapter"].unique()))
    package = str(rows[list(LIBRARIES)].nunique().idxmax())
    return rows, package, sorted(rows[package].unique(), key=Version)


def changes(name: str, since: str, until: str) -> tuple[dict, list[PropertyAnswer]]:
    """Return the properties whose answers change between releases, by what changes; and all their answers."""
    rows, package, tried = _tried(name)
    if not {since, until} <= {*tried} or Version(since) >= Version(until):
        what = f"two releases of {package} with kept answers are compared, the older first"
        raise Stop(f"{what} (got {since} and {until or 'none'})", f"choose two of {', '.join(tried)}")
    inside = tried[tried.index(since) : tried.index(until) + 1]
    rows = rows[rows[package].isin(inside)]
    wide = rows.pivot(index="property", columns=package, values="answer")[inside]
    wide = wide[wide.nunique(axis=1) > 1]  # a question that was not asked of a release has no answer there
    rows = rows[rows["property"].isin(wide.index)]
    return wide.groupby(wide.apply(_history, axis=1)).groups, [
        PropertyAnswer(*row) for row in rows.itertuples(index=False)
    ]


def _history(answers: pd.Series) -> str:
    answers = answers.dropna()
    # Only the releases at which the answer became another one.
    new = answers[answers != answers.shift()]
    return ", ".join(f"{answer} since {release}" for release, answer in new.items())
