"""What changes between releases of a library, from the results that `study versions` kept.

Questions whose answers change in the same releases are one change. A release that was not tried may be the first one.
"""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pandas as pd
from packaging.version import Version

from study.conform import output, trials
from study.conform.suite import ADAPTERS
from study.errors import Stop
from study.io.parsing import from_json
from study.io.tables import say, say_wrapped
from study.io.words import joined
from study.spec.arms import ROOT

COMMITTED = ROOT / "reports" / "conform" / "releases"
UNUSABLE = 0.5  # a release in which one message ends a larger share of the properties is left out
CONFIGURATION = "configuration"  # in the place of an adapter: how a release reads a config
REPRODUCTION = "reproduction"  # in the place of an adapter: what a script finds
WITH_VALUES = (CONFIGURATION, REPRODUCTION)  # their answers are values
NO_ANSWER = "does not run"
MOST = 5  # changes that a report shows first
RANKING = ("holds", "not applicable", "refused", "fails")
HEADINGS = {
    "worse": "Worse in {until}:",
    "better": "Better in {until}:",
    "other": "Configurations that {until} reads in another way, and reproductions that find something else:",
    "between": "The same in both releases, and another answer between them:",
}
Span = tuple[str, str, str]  # the first and the last of releases with the same answer, and the answer


def tell(package: str, since: str, until: str, folder: Path) -> None:
    """Say what changes from one release to another."""
    rows, unusable = answers(folder)
    rows = rows[rows["package"] == package]
    tried = sorted(set(rows["release"]), key=Version)
    if not tried:
        raise Stop(f"{folder} has no results of {package}", "run study versions all")
    since, until = since or tried[0], until or tried[-1]
    for release in (since, until):
        if release not in tried:
            raise Stop(f"{package} {release} was not tried", f"choose from {', '.join(tried)}")
    inside = [release for release in tried if Version(since) <= Version(release) <= Version(until)]
    say(f"{package} {since} to {until}, from the results of {len(inside)} releases: {', '.join(inside)}.")
    every = changes(rows[rows["release"].isin(inside)])
    for direction, heading in HEADINGS.items():
        chosen = [each for each in every if each["direction"] == direction]
        say(*(["", heading.format(until=until)] if chosen else []))
        for each in chosen:
            say_wrapped(each["sentence"], indent="  ", first="- ")
            for line in each["details"]:
                say_wrapped(line, indent="    ", first="    ")
    say("")
    for row in unusable:
        if row["package"] == package and row["release"] in inside:
            say_wrapped(f"Left out: {row['release']} with {row['adapter']}. {row['reason']}", indent="  ")


def write(folder: Path) -> None:
    (folder / "changes.json").write_text(json.dumps(content(folder), indent=1) + "\n", encoding="utf-8")


def content(folder: Path) -> dict:
    """Return what reports show: what matters most, all changes, and each property that changes in each release."""
    rows, unusable = answers(folder)
    found = [{"number": number} | each for number, each in enumerate(changes(rows), 1)]
    of_properties = [each for each in found if each["questions"].keys().isdisjoint(WITH_VALUES)]
    most = [*of_properties[:3], *(each for each in found if each["direction"] == "other")][:MOST]
    groups = rows[rows["adapter"] != CONFIGURATION].groupby(["package", "adapter"], sort=False)
    tables = [_table(str(package), str(adapter), each, found) for (package, adapter), each in groups]
    tables.sort(key=lambda each: len(each["releases"]), reverse=True)
    return {"most": most, "changes": found, "unusable": unusable, "tables": tables}


def _table(package: str, adapter: str, rows: pd.DataFrame, found: list[dict]) -> dict:
    releases = sorted(set(rows["release"]), key=Version)
    wide = rows.pivot(index="question", columns="release", values="answer")[releases]
    given = {name: [None if pd.isna(answer) else answer for answer in each] for name, each in wide.iterrows()}
    numbers = {
        name: each["number"]
        for each in found
        if each["package"] == package
        for name in each["questions"].get(adapter, [])
    }
    kept = [{"question": name, "number": number, "answers": given[name]} for name, number in numbers.items()]
    title = f"{package}: what scripts find" if adapter == REPRODUCTION else f"{package} with the adapter {adapter}"
    about = {"package": package, "adapter": adapter, "title": title, "releases": releases}
    same = [name for name, each in given.items() if name not in numbers and None not in each]
    return about | {"same": len(same), "rows": kept}


# --- answers -------------------------------------------------------------------------------------------------------


