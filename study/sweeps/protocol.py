"""Reads protocols: TOML files in `protocols/` that expand into cells. `smoke.toml` is an example.

A part names arms and gives settings. A list of values is an axis, and the part expands into every combination of its
axes, the last varying fastest. A scale is a table in the part: its values replace the part's, and its axes come last.

A part with a `repair` runs document S002's script instead of the trainer. `reserve_s` is how many seconds a sweep must
have left before it starts a cell for the first time. `deepspeed` names another release of DeepSpeed for these cells.
`decides` and `narrows` name claims of the ledger. A part with `instead_of` is run if a cell of that part does not fit.
"""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache as once
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, ValidationError

from study.core import arms, cache
from study.core.errors import Stop, nearest
from study.core.files import load, sentence
from study.core.settings import Repair, Settings, build
from study.records import sections, store
from study.records.runs import Run
from study.records.schema import Record

FOLDER = Path(__file__).resolve().parent / "protocols"
Scale = Literal["paper", "one_gpu", "tiny"]
SCALES: tuple[Scale, ...] = get_args(Scale)
SCRIPTS = {"train": arms.PACKAGE / "train.py", "as_printed": arms.ROOT / "reproductions" / "as_printed.py"}
SETTINGS = tuple(field.name for field in fields(Settings))
PART_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,59}$"  # the names of run folders begin with it
RELEASE = r"^\d+(\.\d+){1,3}$"
MAX_BYTES = 2**20  # of a protocol's file: ours have 16 kB
MAX_CELLS = 10_000  # of a part; each is a launch of at least 10 s
EXAMPLE = "correct the file: smoke.toml is an example"


