"""Find contradictions within one config: what a library would refuse or ignore. Each sentence says what to do.

Facts of libraries: DeepSpeed 0.19.8, Accelerate 1.15.0, Transformers 5.23.0.
"""

import difflib
from collections.abc import Iterator
from typing import Any

from study.spec.arms import DEVICES, NOT_BESIDE_JSON, OFFLOADS
from study.spec.library_defaults import Library, sections
from study.watcher.descriptions import value_at
from study.watcher.differences import same
from study.watcher.effective import of_yaml, of_zero
from study.watcher.sources import ACCELERATE, DEEPSPEED, RECORD, TRAINER, Source

# The Trainer compares these with the DeepSpeed config, and refuses to start where both have a number and they differ.
PAIRS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
}
NAMES: dict[Library, str] = {"deepspeed": "DeepSpeed", "accelerate": "Accelerate", "trainer": "the Trainer"}
NEAR = 0.85  # similarity of a misspelled key to the right one
PREFIXES = ("", "fsdp_", "stage3_")  # Accelerate and DeepSpeed add them to keys that lack them


def contradictions(source: Source) -> list[str]:
    """Return a sentence for each contradiction, without its full stop. A record has none: its run has started."""
    deepspeed = source.named.content if source.named else None
    if source.kind == RECORD:
        return []
    if source.kind == DEEPSPEED:
        return list(_in_deepspeed(source.content))
    if source.kind == ACCELERATE:
        return list(_in_accelerate(source.content, deepspeed))
    return list(_in_arguments(source.content, deepspeed, source.kind == TRAINER))


def _mistyped_keys(library: Library, config: dict) -> Iterator[str]:
    """Yield a sentence for each key that the library does not have.

    Of keys that it ignores, only near misspellings: a program may keep keys of its own in a config.
    """
    for path, known in sections(library).items():
        section = value_at(config, path)
        for key in section if isinstance(section, dict) else ():
            if any(prefix + str(key) in known for prefix in PREFIXES):
                continue
            near = difflib.get_close_matches(str(key), known.keys() - section.keys(), n=1, cutoff=NEAR)
            refused = _refuses(library, path)
            if near or refused:
                remedy = f"write {near[0]}" if near else "remove it"
                inside = f" in {path}" if path else ""
                verb = "refuses" if refused else "ignores"
                yield f"{NAMES[library]} has no key {key:.60}{inside} and {verb} it: {remedy}"


def _refuses(library: Library, path: str) -> bool:
    """Return whether a library refuses an unknown key in this section. Otherwise it ignores the key."""
    is_top = path == ""
    return library != "trainer" and is_top == (library == "accelerate")


def _in_arguments(arguments: dict, deepspeed: dict | None, is_trainer: bool) -> Iterator[str]:
    if is_trainer:
        yield from _mistyped_keys("trainer", arguments)
    if arguments.get("bf16") is True and arguments.get("fp16") is True:
        yield "bf16 and fp16 are both true, which the Trainer refuses: set one of them to false"
    if deepspeed:
        yield from _pairs(arguments, deepspeed)
        yield from _in_deepspeed(deepspeed)


def _pairs(arguments: dict, deepspeed: dict) -> Iterator[str]:
    for ours, theirs in PAIRS.items():
        in_json = value_at(deepspeed, ours)
        argument = arguments.get(theirs)
        if not all(isinstance(value, bool | int | float) for value in (in_json, argument)) or same(in_json, argument):
            continue
        yield (
            f"{ours} is {in_json} in the DeepSpeed config and {theirs} is {argument} in the arguments, which the "
            'Trainer refuses: write "auto" into the DeepSpeed config'
        )


def _in_accelerate(config: dict, deepspeed: dict | None) -> Iterator[str]:
    kind = str(config.get("distributed_type") or "NO")
    yield from _mistyped_keys("accelerate", config)
    for engine in ("deepspeed", "fsdp"):
        if config.get(f"{engine}_config") and kind != engine.upper():
            what = f"{engine}_config is not used, because distributed_type is {kind:.40}"
            yield f"{what}: write {engine.upper()}, or remove the section"
    section = config.get("deepspeed_config")
    if kind != "DEEPSPEED" or not isinstance(section, dict):
        return
    if not section.get("deepspeed_config_file"):
        yield from _in_deepspeed(of_yaml(section))
        return
    doubled = [name for name in NOT_BESIDE_JSON if name in section]
    if config.get("mixed_precision") is not None:
        doubled.append("mixed_precision")
    if doubled:
        what = f"{' and '.join(doubled)} beside deepspeed_config_file, which Accelerate refuses"
        yield f"the yaml has {what}: set this in the DeepSpeed config only"
    if deepspeed:
        yield from _in_deepspeed(deepspeed, config.get("num_processes"))


def _in_deepspeed(config: dict, ranks: int | None = None) -> Iterator[str]:
    yield from _mistyped_keys("deepspeed", config)
    if value_at(config, "bf16.enabled") is True and value_at(config, "fp16.enabled") is True:
        yield "bf16 and fp16 are both enabled, which DeepSpeed refuses: switch one of them off"
    yield from _offloading(of_zero(config))
    yield from _batch(config, ranks)


def _offloading(zero: dict) -> Iterator[str]:
    for part in OFFLOADS:
        device = value_at(zero, f"{part}.device")
        if device not in (None, *DEVICES):
            yield f"{part} has the device {device!r:.40}, which DeepSpeed refuses: write cpu, nvme or none"
        elif device == "nvme" and not value_at(zero, f"{part}.nvme_path") and zero.get("stage") == 3:
            yield f"{part} has the device nvme and no path: give nvme_path in a DeepSpeed json"
    if value_at(zero, "offload_param.device") in ("cpu", "nvme") and zero.get("stage", 0) != 3:
        yield "offload_param works in stage 3 only: use stage 3, or remove it"


def _batch(config: dict, ranks: int | None) -> Iterator[str]:
    """DeepSpeed refuses rows of a step that are not rows per pass x passes x ranks."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes: list[Any] = [config.get(name) for name in names]
    if not all(type(size) is int and size > 0 for size in sizes):
        return
    rows, micro, passes = sizes
    if type(ranks) is int and ranks > 0:
        wrong = rows != micro * passes * ranks
        product = f"{micro} rows x {passes} passes x {ranks} ranks"
    else:
        wrong = rows % (micro * passes) != 0
        product = f"a multiple of {micro} rows x {passes} passes"
    if wrong:
        yield f"train_batch_size is {rows} and not {product}, which DeepSpeed refuses: remove train_batch_size"
