"""Names from records, protocols, parcels and settings that become file names."""

from study.errors import Stop

LONGEST_NAME_BYTES = 200  # file systems take 255, and the report adds a suffix


def safe_name(name) -> str:
    """The name itself, if it is a valid file name and cannot lead out of its folder."""
    if not isinstance(name, str) or not name.isprintable() or name in ("", ".", "..") or "/" in name or "\\" in name:
        raise Stop(f"{name!r:.80} cannot be the name of a file", "give a name without slashes and control characters")
    if len(name.encode(errors="replace")) > LONGEST_NAME_BYTES:
        raise Stop(f"{name!r:.80} is too long for the name of a file", f"give at most {LONGEST_NAME_BYTES} bytes")
    return name
