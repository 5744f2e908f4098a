"""What a script calls on some ranks alone, and waits for all: by its syntax, and the calls of known/hangs.toml."""

import ast
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from study.configs.pasted.tracebacks import Seen, Sure
from study.configs.syntax import assignments, function_of, nodes_of, parsed
from study.known.findings import causes_of_hangs, finding

OF_ALL = ("hang_a_branch",)  # whatever is sharded
OF_SHARDS = ("hang_saving", "hang_a_gather")
OF_WEIGHTS = ("hang_evaluation",)  # where a forward pass gathers them
FIRST, OTHERS = "0", "1 or above"  # ranks, as the sentences have them
BUT = "other than "
ANOTHER = re.compile(r"[1-9]\d*$|[\w.()]*(?:world_size|num_processes)(?:\(\))? - 1$")  # as a condition has a rank
# What a condition on the rank reads: rank, args.local_rank, dist.get_rank(), int(os.environ.get("RANK", 0)).
RANK = re.compile(
    r"""(?i)^(?:int\()?(?:[\w.]|(?:environ\[|environ\.get\(|getenv\()['"])*(?<!lora_)(?:rank|process_index)\b"""
    r"""['"]?(?:, ?['"]?-?\d['"]?)?\W{0,4}$"""
)
NUMBER = re.compile(r"^[\w.]*(?:get_rank\(\)|process_index)$")  # and no text or None, which are not false at 0
IS_FIRST = re.compile(r"is_(?:local_|world_)?(?:main_process|process_zero)(?:\(\))?$")
MET_BY: dict[tuple[type[ast.cmpop], str], str] = {
    **dict.fromkeys([(ast.Eq, "0"), (ast.In, "0"), (ast.Lt, "1"), (ast.LtE, "0")], FIRST),
    **dict.fromkeys([(ast.NotEq, "0"), (ast.NotIn, "0"), (ast.Gt, "0"), (ast.GtE, "1")], OTHERS),
}
# Accelerate's decorators, and Lightning's: these ranks alone run the function.
DECORATED = re.compile(
    r"(?:^|\.)(?:on_(?:local_)?main_process|rank_zero_only|(?P<last>on_last_process)"
    r"|on_(?:local_)?process\((?:local_)?process_index=(?P<rank>\w+)\))(?:\(\))?$"
)
LEAVES = re.compile(r"^(?:return|continue|break)\b|^(?:sys\.|os\.)?_?exit\(")
TRAINS = re.compile(r"(?i)trainer\w*(?:\(.*\))?\.train$")  # and not model.train(), which only sets a mode
NOT_SHARDED = re.compile(r"(?i)(?:\btok|tokenizer|process(?:or|ing_class)|config)\w*\.save_pretrained$")
OF_MODEL = re.compile(r"(?i)model\w*\.state_dict$")  # FSDP1 gathers it from all ranks; other engines do not
# What is imported, or of another object, and gets the model: it passes rows through it.
EVALUATES = re.compile(
    r"(?i)(?:.*\.)?(?:run_|do_)?(?:eval|evaluate|evaluation|validate|validation|test|generate|predict|inference)"
    r"(?:_(?:model|step|epoch|loop|loss|samples?|text|perplexity))?$"
)
SHARDED_MODEL = re.compile(
    r"(?:\w+=)?(?:[\w.]*unwrap_model\(model\)|(?:self\.)?(?:(?:un)?wrapped_|fsdp_|ds_)?model|(?:\w+_|self\.)?engine)$"
)
OF_A_GROUP = re.compile(r"(?i)^[^'\"]*(?:group|mesh)(?!=None)")  # which may have these ranks alone
MODEL = re.compile(r"(?:^|[\s(=,]|self\.|trainer\.)(?:\w+_)?(?:model|engine)\b(?!=)")  # and not args.model, model=name
SKIPPED = "batch_skipped_alone"
OF_SCRIPTS = (*OF_SHARDS, *OF_WEIGHTS, *OF_ALL, SKIPPED)  # why some ranks wait for others
SHARDED = (3, "FSDP", "FSDP1", "FSDP2")
OF_RANKS = re.compile(
    r"\.prepare\(|deepspeed\.initialize\(|init_process_group\(|fully_shard\(|DistributedDataParallel|\b(?:FSDP|DDP)\("
)
SCOPES = (ast.For, ast.While, ast.FunctionDef)
COUNTS = re.compile(r"enumerate\(|range\(")
OF_ROWS = re.compile(r"(?i)batch|row|data|example|input|sample")
TOGETHER = re.compile(r"\b(?:all_|gather|reduce|broadcast|\w+_trigger\()")
ENGINE_SAVES = re.compile(r": ([\w.]+)\.save_checkpoint\(")
ENGINE_IS_MADE = r"\b{}\b[^=;\n]*=\s*deepspeed\.initialize\("
BY_NAME = re.compile(r": (?:\w+\.)*(?:acc\w*\.save_state|\w*(?:model|engine)\w*\.save_checkpoint)\(")
BARRIER = re.compile(r"(?:\w*_)?barrier$|wait_for_everyone$")


