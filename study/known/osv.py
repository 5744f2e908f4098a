"""The faults as records of OSV, the format that scanners of dependencies read: https://ossf.github.io/osv-schema/."""

from datetime import UTC, datetime

from study.known.faults import Fault, table

PREFIX = "ZEROSTUDY"  # of ids. It is not registered with OSV: a scanner needs these records as a file of its own.


def records(modified: datetime) -> list[dict]:
    """Return a record for each fault. A scanner does not know a training, so conditions are words of the details."""
    stamp = modified.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return [_record(fault, stamp) for fault in table().fault]


def _record(fault: Fault, modified: str) -> dict:
    conditions = " ".join(fault.asks.values())
    details = [
        fault.why or fault.sentence,
        conditions and f"Whether it applies depends on: {conditions}",
        f"What to do: {fault.do}.",
    ]
    events = [{"introduced": fault.since}, {"last_affected": fault.until}]  # the last release that was asked
    record: dict = {
        "schema_version": "1.6.0",
        "id": f"{PREFIX}-{fault.id}",
        "modified": modified,
        "summary": fault.sentence,
        "details": "\n\n".join(filter(None, details)),
        "affected": [
            {
                "package": {"ecosystem": "PyPI", "name": fault.package.lower()},
                "ranges": [{"type": "ECOSYSTEM", "events": events}],
                "database_specific": {"rests_on": fault.rests_on, "kind": fault.kind},
            }
        ],
    }
    if fault.upstream.startswith("https://"):
        record["references"] = [{"type": "REPORT", "url": fault.upstream}]
    return record
