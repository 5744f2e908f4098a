"""Finds contradictions within one config: what a library would refuse or ignore. Each sentence says what to do.

Facts of libraries: DeepSpeed 0.19.8, Accelerate 1.15.0, Transformers 5.23.0.
"""

import difflib

from study.watcher.differences import same
from study.watcher.effective import of_yaml, of_zero
from study.watcher.sources import ACCELERATE, DEEPSPEED, KEYS, RECORD, Source

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
DEVICES = ("none", "cpu", "nvme")
# DeepSpeed ignores other keys at its top. Only near misspellings of these are reported.
DEEPSPEED_KEYS = (*KEYS[DEEPSPEED].split(), "gradient_accumulation_steps", "bf16", "fp16", "communication_data_type")
# Accelerate refuses these keys in a yaml that also names a DeepSpeed config file.
NOT_BESIDE_A_FILE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)


def contradictions(source: Source) -> list[str]:
    """A sentence for each contradiction, without its full stop. A record has none: its run has started."""
    content, deepspeed = source.content, source.named.content if source.named else None
    if source.kind == RECORD:
        return []
    if source.kind == DEEPSPEED:
        return _of_deepspeed(content)
    if source.kind == ACCELERATE:
        return _of_accelerate(content, deepspeed)
    both = ["bf16 and fp16 are both true, which the Trainer refuses: set one of them to false"]
    sentences = both if content.get("bf16") is True and content.get("fp16") is True else []
    return sentences + (_of_pair(content, deepspeed) + _of_deepspeed(deepspeed) if deepspeed else [])


def _at(content, path: str):
    """The value at a dotted path, or None."""
    for name in path.split("."):
        content = content.get(name) if isinstance(content, dict) else None
    return content


def _of_pair(arguments: dict, deepspeed: dict) -> list[str]:
    sentences = []
    for ours, theirs in PAIRS.items():
        in_json, argument = _at(deepspeed, ours), arguments.get(theirs)
        if not all(isinstance(value, bool | int | float) for value in (in_json, argument)) or same(in_json, argument):
            continue
        sentences.append(
            f"{ours} is {in_json} in the DeepSpeed config and {theirs} is {argument} in the arguments, which the "
            'Trainer refuses: write "auto" into the DeepSpeed config'
        )
    return sentences


def _of_accelerate(config: dict, deepspeed: dict | None) -> list[str]:
    kind, sentences = str(config.get("distributed_type") or "NO"), []
    for engine in ("deepspeed", "fsdp"):
        if config.get(f"{engine}_config") and kind != engine.upper():
            what = f"{engine}_config is not used, because distributed_type is {kind:.40}"
            sentences.append(f"{what}: write {engine.upper()}, or remove the section")
    section = config.get("deepspeed_config")
    if kind != "DEEPSPEED" or not isinstance(section, dict):
        return sentences
    if not section.get("deepspeed_config_file"):
        return sentences + _of_deepspeed(of_yaml(section))
    doubled = [name for name in NOT_BESIDE_A_FILE if name in section]
    doubled += ["mixed_precision"] if config.get("mixed_precision") is not None else []
    if doubled:
        what = f"{' and '.join(doubled)} beside deepspeed_config_file, which Accelerate refuses"
        sentences.append(f"the yaml has {what}: set this in the DeepSpeed config only")
    return sentences + (_of_deepspeed(deepspeed, config.get("num_processes")) if deepspeed else [])


def _of_deepspeed(config: dict, ranks: int | None = None) -> list[str]:
    sentences, zero = [], of_zero(config)
    for name in config:
        near = difflib.get_close_matches(str(name), DEEPSPEED_KEYS, n=1, cutoff=0.85)
        if near and name not in DEEPSPEED_KEYS and near[0] not in config:
            sentences.append(f"DeepSpeed has no key {name:.60} and ignores it: write {near[0]}")
    if _at(config, "bf16.enabled") is True and _at(config, "fp16.enabled") is True:
        sentences.append("bf16 and fp16 are both enabled, which DeepSpeed refuses: switch one of them off")
    for part in ("offload_optimizer", "offload_param"):
        device, path = _at(zero, f"{part}.device"), _at(zero, f"{part}.nvme_path")
        if device not in (None, *DEVICES):
            sentences.append(f"{part} has the device {device!r:.40}, which DeepSpeed refuses: write cpu, nvme or none")
        elif device == "nvme" and not path and zero.get("stage") == 3:
            sentences.append(f"{part} has the device nvme and no path: give nvme_path in a DeepSpeed json")
    if _at(zero, "offload_param.device") in ("cpu", "nvme") and zero.get("stage", 0) != 3:
        sentences.append("offload_param works in stage 3 only: use stage 3, or remove it")
    return sentences + _of_batch(config, ranks)


def _of_batch(config: dict, ranks: int | None) -> list[str]:
    """DeepSpeed refuses rows of a step that are not rows per pass x passes x ranks."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    rows, micro, passes = (config.get(name) for name in names)
    if not all(type(value) is int and value > 0 for value in (rows, micro, passes)):
        return []
    if type(ranks) is int and ranks > 0:
        wrong, product = rows != micro * passes * ranks, f"{micro} rows x {passes} passes x {ranks} ranks"
    else:
        wrong, product = rows % (micro * passes), f"a multiple of {micro} rows x {passes} passes"
    remedy = "DeepSpeed refuses: remove train_batch_size"
    return [f"train_batch_size is {rows} and not {product}, which {remedy}"] if wrong else []
