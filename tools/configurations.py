"""Gives configurations to DeepSpeed, and reads defaults of libraries, for `keep_answers.py`.

python tools/configurations.py < trials.json

It reads a list of trials and writes a list of answers: {"found", "told"}, or {"error"} if the trial itself failed.
Nothing is trained: the configs are parsed for one rank without a process group.
"""

import contextlib
import copy
import dataclasses
import enum
import inspect
import json
import math
import os
import pkgutil
import sys

from study.core.errors import nearest

ABSENT, NONE = "absent", "none"


def main() -> None:
    """Answer every trial. What the libraries print goes to stderr."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with contextlib.redirect_stdout(sys.stderr):
        answers = [answer(trial) for trial in json.load(sys.stdin)]
    sys.stdout.write(json.dumps(answers) + "\n")


def answer(trial: dict) -> dict:
    arguments = {name: value for name, value in trial.items() if name != "what"}
    try:
        value, words = TRIALS[trial["what"]](**arguments)
        return {"found": plain(value), "told": words}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {first_line(error)}"}


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # pydantic's first line only counts errors; the next two lines name the field and the error.
    return "; ".join(lines[:3] if lines and "validation error" in lines[0] else lines[:1]) or type(error).__name__


def plain(value):
    """Return a value as JSON can hold it."""
    if value is None:
        return NONE
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, str) else value.name
    if isinstance(value, float) and not math.isfinite(value):
        return "never"
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)  # DeepSpeed has its own integer type, which prints with commas
    return value if isinstance(value, (bool, float, str)) else str(value)


def built(build, look: str):
    """Return what is at `look` in what a function builds with a library, or that the library rejects it."""
    try:
        thing = build()
    except (Exception, SystemExit) as error:
        return "rejected", f"rejected, {type(error).__name__}: {first_line(error)}"
    return ("accepted", "accepted") if look == "accepted" else seen(thing, look)


def deepspeed_config(*, config: dict, look: str = "accepted", ranks: int = 1):
    """Return what DeepSpeed's own parser makes of a config for `ranks` ranks."""
    from unittest.mock import patch

    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    with patch.multiple(comm, get_rank=lambda *_, **__: 0, get_world_size=lambda *_, **__: ranks):
        return built(lambda: DeepSpeedConfig(copy.deepcopy(config)), look)


def seen(thing, look: str):
    """Return the value at a dotted path of keys or attributes."""
    for name in look.split("."):
        owner = thing
        thing = owner.get(name, ABSENT) if isinstance(owner, dict) else getattr(owner, name, ABSENT)
        if isinstance(thing, str) and thing == ABSENT:
            known = list(owner) if isinstance(owner, dict) else [each for each in dir(owner) if each[0] != "_"]
            return ABSENT, f"there is no {look}; {nearest(name, known, otherwise='nor a similar name')}"
    return thing, f"{look} is {plain(thing)}"


def resolved(of: str):
    """Return the module, class or function of this name. Another name, such as an import, is a TypeError."""
    thing = pkgutil.resolve_name(of)
    if not (inspect.isclass(thing) or inspect.isfunction(thing) or of in sys.modules):
        raise TypeError(f"{of} is neither a module nor a class or function")
    return thing


def default(*, of: str, field: str):
    """Return the default of a field: of a pydantic model (by name or alias), a dataclass, or a function's argument."""
    thing = resolved(of)
    if hasattr(thing, "model_fields"):
        by_name = {key: info for name, info in thing.model_fields.items() for key in (name, info.alias) if key}
        value = by_name[field].get_default(call_default_factory=True)
    elif dataclasses.is_dataclass(thing):
        info = next(info for info in dataclasses.fields(thing) if info.name == field)
        value = info.default
        if callable(info.default_factory):
            value = info.default_factory()
    elif callable(thing) and field in inspect.signature(thing).parameters:
        value = inspect.signature(thing).parameters[field].default
    else:
        value = getattr(thing, field)
    return value, f"the default of {field} in {of} is {plain(value)}"


TRIALS = {each.__name__: each for each in (deepspeed_config, default)}


if __name__ == "__main__":
    main()
