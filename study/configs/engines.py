"""Files of one training that name two engines, recompute twice or differ: which counts, and what is refused.

Read in accelerate 1.0.0 to 1.15.0 and transformers 4.38.2 to 5.23.0. Accelerate takes DeepSpeed wherever a plugin of it
is given or its launcher asks for it, and asks for FSDP only then (state.py:974 and 1010). The Trainer makes a plugin of
`deepspeed=` (training_args.py:1715), and refuses `fsdp=` beside any DeepSpeed (trainer.py:473).
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from study.configs import arguments, sources
from study.configs.commands import COMMENT
from study.configs.pasted import condense
from study.configs.pasted.lines import Log
from study.core.errors import Stop
from study.known.findings import Finding, finding

ENGINES = {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP", "MULTI_GPU": "DDP"}
LAUNCH = re.compile(r"\b(accelerate[ -]launch|torchrun|deepspeed(?=(?: +--[\w-]+[ =]\S+)* +[\w./-]+\.py))\b")
COMMAND = re.compile(r"\s*(?:\w+=\S+\s+)*(?:accelerate launch|torchrun|deepspeed|python3?)\s[^\n]*\s--\w")
NOTHING = r"(?!None\b|False\b|null\b|[\"']{2})"
# What a text may have, by who says it: a group is the engine, or the engine stands before the pattern.
YAML = re.compile(r"(?m)^[ \t]*[\"']?distributed_type[\"']?\s*:\s*[\"']?(DEEPSPEED|FSDP|MULTI_GPU)\b")
OF_LAUNCHER = re.compile(r"(?<![\w-])--(use_deepspeed|use_fsdp|multi_gpu)\b")
OF_TRAINER = {
    "DeepSpeed": re.compile(
        rf"[(,]\s*(?P<said>deepspeed\s*=(?!=)\s*{NOTHING}(?:[\"'](?P<file>[^\"'\n]+)[\"']|[\w.]+))"
        r"|(?<![\w-])(?P<flag>--deepspeed[ =](?![-\s])[\"']?(?P<path>[^\s\"']+))"
    ),
    "FSDP": re.compile(
        rf"[(,]\s*(?P<said>fsdp\s*=(?!=)\s*{NOTHING}(?:[\"'][^\"'\n]+[\"']|\[[^\]\n]+\]|True\b))"
        r"|(?<![\w-])(?P<flag>--fsdp[ =](?!-)(?:[\"'][^\"'\n]+[\"']|\w+))"
    ),
}
OF_PLUGIN = {
    "DeepSpeed": re.compile(
        r"(?P<said>\bDeepSpeedPlugin)\((?:[^()]*?hf_ds_config\s*=\s*[\"'](?P<file>[^\"'\n]+)[\"'])?"
    ),
    "FSDP": re.compile(r"(?P<said>\bFullyShardedDataParallelPlugin)\("),
}
OF_FSDP = re.compile(r"(?m)^[ \t]*[\"']?(?:distributed_type|fsdp_\w+)[\"']?\s*:.*$")
RECOMPUTED_BY_FSDP = re.compile(
    r"(?m)^[ \t]*[\"']?(?:fsdp_)?(?P<said>activation_checkpointing[\"']?\s*:\s*[\"']?true)\b", re.IGNORECASE
)
# The Trainer's two names; a config of TRL has True by default (trl/trainer/base_config.py:62 of 1.16.0).
BY_TRAINER = re.compile(
    r"[(,]\s*(?P<said>(?:gradient|activation)_checkpointing\s*=\s*True)\b"
    r"|(?<![\w-])(?P<flag>--(?:gradient|activation)_checkpointing(?:[ =](?i:true)\b|(?=\s+(?:\\|--)|\s*$)))"
)
BY_DEFAULT = re.compile(
    r"(?P<said>\b(?:SFT|DPO|GRPO|KTO|Reward|RLOO)Config)\((?![\s\S]*(?:gradient|activation)_checkpointing)"
)
BY_MODEL = re.compile(r"\.(?P<said>(?:gradient|activation)_checkpointing_enable)\(")


@dataclass(frozen=True)
class Said:
    """Where a file names an engine, or that activations are recomputed."""

    what: str  # the engine
    by: str  # launcher, trainer, plugin
    words: str
    place: str  # file:line
    names: str | None = None  # the config of DeepSpeed that it names

    @property
    def told(self) -> str:
        return f"{self.words} ({self.place})"


def texts_of(words: Iterable[str | Path]) -> dict[str, str]:
    """Return the texts of scripts, commands and configs among words, and of what a launcher's config names.

    A log, or a question, may tell of several.
    """
    words = [*words]
    paths = [Path(word) for word in words if str(word).endswith((".py", ".sh", ".yaml", ".yml", ".json"))]
    commands = "\n".join(str(word) for word in words if COMMAND.match(str(word)))
    for path in [each for each in paths if each.suffix in (".yaml", ".yml")]:
        with contextlib.suppress(Stop):
            source = sources.read(path)
            paths += [source.named.path] if source.kind == sources.ACCELERATE and source.named else []
    texts = {path.name: condense.content(path) for path in paths if path.is_file()}
    return texts | ({"the command": commands} if commands else {})


def that_may_count(configs: list[Path], texts: Mapping[str, str]) -> list[Path]:
    """Return the config that a script or its command names, or else those that no other one names.

    Of the launcher's config nothing counts where the script asks for DeepSpeed.
    """
    named = engines(texts)
    counts = named[0] if named and named[0].what == "DeepSpeed" and named[0].by != "launcher" else None
    if configs and counts and counts.names:
        name = Path(counts.names).name
        given = [path for path in configs if path.name == name]
        if file := given[0] if given else sources.allowed(counts.names, configs[0]):
            return [file]
    files, left = set(), []
    for path in configs:
        source = None
        with contextlib.suppress(Stop):
            source = sources.read(path)
        if source and source.named and source.named.path != path:
            files.add(source.named.path.resolve())
        if not (source and counts and source.kind == sources.ACCELERATE and not source.named):
            left.append(path)
    return [path for path in left if path.resolve() not in files]


def engines(texts: Mapping[str, str]) -> list[Said]:
    """Return where texts, by the names of their files, name the engine of a training, the one that counts first."""
    found = [said for name, text in texts.items() for said in _in_text(name, _bare(name, text))]
    found.sort(key=lambda said: (said.what != "DeepSpeed", said.what != "FSDP", said.by == "launcher"))
    if found and found[0].by == "launcher":  # commands/launch.py:1224 of 1.15.0: a flag, or else the yaml
        found.sort(key=lambda said: not (said.by == "launcher" and said.words.startswith("--")))
    if _is_launched_without_accelerate(texts):  # which reads no yaml
        found = [said for said in found if said.by != "launcher"]
    return found


def not_here(texts: Mapping[str, str], config: Path | None) -> Iterator[str]:
    """Yield that the config of DeepSpeed that a script names is not read, where no other is."""
    named = engines(texts)
    if config is None and named and named[0].names and named[0].by != "launcher":
        yield f"{named[0].names:.100} is not here: with it its stage and its keys count."


def of_what_trains(texts: Mapping[str, str]) -> dict[str, str]:
    """Return texts without what a launcher's config says of an engine that does not train: its ranks remain."""
    named = engines(texts)
    if not named or named[0].by == "launcher" or named[0].what != "DeepSpeed":
        return dict(texts)
    unused = {said.place.rpartition(":")[0] for said in named if said.by == "launcher" and said.what != "DeepSpeed"}
    return {name: OF_FSDP.sub("", text) if name in unused else text for name, text in texts.items()}


