"""`study conform`: hold ways of sharding to one process, on the same weights and data, with the same arithmetic."""

import ast
import dataclasses
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from study.conform import releases, script
from study.conform.suite import (
    ADAPTERS,
    NEEDED,
    PROPERTIES,
    Adapter,
    Property,
    PropertyAnswer,
    Ranks,
    explanation,
    libraries,
)
from study.core.errors import Stop, nearest
from study.core.text import bar, number_of, say, say_wrapped, show

ANSWERS = ("holds", "fails", "refused", "not applicable")


def conform(
    names: tuple[str, ...] = (), /, *, only: str = "", release: str = "", out: Path | None = None
) -> dict[str, Any]:
    """Is a sharded training equal to one process? Each property is tried on two gloo ranks, some on one or four.

    Without names, the adapters of this study are listed, and the properties with where they come from. A property
    holds, fails, is refused by the library in its words, or is not applicable. The exit code is 1 if one fails.

    With --json: the answers, what releases change, or lists. Example: `study conform zero2 --release 0.18.1..0.19.8`

    Args:
        names: The adapters of this study to run; or a file with an adapter of yours. It is Python code, and
            runs with your rights: run only code that you trust. It defines build, forward_backward, step (which
            returns the norm of the gradients, if it is known), whole_weights; if it can, save(trainer, folder), which
            makes the folder, and load(trainer, folder, weights_only); if there is a module inside the wrapper, inner,
            and the mode "inner" of forward_backward. What the file itself refuses by NotImplementedError is not
            applicable. examples/zero_by_hand/adapter.py is one, study/conform/adapters/pytorch.py has all.
        only: Run only properties whose name contains this text.
        release: Two releases of the adapter's library, such as 0.16.4..0.19.8: nothing is run, and the kept answers
            say what changes between them.
        out: Add the answers to answers.csv in this folder, and write each failure as a script that runs alone.
    """
    properties = [each for name, each in PROPERTIES.items() if only in name]
    if not properties:
        raise Stop(f"no property has {only!r} in its name", "study conform lists them")
    if not names:
        return _show_lists(properties)
    # --- what releases answered, or answers of today
    if release:
        since, _, until = release.partition("..")
        return {name: _show_changes(name, since, until) for name in names}
    adapters = list(map(_adapter, names))  # a wrong name is seen before anything runs
    answers = []
    for adapter in adapters:
        answers += _hold(adapter, properties, out)
    fine = all(each.answer != "fails" for each in answers)
    return {"fine": fine, "answers": list(map(dataclasses.asdict, answers))}


def _show_lists(properties: list[Property]) -> dict[str, list[dict]]:
    adapters = [{"adapter": each.name, "what": each.about} for each in ADAPTERS.values()]
    show(adapters)
    asked = [{"property": each.name, "says": each.sentence, "from": each.source} for each in properties]
    show(asked)
    return {"adapters": adapters, "properties": asked}


def _adapter(name: str) -> Adapter:
    # A file comes before an adapter of ours that has its name.
    path = Path(name)
    if path.is_file():
        text = path.read_text(errors="replace")  # it is imported in ten seconds and more, with its libraries
        missing = [each for each in NEEDED if each not in text]
        if missing and "import *" not in text:  # what that brings is known once it is imported
            what = f"{path} does not define {', '.join(missing)}"
            raise Stop(what, "write them as in examples/zero_by_hand/adapter.py")
        try:
            ast.parse(text)
        except (SyntaxError, ValueError) as error:
            raise Stop(f"{path} is no Python ({error})", "fix it, or name another file") from None
        return Adapter(str(path.resolve()), name, name=path.stem)
    if name not in ADAPTERS:
        raise Stop(f"{name!r} is neither an adapter nor a file", nearest(name, ADAPTERS))
    return ADAPTERS[name]


def _hold(adapter: Adapter, properties: list[Property], out: Path | None) -> list[PropertyAnswer]:
    """Hold an adapter to properties, and show what came of it."""
    asked = f"asking {adapter.name} for {number_of(len(properties), 'properties')}"
    with tempfile.TemporaryDirectory() as logs, Ranks(Path(logs, "log.txt")) as ranks, bar(asked):
        results = [ranks.ask(adapter, each) for each in properties]
    if out:
        _keep(adapter, results, out)
    _show_answers(adapter.name, results)
    return results


def _show_answers(name: str, results: list[PropertyAnswer]) -> None:
    """Show how many properties hold, and each that does not."""
    of = {answer: [each for each in results if each.answer == answer] for answer in ANSWERS}
    applicable = len(results) - len(of["not applicable"])
    say_wrapped(f"{name}: {len(of['holds'])} of {applicable} properties hold with {libraries(results[0])}.")
    for each in of["fails"] + of["refused"]:
        say_wrapped(f"{each.property} {each.answer}: {each.words}", indent="  ", first="- ")
    _show_explanations(results)
    # --- many properties are not applicable for one reason
    names_by_reason = defaultdict(list)
    for each in of["not applicable"]:
        names_by_reason[each.words].append(each.property)
    for reason, names in names_by_reason.items():
        say_wrapped(f"Not applicable, {reason}: {', '.join(names)}", indent="  ", first="- ")


def _keep(adapter: Adapter, results: list[PropertyAnswer], out: Path) -> None:
    """Add answers to those in a folder, and write each failure as a script."""
    releases.keep(out / "answers.csv", results)
    for answer in results:
        if answer.answer == "fails":
            script.write(out / "scripts" / f"{adapter.name}-{answer.property}.py", adapter, answer)


def _show_changes(name: str, since: str, until: str) -> dict[str, list[str]]:
    """Show which kept answers change from one release to another, and why; return properties by what changes."""
    changed, answers = releases.changes(name, since, until)
    say(f"{name}: {sum(map(len, changed.values()))} answers change from {since} to {until}.", "")
    for history, questions in changed.items():
        say_wrapped(f"{history}:")
        say_wrapped(", ".join(questions), indent="    ", first="    ")
    _show_explanations(answers)
    return {history: [*questions] for history, questions in changed.items()}


def _show_explanations(answers: list[PropertyAnswer]) -> None:
    # Many failures may have one reason, which is said once, with the properties that show it.
    shown_by: dict = defaultdict(dict)
    for answer in answers:
        shown_by[explanation(answer)][answer.property] = None
    for why, names in shown_by.items():
        if why:
            say_wrapped(f"{why} Properties that show it: {', '.join(names)}.", indent="  ", first="- ")
