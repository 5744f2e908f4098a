"""Defines the record of a run: every section and field that `record.json` may have.

A record holds what was measured. `study.records.metrics` computes what follows from it. An unknown value is None, or an
empty list or section; it is never 0, -1 or infinity. Fields of older records that are not declared here are ignored.
"""

import datetime
import re
from collections import Counter
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from study.core.errors import Stop
from study.core.files import safe_name

MAX_CHARACTERS = 1_000_000  # of a text: our longest has 152, and an argument of a command line at most 131,072
SCHEMA = 3  # 2: also values that follow from others. 1: no `cell`; sections that were not written are null
# Raise this number when the way of measuring changes: records of two versions are not pooled.
# 2: the tracked memory of a stage 3 run no longer contains the copy that gloo makes for a reduce-scatter.
# 3: rates divide by the wall time of the timed windows, not by the sum of the slowest rank's steps.
MEASURE_VERSION = 3

# How a run ended. oom: of the device, or of its host. killed: by a signal. An error says why a run is not done.
Status = Literal["running", "done", "failed", "oom", "killed", "timeout", "diverged"]
OLD_ENDINGS = {"host_oom": "oom", "interrupted": "killed", "unavailable": "failed"}  # in older records
MEASURED = ("loss", "time", "memory", "traffic", "energy")
NEEDED_WHEN_DONE = ("finished_utc", "requested", "observed", "hardware", "software", "time", "loss")
KNOWN_OF_ANY_SCRIPT = ("finished_utc", "observed", "hardware", "software")  # losses may be unknown to the watch

# Values that no run can have make a record invalid, so that it is set aside by its name.
Positive = Annotated[int, Field(gt=0)]  # tables divide by it
Bytes = Annotated[int, Field(ge=0)]
Peak = Annotated[int, Field(gt=0)]  # no process runs without memory
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
StepSeconds = Annotated[float, Field(gt=0)]  # no step takes no time


class Section(BaseModel):
    """A section of a record. It is empty if nothing in it is known."""

    model_config = ConfigDict(protected_namespaces=(), allow_inf_nan=False, str_max_length=MAX_CHARACTERS)


def _safe_name(name: str) -> str:
    """A run's name, which becomes a file name in a report, so it must not lead out of a folder."""
    try:
        return safe_name(name)
    except Stop as stop:
        raise ValueError(stop.what) from None


class Requested(Section):
    """What was asked for: every setting of the trainer, the arm, and the published script's repair.

    The types are those of the settings, without their bounds: a refused value is recorded as it was given. Paths are
    texts. All can be None, because records of older commits lack newer settings.
    """

    arm: str | None = None
    config_file: str | None = None
    repair: str | None = None
    task: Literal["imdb", "wikitext", "synthetic"] | None = None
    model: str | None = None
    trust_remote_code: bool | None = None
    tokenizer: str | None = None
    data: str | None = None
    init: Literal["pretrained", "random", "in_place", "none"] | None = None
    precision: Literal["fp32", "bf16", "fp16", "bf16_cast", "bf16_pure", "fp8"] | None = None
    optimizer: Literal["adamw", "adamw_8bit", "sgd", "adafactor", "muon"] | None = None
    lora_rank: int | None = None
    train_only: str | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    epochs: float | None = None
    steps: int | None = None
    warmup_steps: int | None = None
    log_every: int | None = None
    eval_every: int | None = None
    checkpoint_every: int | None = None
    dies_after: int | None = None
    resume: str | None = None
    sequence: int | None = None
    train_rows: int | None = None
    eval_rows: int | None = None
    lr: float | None = None
    lr_warmup_steps: int | None = None
    weight_decay: float | None = None
    dropout: float | None = None
    seed: int | None = None
    compile: bool | None = None
    checkpointing: bool | None = None
    attention: Literal["sdpa", "eager"] | None = None
    tf32: bool | None = None
    instruments: bool | None = None
    log_with: Literal["tensorboard", "trackio", "wandb", "mlflow", "comet_ml", "aim", "clearml"] | None = None
    save: bool | None = None
    threads: int | None = None
    virtual_ranks: int | None = None
    memory_cap_gib: float | None = None
    hosts: int | None = None  # with bandwidth_mbit: of records over an emulated network; no run sets them any more
    bandwidth_mbit: float | Literal["unlimited"] | None = None
    run_dir: str | None = None
    nvme_dir: str | None = None
    cache_dir: str | None = None


