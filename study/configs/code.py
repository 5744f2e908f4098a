"""What counts of a script's text, by its syntax: a name where it is used, a keyword in the call whose it is."""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

# A script that reads these takes a trainer's arguments from elsewhere.
ELSEWHERE = re.compile(r"HfArgumentParser|TrlParser|OmegaConf|hydra|\byaml\b|json\.load")
ARGUMENTS = re.compile("arg|conf|cfg")  # that a call unpacks: a reward of GRPO has **kwargs of its own
# Calls whose keywords set up a training: of libraries, beside what the script itself defines.
SETS = re.compile(
    r"(?i:(?<!generation)(?<!statedict)(?:config|arguments|args|cfg|plugin|kwargs|strategy|trainer|training|settings)$)"
    r"|^(?:Accelerator|FSDP|FullyShardedDataParallel|fully_shard|CPUOffload|MixedPrecision\w*|DDP|DeepSpeedEngine"
    r"|DistributedDataParallel|DataLoader|GradScaler|autocast|checkpoint|initialize|pipeline|compile|prepare\w*"
    r"|from_(?:pretrained|config)|get_peft_model|gradient_checkpointing_enable|apply_liger_\w+|clip_grad_\w+"
    r"|dict|partial|replace|set_defaults|\w*launcher|init_process_group|\w*(?i:tok|tokenizer|adam\w*|sgd|lion|muon))$"
)
# A comment that tells how a training is launched, with which releases, or a setting.
LAUNCHED = re.compile(r"launch\b|torchrun|--\w|==|\w_\w+\s*[:=]")


def that_counts(text: str) -> str:
    """Return a text in which what a script only imports or remarks, or gives to a call that trains nothing, is no word.

    Every line stays in its place. What is no Python stays as it is.
    """
    tree = parsed(text)
    if tree is None:
        return text
    lines = [bytearray(line) for line in text.encode(errors="surrogatepass").split(b"\n")]
    if any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(tree)):  # and no question
        _leave_out_remarks(lines, text, tree)
    named = _leave_out_imports(lines, tree)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and not (name in own or SETS.search(named.get(name, name))):
            for keyword in filter(lambda each: each.arg, node.keywords):
                begin, width = keyword.col_offset, len(str(keyword.arg).encode())
                lines[keyword.lineno - 1][begin : begin + width] = b"_" * width
                if isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str):
                    _replace(lines, keyword.value, b'""')
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
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    named: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):  # `import peft` alone at least needs it
            named |= {each.asname: each.name for each in node.names if each.asname}
            unused = [each for each in node.names if (each.asname or each.name) not in used | {"*"}]
            for part in [node] if len(unused) == len(node.names) else unused:
                _replace(lines, part, b"pass" if part is node else b"_")
    return named


def _replace(lines: list[bytearray], node: ast.stmt | ast.alias | ast.expr, word: bytes) -> None:
    """Write a word over a part of a text, and spaces over the rest."""
    for number in range(node.lineno - 1, node.end_lineno or node.lineno):
        line = lines[number]
        begin = node.col_offset if number == node.lineno - 1 else 0
        end = node.end_col_offset if number + 1 == node.end_lineno else len(line)
        line[begin:end] = word.ljust((end or 0) - begin)
        word = b""


@functools.lru_cache(maxsize=8)
def parsed(text: str) -> ast.Module | None:
    """Return the syntax of a text. None: it is no Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def is_whole(scripts: Mapping[Path, str]) -> bool:
    """Whether scripts import no other file of their folders, and read their arguments from none."""
    for path, text in scripts.items():
        tree = parsed(text)
        if tree is None:
            return False
        for module in _imported(tree):
            beside = path.parent / (module.replace(".", "/") or "__init__")
            is_own = not module or beside.is_dir() or beside.with_suffix(".py").is_file()
            if is_own and beside.with_suffix(".py") not in scripts:
                return False
        if ELSEWHERE.search(text) or any(map(ARGUMENTS.search, _unpacked(tree))):
            return False
    return True


def _unpacked(tree: ast.Module) -> Iterable[str]:
    """Yield what calls unpack as their arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from (ast.unparse(each.value) for each in node.keywords if each.arg is None)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the first names of modules that a script imports; an empty one for a relative import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "" if node.level else (node.module or "").partition(".")[0]
