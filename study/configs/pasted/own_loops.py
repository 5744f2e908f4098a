"""What a loop of one's own does wrong, by its syntax: its optimizer, gradients and losses, and who reads which rows."""

import ast
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

from study.configs.pasted.read import Pasted
from study.configs.pasted.situations import situations
from study.configs.pasted.slow_loops import LOADER, slow_calls
from study.configs.pasted.tracebacks import Seen, Sure
from study.configs.pasted.words import meets
from study.configs.scripts import ACCELERATOR, ACCUMULATES, is_whole
from study.configs.syntax import (
    assigned_calls,
    assignments,
    at_intervals,
    calls_by_line,
    function_of,
    given,
    nodes_of,
    parsed,
    side_of,
)
from study.known.findings import finding

CLIPS = re.compile(r"(?:^|\butils\.(?:clip_grad\.)?)clip_grad_(?:norm|value)_$")
SCALED = re.compile(r"\.scale\(.*\)\.backward$")
OF_SCALER = re.compile(r"(?i)amp|scaler|fp16|half|precision")  # a condition: with it nothing may be scaled
NO_SCALER = re.compile(r"GradScaler\([^()]*enabled=False|def clip_grad")
OWN_RANKS = re.compile(
    r"from torch\.nn\.parallel[\w.]* import DistributedDataParallel|nn\.parallel\.DistributedDataParallel\("
    r"|from torch\.distributed\.(?:_composable\.)?fsdp[\w.]* import"
)
# Who divides the rows among ranks: a sampler, a library, or the data themselves.
DIVIDES = re.compile(
    r"(?i)sampler|accelerat|lightning|fabric|deepspeed|\bTrainer\b|composer|\bray\b|shard|split_dataset|IterableDataset"
    r"|webdataset|\bwds\b|(?:rank|replica|process_index)\w*(?:\(\))?::|% ?\w*world_size"
)
DIVIDES_NOT = re.compile(  # what shards weights, and an import
    r"(?i)fully_?shard\w*|\w*reshard\w*|sharding_?strategy|(?:full|hybrid)_shard|shard_grad_op|\w*sharded_?\w*state\w*"
    r"|from torch\.utils\.data.*"
)
SHARE_ROWS = re.compile(
    r"(?i)parallelize_module|(?:tensor|context|sequence)_?parallel|ulysses|pipelin|\b(?:tp|cp|pp)\b"
)
SEEDS = re.compile(r"seed(?:_all|_everything)?$")
RANKS = re.compile(r"(?i)rank|world_size|replica|process_index")
PASSES = "gradient_accumulation_steps"
OF_ONE = re.compile(rf"(?m)^\s*[\"']?{PASSES}[\"']?\s*:\s*1\s*,?\s*$")  # in a config, which counts
SAME_DATA = ("same + data/batch/example/examples", "data/batch + duplicate/duplicated")
SHARDERS = "fully_shard|FSDP|FullyShardedDataParallel"
SHARDS = re.compile(rf"(?:^|\.)(?:{SHARDERS})$")
KEEPS_TENSORS = re.compile(r"use_orig_params=True")  # of FSDP1
OPTIMIZES = re.compile(r"(?:^|\.)(?!lr_scheduler)\w*(?:Adam|SGD|Lion|LAMB|Lamb|Muon|RMSprop|Adagrad|Adafactor)\w*$")
PARAMETERS = re.compile(r"([\w.]+)\.(?:named_)?parameters\(")  # of a model
CLEARS = re.compile(
    r"zero_grad|\.grad\b|set_to_none|deepspeed|Trainer\b|\bclosure\b|functional_|torch\.func\b|swap_tensors"
)
# Labels that are moved by one, somewhere: by a slice, by torch.roll, or by the data.
SHIFTS = re.compile(r"(?i)shift|roll\(|:-1\]|1:\]|next_token|targets?\b")
# What clipping by torch does, by what divides the training. With FSDP2 and DDP it is right.
CLIPS_NOT = {**dict.fromkeys("123", "clipped_nothing"), "FSDP1": "clipped_part"}
WRITTEN = re.compile(rf"'{PASSES}': ([\w.]+)")  # in a config that the script makes
INITIALIZES = re.compile(r"(?:^|\.)deepspeed\.initialize$")
PREPARES = re.compile(r"(?:\.prepare|deepspeed\.initialize|(?:^|\.)(?:FSDP|FullyShardedDataParallel))$")
DETACHES = re.compile(r"\.(?:item|detach|data|tolist|numpy)\b|\bfloat\(")
STANDS = {"no-update", "loss-stands-still", "norm-constant", "loss-plateau"}
# What may come of each mistake: symptoms of symptoms.toml, and signs. Beside others it is told as a note.
MAKES: dict[str, set[str]] = {
    "optimizer_of_other_tensors": STANDS,
    "never_cleared": {"no-update", "loss", "norm", "loss-jumps-and-stays", "loss-goes-up"},
    "divided_again": {"no-update", "loss", "norm"},
    "accumulate_unused": {"no-update", "loss", "norm", "loss-goes-up"},
    "labels_not_moved": {"loss", "norm", "loss-vanishes"},
    "norm-is-partial": set(),  # who speaks of the norm is answered by the situation
    "clipped_scaled": {"no-update", "loss", "norm"},
    "clipped_nothing": {"loss", "norm", "loss-jumps-and-stays", "loss-goes-up", "loss-nan"},
    "clipped_part": {"loss", "norm", "loss-jumps-and-stays", "loss-goes-up", "loss-nan"},
    "not_divided": {"loss", "norm"},
    "losses_kept": {"memory"},
    "steps_counted_twice": {"no-update", "loss", "norm"},
    "loaded_in_process": {"slow"},
    "unused_looked_for": {"slow"},
    "read_in_each_step": {"slow"},
}


