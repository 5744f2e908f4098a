"""What the words of `study diagnose` name: runs and configs, or the text of files, of standard input, of an error."""

import re
from pathlib import Path

from study.configs.pasted import condense
from study.core.errors import Stop
from study.records import store

A_PATH = re.compile(r"\S*/\S*|\S*\.[a-z]\w{0,5}")  # a name with a folder or an ending, and no sentence
CONFIGS = (".json", ".yaml", ".yml", ".toml")


def split(words: tuple[str, ...]) -> tuple[list[Path], str]:
    """Return the runs and configs that words name, and the text of all others: files, the standard input, an error."""
    paths = []
    texts = []
    loose = []  # an error without quotes is many words
    for word in words:
        path = Path(word)
        if word == "-":
            texts.append(condense.standard_input())
        elif _is_file(path) and path.name != store.RECORD and path.suffix not in CONFIGS:
            texts.append(condense.content(path))
        elif _is_there(path):
            paths.append(path)
        else:
            loose.append(word)
    without_quotes = [word for word in loose if len(word.split()) == 1]
    if without_quotes and all(map(A_PATH.fullmatch, without_quotes)):
        missing = " and ".join(map(repr, without_quotes))
        raise Stop(f"{missing:.300} cannot be read: not there", "name a log, a config, or the folder of a run")
    if loose:
        texts.append(" ".join(loose))
    return paths, "\n".join(texts)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # an error in quotes may be longer than a name can be
        return False


def _is_file(path: Path) -> bool:
    return _is_there(path) and path.is_file()
