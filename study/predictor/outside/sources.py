"""The sources of published rows: what each one is, what it says of all its rows, and what it is used for."""

import functools
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from study.errors import Stop
from study.io import files
from study.io import parsing as texts
from study.predictor.outside.rows import FOLDER, Row
from study.spec.validation import sentence

MAX_BYTES = 4 * 2**20

Role = Literal["fit", "interval", "test"]  # what step times decide: constants, the width of the interval, or neither


class Says(BaseModel):
    """What a source's scripts and text say of many of its rows, if the rows do not. None: they do not say it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    where: str  # the place in the source where this was read
    about: str = ""  # applies to the rows whose address contains this
    gpus_per_node: int | None = None
    network: str | None = None  # between nodes: a name in study.predictor.papers.LINKS
    attention: Literal["sdpa", "eager"] | None = None
    checkpointing: Literal["full", "none"] | None = None
    optimizer: Literal["fused", "foreach"] | None = None
    logits: Literal["fp32", "as_computed"] | None = None  # of the loss
    kernels: Literal["fused"] | None = None  # of norms, activation functions and rotations
    zero: dict | None = None  # the settings in zero_optimization of its DeepSpeed configs, besides the stage


class Part(BaseModel):
    """Some rows of a source whose times have another role than those of its other rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    about: str  # a regular expression over a row's model, GPU and address
    role: Role
    why: str


class Miss(BaseModel):
    """Why predictions of some rows have missed: an explanation, not a correction."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    about: str = ""  # a regular expression over a row's model, GPU, arm and notes
    quantity: Literal["memory", "time"]
    why: str


class Source(BaseModel):
    """One source of rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    address: str
    licence: str  # of the text and data that the rows come from; rows are facts and figures, no text is kept
    what: str
    read: str  # how its rows were read
    unsaid: str
    role: Role | None = None  # for the model of time; None: not used
    part: tuple[Part, ...] = ()  # the first one that matches a row decides the row's role
    says: tuple[Says, ...] = ()
    miss: tuple[Miss, ...] = ()  # the first one that matches a row counts
    own_error: dict[Literal["memory", "time"], float] = {}  # a simulator's own figure: the mean of absolute errors

    def why_off(self, row: Row, quantity: str) -> str | None:
        words = f"{row.model} on {row.gpu}, {row.arm}, {row.notes}"
        fitting = (each for each in self.miss if each.quantity == quantity and re.search(each.about, words))
        return next((each.why for each in fitting), None)

    def role_of(self, row: Row) -> Role | None:
        words = f"{row.model} on {row.gpu}, {row.url_or_path}"
        return next((part.role for part in self.part if re.search(part.about, words)), self.role)

    def says_of(self, row: Row) -> Says:
        """What this source says of a row, besides the row itself."""
        return next((says for says in self.says if says.about in (row.url_or_path or "")), Says(where=""))


@functools.cache
def own() -> dict[str, Source]:
    """The sources of the project's own rows, by name."""
    return read(FOLDER / "sources.toml")


def read(path: Path) -> dict[str, Source]:
    try:
        content = texts.from_toml(files.read(path, MAX_BYTES))
        sources = [Source.model_validate(source) for source in content["source"]]
    except ValidationError as error:
        raise Stop(f"{path}: {sentence(error, Source.model_fields)}", f"correct {path.name}") from None
    except (OSError, ValueError) as error:
        raise Stop(f"{path} cannot be read ({files.why(error)})", f"restore {path.name}") from None
    except (KeyError, TypeError):
        raise Stop(f"{path} has no [[source]] tables", f"restore {path.name}") from None
    return {source.name: source for source in sources}
