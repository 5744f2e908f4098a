"""Reads the code of a rule: its conditions with their numbers, and the comments above it."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]  # the repository in a checkout; of an installed wheel the folder of all packages

Function = ast.FunctionDef | ast.AsyncFunctionDef
RULE = ast.Yield | ast.Return  # what a function says of a training


@functools.cache
def _module(file: str) -> tuple[ast.Module, list[str]]:
    text = (ROOT / file).read_text(encoding="utf-8")
    return ast.parse(text), text.splitlines()


@functools.cache
def _functions(file: str) -> list[Function]:
    """Return the functions of a module, inner ones after the outer ones."""
    return [node for node in ast.walk(_module(file)[0]) if isinstance(node, Function)]


def _at(place: str) -> tuple[str, int]:
    file, _, number = place.rpartition(":")
    return file, int(number)


def _function(place: str) -> Function | None:
    """Return the innermost function around FILE:LINE."""
    file, line = _at(place)
    innermost = None
    for node in _functions(file):
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        if first <= line <= (node.end_lineno or line):
            innermost = node
    return innermost


def function_at(place: str) -> str | None:
    function = _function(place)
    return function.name if function else None


@functools.cache
def _made(file: str) -> set[tuple[int, str]]:
    """Return the texts that calls of a module are given, each with its line."""
    arguments = set()
    for node in ast.walk(_module(file)[0]):
        if not isinstance(node, ast.Call):
            continue
        for argument in node.args:
            if isinstance(argument, ast.Constant):
                arguments.add((argument.lineno, str(argument.value)))
    return arguments


def makes(place: str, id: str) -> bool:
    """Whether a line calls something with an id. Other lines only ask for it, such as those that rank signs."""
    file, line = _at(place)
    return (line, id) in _made(file)


def conditions_of_rule(place: str) -> list[str]:
    """Return the conditions that decide over a line, each with its place, and the values of the constants in them."""
    file, line = _at(place)
    function = _function(place)
    if function is None:
        return []
    tests = []
    conditions = []
    for node in _deciding(function, line):
        is_around = line <= (node.body[-1].end_lineno or line)
        condition = ast.unparse(node.test)
        conditions.append(f"{file}:{node.lineno}: {condition if is_around else f'not ({condition})'}")
        tests.append(node.test)
    for name, number in _numbers(file).items():
        if any(isinstance(part, ast.Name) and part.id == name for each in tests for part in ast.walk(each)):
            conditions.append(f"{name} = {number}")
    return conditions


def _deciding(function: Function, line: int) -> list[ast.If]:
    """Return each `if` around a line, and each `if` before it that leaves without it, in their order."""
    branches = []
    for node in ast.walk(function):
        block = getattr(node, "body", None)
        if not (isinstance(block, list) and block[0].lineno <= line <= (block[-1].end_lineno or line)):
            continue
        if isinstance(node, ast.If):
            branches.append(node)
        for statement in block:
            if isinstance(statement, ast.If) and statement.lineno < line and _ends_with_nothing(statement):
                branches.append(statement)
    return sorted(branches, key=lambda each: each.lineno)


def _ends_with_nothing(branch: ast.If) -> bool:
    """Whether it only leaves the function, or goes on with what is next."""
    first = branch.body[0]
    if isinstance(first, ast.Return):
        return first.value is None or (isinstance(first.value, ast.Constant) and first.value.value is None)
    return isinstance(first, ast.Continue)


def _numbers(file: str) -> dict[str, str]:
    """Return the constants of a module that are numbers."""
    numbers = {}
    for statement in _module(file)[0].body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            value = ast.unparse(statement.value)
            if value[0].isdigit():
                numbers[statement.targets[0].id] = value
    return numbers


def comments_of_rule(place: str) -> str:
    """Return the comments between a line and the rule before it. Without any: those at the top of its function."""
    file, line = _at(place)
    function = _function(place)
    if function is None:
        return ""
    lines = _module(file)[1]
    rules = sorted(node.lineno for node in ast.walk(function) if isinstance(node, RULE))
    before = [other for other in rules if other < line]
    own = _comments(lines[before[-1] if before else function.lineno : line])
    return own or _comments(lines[function.lineno : _before_rules(function)])


def _before_rules(function: Function) -> int:
    """Return the last line of the statements before the first that has a rule."""
    last = function.lineno
    for statement in function.body:
        if any(isinstance(node, RULE) for node in ast.walk(statement)):
            break
        last = statement.end_lineno or last
    return last


def _comments(lines: list[str]) -> str:
    return " ".join(line.strip(" #") for line in lines if line.lstrip().startswith("# "))
