"""`study diff`: why two trainings differ, by their configs or records."""

from pathlib import Path

import tyro

from study.cli.diagnosis import wrapped
from study.io.tables import say
from study.spec.options import AsJson
from study.watcher import differences, sources
from study.watcher.contradictions import contradictions
from study.watcher.differences import Comparison, Difference, is_secret, printable, shown
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
        values = f"A {shown(difference.a, difference.name)}, B {shown(difference.b, difference.name)}"
        lines += ["", *wrapped(f"{number:>2}. {difference.name}: {values}", "    ", first="")]
        for letter, said in (("A", difference.a), ("B", difference.b)):
            lines += wrapped(f"{letter}: {said.why}.", "    ") if said.value is not None and said.why else []
        lines += wrapped(f"Changes {difference.cause.changes}: {difference.cause.why}.", "    ")
    return lines


def _others(compared: Comparison) -> list[str]:
    lines = []
    if compared.other:
        lines += ["", "Other keys that differ:"]
        for each in compared.other:
            lines += wrapped(
                f"{each.name}: A {shown(each.a, each.name)}, B {shown(each.b, each.name)}", "    ", first="  "
            )
    for letter, names in (("A", compared.only_a), ("B", compared.only_b)):
        if names:
            lines += ["", *wrapped(f"Only in {letter}: {_listed(names)}.", "  ", first="")]
    return [*lines, "", *wrapped(f"Equal: {_listed(compared.equal) or 'nothing'}.", "  ", first="")]


def _listed(names: list[str]) -> str:
    shown_names = [printable(name) for name in names[:MOST]]
    return ", ".join(shown_names) + (f" and {len(names) - MOST} more" if len(names) > MOST else "")


def _as_json(compared: Comparison) -> dict:
    def row(difference: Difference) -> dict:
        a, b, cause = difference.a, difference.b, difference.cause
        why = {"changes": cause.changes, "why": cause.why} if cause else {}
        values = ["(not shown)" if is_secret(difference.name) else said.value for said in (a, b)]
        return {"name": difference.name, "a": values[0], "a_why": a.why, "b": values[1], "b_why": b.why} | why

    return {
        "known": [row(difference) for difference in compared.known],
        "other": [row(difference) for difference in compared.other],
        "only_a": compared.only_a,
        "only_b": compared.only_b,
        "equal": compared.equal,
    }
