"""Change one number in a copy of the study at a time, and count how many changes the tests of numbers notice.

python tools/planted_numbers.py --seed 1 --count 100 --out numbers.json records
python tools/planted_numbers.py --seed 1 --count 100 --out numbers.json texts

`records`: a number of a kept record becomes 5 % larger. `texts`: a digit of README, a page or a claim becomes another
one, or a claim gets another verdict.
"""

import argparse
import importlib
import json
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from planted_faults import IGNORED, LIBRARIES, passes

NUMBER = re.compile(r"(?<![\w.\"-])\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.\"-])")  # no part of a name, a date or a version
VERDICTS = ("holds", "does not hold", "holds only if", "cannot be decided here")
RECORDS = ("reports/**/*.json", "reports/**/*.jsonl", "reports/**/*.csv")
TEXTS = ("README.md", "GUIDE.md", "study/report/templates/*.html", "study/ledger/texts/*.toml", "notebooks/*.ipynb")
TESTS = ("tests/project/test_numbers.py", "tests/project/test_readme.py", "tests/ledger/test_claims.py")


@dataclass
class Change:
    file: str
    before: str
    after: str
    noticed_by: str | None = None


def in_record(text: str, chance: random.Random) -> tuple[int, str, str] | None:
    """Return the place of a number, what it is, and what it becomes."""
    found = [each for each in NUMBER.finditer(text) if float(each[0])]
    if not found:
        return None
    number = chance.choice(found)
    larger = float(number[0]) * 1.05
    return (
        number.start(),
        number[0],
        f"{larger:.17g}" if "." in number[0] else str(max(round(larger), int(number[0]) + 1)),
    )


def in_text(text: str, chance: random.Random) -> tuple[int, str, str] | None:
    """Return the place of a digit or a verdict, what it is, and what it becomes."""
    verdicts = list(re.finditer(r'(?<=^verdict = ")[^"]+', text, re.MULTILINE))
    digits = list(re.finditer(r"\d", text))
    if verdicts and chance.random() < 0.5:
        place = chance.choice(verdicts)
        return place.start(), place[0], chance.choice([each for each in VERDICTS if each != place[0]])
    if not digits:
        return None
    place = chance.choice(digits)
    return place.start(), place[0], str((int(place[0]) + chance.randint(1, 9)) % 10)


def judged(path: Path, copy: Path, made: tuple[int, str, str], tests: tuple[str, ...], limit_s: float) -> Change:
    """Make a change, run the tests, file by file, until one fails, and take the change back."""
    text = path.read_text()
    start, before, after = made
    change = Change(str(path.relative_to(copy)), before, after)
    path.write_text(text[:start] + after + text[start + len(before) :])
    for test in tests:
        if not passes(copy, test, limit_s):
            change.noticed_by = test
            break
    path.write_text(text)
    return change


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("records", "texts"))
    parser.add_argument("--root", type=Path, default=Path())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--tests", nargs="*", default=TESTS)
    parser.add_argument("--limit-s", type=float, default=300, help="seconds for a test file")
    parser.add_argument("--out", type=Path, default=Path("numbers.json"))
    options = parser.parse_args()
    for library in LIBRARIES:
        importlib.import_module(library)
    make: Callable = in_record if options.what == "records" else in_text
    patterns = RECORDS if options.what == "records" else TEXTS
    chance = random.Random(options.seed)
    changes: list[Change] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "study"
        shutil.copytree(options.root, copy, ignore=shutil.ignore_patterns(*IGNORED))
        sound = tuple(test for test in options.tests if passes(copy, test, options.limit_s))
        files = sorted({path for pattern in patterns for path in copy.glob(pattern)})
        while len(changes) < options.count:
            path = chance.choice(files)
            made = make(path.read_text(), chance)
            if made:
                changes.append(judged(path, copy, made, sound, options.limit_s))
                sys.stderr.write(f"{changes[-1]}\n")
    noticed = sum(each.noticed_by is not None for each in changes)
    content = {
        "seed": options.seed,
        "changed": len(changes),
        "noticed": noticed,
        "tests": sound,
        "changes": [asdict(each) for each in changes],
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
