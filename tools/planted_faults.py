"""Plant faults into a copy of the study, one at a time, and count how many the fast tests catch.

python tools/planted_faults.py --root . --seed 1 --count 60 --out faults.json study/training

Each fault is one change of one expression: a comparison or branch turned round, a constant or operator changed, a
return value lost. It is caught if one of the test files that are nearest to its module by imports fails, and passes
without the fault. With --room these are all test files of the room's own folder, the nearest first. The share of two
commits is compared by running this file with --root on each.
"""

import argparse
import ast
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

LIBRARIES = (
    "torch.distributed.fsdp",
    "transformers",
    "accelerate",
    "deepspeed",
    "datasets",
    "pandas",
    "matplotlib.pyplot",
)
TURNED = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
SWAPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
# Plain asserts: pytest warns that it cannot rewrite libraries that are imported already.
OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not gpu", "--assert=plain")
IGNORED = (".venv", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", "*.egg-info")


@dataclass(frozen=True)
class Fault:
    file: str
    line: int
    kind: str
    before: str
    after: str
    start: int  # bytes in the file
    end: int
    tests: tuple[str, ...] = ()
    caught_by: str | None = None


def mutants(node: ast.AST) -> Iterator[tuple[str, ast.expr, ast.AST]]:
    """Yield the kind of each fault in a node, the expression that it replaces, and the new one."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in TURNED:
        yield "comparison", node, ast.Compare(node.left, [TURNED[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield "constant", node, ast.Constant(value)
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "branch", node.test, ast.UnaryOp(ast.Not(), node.test)
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        yield "operator", node, ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right)
    if isinstance(node, ast.Return) and not (node.value is None or ast.unparse(node.value) == "None"):
        yield "return", node.value, ast.Constant(None)


def faults_in(root: Path, file: Path) -> Iterator[Fault]:
    """Yield all faults of the functions in a file."""
    content = file.read_bytes()
    starts = [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(content)
    inside_strings = {id(part) for each in ast.walk(tree) if isinstance(each, ast.JoinedStr) for part in ast.walk(each)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    nodes = {id(node): node for function in functions for body in function.body for node in ast.walk(body)}
    for node in nodes.values():
        if id(node) in inside_strings:
            continue
        for kind, old, new in mutants(node):
            assert old.end_lineno  # Python sets both on what it parsed
            assert old.end_col_offset
            start = starts[old.lineno - 1] + old.col_offset
            end = starts[old.end_lineno - 1] + old.end_col_offset
            before = content[start:end].decode()
            yield Fault(str(file.relative_to(root)), old.lineno, kind, before, f"({ast.unparse(new)})", start, end)


def imports_of(file: Path, modules: Collection[str]) -> set[str]:
    """Return the modules of the study that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names.intersection(modules)


def nearest_tests(root: Path, most: int | None, without: set[str]) -> dict[str, tuple[str, ...]]:
    """Return the test files for each file of the study: those with the fewest imports between the two."""
    paths = {str(path.relative_to(root)): path for path in sorted((root / "study").rglob("*.py"))}
    files = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in paths}
    graph = {module: imports_of(paths[name], files.keys()) for module, name in files.items()}
    found: dict[str, list[tuple[int, str]]] = {name: [] for name in paths}
    for test in sorted((root / "tests").rglob("test_*.py")):
        distance, seen, level = 0, set(), imports_of(test, files.keys())
        while level:
            for module in level:
                found[files[module]].append((distance, str(test.relative_to(root))))
            seen |= level
            level = {each for module in level for each in graph[module]} - seen
            distance += 1
    chosen = {name: [test for _, test in sorted(tests) if test not in without] for name, tests in found.items()}
    return {name: tuple(tests[:most]) for name, tests in chosen.items()}


def tests_of_room(root: Path, file: str, nearest: tuple[str, ...]) -> tuple[str, ...]:
    """Return the test files in the folder of a file's room, the nearest first. The loop's room is training."""
    room = Path(file).parts[1]
    folder = root / "tests" / ("training" if room == "train.py" else room)
    every = [str(test.relative_to(root)) for test in sorted(folder.rglob("test_*.py"))]
    return tuple([test for test in nearest if test in every] + [test for test in every if test not in nearest])


def run_tests(root: Path, test: str) -> None:
    """Run a test file in this process, without a word, and end it with pytest's exit code."""
    os.setsid()
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)  # scripts that tests start import the copy, too
    sys.path.insert(0, str(root))
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(silence, stream)
    code = 1
    try:
        code = int(pytest.main([*OPTIONS, test]))
    finally:
        os._exit(code)


def passes(root: Path, test: str, limit_s: float) -> bool:
    """Return whether a test file passes in a fork of this process, which has imported libraries, but not the study."""
    child = os.fork()
    if child == 0:
        run_tests(root, test)
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status) in (0, 5)  # 5: no test was selected
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def judged(fault: Fault, copy: Path, tests: tuple[str, ...], sound: dict[str, bool], limit_s: float) -> Fault:
    """Plant a fault and run the tests, file by file, until one fails. Remove the fault again."""
    path = copy / fault.file
    content = path.read_bytes()
    for test in tests:
        path.write_bytes(content[: fault.start] + fault.after.encode() + content[fault.end :])
        caught = sound.get(test, True) and not passes(copy, test, limit_s)
        path.write_bytes(content)
        if caught and test not in sound:
            sound[test] = passes(copy, test, limit_s)
        if caught and sound[test]:
            return replace(fault, tests=tests, caught_by=test)
    return replace(fault, tests=tests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", help="folders or files, relative to the root")
    parser.add_argument("--root", type=Path, default=Path())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--part", default="1/1", help="of the faults that are drawn: 2/3 is the second third")
    parser.add_argument("--most-tests", type=int, default=6, help="test files that are run for a fault")
    parser.add_argument("--room", action="store_true", help="all tests in the folder of the room, and no others")
    parser.add_argument("--without", nargs="*", default=(), help="names of test files that are not run")
    parser.add_argument("--limit-s", type=float, default=300, help="seconds for the tests of a fault")
    parser.add_argument("--out", type=Path, default=Path("faults.json"))
    options = parser.parse_args()
    for library in LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "study"
        shutil.copytree(options.root, copy, ignore=shutil.ignore_patterns(*IGNORED))
        most_tests = None if options.room else options.most_tests
        nearest = nearest_tests(copy, most_tests, {f"tests/{name}" for name in options.without})
        if options.room:
            nearest = {file: tests_of_room(copy, file, tests) for file, tests in nearest.items()}
        paths = [copy / name for name in options.packages]
        files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
        every = [fault for file in sorted(files) for fault in faults_in(copy, file)]
        drawn = random.Random(options.seed).sample(every, options.count)
        part, parts = map(int, options.part.split("/"))
        sound: dict[str, bool] = {}
        results = []
        for fault in drawn[part - 1 :: parts]:
            results.append(judged(fault, copy, nearest[fault.file], sound, options.limit_s))
            sys.stderr.write(f"{results[-1]}\n")
    tested = [each.caught_by is not None for each in results if each.tests]  # without tests: neither caught nor missed
    content = {
        "seed": options.seed,
        "drawn_from": len(every),
        "planted": len(tested),
        "caught_share": sum(tested) / len(tested) if tested else None,
        "tests_that_fail_without_a_fault": [test for test, passed in sound.items() if not passed],
        "faults": [asdict(each) for each in results],
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