def answers(folder: Path) -> tuple[pd.DataFrame, list[dict]]:
    """Return each answer of each release, and the releases that cannot be used with an adapter, with the reason."""
    rows: list[dict] = []
    unusable = []
    known = output.explanations()
    for package, release, path in _files(folder):
        results, versions = output.load(path)
        about = {"package": package, "release": release, "adapter": path.stem}
        if reason := _unusable(results, from_json(path.read_bytes()).get("reason", "")):
            unusable.append(about | {"reason": reason})
            continue
        for each in results:
            explained = output.explanation(each, known, versions)
            why = explained.why if explained else ""
            own = {"question": each.property, "answer": each.status, "words": each.words, "why": why}
            documented = explained is not None and explained.kind == "documented difference"
            rows.append(about | own | {"silent": each.kind == "differs" and not documented})
    frame = pd.DataFrame(rows + list(_configurations(folder)))
    return frame.fillna({"words": "", "why": "", "silent": False}).astype({"silent": bool}), unusable


def _unusable(results: list[output.Result], reason: str) -> str:
    ended = Counter(each.words for each in results if each.status in ("fails", "refused") and each.kind != "differs")
    words, count = max(ended.items(), key=lambda pair: pair[1], default=("", 0))
    return reason or (f"{count} of {len(results)} properties: {words}" if count > UNUSABLE * len(results) else "")