def mistakes(pasted: Pasted, scripts: Mapping[Path, str], seen: Collection[str] = ()) -> Iterator[Seen]:
    """Yield what scripts do wrong in a loop of their own, with the line. `scripts` are in the text as well.

    `seen`: symptoms. What may make steps slow is only told to who says that they are.
    """
    for path, script in scripts.items():
        if (tree := parsed(script)) is None:
            continue
        code = ast.unparse(tree)  # without comments
        rules = {
            "optimizer_of_other_tensors": _of_other_tensors,
            "labels_not_moved": _labels_not_moved,
            "clipped_scaled": _clipped_scaled,
            "losses_kept": _losses_kept,
        }
        if id := CLIPS_NOT.get(str(pasted.said.get("stage")), ""):
            rules[id] = _clipped_by_torch
        if is_whole(scripts):
            rules |= {"never_cleared": _never_cleared, "not_divided": _not_divided}
        passes = pasted.said.get("passes", 1)
        if passes != 1 and "managed_gradient_accumulation" not in pasted.text:
            rules["steps_counted_twice"] = _steps_at_intervals
        rules["norm-is-partial"] = _norm_of_a_part
        is_divided_by_1 = pasted.said.get("stage") in (1, 2, 3) and OF_ONE.search(pasted.text)  # by DeepSpeed itself
        found: list[tuple[str, ast.Call | ast.AugAssign, dict]] = []
        found += () if is_divided_by_1 else _accumulates_otherwise(tree, code)
        found += [(id, call, {"passes": passes}) for id, rule in rules.items() for call in rule(tree, code)]
        found += slow_calls(tree, code) if "slow" in seen else ()
        said = meets(SAME_DATA, pasted.question)
        for id, call, values in found:
            told = situations()[id] if id == "norm-is-partial" else finding(id, **values)
            place = pasted.place(said) if said and id == "not_divided" else 0
            line = f"{path}:{call.lineno}: {ast.unparse(call)}"
            fault = "fsdp1-clips-by-own-shard" if id == "clipped_part" else ""
            evidence = "the line of the script"
            sure: Sure = "possible" if MAKES[id] == {"slow"} else "likely"  # how much each costs was not measured
            yield Seen(id, told.sentence, told.remedy or "", sure, evidence, fault=fault, place=place, line=line)


