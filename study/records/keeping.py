"""Takes private information out of a record: paths, names, addresses and secrets."""

import ipaddress
import re
import socket

from study.records.schema import Record

# An absolute path of two parts or more, as itself or as a file: address. What stands before it tells it from a relative
# path, from the // of an address and from the end of an HTML element; compilers are given -I/usr/include.
BEFORE_PATH = r"(?:(?<![\w/.<~}])|(?<=-[ILB]))(?:file://[\w.-]*(?=/))?"
PATH = re.compile(BEFORE_PATH + r"(/(?:[^\s/'\"<>:]+/)+(?:[^\s/'\"<>:,;)]+/?)?)")
QUOTED_PATH = re.compile(r"(?<=(['\"]))(/(?:[^\n/'\"<>:]+/)+[^\n/'\"<>:]*)(?=\1)")  # it may hold spaces
HOME = re.compile(r"/root/?|.*/(?:home|users)/[^/]+/?", re.IGNORECASE)  # its last part is a person's name
LOGIN = re.compile(r"(?<=://)[^\s/@'\"<>]+@")  # the user and token in an address
# Not in a version: ==9.1.0.70, v9.1.0.70, .so.9.1.0.70.
ADDRESS = re.compile(
    r"(?<![\w.:-])(?<!==)(?:\d{1,3}(?:\.\d{1,3}){3}|[\da-fA-F]{0,4}(?::[\da-fA-F]{0,4}){2,7})(?![\w.]*\w)"
)
# Secrets by their form: of Hugging Face, GitHub, GitLab, OpenAI and Anthropic, AWS, Slack, Google; a JSON web token.
TOKEN = re.compile(
    r"\b(?:hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|A[KS]IA[A-Z0-9]{16}"
    r"|xox[a-z]-[\w-]{10,}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
# And by what they are called: HF_TOKEN=..., --wandb-api-key ..., "password": "...", Authorization: Bearer ...
SECRET_NAME = (
    r"(?:(?<![\w-])[\w-]{0,64}?(?:api[_-]?key|access[_-]?key|secret|passw(?:or)?d|authorization|credential"
    r"|(?:hf|hub|access|auth|api|refresh|session|github|gitlab|private|user)[_-]?token)s?|(?<![\w-])(?:--)?token)"
)
SECRET_KEY = re.compile(SECRET_NAME, re.IGNORECASE)
SECRET = re.compile(  # a number is a count of tokens
    rf"({SECRET_NAME}(?:['\"]?\s*[=:]\s*['\"]?|\s+(?=\S*\d))(?:bearer\s+|basic\s+)?)(?!\d[\d.]*(?![\w-]))[^\s'\"&,;<>]{{6,}}",
    re.IGNORECASE,
)
PERSON = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b|(?<![\w@./])[\w.-]+@[\w.-]+(?=:)")  # an e-mail, alice@host:
# Names of machines in networks that nobody else sees.
HOST = re.compile(r"\b[\w-]+(?:\.[\w-]+)*\.(?:local|localdomain|internal|intranet|intra|lan|corp|home\.arpa)\b", re.I)
OWN_NAME = re.compile(r"(?=.*[\d.-]).{5,}")  # a host name that is no word: "node-7", not "gpu"


def shared(record: Record) -> Record:
    """Return a record without private information."""
    return Record.model_validate(redact(record.model_dump(mode="json", by_alias=True)))


def redact(value, key: str = ""):
    """Return a value without private information about a machine and its user.

    Every absolute path is cut down to its last part, and a home folder to `~`. Logins, e-mail and IP addresses, names
    of machines, and texts that look like secrets, or whose `key` names one, are removed.
    """
    if isinstance(value, dict):
        return {name: redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [redact(item) for item in value]
    if not isinstance(value, str):
        return value
    if SECRET_KEY.fullmatch(key):
        return "(secret)"
    while (text := _redact(value)) != value:  # a removal may join two parts of another private text
        value = text
    return text


def _redact(text: str) -> str:
    if "@" in text:
        text = PERSON.sub("(address)", LOGIN.sub("", text))
    text = SECRET.sub(lambda secret: f"{secret[1]}(secret)", TOKEN.sub("(secret)", text))
    text = ADDRESS.sub(lambda address: _hidden(address[0]), HOST.sub("(host)", text))
    if (own := socket.gethostname()) in text and OWN_NAME.fullmatch(own):
        text = text.replace(own, "(host)")
    if "/" not in text:
        return text
    text = QUOTED_PATH.sub(lambda path: _last_part(path[2]), text)
    return LOGIN.sub("", PATH.sub(lambda path: _last_part(path[1]), text))


def _last_part(path: str) -> str:
    return "~" if HOME.fullmatch(path) else path.rstrip("/").rpartition("/")[2]


def _hidden(address: str) -> str:
    """Return a placeholder for the address of a machine. Loopback addresses stay, as every machine has them."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:  # a time of day, or another number with points in it
        return address
    return address if known.is_loopback or known.is_unspecified else "(IP address)"