def _files(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield package, release and file of all results: of the kept releases, and of the installed one."""
    paths = [path for path in sorted(folder.glob("*-*/*.json")) if path.stem in ADAPTERS]
    for path in paths:
        package, _, release = path.parent.name.rpartition("-")
        yield package, release, path
    for package, adapter in sorted({(path.parent.name.rpartition("-")[0], path.stem) for path in paths}):
        path = COMMITTED.parent / f"{adapter}.json"
        yield package, output.load(path)[1][package] or "", path


def _configurations(folder: Path) -> Iterator[dict]:
    """Yield the answers to the trials of the ledger."""
    paths = sorted(folder.glob(f"*-*/{trials.ANSWERS}"))
    found = [(*path.parent.name.rpartition("-")[::2], from_json(path.read_bytes())) for path in paths]
    now = {trials.key(row["trial"]): row for row in trials.installed()}
    for package in sorted({package for package, _, _ in found}):
        values = {key: row["found"] for key, row in now.items() if row["trial"] in trials.concerning(package)}
        found.append((package, trials.installed()[0]["versions"][package], values))
    for package, release, values in found:
        for key in filter(values.__contains__, now):
            yield {"package": package, "release": release} | _answered(now[key]["trial"], values[key])


def _answered(trial: dict, value: object) -> dict:
    """Return a question and its answer. If a script ends with an error, its message is not part of the answer."""
    if not trials.is_reproduction(trial):
        return {"adapter": CONFIGURATION, "question": trials.key(trial), "answer": json.dumps(value)}
    about = {"adapter": REPRODUCTION, "question": trial["name"]}
    if isinstance(value, dict) and "error" in value:
        return about | {"answer": json.dumps(NO_ANSWER), "words": value["error"]}
    return about | {"answer": json.dumps(float(f"{value:.3g}") if isinstance(value, float) else value)}


# --- changes -------------------------------------------------------------------------------------------------------


def changes(rows: pd.DataFrame) -> list[dict]:
    """Return what changes, the weightiest first: wrong results without a message, then crashes, then the others."""
    groups: dict[tuple, list[pd.DataFrame]] = {}
    for (package, adapter, _), each in rows.groupby(["package", "adapter", "question"], sort=False):
        each = each.sort_values("release", key=lambda column: column.map(Version))
        spans = _spans(each)
        if len(spans) > 1:
            kind = adapter if adapter in WITH_VALUES else ""
            groups.setdefault((package, kind, *spans), []).append(each)
    found = [_change(package, spans, pd.concat(each)) for (package, _, *spans), each in groups.items()]
    return sorted(found, key=lambda each: each["weight"], reverse=True)


def _spans(rows: pd.DataFrame) -> list[Span]:
    pairs = groupby(zip(rows["release"], rows["answer"], strict=True), key=lambda pair: pair[1])
    runs = [(answer, [release for release, _ in run]) for answer, run in pairs]
    return [(releases[0], releases[-1], answer) for answer, releases in runs]


def _change(package: str, spans: list[Span], rows: pd.DataFrame) -> dict:
    configured = rows["adapter"].iloc[0] in WITH_VALUES
    questions = {str(name): list(each["question"].unique()) for name, each in rows.groupby("adapter", sort=False)}
    first, last = spans[0][2], spans[-1][2]
    wrong = rows[rows["answer"].isin(["fails", "refused"])].sort_values("silent", ascending=False, kind="stable")
    silent = sorted(set(rows.loc[rows["silent"], "release"]), key=Version)
    change: dict = {"package": package, "spans": spans, "questions": questions, "silent": silent}
    change["weight"] = _weight(spans, questions, bool(silent))
    if configured:
        words = [f"Does not run: {each}" for each in sorted(set(rows["words"]) - {""})]
        return change | {"direction": "between" if first == last else "other", **_configured(spans, questions, words)}
    change["direction"] = _direction(first, last)
    named = "; ".join(f"{adapter}: {joined(names)}" for adapter, names in questions.items())
    adapter, (name, *_) = next(iter(questions.items()))
    seen = wrong.iloc[0]
    more = "" if package == "deepspeed" else f" --package {package}"
    details = [f"{'A wrong result without a message: ' if silent else ''}{seen['words']}.", seen["why"]]
    details += [f"Shown by: study bisect {adapter} {name} {spans[0][1]} {spans[1][0]}{more}"]
    if seen["answer"] == "fails":
        details += [f"Script: study report-bug {adapter}/{name}@{package}-{seen['release']}"]
    return change | {"sentence": f"{history(spans)}: {named}", "details": [each for each in details if each]}


def _direction(first: str, last: str) -> str:
    if first == last:
        return "between"
    return "worse" if RANKING.index(last) > RANKING.index(first) else "better"


def _weight(spans: list[Span], questions: dict[str, list[str]], silent: bool) -> list[int]:
    """Return what orders changes: properties before configurations, silence before messages, then how many, how new."""
    answers = {answer for _, _, answer in spans}
    newest = list(Version(spans[-1][0]).release)
    if not questions.keys().isdisjoint(WITH_VALUES):  # a key that is rejected says more than a default that changed
        known = answers - {json.dumps(NO_ANSWER)}
        return [0 if len(known) > 1 else -1, known.isdisjoint({'"accepted"', '"rejected"'}), 0, 0, *newest]
    return [1, silent, max(map(RANKING.index, answers)), sum(map(len, questions.values())), *newest]


def _configured(spans: list[Span], questions: dict[str, list[str]], words: list[str]) -> dict:
    names = {name for names in questions.values() for name in names}
    known_trials = {trials.key(row["trial"]): row["trial"] for row in trials.installed()}
    known_trials = {key: trial for key, trial in known_trials.items() if names & {key, trial.get("name")}}
    named = joined(sorted(map(trials.words, known_trials.values())))
    claims = trials.claims(set(known_trials))
    details = [_claim(name, values, tolerance, spans) for name, values, tolerance in claims]
    scripts = [trial["name"] for trial in known_trials.values() if trials.is_reproduction(trial)]
    details += [f"Shown by: study/reproductions/{name}.py" for name in scripts]
    return {"sentence": f"{named}: {history(spans)}", "details": [*details, *words]}


def is_right(answer: object, value: object, tolerance: float) -> bool:
    numbers = [each for each in (answer, value) if isinstance(each, (int, float)) and not isinstance(each, bool)]
    if len(numbers) == 2:
        return abs(numbers[0] - numbers[1]) <= tolerance * abs(numbers[1])
    return str(answer) == str(value)


def _claim(name: str, values: list, tolerance: float, spans: list[Span]) -> str:
    """Say since when a claim is right, or out of date. All questions of a change have the same answers."""
    given = [(first, json.loads(answer)) for first, _, answer in spans if json.loads(answer) != NO_ANSWER]
    right = [(first, all(is_right(answer, value, tolerance) for value in values)) for first, answer in given]
    phases = [next(each) for _, each in groupby(right, key=lambda pair: pair[1])]
    if len(phases) < 2:
        return f"Claim {name} rests on this."
    since, now = phases[-1]
    return f"Claim {name} is {'right' if now else 'out of date'} since {since}."


def history(spans: list[Span]) -> str:
    """Return the spans in words: holds until A, fails from B to C, holds since D."""
    first, *between, last = spans
    middle = [f"{answer} {f'in {one}' if one == other else f'from {one} to {other}'}" for one, other, answer in between]
    return ", ".join([f"{first[2]} until {first[1]}", *middle, f"{last[2]} since {last[0]}"])
