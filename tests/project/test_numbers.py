"""No number that is kept or printed changes by chance: each record, each claim and each number of a page has a line.

A change that is meant is one line in the diff of tests/golden/, after `pytest --refresh-golden`. What a number rests on
is tested elsewhere: this finds the digit that nobody meant to change.
"""

import hashlib
import json
import re
import tomllib
from pathlib import Path

from tests.conftest import ROOT

TEXTS = ROOT / "study/ledger/texts"
PAGES = (
    "README.md",
    "GUIDE.md",
    "WORDS.md",
    "reports/answers/*.md",
    "study/report/answers.toml",
    "SECURITY.md",
    "CITATION.cff",
    "study/report/templates/*.html",
    "notebooks/*.ipynb",
)
BESIDE = ("examples/**/*.md", "reproductions/*.md", "reports/**/README.md", "reports/upstream/*.md")
BUILT = ("reports/site", "reports/build")


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def kept() -> list[str]:
    """A line for each run, and for each other file, below reports/."""
    parts: dict[str, list[bytes]] = {}
    for path in sorted((ROOT / "reports").rglob("*")):
        name = str(path.relative_to(ROOT))
        if path.is_file() and path.suffix != ".md" and not name.startswith(BUILT) and "/." not in name:
            of_run = path.parent if "runs" in path.parts else path
            parts.setdefault(str(of_run.relative_to(ROOT)), []).append(path.read_bytes())
    return [f"{digest(b''.join(contents))} {name}" for name, contents in parts.items()]


def claims() -> list[str]:
    """A line for each claim: its verdict, how sure it is, and a digest of all that it says."""
    lines = []
    for path in sorted(TEXTS.glob("*.toml")):
        content = tomllib.loads(path.read_text())
        for claim in content.pop("claim", []):
            said = digest(json.dumps(claim, sort_keys=True).encode())
            lines.append(f"{said} {claim['id']}: {claim.get('verdict')}, {claim.get('certainty')}")
        lines.append(f"{digest(json.dumps(content, sort_keys=True).encode())} {path.name}: its head")
    return lines


def numbers(path: Path) -> list[str]:
    """A line for each line of a page that has numbers: its first words, and the words with digits."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    lines = []
    for line in text.splitlines():
        words = line.split()
        with_digits = [word for word in words if re.search(r"\d", word)]
        if with_digits:
            lines.append(f"{path.relative_to(ROOT)}: {' '.join(words[:3])} ... {' '.join(with_digits)}")
    return lines


def test_no_kept_record_has_changed(golden):
    golden("kept-records.txt", "\n".join(kept()))


def test_no_claim_has_changed(golden):
    golden("claims.txt", "\n".join(claims()))


def test_no_number_of_a_page_has_changed(golden):
    pages = sorted({path for pattern in (*PAGES, *BESIDE) for path in ROOT.glob(pattern)})
    assert len(pages) > 20
    golden("numbers.txt", "\n".join(line for path in pages for line in numbers(path)))
