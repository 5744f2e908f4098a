"""What is known of a training whose memory was full: by flags, by its config and by its model. Flags win."""

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

import tyro

from study.configs.mistakes import recognised
from study.configs.settings import AUTO, UNKNOWN, effective_settings
from study.core import arms
from study.core.errors import Stop
from study.core.settings import flag
from study.core.text import is_number
from study.predict.front import BUCKETS, Transformer, Wanted, asked_for

SHARD_WEIGHTS = ("zero3", "fsdp", "hsdp")  # the beginnings of the names of such arms
USUAL_BUCKETS = {"reduce_bucket_size": 5e8}  # DeepSpeed's default, in elements (zero/config.py:113): 2.0 GB in fp32
NUMBERS = ("ranks", "micro_batch", "sequence", "vocabulary")
NEEDED = ("arm", "ranks", "micro_batch")  # for a prediction


@dataclass(frozen=True, kw_only=True)
class Described:
    """The training, as far as it is known."""

    arm: str | None = None
    """Name of the nearest arm; `study arms` lists them."""
    config: Path | None = None
    """The training's own Accelerate config, DeepSpeed config or Trainer arguments. Flags win over it."""
    ranks: Annotated[int | None, tyro.conf.arg(aliases=("--gpus",))] = None
    """Processes that train together, one per GPU."""
    micro_batch: int | None = None
    """Sequences of a micro-batch, on each GPU."""
    sequence: int | None = None
    """Tokens per sequence."""
    checkpointing: bool | None = None
    """Activations are recomputed in the backward pass."""
    vocabulary: int | None = None
    """Size of the vocabulary, if the model is not named or has another."""

    def __post_init__(self):
        for name in NUMBERS:
            if (value := getattr(self, name)) is not None and value < 1:
                raise Stop(f"{flag(name)} must be at least 1 (got {value})", "give 1 or more")
        if self.arm and arms.load_arm(self.arm).name != self.arm:  # a misspelt name is refused
            raise Stop(f"--arm {self.arm} is a file", f"give it as --config {self.arm}")

    def filled(self, others: dict[str, Any]) -> Self:
        """Return it with what others say where nothing is said."""
        return replace(self, **{name: others.get(name) for name, value in vars(self).items() if value is None})

    @property
    def missing(self) -> list[str]:
        """What a prediction needs and nobody said."""
        return [name for name in NEEDED if getattr(self, name) is None]


@dataclass(frozen=True)
class KnownTraining:
    """A training, its config and its model. Numbers that nobody says are 0: what they make is of no size."""

    wanted: Wanted
    model: Transformer | None
    config: dict[str, Any]  # settings by our names
    described: Described  # with what the config says
    arm: str  # empty if nobody says it
    ranks: int
    rows: int
    sequence: int

    @classmethod
    def of(cls, wanted: Wanted, described: Described) -> Self:
        """Return what is known of a training. Raise Stop if a flag is wrong."""
        config = of_config(described.config)
        described = described.filled(config)
        model = None
        if wanted != Wanted():  # a part of a model is refused
            model = asked_for(wanted, described.sequence or 1)
        ranks, rows, sequence = (vars(described)[name] or 0 for name in ("ranks", "micro_batch", "sequence"))
        return cls(wanted, model, config, described, described.arm or "", ranks, rows, sequence)

    @property
    def shards_states(self) -> bool:
        return self.arm.startswith(("zero", *SHARD_WEIGHTS))

    @property
    def shards_weights(self) -> bool:
        return self.arm.startswith(SHARD_WEIGHTS)

    @property
    def vocabulary(self) -> int:
        of_model = self.model.look.vocabulary if self.model else None
        return self.described.vocabulary or of_model or 0

    @property
    def has_adapters(self) -> bool:
        return bool(self.wanted.lora_rank or self.config.get("adapters"))

    @functools.cached_property
    def trained(self) -> int:
        """Parameters that train. Of adapters without their rank nothing is said."""
        if self.model is None or (self.has_adapters and not self.wanted.lora_rank):
            return 0
        return sum(tensor.elements for tensor in self.model.tensors if tensor.trains)

    @property
    def buckets(self) -> dict[str, float]:
        """Elements of the buckets that ZeRO has, by their names in a config. Without an arm they are tried, too."""
        if self.arm and not self.arm.startswith("zero"):
            return {}
        written = {name: self.config[name] for name in BUCKETS if is_number(self.config.get(name))}
        return USUAL_BUCKETS | written


def of_config(path: Path | None) -> dict[str, Any]:
    """Return the settings of a config by our names, and the arm that is nearest to them."""
    if path is None:
        return {}
    settings = effective_settings(recognised(path))
    values = {name: each.value for name, each in settings.items() if each.value not in (AUTO, UNKNOWN)}
    values["micro_batch"] = values.get("sequences per micro-batch and rank")
    for name in NUMBERS:
        values[name] = _whole(values.get(name))
    values["checkpointing"] = str(values.get("checkpointing")).lower() == "true" or None
    values["arm"] = _nearest_arm(values)
    return values


def _whole(value: Any) -> int | None:
    """Return a whole number, which JSON and YAML may have in quotes."""
    return int(value) if re.fullmatch("[1-9][0-9]{0,8}", str(value)) else None


def _nearest_arm(values: dict[str, Any]) -> str:
    stage = str(values.get("stage"))
    if values.get("engine") == "FSDP":
        return "fsdp2"
    if stage not in ("1", "2", "3"):
        return "single" if values["ranks"] == 1 else "ddp"
    # A disk holds it as well as the host does: the GPU's part is the same.
    is_offloaded = any(values.get(part) not in (None, "none") for part in arms.OFFLOADS)
    return f"zero{stage}_cpu" if is_offloaded else f"zero{stage}"
