"""Writes a failure as one script that imports nothing of this study: the adapter, the model, the check and its case.

Of each file, the script contains the definitions that the check needs, and no others.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from study.conform.suite import DEFAULTS, HERE, Adapter, Property
from study.errors import Stop

OURS = ("models.py", "cases.py", "checks.py")
DEFINITION = (ast.FunctionDef, ast.ClassDef)
IMPORT = (ast.Import, ast.ImportFrom)
SHARED = re.compile(r"study\.conform\.adapters\.(\w+)")


@dataclass(frozen=True)
class Part:
    """A statement at the top of a file."""

    source: str
    defines: frozenset[str]
    uses: frozenset[str]
    is_import: bool
    optional: bool  # left out if nothing uses what it defines


def script(adapter: Adapter, each: Property, about: str) -> str:
    """Return the source of a script that exits with 0 if the property holds, and with 1 if it fails."""
    ours = [part for name in OURS for part in parts(HERE / name)]
    theirs = [part for path in _files(adapter.path) for part in parts(path)]
    given = {name for part in theirs for name in part.defines}
    functions = [name for name in (*each.functions, "gradient_norm") if name in given]
    theirs = reachable(list({part.source: part for part in theirs}.values()), set(functions))
    case = ", ".join(f"{key}={_value(key, value)}" for key, value in each.case.items() if value != DEFAULTS[key])
    template = (HERE / "templates" / "script.py.txt").read_text(encoding="utf-8")
    start, end = template.format(launches=each.ranks, case=case, check=each.check).split("# ---\n")
    mine = [part for part in reachable(ours, _names(ast.parse(end))) if part.source not in start]
    _refuse_clash(adapter, theirs, [part for part in mine if not part.is_import])
    imports = sorted({part.source for part in mine if part.is_import} - {part.source for part in theirs})
    pairs = ", ".join([*(f"{name}={name}" for name in functions), f"settings={adapter.settings!r}"])
    blocks = [f'"""{about}\n"""', start, *(part.source for part in theirs), *imports]
    blocks += [f"ADAPTER = SimpleNamespace({pairs})", *(part.source for part in mine if not part.is_import)]
    return "\n".join(block if block.startswith(("import", "from")) else f"{block}\n" for block in [*blocks, end])


def _refuse_clash(adapter: Adapter, theirs: list[Part], mine: list[Part]) -> None:
    clash = {name for part in theirs for name in part.defines} & {name for part in mine for name in part.defines}
    if clash:
        raise Stop(f"{adapter.path} and the suite both define {min(clash)}", "rename it in your adapter")


def _value(key: str, value: object) -> str:
    return str(value) if key == "model" else repr(tuple(value) if isinstance(value, list) else value)


def _files(adapter: Path) -> Iterator[Path]:
    """Yield the file of ours that an adapter shares with others, if any, and the adapter."""
    if shared := SHARED.search(adapter.read_text()):
        yield HERE / "adapters" / f"{shared[1]}.py"
    yield adapter


def parts(path: Path) -> Iterator[Part]:
    """Yield the statements of a file, without docstrings, comments and imports of this study."""
    for node in ast.parse(path.read_text()).body:
        for inner in ast.walk(node):
            if isinstance(inner, DEFINITION) and _is_docstring(inner.body[0]):
                inner.body = inner.body[1:] or [ast.Pass()]
        source, is_import = ast.unparse(node), isinstance(node, IMPORT)
        if _is_docstring(node) or (is_import and "study." in source):
            continue
        optional = isinstance(node, (*IMPORT, *DEFINITION, ast.Assign))
        yield Part(source, frozenset(_defined(node)), frozenset(_names(node)), is_import, optional)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, DEFINITION):
        return {node.name}
    if isinstance(node, IMPORT):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


def _names(tree: ast.AST) -> set[str]:
    """Return the names that a statement uses."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def reachable(every: list[Part], names: set[str]) -> list[Part]:
    """Return the statements that define these names, and all that those use, in the order of the files."""
    taken = {number for number, part in enumerate(every) if not part.optional}
    names = names | {name for number in taken for name in every[number].uses}
    while more := {n for n, part in enumerate(every) if n not in taken and part.defines & names}:
        taken |= more
        names |= {name for number in more for name in every[number].uses}
    return [every[number] for number in sorted(taken)]