class Promised(Section):
    """What a user's own script, its config files and its launcher ask for, before anything is prepared.

    Empty in a run of this study's trainer, where the arm and the settings say it. None: not specified.
    """

    source: str | None = None  # where it was read: "Accelerate's environment", a file's name, "TrainingArguments"
    ranks: int | None = None  # WORLD_SIZE
    deepspeed: bool | None = None
    fsdp: bool | None = None
    stage: int | None = None
    offload_optimizer: str | None = None
    offload_param: str | None = None
    clipping: float | None = None  # 0: off
    accumulation: int | None = None
    precision: Literal["no", "bf16", "fp16", "fp8"] | None = None
    weights: str | None = None  # the dtype of the model before it was prepared: "bfloat16"
    optimizer: str | None = None  # its class before it was prepared
    checkpointing: bool | None = None


class Watched(Section):
    """A user's own script under `study.watch`. Empty in a run of this study's own scripts."""

    script: str | None = None
    loop: str | None = None  # the kind of loop: accelerate, deepspeed, torch, or the class of a Trainer
    model: str | None = None  # its class
    looked_at: list[int] = []  # the steps with instruments, counted from 1; they are not timed
    not_timed: list[int] = []  # other steps without a time: the first ones, and those with an evaluation
    rows_per_pass: int | None = None  # of one rank; None if they differ
    timed_rows: int | None = None  # of all ranks, in the timed steps
    timed_tokens: int | None = None
    clip_grad_norm: float | None = None  # the value that the script gave clip_grad_norm_; DeepSpeed ignores it
    host_freed_bytes: list[int] = []  # of each rank: its highest resident memory before the loop, less that then
    loss_parts: int | None = None  # the library divides the loss of each pass by it
    loss_divisor: float | None = None  # the script's own last division of a loss, before the library's
    passes_cleared: int | None = None  # passes of a step whose gradients were cleared before the update
    rows_per_rank: list[int] = []  # of a step
    inputs_per_rank: list[list[str]] = []  # shapes and digests of the inputs of the first passes


class Cell(Section):
    """The place of a run in a protocol. All None for a run that was started by hand."""

    protocol: str | None = None
    part: str | None = None
    scale: str | None = None
    repeat: int | None = None


class ScriptTraining(Section):
    """One training of document 002's published script, which runs several in one process."""

    name: str
    batch: int
    weights_from: str | None = None
    trained_by: str | None = None
    optimizer: str | None = None
    arguments_say_deepspeed: bool | None = None
    steps: int
    training_s: float
    checkpoint_bytes: int | None = None
    peak_bytes: int | None = None
    printed_peak_bytes: int | None = None
    losses: list[float]
    evals: list[dict[str, float]] = []
    deepspeed_initialize_calls: int | None = None


class MemoryCap(Section):
    """A smaller device, emulated."""

    bytes: int
    emulated_by: str


class Saved(Section):
    """The files that `--save` wrote."""

    bytes: int
    parameters: int
    dtypes: list[str]


