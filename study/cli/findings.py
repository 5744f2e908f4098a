"""How commands print a finding: its sentence with its id, what to do, and what shows it."""

from study.core.text import say, say_wrapped
from study.known.findings import Finding


def say_indented(*texts: str) -> None:
    say_wrapped(*texts, indent="    ", first="    ")


def show_finding(first: str, finding: Finding) -> None:
    say("")
    say_wrapped(finding.said, indent="    ", first=first)
    if finding.remedy:
        say_indented(f"What to do: {finding.remedy}.")
    if finding.evidence:
        say(f"    Shown by: {finding.evidence}")  # a path to copy: it is not wrapped
