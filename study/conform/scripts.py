"""Writes a failure as one script that imports nothing of this study: the adapter, the model, the check and its case.

Of each file, the script contains the definitions that the check needs, and no others.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from study.conform.suite import DEFAULTS, HERE, Adapter, Property
from study.core.errors import Stop

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
    start, end = _frame(each)
    theirs, functions = _of_adapter(adapter, each)
    used = reachable([part for name in OURS for part in parts(HERE / name)], _names(ast.parse(end)))
    mine = [part for part in used if not part.is_import]
    if clash := _defines(theirs) & _defines(mine):
        raise Stop(f"{adapter.path} and the suite both define {min(clash)}", "rename it in your adapter")
    imports = {part.source for part in used if part.is_import} - {part.source for part in theirs}
    pairs = ", ".join([*(f"{name}={name}" for name in functions), f"settings={adapter.settings!r}"])
    blocks = [f'"""{about}\n"""', start, *(part.source for part in theirs)]
    blocks += sorted(source for source in imports if source not in start)
    blocks += [f"ADAPTER = SimpleNamespace({pairs})", *(part.source for part in mine), end]
    return "\n".join(block if block.startswith(("import", "from")) else f"{block}\n" for block in blocks)


def _frame(each: Property) -> list[str]:
    """Return what stands before and after the definitions: it starts the ranks, and holds the property."""
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in each.case.items()}
    changed = {key: value for key, value in given.items() if each.case[key] != DEFAULTS[key]}
    case = ", ".join(f"{key}={value if key == 'model' else repr(value)}" for key, value in changed.items())
    template = (HERE / "templates" / "script.py.txt").read_text(encoding="utf-8")
    return template.format(launches=each.ranks, case=case, check=each.check).split("# ---\n")


def _of_adapter(adapter: Adapter, each: Property) -> tuple[list[Part], list[str]]:
    """Return the statements that a property needs of an adapter and of the file that ours share, and its functions."""
    shared = [HERE / "adapters" / f"{name}.py" for name in SHARED.findall(adapter.path.read_text())]
    every = {part.source: part for path in [*shared, adapter.path] for part in parts(path)}.values()
    functions = [name for name in (*each.functions, "gradient_norm") if name in _defines(every)]
    return reachable(list(every), set(functions)), functions


def _defines(some: Iterable[Part]) -> set[str]:
    return {name for part in some for name in part.defines}


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
