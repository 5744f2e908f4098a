"""Keys of Accelerate's `fsdp_config`: the values of each, and the version of FSDP that reads it.

They are those of Accelerate 1.15.0: utils/launch.py:304 writes them into the environment of the ranks, where
FullyShardedDataParallelPlugin reads them (utils/dataclasses.py:1831).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TRUE = ("true", "yes", "y", "t", "on", "1")
FALSE = ("false", "no", "n", "f", "off", "0")
VERSIONS = ("1", "2")
POLICY, LAYERS = "fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"  # which makes each layer a unit
LOADING, BROADCAST = "fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states"
CHECKPOINTING = "fsdp_activation_checkpointing"


# By what FSDP1 calls it, and the Trainer in small letters: the arm of FSDP2 that divides the same. None: no arm does.
# The longer names come first.
NEAREST = {"HYBRID_SHARD_ZERO2": None, "HYBRID_SHARD": "hsdp", "NO_SHARD": None, "SHARD_GRAD_OP": "fsdp2_grad_op"}


@dataclass(frozen=True)
class FsdpKey:
    """A key of `fsdp_config`. Values are read in capitals or without."""

    names: tuple[str, ...] = ()  # its values; empty: any, or true and false
    is_flag: bool = False
    is_whole: bool = False
    numbered: int = 0  # the first so many names have a number, from 1 on, that stands for them
    versions: tuple[str, ...] = VERSIONS  # that read it
    is_always_checked: bool = False  # also by a version that then does not use it
    takes_null: bool = False  # the launcher leaves it out
    policy: str = ""  # the auto_wrap_policy without which it is not read
    instead: str = "remove it"  # with the other version

    def takes(self, value: Any, version: str) -> bool:
        """Whether Accelerate starts with a value. The launcher makes a text of it."""
        if value is None and self.takes_null:
            return True
        text = str(value)
        if self.is_whole:
            return text.strip().lstrip("+-").isdecimal()
        if self.is_flag:
            return text.lower() in TRUE + FALSE
        return not self.names or self.named(text) in self.names_of(version)

    def names_of(self, version: str) -> tuple[str, ...]:
        return tuple(name for name in self.names if version == "1" or name != "LOCAL_STATE_DICT")

    def named(self, value: str) -> str:
        """Return the name that a value is, or for which it stands."""
        for number, name in enumerate(self.names[: self.numbered], 1):
            if value == str(number):
                return name
        return value.upper()

    def expected(self, version: str) -> str:
        if self.is_whole:
            return "a whole number"
        return "true or false" if self.is_flag else f"one of {', '.join(self.names_of(version))}"


KEYS = {
    "fsdp_version": FsdpKey(),  # its type in library_defaults.json refuses others than 1 and 2
    "fsdp_sharding_strategy": FsdpKey(
        ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
        numbered=5,
        versions=("1",),
        instead="write fsdp_reshard_after_forward: true for FULL_SHARD, and false for SHARD_GRAD_OP",
    ),
    # FSDP1 never looks at it: the launcher sets fsdp_sharding_strategy in any case.
    "fsdp_reshard_after_forward": FsdpKey(is_flag=True, versions=("2",), instead="write fsdp_sharding_strategy"),
    "fsdp_offload_params": FsdpKey(is_flag=True),
    POLICY: FsdpKey((LAYERS, "SIZE_BASED_WRAP", "NO_WRAP"), takes_null=True),
    "fsdp_transformer_layer_cls_to_wrap": FsdpKey(policy=LAYERS),
    "fsdp_min_num_params": FsdpKey(is_whole=True, policy="SIZE_BASED_WRAP"),
    "fsdp_backward_prefetch": FsdpKey(
        ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
        numbered=2,
        versions=("1",),
        is_always_checked=True,
        takes_null=True,
    ),
    "fsdp_state_dict_type": FsdpKey(
        ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"), numbered=3, takes_null=True
    ),
    "fsdp_forward_prefetch": FsdpKey(is_flag=True, versions=("1",)),
    "fsdp_use_orig_params": FsdpKey(
        is_flag=True, versions=("1",), instead="remove it: FSDP2 always uses the original parameters"
    ),
    LOADING: FsdpKey(is_flag=True),
    BROADCAST: FsdpKey(is_flag=True, versions=("1",), instead="remove it: FSDP2 needs no such broadcast"),
    CHECKPOINTING: FsdpKey(is_flag=True),
    "fsdp_activation_checkpointing_offload": FsdpKey(is_flag=True),
    "fsdp_ignored_modules": FsdpKey(),
}


def with_prefix(fsdp: dict) -> dict[str, Any]:
    """Return a section with the names that Accelerate gives to its keys: it adds the prefix where it lacks."""
    return {key if str(key).startswith("fsdp") else f"fsdp_{key}": value for key, value in fsdp.items()}


def version_of(fsdp: dict) -> str:
    return str(fsdp.get("fsdp_version", 1))


def refused_in_fsdp(fsdp: dict) -> Iterator[tuple[str, str]]:
    """Yield each key with which no rank starts, and what is wrong. The keys have their prefix."""
    version = version_of(fsdp)
    for name, value in fsdp.items():
        key = KEYS.get(name)
        if key is None or not _is_read(key, fsdp, version) or key.takes(value, version):
            continue
        got = f"(got {value!r:.80})"
        if name == "fsdp_reshard_after_forward":
            kinds = "true, which is FULL_SHARD, or false, which is SHARD_GRAD_OP"
            yield name, f"with fsdp_version 2, {name} must be {kinds} {got}"
        else:
            yield name, f"{name} must be {key.expected(version)} with fsdp_version {version} {got}"
    yield from _refused_together(fsdp, version)


def _refused_together(fsdp: dict, version: str) -> Iterator[tuple[str, str]]:
    # The launcher asks before it makes texts of them: "false" in quotes is true here (utils/launch.py:306).
    if fsdp.get(LOADING, True) and not fsdp.get(BROADCAST, True):
        yield BROADCAST, f"{BROADCAST}: false excludes {LOADING}, which is true unless the yaml says false"
    if str(fsdp.get(f"{CHECKPOINTING}_offload")).lower() in TRUE:
        if version != "2":
            yield f"{CHECKPOINTING}_offload", f"{CHECKPOINTING}_offload needs fsdp_version 2"
        if str(fsdp.get(CHECKPOINTING)).lower() not in TRUE:
            yield f"{CHECKPOINTING}_offload", f"{CHECKPOINTING}_offload needs {CHECKPOINTING}: true"


def _is_read(key: FsdpKey, fsdp: dict, version: str) -> bool:
    if key.policy and policy_of(fsdp) != key.policy:
        return False
    return key.is_always_checked or version in key.versions


def policy_of(fsdp: dict) -> str:
    """Return the auto_wrap_policy. Without one the whole model is a unit."""
    return str(fsdp.get(POLICY) or "NO_WRAP").upper()


def nearest_arm(
    sharding: str, *, groups: int | None = None, machines: int | None = None, offloads: bool = False
) -> str | None:
    """Return the arm that holds as much as such a sharding. None: there is none, or it is not known.

    `groups`: how many groups of ranks each hold all states. An arm has two of them.
    """
    name = next((NEAREST[word] for word in NEAREST if word in sharding.upper()), "fsdp2")
    if name == "hsdp" and groups is None:  # FSDP1's groups are nodes
        groups = machines
        name = "fsdp2" if groups == 1 else name
    if name == "hsdp" or (groups or 1) > 1:
        name = "hsdp" if groups == 2 and name in ("fsdp2", "hsdp") else None
    if not offloads:
        return name
    return "fsdp2_cpu" if name == "fsdp2" else None


def as_fsdp2(fsdp: dict) -> dict[str, Any]:
    """Return how a section of either version divides and offloads, by FSDP2's keys and Accelerate's defaults."""
    fsdp = with_prefix(fsdp)
    reshards = _is_on(fsdp.get("fsdp_reshard_after_forward", True))
    if version_of(fsdp) == "1":
        reshards = strategy_of(fsdp) not in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    return {"fsdp_reshard_after_forward": reshards, "fsdp_offload_params": _is_on(fsdp.get("fsdp_offload_params"))}


def _is_on(value: Any) -> bool:
    return str(value).lower() in TRUE


def strategy_of(fsdp: dict) -> str:
    """Return what FSDP1 divides, by its name. The keys have their prefix."""
    return KEYS["fsdp_sharding_strategy"].named(str(fsdp.get("fsdp_sharding_strategy", "FULL_SHARD")))


def not_predicted(fsdp: dict) -> Iterator[str]:
    """Yield why what a section holds is not predicted. The keys have their prefix."""
    if policy_of(fsdp) != LAYERS:
        yield f"units of {POLICY} {policy_of(fsdp)} are not predicted: write {LAYERS}, or give the nearest --arm fsdp2"
    if version_of(fsdp) == "1" and strategy_of(fsdp) == "NO_SHARD":
        yield "what FSDP holds with NO_SHARD is not predicted: the nearest is --arm ddp"


def of_fsdp1(fsdp: dict) -> Iterator[tuple[str, str]]:
    """Yield each key that FSDP2 ignores, whatever its value, and what to do."""
    for name in fsdp:
        if name in KEYS and "2" not in KEYS[name].versions:
            yield name, KEYS[name].instead


def without_its_policy(fsdp: dict) -> Iterator[tuple[str, str]]:
    """Yield each key that is not read with this auto_wrap_policy, as a sentence goes on, and what to do."""
    for name, value in fsdp.items():
        policy = KEYS[name].policy if name in KEYS else ""
        # A name that is none is refused.
        others = {*KEYS[POLICY].names} - {policy}
        if policy and value is not None and policy_of(fsdp) in others:
            yield f"ignores {name} without {POLICY}: {policy}", f"write {POLICY}: {policy}, or remove {name}"
