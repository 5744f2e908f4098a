"""Loads the runs below some folders, selects among them, and identifies equal cells and equal machines.

A record that cannot be read is listed in `set_aside`, and never ends a report.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from study.core.arms import NAMES, ROOT
from study.core.errors import Stop
from study.core.gpus import measured_flops
from study.records import metrics, store
from study.records.keeping import refuse_impossible, shared
from study.records.schema import Record, Requested

# Settings that say where files are or how often something is printed. They change no number.
NOT_IN_A_CELL = (
    "run_dir",
    "nvme_dir",
    "cache_dir",
    "resume",
    "dies_after",
    "config_file",
    "log_every",
    "trust_remote_code",
)
FIRST_OPTIMIZER = "adamw"  # the optimizer of records that name none, when there was no other
PLACES = ("nvme_path", "output_path", "output_file")  # keys of a DeepSpeed config that change no number either
FIELDS = ("folder", "record", "environment")  # of a Run


@dataclass(frozen=True, eq=False)
class Run:
    """One record and its folder, with the values that tables, checks and figures use. Unknown is None."""

    folder: Path
    record: Record
    environment: str = ""  # a letter for the machine and its versions, in the order in which they were found

    @property
    def name(self) -> str:
        return self.record.run_id

    @property
    def status(self) -> str:
        return self.record.status

    @property
    def done(self) -> bool:
        return self.status == "done"

    @property
    def arm(self) -> str:
        return self.record.arm or "unknown"

    @property
    def virtual(self) -> bool:
        return self.record.is_virtual

    @property
    def kind(self) -> str:
        """Return what a reader must know about its numbers: real, virtual, capped or emulated.

        capped: a smaller device is emulated. emulated: the network between hosts is.
        """
        if self.virtual:
            return "virtual"
        if self.requested.memory_cap_gib:
            return "capped"
        return "emulated" if self.hosts else "real"

    # --- observed ---

    @property
    def ranks(self) -> int | None:
        return self.record.observed.ranks

    @property
    def stage(self) -> int | None:
        return self.record.observed.stage

    @property
    def device(self) -> str | None:
        return self.record.observed.device

    @property
    def parameters(self) -> int | None:
        return self.record.observed.parameters

    @property
    def rows_per_step(self) -> int | None:
        return self.record.observed.rows_per_step

    # --- requested ---

    @cached_property
    def requested(self) -> Requested:
        """Return the settings. Those of a user's own script are what was observed of it."""
        known = {name: value for name, value in self.cell.items() if name in Requested.model_fields}
        return self.record.requested.model_copy(update=known)

    @property
    def task(self) -> str | None:
        return self.requested.task

    @property
    def model(self) -> str | None:
        return self.requested.model

    @property
    def precision(self) -> str | None:
        return self.requested.precision

    @property
    def seed(self) -> int | None:
        return self.requested.seed

    @property
    def micro_batch(self) -> int | None:
        return self.requested.micro_batch

    @property
    def accumulation(self) -> int | None:
        return self.requested.accumulation

    @property
    def sequence(self) -> int | None:
        return self.requested.sequence

    @property
    def hosts(self) -> int | None:
        return self.requested.hosts

    # --- measured ---

    @property
    def losses(self) -> list[float]:
        return self.record.loss.train

    @cached_property
    def median_step_s(self) -> float | None:
        """Return the median seconds of a step. None of a resumed run, as in `metrics.value`."""
        return metrics.value(self.record, "step_s")

    @cached_property
    def tracked_bytes(self) -> float | None:
        """Return the peak of the tensors, which formulas predict."""
        return metrics.tracked_peak_bytes(self.record)

    @cached_property
    def peak_bytes(self) -> float | None:
        return metrics.peak_bytes(self.record)

    @property
    def peak_of(self) -> str | None:
        """Return whose peak it is. allocated: by PyTorch on a GPU. tracked: held by tensors on a CPU."""
        if metrics.peak_allocated_bytes(self.record):
            return "allocated"
        return "tracked" if self.tracked_bytes else None

    @cached_property
    def components(self) -> dict[str, int]:
        return metrics.components(self.record)

    @cached_property
    def traffic(self) -> dict[str, int]:
        """Return the bytes of a step by collective, of the first rank."""
        per_rank = self.record.traffic.per_rank
        return {kind: moved.bytes for kind, moved in per_rank[0].items()} if per_rank else {}

    def value(self, name: str) -> Any:
        """Return a value by its name: a property of this class, or a setting. Raise AttributeError for another name."""
        return getattr(self if hasattr(type(self), name) or name in FIELDS else self.requested, name)

    # --- equal cells and equal machines ---

    @cached_property
    def cell(self) -> dict[str, Any]:
        """Return all settings that can change a number, with the arm, the seed and the number of ranks."""
        cell = {name: value for name, value in self.record.requested if value is not None and name not in NOT_IN_A_CELL}
        if cell.get("optimizer") == FIRST_OPTIMIZER:
            del cell["optimizer"]
        if self.record.observed.data_checksum:  # it identifies the rows, so their folder does not matter
            cell |= {name: Path(cell[name]).name for name in ("data", "tokenizer") if name in cell}
        return cell | (_watched_cell(self.record) if self.record.is_watched else {}) | {"ranks": self.ranks}

    def key(self, without: Iterable[str] = (), only: Iterable[str] | None = None) -> str:
        """Return the only definition of the same cell: equal keys mean equal cells, except for what is left out."""
        names = set(self.cell if only is None else only) - set(without)
        return json.dumps({name: self.cell.get(name) for name in sorted(names)}, default=str)

    @cached_property
    def resolved(self) -> dict[str, Any]:
        """Return DeepSpeed's resolved config with dotted keys, and the checksum of the data."""
        observed = self.record.observed
        return dict(_flat(observed.deepspeed or {})) | {"data_checksum": observed.data_checksum}

    @cached_property
    def machine(self) -> dict[str, Any]:
        """Return the only definition of the same machine: hardware, versions and commit, which may change a number."""
        record = self.record
        hardware = self.record.hardware
        fields = {
            "machines": len(record.machines) or None,
            "devices": hardware.gpus_line,
            "cpu": hardware.cpu,
            "cores": hardware.cores,
            "driver": hardware.driver,
            # In GiB: the exact bytes differ from boot to boot.
            "host GiB": hardware.host_memory_bytes and (hardware.host_memory_bytes + 2**29) // 2**30,
            **dict(sorted(record.software.items())),
            "measure_version": record.measure_version,
            # Two changed trees of one commit cannot be distinguished: they count as one, marked as changed.
            "commit": record.commit and record.commit[:12] + (" changed" if record.dirty else ""),
        }
        return {name: value for name, value in fields.items() if value is not None}


