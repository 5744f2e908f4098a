"""How a config is read from a script, by its syntax: what counts of the text, what calls get, own arguments."""

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from typing import Any, TypeGuard

from study.configs.syntax import assigned_calls, called, function_of, imported, nodes_of, parsed

PARSED = re.compile(r"(?i)arg|conf|cfg|hparams|\b(?:opts?|options|flags)$")  # what holds a script's own arguments
PARSES = re.compile(r"\b(?:parse_(?:known_)?args\w*|cli)$")  # and what returns them, by argparse, transformers and tyro
# Calls whose keywords set up a training: of libraries, beside what the script itself defines.
SETS = re.compile(
    r"(?i:(?<!generation)(?<!statedict)(?:config|arguments|args|cfg|plugin|kwargs|strategy|trainer|training|settings)$)"
    r"|^(?:Accelerator|FSDP|FullyShardedDataParallel|fully_shard|CPUOffload|MixedPrecision\w*|DDP|DeepSpeedEngine"
    r"|DistributedDataParallel|DataLoader|GradScaler|autocast|checkpoint|initialize|pipeline|compile|prepare\w*"
    r"|from_(?:pretrained|config)|for_model|get_peft_model|gradient_checkpointing_enable|apply_liger_\w+|clip_grad_\w+"
    r"|dict|partial|replace|set_defaults|\w*launcher|init_process_group|\w*(?i:tok|tokenizer|adam\w*|sgd|lion|muon))$"
)
COMMAND = re.compile(r"\bcommand\b")  # a decorator of typer or click, whose arguments are the script's
MAIN = "__name__ =="
UNKNOWN = "auto"  # as DeepSpeed's configs have what another says
CONFIG = "zero_optimization"  # a key that each DeepSpeed config has
# A comment that tells how a training is launched, with which releases, or a setting.
LAUNCHED = re.compile(r"launch\b|torchrun|--\w|==|\w_\w+\s*[:=]")


def that_counts(text: str) -> str:
    """Return a text in which what a script only imports or remarks, or gives to a call that trains nothing, is no word.

    A DeepSpeed config that is made in several places is written out. Every line stays in its place. What is no Python
    stays as it is.
    """
    tree = parsed(text)
    if tree is None:
        return text
    lines = [bytearray(line) for line in text.encode(errors="surrogatepass").split(b"\n")]
    if [*imported(tree)]:  # and no question
        _leave_out_remarks(lines, text, tree)
    named = _leave_out_imports(lines, tree)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for call in nodes_of(ast.Call, tree):
        name = called(call)
        if name in own or SETS.search(named.get(name, name)):
            continue
        for keyword in call.keywords:
            if keyword.arg is None:
                continue
            begin, width = keyword.col_offset, len(keyword.arg.encode())
            lines[keyword.lineno - 1][begin : begin + width] = b"_" * width
            if isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str):
                _replace(lines, keyword.value, b'""')
    if CONFIG in text:
        _Configs(tree).write_out(lines)
    return b"\n".join(lines).decode(errors="surrogatepass")


