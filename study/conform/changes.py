"""What changes between releases of a library, from the results that `study versions` kept.

Questions whose answers change in the same releases are one change. A release that was not tried may be the first one.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
from packaging.version import InvalidVersion, Version

from study.conform import output, trials
from study.conform.suite import ADAPTERS, COMMITTED, PROPERTIES, SCHEDULES, Result, table
from study.core.errors import Stop
from study.core.parsing import from_json
from study.core.tables import say, say_wrapped
from study.core.words import joined

RELEASES = COMMITTED / "releases"
UNUSABLE = 0.5  # a release in which one message ends a larger share of the properties is left out
CONFIGURATION = "configuration"  # in the place of an adapter: how a release reads a config
WITH_VALUES = (CONFIGURATION, trials.REPRODUCTION)  # their answers are values, and not the status of a property
TITLES = {trials.REPRODUCTION: "{package}: what scripts find"}
NO_ANSWER = "does not run"
RANKING = ("holds", "not applicable", "refused", "fails")
DIRECTIONS = list(table("matrix")["headings"])
Span = tuple[str, str, Any]  # the first and the last of releases with the same answer, and the answer


def tell(package: str, since: str, until: str, folder: Path) -> None:
    """Say what changes from one release to another."""
    rows, unusable = answers(folder)
    if rows.empty:
        raise Stop(f"{folder} has no results", "run study versions all, or leave out --out")
    inside = _between(since, until, package, in_order(rows.loc[rows["package"] == package, "release"]))
    say(f"{package} {inside[0]} to {inside[-1]}, from the results of {len(inside)} releases: {', '.join(inside)}.")
    chosen = (rows["package"] == package) & rows["release"].isin(inside)
    every = sorted(changes(rows[chosen]), key=lambda each: DIRECTIONS.index(each["direction"]))
    for direction, some in groupby(every, lambda each: each["direction"]):
        say("", table("matrix")["headings"][direction].format(until=inside[-1]))
        for each in some:
            say_wrapped(each["sentence"], indent="  ", first="- ")
            say_wrapped(*each["details"], indent="    ", first="    ")
    say("")
    for row in unusable:
        if row["package"] == package and row["release"] in inside:
            say_wrapped(f"Left out: {row['release']} with {row['adapter']}. {row['reason']}", indent="  ")


def _between(since: str, until: str, package: str, tried: list[str]) -> list[str]:
    """Return the releases from one that was tried to another. Empty: the first, or the last."""
    if not tried:
        raise Stop(f"this folder has no results of {package}", "run study versions all")
    for release in filter(None, (since, until)):
        if release not in tried:
            raise Stop(f"{package} {release} was not tried", f"choose from {', '.join(tried)}")
    first, last = since or tried[0], until or tried[-1]
    inside = tried[tried.index(first) : tried.index(last) + 1]
    if len(inside) < 2:
        raise Stop(f"{last} does not come after {first}", "give an older release with --from than with --to")
    return inside


def in_order(releases: Iterable[str]) -> list[str]:
    try:
        return sorted(set(releases), key=Version)
    except InvalidVersion as error:
        raise Stop(str(error), "give exact releases, such as 0.18.1") from None


def write(folder: Path) -> None:
    """Write what reports show: what changes."""
    (folder / "changes.json").write_text(json.dumps(content(folder), indent=1) + "\n", encoding="utf-8")


def content(folder: Path) -> dict:
    """Return what reports show: what matters most, all changes, and each property that changes in each release."""
    rows, unusable = answers(folder)
    numbered = [{"number": number} | each for number, each in enumerate(changes(rows), 1)]
    of_properties = [each for each in numbered if each["questions"].keys().isdisjoint(WITH_VALUES)]
    most = [*of_properties[:3], *(each for each in numbered if each["direction"] == "other")][:5]
    groups = rows[rows["adapter"] != CONFIGURATION].groupby(["package", "adapter"], sort=False)
    tables = [_table(package, adapter, each, numbered) for (package, adapter), each in groups]
    tables.sort(key=lambda each: len(each["releases"]), reverse=True)
    about = {"on_a_gpu": _on_a_gpu(), "counted": _counted(of_properties, rows)}
    return about | {"most": most, "changes": numbered, "unusable": unusable, "tables": tables}


def _on_a_gpu() -> dict[str, str]:
    """Return for each property that fails with the installed releases: does a GPU take the same path?"""
    seen: dict[str, set[str]] = {}
    for name in ADAPTERS:
        results, versions = output.load(COMMITTED / f"{name}.json")
        for each in results:
            explained = output.explanation(each, versions)
            if explained and each.status == "fails":
                seen.setdefault(each.property, set()).add(explained.gpu)
    return {name: ", ".join(sorted(answers)) for name, answers in sorted(seen.items())}


def _counted(every: list[dict], rows: pd.DataFrame) -> list[int]:
    """Return how many releases of DeepSpeed were tried, how many are wrong in silence, and over how many properties.

    DeepSpeed's own learning-rate schedules are left out: sharding does not change them.
    """
    schedules = {name for name, each in PROPERTIES.items() if each.setting("schedule") not in SCHEDULES}
    own = [each for each in every if each["package"] == "deepspeed" and "holds" in each["sentence"]]
    wrong = {name for each in own if set().union(*each["questions"].values()) - schedules for name in each["silent"]}
    tried = rows.loc[rows["package"] == "deepspeed", "release"].nunique()
    return [tried, len(wrong), len(table("matrix")["properties"]), len(PROPERTIES)]


def _table(package: Any, adapter: Any, rows: pd.DataFrame, numbered: list[dict]) -> dict:
    """Return the answers that change. `same`: how many questions have the same answer in all releases."""
    releases = in_order(rows["release"])
    wide = rows.pivot(index="question", columns="release", values="answer")[releases].astype(object)
    own = [each for each in numbered if each["package"] == package]
    numbers = {name: each["number"] for each in own for name in each["questions"].get(adapter, [])}
    same = int(wide.drop(index=list(numbers)).notna().all(axis=1).sum())
    wide = wide.where(wide.notna(), None)
    kept = [{"question": name, "number": numbers[name], "answers": wide.loc[name].tolist()} for name in numbers]
    title = TITLES.get(adapter, "{package} with the adapter {adapter}").format(package=package, adapter=adapter)
    about = {"package": package, "adapter": adapter, "title": title, "releases": releases}
    return about | {"same": same, "rows": kept}


# --- answers -------------------------------------------------------------------------------------------------------


def answers(folder: Path) -> tuple[pd.DataFrame, list[dict]]:
    """Return each answer of each release, and the releases that cannot be used with an adapter, with the reason."""
    rows: list[dict] = []
    unusable = []
    for package, release, path in _files(folder):
        results, versions = output.load(path)
        about = {"package": package, "release": release, "adapter": path.stem}
        if reason := from_json(path.read_bytes()).get("reason") or _ending(results):
            unusable.append(about | {"reason": reason})
        else:
            rows += [about | _of_property(each, versions) for each in results]
    rows += [{"words": "", "why": "", "silent": False} | row for row in _of_trials(folder)]
    return pd.DataFrame(rows), unusable


def _of_property(result: Result, versions: output.Versions) -> dict:
    explained = output.explanation(result, versions)
    documented = explained is not None and explained.kind == "documented difference"
    answer = {"question": result.property, "answer": result.status, "words": result.words}
    return answer | {"why": str(explained or ""), "silent": result.kind == "differs" and not documented}


def _ending(results: list[Result]) -> str:
    """Return the message that ends more than half of the properties, if one does."""
    ended = Counter(each.words for each in results if each.status in ("fails", "refused") and each.kind != "differs")
    words, count = max(ended.items(), key=lambda pair: pair[1], default=("", 0))
    return f"{count} of {len(results)} properties: {words}" if count > UNUSABLE * len(results) else ""


def _files(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield package, release and file of all results: of the kept releases, and of the installed one."""
    paths = [path for path in sorted(folder.glob("*-*/*.json")) if path.stem in ADAPTERS]
    for path in paths:
        package, _, release = path.parent.name.rpartition("-")
        yield package, release, path
    for package, adapter in sorted({(path.parent.name.rpartition("-")[0], path.stem) for path in paths}):
        path = COMMITTED / f"{adapter}.json"
        yield package, output.load(path)[1][package] or "", path


