"""What may make the steps of a loop of one's own slow, by its syntax."""

import ast
import re
from collections.abc import Iterator

from study.configs.pasted.one_rank import Branches
from study.configs.syntax import assigned_calls, calls_by_line, function_of, nodes_of, side_of

LOADER = re.compile(r"(?:^|data\.)DataLoader$")
LOSS = re.compile(r"(?<![\w.])loss(?:es)?\b")
READS = re.compile(r"(?:^|\.)(?:item|cpu|tolist|numpy|float|print)$")  # waits for the GPU
ON_GPU = re.compile(r"(?i)cuda|nccl|accelerat|deepspeed")


def slow_calls(tree: ast.Module, code: str) -> Iterator[tuple[str, ast.Call, dict]]:
    """Yield what may make the steps of a loop slow on GPUs, what mostly costs most first.

    A loader without workers; a loss that is read in each step, under no condition but one on the rank; and DDP that
    looks for parameters without a gradient.
    """
    said = {call: {each.arg: ast.unparse(each.value) for each in call.keywords} for call in calls_by_line(tree)}
    loops = [
        loop
        for loop in nodes_of((ast.For, ast.While), tree)
        if ON_GPU.search(code) and any(function_of(call).endswith("backward") for call in calls_by_line(loop))
    ]
    read = " ".join(ast.unparse(loop.iter) for loop in loops if isinstance(loop, ast.For))
    for name, call in assigned_calls(tree, LOADER).items():
        has_none = said[call].get("num_workers", "0") == "0" and None not in said[call] and len(call.args) < 6
        if has_none and re.search(rf"(?<![\w.]){re.escape(name)}\b", read):
            yield "loaded_in_process", call, {}
    who = Branches(tree).who
    for loop in loops:
        branches = [
            each
            for each in nodes_of(ast.If, loop)
            if isinstance(each.test, ast.BoolOp) or not (who(each.test, True) or who(each.test, False))
        ]
        is_outer = sum(each in ast.walk(loop) for each in loops) > 1
        for call in () if is_outer else calls_by_line(loop):
            names = map(ast.unparse, nodes_of((ast.Name, ast.Attribute), call))
            is_read = READS.search(function_of(call)) and any(map(LOSS.search, names))
            if is_read and not any(side_of(each, call) for each in branches):
                yield "read_in_each_step", call, {}
                break
    for call, values in said.items():
        looks = "True" in (values.get("find_unused_parameters"), values.get("ddp_find_unused_parameters"))
        if looks and values.get("static_graph") != "True":
            yield "unused_looked_for", call, {}
