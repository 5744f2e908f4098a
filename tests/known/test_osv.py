"""Each fault as a record of OSV, held to OSV's own schema: osv_schema.json, of the package osv 0.0.22 (Apache-2.0)."""

import json
from datetime import UTC, datetime

from jsonschema import Draft202012Validator

from study.known import osv
from study.known.faults import table
from tests.conftest import ROOT


def test_each_fault_is_a_record_of_osv():
    schema = json.loads((ROOT / "tests/known/osv_schema.json").read_text())
    # Only databases that OSV knows have a prefix there, and ours is not one.
    prefix = schema["$defs"]["prefix"]
    prefix["pattern"] = prefix["pattern"].replace("^(", f"^({osv.PREFIX}|")
    validator = Draft202012Validator(schema)
    records = osv.records(datetime(2026, 11, 28, tzinfo=UTC))
    for record in records:
        validator.validate(record)
    assert len({record["id"] for record in records}) == len(table().fault)
    for record, fault in zip(records, table().fault, strict=True):
        urls = [each["url"] for each in record.get("references", [])]
        assert urls == [fault.upstream] * fault.upstream.startswith("https://"), fault.id
    last = [event for record in records for event in record["affected"][0]["ranges"][0]["events"]]
    assert {"introduced": "0.17.6"} in last
    assert {"last_affected": "0.18.2"} in last
    assert not validator.is_valid(records[0] | {"modified": "yesterday"})
