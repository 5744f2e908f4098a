"""Read anybody's config or record without trusting it, and recognise its kind by its keys."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.core import files, parsing
from study.core.errors import Stop
from study.records import store
from study.records.schema import Record

MAX_BYTES = 1 << 20  # of a config: DeepSpeed's longest examples have 4 kB
RECORD = "record"
ACCELERATE = "Accelerate config"
DEEPSPEED = "DeepSpeed config"
TRAINER = "Trainer arguments"
OTHER = "settings"
# A file has the kind with the most of its keys.
KEYS = {
    ACCELERATE: "distributed_type compute_environment mixed_precision deepspeed_config fsdp_config num_processes "
    "num_machines machine_rank main_training_function downcast_bf16 rdzv_backend use_cpu same_network",
    DEEPSPEED: "zero_optimization train_batch_size train_micro_batch_size_per_gpu zero_allow_untested_optimizer "
    "optimizer scheduler gradient_clipping steps_per_print wall_clock_breakdown torch_autocast amp",
    TRAINER: "per_device_train_batch_size output_dir learning_rate num_train_epochs max_steps max_grad_norm deepspeed "
    "lr_scheduler_type warmup_steps warmup_ratio gradient_checkpointing logging_steps save_steps weight_decay optim",
}


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


def read_config(path: Path) -> Source | None:
    """Return a config of a known kind; None for all other files, such as logs."""
    with contextlib.suppress(Stop):
        if path.suffix in (".json", ".yaml", ".yml") and (source := read(path)).kind in KEYS:
            return source
    return None


def read(path: Path) -> Source:
    """Read any config or record. A Stop says what is wrong with the file."""
    if path.is_dir():
        path /= store.RECORD
    content = {} if path.name == store.RECORD else _mapping(path)
    if path.name == store.RECORD or {"run_id", "observed"} <= content.keys():
        record = store.read(path)
        return Source(path, RECORD, record.model_dump(mode="json", by_alias=True), record)
    scores = {kind: len(content.keys() & set(keys.split())) for kind, keys in KEYS.items()} | {OTHER: 0.5}
    kind = max(scores, key=lambda kind: scores[kind])
    section: Any = content.get("deepspeed") if kind == TRAINER else None
    if kind == ACCELERATE and isinstance(content.get("deepspeed_config"), dict):
        section = content["deepspeed_config"].get("deepspeed_config_file")
    if isinstance(section, dict):
        return Source(path, kind, content, named=Source(path, DEEPSPEED, section))
    if not isinstance(section, str):
        return Source(path, kind, content)
    if (file := _near(section, path)) is None:
        unread = f"{section!r:.100}, which {path.name} names, is not here (nor in its folder and two above)"
        return Source(path, kind, content, unread=f"{unread}: what it sets is not compared")
    return Source(path, kind, content, named=Source(file, DEEPSPEED, _mapping(file)))


def _mapping(path: Path) -> dict[str, Any]:
    """Return the content of a yaml or json file. JSON is tried first, because yaml reads `1e5` as a text."""
    try:
        text = files.read(path, MAX_BYTES)
        try:
            content = parsing.from_json(text)
        except ValueError:
            content = parsing.from_yaml(text)
    except (OSError, ValueError) as error:
        what = f"{str(path)!r:.300} cannot be read as yaml or json ({files.why(error)})"
        raise Stop(what, "correct the file, or name another one") from None
    if not isinstance(content, dict):
        raise Stop(f"{path} holds no named settings", "name a yaml or json file with a mapping")
    return {str(name): value for name, value in content.items()}


def _near(section: str, path: Path) -> Path | None:
    """Return the file that a config names, in the current folder, its own, or one of the two above.

    Other files are not read: a stranger's config may name any file of this machine, and its content would be shown.
    """
    for folder in (Path.cwd(), *path.resolve().parents[:3]):
        with contextlib.suppress(OSError, ValueError):  # not a valid file name
            file = (folder / section).resolve()
            if file.is_relative_to(folder.resolve()) and file.is_file():
                return file
    return None


def flat(content: dict, prefix: str = "") -> dict[str, Any]:
    """Return every value by its dotted path. The depth was limited when the file was read."""
    values: dict[str, Any] = {}
    for name, value in content.items():
        inner = flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
        values |= inner
    return values
