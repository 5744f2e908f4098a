"""What commands say of a training: the sentences of findings.toml and of hangs.toml, by their ids."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired

from pydantic import with_config
from typing_extensions import TypedDict

from study.core.tables import NO_OTHER_KEYS, Evidence, Regex, read_table
from study.core.text import size
from study.known.faults import named

FINDINGS = Path(__file__).with_name("findings.toml")
HANGS = Path(__file__).with_name("hangs.toml")
COSTS = ("lost_s", "memory_bytes", "traffic_bytes")


@dataclass(frozen=True)
class Finding:
    """Something wrong or costly in a run. `evidence` is the claim or the script of reproductions/ that shows it."""

    id: str  # that `study explain` takes, and by which the rule, the sentence and the test are found
    sentence: str
    remedy: str | None = None
    evidence: str | None = None
    lost_s: float | None = None  # what it costs in a step
    memory_bytes: int | None = None  # what it costs at the peak of a rank
    traffic_bytes: int | None = None  # what it costs in a step
    may_be: bool = False  # it may be so, or be meant so

    @property
    def costs(self) -> bool:
        """Whether it is right, and takes more than it could."""
        return any(getattr(self, name) is not None for name in COSTS)

    @property
    def is_surely_wrong(self) -> bool:
        return not (self.costs or self.may_be)

    @property
    def said(self) -> str:
        """The sentence as a command prints it, with its id."""
        return with_id(self.sentence, self.id)


def with_id(sentence: str, id: str) -> str:
    """Return a sentence as commands print it: with its end, and with the id by which `study explain` knows it."""
    return f"{ended(sentence)} [{id}]"


def in_a_sentence(each: Finding) -> str:
    return f"{each.said} What to do: {each.remedy}."


def ended(sentence: str) -> str:
    return sentence if sentence.endswith((".", "?")) else f"{sentence}."


@with_config(NO_OTHER_KEYS)
class FindingRow(TypedDict):
    """A row of findings.toml. Texts are in TOML, so that they can be read and corrected without the rules."""

    sentence: str
    remedy: NotRequired[str]
    evidence: NotRequired[Evidence]  # a claim, or a script of reproductions/; else a comment here, or at the rule
    fault: NotRequired[str]  # of faults.toml, whose range, remedy and script are told
    may_be: NotRequired[bool]  # it may be so, or be meant so
    configs: NotRequired[list[dict[str, Any]]]  # in which it is found: `when`, and values of the sentence
    # --- of one finding each, where they are explained
    defaults: NotRequired[dict[str, str]]
    filled: NotRequired[list[str]]
    pairs: NotRequired[dict[str, str]]


@with_config(NO_OTHER_KEYS)
class Hang(TypedDict):
    """A row of hangs.toml. The keys are explained there."""

    sentence: str
    remedy: str
    evidence: NotRequired[Evidence]
    ranks: Literal["some", "all"]
    calls: Regex
    script: NotRequired[Regex]
    ways: list[str]
    without_all: NotRequired[bool]


@functools.cache
def texts() -> dict[str, FindingRow]:
    """Return the sentence, remedy and evidence of each finding, by its id."""
    return read_table(FINDINGS, dict[str, FindingRow], FindingRow)


@functools.cache
def causes_of_hangs() -> dict[str, Hang]:
    return read_table(HANGS, dict[str, Hang], Hang)


def finding(id: str, **values: Any) -> Finding:
    """Return a finding with its values in its sentence. Names that end in `_bytes` are shown as sizes."""
    text: dict[str, Any] = {**{**texts(), **causes_of_hangs()}[id]}
    if "fault" in text:  # its range, its remedy and its script are those of the table of faults
        fault = named(text["fault"])
        shown_by = {"evidence": f"reproductions/{fault.script}.py"} if fault.script else {}
        text = {"remedy": "{do}"} | shown_by | text
        values |= {"range": fault.releases.partition(";")[0], "do": fault.do, "who": fault.who}
    shown = {name: size(value) if name.endswith("_bytes") else value for name, value in values.items()}
    sentence, remedy = (text.get(part, "").format(**shown) for part in ("sentence", "remedy"))
    costs = {name: values.get(name) for name in COSTS}
    return Finding(id, sentence, remedy or None, text.get("evidence"), **costs, may_be=text.get("may_be", False))


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings by size: mistakes first, then costs in seconds, in memory and in traffic, the largest first."""

    def place(finding: Finding) -> tuple[int, float]:
        if finding.id == "memory_full":  # it ended the run: whatever else is found, this comes first
            return -1, 0.0
        # Seconds cannot be compared with bytes, so each kind of cost has its own place.
        for kind, name in enumerate(COSTS, 1):
            if (cost := getattr(finding, name)) is not None:
                return kind, -cost
        return 0, 0.0

    return sorted(findings, key=place)
