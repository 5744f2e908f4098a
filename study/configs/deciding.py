"""Which flags would tell of the most faults that they do not apply."""

from dataclasses import replace

from packaging.version import Version

from study.configs.priorities import AskedStack
from study.known.faults import Fault, table
from study.known.stacks import Stack
from study.known.which_apply import Applies, OpenQuestion, is_ruled_out

MOST_ASKED = 3  # flags
NUMBERS = [1, 8]  # of ranks or passes: alone, or more than any fault needs


def deciding(asked: AskedStack, may: list[Applies]) -> list[str]:
    """Return the flags whose answers rule out some of these faults, the one that rules out most first."""
    ruled_out = {name: _ruled_out(stacks, may) for name, stacks in _answers(asked, may).items()}
    ordered = sorted(ruled_out, key=lambda name: -ruled_out[name])
    return [name for name in ordered if ruled_out[name]][:MOST_ASKED]


def _answers(asked: AskedStack, may: list[Applies]) -> dict[str, list[Stack]]:
    """Return the stacks that answers to open questions would make, by what a user gives to answer."""
    answers: dict[str, list[Stack]] = {}
    for each in may:
        for question in each.why:
            answers[_given_as(question)] = _answered(asked, question, each.fault)
    answers.pop("", None)
    return answers


def _given_as(question: OpenQuestion) -> str:
    """Return what a user gives to answer a question. Empty: only somebody who looks at the script can."""
    return {"keys": "--config", "stage": "--stage"}.get(question.condition, question.flag)


def _answered(asked: AskedStack, question: OpenQuestion, fault: Fault) -> list[Stack]:
    """Return the stacks that the answers to a question would make."""
    condition, stack = question.condition, asked.stack
    if condition == "keys":
        return [] if asked.has_config else [replace(stack, key=lambda path: None)]  # a config without its keys
    if condition in table().asked or condition in stack.releases:
        tested = map(Version, table().asked.get(condition, fault.asked))
        return [replace(stack, releases={**stack.releases, condition: release}) for release in tested]
    return [stack.answered(condition, value) for value in _values(condition)] if question.flag else []


def _values(condition: str) -> list:
    """Return what a flag can say of a condition."""
    if condition == "optimizer":
        return [*table().optimizers]
    values = table().values[condition]
    if values == "true or false":
        return [True, False]
    return NUMBERS if values == "a number" else [*values]


def _ruled_out(stacks: list[Stack], may: list[Applies]) -> float:
    """Return how many faults an answer rules out on average, if all answers are as likely."""
    ruled_out = sum(is_ruled_out(each.fault, stack) for stack in stacks for each in may)
    return ruled_out / max(1, len(stacks))
