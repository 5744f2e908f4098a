"""What is taken out of records before they are shared."""

import ipaddress
import re

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


def without_paths(value):
    """The same without what tells of a machine and its user.

    Every absolute path is cut down to its last part, a home folder to `~`. Logins in addresses and IP addresses go.
    """
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    text = QUOTED_PATH.sub(lambda path: _last_part(path[2]), value) if "/" in value else value
    text = LOGIN.sub("", PATH.sub(lambda path: _last_part(path[1]), text)) if "/" in text else text
    return ADDRESS.sub(lambda address: _hidden(address[0]), text)


def _last_part(path: str) -> str:
    return "~" if HOME.fullmatch(path) else path.rstrip("/").rpartition("/")[2]


def _hidden(address: str) -> str:
    """A placeholder for an address that leads to a machine; the loopback is every machine's."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:  # a time of day, or another number with points in it
        return address
    return address if known.is_loopback or known.is_unspecified else "(IP address)"
