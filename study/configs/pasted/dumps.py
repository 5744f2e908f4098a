"""Read dumps of stacks, of py-spy and of Python's faulthandler: where each process waits, and whether they differ."""

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from study.configs.oom.reading import BETWEEN_TEXTS
from study.configs.pasted.tracebacks import Seen, sign
from study.known.findings import causes_of_hangs

MOST = 4  # places in a sentence
# As py-spy 0.4 writes them, `Thread 7 (idle): "MainThread"` (src/dump.rs), and Python, `Thread 0x7 (most recent call
# first):` (traceback.c).
RANK = re.compile(r"^(?:\[(?:rank|default)(\d+)\]:)?(.*)$")
PROCESS = re.compile(r"Process (\d+): ")
THREAD = re.compile(r"(?:Current thread|Thread) (0?[xX]?[\da-fA-F]+)(?: |$)")
FRAME = re.compile(
    r'\s+(?:File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)'
    r"|(?P<called>\S+) \((?P<path>[^()]+\.py|<[^()]+>):(?P<at>\d+)\))$"
)
FATAL = re.compile(r"Fatal Python error: (?!Aborted)|Windows fatal exception")  # a process that failed does not wait
# Of a path that py-spy has shortened to its package, and of a whole one.
LIBRARY = re.compile(
    r"^(?:torch\w*|deepspeed|accelerate|transformers|trl|peft|lightning\w*|pytorch_lightning|datasets|vllm|megatron"
    rf"|axolotl|llamafactory|swift|unsloth|ray|wandb|numpy|{'|'.join(sorted(sys.stdlib_module_names))})(?:\.py$|/)"
    r"|(?:site|dist)-packages|/lib/python\d|/bin/|^<"
)
# Processes that are no ranks: of a data loader, of a launcher, of a compiler.
NO_RANK = re.compile(r"(?m)^(?:worker\._worker_loop|api\._invoke_run|launch\.launch_command|.*compile_worker.*)$")
IS_MAIN = ("<module>", "_run_module_as_main")  # the outermost function of a main thread
# The collective in which a process waits, by its functions: "comm.all_reduce", the innermost first.
COLLECTIVES = {
    "a gather of stage 3's weights": r"partition_parameters\.(?:\w*gather\w*|__enter__)"
    r"|partitioned_param_coordinator\.(?:fetch_sub_module|\w*all_gather\w*)",
    "a gather of FSDP's weights": r"_fsdp_param_group\.\w*unshard|_fsdp_collectives\.foreach_all_gather\w*"
    r"|_runtime_utils\._unshard|_flat_param\.\w*(?:gather|unshard)\w*|\w+\.summon_full_params",
    "a reduction of gradients": r"stage(?:3|_1_and_2)\.\w*(?:reduce|average)\w*|_fsdp_collectives\.foreach_reduce"
    r"|_runtime_utils\.\w*(?:reduce_grad|post_backward_hook)",
    "a barrier": r"\w+\.(?:\w*barrier|wait_for_everyone)",
    "{}": r"(?:distributed_c10d|comm)"
    r"\.((?:all_)?(?:reduce|gather)\w*|(?:broadcast|scatter|reduce_scatter|all_to_all)\w*)",
    "its backward pass": r"graph\._engine_run_backward",
}
LOADS = re.compile(r"(?m)^dataloader\.(?:_try_get_data|_get_data|_next_data)$")
DOES = {"hang_saving": "saves", "hang_generation": "generates", "hang_evaluation": "evaluates"}


@dataclass(frozen=True)
class ProcessStack:
    """Where a process is. `functions` are the innermost first, as the logs of watched ranks have them."""

    name: str
    line: str  # the user's
    functions: str
    place: int  # in the text

    @property
    def collective(self) -> str:
        """The collective in which it waits. Empty: none is seen."""
        for name, pattern in COLLECTIVES.items():
            if match := re.search(rf"(?m)^(?:{pattern})$", self.functions):
                return name.format(*match.groups())
        return ""

    @property
    def where(self) -> str:
        """The user's line, and what it does there, as a sentence has it."""
        does = [word for id, word in DOES.items() if re.search(causes_of_hangs()[id]["calls"], self.functions)]
        if self.collective:
            waits = f"in {self.collective}"
        elif LOADS.search(self.functions):
            waits = "waits for its data loader"
        else:
            waits = "in no collective that its stack shows"
        return f"{self.line} ({', '.join([*does[:1], waits])})"