@dataclass(frozen=True)
class Alone:
    """A call that some ranks make alone."""

    ranks: str
    call: ast.Call
    function: str  # with the module that it is imported from

    @property
    def kind(self) -> str:
        """What the call is, on whatever object: all barriers are one kind."""
        name = self.function.rpartition(".")[2]
        return "barrier" if BARRIER.match(name) else name


def saves_by_deepspeed(line: str, scripts: Mapping[Path, str], stage: object) -> bool:
    """Whether a line saves with DeepSpeed: by the engine that a script makes, or by its name where a stage is known.

    All ranks write a part and wait, with any stage: save_checkpoint has barriers (deepspeed/runtime/engine.py:4900).
    """
    saves = ENGINE_SAVES.search(line)
    if saves and any(re.search(ENGINE_IS_MADE.format(saves[1]), script) for script in scripts.values()):
        return True
    return stage in (0, 1, 2, 3) and bool(BY_NAME.search(line))


def on_one_rank(
    scripts: Mapping[Path, str],
    causes: Iterable[str] = (*OF_SHARDS, *OF_WEIGHTS, *OF_ALL),
    is_training: bool = False,
    differ: Collection[int] = (),
) -> Iterator[Seen]:
    """Yield each kind of such a call, with the lines that make it. `scripts` are texts by their files.

    `is_training`: trainer.train() goes on, and what stands after it was not reached. `differ`: the ranks that alone
    make another call than most, by the log. A line of others is only possible. The first line hangs first.
    """
    calls = []
    for path, script in scripts.items():
        if tree := parsed(script):
            end = _end_of_training(tree) if is_training else math.inf
            calls += [(path, each) for each in Branches(tree).alone() if each.call.lineno <= end]
    for id in causes:
        row = causes_of_hangs()[id]
        pattern = row.get("script", row["calls"])
        for ranks in dict.fromkeys(each.ranks for _, each in calls):
            of_ranks = [(path, each) for path, each in calls if each.ranks == ranks and _is_of(each, pattern)]
            if not of_ranks:
                continue
            line = "; ".join(f"{path}:{each.call.lineno}: {ast.unparse(each.call)}" for path, each in of_ranks)
            sentence, evidence = row["sentence"].format(ranks=ranks), row.get("evidence", "known/hangs.toml")
            alone = _apart(ranks)
            fits = not differ or alone is None or alone in differ
            if not fits:
                sentence += f". In the log another rank differs: {', '.join(map(str, sorted(differ)))}"
            sure: Sure = "likely" if fits else "possible"
            yield Seen(id, sentence, row["remedy"], sure, evidence, place=calls.index(of_ranks[0]), line=line)


def that_may_hang(scripts: Mapping[Path, str], stage: object) -> Iterator[Seen]:
    """Yield the lines that may hang when they are reached: some ranks alone call what waits for all, or leave it."""
    for seen in on_one_rank(scripts):
        if stage in SHARDED or seen.id in OF_ALL or saves_by_deepspeed(seen.line, scripts, stage):
            yield seen
    if stage is not None or any(map(OF_RANKS.search, scripts.values())):
        yield from skipped_alone(scripts)