def _of_trials(folder: Path) -> Iterator[dict]:
    """Yield the answers to trials."""
    now = trials.installed()
    given: dict[tuple[str, str], dict] = {}
    for path in sorted(folder.glob(f"*-*/{trials.ANSWERS}")):
        package, _, release = path.parent.name.rpartition("-")
        given[package, release] = from_json(path.read_bytes())
    for package in sorted({package for package, _ in given}):
        newest = next(iter(now.values()))["versions"][package]
        given[package, newest] = {name: now[name]["found"] for name in trials.concerning(package)}
    for (package, release), values in given.items():
        for name in filter(values.__contains__, now):
            yield {"package": package, "release": release} | _of_trial(name, now[name]["trial"], values[name])


def _of_trial(name: str, trial: dict, value: object) -> dict:
    """Return a question and its answer. If a script ends with an error, its message is not part of the answer."""
    if trial["what"] != trials.REPRODUCTION:
        return {"adapter": CONFIGURATION, "question": name, "answer": json.dumps(value)}
    about = {"adapter": trials.REPRODUCTION, "question": trial["name"]}
    if isinstance(value, dict) and "error" in value:
        return about | {"answer": json.dumps(NO_ANSWER), "words": value["error"]}
    return about | {"answer": json.dumps(float(f"{value:.3g}") if isinstance(value, float) else value)}


