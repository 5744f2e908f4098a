"""Computes with the numbers of a document: `400 * 38e12 / 1e15`, and the formulas of the ZeRO paper."""

import ast
import math
import operator
from collections.abc import Callable

from study.predict.front import papers

OPERATORS: dict[type, Callable] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.Pow: operator.pow, ast.USub: operator.neg},
}
FUNCTIONS: dict[str, Callable] = {"min": min, "max": max, "abs": abs, "round": round, "sqrt": math.sqrt}


def _states(*given) -> float:
    return sum(papers.states_bytes(*given).values())


def _flops(parameters: float, tokens: float) -> float:
    return 6 * parameters * tokens  # two forward, four backward: ZeRO-Infinity, section 4


FORMULAS: dict[str, Callable] = {
    **FUNCTIONS,
    "states": _states,  # parameters, stage, ranks, precision and optimizer, as for the next three
    "weights": lambda *given: papers.states_bytes(*given)["weights"],
    "gradients": lambda *given: papers.states_bytes(*given)["gradients"],
    "optimizer": lambda *given: papers.states_bytes(*given)["optimizer"],
    "flops": _flops,
}


def computed(expression: str, functions: dict[str, Callable]) -> float:
    """Return the value of an expression of numbers and these functions. Raise ValueError for anything else."""
    try:
        return _value(ast.parse(expression, mode="eval").body, functions)
    except (SyntaxError, ZeroDivisionError, TypeError, KeyError) as error:
        raise ValueError(f"{expression!r} cannot be computed: {error}") from None


def _value(node: ast.AST, functions: dict[str, Callable]):
    match node:
        case ast.Constant(value):
            return value
        case ast.BinOp(left, sign, right):
            return OPERATORS[type(sign)](_value(left, functions), _value(right, functions))
        case ast.UnaryOp(sign, operand):
            return OPERATORS[type(sign)](_value(operand, functions))
        case ast.Call(ast.Name(name), given, []):
            return functions[name](*(_value(each, functions) for each in given))
    raise TypeError(f"numbers, + - * / ** and {', '.join(functions)} are allowed")
