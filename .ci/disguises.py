"""Refuse conditionals in the form of dictionaries, such as {True: "cpu"}.get(flag, "none"): python .ci/disguises.py

Both sides of such a dictionary are evaluated, and a typing error in a key is silent. Write `"cpu" if flag else "none"`.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (".ci", "examples", "reproductions", "study", "tests", "windows")


def disguises(text: str) -> list[int]:
    """Return the lines that ask a literal dictionary of one key, or one whose keys are True and False."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        asked: ast.expr | None = None
        if isinstance(node, ast.Subscript):
            asked = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            asked = node.func.value
        if isinstance(asked, ast.Dict) and None not in asked.keys:  # None stands for a dictionary that is unpacked
            has_truth_values = all(isinstance(key, ast.Constant) and isinstance(key.value, bool) for key in asked.keys)
            if len(asked.keys) == 1 or has_truth_values:
                lines.append(asked.lineno)
    return sorted(lines)


def main() -> int:
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found += [f"{path.relative_to(ROOT)}:{line}" for line in disguises(path.read_text())]
    for place in found:
        print(f"{place}: a dictionary in place of a condition: write `a if c else b`, or an if statement")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
