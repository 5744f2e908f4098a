"""Loads the runs below some folders, selects among them, and identifies equal cells and equal machines.

A record that cannot be read is listed in `set_aside`, and never ends a report.
"""

import functools
import json
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from study.core.arms import NAMES, ROOT
from study.core.errors import Stop
from study.core.settings import PATHS
from study.records import metrics, store
from study.records.keeping import shared
from study.records.schema import Record

KEPT = ROOT / "reports" / "cpu-2core" / "runs"  # a checkout has them, an installed wheel does not
# Settings that say where files are or how often something is printed. They change no number.
NOT_IN_A_CELL = {*PATHS, "config_file", "log_every"}
FIRST_OPTIMIZER = "adamw"  # the optimizer of records that name none, when there was no other
LETTERS = [f"{letter}{number or ''}" for number in range(99) for letter in string.ascii_uppercase]  # A to Z, then A1
COLUMNS = {"loss": "train_loss", "eval loss": "eval_loss", "s/step": "step_s", "MFU": "mfu"}


@dataclass(frozen=True, eq=False)
class Run:
    """A record and its folder, with what makes it comparable to others."""

    folder: Path
    record: Record
    environment: str = ""  # a letter for the machine and its versions, in the order in which they were found
    mark: str = ""  # behind names, of what this repository keeps: it is shown where a reader has no such run

    @property
    def kind(self) -> str:
        """Return what a reader must know about its numbers."""
        requested = self.record.requested
        if self.record.is_virtual:
            return "virtual"
        if requested.memory_cap_gib:
            return "capped"  # a smaller device is emulated
        return "emulated" if requested.hosts else "real"  # a network between hosts

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """Return what runs are chosen and grouped by: every setting, and some of what was observed."""
        record = self.record
        observed = record.observed
        return dict(record.requested) | {
            "run": record.run_id,
            "status": record.status,
            "environment": self.environment,
            "kind": self.kind,
            "virtual": record.is_virtual,
            "protocol_part": record.cell.part,
            "script": "as_printed" if record.is_script else "train",
            "arm": record.arm,
            "optimizer": record.requested.optimizer or (None if record.is_watched else FIRST_OPTIMIZER),
            "batch": observed.rows_per_step,  # as claims call it
            **observed.model_dump(include={"ranks", "stage", "device", "allocator", "parameters", "rows_per_step"}),
        }

    @functools.cached_property
    def cell(self) -> dict[str, Any]:
        """Return all settings that can change a number, with the arm and the number of ranks."""
        record = self.record
        observed = record.observed
        cell = record.requested.model_dump(exclude_none=True, exclude=NOT_IN_A_CELL)
        if record.is_watched:  # nobody gave a script settings of ours
            cell |= observed.model_dump(exclude_none=True, include={"parameters", "tokens_per_step"})
            cell |= {"arm": record.arm, "script": record.watched.script}
        if cell.get("optimizer") == FIRST_OPTIMIZER:
            del cell["optimizer"]
        if observed.data_checksum:  # it identifies the rows, so their folder does not matter
            cell |= {name: Path(cell[name]).name for name in ("data", "tokenizer") if name in cell}
        return cell | observed.model_dump(exclude_none=True, include={"ranks", "allocator"})

    def key(self, without: Iterable[str] = ()) -> str:
        """Return the only definition of the same cell: equal keys mean equal cells, except for what is left out."""
        return json.dumps({name: self.cell[name] for name in sorted(self.cell.keys() - set(without))}, default=str)

    @functools.cached_property
    def machine(self) -> dict[str, Any]:
        """Return the only definition of the same machine: hardware, versions and commit, which may change a number."""
        record = self.record
        hardware = record.hardware
        host_bytes = hardware.host_memory_bytes
        commit = record.commit
        if commit:
            # Two changed trees of one commit cannot be distinguished: they count as one, marked as changed.
            commit = commit[:12] + (" changed" if record.dirty else "")
        fields = {
            "machines": len(record.machines) or None,
            "devices": hardware.gpus_line,
            **hardware.model_dump(include={"cpu", "cores", "driver"}),
            # In GiB: the exact bytes differ from boot to boot.
            "host GiB": round(host_bytes / 2**30) if host_bytes else None,
            **dict(sorted(record.software.items())),
            "measure_version": record.measure_version,
            "commit": commit,
        }
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class Runs:
    """The runs below some folders, and a sentence for each record that cannot be used."""

    runs: tuple[Run, ...]
    set_aside: tuple[str, ...] = ()
    copies: int = 0  # records of runs that are already included
    folders: tuple[Path, ...] = ()
    environments: dict[str, dict] = field(default_factory=dict)  # machines of finished runs, by letter

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

    def select(self, **wanted) -> "Runs":
        """Return the runs that have all of these: `select(arm=["ddp", "zero2"])`. A list means any of them."""
        chosen = self.runs
        for name, value in wanted.items():
            choices = value if isinstance(value, (list, tuple)) else [value]
            chosen = tuple(run for run in chosen if run.facts[name] in choices)
        return replace(self, runs=chosen)

    def rows(self) -> list[dict]:
        """Return a row for each run, as `study runs` shows it."""
        rows = []
        for run in self.runs:
            record = run.record
            row = {"run": run.folder.name}
            row |= {name: run.facts[name] for name in ("status", "arm", "task", "precision", "ranks", "stage")}
            if run.kind == "virtual":
                row["ranks"] = f"{row['ranks']} virtual"
            row |= {name: metrics.value(record, quantity) for name, quantity in COLUMNS.items()}
            sizes_bytes = {
                "tracked peak MB": metrics.value(record, "tracked_peak_bytes"),
                "collectives MB": metrics.moved(record, None, "tensors"),
            }
            row |= {name: size / 1e6 if size else size for name, size in sizes_bytes.items()}
            rows.append(row | {name: run.facts[name] for name in ("model", "micro_batch")})
        return rows


