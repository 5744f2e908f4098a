"""What is known of a training whose memory was full, by flags, its config, the error's text, its model; and predicted.

Flags win, then what the config writes, then what the text says, and last what programs do where nothing is written.
"""

import contextlib
import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self

import tyro

from study.configs.oom.optimizers import optimizer_of
from study.configs.oom.said import REDUCES_EACH, Conflict, config_settings, conflicts, is_fsdp, of_deepspeed, understood
from study.core import arms
from study.core.errors import Stop
from study.core.gpus import GPUS, gpu_named
from study.core.ignored_keys import OFFLOADS
from study.core.recipes import Precision
from study.core.settings import flag
from study.core.text import is_number
from study.predict.front import (
    ANY_GPU,
    BUCKETS,
    AttentionKernel,
    Estimate,
    Keys,
    Optimizer,
    PlaceFlags,
    Prediction,
    Quantized,
    Question,
    StepFlags,
    TrainingFlags,
    Transformer,
    Wanted,
    asked_for,
    deepspeed_keys,
    settled_arm,
)

SHARD_WEIGHTS = ("zero3", "fsdp", "hsdp")  # the beginnings of the names of such arms
USUAL_BUCKETS = {"reduce_bucket_size": 5e8}  # DeepSpeed's default, in elements (zero/config.py:113): 2.0 GB in fp32
NUMBERS = ("ranks", "micro_batch", "accumulation", "sequence", "vocabulary", "buckets")
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
    gpu: str | None = None
    """Kind of GPU, such as A100-40GB, if the message does not say its size."""
    micro_batch: int | None = None
    """Sequences of a micro-batch, on each GPU."""
    accumulation: int | None = None
    """Micro-batches of a step."""
    sequence: int | None = None
    """Tokens per sequence."""
    precision: Precision | None = None
    """As `study estimate` takes it. Default: what a config or a text says, or the arm's usual one."""
    optimizer: Optimizer | None = None
    """As `study estimate` takes it. Default: what a config or a text says, or AdamW in one kernel."""
    plain: Annotated[bool | None, tyro.conf.Suppress] = None
    """A loop of PyTorch's own calls fully_shard: layers and the rest are units, and each micro-batch is reduced."""
    sync_each_batch: Annotated[bool | None, tyro.conf.Suppress] = None
    """Accelerate reduces the gradients of each micro-batch, and not only in the last of a step."""
    bucket_view: Annotated[bool | None, tyro.conf.Suppress] = None
    """DDP's gradients lie in its buckets, and not beside them as by default."""
    checkpointing: bool | None = None
    """Activations are recomputed in the backward pass."""
    chunked_loss: bool | None = None
    """The loss is computed in pieces, so that never all logits are held, as by Liger or torchtune."""
    attention_kernel: AttentionKernel | None = None
    """As `study estimate` takes it. Default: what a config or a text says, or sdpa."""
    quantized: Quantized | None = None
    """With --lora-rank: how the frozen linear layers are kept, as in QLoRA."""
    vocabulary: int | None = None
    """Size of the vocabulary, if the model is not named or has another."""
    buckets: int | None = None
    """Elements of DeepSpeed's buckets. Default: as the config says, or the arm's file."""
    reference: Annotated[int | None, tyro.conf.Suppress] = None
    """Bytes of a weight of the reference model that a trainer of preferences holds, which is not trained."""
    homes: Annotated[tuple[str, str] | None, tyro.conf.Suppress] = None
    """Where the optimizer's states and the weights are, if the config writes both."""
    keys: Annotated[Keys, tyro.conf.Suppress] = field(default=(), compare=False)
    """What the config of DeepSpeed says besides, with its defaults. Empty: nobody gave one."""

    def __post_init__(self):
        for name in NUMBERS:
            if (value := getattr(self, name)) is not None and value < 1:
                raise Stop(f"{flag(name)} must be at least 1 (got {value})", "give 1 or more")
        if self.gpu:
            gpu_named(self.gpu)
        if self.arm and arms.load_arm(self.arm).name != self.arm:  # a misspelt name is refused
            raise Stop(f"--arm {self.arm} is a file", f"give it as --config {self.arm}")


