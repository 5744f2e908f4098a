"""Which known faults apply to these releases, in this training? Needs no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from study.core.errors import Stop
from study.core.text import comparable, is_number
from study.known.faults import ANY, Fault, Release, table

# Keys of ranks that have the same rows.
SHARE_ROWS = ("tensor_parallel", "sequence_parallel_size", "pipeline", "parallelism_config")


@dataclass(frozen=True)
class Flags:
    """What no config says, or what counts in its place."""

    stage: Literal[0, 1, 2, 3] | None = None  # of ZeRO
    fsdp2: bool | None = None  # FSDP2 shards
    ranks: int | None = None  # of all nodes; 2 if nothing says it
    passes: int | None = None  # of an update, on each rank
    precision: Literal["fp32", "bf16", "fp16", "bf16_autocast", "fp16_autocast"] | None = None  # bf16 and fp16: a cast
    optimizer: str | None = None  # such as adamw, sgd, adafactor, muon
    peft: bool | None = None  # weights are frozen, as with LoRA
    cuda: bool = True  # it trains on GPUs, and not on CPUs alone
    checkpointing: bool | None = None  # activations are recomputed
    reentrant: bool | None = None  # with use_reentrant=True
    offload: Literal["none", "cpu", "nvme"] | None = None  # of the optimizer's states; none if nothing says it
    trainer: Literal["trl", "trainer", "axolotl", "llamafactory", "ms-swift", "own"] | None = None
    """Which program trains: some force settings."""


def described(used: dict[str, Release], flags: Flags, said: dict, key: Callable | None = None) -> dict[str, Any]:
    """Return what is known of a stack, by conditions: its releases, flags, what a config says by names of `study diff`.

    Packages that it must have are added to `used`.
    """
    facts: dict[str, Any] = {"offload": "none", "ranks": 2, "trainer": None}  # where nobody says another
    for setting, name in table().settings.items():
        if setting in said:
            facts[name] = None if said[setting].is_open else said[setting].value
    if facts.get("engine") not in (None, "DeepSpeed"):
        facts["stage"] = str(facts["engine"]).replace("FSDP", f"FSDP{facts.get('version', '?')}")
    facts["keys"] = key if "stage" in facts else None  # by its dotted path; another file may have it
    for trainer in table().trainers:  # who lists one trains with it; the later ones use the earlier
        if trainer in used:
            facts["trainer"] = trainer
    facts |= {name: value for name, value in vars(flags).items() if value is not None}
    facts |= _of_rows(key, comparable(flags.ranks or ("ranks" in said and facts["ranks"])), said, facts.get("passes"))
    facts = table().defaults.get(str(facts["trainer"]), {}) | facts
    if flags.fsdp2:
        facts["stage"] = "FSDP2"
    if facts["trainer"] not in (None, "own"):  # it stands on these, whether they are listed or not
        used.setdefault("transformers", ANY)
        used.setdefault("accelerate", ANY)
    optimizer = str(facts.get("optimizer")).lower()  # such as FusedAdamW, adamw_torch
    for name in [each for each in table().optimizers if each in optimizer]:  # the later counts
        facts["optimizer"] = name
    if "stage" in facts:
        used.setdefault("torch" if isinstance(facts["stage"], str) else "deepspeed", ANY)
    return facts | used


def _of_rows(key: Callable | None, ranks: Any, said: dict, passes: Any) -> dict[str, int]:
    """Return the passes that DeepSpeed derives from the rows of a config that leaves them out (runtime/config.py:620).

    Raise Stop if no number of passes, or another than is said, gives its rows: DeepSpeed refuses that.
    """
    if key is None or not is_number(ranks) or any(map(key, SHARE_ROWS)):
        return {}
    rows = comparable(key("train_batch_size"))
    micro_batch = comparable(key("train_micro_batch_size_per_gpu"))
    passes = comparable(passes)
    if not (is_number(rows) and is_number(micro_batch) and micro_batch > 0):
        return {}
    factors = f"{micro_batch:g} rows x {ranks:g} ranks"
    remedy = "correct the config, or give the --ranks and --passes of this training"
    if rows % (micro_batch * ranks):
        raise Stop(f"the config's train_batch_size of {rows:g} is no multiple of {factors}", remedy)
    derived = int(rows / micro_batch / ranks)
    if is_number(passes) and passes != derived:
        raise Stop(f"the config's train_batch_size of {rows:g} is not {factors} x {passes:g} passes", remedy)
    return {"passes": derived} if "accumulation" not in said else {}


def answered(used: dict[str, Release], facts: dict[str, Any]) -> dict[str, Any]:
    """Return the faults that apply or may, and what nobody asked. `facts` are those of `described`."""
    rows = []
    met = []  # faults of which all is so, but perhaps the release
    for fault in table().fault:
        questions = _questions(fault, facts)
        if questions is None:
            continue
        if not questions:
            met.append(fault)
        release = used[fault.package]
        has = fault.has(release)
        is_gap = has is None and isinstance(release, Version)  # between those that were asked, or beyond
        if has is None:
            questions = [table().questions["release" if is_gap else "range"].format(fault.package, release), *questions]
        if has is not False:
            rows.append(
                fault.model_dump(include={"id", "package", "symptom", "who", "upstream", "when"})
                | {
                    "answer": "applies if" if questions else "applies",
                    "asked": not is_gap,
                    "inside": isinstance(release, SpecifierSet) or fault.contains(release),  # or may be
                    "question": " ".join(questions),
                    "sentence": f"{fault.sentence.rstrip('.')} ({fault.package} {fault.releases})",
                    "do": fault.do_with.get(facts["trainer"], fault.do),
                    "shown": f"reproductions/{fault.script}.py"
                    if fault.script
                    else f"{fault.rests_on}, {fault.upstream}".rstrip(", "),
                }
            )
    # --- in one sentence, with the releases of which nothing is known
    named = {name: f"{name} {release or '(release not said)'}" for name, release in used.items()}
    unknown = [
        words
        for name, words in named.items()
        if used[name] not in [*map(Version, table().asked.get(name, ()))]  # of trainers none was run
    ]
    applying = [row for row in rows if row["answer"] == "applies"]
    known = sum(fault.when is not None for fault in table().fault)
    apply = "1 applies" if len(applying) == 1 else f"{len(applying)} apply"
    first = f"{', '.join(named.values())}: of {known} known faults {apply}, and {len(rows) - len(applying)} may"
    if unknown:
        first += f"; in no test of ours: {', '.join(unknown)}"
    # --- releases without any of these faults, the newest first: a remedy of one may have another
    free = {
        package: [
            release
            for release in reversed(table().asked[package])
            if all(fault.has(Version(release)) is False for fault in met if fault.package == package)
        ]
        for package in dict.fromkeys(row["package"] for row in applying)
    }
    return {"fine": not applying, "first": f"{first}.", "faults": rows, "not_asked": unknown, "free": free}


def _questions(fault: Fault, facts: dict[str, Any]) -> list[str] | None:
    """Return what has to be known for a fault to apply, besides the release. None: it does not apply."""
    if not fault.when or fault.package not in facts:
        return None
    questions = []
    trainer = facts["trainer"]
    if trainer in fault.forced:
        used = facts.get(trainer)
        is_forced = isinstance(used, Version) and used in SpecifierSet(fault.forced[trainer])
        # Other releases may overrule a user's False in some classes, or were not read.
        facts = facts | {"reentrant": is_forced or facts.get("reentrant") or None}
    for name, wanted in fault.when.items():
        seen = facts.get(name)
        is_open = isinstance(seen, SpecifierSet) or seen in (None, "FSDP?")
        if isinstance(seen, Version) and seen.is_prerelease:  # 5.23.0.dev0 may be before a change in 5.23, or after it
            is_open = Version(seen.base_version) == Version(str(wanted).strip("<>="))
        if is_open:
            questions.append(fault.asks[name])
        elif not _fits(seen, wanted):
            return None
    return questions


def _fits(seen: Any, wanted: Any) -> bool:
    if callable(seen):  # a key of the config: all of one group must fit
        return any(all(_fits(seen(path), value) for path, value in group.items()) for group in wanted)
    if wanted == "absent":
        return seen is None
    if isinstance(seen, Version):
        return seen in SpecifierSet(wanted, prereleases=True)
    if isinstance(wanted, list):
        return str(seen).lower() in map(str, wanted)  # a config may have AdamW, or "3"; none: it has no such key
    if wanted is True:
        return seen not in (None, False)  # whatever switches it on, if with an empty section
    return float(seen) >= wanted if type(wanted) is int else seen == wanted