def contradictions(texts: Mapping[str, str]) -> Iterator[Finding]:
    """Yield which engine trains where texts name two, and that activations are recomputed twice."""
    found = engines(texts)
    counts, others = found[:1], [said for said in found if said.what != found[0].what]
    refused = [said for said in found if said.what == "FSDP" and said.by == "trainer"]
    if counts and counts[0].what == "DeepSpeed" and refused:
        yield finding("fsdp_beside_deepspeed", fsdp=refused[0].told, deepspeed=counts[0].told)
    elif others:
        id = "engine_of_script" if counts[0].by != "launcher" else "engine_of_launcher"
        if {said.what for said in others} == {"DDP"}:
            id = "engine_beside_ddp"
        unused = " and ".join(said.told for said in others)
        yield finding(id, engine=counts[0].what, counts=counts[0].told, unused=unused)
    elif len({said.by == "launcher" for said in found}) == 2:
        id = "two_configs_of_deepspeed" if counts[0].what == "DeepSpeed" else "plugin_before_yaml"
        yield finding(id, counts=counts[0].told, yaml=found[-1].told)
    if counts and counts[0].what == "FSDP":
        yield from _recomputed_twice(texts)
    yield from arguments.contradicted(texts)


def started(findings: Iterable[Finding], words: Iterable[str | Path]) -> list[str]:
    """Return that these cannot be the files of a log among words, if it shows steps of what refuses to start."""
    logs = [Path(word) for word in words if str(word).endswith((".log", ".txt", ".out", ".err"))]
    has_steps = any(Log.of(condense.content(path)).lines for path in logs if path.is_file())
    if has_steps and any("refuses" in each.sentence and each.is_surely_wrong for each in findings):
        return ["The log shows steps: these are not its script, config or command."]
    return []