def _of_other_tensors(tree: ast.Module, code: str) -> Iterator[ast.Call]:
    """Yield an optimizer of a model's parameters that sharding then replaces, where no other is made afterwards.

    DDP keeps the parameters, as does FSDP1 with use_orig_params. Accelerate gives an optimizer the new ones.
    """
    if KEEPS_TENSORS.search(code) or ".prepare(" in code or not re.search(SHARDERS, code):
        return
    functions = nodes_of(ast.FunctionDef, tree)
    shards = {each.name for each in functions if any(SHARDS.search(function_of(call)) for call in calls_by_line(each))}
    for calls, branches in _scopes(tree):
        optimizer: ast.Call | None = None
        wrong: list[ast.Call] = []
        for call in calls:
            name = function_of(call)
            if OPTIMIZES.search(name) and (match := PARAMETERS.search(" ".join(given(call)))):
                optimizer, model, wrong = call, match[1], []
            elif (
                optimizer
                and (SHARDS.search(name) or name in shards)
                and call.args
                and ast.unparse(call.args[0]) == model
            ):
                if all(side_of(each, optimizer) in ("", side_of(each, call)) for each in branches):
                    wrong.append(optimizer)
                optimizer = None
        yield from wrong


def _never_cleared(tree: ast.Module, code: str) -> Iterator[ast.Call]:
    """Yield a step of an optimizer in a loop with a backward pass, in a script that clears gradients nowhere."""
    if CLEARS.search(code):
        return
    optimizers = assigned_calls(tree, OPTIMIZES)
    for loop in nodes_of((ast.For, ast.While), tree):
        calls = calls_by_line(loop)
        used = {ast.unparse(each) for call in calls for each in call.args if not _is_of_scaler(call)}
        if not any(function_of(call).endswith("backward") for call in calls) or assigned_calls(loop, OPTIMIZES):
            continue
        for call in calls:
            name, _, method = function_of(call).rpartition(".")
            steps = ast.unparse(call.args[0]) if _is_of_scaler(call) and call.args else name
            if method == "step" and steps in optimizers and steps not in used:
                yield call
                return


def _is_of_scaler(call: ast.Call) -> bool:
    return bool(re.search(r"(?i)scaler\w*\.\w+$", function_of(call)))


def _accumulates_otherwise(tree: ast.Module, code: str) -> Iterator[tuple[str, ast.Call, dict]]:
    """Yield a loss that the script divides before its library does, and an update in each micro-batch of Accelerate's.

    `Accelerator.backward` divides by gradient_accumulation_steps, also without accumulate() (accelerator.py:2851), and
    DeepSpeed's engine if scale_wrt_gas is True (runtime/engine.py:3413 of 0.19.8).
    """
    if PASSES not in code:
        return
    for name in assigned_calls(tree, INITIALIZES):
        scaled = [call for call in _backward(tree, name) if "scale_wrt_gas" not in ast.unparse(call)]
        by = rf"{name}\.{PASSES}\(\)" + "".join(f"|{re.escape(each)}" for each in WRITTEN.findall(code))
        yield from _divided(tree, scaled, by, f"{name}.{PASSES}()")
    for name, accelerator in assigned_calls(tree, ACCELERATOR).items():
        own = f"{name}.{PASSES}"  # as the launcher or a plugin says it, if the call does not
        steps = next((ast.unparse(each.value) for each in accelerator.keywords if each.arg == PASSES), own)
        if steps == "1":
            continue
        backward = _backward(tree, name)
        by = re.escape(own) if steps == own else rf"{re.escape(steps)}|\w*\.?{PASSES}|(?i:[\w.]*accum\w*)"
        yield from _divided(tree, backward, by, steps)
        if steps != own and backward and not ACCUMULATES.search(code) and (step := _step_in_each(tree, backward)):
            yield "accumulate_unused", step, {"watched": SimpleNamespace(loss_parts=steps)}


def _divided(tree: ast.Module, backward: list[ast.Call], by: str, steps: str) -> Iterator[tuple[str, ast.Call, dict]]:
    """Yield the first of these backward passes whose loss the script divides by what is meant for micro-batches."""
    for call in backward:
        for divisor in _divisors(tree, call):
            if re.fullmatch(by, divisor):
                yield "divided_again", call, {"by": divisor, "steps": steps, "backward": function_of(call)}
                return