def skipped_alone(scripts: Mapping[Path, str]) -> Iterator[Seen]:
    """Yield the lines where a rank leaves out a backward pass because of its own rows, or of their loss."""
    told = finding(SKIPPED)
    lines = []
    for path, script in scripts.items():
        for scope in nodes_of(SCOPES, parsed(script)):
            lines += [f"{path}:{each.lineno}: if {ast.unparse(each.test)}" for each in _skips(scope)]
    if lines:
        line = "; ".join(dict.fromkeys(lines))
        yield Seen(SKIPPED, told.sentence, told.remedy or "", "likely", "the line of the script", place=1, line=line)


def _skips(scope: ast.AST) -> Iterator[ast.If]:
    """Yield the conditions on a loop's own rows, or on a function's, that leave out a backward pass of it."""
    statements = sorted(nodes_of(ast.stmt, scope), key=lambda each: each.lineno)
    calls = [(each.lineno, function_of(each)) for each in nodes_of(ast.Call, scope)]
    last = max((line for line, name in calls if name.endswith("backward")), default=0)
    inner = {each for node in nodes_of(SCOPES, scope) if node is not scope for each in ast.walk(node)}
    own: set[str] = set()
    if isinstance(scope, ast.For):
        own = _names(scope.target)
        if COUNTS.match(ast.unparse(scope.iter)):  # the first is a number
            own.discard(ast.unparse(scope.target).strip("()").partition(",")[0])
    elif isinstance(scope, ast.FunctionDef):
        own = {each.arg for each in scope.args.args if OF_ROWS.search(each.arg)}
    for node in statements:
        text = ast.unparse(node)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr) and TOGETHER.search(text):
            own -= _names(node)  # all ranks know it
        elif isinstance(node, ast.Assign | ast.AugAssign) and (own & _names(node.value) or "next(" in text):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            own |= {name for each in targets for name in _names(each)}
        elif isinstance(node, ast.If) and node not in inner and own & _names(node.test) and not TOGETHER.search(text):
            leaves = LEAVES.match(ast.unparse(node.body[-1]))
            if leaves and last > (0 if leaves[0] == "break" else node.lineno):  # break leaves out all that follow
                yield node


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in nodes_of(ast.Name, node)}


def _apart(ranks: str) -> int | None:
    """Return the one rank that `ranks` or all others are. None: its number is not known."""
    number = FIRST if ranks in (FIRST, OTHERS) else ranks.removeprefix(BUT)
    return int(number) if number.isdigit() else None


def _end_of_training(tree: ast.Module) -> float:
    """Return the line of the last trainer.train(). Infinite: there is none."""
    calls = [call for call in nodes_of(ast.Call, tree) if TRAINS.search(function_of(call))]
    return max((call.lineno for call in calls), default=math.inf)


def _is_of(alone: Alone, pattern: str) -> bool:
    """Whether a call is one of a pattern. What writes a state dict that it is given gathers none."""
    function, call = f".{alone.function}", alone.call
    given = [*map(ast.unparse, (*call.args, *call.keywords))]
    has_states = any(each.startswith("state_dict=") for each in given)
    if has_states or "no_dist=True" in given or NOT_SHARDED.search(function) or any(map(OF_A_GROUP.search, given)):
        return False
    return bool(re.search(pattern, function))


def _others(ranks: str) -> str:
    """Return all ranks but these."""
    if ranks in (FIRST, OTHERS):
        return OTHERS if ranks == FIRST else FIRST
    return ranks.removeprefix(BUT) if ranks.startswith(BUT) else BUT + ranks


def _by_decorator(statement: ast.stmt) -> str | None:
    """Return the ranks that alone run a function. None: all do, or it is none."""
    for each in getattr(statement, "decorator_list", []):
        if match := DECORATED.search(ast.unparse(each)):
            return "num_processes - 1" if match["last"] else match["rank"] or FIRST
    return None


