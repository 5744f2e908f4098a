"""`study diff`: why two trainings differ, by their configs or records."""

from pathlib import Path

import tyro

from study.cli.diagnosis import wrapped
from study.io.tables import say
from study.spec.options import AsJson
from study.watcher import differences, sources
from study.watcher.differences import Comparison, Difference, contradictions, is_secret, printable, shown
from study.watcher.sources import Source

MOST = 24  # names that a line lists


def diff(a: tyro.conf.Positional[Path], b: tyro.conf.Positional[Path], /, *, as_json: AsJson = False) -> dict | None:
    """List why the losses or the memory of two trainings differ: known causes first, then all other keys.

    Each side is an Accelerate yaml, a DeepSpeed json, arguments of the Hugging Face Trainer (json or yaml), or a
    record. The two sides may be of different kinds.

    Args:
        a: The first: a config file, or a folder with a record.json.
        b: The second.
        as_json: Print everything as JSON.
    """
    first, second = sources.read(a), sources.read(b)
    compared = differences.compare(first, second)
    if as_json:
        return _as_json(compared) | {
            "a_contradictions": contradictions(first),
            "b_contradictions": contradictions(second),
        }
    say(*_sides(first, second), *_causes(compared), *_others(compared))
    return None


def _sides(a: Source, b: Source) -> list[str]:
    lines = []
    for letter, source in (("A", a), ("B", b)):
        lines += wrapped(f"{letter}: {source.path} ({source.words})", "   ", first="")
        lines += wrapped(f"{source.unread}.", "   ") if source.unread else []
        for each in contradictions(source):
            lines += wrapped(f"- {each}.", "     ", first="   ")
    return lines


def _causes(compared: Comparison) -> list[str]:
    if not compared.known:
        return ["", "No setting differs that is known to change losses or memory."]
    lines = ["", "What makes them differ:"]
    for number, difference in enumerate(compared.known, 1):
        lines += ["", *wrapped(f"{number:>2}. {_values(difference)}", "    ", first="")]
        for letter, setting in (("A", difference.a), ("B", difference.b)):
            if setting.value is not None and setting.origin:
                lines += wrapped(f"{letter}: {setting.origin}.", "    ")
        if difference.description:
            lines += wrapped(f"Changes {difference.description.changes}: {difference.description.why}.", "    ")
    return lines


def _others(compared: Comparison) -> list[str]:
    lines = ["", "Other keys that differ:"] if compared.other else []
    for difference in compared.other:
        lines += wrapped(_values(difference), "    ", first="  ")
    for letter, names in (("A", compared.only_a), ("B", compared.only_b)):
        if names:
            lines += ["", *wrapped(f"Only in {letter}: {_listed(names)}.", "  ", first="")]
    return [*lines, "", *wrapped(f"Equal: {_listed(compared.equal) or 'nothing'}.", "  ", first="")]


def _values(difference: Difference) -> str:
    name = difference.name
    return f"{name}: A {shown(difference.a, name)}, B {shown(difference.b, name)}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(printable(name) for name in names[:MOST]) + more


def _as_json(compared: Comparison) -> dict:
    return {
        "known": [_row(difference) for difference in compared.known],
        "other": [_row(difference) for difference in compared.other],
        "only_a": compared.only_a,
        "only_b": compared.only_b,
        "equal": compared.equal,
    }


def _row(difference: Difference) -> dict:
    row: dict = {"name": difference.name}
    for letter, setting in (("a", difference.a), ("b", difference.b)):
        row[letter] = "(not shown)" if is_secret(difference.name) else setting.value
        row[f"{letter}_why"] = setting.origin
    if difference.description:
        row |= {"changes": difference.description.changes, "why": difference.description.why}
    return row