def _watched_cell(record: Record) -> dict[str, Any]:
    """Return the cell of a user's own script. It has no comparable settings, so these are observed values."""
    seen = record.observed
    weights = record.observed.dtypes.get("weights")
    cast = "bf16_cast" if weights == "bfloat16" and seen.dtypes.get("master") == "float32" else weights
    cell = {
        "arm": record.arm,
        "script": record.watched.script,
        "model": record.watched.model,
        "parameters": seen.parameters,
        "precision": seen.autocast or ("fp32" if weights == "float32" else cast),
        "micro_batch": record.watched.rows_per_pass,
        "accumulation": seen.accumulation,
        "tokens_per_step": seen.tokens_per_step,
    }
    return {name: value for name, value in cell.items() if value is not None}


def _flat(config: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Return the keys of a nested config joined by dots, without those of file locations."""
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif name not in PLACES:
            yield prefix + name, value


@dataclass(frozen=True)
class Runs:
    """The runs below some folders, and a sentence for each record that cannot be used."""

    runs: tuple[Run, ...]
    set_aside: tuple[str, ...] = ()
    copies: int = 0  # records of runs that are already included
    folders: tuple[Path, ...] = ()

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def done(self) -> list[Run]:
        return [run for run in self.runs if run.done]

    @property
    def environments(self) -> dict[str, dict]:
        """Return the machines of the finished runs, by their letter: A to Z, then A1."""
        machines = {run.environment: run.machine for run in self.done}
        return dict(sorted(machines.items(), key=lambda item: (int(item[0][1:] or 0), item[0])))

    @property
    def counting(self) -> list[Run]:
        """Return the runs that may count as evidence: those that have ended, and are not of other people's scripts."""
        ended = [run for run in self.runs if run.status != "running" and not run.record.is_watched]
        return sorted(ended, key=lambda run: run.folder)

    def select(self, **wanted) -> "Runs":
        """Return the runs that have all of these: `select(arm=["ddp", "zero2"], ranks=2)`. A list means any of them."""
        choices = {name: value if isinstance(value, (list, tuple)) else [value] for name, value in wanted.items()}
        chosen = [run for run in self.runs if all(run.value(name) in choice for name, choice in choices.items())]
        return replace(self, runs=tuple(chosen))

    def rows(self) -> list[dict]:
        """Return a row for each run, as `study runs` shows it."""
        return [_row(run) for run in self.runs]


def _row(run: Run) -> dict:
    record = run.record
    collectives_bytes = sum(run.traffic.values()) if record.traffic.per_rank else None
    written = metrics.all_known(rank.nvme_written_bytes for rank in record.memory.per_rank)
    sizes = {
        "tracked peak MB": run.tracked_bytes,
        "collectives MB": collectives_bytes,
        "to disk MB": sum(written) if written else None,
    }
    measured = measured_flops(record.model_dump(exclude_none=True), run.folder)
    reached = metrics.flops_per_s(record)
    return {
        "run": run.folder.name,
        "status": run.status,
        "arm": run.arm,
        "task": run.task,
        "precision": run.precision,
        "ranks": f"{run.ranks} virtual" if run.virtual else run.ranks,
        "stage": run.stage,
        "loss": metrics.final_train_loss(record),
        "eval loss": metrics.value(record, "eval_loss"),
        "s/step": run.median_step_s,
        "MFU": metrics.mfu(record),
        "of measured": reached / measured if reached and measured else None,
    } | {name: None if size_bytes is None else size_bytes / 1e6 for name, size_bytes in sizes.items()}


def default_folders() -> list[Path]:
    """Return where runs are if no folders are named: runs/, and the runs kept in reports/."""
    return [path for path in (Path("runs"), *sorted((ROOT / "reports").glob("*/runs"))) if path.is_dir()]


def load(folders: str | Path | Iterable[str | Path], every_folder_has_runs: bool = False) -> Runs:
    """Return every run below the folders, once. Several folders are given as a list, or as one text with commas.

    Raise Stop for a folder without runs, with `every_folder_has_runs`.
    """
    if isinstance(folders, (str, Path)):
        folders = [part.strip() for part in str(folders).split(",") if part.strip()]
    paths_below = {Path(top): store.run_folders(Path(top)) for top in folders}
    tops = list(paths_below)
    for top in tops:
        if every_folder_has_runs and not paths_below[top]:
            raise Stop(f"there is no run below {top}", "name a folder that holds run folders")
    paths = list(dict.fromkeys(path.resolve() for below in paths_below.values() for path in below))
    set_aside = [f"{top} is not a folder" for top in tops if not top.is_dir()]
    by_identity: dict[tuple[str, ...], Run] = {}
    copies = 0
    for folder in paths:
        run, problem = _load_run(folder)
        set_aside += [problem] if problem else []
        if run is not None and by_identity.setdefault(run.record.identity, run) is not run:
            copies += 1
    order = {arm: number for number, arm in enumerate(NAMES)}
    runs = sorted(_with_environments(by_identity.values()), key=lambda r: (order.get(r.arm, len(order)), r.arm, r.name))
    return Runs(tuple(runs), tuple(set_aside), copies, tuple(tops))


def _load_run(folder: Path) -> tuple[Run | None, str | None]:
    """Return the run of a folder, if it can be used, and what is wrong with it."""
    try:
        run = Run(folder, store.load(folder))
        refuse_impossible(folder, run.record)
    except Stop as stop:
        return None, f"{stop.what}. {stop.remedy}"
    if run.status == "running":
        return run, f"{folder} is half-written: it is still running, or was killed. Run that cell again"
    return run, None


def _with_environments(runs: Iterable[Run]) -> list[Run]:
    """Return the runs, each with the letter of its environment: in the order of finished runs, A to Z, then A1."""
    letters: dict[str, str] = {}
    runs = list(runs)
    for run in runs:
        if run.done:
            letters.setdefault(_machine_key(run), chr(65 + len(letters) % 26) + str(len(letters) // 26 or ""))
    return [replace(run, environment=letters.get(_machine_key(run), "")) for run in runs]  # failed runs too


def load_to_share(folders: str | Iterable[str | Path]) -> Runs:
    """Return the same runs without private information, so that everything in them may be published."""
    loaded = load(folders)
    return replace(loaded, runs=tuple(replace(run, record=shared(run.record)) for run in loaded))


def _machine_key(run: Run) -> str:
    return json.dumps(run.machine, sort_keys=True)
