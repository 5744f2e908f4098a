"""What a loop of one's own does, by its syntax: it clips scaled gradients, or DDP's ranks each read all rows."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from study.configs.code import is_whole, parsed
from study.configs.pasted.read import Pasted
from study.configs.pasted.tracebacks import Seen
from study.configs.pasted.words import meets
from study.known.findings import finding

CLIPS = re.compile(r"(?:^|\butils\.(?:clip_grad\.)?)clip_grad_(?:norm|value)_$")
SCALED = re.compile(r"\.scale\(.*\)\.backward$")
OF_SCALER = re.compile(r"(?i)amp|scaler|fp16|half|precision")  # a condition: with it nothing may be scaled
NO_SCALER = re.compile(r"GradScaler\([^()]*enabled=False|def clip_grad")
DDP = re.compile(
    r"from torch\.nn\.parallel[\w.]* import DistributedDataParallel|nn\.parallel\.DistributedDataParallel\("
)
# Who divides the rows among ranks: a sampler, a library, or the data themselves.
DIVIDES = re.compile(
    r"(?i)sampler|accelerat|lightning|fabric|deepspeed|\bTrainer\b|composer|\bray\b|shard|split_dataset|IterableDataset"
    r"|webdataset|\bwds\b|(?:rank|replica|process_index)\w*(?:\(\))?::|% ?\w*world_size"
)
RANKS = re.compile(r"(?i)rank|world_size|replica|process_index")
SAME_DATA = ("same + data/batch/example/examples", "data/batch + duplicate/duplicated")


def mistakes(pasted: Pasted, scripts: Mapping[Path, str]) -> Iterator[Seen]:
    """Yield what scripts do wrong in a loop of their own, with the line. `scripts` are in the text as well."""
    for path, script in scripts.items():
        if (tree := parsed(script)) is None:
            continue
        code = ast.unparse(tree)  # without comments
        found = [("clipped_scaled", call) for call in _clipped_scaled(tree, code)]
        if is_whole(scripts):
            found += [("not_divided", call) for call in _not_divided(tree, code)]
        said = meets(SAME_DATA, pasted.question)
        for id, call in found:
            told = finding(id)
            place = pasted.place(said) if said and id == "not_divided" else 0
            line = f"{path}:{call.lineno}: {ast.unparse(call)}"
            yield Seen(id, told.sentence, told.remedy or "", "likely", "the line of the script", place=place, line=line)


def _clipped_scaled(tree: ast.Module, code: str) -> Iterator[ast.Call]:
    """Yield where gradients are clipped between the backward pass of a scaled loss and the scaler's step."""
    if "GradScaler" not in code or NO_SCALER.search(code):
        return
    scopes = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]
    for nodes in ([*_inside(scope)] for scope in scopes):
        calls = sorted(
            (node for node in nodes if isinstance(node, ast.Call)), key=lambda each: (each.lineno, each.col_offset)
        )
        names = [ast.unparse(call.func) for call in calls]
        if "unscale_" in code and not any(name.endswith("unscale_") for name in names):
            continue  # another function may do it before
        guards = [
            {*ast.walk(each)} for each in nodes if isinstance(each, ast.If) and OF_SCALER.search(ast.unparse(each.test))
        ]
        scaled: ast.Call | None = None
        clipped: list[ast.Call] = []
        for call, name in zip(calls, names, strict=True):
            if SCALED.search(name):
                scaled, clipped = call, []
            elif name.endswith(".unscale_") and not clipped:
                scaled = None
            elif scaled and CLIPS.search(name) and not any(call in guard and scaled not in guard for guard in guards):
                clipped.append(call)
            elif re.search(r"(?i)scaler\w*\.step$", name):
                yield from clipped[:1]
                scaled, clipped = None, []


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, without those of functions and classes in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield child
            yield from _inside(child)


def _not_divided(tree: ast.Module, code: str) -> Iterator[ast.Call]:
    """Yield loaders that shuffle all rows on each rank of PyTorch's own DDP."""
    if not DDP.search(code) or DIVIDES.search(code):
        return
    by_rank = {
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and RANKS.search(ast.unparse(node.value))
        for target in node.targets
    }
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not re.search(r"(?:^|data\.)DataLoader$", ast.unparse(call.func)):
            continue
        given = [ast.unparse(each) for each in (*call.args, *(each.value for each in call.keywords))]
        shuffles = any(each.arg == "shuffle" and ast.unparse(each.value) == "True" for each in call.keywords)
        if shuffles and not any(RANKS.search(each) or each in by_rank for each in given):
            yield call
