"""A finding: something wrong or costly in a run, as a sentence with a remedy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something wrong or costly in a run. `evidence` is the claim or the script of reproductions/ that shows it."""

    sentence: str
    remedy: str | None = None
    evidence: str | None = None
    id: str | None = None  # the rule that found it
    memory_bytes: int | None = None  # what it costs at the peak of a rank
    traffic_bytes: int | None = None  # what it costs in a step
