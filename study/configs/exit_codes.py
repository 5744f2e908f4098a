"""How programs write that a process ended by a signal or with an exit code: one pattern for all of them.

Python writes a signal as -11, a shell and containers as 139. In patterns of tables `CODE<11>` stands for both.
"""

import re

WRITTEN = r"(?:[Ee]xit|EXIT|[Rr]eturn)(?:s|ed)?(?: with)?(?: non-zero)?[ _]?(?:(?:exit|return)[ _])?"
WRITTEN += r"(?:[Cc]ode|CODE|[Ss]tatus|STATUS)\W{0,9}?|\b[Cc]ode: "
SIGNAL_BASE = 128  # which a shell adds to a signal's number


def filled(pattern: str) -> str:
    """Return a pattern with the ways to write each `CODE<signal>`, and each `EXIT<code>`."""
    by_signal = re.sub(r"CODE<(\d+)>", lambda match: _written(f"-{match[1]}|{SIGNAL_BASE + int(match[1])}"), pattern)
    return re.sub(r"EXIT<(\d+)>", lambda match: _written(match[1]), by_signal)


def _written(codes: str) -> str:
    return rf"(?:(?:{WRITTEN})(?:{codes})(?![\w.]*\d))"
