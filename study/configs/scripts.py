"""What a script that is given shows of a training, by the patterns of scripts.toml: it is not asked then."""

import ast
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import with_config

from study.configs import model_losses
from study.configs.code import that_counts
from study.configs.syntax import function_of, imported, nodes_of, parsed
from study.core import files
from study.core.tables import NO_OTHER_KEYS, Regex, read_table
from study.core.text import comparable, is_number
from study.known import lists
from study.known.stacks import Stack

TABLE = Path(__file__).with_name("scripts.toml")
ITSELF = "Does the script call backward of the loss, and not of the engine that deepspeed.initialize made"
# A script that reads these takes a trainer's arguments from elsewhere.
ELSEWHERE = re.compile(
    r"HfArgumentParser|TrlParser|OmegaConf|hydra|\byaml\b|json\.load\b|json\.loads\(.*(?:read|conf|cfg|arg)"
)
ARGUMENTS = re.compile("arg|conf|cfg")  # that a call unpacks: a reward of GRPO has **kwargs of its own
COMMENT = re.compile(r"(?m)(?:^|\s)#.*$")
ACCELERATOR = re.compile(r"(?:^|\.)Accelerator$")  # what is called to make one
# In a script that lets a library count its micro-batches, or may.
ACCUMULATES = re.compile(r"\.accumulate\(|no_sync|sync_gradients|deepspeed|DeepSpeed")


@dataclass(frozen=True)
@with_config(NO_OTHER_KEYS)
class Answering:
    """How a script answers a question. The keys are explained at the head of scripts.toml."""

    needs: Regex = ""
    no: Regex = ""
    yes: Regex = ""
    number: Regex = ""
    keys: Sequence[str] = ()
    written: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    auto: float | None = None
    otherwise: str = ""
    since: Mapping[str, str] = field(default_factory=dict)

    def answer(self, code: str, given: str, is_whole: bool, stack: Stack) -> bool | str | None:
        """Return the answer of scripts' code and their config beside all that is given. None: it is open."""
        if (is_written := self._is_written(stack)) is not None:
            return is_written
        if (is_another := self._is_another(code, stack)) is not None:
            return is_another
        if self.yes and re.search(self.yes, code):
            return True if not self.since or self.needs or self._is_of_these_releases(stack) else None
        if self.no and re.search(self.no, code):
            return False if not self.since or self._is_of_these_releases(stack) else None
        if self.since and stack.said.get("trainer") != "own":  # the loop is that of a release, and not in the script
            is_whole = self._is_of_these_releases(stack)
        lacks = self.needs and not re.search(self.needs, given)
        return self.otherwise or False if is_whole and lacks else None

    def _is_written(self, stack: Stack) -> bool | None:
        """Return what the config's own keys answer. None: they are not there, or have no value that decides."""
        for path, answers in self.written.items():
            value = stack.key(path) if stack.key else None
            for pattern, answer in answers.items():
                if value is not None and re.fullmatch(pattern, str(value), re.IGNORECASE):
                    return answer
        return None

    def _is_another(self, code: str, stack: Stack) -> bool | None:
        """Whether the script writes another number than the config. None: one of them writes none."""
        numbers = {float(each) for each in re.findall(self.number, code)} if self.number else set()
        written = [comparable(stack.key(path)) for path in self.keys] if stack.key else []
        of_config = next((each for each in written if is_number(each) or each == "auto"), None)
        if not numbers or of_config is None:
            return None
        if of_config == "auto":
            return self.auto is not None and numbers != {self.auto}
        return numbers != {of_config}

    def _is_of_these_releases(self, stack: Stack) -> bool:
        """Whether a Trainer runs the loop, in the releases of `since`."""
        used = {name: stack.releases.get(name) for name in self.since}
        is_in = all(isinstance(each, Version) and each in SpecifierSet(self.since[name]) for name, each in used.items())
        return is_in and stack.said.get("trainer") is not None


@functools.cache
def rows() -> dict[str, Answering]:
    return read_table(TABLE, dict[str, Answering], Answering)


def among(words: Iterable[str]) -> dict[Path, str]:
    """Return the texts of the scripts among words."""
    return {Path(word): lists.content(word) for word in words if is_script(word)}


def shown(scripts: Mapping[Path, str], config: str, given: str, stack: Stack) -> dict[str, bool | str]:
    """Return the answers of scripts, of their config and of releases, by what is asked. `given` has all texts."""
    code = COMMENT.sub("", "\n".join([*map(that_counts, scripts.values()), config if scripts else ""]))
    is_all = bool(scripts) and is_whole(scripts)
    answers = {name: row.answer(code, given, is_all, stack) for name, row in rows().items()}
    of_table = {name: answer for name, answer in answers.items() if answer is not None}
    if any(map(_calls_backward_itself, scripts.values())):
        of_table[ITSELF] = True
    script = "\n".join(scripts.values())
    return (model_losses.answers(script, code, given, stack) if is_all else {}) | of_table


def is_whole(scripts: Mapping[Path, str]) -> bool:
    """Whether scripts import no other file of their folders, and read their arguments from none."""
    for path, text in scripts.items():
        tree = parsed(text)
        if tree is None:
            return False
        for module in imported(tree):
            beside = path.parent / (module.replace(".", "/") or "__init__")
            is_own = not module or beside.is_dir() or beside.with_suffix(".py").is_file()
            if is_own and beside.with_suffix(".py") not in scripts:
                return False
        unpacked = [each.value for each in nodes_of(ast.keyword, tree) if each.arg is None]
        if ELSEWHERE.search(text) or any(map(ARGUMENTS.search, map(ast.unparse, unpacked))):
            return False
    return True


def _calls_backward_itself(text: str) -> bool:
    """Whether a script calls backward of losses alone, beside an engine that deepspeed.initialize makes."""
    calls = {call: function_of(call) for call in nodes_of(ast.Call, parsed(text))}
    backward = [call for call, name in calls.items() if name.endswith(".backward")]
    if "deepspeed.initialize" not in calls.values() or not backward:
        return False
    # An engine's takes the loss; engine.scale(loss).backward() has what it needs.
    return not any(call.args or ".scale(" in calls[call] for call in backward)


def goes_past_accelerate(scripts: Mapping[Path, str], stack: Stack) -> bool:
    """Whether a loop of one's own trains without Accelerate, which a list has as well: transformers asks for it."""
    is_own = bool(scripts) and stack.said.get("trainer") == "own" and is_whole(scripts)
    return is_own and "accelerate" in stack.releases and "accelerat" not in COMMENT.sub("", "\n".join(scripts.values()))


def is_script(word: str) -> bool:
    return word.endswith(".py") and files.is_file(word)
