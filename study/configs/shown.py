"""Values and keys of a stranger's file as text: short, without secrets, and without what would change a terminal."""

from study.configs.settings import Setting
from study.core.text import short

LONGEST = 72  # characters of a value, and of a key: those of the libraries have 63 at most
SECRET = ("token", "password", "secret", "api_key", "credential")


def shown(setting: Setting, name: str = "") -> str:
    """Return a value as text for people. Secrets are not shown, and a stranger's text cannot change the terminal."""
    value = setting.value
    if value is None:
        return "not set"
    if is_secret(name, value):
        return "(not shown)"
    return printable(short(value))


def is_secret(name: str, value: object) -> bool:
    """Return whether a key of this name may hold a secret, such as the token of a hub. A number of tokens is none."""
    return type(value) not in (int, float) and any(part in name.lower() for part in SECRET)


def printable(text: str) -> str:
    """Return a text from a file as a terminal can show it: short, on one line, without control characters."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