def _backward(tree: ast.Module, name: str) -> list[ast.Call]:
    """Return the calls of backward of an Accelerator or an engine, with a loss."""
    return [call for call in calls_by_line(tree) if function_of(call) == f"{name}.backward" and call.args]


def _divisors(tree: ast.Module, call: ast.Call) -> Iterator[str]:
    """Yield by what the loss of a backward pass is divided, there or in the lines before it."""
    loss = ast.unparse(call.args[0])
    before = [value for name, value in assignments(tree) if name == loss and value.lineno < call.lineno]
    for value in (call.args[0], *before):
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
            yield ast.unparse(value.right)
    for node in nodes_of(ast.AugAssign, tree):
        if isinstance(node.op, ast.Div) and node.lineno < call.lineno and ast.unparse(node.target) == loss:
            yield ast.unparse(node.value)


def _step_in_each(tree: ast.Module, backward: list[ast.Call]) -> ast.Call | None:
    """Return a step that follows each of these backward passes in their block, with no condition on the count."""
    optimizers = assigned_calls(tree, OPTIMIZES)
    for block in (getattr(node, "body", None) for node in ast.walk(tree)):
        if not isinstance(block, list):
            continue
        calls = [each.value for each in block if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)]
        for call in itertools.dropwhile(lambda each: each not in backward, calls):
            name, _, method = function_of(call).rpartition(".")
            if method == "step" and name in optimizers:
                return call
    return None


def _labels_not_moved(tree: ast.Module, code: str) -> Iterator[ast.Call]:
    """Yield a loss of a causal model's logits with the labels of the same places: a model's own loss moves them."""
    if "CausalLM" not in code or SHIFTS.search(code):
        return
    for call in calls_by_line(tree):
        if function_of(call).endswith("cross_entropy"):
            logits, labels, *_ = [*given(call), "", ""]
            if "logits" in logits and re.search("labels|input_ids", labels):
                yield call


def _norm_of_a_part(tree: ast.Module, code: str) -> Iterator[ast.Call]:
    """Yield where FSDP2's norm is used that clipping returns: a DTensor, of which each rank has its part."""
    if "fully_shard" not in code or "full_tensor" in code:
        return
    unused: set[ast.expr] = {node.value for node in nodes_of(ast.Expr, tree)}
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)]
    read = {ast.unparse(node) for node in names if isinstance(node.ctx, ast.Load)}
    unused |= {value for name, value in assignments(tree) if name not in read}
    for call in calls_by_line(tree):
        name = function_of(call)
        if CLIPS.search(name) and name.endswith("norm_") and call not in unused:
            yield call


def _clipped_by_torch(tree: ast.Module, code: str) -> Iterator[ast.Call]:
    """Yield where torch's function clips the gradients of a model that is prepared, in a script that has no other."""
    if re.search(r"NO_SHARD|(?<!utils)(?<!clip_grad)\.clip_grad_(?:norm|value)_\(|def clip_grad", code):
        return
    prepared = assigned_calls(tree, PREPARES)
    for call in calls_by_line(tree):
        match = re.match(r"(.+?)(?:\.module)?\.parameters\(\)", ast.unparse(call.args[0]) if call.args else "")
        if CLIPS.search(function_of(call)) and match and match[1] in prepared:
            yield call


def _clipped_scaled(tree: ast.Module, code: str) -> Iterator[ast.Call]:
    """Yield where gradients are clipped between the backward pass of a scaled loss and the scaler's step."""
    if "GradScaler" not in code or NO_SCALER.search(code):
        return
    for calls, branches in _scopes(tree):
        names = [function_of(call) for call in calls]
        if "unscale_" in code and not any(name.endswith("unscale_") for name in names):
            continue  # another function may do it before
        guards = [{*ast.walk(each)} for each in branches if OF_SCALER.search(ast.unparse(each.test))]
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


