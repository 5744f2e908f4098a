"""What a rehearsal is asked, and what it answers. Both cross a process as JSON."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

REQUEST, ANSWER, PROGRESS = "request.json", "answer.json", "progress.txt"


@dataclass(frozen=True)
class Request:
    """A script and its words, as rank 0 of so many ranks."""

    script: str
    words: list[str]
    ranks: int
    ranks_per_machine: int
    steps: int  # updates, after which it ends
    tokens: int | None = None  # of a sequence, to which batches are lengthened. None: to the data set's longest row
    module: str | None = None  # its name, if the script is one
    config_file: str | None = None  # Accelerate's YAML
    launch_words: list[str] = field(default_factory=list)  # of `accelerate launch`, without the config
    configs_of: dict[str, str] = field(default_factory=dict)  # folders with a config.json, by a model's name
    values: dict[str, float] = field(default_factory=dict)  # of the script's own variables
    skips: list[str] = field(default_factory=list)  # functions that do nothing
    gpu: str | None = None
    evaluate: bool = False  # go on after the updates until the script has evaluated
    save: bool = False  # and until it has saved
    real: bool = False  # with real values, on this machine's GPU
    rank: int = 0
    most_collectives: int | None = None  # after which it ends

    @property
    def compares_ranks(self) -> bool:
        """Whether rank 1 is rehearsed as well: ranks usually part where one of them evaluates or saves."""
        return self.ranks > 1 and (self.evaluate or self.save)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Request":
        return cls(**json.loads(path.read_text()))


@dataclass
class Failure:
    """How a script ended that did not reach its steps."""

    # "script": as it would on the rented machine; "hang": as well; "value": a value does not exist here; "missing": a
    # package that it imports, or that a setting needs; "hub": what it loads from there; "own": the rehearsal failed
    kind: str
    message: str
    where: str | None = None  # the last line of the script's own code
    code: str | None = None  # what stands there
    trace: str = ""


@dataclass
class Moment:
    """A stretch of the log in which a script evaluates or saves."""

    kind: str  # "evaluation" (a batch, or what follows the last one) or "saving"
    begin: int
    end: int = 0
    what: str | None = None  # the function that saves
    parts: dict[str, int] | None = None  # at its peak
    loader: int = -1  # whose batches these are
    batches_left: int | None = None  # of that loader, which were not run


@dataclass
class Answer:
    """What rank 0 held and did. The rest is in the record beside it."""

    updates: int = 0
    peaks: list[int] = field(default_factory=list)  # of each update
    cuda_peaks: list[int] = field(default_factory=list)  # CUDA's own, with real values on a GPU
    loading_peak_bytes: int | None = None  # before the first pass
    batches: int = 0  # that loaders gave
    batch_bytes: int = 0  # of the largest of them
    batch: list[int] = field(default_factory=list)  # the shape of a pass's first input
    batch_at: str | None = None  # the line of the script that takes it from a loader
    batches_read: list[list[int]] = field(default_factory=list)  # of each update: the shape of the largest
    longest_row: int | None = None  # tokens of the data set's. None: it does not say
    max_length: int | None = None  # of a sequence, as the script asks its trainer for
    row_tokens: int = 0  # of the longest sequence in a batch that a loader gave
    lengthened_to: int | None = None  # tokens of a sequence
    calls: int | None = None  # of the model, in the last counted step. None: only the first was made
    releases: dict[str, str] = field(default_factory=dict)  # of the libraries that the script imported
    built_in: dict[str, str] = field(default_factory=dict)  # by a name on the hub: the model whose config was taken
    loss_in_chunks: bool = False  # TRL's: it makes no whole logits
    vocabulary: int | None = None  # of the model. None: its config names none
    keeps_scores: bool = False  # attention drops some, and so a CPU keeps them
    has_other_models: bool = False  # that are called in a step, too
    generates: bool = False  # it called `generate`, which was not run
    lora_rank: int | None = None
    log: list[tuple[int, int]] = field(default_factory=list)  # of storages, by number: bytes, and 0 when freed
    host: list[int] = field(default_factory=list)  # numbers of those that offloading keeps on the host
    loaded: list[tuple[int, int]] = field(default_factory=list)  # numbers before and after a model was loaded
    first_step_at: int = 0  # in that log: what comes before is loading
    moments: list[Moment] = field(default_factory=list)
    # Each with its line of the script, and its elements where those of all ranks are equal.
    collectives: list[tuple[str, str | None, int | None]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # packages that keep logs, and are not installed
    decides: dict[str, str] = field(default_factory=dict)  # by lines' places: those that compare what is 0 here
    is_cut: bool = False  # the script would have gone on
    failure: Failure | None = None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Answer":
        return TypeAdapter(cls).validate_json(path.read_bytes())
