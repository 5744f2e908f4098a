"""Diagnose a run by its record: mistakes, then costs. The sentence of each finding is in known/findings.toml."""

from study.known.findings import Finding, finding, ordered
from study.records.schema import Record
from study.watch.costs import COSTS
from study.watch.entered import ENTERED
from study.watch.facts import Facts, Unknown
from study.watch.mistakes import MISTAKES


def judge(record: Record) -> tuple[list[Finding], list[str]]:
    """Return the findings of a record, and the names of the rules that need more than the record has.

    Mistakes come first, then costs in memory, then costs in traffic, the largest first.
    """
    facts = Facts(record)
    about = vars(facts) | {"source": facts.promised.source or "the script"}
    findings = []
    unknown = []
    for rule in (*ENTERED, *MISTAKES, *COSTS):
        try:
            for found in rule(facts):  # a rule may find something before it needs what the record lacks
                id, values = (found, {}) if isinstance(found, str) else found
                findings.append(finding(id, **values, **about))
        except Unknown:
            unknown.append(rule.__name__.replace("_", " "))
    return ordered(findings), unknown