def _recomputed_twice(texts: Mapping[str, str]) -> Iterator[Finding]:
    """Yield that FSDP recomputes, and that the Trainer or the model does as well."""
    by_fsdp = _first(RECOMPUTED_BY_FSDP, texts)
    if by_fsdp is None:
        return
    if twice := _first(BY_TRAINER, texts):
        yield finding("recomputing_refused", twice=twice.told, fsdp=by_fsdp.told)
    elif twice := _first(BY_DEFAULT, texts):
        yield finding("recomputing_refused_by_default", twice=twice.told, fsdp=by_fsdp.told)
    elif twice := _first(BY_MODEL, texts):
        yield finding("recomputed_twice", twice=twice.told, fsdp=by_fsdp.told)


def _in_text(name: str, text: str) -> Iterator[Said]:
    """Yield where a text without comments names an engine. A flag of the launcher counts before its yaml."""
    for match in YAML.finditer(text):
        yield Said(ENGINES[match[1]], "launcher", f"distributed_type: {match[1]}", _place(name, text, match.start(1)))
    if LAUNCH.search(text):
        for match in OF_LAUNCHER.finditer(text):
            engine = ENGINES[match[1].removeprefix("use_").upper()]
            yield Said(engine, "launcher", match[0], _place(name, text, match.start()))
    for by, patterns in (("trainer", OF_TRAINER), ("plugin", OF_PLUGIN)):
        for engine, pattern in patterns.items():
            for match in pattern.finditer(text):
                yield _said(engine, by, match, name, text)


def _said(engine: str, by: str, match: re.Match, name: str, text: str) -> Said:
    groups = match.groupdict()
    kind = "said" if groups["said"] else "flag"
    named = groups.get("file") or groups.get("path")
    return Said(engine, by, " ".join(match[kind].split()), _place(name, text, match.start(kind)), named)


def _first(pattern: re.Pattern, texts: Mapping[str, str]) -> Said | None:
    for name, text in texts.items():
        bare = _bare(name, text)
        if match := pattern.search(bare):
            return _said("", "", match, name, bare)
    return None


def _bare(name: str, text: str) -> str:
    """Return a text without comments, of which json has none."""
    return text if name.endswith(".json") else COMMENT.sub("", text)


def _is_launched_without_accelerate(texts: Mapping[str, str]) -> bool:
    launchers = {launch for name, text in texts.items() for launch in LAUNCH.findall(_bare(name, text))}
    return bool(launchers) and not any(launcher.startswith("accelerate") for launcher in launchers)


def _place(name: str, text: str, start: int) -> str:
    return f"{name}:{text.count(chr(10), 0, start) + 1}"