class Observed(Section):
    """What really ran, read back from the prepared objects. No value is copied from the settings."""

    arm: str | None = None
    distributed_type: str | None = None
    device: str | None = None
    ranks: Positive | None = None
    ranks_counted: int | None = None  # the number of ranks in a real collective
    virtual_ranks: int | None = None
    backend: str | None = None
    wrapper: str | None = None
    optimizer: str | None = None
    optimizer_settings: dict = {}
    stage: int | None = None
    offload_optimizer: str | None = None
    offload_param: str | None = None
    clipping: float | None = None
    accumulation: int | None = None
    bucket_elements: int | None = None
    bucket_bytes: int | None = None
    overlap: bool | None = None
    deepspeed: dict | None = None  # the config that the engine resolved
    fsdp: dict | None = None  # units, mesh, policies; None without FSDP2
    attention: str | None = None
    checkpointing: bool | None = None
    compiled: bool | None = None
    threads: int | None = None
    autocast: str | None = None
    loss_scale: float | None = None
    tf32: bool | None = None
    parameters: Positive | None = None
    held_parameters: int | None = None
    trained_parameters: int | None = None  # None in records before weights could be frozen
    held_parameters_per_rank: list[int] = []
    second_partition_ranks: int | None = None  # ranks that share a second copy of the weights; None without hpZ
    second_partition_parameters: int | None = None  # elements of that copy on this rank at the update
    sequence_ranks: int | None = None  # ranks that share rows, each with a part of the tokens; None without Ulysses
    tensor_ranks: int | None = None  # ranks that divide each layer among themselves; None without AutoTP
    built_in_parts: bool | None = None  # stage 3: no rank ever held the whole model
    linear_parameters_kept: int | None = None  # stage 3: gathered, and kept for the backward pass
    dtypes: dict[str, str | None] = {}
    steps: int | None = None
    rows_per_step: Positive | None = None
    tokens_per_step: int | None = None
    learning_rates: list[float] = []
    weights_checksum: str | None = None  # before the first step
    final_weights_checksum: str | None = None  # after the last one, of a run with checkpoints
    data_checksum: str | None = None
    data_source: str | None = None
    memory_cap: MemoryCap | None = None
    saved: Saved | None = None
    trackers: list[str] = []
    patches: list[str] = []  # names of the study's patches to libraries
    instruments_failed: str | None = None  # why the instruments gave no numbers
    save_failed: str | None = None
    runs: list[ScriptTraining] = []
    logging_steps: int | None = None


class Device(Section):
    name: str
    memory_bytes: int


class Hardware(Section):
    """The machine, without its name or address."""

    devices: list[Device] = []
    driver: str | None = None
    cpu: str | None = None
    cores: int | None = None
    host_memory_bytes: int | None = None
    disk_total_bytes: int | None = None
    disk_free_bytes: int | None = None
    system: str | None = None

    @property
    def gpus_line(self) -> str:
        """Return the GPUs in words: "2 x NVIDIA H200", or "no GPU"."""
        counts = Counter(device.name for device in self.devices)
        return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "no GPU"


class Machine(Section):
    """One machine of a run on several."""

    ranks: list[int] = []
    hardware: Hardware = Hardware()
    interface: str | None = None  # the network interface for its collectives


class Evaluation(Section):
    """Loss and metric of an evaluation, after `step` optimizer steps."""

    step: int
    eval_loss: float
    accuracy: float | None = None
    perplexity: float | None = None


class Loss(Section):
    """Losses averaged over ranks. A virtual run has none."""

    train: list[float] = []
    eval: list[Evaluation] = []


class Time(Section):
    """Seconds of the timed steps."""

    setup_s: Seconds | None = None
    step_s: list[StepSeconds] = []  # of each step, on its slowest rank
    window_s: StepSeconds | None = None  # wall time of all timed windows
    flops_per_rank_and_step: float | None = None


class RankMemory(Section):
    """Peaks of one rank. The device's are None without a GPU."""

    peak_allocated_bytes: Peak | None = None
    peak_reserved_bytes: Peak | None = None
    device_used_bytes: Peak | None = None
    host_peak_bytes: Peak | None = None
    host_pinned_peak_bytes: Bytes | None = None
    host_resident_bytes: Bytes | None = None
    nvme_read_bytes: Bytes | None = None
    nvme_written_bytes: Bytes | None = None