@dataclass(frozen=True)
class KnownTraining:
    """A training, its settings and its model. Numbers that nobody says are 0: what they make is of no size."""

    wanted: Wanted  # with what the config and the text say, as `described`
    model: Transformer | None
    settings: dict[str, Any]  # by our names
    described: Described
    from_text: frozenset[str]  # names of settings that only the text says
    by_size: frozenset[str] = frozenset()  # names of settings that the size of the error says
    inferred: str = ""  # what the numbers of the error say of activations
    unfitting: str = ""  # that they fit neither kept nor recomputed ones
    conflicts: tuple[Conflict, ...] = ()  # what a text says otherwise than flags or the config

    @classmethod
    def of(cls, wanted: Wanted, described: Described, stated: dict[str, Any] | None = None) -> Self:
        """Return what is known of a training. Raise Stop if a flag is wrong. `stated` is what a text says."""
        config = config_settings(described.config, described.ranks)
        of_engine = {"deepspeed": content} if (content := of_deepspeed(described.config)) else {}
        settings = of_engine | {name: each.value for name, each in config.items()}
        if stated:
            written = {name: each.value for name, each in config.items() if not (each.is_default or each.is_open)}
            written |= of_engine
            if stated.get("pairs") and str(written.get("micro_batch")).isdigit():
                written["micro_batch"] = 2 * int(written["micro_batch"])
            if "stage" in written:  # whoever writes it, and no offloading, has none
                written |= {name: settings[name] for name in OFFLOADS if name in settings}
            differ = conflicts(vars(wanted) | vars(described), written, stated)
            with contextlib.suppress(Stop):  # a text may say of several trainings, or of what needs PyTorch
                from_text = frozenset(stated.keys() - written.keys())
                known = cls._of(wanted, described, settings | stated | written, from_text)
                return replace(known, conflicts=differ)
        return cls._of(wanted, described, settings, frozenset())

    @classmethod
    def _of(cls, wanted: Wanted, described: Described, settings: dict[str, Any], from_text: frozenset[str]) -> Self:
        settings = understood(settings | ({"ranks": described.ranks} if described.ranks else {}))
        if described.arm:  # which says it
            settings["homes"] = settings["assumed"] = None
            settings |= {"arm": described.arm, OFFLOADS[0]: None}
        is_fsdp2 = is_fsdp(settings["arm"]) and str(settings.get("fsdp_version", 2)) == "2"
        if REDUCES_EACH in settings and is_fsdp2 and not settings.get("plain"):
            settings["sync_each_batch"] = True
        taken = optimizer_of(settings)
        settings["optimizer"], settings["optimizer by"] = taken or (None, "")
        if settings.pop("reference", None) and not (wanted.lora_rank or settings.get("adapters")):
            is_cast = str(settings["arm"]).startswith("zero") and settings["precision"] in (None, "bf16_cast")
            settings["reference"] = 2 if is_cast or settings.get("loaded") else 4  # DeepSpeed casts it as well
        described = filled(described, settings)
        if wanted.model is None and wanted.params is None:
            wanted = replace(wanted, model=settings["model"])
        if wanted.model and settings.get("adapters"):
            wanted = replace(wanted, lora_rank=wanted.lora_rank or settings["lora_rank"])
        model = None
        if wanted != Wanted():  # a part of a model is refused
            model = asked_for(wanted, described.sequence or 1)
            if not wanted.layers:  # of a number of parameters it says once which model it takes
                wanted = replace(wanted, model=model.name, params=None)
        if str(described.arm).startswith("zero"):
            config = settings.get("deepspeed")
            keys = deepspeed_keys.counted(config, model.hidden if model else 0, buckets=described.buckets)
            reduced = dict(keys).get(deepspeed_keys.REDUCED)
            given = int(reduced) if reduced else None  # 0 is a mistake of its own (mistakes.py)
            described = replace(described, keys=keys, buckets=described.buckets or given)
        return cls(wanted, model, settings, described, from_text)

    def memory(self, **changes: Any) -> Estimate:
        """Return what a rank holds, with a reference model, where these flags are changed."""
        return predicted_memory(self.wanted, replace(self.described, **changes))

    @property
    def used(self) -> dict[str, Any]:
        """What it is taken for, by names of flags."""
        flags = vars(self.wanted) | vars(self.described)
        return {name: value for name, value in flags.items() if name not in ("homes", "keys")}

    @property
    def comes_traced(self) -> bool:
        """Whether its passes come with the package, and not only the usual ones of its model."""
        asked = self.described.attention_kernel or "sdpa"
        model = self.model
        return (
            model is not None and model.comes_traced and model.attention_taken(asked) == model.attention_taken("sdpa")
        )

    @property
    def at_work(self) -> dict[str, Any]:
        """What the run that failed had, and does not count, by the names of flags. A change to it is none."""
        return {each.name: each.at_work for each in self.conflicts}

    @property
    def arm(self) -> str:
        return self.described.arm or ""

    @property
    def ranks(self) -> int:
        return self.described.ranks or 0

    @property
    def gpu_bytes(self) -> int:
        return GPUS[gpu_named(self.described.gpu)].memory_bytes if self.described.gpu else 0

    @property
    def rows(self) -> int:
        return self.described.micro_batch or 0

    @property
    def sequence(self) -> int:
        return self.described.sequence or 0

    @property
    def missing(self) -> list[str]:
        """What a prediction needs and nobody said."""
        missing = [name for name in NEEDED if getattr(self.described, name) is None]
        has_rank = self.wanted.lora_rank or self.settings.get("lora_rank")
        return [*missing, "lora_rank"] if self.has_adapters and not has_rank else missing

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

    def side(self, *names: str) -> int:
        """A side of the model's tensors, by its names in configs. 0: none is known."""
        dimensions = self.model.dimensions if self.model else {}
        return next((dimensions[name] for name in names if dimensions.get(name)), 0)

    @property
    def hidden(self) -> int:
        return self.model.hidden if self.model else 0

    @property
    def intermediate(self) -> int:
        return self.side("intermediate_size", "n_inner") or 4 * self.side("n_embd")  # as GPT-2 has it

    @property
    def products(self) -> str:
        """The precision of products: fp32, bf16 or fp16. Empty: nobody says it."""
        said = self.described.precision or self.settings.get("products") or self.settings.get("mixed") or ""
        return said.partition("_")[0]

    @property
    def has_adapters(self) -> bool:
        return bool(self.wanted.lora_rank or self.settings.get("adapters"))

    @property
    def says_all_train(self) -> bool:
        """Whether a text or a config says that no adapters train, or counts more weights than they would have."""
        counted = self.settings.get("trainable", 0)
        is_all = self.model is not None and counted > self.model.parameters / 2
        return is_all or self.settings.get("adapters") is False

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
        written = {name: self.settings[name] for name in BUCKETS if is_number(self.settings.get(name))}
        reduced = {"reduce_bucket_size": self.described.buckets} if self.described.buckets else {}
        return USUAL_BUCKETS | written | reduced


