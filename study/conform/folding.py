"""Leaves out of a file what the settings of one case decide: branches that are not taken, docstrings and comments."""

import ast
import operator
from collections.abc import Callable

OPERATORS: dict[type[ast.cmpop], Callable[[object, object], object]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda value, many: value in many,  # type: ignore[operator]
    ast.NotIn: lambda value, many: value not in many,  # type: ignore[operator]
}
HOLDERS = ("case", "options")  # variables and attributes with the settings


def folded(text: str, known: dict[str, object]) -> str:
    """Return a file in which some settings have their values."""
    return ast.unparse(ast.fix_missing_locations(Folding(known).visit(ast.parse(text))))


def constant(node: ast.expr) -> tuple[object] | None:
    """Return the value of an expression in a tuple; None if it is not known."""
    try:
        return (ast.literal_eval(node),)
    except ValueError:
        return None


class Folding(ast.NodeTransformer):
    def __init__(self, known: dict[str, object]) -> None:
        self.known = known

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        holder = getattr(node.value, "id", getattr(node.value, "attr", None))
        if holder in HOLDERS and node.attr in self.known and isinstance(node.ctx, ast.Load):
            return ast.parse(repr(self.known[node.attr]), mode="eval").body
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        compare = OPERATORS.get(type(node.ops[0])) if len(node.ops) == 1 else None
        left, right = constant(node.left), constant(node.comparators[0])
        return ast.Constant(bool(compare(left[0], right[0]))) if compare and left and right else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "startswith"):
            values = [constant(each) for each in (node.func.value, *node.args)]
            if all(values):
                owner, *arguments = [value[0] for value in values if value]
                return ast.Constant(getattr(owner, node.func.attr)(*arguments))
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        owner, key = constant(node.value), constant(node.slice)
        return ast.Constant(owner[0][key[0]]) if owner and key else node  # type: ignore[index]

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        first = constant(node.values[0])
        if first is None:
            return node
        if bool(first[0]) == isinstance(node.op, ast.Or):
            return node.values[0]
        rest = node.values[1:]
        return rest[0] if len(rest) == 1 else self.visit_BoolOp(ast.BoolOp(node.op, rest))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        value = constant(node.operand)
        return ast.Constant(not value[0]) if value and isinstance(node.op, ast.Not) else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        value = constant(node.test)
        return node if value is None else node.body if value[0] else node.orelse

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        node.test = self.visit(node.test)
        value = constant(node.test)
        if value is not None:  # what is not taken is not looked at: there it may say what is not so
            taken = ast.Module(node.body if value[0] else node.orelse, [])
            return self.generic_visit(taken).body  # type: ignore[attr-defined]
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.body = without_docstring(node.body)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)
        node.body = without_docstring(node.body)
        return node


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    found = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return (body[1:] if found else body) or [ast.Pass()]