class RankComponents(Section):
    """One rank's memory at the peak of a step and after it, by component, in bytes."""

    at_peak: dict[str, Bytes] | None = None
    after_step: dict[str, Bytes] = {}
    tracked_peak_bytes: Peak
    tracked_peak_step_before_bytes: Bytes | None = None
    allocator_peak_bytes: Bytes | None = None  # of the same step; includes what libraries allocate
    tracked_mean_bytes: float | None = None


class Components(Section):
    per_rank: list[RankComponents] = []


class Memory(Section):
    setup_per_rank: list[RankMemory | None] = []  # None: a virtual rank without values
    per_rank: list[RankMemory] = []
    components: Components = Components()


class Collective(Section):
    """Calls and bytes of one kind of collective in one step. Bytes are those of the full tensor."""

    calls: Count
    bytes: Bytes
    bytes_by_dtype: dict[str, Bytes]
    bytes_by_group: dict[str, Bytes] = {}  # by the ranks that take part, such as "0 2", if not all do

    def by_ranks(self, ranks: int) -> dict[tuple[int, ...], int]:
        """Return the bytes by the ranks that take part, with so many ranks in all."""
        groups = {tuple(map(int, group.split())): size for group, size in self.bytes_by_group.items()}
        rest = self.bytes - sum(groups.values())
        return groups | ({tuple(range(ranks)): rest} if rest or not groups else {})


class Traffic(Section):
    per_rank: list[dict[str, Collective]] = []
    kernel_bytes_written: list[Bytes | None] = []


class Energy(Section):
    joules_per_rank: list[Annotated[float, Field(ge=0)] | None] = []
    steps: int | None = None


class CheckpointSaved(Section):
    """The cost of one checkpoint. It is not in the timed steps, nor in their peaks."""

    step: int  # after so many optimizer steps
    bytes: int  # of all its files
    written_bytes_per_rank: list[int | None] = []  # by the kernel's count of what each process wrote
    save_s_per_rank: list[float] = []  # in `save_state`
    seal_s: float | None = None  # the first rank's time for checksums, syncing and renaming
    peak_per_rank: list[RankMemory] = []  # while it was saved


class Resume(Section):
    """An interruption: the run that ended, and how the next run resumed from its checkpoint."""

    run_id: str  # of the run that was interrupted
    status: str | None = None  # in its record; "running" if it was killed
    reached: int | None = None  # the last step in its steps.jsonl
    step: int  # the next run resumed after this step
    arm: str  # the interrupted run's
    ranks: int
    passed_over: list[str] = []  # newer checkpoints that were not complete, and why
    random_states: bool | None = None  # whether each rank has the random states of that checkpoint
    peak_per_rank: list[RankMemory] = []  # while it was loaded


class Checkpoints(Section):
    """The checkpoints of a run, and the interruptions before it.

    Losses and rates of a resumed run cover the whole training; times, memory and energy only its last process.
    """

    saved: list[CheckpointSaved] = []
    resumes: list[Resume] = []


class Error(Section):
    """Why a run is not done."""

    kind: str
    message: str
    where: str | None = None
    what_to_do: str


