"""Read anybody's config or record without trusting it, and recognise its kind by its keys."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.core import files, fsdp_keys
from study.core.arms import config_of_yaml
from study.core.errors import Stop
from study.core.files import section_at, value_at
from study.records import store
from study.records.schema import Record

MAX_BYTES = 2**16  # of a config: DeepSpeed's longest examples have 4 kB
SCRIPTS = (".py", ".sh", ".ipynb")
RECORD = "record"
ACCELERATE = "Accelerate config"
DEEPSPEED = "DeepSpeed config"
TRAINER = "Trainer arguments"
TORCHTITAN = "torchtitan config"
OTHER = "settings"
# Accelerate 1.0.0 to 1.15.0 writes auto for what its yaml lacks (utils/dataclasses.py:1234), and fills in 1.0
# (accelerator.py:2224), or the Trainer's max_grad_norm, 1.0 by default; and the Accelerator's own number of passes.
UNWRITTEN = {"gradient_clipping": 1.0, "gradient_accumulation_steps": "auto"}
NAMES_ANOTHER = {TRAINER: "deepspeed", ACCELERATE: "deepspeed_config.deepspeed_config_file"}  # where it names one
# What the Trainer reads in a file of its fsdp_config (training_args.py:2785 of transformers 5.23.0).
OF_FSDP_FILE = {name.removeprefix("fsdp_") for name in fsdp_keys.KEYS} | {
    *("xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt", "limit_all_gathers")
}
# A file has the kind with the most of its keys.
KEYS = {
    OTHER: "",
    ACCELERATE: "distributed_type compute_environment mixed_precision deepspeed_config num_processes "
    "num_machines machine_rank main_training_function downcast_bf16 rdzv_backend use_cpu same_network",
    DEEPSPEED: "zero_optimization train_batch_size train_micro_batch_size_per_gpu zero_allow_untested_optimizer "
    "optimizer scheduler gradient_clipping steps_per_print wall_clock_breakdown torch_autocast amp",
    TRAINER: "per_device_train_batch_size output_dir learning_rate num_train_epochs max_steps max_grad_norm deepspeed "
    "fsdp lr_scheduler_type warmup_steps warmup_ratio gradient_checkpointing logging_steps save_steps weight_decay "
    "optim base_model micro_batch_size adapter sequence_len lr_scheduler finetuning_type cutoff_len tuner_type "
    "train_type",
}  # fsdp_config is of two kinds, and bf16 as well


@dataclass(frozen=True)
class Source:
    """A config or a record. `content` is the content of the file; a config that the file names is in `named`."""

    path: Path
    kind: str
    content: dict
    record: Record | None = None
    named: "Source | None" = None
    unread: str | None = None  # why a file that it names is not in `named`

    @property
    def words(self) -> str:
        """The kind of file, in words."""
        return f"{self.kind} and {self.named.kind}" if self.named else self.kind


def read(path: Path) -> Source:
    """Read any config or record. A Stop says what is wrong with the file."""
    if path.is_dir():
        path /= store.RECORD
    if path.name == store.RECORD:
        record = store.read(path)
        return Source(path, RECORD, record.model_dump(mode="json", by_alias=True), record)
    content = _mapping(path)
    if content and {name.removeprefix("fsdp_") for name in content} <= OF_FSDP_FILE:
        content = {"fsdp": "full_shard auto_wrap", "fsdp_config": content}  # as the Trainer that names it has both
    training = content.get("training")
    if path.suffix == ".toml" and isinstance(training, dict) and "seq_len" in training:
        return Source(path, TORCHTITAN, content)
    kind = kind_of(content)
    _unify_fsdp(content, path)
    # The DeepSpeed config in it, or the file that it names.
    section = value_at(content, NAMES_ANOTHER.get(kind, "no other"))
    if section is None and content.get("distributed_type") == "DEEPSPEED":
        written = section_at(content, "deepspeed_config")
        section = {name: number for name, number in UNWRITTEN.items() if written.get(name) is None}
        section |= config_of_yaml(written)
    if isinstance(section, dict):
        content.pop("deepspeed", None)
        return Source(path, kind, content, named=Source(path, DEEPSPEED, section))
    if not isinstance(section, str):
        return Source(path, kind, content)
    if file := allowed(section, path):
        return Source(path, kind, content, named=Source(file, DEEPSPEED, _mapping(file)))
    unread = f"{section!r:.100}, which {path.name} names, is not here (nor in its folder and two above)"
    return Source(path, kind, content, unread=f"{unread}: what it sets is not known")


def kind_of(content: dict) -> str:
    return max(KEYS, key=lambda kind: len(content.keys() & KEYS[kind].split()))


def _unify_fsdp(content: dict, config: Path) -> None:
    """Write the settings of FSDP into one section, in the words of Accelerate."""
    fsdp_file = content.get("fsdp_config")  # of the Trainer it may be a file
    if isinstance(fsdp_file, str) and (file := allowed(fsdp_file, config)):
        content["fsdp_config"] = _mapping(file)
    if "offload" in str(content.get("fsdp")):  # of the Trainer
        content["fsdp_config"] = section_at(content, "fsdp_config") | {"fsdp_offload_params": True}
    # Accelerate and the Trainer know these with and without their prefix (launch.py:1269, training_args.py:2785).
    if fsdp := section_at(content, "fsdp_config"):
        content["fsdp_config"] = {f"fsdp_{name.removeprefix('fsdp_')}": value for name, value in fsdp.items()}


def allowed(name: str, config: Path) -> Path | None:
    """Return the file that a config names, if it is in the current folder, its own, or one of the two above that."""
    # A stranger's config may name any file of this machine, and its content would be shown.
    for folder in (Path.cwd(), *config.resolve().parents[:3]):
        with contextlib.suppress(OSError, ValueError):  # not a valid file name
            file = (folder / name).resolve()
            if file.is_relative_to(folder.resolve()) and file.is_file():
                return file
    return None


def _mapping(path: Path) -> dict[str, Any]:
    if path.suffix in SCRIPTS and path.is_file():
        raise Stop(f"{path} is a script, and no config", "give it without --config, as a file, or name a config")
    what = "a mapping of settings"
    remedy = (
        f"name {what} with each key once, in yaml, or in json without comments and without a comma after the last value"
    )
    missing = "name a file that is here"
    content = files.load(path, dict, what=what, remedy=remedy, most_bytes=MAX_BYTES, links=True, missing=missing)
    return plain(content)


def plain(value: Any) -> Any:
    """Return settings with true and false also where they are in quotes, as the libraries read them."""
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    word = str(value).lower()
    return word == "true" if word in ("true", "false") else value
