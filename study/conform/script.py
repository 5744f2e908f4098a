"""Writes a failure as one script that imports nothing of this study: the adapter, the model, the check and its case."""

import ast
import re
from pathlib import Path

from study.conform.suite import HERE, Adapter, Answer, Property, libraries
from study.core.errors import Stop

OURS = [HERE / name for name in ("models.py", "cases.py", "checks.py")]
SHARED = HERE / "adapters" / "deepspeed_common.py"  # by the adapters of DeepSpeed
START = '''"""{about}
"""
import os
import subprocess
import sys
import tempfile
import types

if "RANK" not in os.environ:  # starts its own ranks
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", FOLDER=tempfile.mkdtemp())
    for launch, ranks in enumerate({ranks}):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={{ranks}}"]
        if subprocess.run([*torchrun, __file__], env=os.environ | {{"LAUNCH": str(launch)}}).returncode:
            sys.exit("fails")
    print("holds")
    sys.exit()
'''
END = """
ADAPTER = types.SimpleNamespace(**globals())  # with {functions}, gradient_norm
BUILD = functools.partial(ShardedTraining, ADAPTER, {settings}, Path(os.environ["FOLDER"]))
dist.init_process_group("gloo")
try:
    {check}(BUILD, Case({case}), int(os.environ["LAUNCH"]))
except Difference as difference:
    print(f"rank {{dist.get_rank()}}: {{difference}}", flush=True)
    os._exit(1)
os._exit(0)  # gloo's threads may abort an ordinary exit
"""


def write(folder: Path, adapter: Adapter, each: Property, seen: Answer) -> None:
    """Write the script of a failure. It exits with 0 if the property holds, and with 1 if it fails."""
    about = f"Expected: {each.sentence}. Asked in: {each.source}.\n\nSeen ({libraries(seen)}): {seen.words}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{adapter.name}-{each.name}.py").write_text(script(adapter, each, about), encoding="utf-8")


def script(adapter: Adapter, each: Property, about: str) -> str:
    """Return the source of a script. Of each file, it has the statements that the check needs, and no others."""
    shared = [SHARED] if SHARED.stem in adapter.path.read_text() else []
    theirs = [node for path in [*shared, adapter.path] for node in _statements(path)]
    mine = [node for path in OURS for node in _statements(path)]
    if clash := {name for node in theirs for name in _defined(node)} & {getattr(node, "name", "") for node in mine}:
        raise Stop(f"{adapter.path} and the suite both define {min(clash)}", "rename it in your adapter")
    case = ", ".join(f"{key}={value if key == 'model' else repr(value)}" for key, value in each.case.items())
    functions = ", ".join(each.functions)
    end = END.format(functions=functions, settings=adapter.settings, check=each.check, case=case)
    used, kept = set(re.findall(r"\w+", end)), dict.fromkeys([*theirs, *mine], "")
    while more := [node for node, source in kept.items() if not source and _defined(node) & used]:
        kept |= {node: ast.unparse(node) for node in more}
        used |= {name for node in more for name in re.findall(r"\w+", kept[node])}
    lines = dict.fromkeys(filter(None, kept.values()))  # an import that several files have stands there once
    return "\n".join([START.format(about=about, ranks=each.ranks), *lines, end])


def _statements(path: Path) -> list[ast.stmt]:
    """Return the statements of a file, without docstrings, comments and imports of this study."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return [node for node in tree.body if not ast.unparse(node).startswith("from study.")]


def _defined(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines; for one that only does something, a word of every script."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    stored = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return stored or {"ADAPTER"}
