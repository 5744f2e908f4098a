"""Read anybody's config or record without trusting it, and recognises its kind by its keys."""

import contextlib
import os
from collections.abc import Callable
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
        if self.record:
            return f"{self.kind}, {self.record.status}"
        if self.named is None:
            return self.kind
        if self.named.path == self.path:
            return f"{self.kind} with a DeepSpeed config inside"
        return f"{self.kind} with {self.named.path.name}"


def read_config(path: Path) -> Source | None:
    """Return a config of a known kind; None for all other files, such as logs."""
    if path.suffix not in (".json", ".yaml", ".yml") or not path.is_file():
        return None
    with contextlib.suppress(Stop):
        source = read(path)
        return source if source.kind in KEYS else None
    return None


def read(path: Path) -> Source:
    """Read any config or record. A Stop says what is wrong with the file."""
    if path.is_dir():
        path /= store.RECORD
    if path.name == store.RECORD:
        return _record(path)
    content = _parsed(files.read, path)
    if not isinstance(content, dict):
        what = type(content).__name__ if content is not None else "nothing"
        raise Stop(f"{path} holds {what} instead of named settings", "name a yaml or json file with a mapping")
    content = {str(name): value for name, value in content.items()}
    if "run_id" in content and "observed" in content:
        return _record(path)
    scores = {kind: sum(key in content for key in keys.split()) for kind, keys in KEYS.items()}
    kind = max(scores, key=lambda kind: scores[kind]) if any(scores.values()) else OTHER
    named, unread = _named(path, content, kind)
    return Source(path, kind, content, named=named, unread=unread)


def _record(path: Path) -> Source:
    record = store.read(path)
    return Source(path, RECORD, record.model_dump(mode="json", by_alias=True), record)


def _parsed(read: Callable[..., bytes], *where: Path | str) -> Any:
    """Return the content of a yaml or json file. JSON is tried first, because yaml reads `1e5` as a text."""
    path = Path(*where)
    try:
        content = read(*where, MAX_BYTES)
        with contextlib.suppress(ValueError):
            return parsing.from_json(content)
        return parsing.from_yaml(content)
    except FileNotFoundError:
        raise Stop(f"there is no file {str(path)!r:.300}", "check the path") from None
    except (OSError, ValueError) as error:
        what = f"{path} cannot be read as yaml or json ({files.why(error)})"
        raise Stop(what, f"correct {path.name}, or name another file") from None


def _named(path: Path, content: dict, kind: str) -> tuple[Source | None, str | None]:
    """Return the DeepSpeed config that a file names or contains, or why it was not read."""
    section = content.get("deepspeed_config") if kind == ACCELERATE else content.get("deepspeed")
    if kind not in (ACCELERATE, TRAINER) or not section:
        return None, None
    if kind == ACCELERATE:
        section = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    if isinstance(section, dict):
        return Source(path, DEEPSPEED, section), None
    if not isinstance(section, str):
        return None, None
    if (found_at := _near(section, path)) is None:
        what = f"{section!r:.100}, which {path.name} names, is not here (nor in its folder and two above)"
        return None, f"{what}: what it sets is not compared"
    inner = _parsed(files.read_below, *found_at)
    file = Path(*found_at)
    if not isinstance(inner, dict):
        raise Stop(f"{file} holds no DeepSpeed config", f"correct {file.name}")
    return Source(file, DEEPSPEED, inner), None


def _near(section: str, path: Path) -> tuple[Path, str] | None:
    """Return the file that a config names, as a folder near the config and a path below it.

    Other files are not read: a stranger's config may name any file of this machine, and its content would be shown.
    """
    for folder in (Path.cwd(), *path.resolve().parents[:3]):
        with contextlib.suppress(OSError, ValueError):  # not a valid file name
            name = os.path.relpath(folder / section, folder)
            if not name.startswith("..") and (folder / name).is_file():
                return folder, name
    return None


def flat(content: dict, prefix: str = "") -> dict[str, Any]:
    """Return every value by its dotted path. The depth was limited when the file was read."""
    values: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict) and value:
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values
