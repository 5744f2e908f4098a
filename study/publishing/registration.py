"""`study registration` and `study changelog`: what was fixed before it was measured, and how verdicts changed since."""

import hashlib
import json
import subprocess
from pathlib import Path

from study.errors import Stop
from study.io import files
from study.io.tables import say
from study.ledger.files import FOLDER, Head, coverage
from study.predictor.outside import published
from study.publishing.project import version
from study.records import store
from study.spec.arms import ROOT

VERDICTS = "reports/verdicts.json"
CHANGELOG = "CHANGELOG.md"
MARK = "<!-- verdicts: study changelog writes what follows -->\n"


def registration() -> dict[str, str]:
    """Print the hashes of tolerances, of the roles of sources and of frozen splits, to deposit before a GPU is used."""
    heads: list[Head] = coverage(FOLDER)
    words = "id value unit relation tolerance better enough conditions unsaid check with also until_tested"
    claims = [
        [head.document, head.tolerances, [{key: one.get(key) for key in words.split()} for one in head.claim]]
        for head in heads
    ]
    roles = sorted(
        (name, str(source.role), [str(part) for part in source.part]) for name, source in published.sources().items()
    )
    splits = files.read(published.FOLDER / "splits.toml", store.MAX_BYTES).decode()
    hashes = {"claims and tolerances": claims, "roles of sources": roles, "splits": splits}
    answer = {name: hashlib.sha256(json.dumps(each, default=str).encode()).hexdigest() for name, each in hashes.items()}
    return answer | {"commit": store.commit_of_this_tree()[0] or "unknown"}


def changelog() -> None:
    """Write into CHANGELOG.md which verdicts changed, from the history of the committed verdicts."""
    path = ROOT / CHANGELOG
    text = path.read_text().partition(MARK)[0] + MARK + "\n".join(["", *_changes(), ""])
    files.write_below(ROOT, CHANGELOG, text.encode())
    say(f"{CHANGELOG} is written, for version {version()}")


def _changes() -> list[str]:
    """Return a line for each verdict that changed, under its day, the newest first."""
    if _git("rev-parse", "--is-shallow-repository") == "true":
        raise Stop("this checkout has no full history", "git fetch --unshallow")
    lines: list[str] = []
    before: dict[str, str] = {}
    for line in _git("log", "--reverse", "--first-parent", "--format=%H %as", "--", VERDICTS).splitlines():
        commit, day = line.split()
        content = json.loads(_git("show", f"{commit}:{VERDICTS}"))
        now = {name: each["verdict"] for name, each in content.items()}
        changed = [name for name in before.keys() & now.keys() if before[name] != now[name]]
        words = [f"- {day}, {commit[:8]}: {name} {before[name]} → {now[name]}" for name in sorted(changed)]
        if added := now.keys() - before.keys():
            words.append(f"- {day}, {commit[:8]}: {len(added)} claims were judged for the first time")
        if gone := before.keys() - now.keys():
            words.append(f"- {day}, {commit[:8]}: {len(gone)} claims were withdrawn: {', '.join(sorted(gone))}")
        lines, before = [*words, *lines], now
    return lines


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=Path(ROOT), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Stop("the history of this checkout cannot be read", "run this in a clone of the repository")
    return done.stdout.strip()
