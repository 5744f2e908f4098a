"""What a given script calls on one rank alone, and waits for all: by its syntax, and the calls of known/hangs.toml."""

import ast
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from study.configs.pasted.tracebacks import Seen
from study.known.findings import causes_of_hangs

CAUSES = ("hang_saving", "hang_a_gather")
# A condition that one rank meets. One with `or` may be met by all, as `is_deepspeed_zero3_enabled() or rank == 0`.
ALONE = re.compile(
    r"(?i)^(?!not |.* or )"
    r".*(?:is_(?:local_|world_)?(?:main_process|process_zero)\b|rank\W{0,4} (?:==|in) \W?(?:-1, )?0\b)"
)
TRAINS = re.compile(r"(?i)trainer\w*(?:\(.*\))?\.train$")  # and not model.train(), which only sets a mode
NOT_SHARDED = re.compile(r"(?i)(?:tokenizer|processor|config)\w*\.save_pretrained$")


def on_one_rank(scripts: Mapping[Path, str], is_after: bool | None = None) -> Iterator[Seen]:
    """Yield each kind of such a call, with the lines that make it. `scripts` are texts by their files.

    `is_after`: only those that stand after trainer.train(), or only the others; None: all.
    """
    calls = []
    for path, script in scripts.items():
        end = _end_of_training(script)
        calls += [(path, each) for each in _calls_alone(script) if is_after in (None, each.lineno > end)]
    for id in CAUSES:
        row = causes_of_hangs()[id]
        lines = [f"{path}:{call.lineno}: {ast.unparse(call)}" for path, call in calls if _is_of(call, row["calls"])]
        if lines:
            sentence, evidence = row["sentence"].format(ranks=0), row.get("evidence", "known/hangs.toml")
            yield Seen(id, sentence, row["remedy"], "likely", evidence, line="; ".join(lines))


def _end_of_training(script: str) -> float:
    """Return the line of the last trainer.train(). Infinite: there is none, or it is no Python."""
    try:
        nodes = [*ast.walk(ast.parse(script))]
    except (SyntaxError, ValueError, RecursionError):
        return math.inf
    calls = [node for node in nodes if isinstance(node, ast.Call) and TRAINS.search(ast.unparse(node.func))]
    return max((call.lineno for call in calls), default=math.inf)


def _calls_alone(script: str) -> list[ast.Call]:
    """Return the calls below conditions that one rank meets, in their order. None of what is not Python."""
    try:
        tree = ast.parse(script)
    except (SyntaxError, ValueError, RecursionError):
        return []
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ALONE.search(ast.unparse(node.test))]
    nodes = dict.fromkeys(node for guard in guards for part in guard.body for node in ast.walk(part))
    return sorted((node for node in nodes if isinstance(node, ast.Call)), key=lambda call: call.lineno)


def _is_of(call: ast.Call, pattern: str) -> bool:
    """Whether a call is one of a pattern. What writes a state dict that it is given gathers none."""
    function = f".{ast.unparse(call.func)}"
    has_states = any(keyword.arg == "state_dict" for keyword in call.keywords)
    return bool(re.search(pattern, function)) and not has_states and not NOT_SHARDED.search(function)
