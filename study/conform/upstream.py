"""`study report-bug`: the text of an issue for a failing property or a reproduction. A person files it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import tyro

from study.conform import output, scripts
from study.conform.suite import ADAPTERS, COMMITTED, HERE, Result, smallest
from study.conform.trials import REPRODUCTIONS
from study.errors import Stop
from study.io.tables import say, show
from study.io.validation import nearest
from study.spec.arms import ROOT

UPSTREAM = ROOT / "reports" / "upstream"
LIMIT_S = 120
THREAD = re.compile(r"[\w-]+/[\w-]+#\d+")
Failure = tuple[Result, output.Explanation | None, output.Versions]


def report_bug(names: tyro.conf.Positional[tuple[str, ...]] = (), /, *, out: Path = UPSTREAM) -> None:
    """Write the text of an issue for what still fails with the installed libraries. A person files it.

    Without a name, the failures are listed. A failure of a property is named adapter/property, and in an older release
    adapter/property@deepspeed-0.18.1.

    Args:
        names: A failure, a script of reproductions/ without its ending, or all: one text for each failure that
            has an explanation of its own.
        out: The folder for the texts.
    """
    known: dict[str, Failure] = {}
    for release in {"", *(name.partition("@")[2] for name in names)}:
        known |= failures(release)
    if not names:
        show([{"failure": name, "kind": why.kind if why else "?"} for name, (_, why, _) in known.items()])
        return
    out.mkdir(parents=True, exist_ok=True)
    for name in one_of_each() if names == ("all",) else names:
        script = REPRODUCTIONS / f"{name}.py"
        if name not in known and script not in REPRODUCTIONS.glob("*.py"):
            raise Stop(f"{name!r} is neither a failure nor a reproduction", nearest(name, known))
        text = of_property(name, *known[name]) if name in known else of_reproduction(script)
        path = out / f"{name.replace('/', '-')}.md"
        path.write_text(text, encoding="utf-8")
        say(f"{path}: not filed")


def failures(release: str = "") -> dict[str, Failure]:
    """Return what failed with the installed releases, or with a kept one, with its explanation and the versions."""
    known = {}
    folder, end = (COMMITTED / "releases" / release, f"@{release}") if release else (COMMITTED, "")
    for name in [name for name in ADAPTERS if not release or (folder / f"{name}.json").exists()]:
        results, versions = output.load(folder / f"{name}.json")
        for each in results:
            if each.status == "fails":
                known[f"{name}/{each.property}{end}"] = (each, output.explanation(each, versions), versions)
    return known


def one_of_each() -> list[str]:
    """Return the first failure for each explanation that is a bug."""
    first: dict[str, str] = {}
    for name, (_, why, _) in failures().items():
        if why and why.matters:
            first.setdefault(why.why, name)
    return list(first.values())


def of_property(name: str, result: Result, why: output.Explanation | None, versions: output.Versions) -> str:
    adapter, each = ADAPTERS[result.adapter], smallest(result)
    also = [other for other in (why.adapters if why else ()) if other != adapter.name]
    return _text(
        name,
        versions,
        title=f"{each.sentence}: not with {adapter.about}",
        expected=f"{each.sentence}, as in one process with the same rows.",
        seen=f"{result.words} ({adapter.about}" + (f"; the same with {', '.join(also)})" if also else ")"),
        matters=f"{why.matters} {why.why}" if why else "not yet known",
        thread=", ".join(THREAD.findall(why.why) if why else []) or "none found",
        how="it starts its own ranks, and says `holds` or `fails`",
        script=scripts.script(adapter, each, each.sentence + ".").strip(),
    )


def of_reproduction(path: Path) -> str:
    """Return the issue of a script. It is run now, and its docstring says what is claimed and what happens."""
    source = path.read_text(encoding="utf-8")
    claimed, _, happens = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")
    claimed, happens = (" ".join(text.split()) for text in (claimed.removeprefix("Claimed: "), happens))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return _text(
        path.stem,
        output.installed(),
        title=claimed,
        expected=claimed,
        seen=f"{happens} Printed now: `{(done.stdout or done.stderr).strip().rpartition(chr(10))[2]}`",
        matters="The page or the option promises something else, and there is no message.",
        thread="none found",
        how="it prints what it found",
        script=source.strip(),
    )


def _text(name: str, versions: output.Versions, **fields: str) -> str:
    template = (HERE / "templates" / "issue.md").read_text(encoding="utf-8")
    return template.format(name=name, versions=output.named(versions), python=sys.version.split()[0], **fields)
