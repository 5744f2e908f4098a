"""What is known of a run by all that it left: its record, its steps and the ranks' logs of collectives."""

from dataclasses import dataclass, field
from pathlib import Path

from study.core.text import number_of
from study.records import collectives, store
from study.watch import hangs, sources, trends
from study.watch.diagnosis import judge
from study.watch.differences import mistakes
from study.watch.findings import Finding, ordered
from study.watch.oom.explain import memory_full


@dataclass
class About:
    """A run, or what else a path leads to: a config, or Flight Recorder dumps."""

    run: str
    how: str = "no record yet"  # what it is, and how it ended
    findings: list[Finding] = field(default_factory=list)
    error: dict | None = None  # of its record
    ranks: str | None = None  # when they last wrote, if they may still wait for each other
    not_known: list[str] = field(default_factory=list)  # rules that need more than the record has


def about(path: Path) -> About:
    """What is known of a run folder, a record, a config, or the dumps of ranks. Raise Stop if it is none of these."""
    answer = About(path.name)
    if config := sources.read_config(path):
        answer.how = config.words
        answer.findings = list(mistakes(config))
        return answer
    folder, file, logs = path.parent, path, []
    if path.is_dir():
        folder, file, logs = path, path / store.RECORD, collectives.load(path)
    has_record = (folder / store.RECORD).exists()
    if not has_record and not logs and (path.is_file() or (path.is_dir() and hangs.dumps_in(path))):
        logs = hangs.dumps(path)
        answer.how = "Flight Recorder dumps"
    elif has_record or not logs:
        record = store.read(file)
        observed = record.observed
        arm = observed.arm or record.requested.arm or observed.wrapper or "unknown"
        virtual = ", virtual" if record.is_virtual else ""
        answer.run = record.run_id
        answer.how = f"{arm} on {number_of(observed.ranks or 0, 'ranks')}{virtual}, {record.status}"
        if record.error:
            answer.error = record.error.model_dump()
        judged, answer.not_known = judge(record)
        steps = trends.findings(trends.load(folder))
        # Memory that was full ended the run: whatever else is found, this comes first.
        answer.findings = [*memory_full(record, file), *ordered([*mistakes(sources.read(file)), *steps, *judged])]
        if record.status == "done":
            logs = []  # nobody waits any more
    if logs:
        answer.ranks = hangs.state(logs)
        answer.findings = [*hangs.causes(logs), *hangs.hangs(logs), *answer.findings]
    return answer