def load(
    folders: str | Path | Iterable[str | Path], every_folder_has_runs: bool = False, to_share: bool = False
) -> Runs:
    """Return every run below the folders, once. Several folders are given as a list, or as one text with commas.

    With `every_folder_has_runs`, raise Stop for one without. With `to_share`, take private information out of records.
    """
    if isinstance(folders, (str, Path)):
        folders = [part.strip() for part in str(folders).split(",") if part.strip()]
    tops = tuple(map(Path, folders))
    set_aside = [f"{top} is not a folder" for top in tops if not top.is_dir()]
    # --- the same run may lie in several folders: in runs/, and kept in reports/
    by_identity: dict[str, Run] = {}
    copies = 0
    for folder in _run_folders(tops, every_folder_has_runs):
        try:
            record = store.load(folder)
        except Stop as stop:
            set_aside.append(f"{stop.what}. {stop.remedy}")
            continue
        if record.status == "running":
            set_aside.append(f"{folder} is half-written: it is still running, or was killed. Run that cell again")
        if record.identity in by_identity:
            copies += 1
        else:
            by_identity[record.identity] = Run(folder, _with_settings(shared(record) if to_share else record))
    runs, environments = _by_environment([*by_identity.values()])
    # --- in the order in which tables and figures show arms; one that is no longer an arm comes last
    runs.sort(key=lambda run: ((*NAMES, run.record.arm).index(run.record.arm), run.record.arm, run.record.run_id))
    return Runs(tuple(runs), tuple(set_aside), copies, tops, environments)


def kept(*protocols: str) -> Runs:
    """Return the records of protocols that this repository keeps of a machine with two CPU cores."""
    return _kept(*(KEPT / protocol for protocol in protocols))


@functools.cache
def _kept(*folders: Path) -> Runs:
    found = load(folders, to_share=True)
    return replace(found, runs=tuple(replace(run, mark=" (kept)") for run in found))


@functools.cache
def kept_as_evidence() -> tuple[Run, ...]:
    """Return all records that this repository keeps and that count as evidence. They are read once."""
    return tuple(load([ROOT / "reports"]).counting)


def _run_folders(tops: Iterable[Path], every_folder_has_runs: bool) -> Iterable[Path]:
    """Return each run folder once, however it was named."""
    paths: dict[Path, None] = {}
    for top in tops:
        below = store.run_folders(top)
        if every_folder_has_runs and not below:
            raise Stop(f"there is no run below {top}", "name a folder that holds run folders")
        paths |= dict.fromkeys(path.resolve() for path in below)
    return paths


def _by_environment(runs: list[Run]) -> tuple[list[Run], dict[str, dict]]:
    """Return the runs with the letters of their machines, and the machines by letter."""
    machines = dict.fromkeys(json.dumps(run.machine) for run in runs if run.record.status == "done")
    letters = dict(zip(machines, LETTERS, strict=False))
    # A run that failed has the letter of one that finished on its machine, or none.
    lettered = [replace(run, environment=letters.get(json.dumps(run.machine), "")) for run in runs]
    return lettered, {letter: json.loads(machine) for machine, letter in letters.items()}


def keep(folders: list[Path], into: Path) -> tuple[int, list[str]]:
    """Copy the record of every run below the folders. Return their number and why others were left out.

    A run keeps its path relative to the given folder, under that folder's name. An earlier copy is replaced. If two
    runs would get the same path, the second is left out.
    """
    left_out: list[str] = []
    kept: set[Path] = set()
    for top in map(Path.resolve, folders):
        loaded = load([top], every_folder_has_runs=True)
        left_out += loaded.set_aside
        for run in loaded:
            target = into / "runs" / top.name / run.folder.relative_to(top)
            if target in kept:
                left_out.append(f"{run.folder} would be kept as {target}, where another run is: rename a folder")
            elif run.record.status != "running":
                kept.add(target)
                store.write(target, shared(store.load(run.folder)))  # what `load` returns has settings of a watched run
    return len(kept), left_out


def _with_settings(record: Record) -> Record:
    """Return a record whose settings, if it is of a user's own script, are what was observed of that."""
    if not record.is_watched:
        return record
    observed = record.observed
    weights = observed.dtypes.get("weights")
    # ZeRO makes its fp32 copy of fp32 weights as well (zero/stage_1_and_2.py:560): that is no other precision.
    # bf16_cast is DeepSpeed's way: weights in bfloat16, and an fp32 copy of them in the optimizer.
    recipes: dict[tuple, str] = {
        ("float32", None): "fp32",
        ("float32", "float32"): "fp32",
        ("bfloat16", "float32"): "bf16_cast",
    }
    settings = {
        "model": record.watched.model,
        "precision": observed.autocast or recipes.get((weights, observed.dtypes.get("master"))) or weights,
        "micro_batch": record.watched.rows_per_pass,
        "accumulation": observed.accumulation,
    }
    return record.model_copy(update={"requested": record.requested.model_copy(update=settings)})
