"""Apply all rules to a record. Each finding is a sentence with a remedy, and names a claim or script as evidence."""

import functools
import tomllib
from pathlib import Path
from typing import Any

from study.io.numbers import size
from study.records.hangs import Finding
from study.records.schema import Record
from study.watcher import rules
from study.watcher.facts import Facts, Unknown

FILE = Path(__file__).with_name("findings.toml")


@functools.cache
def texts() -> dict[str, dict[str, str]]:
    """Return the topic, sentence, remedy and evidence of each finding, by its id: the name of its rule."""
    return tomllib.loads(FILE.read_text())


def topics() -> list[str]:
    return list(dict.fromkeys(text["topic"] for text in texts().values()))


def diagnose(record: Record) -> list[Finding]:
    """Return all findings of a record: mistakes, then costs in memory, then costs in traffic, the largest cost first.

    If the list is empty, the rules of the topics that `looked_at` names found nothing.
    """
    facts = Facts(record)
    findings = [_finding(name, result, facts) for name, result in _results(facts).items() if result]
    return sorted(findings, key=_order)


def _order(finding: Finding) -> tuple[int, int]:
    if finding.memory_bytes is None and finding.traffic_bytes is None:
        return 0, 0
    if finding.memory_bytes is not None:
        return 1, -finding.memory_bytes
    return 2, -(finding.traffic_bytes or 0)


def looked_at(record: Record) -> tuple[list[str], list[str]]:
    """Return the topics for which the record has the values that at least one rule needs, and the other topics."""
    judged = {texts()[name]["topic"] for name in _results(Facts(record))}
    return [topic for topic in topics() if topic in judged], [topic for topic in topics() if topic not in judged]


def _results(facts: Facts) -> dict[str, rules.Result]:
    """Return the results of the rules that have the values that they need."""
    results = {}
    for name in texts():
        try:
            results[name] = getattr(rules, name)(facts)
        except Unknown:
            continue
    return results


def _finding(name: str, result: rules.Result, facts: Facts) -> Finding:
    values = result if isinstance(result, dict) else {}
    text = texts()[name]
    shown: dict[str, Any] = {key: size(value) if key.endswith("_bytes") else value for key, value in values.items()}
    shown |= {
        "source": facts.source,
        "promised": facts.promised,
        "seen": facts.observed,
        "watched": facts.record.watched,
    }
    return Finding(
        text["sentence"].format(**shown),
        text["remedy"].format(**shown),
        text.get("evidence"),
        id=name,
        memory_bytes=values.get("memory_bytes"),
        traffic_bytes=values.get("traffic_bytes"),
    )
