"""Reads Python's syntax: of a script its nodes, calls, assignments and imports."""

import ast
import functools
import re
from collections.abc import Iterator
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)


@functools.lru_cache(maxsize=8)
def parsed(text: str) -> ast.Module | None:
    """Return the syntax of a text. None: it is no Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def nodes_of(kind: type[Node] | tuple[type[Node], ...], tree: ast.AST | None) -> list[Node]:
    """Return the nodes of a kind, or of several, in the syntax of a text. What is no Python has none."""
    return [node for node in ast.walk(tree) if isinstance(node, kind)] if tree else []


def calls_by_line(tree: ast.AST) -> list[ast.Call]:
    """Return the calls of a scope and of those in it, by lines."""
    return sorted(nodes_of(ast.Call, tree), key=lambda each: (each.lineno, each.col_offset))


def function_of(call: ast.Call) -> str:
    """Return what is called, as it is written."""
    return ast.unparse(call.func)


def called(call: ast.Call) -> str:
    """Return the last name of what is called."""
    return function_of(call).rpartition(".")[2]


def given(call: ast.Call) -> list[str]:
    """Return what a call is given, as it is written."""
    return [ast.unparse(each) for each in (*call.args, *(keyword.value for keyword in call.keywords))]


def assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield each name that is assigned, with the value. Several names may take parts of one value."""
    for node in nodes_of(ast.Assign, tree):
        for target in node.targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                yield ast.unparse(each), node.value


def assigned_calls(tree: ast.AST, made_by: re.Pattern) -> dict[str, ast.Call]:
    """Return what is assigned from such calls, by names."""
    return {
        name: value
        for name, value in assignments(tree)
        if isinstance(value, ast.Call) and made_by.search(function_of(value))
    }


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the first names of modules that a script imports; an empty one for a relative import."""
    for node in nodes_of(ast.Import, tree):
        yield from (each.name.partition(".")[0] for each in node.names)
    for of in nodes_of(ast.ImportFrom, tree):
        yield "" if of.level else (of.module or "").partition(".")[0]


def at_intervals(tree: ast.AST, step: re.Pattern, backward: re.Pattern) -> Iterator[tuple[ast.Call, str]]:
    """Yield the first step of a loop that makes each of its steps after some backward passes alone, and that number."""
    names = {name: ast.unparse(value) for name, value in assignments(tree)}
    for loop in nodes_of((ast.For, ast.While), tree):
        calls = [(call, function_of(call)) for call in calls_by_line(loop)]
        steps = {call for call, name in calls if step.search(name)}
        passes = {call for call, name in calls if backward.search(name)}
        for guard in nodes_of(ast.If, loop):
            binary = nodes_of(ast.BinOp, guard.test)
            counts = [ast.unparse(each.right) for each in binary if isinstance(each.op, ast.Mod)]
            if isinstance(guard.body[-1], ast.Continue):
                inside = {call for call, _ in calls if call.lineno > guard.body[-1].lineno}
            else:
                inside = {call for call, _ in calls if side_of(guard, call)}
            if counts and names.get(counts[0], counts[0]) != "1" and steps and steps <= inside and passes - inside:
                yield min(steps, key=lambda call: call.lineno), counts[0]
                break


def side_of(branch: ast.If, call: ast.Call) -> str:
    """Return in which side of a branch a call is. Empty: in none."""
    for side in ("body", "orelse"):
        if any(call is each for part in getattr(branch, side) for each in ast.walk(part)):
            return side
    return ""
