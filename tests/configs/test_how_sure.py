"""`study stack` and `study diagnose` are equally sure of the same facts, in the same words."""

import re
from dataclasses import replace

import pytest
from packaging.version import Version

from study.cli import stack as command
from study.cli.diagnosis import diagnose
from study.configs.pasted import matching
from study.known.faults import Fault, table
from study.known.stacks import UNSAID, Flags, Stack
from study.known.which_apply import which_apply
from tests.cases import for_each
from tests.known.test_not_told import fitting, keys_of

FAULTS = [fault for fault in table().fault if fault.when]


def beyond(fault: Fault) -> Version:
    """A release behind the last that was tested."""
    newest = fault.tested[-1]
    return Version(f"{newest.major}.{newest.minor}.{newest.micro + 1}")


def between(fault: Fault) -> Version | None:
    """A release that nobody tested, between two that have it. None: one release alone has it."""
    inside = [release for release in fault.tested if fault.contains(release)]
    return Version(f"{inside[0]}.post1") if len(inside) > 1 else None


def stack_with(fault: Fault, release: Version, is_script_known: bool) -> Stack:
    """A training that has all that a fault asks for, or all but what its script does."""
    said = {name: fitting(wanted) for name, wanted in fault.conditions.items() if name not in ("keys", "script")}
    releases = {name: Version(said.pop(name)) for name in [*said] if name in table().asked}
    keys = keys_of(fault.conditions.get("keys", [{}])[0])
    shown = {fault.conditions["script"]: True} if is_script_known and "script" in fault.conditions else {}
    return Stack(releases | {fault.package: release}, UNSAID | {"optimizer": None} | said, keys.get, shown)


def level(stack: Stack, fault: Fault) -> str | None:
    return next((each.answer for each in which_apply(stack) if each.fault.id == fault.id), None)


@for_each("fault", FAULTS, ids=lambda fault: fault.id)
def test_three_levels_are_told_apart(fault):
    is_asked = "script" in fault.conditions
    tested, untested = Version(fault.until), between(fault)
    assert level(stack_with(fault, tested, is_script_known=True), fault) == "applies"
    assert level(stack_with(fault, tested, is_script_known=False), fault) == ("applies if" if is_asked else "applies")
    if untested:
        assert level(stack_with(fault, untested, is_script_known=True), fault) == "likely"
        sure = level(stack_with(fault, untested, is_script_known=False), fault)
        assert sure == ("applies if" if is_asked else "likely")
    assert level(stack_with(fault, beyond(fault), is_script_known=True), fault) in ("applies if", None)


@pytest.fixture
def printed(monkeypatch, capsys):
    """What both commands print of the same stack."""

    def of(stack: Stack, symptom: str) -> list[str]:
        seen = matching.symptoms_of_faults({symptom} - {""}, "")
        monkeypatch.setattr(command, "described", lambda *given, **said: (stack, []))
        monkeypatch.setattr(matching, "stack_of", lambda *given: replace(stack, seen=seen))
        told = []
        monkeypatch.setattr("study.configs.pasted.answer.MOST_ALSO", 99)
        monkeypatch.setattr("study.cli.pasted.MOST_MAY", 99)
        for ask in (
            lambda: command.stack("x", flags=Flags(), symptom=symptom or None),
            lambda: diagnose(("A training.",), symptom=symptom),
        ):
            ask()
            told.append(capsys.readouterr().out)
        return told

    return of


@for_each("symptom", ["", "seen"])
@for_each("fault", FAULTS, ids=lambda fault: fault.id)
def test_both_commands_are_equally_sure(fault, symptom, printed):
    word = fault.symptom.split()[0].rstrip(",") if symptom else ""
    for release in filter(None, (Version(fault.until), between(fault))):
        stack = stack_with(fault, release, is_script_known=True)
        sure = level(stack, fault)
        of_stack, of_diagnose = printed(stack, word)
        sentence = " ".join(fault.sentence.rstrip(".").split())
        is_told = {
            "applies": (rf"\d+\. {re.escape(sentence)}", f"(?:^|Applies here: |Also seen: ){re.escape(sentence)}"),
            "likely": (f"Likely: {re.escape(sentence)}",) * 2,
        }
        for pattern, text in zip(is_told[sure], (of_stack, of_diagnose), strict=True):
            assert re.search(pattern, " ".join(text.split())), (release, text)