def waits(text: str) -> Seen | None:
    """Return where the processes of dumps wait, and whether they differ. None: the text has no dump of a rank."""
    if FATAL.search(text):
        return None
    stacks = {stack.name: stack for stack in _stacks(text)}  # of several dumps of a process the last
    waiting = [each for each in stacks.values() if each.collective]
    if not waiting:
        return None
    late = [each for each in stacks.values() if not each.collective]
    places: dict[str, list[str]] = defaultdict(list)
    for stack in sorted(stacks.values(), key=lambda each: (bool(each.collective), each.name)):
        places[stack.where].append(stack.name)
    told = [f"{_named(names)} at {where}" for where, names in places.items()]
    words = "; ".join([*told[:MOST], *(["..."] if told[MOST:] else [])])
    id = "dumps-late" if late else "dumps-apart" if len(places) > 1 else "dumps-alike"
    return sign(id, text, min(each.place for each in stacks.values()), places=words)


def lines(text: str) -> set[str]:
    """Return the lines of scripts where processes of dumps wait, as `train.py:14:`."""
    return {f"{stack.line.rpartition('/')[2]}:" for stack in _stacks(text) if stack.collective}


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} processes ({', '.join(names[:MOST])})"


@dataclass
class Thread:
    """A thread of a dump, with the functions, files and lines of its frames, the innermost first."""

    id: str
    place: int
    is_named_main: bool  # by py-spy: people cut a dump above its last frame
    frames: list[tuple[str, str, str]]

    @property
    def is_main(self) -> bool:
        return bool(self.frames) and (self.is_named_main or self.frames[-1][0] in IS_MAIN)


def _stacks(text: str) -> Iterator[ProcessStack]:
    """Yield where each process of a text is, by its main thread and those of C++, which run the backward pass."""
    for name, threads in _processes(text):
        main = next((each for each in threads if each.is_main), None)
        native = [each.frames for each in threads if each.frames and each.frames[-1][0] != "_bootstrap"]
        functions = "\n".join(_call(frame) for frames in native for frame in frames)
        if main is None or NO_RANK.search(functions):
            continue
        line = next((f"{file}:{line}" for _, file, line in main.frames if not LIBRARY.search(file)), "")
        if line:
            yield ProcessStack(name or f"thread {main.id}", line, functions, main.place)


def _processes(text: str) -> Iterator[tuple[str, list[Thread]]]:
    """Yield the name and the threads of each process that was dumped."""
    begin = 0
    by_rank: dict[tuple[int, str], list[tuple[int, str]]] = defaultdict(list)
    for number, part in enumerate(text.split(BETWEEN_TEXTS)):
        for line in part.split("\n"):
            rank, rest = RANK.match(line).groups()  # type: ignore[union-attr]  # it fits any line
            by_rank[number, rank or ""].append((begin, rest.rstrip()))
            begin += len(line) + 1
        begin += len(BETWEEN_TEXTS) - 1
    for (_, rank), lines in by_rank.items():
        name = f"rank {rank}" if rank else ""
        threads: list[Thread] = []
        for place, line in lines:
            if match := PROCESS.match(line.lstrip()):
                yield name, threads
                name, threads = f"process {match[1]}", []
            elif match := THREAD.match(line.lstrip()):
                if not name.startswith("process") and threads and threads[-1].is_main:  # faulthandler writes it last
                    yield name, threads
                    threads = []
                threads.append(Thread(match[1], place, line.endswith('"MainThread"'), []))
            elif threads and (match := FRAME.match(line)):
                said = match.groupdict()
                function, file = said["function"] or said["called"], said["file"] or said["path"]
                threads[-1].frames.append((function, file, said["line"] or said["at"]))
        yield name, threads


def _call(frame: tuple[str, str, str]) -> str:
    """Return a function with its module, as the logs of watched ranks have it."""
    function, file, _ = frame
    call = f"{file.rpartition('/')[2].removesuffix('.py')}.{function.rpartition('.')[2]}"  # without its class
    return call if LIBRARY.search(file) else f"script:{call}"
