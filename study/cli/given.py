"""What words of a command line name: runs and configs, or the text of files, of standard input, of an error."""

import contextlib
import os
from pathlib import Path

from study.configs import engines, sources
from study.configs.oom.reading import BETWEEN_TEXTS
from study.configs.pasted import condense
from study.configs.stacks import CONFIGS
from study.core.errors import Stop
from study.known.lists import A_PATH
from study.records import store


def split(words: tuple[str, ...], command: str = "diagnose") -> tuple[list[Path], str]:
    """Return the runs and configs that words name, and the text of all others: files, the standard input, an error.

    `command` is the one that was typed, which a remedy names.
    """
    paths = []
    texts = []
    loose = []  # an error without quotes is many words
    for word in words:
        if word == "-":
            texts.append(condense.standard_input(command))
        elif not os.path.exists(word):  # noqa: PTH110  an error in quotes may be longer than a name, where pathlib raises
            loose.append(word)
        elif is_run_or_config(Path(word)):
            paths.append(Path(word))
        else:
            texts.append(condense.content(Path(word)))
    refuse_missing([word for word in loose if len(word.split()) == 1])
    if loose:
        texts.append(" ".join(loose))
    return paths, BETWEEN_TEXTS.join(texts)


def is_run_or_config(path: Path) -> bool:
    return path.is_dir() or path.name == store.RECORD or path.suffix in CONFIGS


def refuse_missing(words: list[str]) -> None:
    """Raise Stop if all words without quotes look like paths: somebody names files, and none is there."""
    if words and all(map(A_PATH.fullmatch, words)):
        missing = " and ".join(map(repr, words))
        raise Stop(f"{missing:.300} cannot be read: not there", "name a log, a config, or the folder of a run")


def whole_text(paths: list[Path], text: str, words: tuple[str, ...] = ()) -> str:
    """Return a text with the texts of the configs and records beside it, and of the configs that they name.

    All are of the engine that trains by all words.
    """
    texts = engines.texts_of(words)
    of_engine = engines.of_what_trains(texts)
    beside = [path for path in paths if path.is_file()]
    for path in engines.that_may_count([each for each in beside if each.suffix in CONFIGS], texts):
        with contextlib.suppress(Stop):
            named = sources.read(path).named
            beside += [named.path] if named and named.path not in [path, *map(Path.resolve, paths)] else []
    return BETWEEN_TEXTS.join([text, *(of_engine.get(path.name) or condense.content(path) for path in beside)])
