"""What a rehearsal is asked, and what it answers. Both cross a process as JSON."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """A script and its words, as rank 0 of so many ranks."""

    script: str
    words: list[str]
    ranks: int
    ranks_per_machine: int
    steps: int  # updates, after which it ends
    config_file: str | None = None  # Accelerate's YAML
    configs_of: dict[str, str] = field(default_factory=dict)  # folders with a config.json, by a model's name
    values: dict[str, float] = field(default_factory=dict)  # of the script's own variables
    skips: list[str] = field(default_factory=list)  # functions that do nothing
    evaluates: bool = False  # after the training it goes on
    gpu: str | None = None
    gpu_bytes: int | None = None

    @classmethod
    def read(cls, path: Path) -> "Request":
        return cls(**json.loads(path.read_text()))


@dataclass
class Failure:
    """How a script ended that did not reach its steps."""

    kind: str  # "script": as it would on the rented machine; "value": it needs a value that does not exist here
    message: str
    where: str | None = None  # the last line of the script's own code
    code: str | None = None  # what stands there
    trace: str = ""


@dataclass
class Answer:
    """What rank 0 held and did."""

    updates: int = 0
    peak_bytes: int | None = None  # from the second update on, or of the first, if there is no second
    peak_when: str | None = None
    peak_step: int | None = None
    parts: dict[str, int] = field(default_factory=dict)  # at the peak, by role
    after_step: dict[str, int] = field(default_factory=dict)
    peaks: list[int] = field(default_factory=list)  # of each update
    loading_peak_bytes: int | None = None  # before the first pass
    events: list[int] = field(default_factory=list)  # sizes taken, and negative places of those given back
    observed: dict = field(default_factory=dict)  # what the prepared objects are, as a record has it
    facts: dict = field(default_factory=dict)
    failure: Failure | None = None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Answer":
        content = json.loads(path.read_text())
        failure = content.pop("failure")
        return cls(**content, failure=Failure(**failure) if failure else None)
