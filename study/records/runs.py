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
from study.core.validation import nearest
from study.records import metrics, store
from study.records.keeping import shared
from study.records.schema import Record

# Settings that say where files are or how often something is printed. They change no number.
NOT_IN_A_CELL = {"run_dir", "nvme_dir", "cache_dir", "resume", "dies_after", "config_file", "log_every"}
NOT_IN_A_CELL |= {"trust_remote_code"}
FIRST_OPTIMIZER = "adamw"  # the optimizer of records that name none, when there was no other
PLACES = ("nvme_path", "output_path", "output_file")  # keys of a DeepSpeed config that change no number either


@dataclass(frozen=True, eq=False)
class Run:
    """A record and its folder, with what makes it comparable to others."""

    folder: Path
    record: Record
    environment: str = ""  # a letter for the machine and its versions, in the order in which they were found

    @property
    def kind(self) -> str:
        """Return what a reader must know about its numbers: real, virtual, capped or emulated.

        capped: a smaller device is emulated. emulated: the network between hosts is.
        """
        if self.record.is_virtual:
            return "virtual"
        if self.record.requested.memory_cap_gib:
            return "capped"
        return "emulated" if self.record.requested.hosts else "real"

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Return what runs are chosen and grouped by: every setting, and some of what was observed."""
        observed = self.record.observed
        return dict(self.record.requested) | {
            "run": self.record.run_id,
            "status": self.record.status,
            "environment": self.environment,
            "kind": self.kind,
            "virtual": self.record.is_virtual,
            "protocol_part": self.record.cell.part,
            "script": "as_printed" if self.record.is_script else "train",
            "arm": self.record.arm,
            "ranks": observed.ranks,
            "stage": observed.stage,
            "device": observed.device,
            "parameters": observed.parameters,
            "rows_per_step": observed.rows_per_step,
            "batch": observed.rows_per_step,  # as claims call it
            "peak_of": metrics.peak_of(self.record),
        }

    @cached_property
    def cell(self) -> dict[str, Any]:
        """Return all settings that can change a number, with the arm and the number of ranks."""
        record = self.record
        cell = {name: value for name, value in record.requested if value is not None and name not in NOT_IN_A_CELL}
        if cell.get("optimizer") == FIRST_OPTIMIZER:
            del cell["optimizer"]
        if record.observed.data_checksum:  # it identifies the rows, so their folder does not matter
            cell |= {name: Path(cell[name]).name for name in ("data", "tokenizer") if name in cell}
        if record.is_watched:
            observed = record.observed
            cell |= {"arm": record.arm, "script": record.watched.script}
            cell |= {"parameters": observed.parameters, "tokens_per_step": observed.tokens_per_step}
        return {name: value for name, value in cell.items() if value is not None} | {"ranks": record.observed.ranks}

    def key(self, without: Iterable[str] = ()) -> str:
        """Return the only definition of the same cell: equal keys mean equal cells, except for what is left out."""
        names = sorted(self.cell.keys() - set(without))
        return json.dumps({name: self.cell[name] for name in names}, default=str)

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
        return [run for run in self.runs if run.record.status == "done"]

    @property
    def counting(self) -> list[Run]:
        """Return the runs that may count as evidence: those that have ended, and are not of other people's scripts."""
        ended = [run for run in self.runs if run.record.status != "running" and not run.record.is_watched]
        return sorted(ended, key=lambda run: run.folder)

    @property
    def environments(self) -> dict[str, dict]:
        """Return the machines of the finished runs, by their letter: A to Z, then A1."""
        machines = {run.environment: run.machine for run in self.done}
        return dict(sorted(machines.items(), key=lambda item: (int(item[0][1:] or 0), item[0])))

    def select(self, **wanted) -> "Runs":
        """Return the runs that have all of these: `select(arm=["ddp", "zero2"], ranks=2)`. A list means any of them."""
        chosen = list(self.runs)
        for name, value in wanted.items():
            choices = value if isinstance(value, (list, tuple)) else [value]
            if unlike := [run for run in chosen if name not in run.facts]:
                raise Stop(f"runs have no {name!r}", nearest(name, unlike[0].facts))
            chosen = [run for run in chosen if run.facts[name] in choices]
        return replace(self, runs=tuple(chosen))

    def rows(self) -> list[dict]:
        """Return a row for each run, as `study runs` shows it."""
        return [_row(run) for run in self.runs]


