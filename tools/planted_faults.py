"""Plant faults into a copy of the study, one at a time, and count how many the fast tests catch.

python tools/planted_faults.py --root . --seed 1 --count 60 --out faults.json study/training
python tools/planted_faults.py --seed 1 --count 100 records
python tools/planted_faults.py --seed 1 --count 100 texts

In code a fault is one change of one expression: a comparison or branch turned round, a constant or operator changed, a
return value lost. It is caught if a test file in the folder of its room fails, and passes without the fault. The share
of two commits is compared by running this file with --root on each.

`records`: a number of a kept record becomes 5 % larger. `texts`: a digit of README, a page or a claim becomes another
one, or a claim gets another verdict. The tests of numbers have to notice it.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

TURNED = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
SWAPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not gpu")
NUMBER = re.compile(rb'(?<![\w."-])\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w."-])')  # no part of a name, a date or a version
VERDICT = re.compile(rb'(?<=^verdict = ")[^"]+', re.MULTILINE)
VERDICTS = ("holds", "does not hold", "holds only if", "cannot be decided here")
RECORDS = ("reports/**/*.json", "reports/**/*.jsonl", "reports/**/*.csv")
TEXTS = ("README.md", "GUIDE.md", "study/report/templates/*.html", "study/ledger/texts/*.toml", "notebooks/*.ipynb")
TESTS_OF_NUMBERS = ("tests/project/test_numbers.py", "tests/project/test_readme.py", "tests/ledger/test_claims.py")
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


def in_record(content: bytes, chance: random.Random) -> tuple[re.Match[bytes], str] | None:
    """Return a number of a record, and what it becomes. None without a number."""
    found = [each for each in NUMBER.finditer(content) if float(each[0])]
    if not found:
        return None
    number = chance.choice(found)
    larger = float(number[0]) * 1.05
    if number[0].isdigit():
        return number, str(max(round(larger), int(number[0]) + 1))
    return number, f"{larger:.17g}"


def in_text(content: bytes, chance: random.Random) -> tuple[re.Match[bytes], str] | None:
    """Return a digit or a verdict of a text, and what it becomes. None without a digit."""
    verdicts = list(VERDICT.finditer(content))
    if verdicts and chance.random() < 0.5:
        verdict = chance.choice(verdicts)
        return verdict, chance.choice([each for each in VERDICTS if each != verdict[0].decode()])
    digits = list(re.finditer(rb"\d", content))
    if not digits:
        return None
    digit = chance.choice(digits)
    return digit, str((int(digit[0]) + chance.randint(1, 9)) % 10)


def drawn_in_files(root: Path, what: str, chance: random.Random) -> Fault:
    """Return a change of a kept record, or of a text."""
    patterns, change = (RECORDS, in_record) if what == "records" else (TEXTS, in_text)
    files = sorted({path for pattern in patterns for path in root.glob(pattern)})
    made = None
    while made is None:
        path = chance.choice(files)
        content = path.read_bytes()
        made = change(content, chance)
    found, after = made
    line = content.count(b"\n", 0, found.start()) + 1
    name = str(path.relative_to(root))
    return Fault(name, line, what, found[0].decode(), after, *found.span(), tests=TESTS_OF_NUMBERS)


def tests_of_room(root: Path, file: Path) -> tuple[str, ...]:
    """Return the test files of a file's room: those named after the file come first. The loop's room is training."""
    room = file.relative_to(root).parts[1]
    folder = root / "tests" / ("training" if room == "train.py" else room)
    tests = sorted(folder.rglob("test_*.py"), key=lambda test: (file.stem not in test.stem, test))
    return tuple(str(test.relative_to(root)) for test in tests)


def first_failure(root: Path, tests: Sequence[str], limit_s: float) -> str | None:
    """Return the first of these test files that fails; all of them, if they take too long. None if all pass."""
    env = os.environ | {"PYTHONPATH": str(root)}  # scripts that tests start import the copy, too
    try:
        done = subprocess.run([*PYTEST, *tests], cwd=root, env=env, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return " ".join(tests)
    if done.returncode in (0, 5):  # 5: no test was selected
        return None
    return next((test for test in tests if test in done.stdout), " ".join(tests))


def judged(fault: Fault, copy: Path, sound: dict[str, bool], limit_s: float) -> Fault:
    """Plant a fault, and run its tests until one fails that passes without it. Remove the fault again."""
    path = copy / fault.file
    content = path.read_bytes()
    tests = [test for test in fault.tests if sound.get(test, True)]
    while tests:
        path.write_bytes(content[: fault.start] + fault.after.encode() + content[fault.end :])
        failed = first_failure(copy, tests, limit_s)
        path.write_bytes(content)
        if failed is None:
            break
        if failed not in sound:
            sound[failed] = first_failure(copy, failed.split(), limit_s) is None
        if sound[failed]:
            return replace(fault, caught_by=failed)
        tests = [test for test in tests if test not in failed.split()]
    return fault


def every_fault(copy: Path, packages: list[str]) -> list[Fault]:
    """Return all faults of the packages, each with its tests."""
    files = [file for name in packages for file in ([*(copy / name).rglob("*.py")] or [copy / name])]
    return [
        replace(fault, tests=tests_of_room(copy, file)) for file in sorted(files) for fault in faults_in(copy, file)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", help="folders or files, relative to the root; or records, or texts")
    parser.add_argument("--root", type=Path, default=Path())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--limit-s", type=float, default=900, help="seconds for the tests of a fault")
    parser.add_argument("--out", type=Path, default=Path("faults.json"))
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "study"
        shutil.copytree(options.root, copy, ignore=shutil.ignore_patterns(*IGNORED))
        if options.packages in (["records"], ["texts"]):
            drawn = [drawn_in_files(copy, options.packages[0], chance) for _ in range(options.count)]
        else:
            drawn = chance.sample(every_fault(copy, options.packages), options.count)
        sound: dict[str, bool] = {}
        results = []
        for fault in drawn:
            results.append(judged(fault, copy, sound, options.limit_s))
            sys.stderr.write(f"{results[-1]}\n")
    tested = [each.caught_by is not None for each in results if each.tests]  # without tests: neither caught nor missed
    content = {
        "seed": options.seed,
        "planted": len(tested),
        "caught_share": sum(tested) / len(tested) if tested else None,
        "tests_that_fail_without_a_fault": [test for test, passed in sound.items() if not passed],
        "faults": [asdict(each) for each in results],
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
