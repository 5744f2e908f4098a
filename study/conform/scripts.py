"""Writes a failure as one script that imports nothing of this study: the adapter, the model, the check and its case.

Of each file, the script contains the definitions that the check needs, and no others.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from study.errors import Stop

HERE = Path(__file__).parent
OURS = ("models.py", "cases.py", "checks.py")
ALWAYS = ("build", "forward_backward", "step", "whole_weights", "gradient_norm")
CHECKPOINTS = ("save", "load")
LAUNCHER = """\
import os
import subprocess
import sys
import tempfile
from pathlib import Path

if "RANK" not in os.environ:  # starts its own ranks
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", FOLDER=tempfile.mkdtemp())
    for launch, ranks in enumerate({launches}):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={{ranks}}"]
        if subprocess.run([*torchrun, __file__], env=os.environ | {{"LAUNCH": str(launch)}}).returncode:
            sys.exit("fails")
    print("holds")
    sys.exit()
"""
END = """\
CASE = Case({case})
dist.init_process_group("gloo")
try:
    {check}(ADAPTER, CASE, Path(os.environ["FOLDER"]), int(os.environ["LAUNCH"]))
except Difference as difference:
    print(f"rank {{dist.get_rank()}}: {{difference}}", flush=True)
    os._exit(1)
os._exit(0)  # gloo's threads may abort an ordinary exit
"""


@dataclass(frozen=True)
class Part:
    """A statement at the top of a file."""

    source: str
    defines: frozenset[str]
    uses: frozenset[str]
    is_import: bool
    optional: bool  # left out if nothing uses what it defines


def script(adapter_file: str, settings: dict, check: str, case: dict, launches: tuple[int, ...], about: str) -> str:
    """Return the source of a script that exits with 0 if the property holds, and with 1 if it fails.

    A case is its fields that are not the defaults; a model is given by its name.
    """
    adapter = list({part.source: part for path in _files(Path(adapter_file)) for part in parts(path)}.values())
    ours = [part for name in OURS for part in parts(HERE / name)]
    given = {name for part in adapter for name in part.defines}
    functions = [*ALWAYS, *(CHECKPOINTS if check.startswith("checkpoint") else ())]
    functions += [] if case.get("schedule", "") in ("", "falling") else ["schedule"]
    functions = [name for name in functions if name in given]
    end = END.format(case=", ".join(f"{key}={_value(key, value)}" for key, value in case.items()), check=check)
    theirs = reachable(adapter, set(functions))
    mine = reachable(ours, {name for node in ast.walk(ast.parse(end)) for name in _names(node)})
    clash = {name for part in theirs for name in part.defines} & {
        name for part in mine if not part.is_import for name in part.defines
    }
    if clash:
        raise Stop(f"{adapter_file} and the suite both define {min(clash)}", "rename it in your adapter")
    pairs = ", ".join([*(f"{name}={name}" for name in functions), f"settings={settings!r}"])
    given_already = {*LAUNCHER.splitlines(), *(part.source for part in theirs)}
    imports = sorted({part.source for part in mine if part.is_import} - given_already)
    blocks = [f'"""{about}\n"""', LAUNCHER.format(launches=launches)]
    blocks += [*(part.source for part in theirs), "\n".join(imports), f"ADAPTER = SimpleNamespace({pairs})"]
    blocks += [part.source for part in mine if not part.is_import]
    return (
        "\n".join(f"{block}{'' if block.startswith(('import', 'from')) else chr(10)}" for block in blocks) + "\n" + end
    )


def _value(key: str, value: object) -> str:
    return str(value) if key == "model" else repr(tuple(value) if isinstance(value, list) else value)


def _files(adapter: Path) -> Iterator[Path]:
    """Yield the file of ours that an adapter shares with others, if any, and the adapter."""
    if shared := re.search(r"study\.conform\.adapters\.(\w+)", adapter.read_text()):
        yield HERE / "adapters" / f"{shared[1]}.py"
    yield adapter


def parts(path: Path) -> Iterator[Part]:
    """Yield the statements of a file, without docstrings and comments."""
    for node in ast.parse(path.read_text()).body:
        if _is_docstring(node):
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef | ast.ClassDef) and _is_docstring(inner.body[0]):
                inner.body = inner.body[1:] or [ast.Pass()]
        uses = frozenset(name for inner in ast.walk(node) for name in _names(inner))
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        optional = is_import or isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign)
        source = ast.unparse(node)
        if is_import and "study." in source:
            continue
        yield Part(source, frozenset(_defined(node)), uses, is_import, optional)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


def _names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return {node.id}
    return set()


def reachable(every: list[Part], names: set[str]) -> list[Part]:
    """Return the statements that define these names, and all that those use, in the order of the files."""
    taken = {number for number, part in enumerate(every) if not part.optional}
    names = names | {name for number in taken for name in every[number].uses}
    while more := {n for n, part in enumerate(every) if n not in taken and part.defines & names}:
        taken |= more
        names |= {name for number in more for name in every[number].uses}
    return [every[number] for number in sorted(taken)]
