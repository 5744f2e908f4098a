"""`study diff`: why the losses or the memory of two trainings differ, or what changes between two releases."""

import re
from dataclasses import asdict
from pathlib import Path

import tyro

from study.cli import releases
from study.cli.findings import say_indented, show_finding
from study.configs.differences import Difference, compare
from study.configs.mistakes import mistakes
from study.configs.settings import Setting, effective_settings, same
from study.configs.shown import is_secret, printable, shown
from study.configs.sources import OTHER, Source, read
from study.configs.stacks import CONFIGS
from study.core.arms import all_paths, of_stage
from study.core.errors import Stop
from study.core.library_defaults import releases_of_defaults
from study.core.text import say, say_wrapped
from study.known.findings import with_id


def diff(first: tyro.conf.Positional[Path], second: tyro.conf.Positional[Path], /) -> dict:
    """List why the losses or the memory of two trainings differ: known causes first, then all other keys.

    Each side is an Accelerate yaml, a DeepSpeed json, arguments of the Hugging Face Trainer (json or yaml), or a
    record. The two sides may be of different kinds. Of two releases, such as deepspeed==0.18.2 and deepspeed==0.19.8,
    in any order, it lists which defaults and which configs that are accepted changed between them, by the kept answers,
    and which known faults were fixed or are new; of two lists of releases, such as `pip freeze` writes, the same for
    each package.

    With --json: the rows. Example: `study diff accelerate_configs/ddp.yaml accelerate_configs/zero2.yaml`

    Args:
        first: A config file, an arm, a folder with a record.json, a release, or a list of releases: A in the answer.
        second: The other one: B.
    """
    if two := re.fullmatch(r"([\w-]+)==(\S+) \1==(\S+)", f"{first} {second}"):
        return releases.apart(two[1], [two[2], two[3]])
    if "==" in first.name or "==" in second.name:
        what = f"two releases of one package can be compared (got {first} and {second})"
        raise Stop(what, "name one package twice, such as trl==1.8.0 trl==1.12.0; `study stack` takes several")
    lists = [path for path in (first, second) if releases.listed(path)]
    if len(lists) == 2:
        return releases.lists_apart(first, second)
    if lists:
        raise Stop(f"{lists[0]} is a list of releases, and the other is none", "name two lists, or two configs")
    return configs_apart(read_config(first), read_config(second))


def read_config(path: Path) -> Source:
    """Read one side. A name of an arm is its file, unless something here is called so."""
    if not path.exists():
        path = all_paths().get(of_stage(str(path)), path)
    is_config = path.suffix in CONFIGS or not path.is_file()  # a record is a folder
    try:
        side = read(path)
    except Stop:
        if is_config:
            raise
        side = None
    if side is None or (side.kind == OTHER and not is_config):  # a line of a log may be YAML
        raise Stop(f"{path} is no config", "name a .json or .yaml file; study diagnose reads logs")
    return side


def configs_apart(a: Source, b: Source) -> dict:
    """Show in which settings two configs or records differ, and what is wrong in one alone."""
    known, others = compare(a, b)
    names = ", ".join(map(_name, known))
    nothing = "no known cause differs, but other keys do" if others else "no setting that differs"
    say_wrapped(f"What changes losses or memory: {names or nothing}.")
    found_in_a = _show_side("A", a)
    found_in_b = _show_side("B", b)
    for number, each in enumerate(known, 1):
        say("")
        say_wrapped(_values(each), indent="    ", first=f"{number:>2}. ")
        why = f"Changes {each.description.changes}: {each.description.sentence}"
        say_indented(with_id(why, each.description.id))
    if others:
        say("", "Other keys that differ:")
        say_wrapped(*map(_values, others), indent="    ", first="  ")
    settings = [*effective_settings(a).values(), *effective_settings(b).values()]
    if any(each.is_default for each in settings):
        say_wrapped("", f"Defaults are those of {releases_of_defaults()}.")
    rows = {"known": list(map(_row, known)), "other": list(map(_row, others))}
    return rows | {"found_in_a": found_in_a, "found_in_b": found_in_b}


def _name(difference: Difference) -> str:
    older = " with older releases" if same(difference.a.value, difference.b.value) else ""
    return f"{printable(difference.name)}{older}"


def _show_side(letter: str, side: Source) -> list[dict]:
    """Show what is wrong in one side alone."""
    say_wrapped("", f"{letter}: {side.path} ({side.words})", indent="   ")
    findings = list(mistakes(side))
    for finding in findings:
        show_finding("  - ", finding)
    return list(map(asdict, findings))


def _values(difference: Difference) -> str:
    a, b = (_value(side, difference.name) for side in (difference.a, difference.b))
    return f"{printable(difference.name)}: A {a}, B {b}"


def _value(side: Setting, name: str) -> str:
    return shown(side, name) + (f" (the library's default{side.older})" if side.is_default else "")


def _row(difference: Difference) -> dict:
    # A config of somebody else may hold a token, and this answer may be sent to somebody.
    sides = (difference.a.value, difference.b.value)
    a, b = ("(not shown)" if is_secret(difference.name, value) else value for value in sides)
    row = {"name": difference.name, "a": a, "b": b}
    if difference.is_known:
        about = difference.description
        row |= {"id": about.id, "changes": about.changes, "why": about.sentence}
    return row