class ProtocolTable(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """A table of a protocol file. Unknown keys are refused, and no value is converted."""


class Grid(ProtocolTable, extra="allow"):
    """What a part or one of its scales gives: these, and settings, which `build` checks in each combination."""

    arm: str | list[str] | None = None
    ranks: PositiveInt | list[PositiveInt] | None = None
    repair: Repair | list[Repair] | None = None
    reserve_s: PositiveFloat = 0
    deepspeed: Annotated[str, Field(pattern=RELEASE)] | None = None
    decides: list[str] = []
    narrows: list[str] = []


class Part(Grid):
    """A grid of cells, and its values at each scale."""

    name: Annotated[str, Field(pattern=PART_NAME)]
    about: str | None = None
    instead_of: str | None = None
    paper: Grid | None = None
    one_gpu: Grid | None = None
    tiny: Grid | None = None


class ProtocolScript(ProtocolTable):
    """A script of the checkout that runs before the clock starts, and its words on a machine with a GPU."""

    name: Annotated[str, Field(pattern=PART_NAME)]
    file: str
    about: str | None = None
    words: list[str] = []
    decides: list[str] = []


class Protocol(ProtocolTable):
    """A protocol file."""

    about: str
    document: str
    replicates: str
    script: list[ProtocolScript] = []
    part: Annotated[list[Part], Field(min_length=1)]


OF_ALL = ("reserve_s", "deepspeed", "decides", "narrows", "instead_of")  # each cell of a part has them
NOT_AXES = {"name", "about", *OF_ALL, *SCALES}


@dataclass(frozen=True)
class Cell:
    """One arm with one combination of settings, not yet run."""

    protocol: str
    part: str
    scale: str
    arm: str
    ranks: int | None  # None: the arm's own default
    settings: dict  # by name, as the protocol gives them
    reserve_s: float = 0
    repeat: int = 1
    deepspeed: str | None = None  # None: the release that is installed
    decides: Sequence[str] = ()
    narrows: Sequence[str] = ()
    instead_of: str | None = None

    @property
    def script(self) -> str:
        return "as_printed" if "repair" in self.settings else "train"

    @property
    def name(self) -> str:
        """Return the part, the arm, and a digest of everything else but the repeat."""
        # The arm's file is part of it: a changed arm is another cell, and is run again. An empty place keeps
        # the names of what was run.
        place = (self.deepspeed,) if self.deepspeed else ()
        key = [self.script, self.arm, self.ranks, self.settings, place, arms.digest(self.arm)]
        return f"{self.part}-{self.arm}-{cache.fingerprint(key)[:8]}"

    @property
    def run_name(self) -> str:
        return f"{self.name}-r{self.repeat}"  # the folders of its runs: the number of the try follows

    @property
    def declared(self) -> sections.CellOfRun:
        return sections.CellOfRun(protocol=self.protocol, part=self.part, scale=self.scale, repeat=self.repeat)

    def new_record(self, folder: Path) -> Record:
        """Return a record, in case the trainer leaves none."""
        requested = sections.Requested(**self.settings, arm=self.arm)
        return store.new(folder.name, []).model_copy(update={"requested": requested, "cell": self.declared})

    @property
    def offload(self) -> str:
        """Where the arm keeps its optimizer states: none, cpu or nvme."""
        return arms.load_arm(self.arm).offload_optimizer

    def value(self, key: str):
        """Return the arm, ranks, part or any setting by name; the default if the protocol does not give it."""
        return getattr(self, key) if hasattr(self, key) else self.settings.get(key, getattr(Settings, key, None))


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read(name: str) -> dict:
    """Read a protocol by its name or the path of a file, and check its form."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.exists():
        otherwise = f"choose one of {', '.join(names())}, or give a .toml file"
        raise Stop(f"there is no protocol {name}", nearest(path.stem, names(), otherwise=otherwise))
    content = load(path, dict, what="a protocol", remedy=EXAMPLE, most_bytes=MAX_BYTES, links=True)
    try:
        Protocol.model_validate(content)
    except ValidationError as error:
        raise Stop(f"{path.name}: {sentence(error, Protocol.model_fields)}".rstrip("?"), EXAMPLE) from None
    return content | {"file": path.name, "name": path.stem}


@once
def parts(name: str) -> set[str]:
    """Return the names of a protocol's parts; none if there is no such protocol."""
    return {part["name"] for part in read(name)["part"]} if name in names() else set()


def alike(run: Run) -> str:
    """Return the command that makes runs like this: that of its part of a protocol, or its own launch."""
    record, cell = run.record, run.record.cell
    name = cell.protocol or run.folder.parent.name  # the first records name no protocol
    scale = f" --scale {cell.scale}" if cell.scale not in (None, "tiny") else ""  # tiny is the default
    sweep = f"study sweep {name} --only part={cell.part}{scale}"
    if cell.part in parts(name):
        return sweep
    if record.requested.hosts or record.requested.checkpoint_every:  # of a protocol that went with these settings
        return f"git checkout {record.commit} && {sweep}"
    given = re.sub(r"--cache-dir \S+ ?", "", " ".join(record.argv[1:]))
    given = re.sub(r"--run-dir (\S*/)?", "--run-dir runs/", given)
    launch = f"accelerate launch --config_file {record.requested.config_file} --num_processes {record.observed.ranks}"
    return f"{launch} study/{Path(record.argv[0]).name} {given}"


def scales(protocol: dict) -> list[str]:
    """Return the scales that a protocol has, from the largest to the smallest."""
    return [each for each in SCALES if any(each in part for part in protocol["part"])]


def scale_of(declared: dict, gpus: int) -> str:
    """Return the scale of so many GPUs, if the protocol has it, and else its largest."""
    known = scales(declared) or ["tiny"]
    wanted = "paper" if gpus > 1 else "one_gpu"
    return wanted if wanted in known else known[0]


def cells(protocol: dict, scale: str) -> list[Cell]:
    """Return every cell of a protocol at a scale, in the order of the file."""
    cells = [cell for part in protocol["part"] if scale in part for cell in _cells_of_part(protocol, part, scale)]
    if not cells:
        known = scales(protocol)
        remedy = f"give --scale {' or '.join(known)}, or {EXAMPLE}" if known else EXAMPLE
        raise Stop(f"{protocol['file']} has no scale {scale!r}", remedy)
    return cells


def _cells_of_part(protocol: dict, part: dict, scale: str) -> Iterator[Cell]:
    where = f"{protocol['file']}, part {part['name']!r}"
    # A scale's values come last, so that its axes vary fastest.
    merged = {key: value for key, value in part.items() if key not in part[scale]} | part[scale]
    axes = {key: value if isinstance(value, list) else [value] for key, value in merged.items() if key not in NOT_AXES}
    # Before the product is expanded: three lists of a few thousand values would fill the memory.
    count = math.prod(map(len, axes.values()))
    if not 0 < count <= MAX_CELLS:
        raise Stop(f"{where} has {count} cells", f"give each list a value, and all together at most {MAX_CELLS} cells")
    of_all = {key: merged[key] for key in OF_ALL if key in merged}
    for combination in itertools.product(*axes.values()):
        settings = dict(zip(axes, combination, strict=True))
        arm = arms.load_arm(settings.pop("arm", "no arm"))
        ranks = settings.pop("ranks", None)
        # Checked here, so that a mistake in the last cell is found before the first one runs.
        build({name: value for name, value in settings.items() if name != "repair"}, where)
        yield Cell(protocol["name"], part["name"], scale, arm.name, ranks, settings, **of_all)