def _leave_out_remarks(lines: list[bytearray], text: str, tree: ast.Module) -> None:
    """Leave out comments, and what modules, functions and classes say that they do."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not LAUNCHED.search(token.string):
            del lines[token.start[0] - 1][len(token.line[: token.start[1]].encode(errors="surrogatepass")) :]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            remark = ast.get_docstring(node)
            if remark and not LAUNCHED.search(remark):
                _replace(lines, node.body[0], b"pass")


def _leave_out_imports(lines: list[bytearray], tree: ast.Module) -> dict[str, str]:
    """Leave out the names that are imported and not used, and return what others are called where they come from."""
    used = {node.id for node in nodes_of(ast.Name, tree)} | {"*"}
    named: dict[str, str] = {}
    for node in nodes_of(ast.ImportFrom, tree):  # `import peft` alone at least needs it
        named |= {each.asname: each.name for each in node.names if each.asname}
        unused = [each for each in node.names if (each.asname or each.name) not in used]
        if len(unused) == len(node.names):
            _replace(lines, node, b"pass")
            continue
        for name in unused:
            _replace(lines, name, b"_")
    return named


class _Configs:
    """The dictionaries of a script, with what is written into them after they were made."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.values: dict[str, list[ast.expr]] = {}  # by names
        self.contents: dict[str, Any] = {}  # of names that have one value
        for node in nodes_of(ast.Assign, tree):
            if isinstance(node.targets[0], ast.Name):
                self.values.setdefault(node.targets[0].id, []).append(node.value)
        names = [each.id for each in nodes_of(ast.Name, tree) if isinstance(each.ctx, ast.Store)]
        names += [each.arg for each in nodes_of(ast.arg, tree)]
        for name, values in [*self.values.items()]:  # a loop, or a function, may have the name of a number as well
            if names.count(name) > 1 and not any(map(_is_dict, values)):
                del self.values[name]
        unsure = nodes_of((ast.If, ast.For, ast.While, ast.Try), tree)
        inside = {each for node in unsure if MAIN not in ast.unparse(node) for each in ast.walk(node)}
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.Expr)]
        self.changed = [(node, self._changed(node, is_sure=node not in inside)) for node in statements]

    def write_out(self, lines: list[bytearray]) -> None:
        """Write each DeepSpeed config where it is made, as JSON. What is not known stays as Python has it."""
        named = [(values[0], self.content(ast.Name(name))) for name, values in self.values.items()]
        alone = {node.value for node in nodes_of(ast.Expr, self.tree)}  # a config, and no script
        others = {node for node in ast.walk(self.tree) if _is_dict(node)} - {node for node, _ in named} - alone
        made = [(node, each) for node, each in named if isinstance(each, dict)]
        configs = [*made, *((node, self.content(node)) for node in others)]
        configs = [(node, each) for node, each in configs if CONFIG in each]
        parts = {id(part) for _, config in configs for part in _parts(config)}
        words: dict[ast.stmt | ast.expr, str] = {node: "pass" for node, each in self.changed if id(each) in parts}
        words |= {node: "{}" for node, each in made if id(each) in parts}
        words |= {node: _as_json(each) for node, each in configs}
        for node in sorted(words, key=lambda each: (each.lineno, each.col_offset), reverse=True):
            _replace(lines, node, words[node].encode())

    def _changed(self, node: ast.Assign | ast.Expr, is_sure: bool) -> dict | None:
        """Return the dictionary that a statement changes, as it is then. None: it changes none, or may not run."""
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            if not isinstance(target, ast.Subscript) or not isinstance(target.slice, ast.Constant):
                return None
            written, more = target.value, {target.slice.value: self.content(node.value)}
        else:
            call = node.value
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "update":
                return None
            written = call.func.value
            more = {each.arg: self.content(each.value) for each in call.keywords}
            more |= self.content(call.args[0]) if call.args and _is_dict(call.args[0]) else {}
        content = self.content(written)
        if not isinstance(content, dict) or any(part is content for part in _parts(more)):
            return None
        content |= more if is_sure else dict.fromkeys(more, ast.Constant(...))
        return content if is_sure else None

    def content(self, node: ast.expr) -> Any:
        """Return the dictionary that an expression is, or the expression."""
        if isinstance(node, ast.Name):
            values = self.values.get(node.id, [])
            if len(values) == 1 and node.id not in self.contents:
                self.contents[node.id] = node  # if it refers to itself
                self.contents[node.id] = self.content(values[0])
            return self.contents.get(node.id, node)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            content = self.content(node.value)
            return content.get(node.slice.value, node) if isinstance(content, dict) else node
        if not _is_dict(node):
            return node
        pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
        made = {}
        for key, value in pairs:
            if isinstance(key, ast.Constant):
                made[key.value] = self.content(value)
            elif key is None and isinstance(base := self.content(value), dict):
                made |= base
        return made | {each.arg: self.content(each.value) for each in getattr(node, "keywords", ()) if each.arg}


def _parts(content: dict) -> Iterator[dict]:
    """Yield a dictionary and all that are nested in it."""
    yield content
    for each in content.values():
        if isinstance(each, dict):
            yield from _parts(each)


def _is_dict(node: ast.AST) -> TypeGuard[ast.Dict | ast.Call]:
    return isinstance(node, ast.Dict) or (isinstance(node, ast.Call) and function_of(node) == "dict")


def _as_json(content: Any) -> str:
    """Return a dictionary as JSON. A part that is no constant stays as the script writes it."""
    if isinstance(content, dict):
        return f"{{{', '.join(f'{json.dumps(str(key))}: {_as_json(value)}' for key, value in content.items())}}}"
    try:
        return json.dumps(ast.literal_eval(content))
    except (ValueError, TypeError, RecursionError):
        return ast.unparse(content)


def _replace(lines: list[bytearray], node: ast.stmt | ast.alias | ast.expr, word: bytes) -> None:
    """Write a word over a part of a text, and spaces over the rest."""
    for number in range(node.lineno - 1, node.end_lineno or node.lineno):
        line = lines[number]
        begin = node.col_offset if number == node.lineno - 1 else 0
        end = node.end_col_offset if number + 1 == node.end_lineno else len(line)
        line[begin:end] = word.ljust((end or 0) - begin)
        word = b""


def calls(text: str, names: re.Pattern) -> Iterator[tuple[ast.Call, dict[str, Any]]]:
    """Yield the calls of these names, with what they are given. `auto`: it is not known, as of `**`."""
    tree = parsed(text)
    if tree is None:
        return
    made = _Configs(tree)
    set_later = _set_later(tree)
    for call in nodes_of(ast.Call, tree):
        if not names.fullmatch(called(call)):
            continue
        values: dict[str, Any] = {}
        for keyword in call.keywords:
            value = constant(made.content(keyword.value))
            is_unpacked = keyword.arg is None and isinstance(value, dict)
            values |= value if is_unpacked else {keyword.arg or "**": value}
        yield call, values | dict.fromkeys(set_later & values.keys(), UNKNOWN)


