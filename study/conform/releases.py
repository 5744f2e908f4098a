"""Answers of releases of a library: kept in one CSV, compared, and asked anew of a release beside the environment."""

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import pandas as pd
from packaging.version import Version

from study.conform.suite import ADAPTERS, Answer
from study.core.arms import ROOT
from study.core.errors import Stop, nearest

COMMITTED = ROOT / "reports" / "conform" / "answers.csv"
OVERLAYS = Path("runs/overlays")


def answers(path: Path = COMMITTED) -> pd.DataFrame:
    """Return all answers as texts: the columns are those of `Answer`."""
    if not path.exists():
        raise Stop(f"there is no {path}", "run this in a checkout of the study")
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def keep(path: Path, found: Iterable[Answer]) -> None:
    """Add answers to a file. They replace earlier ones of the same libraries."""
    frame = pd.DataFrame(map(asdict, found))
    # The first five columns say what was asked, and of which libraries.
    if path.exists():
        frame = pd.concat([answers(path), frame]).drop_duplicates([*frame.columns[:5]], keep="last")
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, index=False, lineterminator="\n")


def changes(name: str, since: str, until: str, only: str = "") -> tuple[dict, list[Answer]]:
    """Return the properties whose answers change between releases, by what changes; and their answers that are bad.

    A release that was not tried may be the first with a new answer.
    """
    rows = answers()
    if name not in set(rows["adapter"]):
        raise Stop(f"no answers of {name!r} are kept", nearest(name, rows["adapter"].unique()))
    # Some rows are what scripts find, and how a config is read: deepspeed-configuration, for example.
    package = name.partition("-")[0]
    if name in ADAPTERS:
        package = ADAPTERS[name].package
    rows = rows[(rows["adapter"] == name) & rows["property"].str.contains(only, regex=False)]
    tried = sorted(rows[package].unique(), key=Version)
    if not {since, until} <= {*tried} or Version(since) >= Version(until):
        raise Stop(f"no answers from {package} {since} to {until} are kept", f"choose two of {', '.join(tried)}")
    inside = tried[tried.index(since) : tried.index(until) + 1]
    rows = rows[rows[package].isin(inside)]
    wide = rows.pivot(index="property", columns=package, values="answer")[inside]
    # --- what changed, and of that what is bad
    wide = wide[wide.nunique(axis=1) > 1]  # a question that was not asked of a release has no answer there
    wrong = rows[rows["property"].isin(wide.index) & rows["answer"].isin(["fails", "refused"])]
    bad = [Answer(*row) for row in wrong.itertuples(index=False)]
    return wide.groupby(wide.apply(_history, axis=1)).groups, bad


def _history(answers: pd.Series) -> str:
    answers = answers.dropna()
    # Only the releases at which the answer became another one.
    new = answers[answers != answers.shift()]
    return ", ".join(f"{answer} since {release}" for release, answer in new.items())


def installed(package: str, version: str) -> Path:
    """Install a release into a folder of its own, unless it is there, with the other libraries of this environment."""
    overlay = OVERLAYS / f"{package}-{version}"
    if overlay.exists():
        return overlay
    new = overlay.with_suffix(".new")
    # Without dependencies: the other libraries must be those of this environment, or two things would change at once.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    env = os.environ | {"DS_BUILD_OPS": "0"}  # operators are compiled when a rank asks for one
    done = subprocess.run(
        [*pip, "--target", str(new), f"{package}=={version}"], env=env, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "ERROR" in line), "pip failed")
        raise Stop(f"{package} {version} cannot be installed: {reason}", "name another release")
    return new.rename(overlay)  # only a whole one has this name
