"""A stack: releases of libraries, and what flags and a config say of the training in which they are used."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from study.core.errors import Stop
from study.core.refused_values import SHARE_ROWS, refused_rows
from study.core.text import comparable, is_number
from study.known.faults import ANY, Release, table

WAYS = ("fsdp1", "fsdp2", "ddp")  # to train without ZeRO, by the names of flags
UNSAID = {"offload": "none", "ranks": 2, "trainer": None}  # what is taken where nobody says another
# The flag's word for what `study diff` reads in a config.
PRECISIONS = {
    "cast to bfloat16": "bf16",
    "cast to float16": "fp16",
    "autocast to bfloat16": "bf16_autocast",
    "autocast to float16": "fp16_autocast",
    "cast in passes to bfloat16": "bf16_autocast",  # with FSDP2: the table has Accelerate's mixed_precision so
    "cast in passes to float16": "fp16_autocast",
}
# From here on the Trainer's `fsdp` is FSDP2 where its fsdp_config has no version (training_args.py:2736 of transformers
# 5.10.1). Before it is FSDP1 (training_args.py:2812 of 5.9.0, 2753 of 5.0.0). Their plugin has a version, so that the
# launcher's does not count. 4.51.0, 4.51.3 and 4.57.6 read no version there, and take the launcher's, 1 by default.
FSDP2_OF_TRAINER = SpecifierSet(">=5.10", prereleases=True)
READS_VERSION = SpecifierSet(">=5", prereleases=True)


@dataclass(frozen=True)
class Flags:
    """What no config says, or what counts in its place."""

    stage: Literal[0, 1, 2, 3] | None = None  # of ZeRO
    fsdp2: bool | None = None  # FSDP2 shards
    fsdp1: bool | None = None  # FSDP1 shards
    ddp: bool | None = None  # nothing is sharded
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
    family: Literal["bert", "gpt2", "llama", "qwen2", "qwen3", "qwen3-next", "gemma", "mistral"] | None = None
    """Of which family the model is: it answers for a script."""

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Stack:
    """Releases of libraries, and the training in which they are used."""

    releases: Mapping[str, Release]  # with those of packages that it must have
    said: Mapping[str, Any]  # by conditions, from flags and a config; None is open
    key: Callable[[str], Any] | None = None  # what the config has at a dotted path; None: another file may have it
    # What a script answers: by a condition, or its question.
    shown: Mapping[str, bool | str] = field(default_factory=dict)
    seen: frozenset[str] = frozenset()  # symptoms, as faults have them
    guessed: frozenset[str] = frozenset()  # conditions of `said` that the name of a file alone says
    worked: Mapping[str, Version] = field(default_factory=dict)  # releases before an upgrade, with which all was well

    @classmethod
    def of(
        cls,
        releases: Mapping[str, Release],
        flags: Flags = Flags(),
        config: Mapping[str, Any] | None = None,
        key: Callable[[str], Any] | None = None,
    ) -> Self:
        """Return the stack that flags and a config describe. Flags win.

        `config` has what the config says by names of `study diff`, None for what it leaves open.
        """
        said = _of_config(config or {}, releases)
        key_of_stage = key if "stage" in said else None
        said |= _of_releases(releases) | _of_flags(flags)
        said = _of_rows(key, said) | said
        said = UNSAID | table().defaults.get(said.get("trainer", ""), {}) | said
        said["optimizer"] = _plain_optimizer(said.get("optimizer"))
        return cls(_with_needed(releases, said), said, key_of_stage, answers_of(flags.family))

    def answered(self, condition: str, value: Any) -> Self:
        """Return the stack of a training of which a condition is said as well."""
        said = {**self.said, condition: value}
        if condition == "stage":
            said["engine"] = "PyTorch" if value in WAYS else "DeepSpeed"
        return replace(self, said=said)


def answers_of(family: str | None) -> dict[str, bool]:
    """Return what a family of models answers, by the questions about a script."""
    families = table().families.items()
    return {asked: answer == "yes" for asked, answers in families for answer in answers if family in answers[answer]}


def fsdp_of_trainer(release: Release | None, own: Any = None, launched: Any = None) -> str:
    """Return which FSDP the Trainer's `fsdp` is, by its release, its own version and the launcher's. FSDP: either."""
    if not isinstance(release, Version):
        return f"FSDP{own}" if own and str(own) == str(launched) else "FSDP"
    reads_own, is_second = (is_in(release, each) for each in (READS_VERSION, FSDP2_OF_TRAINER))
    if reads_own is False:
        return f"FSDP{launched or 1}"
    if own and reads_own:
        return f"FSDP{own}"
    if reads_own is None or is_second is None:
        return "FSDP"
    return "FSDP2" if is_second else "FSDP1"


def _of_config(config: Mapping[str, Any], releases: Mapping[str, Release]) -> dict[str, Any]:
    """Return what a config says by conditions."""
    said = {condition: config[name] for name, condition in table().settings.items() if name in config}
    precision = said.get("precision")
    if precision in PRECISIONS:
        said["precision"] = PRECISIONS[precision]
    engine = said.get("engine")
    if engine not in (None, "DeepSpeed"):
        said["stage"] = engine
    if engine == "FSDP":
        launched = said.get("version")
        said["stage"] = f"FSDP{launched or ''}"
        if config.get("the Trainer's fsdp"):
            own = config.get("the Trainer's fsdp_version")
            said["stage"] = fsdp_of_trainer(releases.get("transformers"), own, launched)
    return said


def _of_releases(releases: Mapping[str, Release]) -> dict[str, str]:
    """Return the trainer: who lists one trains with it. The later ones use the earlier."""
    said = {}
    for trainer in table().trainers:
        if trainer in releases:
            said["trainer"] = trainer
    return said


def _of_flags(flags: Flags) -> dict[str, Any]:
    """Return what flags say by conditions."""
    said = flags.given
    if flags.stage is not None:
        said["engine"] = "DeepSpeed"
    for way in WAYS:
        if getattr(flags, way):
            said |= {"stage": way.upper(), "engine": "PyTorch"}
    return said


def _of_rows(key: Callable[[str], Any] | None, said: dict[str, Any]) -> dict[str, int]:
    """Return the passes that DeepSpeed derives from the rows of a config that leaves them out (runtime/config.py:620).

    Raise Stop if no number of passes, or another than is said, gives its rows: DeepSpeed refuses that.
    """
    if key is None or any(map(key, SHARE_ROWS)):
        return {}
    rows = comparable(key("train_batch_size"))
    micro_batch = comparable(key("train_micro_batch_size_per_gpu"))
    ranks = comparable(said.get("ranks"))
    passes = comparable(said.get("passes"))
    if not all(map(is_number, (rows, micro_batch, ranks))) or micro_batch <= 0:
        return {}
    if problem := refused_rows(rows, micro_batch, passes if is_number(passes) else None, ranks):
        remedy = "correct the config, or give the --ranks and --passes of this training"
        raise Stop(f"the config's {problem}", remedy)
    return {"passes": int(rows / micro_batch / ranks)}


def _plain_optimizer(name: Any) -> Any:
    """Return an optimizer, such as FusedAdamW or adamw_torch, by the last name of the table that is in its own."""
    plain = name
    for each in table().optimizers:
        if each in str(name).lower():
            plain = each
    return plain


def _with_needed(releases: Mapping[str, Release], said: dict[str, Any]) -> dict[str, Release]:
    """Return releases with packages on which the training stands, whether they are listed or not."""
    needed = []
    if said["trainer"] not in (None, "own"):
        needed = ["transformers", "accelerate"]
    if said.get("engine") not in (None, "DeepSpeed"):
        needed.append("torch")
    elif "stage" in said:
        needed.append("deepspeed")
    used = dict(releases)
    for package in needed:
        used.setdefault(package, ANY)
    return used


def is_in(release: Version, wanted: SpecifierSet) -> bool | None:
    """Whether a release is in a range. None: 5.23.0.dev0 may be before a change in 5.23, or after it."""
    if release.is_prerelease and Version(release.base_version) in [Version(each.version) for each in wanted]:
        return None
    return release in wanted