def filled(described: Described, settings: dict[str, Any]) -> Described:
    """Return flags with what settings say where nothing is given."""
    unsaid = [name for name, value in vars(described).items() if value is None]
    said: dict[str, Any] = {name: settings.get(name) for name in unsaid}
    return replace(described, **said)


def predicted_memory(wanted: Wanted, given: Described) -> Estimate:
    """Return what a rank holds, with the reference model."""
    memory, reference = prediction_of(wanted, given).memory, reference_bytes(wanted, given)
    at_peak = memory.at_peak | {"weights": memory.at_peak.get("weights", 0) + reference}
    return replace(memory, peak_bytes=memory.peak_bytes + reference, at_peak=at_peak)


def reference_bytes(wanted: Wanted, given: Described) -> int:
    """Return the most that a rank holds of a reference model: it is whole, except with stage 3.

    TRL 1.16.0 gives DeepSpeed its config without the optimizer, and another stage than 3 as 0 (models/utils.py:246).
    FSDP2 divides it as one unit, which its pass gathers whole (models/utils.py:292); older releases divide nothing.
    """
    if not given.reference:
        return 0
    whole_bytes = given.reference * asked_for(wanted, given.sequence or 1).parameters
    arm = given.arm or ""
    if not arm.startswith("zero3"):
        return whole_bytes
    is_on_host = given.homes[1] != "none" if given.homes else arm in ("zero3_cpu", "zero3_nvme")
    return 0 if is_on_host else whole_bytes // (given.ranks or 1)


def prediction_of(wanted: Wanted, given: Described) -> Prediction:
    training = TrainingFlags(
        gpus=given.ranks, sequence=given.sequence, precision=given.precision, optimizer=given.optimizer
    )
    # Nodes as most are, as nobody has said how large they are; no time is asked for.
    place = PlaceFlags(
        gpu=ANY_GPU,
        machine=None,
        chunked_loss=bool(given.chunked_loss),
        quantized=given.quantized if wanted.lora_rank else None,
        attention_kernel=given.attention_kernel or "sdpa",
    )
    shape = asked_for(wanted, given.sequence or 1)
    is_synced = bool(given.sync_each_batch)
    step = StepFlags(batch=training.ranks, checkpointing=bool(given.checkpointing), sync_each_batch=is_synced)
    question = Question.of(shape, training, place, step)
    arm = settled_arm(
        arms.load_arm(given.arm or ""), question.gpus, question.local, given.buckets, given.homes, given.keys
    )
    trained = question.training(arm, given.micro_batch or 1, given.accumulation or 1)
    if fsdp := trained.placement.fsdp:
        fsdp = fsdp._replace(by_accelerate=not given.plain)
        trained = replace(trained, placement=replace(trained.placement, fsdp=fsdp))
    if given.arm == "ddp":
        trained = replace(trained, loop=replace(trained.loop, bucket_view=bool(given.bucket_view)))
    return Prediction.of(trained)
