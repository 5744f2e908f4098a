"""What is known of a run by all that it left: its record, its steps and the ranks' logs of collectives."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from study.configs import sources
from study.configs.mistakes import mistakes
from study.core.errors import Stop
from study.core.text import number_of
from study.known.findings import Finding, finding, ordered
from study.records import collectives, store
from study.records.schema import Record
from study.watch import dynamics, hangs, trends
from study.watch.costs import COSTS
from study.watch.entered import ENTERED
from study.watch.facts import Facts, Unknown
from study.watch.mistakes import MISTAKES


@dataclass
class About:
    """A run, a config, or Flight Recorder dumps."""

    run: str
    how: str = "no record"  # what it is, and how it ended
    findings: list[Finding] = field(default_factory=list)
    error: dict | None = None  # of its record
    ranks: str | None = None  # when they last wrote, if they may still wait for each other
    config: str | None = None  # its path, if it is one
    not_known: list[str] = field(default_factory=list)  # rules that need more than the record has

    def in_json(self) -> dict:
        wrong = self.error or any(each.is_surely_wrong for each in self.findings)
        return asdict(self) | {"fine": not wrong}


def about(path: Path) -> About:
    """Return what is known of a run folder, a record, a config, or the dumps of ranks. Raise Stop if it is none."""
    if path.is_file() and path.name != store.RECORD:
        config = sources.read(path)
        unread = ", of which no key is checked" if config.kind == sources.TORCHTITAN else ""
        return About(path.name, config.words + unread, list(mistakes(config)), config=str(path))
    if not path.exists():
        raise Stop(f"'{path}' cannot be read (it is not there)", "name a log, a config, or the folder of a run")
    answer = About(path.name)
    file = path / store.RECORD if path.is_dir() else path
    logs = collectives.load(path) or hangs.dumps(path)
    if file.exists() or not logs:
        record = store.read(file)
        answer = _of_record(record, file)
        if record.status == "done":
            logs = []  # nobody waits any more
    if logs:
        answer.ranks = hangs.state(logs)
        answer.findings = [*hangs.causes(logs), *hangs.hangs(logs), *answer.findings]
    return answer


def judge(record: Record) -> tuple[list[Finding], list[str]]:
    """Return the findings of a record, and the names of the rules that need more than the record has.

    Mistakes come first, then costs in memory, then costs in traffic, the largest first.
    """
    facts = Facts(record)
    context = vars(facts) | {"source": facts.promised.source or "the script"}
    findings = []
    unknown = []
    for rule in (*ENTERED, *MISTAKES, *COSTS):
        try:
            for found in rule(facts):  # a rule may find something before it needs what the record lacks
                id, values = (found, {}) if isinstance(found, str) else found
                findings.append(finding(id, **values, **context))
        except Unknown:
            unknown.append(rule.__name__.replace("_", " "))
    return ordered(findings), unknown


def _of_record(record: Record, file: Path) -> About:
    seen = record.observed
    arm = seen.arm or record.requested.arm or seen.wrapper or "unknown"
    kind = ", virtual" if record.is_virtual else ""
    ranks = f" on {number_of(seen.ranks, 'ranks')}" if seen.ranks else ""  # what was refused before it began has none
    # A process that the kernel ends writes nothing more: the age of the ranks' logs tells whether the run goes on.
    status = record.status.replace("running", "unfinished")
    findings, not_known = judge(record)
    steps = trends.load(file.parent)
    of_steps = dynamics.findings(steps, is_over=record.status == "done")
    return About(
        run=record.run_id,
        how=f"{arm}{ranks}{kind}, {status}",
        findings=ordered([*mistakes(sources.read(file)), *of_steps, *trends.findings(steps), *findings]),
        error=record.error.model_dump() if record.error else None,
        not_known=not_known,
    )