def _row(run: Run) -> dict:
    record = run.record
    written = metrics.all_known(rank.nvme_written_bytes for rank in record.memory.per_rank)
    sizes = {
        "tracked peak MB": metrics.tracked_peak_bytes(record),
        "collectives MB": sum(metrics.sent(record).values()) if record.traffic.per_rank else None,
        "to disk MB": sum(written) if written else None,
    }
    measured = measured_flops(record.model_dump(exclude_none=True), run.folder)
    reached = metrics.flops_per_s(record)
    ranks = record.observed.ranks
    return {
        "run": run.folder.name,
        "status": record.status,
        "arm": record.arm,
        "task": record.requested.task,
        "precision": record.requested.precision,
        "ranks": f"{ranks} virtual" if record.is_virtual else ranks,
        "stage": record.observed.stage,
        "loss": metrics.final_train_loss(record),
        "eval loss": metrics.value(record, "eval_loss"),
        "s/step": metrics.value(record, "step_s"),
        "MFU": metrics.mfu(record),
        "of measured": reached / measured if reached and measured else None,
    } | {name: None if size_bytes is None else size_bytes / 1e6 for name, size_bytes in sizes.items()}


def default_folders() -> list[Path]:
    """Return where runs are if no folders are named: runs/, and the runs kept in reports/."""
    return [path for path in (Path("runs"), *sorted((ROOT / "reports").glob("*/runs"))) if path.is_dir()]


def load(
    folders: str | Path | Iterable[str | Path], every_folder_has_runs: bool = False, to_share: bool = False
) -> Runs:
    """Return every run below the folders, once. Several folders are given as a list, or as one text with commas.

    Raise Stop for a folder without runs, with `every_folder_has_runs`. With `to_share`, the records are without private
    information, so that everything in them may be published.
    """
    if isinstance(folders, (str, Path)):
        folders = [part.strip() for part in str(folders).split(",") if part.strip()]
    paths: dict[Path, None] = {}  # in order, each once
    set_aside: list[str] = []
    tops = tuple(map(Path, folders))
    for top in tops:
        below = store.run_folders(top)
        paths |= dict.fromkeys(path.resolve() for path in below)
        if every_folder_has_runs and not below:
            raise Stop(f"there is no run below {top}", "name a folder that holds run folders")
        if not top.is_dir():
            set_aside.append(f"{top} is not a folder")
    by_identity: dict[tuple[str, ...], Run] = {}
    copies = 0
    for folder in paths:
        try:
            record = store.load(folder)
            record = shared(record) if to_share else record
        except Stop as stop:
            set_aside.append(f"{stop.what}. {stop.remedy}")
            continue
        if record.status == "running":
            set_aside.append(f"{folder} is half-written: it is still running, or was killed. Run that cell again")
        copies += record.identity in by_identity
        by_identity.setdefault(record.identity, Run(folder, _with_settings(record)))
    order = {arm: number for number, arm in enumerate(NAMES)}
    runs = _with_environments(list(by_identity.values()))
    runs.sort(key=lambda run: (order.get(run.record.arm, len(order)), run.record.arm, run.record.run_id))
    return Runs(tuple(runs), tuple(set_aside), copies, tops)


def _with_settings(record: Record) -> Record:
    """Return a record whose settings, if it is of a user's own script, are what was observed of that."""
    if not record.is_watched:
        return record
    observed = record.observed
    weights = observed.dtypes.get("weights")
    precision = observed.autocast or {"float32": "fp32"}.get(str(weights), weights)
    if weights == "bfloat16" and observed.dtypes.get("master") == "float32" and not observed.autocast:
        precision = "bf16_cast"
    settings = {
        "model": record.watched.model,
        "precision": precision,
        "micro_batch": record.watched.rows_per_pass,
        "accumulation": observed.accumulation,
    }
    return record.model_copy(update={"requested": record.requested.model_copy(update=settings)})


def _with_environments(runs: list[Run]) -> list[Run]:
    """Return the runs, each with the letter of its environment: in the order of finished runs, A to Z, then A1."""
    keys = {run: json.dumps(run.machine, sort_keys=True) for run in runs}
    machines = list(dict.fromkeys(key for run, key in keys.items() if run.record.status == "done"))
    letters = {key: chr(65 + number % 26) + str(number // 26 or "") for number, key in enumerate(machines)}
    return [replace(run, environment=letters.get(key, "")) for run, key in keys.items()]  # failed runs too
