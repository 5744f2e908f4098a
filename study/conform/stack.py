"""Which known faults apply to these releases, in this training? Needs no torch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from study.conform.faults import Fault, table
from study.core import files, machine
from study.core.errors import Stop

MAX_BYTES = 8 * 2**20  # of a lock
NEVER = Version("0")  # of a package that is not used
# A line of a list of requirements, and two of a lock of uv or poetry. A local part, as in 2.13.0+cpu, is left out.
LISTED = re.compile(r"^([A-Za-z][\w.-]*)(?:\[[^]\n]*\])?[ \t]*(?:===?[ \t]*(\d[\w.]*)(?![\w.*]))?", re.MULTILINE)
LOCKED = re.compile(r'^name = "([^"\n]+)"\nversion = "(\d[\w.]*)', re.MULTILINE)


@dataclass(frozen=True)
class Flags:
    """What no config says, or what counts in its place."""

    stage: Literal[0, 1, 2, 3] | None = None  # of ZeRO
    fsdp2: bool | None = None  # FSDP2 shards
    ranks: int | None = None
    passes: int | None = None  # of an update, on each rank
    precision: Literal["fp32", "bf16", "fp16", "bf16_autocast", "fp16_autocast"] | None = None  # bf16, fp16: a cast
    optimizer: str | None = None  # such as adamw, sgd, adafactor, muon
    peft: bool | None = None  # weights are frozen, as with LoRA
    checkpointing: bool | None = None  # activations are recomputed
    reentrant: bool | None = None  # with use_reentrant=True
    offload: Literal["none", "cpu", "nvme"] | None = None  # where the states of the optimizer are
    trainer: Literal["trl", "trainer", "axolotl", "llamafactory", "ms-swift", "own"] | None = (
        None  # some force settings
    )


@dataclass(frozen=True)
class Stack:
    """Packages that are used, with a release if one is named, and what is known of a training, by conditions."""

    versions: dict[str, Version | None]
    facts: dict[str, Any]
    key: Callable[[str], Any] | None  # returns the value at a dotted path of the config, if there is one


def versions(words: tuple[str, ...]) -> dict[str, Version | None]:
    """Return the releases that files or words name, of the packages of the table; without words, those installed."""
    known = {*table().asked, *table().trainers}
    found = [] if words else [(name, machine.version(name) or "") for name in table().asked]
    for word in words:
        text, pattern = word, LISTED
        if Path(word).is_file():
            text = files.read(Path(word), MAX_BYTES).decode(errors="replace")
            pattern = LOCKED if Path(word).suffix == ".lock" else LISTED
        rows = [(name.lower().replace("_", "-"), release) for name, release in pattern.findall(text)]
        if known.isdisjoint(name for name, _ in rows):
            what = f"{word!r:.80} is no file, and names none of {', '.join(sorted(known))}"
            raise Stop(what, "write releases such as deepspeed==0.19.8, or name a list of them")
        found += rows
    return {name: Version(release.partition("+")[0]) if release else None for name, release in found if name in known}


def described(words: tuple[str, ...], flags: Flags, said: Mapping = {}, key: Callable | None = None) -> Stack:
    """Return a stack of releases, flags, and what a config says by the names of `study diff`."""
    used = versions(words)
    facts = {"offload": "none", "ranks": 2}  # where nobody says another
    facts |= {name: said[setting].value for name, setting in table().settings.items() if setting in said}
    if "engine" in said:
        facts.setdefault("stage", said["engine"].value)  # it is not DeepSpeed
    for trainer in used.keys() & set(table().trainers):  # who lists one trains with it
        facts["trainer"] = trainer
    facts |= {name: value for name, value in asdict(flags).items() if value is not None}
    if flags.fsdp2:
        facts["stage"] = "FSDP"
    if isinstance(facts.get("stage"), int):
        used.setdefault("deepspeed", None)
    return Stack(used, facts, key)


def answered(stack: Stack, symptom: str = "") -> dict[str, Any]:
    """Return the faults that apply or may: first those with a symptom, then those that apply; and what nobody asked."""
    rows = []
    for fault in table().fault:
        questions = _questions(fault, stack)
        if questions is not None:
            row = fault.model_dump(include={"id", "symptom", "who", "upstream"})
            row |= {"answer": "applies if" if questions else "applies", "question": " ".join(questions)}
            row |= {"sentence": f"{fault.sentence.rstrip('.')} ({fault.package} {fault.releases})"}
            row |= {
                "shown": f"reproductions/{fault.script}.py" if fault.script else f"{fault.rests_on}, {fault.upstream}"
            }
            rows.append(row | {"do": fault.do_with.get(stack.facts.get("trainer", ""), fault.do)})
    # --- in one sentence, with the releases of which nothing is known
    used = [f"{name} {release or '(in any release)'}" for name, release in stack.versions.items()]
    asked = [f"{name} {release}" for name, releases in table().asked.items() for release in releases]
    unknown = [each for each in used if each not in asked and each.split()[0] in table().asked]
    count = sum(row["answer"] == "applies" for row in rows)
    known = sum(fault.when is not None for fault in table().fault)
    first = f"{', '.join(used)}: of {known} known faults {count} apply, and {len(rows) - count} may"
    if unknown:
        first += f"; never asked: {', '.join(unknown)}"
    rows.sort(key=lambda row: (symptom not in row["symptom"], row["answer"]))
    return {"fine": not count, "first": f"{first}.", "faults": rows, "not_asked": unknown}


def _questions(fault: Fault, stack: Stack) -> list[str] | None:
    """Return what has to be known for a fault to apply. None: it does not apply."""
    release = stack.versions.get(fault.package)
    if fault.when is None or fault.package not in stack.versions or (release and fault.has(release) is False):
        return None
    questions = []
    if release is None:
        questions.append(f"Which release of {fault.package} is it?")
    elif fault.has(release) is None:
        questions.append(f"{fault.package} {release} was not asked: has it this fault?")
    facts = dict(stack.facts)
    trainer = facts.get("trainer", "")
    if (stack.versions.get(trainer) or NEVER) in SpecifierSet(fault.forced.get(trainer, "<0")):
        facts["reentrant"] = True
    for name, wanted in fault.when.items():
        seen = facts.get(name)
        if isinstance(wanted, dict) and stack.key:  # keys of the config; true: whatever switches it on
            seen = {path: bool(stack.key(path)) if value is True else stack.key(path) for path, value in wanted.items()}
        if seen is None:
            questions.append(table().questions[name].format(str(wanted).strip("{}")))
        elif not _fits(seen, wanted):
            return None
    return questions


def _fits(seen: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return str(seen).lower() in map(str, wanted)  # a config may have AdamW, or "3"
    return seen >= wanted if type(wanted) is int else seen == wanted