def _losses_kept(tree: ast.Module, code: str) -> Iterator[ast.Call | ast.AugAssign]:
    """Yield where a loop of updates adds its loss, as the backward pass had it, to what it never begins anew."""
    found: dict[int, ast.Call | ast.AugAssign] = {}
    for loop in nodes_of((ast.For, ast.While), tree):
        calls = [(call, function_of(call)) for call in calls_by_line(loop)]
        if not any(name.endswith(".step") for _, name in calls):
            continue  # its micro-batches are of one update
        losses = {ast.unparse(_loss(call)) for call, name in calls if name.endswith("backward")}
        assigned = [*assignments(loop)]
        anew = {*losses, *(to for to, _ in assigned), *(name.removesuffix(".clear") for _, name in calls)}
        losses -= {to for to, value in assigned if DETACHES.search(ast.unparse(value))}
        added: list[tuple[ast.Call | ast.AugAssign, str, ast.expr]] = [
            (call, name.removesuffix(".append"), call.args[0])
            for call, name in calls
            if name.endswith(".append") and call.args
        ]
        for node in nodes_of(ast.AugAssign, loop):
            if isinstance(node.op, ast.Add):
                added.append((node, ast.unparse(node.target), node.value))
        found |= {id(node): node for node, to, kept in added if ast.unparse(kept) in losses and to not in anew}
    yield from found.values()


def _loss(backward: ast.Call) -> ast.expr:
    """Return the loss of a backward pass, without what scales it."""
    loss = backward.args[0] if backward.args else backward.func
    while not isinstance(loss, ast.Name):
        if isinstance(loss, ast.Call) and loss.args:
            loss = loss.args[0]
        elif isinstance(loss, ast.BinOp):
            loss = loss.left
        elif isinstance(loss, ast.Attribute) and loss.attr == "backward":
            loss = loss.value
        else:
            break
    return loss


def _scopes(tree: ast.Module) -> Iterator[tuple[list[ast.Call], list[ast.If]]]:
    """Yield the calls, by lines, and the branches of a script and of each of its functions, without those within."""
    for scope in (tree, *nodes_of(ast.FunctionDef, tree)):
        inside = {*_inside(scope)}
        calls = [each for each in calls_by_line(scope) if each in inside]
        yield calls, [each for each in inside if isinstance(each, ast.If)]


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, without those of functions and classes in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield child
            yield from _inside(child)


def _not_divided(tree: ast.Module, code: str) -> Iterator[ast.Call]:
    """Yield loaders that shuffle all rows on each rank of PyTorch's own DDP or FSDP."""
    if not OWN_RANKS.search(code) or DIVIDES.search(DIVIDES_NOT.sub("", code)) or SHARE_ROWS.search(code):
        return
    if any(SEEDS.search(function_of(call)) and any(map(RANKS.search, given(call))) for call in calls_by_line(tree)):
        return
    defined = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    by_rank = {each.name for each in defined if RANKS.search(ast.unparse(each))}
    for name, value in sorted(assignments(tree), key=lambda each: each[1].lineno):  # which takes what stands above
        if RANKS.search(ast.unparse(value)) or by_rank & {each.id for each in nodes_of(ast.Name, value)}:
            by_rank.add(name)
    for call in nodes_of(ast.Call, tree):
        if not LOADER.search(function_of(call)):
            continue
        shuffles = any(ast.unparse(each) == "shuffle=True" for each in call.keywords)
        names = {each.id for each in nodes_of(ast.Name, call)}
        if shuffles and not by_rank & names and not any(map(RANKS.search, given(call))):
            yield call


def _steps_at_intervals(tree: ast.Module, code: str) -> Iterator[ast.Call]:
    """Yield a step of DeepSpeed's engine that a loop makes after some of its backward passes alone.

    `step` counts the micro-batches, and updates at the last of gradient_accumulation_steps (runtime/engine.py:3680).
    """
    if "set_gradient_accumulation_boundary" in code:
        return
    for engine in map(re.escape, assigned_calls(tree, INITIALIZES)):
        of_engine = (re.compile(rf"^{engine}\.{method}$") for method in ("step", "backward"))
        yield from (step for step, _ in at_intervals(tree, *of_engine))
