"""Take a pasted text apart: releases, what it says of the training, a DeepSpeed config in it. Nothing is judged."""

import functools
import re
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from study.configs.code import that_counts
from study.configs.oom.reading import BETWEEN_TEXTS
from study.configs.pasted import contrasts
from study.configs.pasted.config_in_text import Config, deepspeed_config
from study.configs.pasted.lines import Log
from study.configs.pasted.said import numbers, said
from study.configs.pasted.tracebacks import follows
from study.configs.pasted.two_releases import Apart, two_releases
from study.configs.pasted.words import Sentence, sentences
from study.core.text import number_of
from study.known import lists
from study.known.faults import ANY, Release, releases_of
from study.known.stacks import fsdp_of_trainer

# Trainers whose rows are pairs: of TRL, and of what calls it or collates as it does.
OF_PAIRS = re.compile(
    r"(?m)(?<![A-Za-z])(?:DPO|CPO|ORPO|Reward)Trainer\(|\btrl (?:dpo|reward)\b|\btrl[./]scripts[./](?:dpo|reward)\b"
    r"|^[ \t]*(?:stage|rl|rlhf_type): *(?:dpo|orpo|simpo|rm)\b|--(?:stage|rlhf_type)[ =](?:dpo|orpo|simpo|rm)\b"
)
# A line of a person has words, and little else. What libraries always print may have them, too.
NO_PROSE = (
    r"(?:File |at |\[|[-*] [`A-Z][\w` ]+:|\d{4}-|INFO|WARNING|import |from \S+ import|def |class |pip |export |--"
    r"|\$|>>>|return |raise |\s*\d+%|(?i:step|epoch|iter\w*)\W{0,3}\d|(?:\S+: )?\w*Warning: |huggingface/tokenizers: "
    r"|The current process just got forked|Detected kernel version|Token indices sequence length|No label_names prov"
    r"|Overriding (?:torch_)?dtype|Exception ignored in|You are attempting to use Flash|- Avoid using `tokenizers`"
    r"|Removed shared tensor|Gradient accumulation steps mismatch|Sliding Window Attention is enabled"
    r"|The attention mask and the pad token id)"
)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*[.,;:!?)]*$|[\u4e00-\u9fff]")
NAME = re.compile(
    r"[A-Za-z][\w./-]*\d[\w./-]*[,;:?!)]?|[*x(]?\d{1,4}[A-Za-z*]{0,3}[,;:?!)]?|[*+x&-]"
)  # of a model, a GPU, a count
GLUED = re.compile(r"(?ia)\b((?:py)?torch|deepspeed|transformers|accelerate|trl|peft)-?(?=\d+\.\d+\.\d)")  # torch2.15.0
PROSE_SHARE = 0.6  # of what stands between spaces is a word, names not counted
LONGEST_LINE = 2000
MOST_LINES = 60  # of a question without an error
# What is told of a training, in this order, with its value; UNLIKE has other words for some values.
TOLD = {
    "stage": "stage {}",
    "passes": "gradient accumulation {}",
    "ranks": "",
    "micro_batch": "micro-batch {}",
    "sequence": "sequence {}",
    "peft": "LoRA",
    "checkpointing": "gradient checkpointing",
    "precision": "{}",
    "optimizer": "{}",
    "offload": "offload to {}",
    "trainer": "trainer {}",
}
UNLIKE = {
    ("stage", "FSDP"): "FSDP1 or FSDP2",
    ("stage", "FSDP1"): "FSDP1",
    ("stage", "FSDP2"): "FSDP2",
    ("stage", "DDP"): "DDP",
    ("offload", "none"): "",
    ("trainer", "own"): "a loop of one's own",
    ("trainer", "trainer"): "transformers' Trainer",
}
# As configs and logs name it, and lists of packages do not.
DEEPSPEED = re.compile(r"(?i)deepspeed(?![\s=:<>~\"']*\d)|zero_optimization|\bzero[ _-]?(?:stage[ _:=-]*)?[0-3]\b")
OTHER_ENGINE = re.compile(r"(?i)fsdp|fully_?shard|DistributedDataParallel|MULTI_GPU|\bDDP\b")
# Frameworks that shard by themselves: a traceback of one says nothing of a stage.
FRAMEWORK = re.compile(
    r'(?i)File "[^"\n]*?(?<![a-z])(?:megatron|torchtitan|(?:pytorch_)?lightning|colossalai|nemo|torchtune|nanotron)'
    r"[-_]?\w*[/\\]"
)
FRAME = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<function>[^\s\u2502]+)')
LIBRARY = re.compile(r"(?:site|dist)-packages|[/\\](?:lib[/\\]python\d|bin[/\\])|^<")
PACKAGE = re.compile(r"^.*?(?:(?:site|dist)-packages|/src)/|^(?:.*/)?(?=(?:[^/]+/){3}[^/]+$)")
# The last line of an error, from its class on. What a launcher says of a process that failed is none.
ERROR = re.compile(
    r"(?m)^.{0,40}?\b((?!CalledProcess|Error: [-+.\de]+\s*$)\w*(?:Error|Exception): .+|AssertionError(?=:?[ \t]*$))"
)
# Of a class with another name: what stands behind a frame, as far left as the Traceback.
OTHER_ERROR = re.compile(
    r'(?m)^(.*)  File "[^"\n]+", line \d+.*\n(?:\1    .*\n){0,2}'
    r"\1((?!.*(?:CalledProcess|ChildFailed|KeyboardInterrupt))(?:\w+\.)*[A-Z]\w+(?:: .+)?)$"
)
# A frame at the end, with its source and the marks below it.
CUT = re.compile(r'File "[^"\n]+", line \d+, in [^\n]+(?:\n(?:\[\w+\]:)?[ \t]{2,}[^\n]*){0,2}\s*\Z')
# Which may have a version.
FSDP_FILE = re.compile(r"\bfsdp_config[\"']?\s*[:= ]\s*[\"']?[\w./-]{1,200}\.json\b")
ASSERTED = re.compile(r"(?m)^\W*assert (.+?)[,( ]*$")
# With what a person compares a training.
COMPARED = re.compile(
    r"(?i)\b(?:than|from|unlike|versus|vs|against|(?:compared|relative) (?:with|to)|as)\b(?:\.\b|[^.,;!?\n])*"
)
TITLE = re.compile(rf"(?!{NO_PROSE}|.*(?:(?:Error|Exception): |[{{}}\[\]|])).{{0,199}}")  # and no line of a log


