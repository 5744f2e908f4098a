"""What words of a command line name: runs and configs, or the text of files, of standard input, of an error."""

import os
from pathlib import Path

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
        path = Path(word)
        if word == "-":
            texts.append(condense.standard_input(command))
        elif not os.path.exists(word):  # noqa: PTH110  an error in quotes may be longer than a name, where pathlib raises
            loose.append(word)
        elif path.is_dir() or path.name == store.RECORD or path.suffix in CONFIGS:
            paths.append(path)
        else:
            texts.append(condense.content(path))
    without_quotes = [word for word in loose if len(word.split()) == 1]
    if without_quotes and all(map(A_PATH.fullmatch, without_quotes)):
        missing = " and ".join(map(repr, without_quotes))
        raise Stop(f"{missing:.300} cannot be read: not there", "name a log, a config, or the folder of a run")
    if loose:
        texts.append(" ".join(loose))
    return paths, "\n\n".join(texts)


def whole_text(paths: list[Path], text: str) -> str:
    """Return a text with that of the configs and records beside it."""
    return "\n\n".join([text, *(condense.content(path) for path in paths if path.is_file())])