def _set_later(tree: ast.Module) -> set[str]:
    """Return the names of attributes that a script sets."""
    return {each.attr for each in nodes_of(ast.Attribute, tree) if isinstance(each.ctx, ast.Store)}


def constant(content: Any) -> Any:
    """Return a dictionary with its constants, or the constant that an expression is."""
    if isinstance(content, dict):
        return {name: constant(each) for name, each in content.items()}
    try:
        return ast.literal_eval(content)
    except (ValueError, TypeError, RecursionError):
        return UNKNOWN


def own_defaults(text: str) -> dict[str, Any]:
    """Return the defaults of a script's own arguments, and of its dataclasses."""
    fields = _of_parsers(parsed(text))
    return {name: constant(value) for name, value in fields.items() if value is not None}


def with_defaults(text: str, given: str = "") -> tuple[str, list[str]]:
    """Return a script with the values of its own arguments for their names, and the arguments whose defaults these are.

    An argument that is `given`, in a launch command beside the script, has that value. Numbers and names alone count:
    of an argument that is on or off, the command decides. What is no Python stays as it is.
    """
    tree = parsed(text)
    if tree is None:
        return text, []
    of_command = _of_commands(tree)
    defaults = _constants(_of_parsers(tree) | of_command)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name)]
    stored = [each.id for each in nodes_of(ast.Name, tree) if isinstance(each.ctx, ast.Store)]
    holders = {each for each in assigned_calls(tree, PARSES) if stored.count(each) == 1}
    set_later = _set_later(tree)
    lines, taken = [bytearray(line) for line in text.encode(errors="surrogatepass").split(b"\n")], set()
    for node in sorted(nodes, key=lambda each: (each.lineno, each.col_offset), reverse=True):
        if isinstance(node, ast.Attribute):
            of = ast.unparse(node.value)
            name, is_read = node.attr, node.attr not in set_later and (of in holders or bool(PARSED.search(of)))
        else:
            name, is_read = node.id, node.id in of_command and node.id not in stored
        if name in defaults and is_read and isinstance(node.ctx, ast.Load):
            spelt = re.escape(name).replace("_", "[-_]")
            typed = re.search(rf"(?<![\w-])--{spelt}[ =]+[\"']?([\w./-]+)", given)
            taken |= set() if typed else {f"--{name}"}
            value = defaults[name] if typed is None else typed[1]
            _replace(lines, node, (value if str(value).isdigit() else json.dumps(value)).encode())
    return b"\n".join(lines).decode(errors="surrogatepass"), sorted(taken)


def _of_parsers(tree: ast.Module | None) -> dict[str, ast.expr | None]:
    """Return the defaults of argparse's and click's arguments, and of a dataclass."""
    found: dict[str, ast.expr | None] = {}
    for of in nodes_of(ast.ClassDef, tree):
        if any("dataclass" in ast.unparse(each) for each in of.decorator_list):
            fields = [each for each in of.body if isinstance(each, ast.AnnAssign)]
            found |= {ast.unparse(each.target): _in_field(each.value) for each in fields}
    for call in nodes_of(ast.Call, tree):
        if called(call) in ("add_argument", "option"):
            names = [str(each.value) for each in call.args if isinstance(each, ast.Constant)]
            named = {each.arg: each.value for each in call.keywords}
            destination = getattr(named.get("dest"), "value", max(names, key=len, default=""))
            found[destination.lstrip("-").replace("-", "_")] = named.get("default")
    return found


def _of_commands(tree: ast.Module) -> dict[str, ast.expr | None]:
    """Return the defaults of functions that typer or click makes commands, by the names of their arguments."""
    found: dict[str, ast.expr | None] = {}
    for function in nodes_of(ast.FunctionDef, tree):
        decorators, defaults = function.decorator_list, function.args.defaults
        if COMMAND.search(" ".join(map(ast.unparse, decorators))):
            found |= _of_parsers(ast.Module([*map(ast.Expr, decorators)], []))
            named = function.args.args[len(function.args.args) - len(defaults) :]
            found |= {each.arg: _in_field(value) for each, value in zip(named, defaults, strict=True)}
    return found


def _constants(values: dict[str, ast.expr | None]) -> dict[str, Any]:
    found = {name: value.value for name, value in values.items() if isinstance(value, ast.Constant)}
    return {name: str(value) for name, value in found.items() if type(value) in (int, float, str) and value != ""}


def _in_field(value: ast.expr | None) -> ast.expr | None:
    """Return the default within `field(default=...)` or `typer.Option(...)`."""
    if not isinstance(value, ast.Call):
        return value
    named = {each.arg: each.value for each in value.keywords}
    return named.get("default", value.args[0] if value.args else None)
