"""Names from records, protocols, parcels and settings that become names of files."""

from study.errors import Stop

LONGEST_NAME_BYTES = 200  # file systems take 255, and the report adds a suffix


def safe_name(name) -> str:
    """The same name, if it can be the name of a file in a folder and lead to no other."""
    if not isinstance(name, str) or not name.isprintable() or name in ("", ".", "..") or "/" in name or "\\" in name:
        raise Stop(f"{name!r:.80} cannot be the name of a file", "give a name without slashes and control characters")
    if len(name.encode(errors="replace")) > LONGEST_NAME_BYTES:
        raise Stop(f"{name!r:.80} is too long for the name of a file", f"give at most {LONGEST_NAME_BYTES} bytes")
    return name
