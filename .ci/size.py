"""Count tokens of code by room, and fail where a room exceeds its number in pyproject.toml: python .ci/size.py

Comments, docstrings and line breaks do not count, so neither dense lines nor tiny functions make a room smaller.
A raise of a room's number needs a reason in the commit. That of study/ is to come back to 140,000.
"""

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FREE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count_tokens(text: str) -> int:
    doc_lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            doc_lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in doc_lines
        if token.type not in FREE and not is_docstring:
            count += 1
    return count


def main() -> int:
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["size"]
    rooms: Counter[str] = Counter()
    for top in ("study", "tests"):
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).parts
            room = "/".join(parts[:2]) if top == "study" else top
            rooms[room] += count_tokens(path.read_text())
    rooms["study"] = rooms.total() - rooms["tests"]
    too_large = [room for room in rooms if rooms[room] > budgets.get(room, 0)]
    for room, tokens in rooms.most_common():
        print(f"{room:20}{tokens:8} of {budgets.get(room, 0)}")
    if too_large:
        print("Too large:", *too_large, "-- remove code, or move it to the room where it belongs.")
    return int(bool(too_large))


if __name__ == "__main__":
    sys.exit(main())
