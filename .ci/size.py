"""Print tokens of code by room, with the change since the last tag, beside one ceiling: python .ci/size.py

It counts what is written by hand for users: study/, tools/, benchmarks/ and the pages' JavaScript. Comments, docstrings
and line breaks do not count, so neither dense lines nor tiny functions make anything smaller. No room has a number.
Above the ceiling nothing fails: features that went to meet it were worth more. A release says how far above it is.
"""

import ast
import io
import re
import subprocess
import tarfile
import tempfile
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CEILING = 190_000
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


def rooms_of(root: Path) -> Counter[str]:
    rooms: Counter[str] = Counter()
    for top in ("study", "tools", "benchmarks"):
        for path in (root / top).rglob("*.py"):
            parts = path.relative_to(root).parts
            rooms["/".join(parts[:2]) if top == "study" else top] += count_tokens(path.read_text())
    for path in (root / "study").rglob("*.js"):
        rooms["JavaScript"] += len(re.findall(r"\w+|[^\w\s]", path.read_text()))
    return rooms


def rooms_at_last_tag() -> Counter[str] | None:
    """Return the rooms of the last tag. None without a tag, as in a shallow clone."""
    git = ["git", "-C", str(ROOT)]
    tag = subprocess.run([*git, "describe", "--tags", "--abbrev=0"], capture_output=True, text=True).stdout.strip()
    if not tag:
        return None
    folders = "study", "tools", "benchmarks"
    packed = subprocess.run([*git, "archive", tag, *folders], capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
        return rooms_of(Path(folder))


def main() -> None:
    rooms = rooms_of(ROOT)
    before = rooms_at_last_tag()
    for room, tokens in rooms.most_common():
        change = "" if before is None else f"{tokens - before[room]:+8}"
        print(f"{room:20}{tokens:8}{change}")
    print(f"{'total':20}{rooms.total():8} of {CEILING}")


if __name__ == "__main__":
    main()