class Record(Section):
    """Everything about one run."""

    schema_version: Annotated[int, Field(alias="schema")] = SCHEMA
    measure_version: int = MEASURE_VERSION
    run_id: Annotated[str, AfterValidator(_safe_name)]
    cell: Cell = Cell()
    status: Annotated[Status, BeforeValidator(lambda given: OLD_ENDINGS.get(str(given), given))] = "running"
    started_utc: str
    finished_utc: str | None = None
    commit: str | None = None
    dirty: bool | None = None
    argv: list[str] = []
    requested: Requested = Requested()
    promised: Promised = Promised()
    watched: Watched = Watched()
    observed: Observed = Observed()
    hardware: Hardware = Hardware()  # of the first rank's machine
    machines: list[Machine] = []  # empty: one machine
    software: dict[str, str | None] = {}  # the same on each machine
    loss: Loss = Loss()
    time: Time = Time()
    memory: Memory = Memory()
    traffic: Traffic = Traffic()
    energy: Energy = Energy()
    checkpoints: Checkpoints = Checkpoints()
    error: Error | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, record):
        """Read schemas 1 and 2. Schema 1 has null for unknown values, and no cell."""
        if not isinstance(record, dict):
            return record
        schema = record.get("schema", SCHEMA)
        if schema not in (1, 2, SCHEMA):
            raise ValueError(f"schema {schema!r} is not one that this version reads (1 to {SCHEMA})")
        if schema == 1:
            record = _without_nulls(record)
            record.setdefault("cell", _cell_of_folder(record))
        return record | {"schema": SCHEMA}

    @model_validator(mode="after")
    def _is_complete(self):
        """Refuse a finished run without all its sections, and a failed run without its error."""
        needed = {"done": NEEDED_WHEN_DONE, "running": ()}.get(self.status, ("error",))
        if self.status == "done" and self.is_watched:
            needed = KNOWN_OF_ANY_SCRIPT
        for name in needed:
            # A virtual run has no loss.
            if getattr(self, name) == Record.model_fields[name].default and not (name == "loss" and self.is_virtual):
                raise ValueError(f"status is {self.status}, but {name!r} is empty")
        return self

    @property
    def is_virtual(self) -> bool:
        """Return whether one rank of a group ran alone: its collectives moved nothing, and it has no loss."""
        return bool(self.observed.virtual_ranks or self.requested.virtual_ranks)

    @property
    def is_script(self) -> bool:
        """Return whether this is a run of document 002's published script, not of this study's trainer."""
        return self.requested.repair is not None or bool(self.observed.runs)

    @property
    def is_watched(self) -> bool:
        """Return whether this is a run of a user's own script."""
        return self.watched != Watched()

    @property
    def arm(self) -> str:
        """Return the arm of the settings; for a user's own script, the arm that its prepared objects are."""
        return self.requested.arm or self.observed.arm or "unknown"

    @property
    def machine_line(self) -> str:
        """Return the machine in one line: its GPUs, cores and memory."""
        hardware = self.hardware
        machines = f"{len(self.machines)} machines, each: " if self.machines else ""
        memory = f", {hardware.host_memory_bytes / 2**30:.0f} GiB" if hardware.host_memory_bytes else ""
        return f"{machines}{hardware.gpus_line}, {hardware.cores} cores ({hardware.cpu}){memory}"

    @property
    def wall_s(self) -> float | None:
        """Return the seconds from start to end; None if they cannot be subtracted, as when only one has a time zone."""
        if self.finished_utc is None:
            return None
        try:
            start = datetime.datetime.fromisoformat(self.started_utc)
            return (datetime.datetime.fromisoformat(self.finished_utc) - start).total_seconds()
        except (TypeError, ValueError):
            return None

    @property
    def identity(self) -> tuple[str, ...]:
        """Return what identifies a run, so that a copied record is not counted twice.

        It omits `run_id`, because a copy under another name is still a copy, and everything that may contain paths,
        because a kept copy has none. It includes everything that was measured, because a record with another number is
        not a copy. Start and end are known to the millisecond.
        """
        times = (self.started_utc, self.finished_utc, self.requested.arm, self.requested.seed)
        return (*map(str, times), self.model_dump_json(include=set(MEASURED)), str(self.observed.runs))


def _without_nulls(value):
    """Remove nulls. An absent field has its default, which means unknown."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return value


def _cell_of_folder(record: dict) -> dict:
    """Return the part and repeat in a run's name, for records without a cell: `<part>-<arm>-...-r1.1`."""
    name = str(record.get("run_id"))
    arm = (record.get("requested") or {}).get("arm")
    if not arm or f"-{arm}" not in name:
        return {}
    repeat = re.search(r"-r(\d+)\.\d+$", name)
    return {"part": name.split(f"-{arm}")[0], "repeat": int(repeat[1]) if repeat else None}
