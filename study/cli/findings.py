"""How commands print a finding, and what is behind a sentence with an id."""

from dataclasses import asdict

from study.cli.ids import of_setting
from study.core.text import say, say_wrapped
from study.known.explained import Explained, behind
from study.known.findings import Finding, ended

MOST_TESTS = 4  # that are shown


def say_indented(*texts: str) -> None:
    say_wrapped(*texts, indent="    ", first="    ")


def show_finding(first: str, finding: Finding) -> None:
    say("")
    say_wrapped(finding.said, indent="    ", first=first)
    if finding.remedy:
        say_indented(f"What to do: {finding.remedy}.")
    if finding.evidence:
        say(f"    Shown by: {finding.evidence}")  # a path to copy: it is not wrapped


def show_behind(each: Explained) -> dict:
    """Print what is behind a sentence, and return it."""
    of = behind(each)
    thread = "Nearest thread, not filed by us" if each.is_not_filed else "Upstream"
    setting = of_setting(each.id)
    lines = [
        f"{each.id}: a {each.kind}",
        f"Sentence: {ended(each.sentence)}",
        *setting,
        f"What to do: {each.remedy}." if each.remedy else "",
        f"Condition: {'; '.join(of.conditions)}" if of.conditions else "",
        f"Rests on: {of.rests_on.rstrip('.') or 'its test'}.",
        f"{thread}: {each.upstream or 'no thread'}",
        f"Written: {of.written}",  # from here on: places in the sources
        f"Rule: {', '.join(of.rules) or f'that table, which {each.read_by} reads'}",
        f"Also named in: {', '.join(of.readers)}" if of.readers else "",
    ]
    say_wrapped(*filter(None, lines), indent="    ")
    tests = of.tests[:MOST_TESTS] or ["in tests/ of the repository, which an installed package does not have"]
    say(*(f"Test: {test}" for test in tests), "")  # paths to copy: they are not wrapped
    return asdict(each) | {
        "setting": setting,
        "rests_on": of.rests_on,
        "table": of.written,
        "rules": [*of.rules, *of.readers],
        "conditions": of.conditions,
        "tests": of.tests,
    }
