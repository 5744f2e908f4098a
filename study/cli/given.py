"""What the words of `study diagnose` name: runs and configs, or the text of files, of standard input, of an error."""

from pathlib import Path

from study.configs.pasted import condense
from study.configs.stacks import CONFIGS
from study.records import store


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
    if len(loose) == 1 and " " not in loose[0] and {*"/."} & {*loose[0]}:  # a path that is not there
        paths.append(Path(loose[0]))
    elif loose:
        texts.append(" ".join(loose))
    return paths, "\n".join(texts)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # an error in quotes may be longer than a name can be
        return False


def _is_file(path: Path) -> bool:
    return _is_there(path) and path.is_file()