@dataclass(frozen=True)
class Pasted:
    """What a text says of a training."""

    text: str
    releases: dict[str, Release]
    apart: dict[str, Apart]  # two releases of a package
    said: dict[str, Any]  # by conditions of faults; what it does not say is not in it
    config: "Config | None"  # if a whole one is in it
    symptom: str  # what a person says was seen, which stands at the end of the text as well

    @property
    def words(self) -> list[str]:
        """What was read, as a person would say it."""
        words = [_release(name, release) for name, release in self.releases.items() if release != ANY]
        words += [f"{name} {each.works} works" for name, each in self.apart.items()]
        words += [_in_words(name, self.said[name]) for name in TOLD if name in self.said]
        words += [f"{self.said['stage_by']} by its name alone"] if "stage_by" in self.said else []
        words += [self.config.name] if self.config else []
        return [*filter(None, words)]

    @functools.cached_property
    def prose(self) -> str:
        """The lines that a person wrote, as far as they can be told from logs. A file of one line may be a title."""
        return "\n".join(map(prose, self.text.split(BETWEEN_TEXTS)))

    @property
    def given(self) -> str:
        """The text without what a person says was seen, if there is more than that."""
        return self.text.removesuffix(self.symptom).strip() or self.symptom

    @property
    def written(self) -> str:
        """What a person says."""
        return f"{self.prose}\n{self.symptom}"

    @functools.cached_property
    def works(self) -> frozenset[str]:
        """The ways to train of which a person says that they work."""
        return contrasts.works(self.written)

    @functools.cached_property
    def sentences(self) -> tuple[Sentence, ...]:
        """What a person says, word by word."""
        return sentences(self.written)

    @functools.cached_property
    def question(self) -> tuple[Sentence, ...]:
        """What a person says of this training: not what a file says that is too long for a question."""
        if self.last_error:
            return self.sentences
        short = [part for part in self.text.split(BETWEEN_TEXTS) if part.count("\n") <= MOST_LINES]
        return sentences("\n".join([*map(prose, short), self.symptom]))

    def place(self, sentence: str) -> int:
        """Return where a sentence of a person, or a line, stands."""
        found = re.search(r"\s+".join(map(re.escape, sentence.split())), self.text)
        return found.start() if found else 0

    @functools.cached_property
    def log(self) -> Log:
        """What the lines of a trainer say."""
        return Log.of(self.text)

    @functools.cached_property
    def last_error(self) -> str:
        """The last line of an error, from its class on. What follows from an error of another process is none."""
        lines = ERROR.findall(self.text) or [error for _, error in OTHER_ERROR.findall(self.text)]
        first = (line for line in reversed(lines) if not follows(line))
        return next(first, lines[-1] if lines else "")

    @property
    def raised_at(self) -> str:
        """The user's own line of which the last error came, and of one without words what a library asserts."""
        place = self.text.rfind(self.last_error)
        frames = [*FRAME.finditer(self.text, 0, place)]
        if not frames:
            return ""
        own = [frame for frame in frames if not LIBRARY.search(frame["file"])]
        last = own[-1] if own else frames[-1]
        where = f"It comes from line {last['line']} of {PACKAGE.sub('', last['file'])}"
        is_told = not self.last_error.startswith("AssertionError") or re.search("[a-z]{2,} [a-z]{2,}", self.last_error)
        asserted = None if is_told else ASSERTED.search(self.text, frames[-1].end(), place)
        return f"{where}, where {frames[-1]['function']} asserts `{asserted[1]}`" if asserted else where

    @property
    def has_pairs(self) -> bool:
        """Whether a row of a micro-batch is a pair of answers."""
        return bool(OF_PAIRS.search(self.text))

    @property
    def sequences(self) -> int | None:
        """The sequences of a micro-batch. None: nobody says it."""
        rows = self.said.get("micro_batch")
        return 2 * rows if rows and self.has_pairs else rows

    @property
    def ranks(self) -> int | None:
        """The ranks of all machines. None: nobody says it, or it may be those of one of several."""
        machines, ranks = self.said.get("machines", 1), self.said.get("ranks")
        of_all = {machines * each for each in numbers("per_machine", self.text)}
        return ranks if machines == 1 or ranks in of_all else None

    @property
    def is_cut(self) -> bool:
        """Whether it ends within a traceback, before the line that names the error."""
        return "Traceback (most recent call last)" in self.text and bool(CUT.search(self.text))

    @property
    def is_of_another_framework(self) -> bool:
        """Whether the traceback is of a framework that shards by itself, and no engine of a stage is named."""
        return bool(FRAMEWORK.search(self.text)) and not re.search(r"(?i)deepspeed|\bzero\b|fsdp", self.text)

    @property
    def is_stage_1_or_2(self) -> bool:
        """Whether it names the file that DeepSpeed has for both, and says no stage."""
        return "stage" not in self.said and bool(re.search(r"\bstage_1_and_2\.py\b", self.text))

    @property
    def may_be_deepspeed(self) -> bool:
        """Whether DeepSpeed may train: the text names it beside a list of packages, or no other engine."""
        if DEEPSPEED.search(self.text) or re.search("(?i)deepspeed", self.written):
            return True
        return not OTHER_ENGINE.search(self.text)

    @property
    def contradictions(self) -> list[str]:
        """A sentence for each package of which several releases are named, and no upgrade is told."""
        sentences = []
        for name, several in lists.named(self.given).items():
            versions = {each for each in several if isinstance(each, Version) and len(each.release) > 1}
            if name not in self.apart and lists.differ(versions):
                sentences.append(lists.contradiction(name, versions, self.releases.get(name, ANY)))
        return sentences

    @property
    def is_released(self) -> bool:
        """Whether it names a release that is used."""
        return any(isinstance(release, Version) for release in self.releases.values())

    @property
    def is_document(self) -> bool:
        """Whether it is too long for a question, and shows no error. What is given beside a question makes it none."""
        return self.text.count("\n") > MOST_LINES and not self.last_error and not self.question

    @property
    def is_strange(self) -> bool:
        """Whether nothing in it is of a training."""
        of_training = re.search(r"(?i)error|deepspeed|accelerate|torch|fsdp|nccl|loss|it/s|s/it", self.text)
        return not (of_training or self.words or self.last_error or self.is_cut)


