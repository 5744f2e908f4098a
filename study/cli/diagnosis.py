"""`study diagnose`: what is wrong or costly in a run, and which rank waits for which."""

import dataclasses
import textwrap
from pathlib import Path

import tyro

from study.errors import Stop
from study.io.files import safe_join
from study.io.tables import say
from study.records import collectives, hangs, store
from study.records.collectives import RankLog
from study.records.schema import Record
from study.spec.arms import PACKAGE
from study.spec.options import AsJson
from study.watcher import diagnosis

WIDTH = 100
REPRODUCTIONS = PACKAGE / "reproductions"


def diagnose(runs: tyro.conf.Positional[tuple[Path, ...]], /, *, as_json: AsJson = False) -> list[dict] | None:
    """Say what is wrong or costly in a run, what to do about it, and which claim or script demonstrates it.

    For an unfinished run with a log of its collectives (`study.watch` writes one), it also says which rank waits for
    which. This works while the run hangs and after it was ended.

    Args:
        runs: Folders of runs, or record.json files.
        as_json: Print everything as JSON.
    """
    if not runs:
        raise Stop("no run is given", "name the folder of a run, or its record.json")
    answers = [_answer(path) for path in runs]
    if as_json:
        return answers
    for number, answer in enumerate(answers):
        say(*[""] * bool(number), *_lines(answer))
    return None


def _answer(path: Path) -> dict:
    """Return everything that is known about a run."""
    folder = path.parent if path.is_file() else path
    logs = collectives.load(folder) if folder.is_dir() else []
    if logs and not path.is_file() and not (folder / store.RECORD).exists():  # it ended before it wrote one
        return _of_logs(folder, logs)
    record = store.read(path) if path.is_file() else store.load(folder)
    judged, unknown = diagnosis.looked_at(record)
    answer = {
        "run": record.run_id,
        "how": _how(record),
        "status": record.status,
        "error": record.error.model_dump() if record.error else None,
        "ranks": None,
        "findings": [dataclasses.asdict(finding) for finding in diagnosis.diagnose(record)],
        "looked_at": judged,
        "not_known": unknown,
    }
    if not logs or record.status == "done":
        return answer
    waiting = _of_logs(folder, logs)
    together = {name: waiting[name] + answer[name] for name in ("findings", "looked_at")}
    return answer | {"ranks": waiting["ranks"]} | together


def _of_logs(folder: Path, logs: list[RankLog]) -> dict:
    """Return what the logs of the ranks' collectives say."""
    return {
        "run": folder.name,
        "how": "no record yet",
        "status": None,
        "error": None,
        "ranks": hangs.state(logs),
        "findings": [dataclasses.asdict(finding) for finding in hangs.hangs(logs)],
        "looked_at": ["where the ranks wait"],
        "not_known": [],
    }


def _how(record: Record) -> str:
    seen = record.observed
    ranks = f" on {seen.ranks} {'rank' if seen.ranks == 1 else 'ranks'}" if seen.ranks else ""
    virtual = ", virtual" if record.is_virtual else ""
    return f"{seen.arm or record.requested.arm or seen.wrapper or 'unknown'}{ranks}{virtual}, {record.status}"


def _lines(answer: dict) -> list[str]:
    """At most 100 columns."""
    lines = wrapped(f"{answer['run']}: {answer['how']}")
    if error := answer["error"]:
        lines += wrapped(f"{answer['status']}: {error['message']}. What to do: {error['what_to_do']}.", "  ")
    if answer["ranks"]:
        lines += wrapped(f"{answer['ranks']}.", "  ")
    for number, finding in enumerate(answer["findings"], 1):
        lines += ["", *wrapped(f"{number:>2}. {finding['sentence']}.", "    ", first="")]
        if finding["remedy"]:
            lines += wrapped(f"What to do: {finding['remedy']}.", "    ")
        if finding["evidence"]:
            lines.append(f"    Shown by: {shown_by(finding['evidence'])}")
    if not answer["findings"]:
        lines.append("  Nothing was found.")
    lines += ["", *wrapped(f"Looked at: {', '.join(answer['looked_at'])}.", "  ")]
    if answer["not_known"]:
        lines += wrapped(f"Not in this record: {', '.join(answer['not_known'])}.", "  ")
    return lines


def shown_by(evidence: str) -> str:
    """The script or the command that demonstrates a finding."""
    script = safe_join(REPRODUCTIONS, f"{evidence}.py")
    return f"study/reproductions/{evidence}.py" if script.exists() else f"study claims {evidence}"


def wrapped(text: str, indent: str = "", first: str | None = None) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent if first is None else first, subsequent_indent=indent, break_on_hyphens=False
    )
