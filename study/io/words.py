"""Words as a sentence lists them."""

from collections.abc import Iterable


def joined(parts: list[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def distinct(words: Iterable[str], mark: str = "; ") -> str:
    """The texts in one, each once, without empty ones."""
    return mark.join(dict.fromkeys(filter(None, words)))