def _release(package: str, release: Release) -> str:
    """Return a release as it is told: one that is newer than all that were tested is said to be so."""
    newest = max(releases_of(package), default=None)
    if not newest or not isinstance(release, Version) or release <= newest:
        return f"{package} {release}"
    return f"{package} {release} (newer than {newest}, the newest that was tested)"


def _in_words(condition: str, value: Any) -> str:
    """Return what is said of a training; empty, if that says nothing."""
    if condition == "ranks":
        return number_of(value, condition)
    if isinstance(value, bool):
        return TOLD[condition] if value else ""
    return UNLIKE.get((condition, value), TOLD[condition].format(value))


def prose(text: str) -> str:
    """Return the lines that a person wrote, as far as they can be told from logs."""
    line = text.strip()
    if TITLE.fullmatch(line):
        return line  # a question is mostly one line, and has names of settings and numbers
    return "\n".join(line for line in map(str.strip, text.splitlines()) if _is_prose(line))


def _is_prose(line: str) -> bool:
    """Whether a line is words for the most part, or Chinese, and does not begin as lines of logs and code do."""
    if len(line) > LONGEST_LINE:
        return False
    if re.search("[\u4e00-\u9fff]{2}", line) and not re.match(r"[\[\w]*[:=\[]", line):
        return True
    parts = [part for part in line.split() if not NAME.fullmatch(part)]
    if re.match(NO_PROSE, line) or len(parts) < 2:
        return False
    share = PROSE_SHARE if len(parts) >= 4 else 1  # "Training hangs" is a title
    return sum(map(bool, map(WORD.match, parts))) >= share * len(parts)