class Branches:
    """A script, with the names that it imports and assigns."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.imported: dict[str, str] = {}
        for node in nodes_of(ast.ImportFrom, tree):
            self.imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        for whole in nodes_of(ast.Import, tree):
            self.imported |= {each.asname: each.name for each in whole.names if each.asname}
        self.is_fsdp1 = any(each.endswith(".FullyShardedDataParallel") for each in self.imported.values())
        functions = nodes_of(ast.FunctionDef, tree)
        self.functions = {each.name: each for each in functions}
        # Functions of which each call is surely of them, and the calls: whoever names one may call it elsewhere.
        named = Counter(each.name for each in functions)
        self.own = {name: self.functions[name] for name, times in named.items() if times == 1}
        self.mentions = Counter(getattr(each, "id", getattr(each, "attr", "")) for each in ast.walk(tree))
        items = nodes_of(ast.withitem, tree)
        self.opened = {ast.unparse(each.optional_vars) for each in items if each.optional_vars}
        self.assigned: dict[str, list[ast.expr]] = defaultdict(list)
        for name, value in assignments(tree):
            if not isinstance(value, ast.Constant):
                self.assigned[name].append(value)

    def alone(self) -> list[Alone]:
        """Return the calls that some ranks make, and that the others and the functions they call do not, by lines."""
        calls = [*self._below(self.tree.body, None)]
        labelled = Counter((each.function.removeprefix("self."), each.ranks) for each in calls)
        calls += [
            each
            for call in calls
            if self.mentions[name := call.function.removeprefix("self.")] == labelled[name, call.ranks]
            for each in self._inside(call)
        ]
        of_others: dict[str, set[str]] = {}
        for ranks in {each.ranks for each in calls}:
            of_others[ranks] = self._kinds(each for each in calls if each.ranks != ranks)
        found = dict.fromkeys(each for each in calls if each.kind not in of_others[each.ranks])
        return sorted(found, key=lambda each: each.call.lineno)

    def _inside(self, alone: Alone, seen: tuple[str, ...] = ()) -> Iterator[Alone]:
        """Yield the calls of the script's own function that some ranks call alone, and of those that it calls."""
        name = alone.function.removeprefix("self.")
        if name not in self.own or name in seen:
            return
        body = self.own[name].body
        not_these = {each.call for each in self._below(body, None) if each.ranks != alone.ranks}
        for each in self._calls(body, alone.ranks):
            if each.call not in not_these:
                yield each
                yield from self._inside(each, (*seen, name))

    def _kinds(self, calls: Iterable[Alone]) -> set[str]:
        """Return the kinds of calls, and those of the functions of the script that they call."""
        kinds = {each.kind for each in calls}
        bodies = [self.functions[kind].body for kind in kinds if kind in self.functions]
        return kinds | {each.kind for body in bodies for each in self._calls(body, FIRST)}

    def _calls(self, parts: Sequence[ast.AST], ranks: str) -> Iterator[Alone]:
        assigned = [(name, ast.unparse(value)) for part in parts for name, value in assignments(part)]
        # A model that these ranks make needs no others, nor one whose weights a `with` has gathered.
        of_these = {*self.opened, *(name for name, value in assigned if not MODEL.search(value))}
        for call in (each for part in parts for each in nodes_of(ast.Call, part)):
            first, dot, rest = function_of(call).partition(".")
            if MODEL.match(first) and first in of_these:
                continue
            function = f"{self.imported.get(first, first)}{dot}{rest}"
            if self.is_fsdp1 and OF_MODEL.search(function):
                function = "fsdp.get_state_dict"
            elif EVALUATES.match(function) and function not in self.functions:
                models = [each for each in map(ast.unparse, (*call.args, *call.keywords)) if SHARDED_MODEL.match(each)]
                function = "model.forward" if {*models} - of_these else function
            yield Alone(ranks, call, function)

    def _below(self, block: list[ast.stmt], ranks: str | None) -> Iterator[Alone]:
        """Yield the calls of a block that `ranks` run. None: all do, until a condition on the rank."""
        for number, statement in enumerate(block):
            if ranks:
                yield from self._calls(block[number:], ranks)
                return
            yield from self._in_expressions(statement)
            if not isinstance(statement, ast.If):
                for part in ("body", "orelse", "finalbody"):
                    yield from self._below(getattr(statement, part, []), _by_decorator(statement))
                for other in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
                    yield from self._below(other.body, None)
                continue
            met, not_met = self.who(statement.test, True), self.who(statement.test, False)
            yield from self._below(statement.body, met)
            yield from self._below(statement.orelse, not_met)
            if LEAVES.match(ast.unparse(statement.body[-1])):
                ranks = not_met
            elif statement.orelse and LEAVES.match(ast.unparse(statement.orelse[-1])):
                ranks = met

    def _in_expressions(self, statement: ast.stmt) -> Iterator[Alone]:
        """Yield the calls of `x if rank == 0 else y`, and of `rank == 0 and x`, in a statement without its blocks."""
        blocks = (ast.stmt, ast.excepthandler, ast.match_case)
        for part in ast.iter_child_nodes(statement):
            for node in () if isinstance(part, blocks) else ast.walk(part):
                if isinstance(node, ast.IfExp):
                    sides = [(self.who(node.test, True), node.body), (self.who(node.test, False), node.orelse)]
                elif isinstance(node, ast.BoolOp):
                    is_and = isinstance(node.op, ast.And)
                    sides = [(self.who(each, is_and), node.values[-1]) for each in node.values[:-1]]
                else:
                    continue
                for ranks, value in sides:
                    if ranks:
                        yield from self._calls([value], ranks)

    def who(self, test: ast.expr, is_met: bool, depth: int = 0) -> str | None:
        """Return the ranks for which alone a condition is met, or is not. None: it may be so for all."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.who(test.operand, not is_met, depth)
        if isinstance(test, ast.BoolOp):
            sides = [self.who(each, is_met, depth) for each in test.values]
            if isinstance(test.op, ast.And) == is_met:  # each part is so
                return next(filter(None, sides), None)
            return sides[0] if len({*sides}) == 1 else None
        if isinstance(test, ast.Compare):
            rank = self._rank_of(test)
            return rank if rank is None or is_met else _others(rank)
        if IS_FIRST.search(ast.unparse(test)):
            is_first = True
        elif self._is_rank(test, NUMBER):  # 0 is false
            is_first = False
        elif isinstance(test, ast.Name) and len(values := self.assigned.get(test.id, [])) == 1 and depth < 3:
            return self.who(values[0], is_met, depth + 1)
        elif isinstance(test, ast.Call) and (value := self._returned(test)) and depth < 3:
            return self.who(value, is_met, depth + 1)
        else:
            return None
        return FIRST if is_first == is_met else OTHERS

    def _returned(self, call: ast.Call) -> ast.expr | None:
        """Return what a call gives: the one line of the script's own function. None: it has more, or is another's."""
        function = self.own.get(ast.unparse(call.func))
        only = function.body[0] if function and len(function.body) == 1 else None
        return only.value if isinstance(only, ast.Return) else None

    def _rank_of(self, test: ast.Compare) -> str | None:
        """Return the ranks that meet a comparison alone, of which one is no other's. None: it is another comparison."""
        left, right, operator = test.left, test.comparators[0], type(test.ops[0])
        if operator in (ast.Eq, ast.NotEq) and not self._is_rank(left):
            left, right = right, left
        if len(test.ops) > 1 or not self._is_rank(left):
            return None
        value = ast.unparse(right).strip("'\"")
        if operator in (ast.Eq, ast.NotEq) and ANOTHER.match(value):
            return value if operator is ast.Eq else BUT + value
        if operator in (ast.In, ast.NotIn) and {*re.findall(r"-?\w+", value)} in ({"0"}, {"-1", "0"}):
            value = "0"
        return MET_BY.get((operator, value))

    def _is_rank(self, value: ast.expr, pattern: re.Pattern = RANK) -> bool:
        """Whether a value is the number of a rank, or a name that has it."""
        values = self.assigned.get(value.id, []) if isinstance(value, ast.Name) else []
        return any(pattern.search(ast.unparse(each)) for each in (value, *values))
