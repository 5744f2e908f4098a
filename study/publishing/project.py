"""What every published document names: `publish.toml` has what only a maintainer knows, pyproject.toml the version."""

import functools
from datetime import date
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from study.errors import Stop
from study.io import files
from study.io.parsing import from_toml
from study.io.validation import sentence
from study.spec.arms import ROOT

FILE = ROOT / "publish.toml"
MAX_BYTES = 2**20
FORM = ConfigDict(frozen=True, extra="forbid")
EMPTY = BeforeValidator(lambda value: None if value == "" else value)
Text = Annotated[str | None, EMPTY]
Address = Annotated[str | None, Field(pattern=r"^https://\S+[^/\s]$"), EMPTY]
OnHub = Annotated[str | None, Field(pattern=r"^[\w.-]+/[\w.-]+$"), EMPTY]


class Author(BaseModel):
    """A person, or a group that has a name only."""

    model_config = FORM

    name: Text = None
    given: Text = None
    family: Text = None
    orcid: Annotated[str | None, Field(pattern=r"^(\d{4}-){3}\d{3}[\dX]$"), EMPTY] = None
    affiliation: Text = None

    @model_validator(mode="after")
    def _is_a_person_or_a_group(self) -> "Author":
        if bool(self.name) == bool(self.given and self.family):
            raise ValueError("an author has either a name, or given and family")
        return self


class Project(BaseModel):
    """The content of publish.toml. Unknown is None."""

    model_config = FORM

    title: str
    abstract: str
    keywords: list[str]
    repository: Address = None
    pages: Address = None
    dataset: OnHub = None
    space: OnHub = None
    doi: Annotated[str | None, Field(pattern=r"^10\.\d{4,}/\S+$"), EMPTY] = None
    released: Annotated[date | None, EMPTY] = None
    author: tuple[Author, ...]


@functools.cache
def project() -> Project:
    """Return what publish.toml says."""
    try:
        return Project.model_validate(from_toml(files.read(FILE, MAX_BYTES)))
    except OSError as error:
        raise Stop(f"{FILE} cannot be read ({files.why(error)})", "publish from a checkout of the repository") from None
    except ValidationError as error:
        raise Stop(f"{FILE.name}: {sentence(error, list(Project.model_fields))}", "correct the file") from None


@functools.cache
def version() -> str:
    """Return the version in pyproject.toml, the only place where it is written by hand."""
    return from_toml(files.read(ROOT / "pyproject.toml", MAX_BYTES))["project"]["version"]