def read(text: str, symptom: str = "") -> Pasted:
    """Take a text apart, and what a person says beside it."""
    text = BETWEEN_TEXTS.join(map(that_counts, text.split(BETWEEN_TEXTS)))
    whole = BETWEEN_TEXTS.join(filter(None, [text, symptom]))
    apart = two_releases(whole)
    broken = {name: each.broken for name, each in apart.items()}
    seen = COMPARED.sub("", symptom)
    of_text = releases(text)
    pinned = {name: release for name, release in of_text.items() if release != ANY}
    named: dict[str, Release] = {**of_text, **releases(seen), **pinned, **broken}
    asked = _asked(seen) | _asked(text)
    of_trainer = asked.keys() & {"fsdp_own", "fsdp_argument"}
    if of_trainer and "fsdp_ran" not in asked and str(asked.get("stage")).startswith("FSDP"):
        own, launched = asked.get("fsdp_own"), asked.get("fsdp_launched")
        is_open = own is None and FSDP_FILE.search(text)
        asked["stage"] = "FSDP" if is_open else fsdp_of_trainer(named.get("transformers"), own, launched)
    return Pasted(whole, named, apart, asked, deepspeed_config(whole), symptom)


def _asked(text: str) -> dict[str, Any]:
    """Return what a text says of the training that it asks of: the stage is not that of another one, which works."""
    found = said(text)
    working = contrasts.working(prose(text[: contrasts.MOST]))
    for part in working:
        text = text.replace(part, "")
    if working and "stage" in (of_rest := said(text)):
        found["stage"] = of_rest["stage"]
        found.pop("stage_by", None)
    return found


def releases(text: str) -> dict[str, Release]:
    """Return the releases that a text names. Of a package with several, none is known to be used."""
    found = lists.listed(GLUED.sub(r"\1 ", text))
    # "torch 8 GPUs" and "trl 2 epochs" name no release.
    numbers = {name for name, release in found.items() if isinstance(release, Version) and len(release.release) == 1}
    return {name: found[name] for name in found if name not in numbers or name == "ms-swift"}