# --- changes -------------------------------------------------------------------------------------------------------


def changes(rows: pd.DataFrame) -> list[dict]:
    """Return what changes, the weightiest first: wrong results without a message, then crashes, then the others."""
    groups: dict[tuple, list[pd.DataFrame]] = {}
    for (package, adapter, _), each in rows.groupby(["package", "adapter", "question"], sort=False):
        spans = _spans(each.set_index("release")["answer"])
        if len(spans) > 1:
            kind = adapter if adapter in WITH_VALUES else ""
            groups.setdefault((package, kind, *spans), []).append(each)
    every = [_change(package, spans, pd.concat(each)) for (package, _, *spans), each in groups.items()]
    return sorted(every, key=lambda each: each["weight"], reverse=True)


def _spans(by_release: pd.Series) -> list[Span]:
    runs = [(answer, list(run)) for answer, run in groupby(in_order(by_release.index), by_release.get)]
    return [(releases[0], releases[-1], answer) for answer, releases in runs]


def _change(package: str, spans: list[Span], rows: pd.DataFrame) -> dict:
    questions = {str(name): list(each["question"].unique()) for name, each in rows.groupby("adapter", sort=False)}
    change = {"package": package, "spans": spans, "questions": questions}
    change["silent"] = in_order(rows.loc[rows["silent"], "release"])
    if questions.keys().isdisjoint(WITH_VALUES):
        return change | _of_properties(package, spans, questions, rows)
    return change | _of_configurations(spans, rows)


def _of_properties(package: str, spans: list[Span], questions: dict[str, list[str]], rows: pd.DataFrame) -> dict:
    wrong = rows[rows["answer"].isin(["fails", "refused"])].sort_values("silent", ascending=False, kind="stable")
    seen, silent = wrong.iloc[0], bool(wrong["silent"].any())
    adapter, (name, *_) = next(iter(questions.items()))
    more = "" if package == "deepspeed" else f" --package {package}"
    details = [f"{'A wrong result without a message: ' if silent else ''}{seen['words']}.", seen["why"]]
    details += [f"Shown by: study bisect {adapter} {name} {spans[0][1]} {spans[1][0]}{more}"]
    ranks = [RANKING.index(answer) for _, _, answer in spans]
    direction = {-1: "better", 0: "between", 1: "worse"}[(ranks[-1] > ranks[0]) - (ranks[-1] < ranks[0])]
    named = "; ".join(f"{adapter}: {joined(names)}" for adapter, names in questions.items())
    weight = [1, silent, max(ranks), sum(map(len, questions.values())), *_newest(spans)]
    sentence = f"{history(spans)}: {named}"
    return {"weight": weight, "direction": direction, "sentence": sentence, "details": list(filter(None, details))}


def _of_configurations(spans: list[Span], rows: pd.DataFrame) -> dict:
    asked = {
        name: row["trial"]
        for name, row in trials.installed().items()
        if {name, row["trial"].get("name")} & set(rows["question"])
    }
    scripts = [trial["name"] for trial in asked.values() if trial["what"] == trials.REPRODUCTION]
    details = [f"Fault {trials.faults()[name]}." for name in scripts if name in trials.faults()]
    details += [f"Shown by: reproductions/{name}.py" for name in scripts]
    details += [f"Does not run: {each}" for each in sorted(set(rows["words"]) - {""})]
    known = {answer for _, _, answer in spans} - {json.dumps(NO_ANSWER)}
    # A key that is rejected says more than a default that changed.
    weight = [0 if len(known) > 1 else -1, known.isdisjoint({'"accepted"', '"rejected"'}), 0, 0, *_newest(spans)]
    sentence = f"{joined(sorted(map(trials.words, asked.values())))}: {history(spans)}"
    direction = "between" if spans[0][2] == spans[-1][2] else "other"
    return {"weight": weight, "direction": direction, "sentence": sentence, "details": details}


def _newest(spans: list[Span]) -> list[int]:
    return list(Version(spans[-1][0]).release)


def history(spans: list[Span]) -> str:
    """Return the spans in words: holds until A, fails from B to C, holds since D."""
    first, *between, last = spans
    middle = [f"{answer} {f'in {one}' if one == other else f'from {one} to {other}'}" for one, other, answer in between]
    return ", ".join([f"{first[2]} until {first[1]}", *middle, f"{last[2]} since {last[0]}"])
