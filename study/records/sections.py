"""The sections of a record: what was asked for, what ran, on what machine, and what it took.

An unknown value is None, or an empty list or section; it is never 0, -1 or infinity. Fields of older records that are
not declared here are ignored.
"""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    create_model,
)

from study.core.recipes import Precision
from study.core.settings import TrainerFlags

MAX_CHARACTERS = 1_000_000  # of a text: our longest has 152, and an argument of a command line at most 131,072
# Unknown is None.
Int = int | None
Float = float | None
Text = str | None
Flag = bool | None
# Values that no run can have make a record invalid, so that it is set aside by its name. A tensor may have no bytes,
# but no process runs without memory, and no step takes no time.
Bytes = NonNegativeInt | None
Peak = PositiveInt | None


class Section(BaseModel):
    """A section of a record. It is empty if nothing in it is known."""

    model_config = ConfigDict(protected_namespaces=(), allow_inf_nan=False, str_max_length=MAX_CHARACTERS)


# The types of the flags without their bounds: a refused value is recorded as it was given, and a path as a text. Any
# setting may be unknown in an older record.
SETTINGS: dict[str, Any] = {
    name: (Text if Path in (hint, *get_args(hint)) else hint | None, None)
    for name, hint in get_type_hints(TrainerFlags).items()
}
_Settings: Any = create_model("_Settings", __base__=Section, **SETTINGS)


class Requested(_Settings):
    """What was asked for: every setting of the trainer, the arm, and the published script's repair."""

    arm: Text = None
    config_file: Text = None
    repair: Text = None
    precision: Precision | Literal["fp8"] | None = None  # fp8: of older records
    train_only: Text = None  # of records that froze all weights but those with a name that it matches
    hosts: Int = None  # with bandwidth_mbit: of records over an emulated network; no run sets them any more
    bandwidth_mbit: float | Literal["unlimited"] | None = None
    checkpoint_every: Int = None  # of records that saved checkpoints and resumed, which takes time


class Promised(Section):
    """What a user's own script, its config files and its launcher ask for, before anything is prepared.

    Empty in a run of this study's trainer, where the arm and the settings say it. None: not specified.
    """

    source: Text = None  # where it was read: "Accelerate's environment", a file's name, "TrainingArguments"
    ranks: Int = None  # WORLD_SIZE
    deepspeed: Flag = None
    fsdp: Flag = None
    stage: Int = None
    offload_optimizer: Text = None
    offload_param: Text = None
    clipping: Float = None  # 0: off
    accumulation: Int = None
    precision: Text = None  # "no", "bf16", "fp16" or "fp8"
    checkpointing: Flag = None


class Targets(Section):
    """What entered the loss in the micro-batches that a watch has read on the first rank. Counts are sums."""

    read: int = 0  # micro-batches
    probabilities: Text = None  # the function that made them of what the loss takes for logits
    no_logarithms: int = 0  # micro-batches whose nll_loss got no logarithms of probabilities
    mixed: int = 0  # micro-batches whose classes and places were exchanged by a view
    broadcast: int = 0  # micro-batches whose loss compared each result with each target
    counted: int = 0  # targets
    ignored: int = 0  # targets, by their value
    without_targets: int = 0  # micro-batches whose targets are all ignored
    uniform: list[int] = []  # the class of each micro-batch that has one class alone
    # --- of tokens
    rows: int = 0
    rows_ignored: int = 0  # of a language model, whose targets are all ignored
    compared: list[int] = [0, 0, 0]  # targets with the input at their own place, the next one, and the one after it
    equal: list[int] = [0, 0, 0]
    padding: int = 0  # targets that count, and are padding
    padded: int = 0  # tokens that are padding
    unmasked: int = 0  # micro-batches in which tokens see padding
    tokens: int = 0  # that are no padding
    hidden: int = 0  # of them, those that attention_mask hides
    two_starts: int = 0  # rows that begin with two tokens for the beginning
    ends: int = 0  # of texts, in the inputs of a language model
    ends_learned: int = 0  # that are targets that count
    unknown: int = 0  # tokens for words that the tokenizer does not know
    positions_alike: int = 0  # micro-batches whose position_ids are one number in each row


class Watched(Section):
    """A user's own script under `study.watch`. Empty in a run of this study's own scripts."""

    script: Text = None
    model: Text = None  # its class
    looked_at: list[int] = []  # the steps with instruments, counted from 1; they are not timed
    rows_per_pass: Int = None  # of one rank; None if they differ
    clip_grad_norm: Float = None  # the value that the script gave clip_grad_norm_; DeepSpeed ignores it
    loss_parts: Int = None  # the library divides the loss of each pass by it
    loss_divisor: Float = None  # the script's own last division of a loss, before the library's
    loss_divisors: list[float] = []  # all of them, the last one first
    targets: Targets = Targets()
    head: Text = None  # the last layer with weights
    head_trains: Flag = None
    head_alone_trains: Flag = None
    head_unchanged: bool = False
    frozen_untrained: Flag = None  # frozen weights are as a library makes them, before any training
    units_alike: list[str] = []  # three of the weights whose rows were all the same at the end
    loss_negated: Flag = None  # what it is of a function of torch's whose small values are good
    loss_base: Text = None  # what they divide: a "mean", a "sum", or the "items" of a sum that was divided
    passes_cleared: Int = None  # passes of a step whose gradients were cleared before the update
    updates_beside_others: int = 0  # that came after one of another model
    updates_without_model: int = 0  # the last ones, before which it did not run, and had no gradients
    evaluations: int = 0  # between updates
    moved_in_evaluation: int = 0  # of them, those that left other weights
    moved_besides: int = 0  # of the first steps, those whose weights the last update did not leave
    random_states: list[str] = []  # of the first passes with dropout: what its random numbers begin with
    gradient_factor: Float = None  # of an update over the sum of those of all ranks: 1 is their sum
    trained_share: Float = None  # of the parameters, at the last update
    rows_per_rank: list[int] = []  # of a step
    inputs_per_rank: list[list[str]] = []  # shapes and digests of the inputs of the first passes
    optimized_tensors: Int = None  # of the model, which the optimizer updates; None under DeepSpeed, which cuts them
    not_optimized_tensors: Int = None  # that train, and that the optimizer lacks
    without_gradient_tensors: Int = None  # that train, and got no gradient by the first update
    without_gradient: list[str] = []  # the names of three of them
    layers_in_evaluation: int = 0  # of dropout and batch norm, at a rehearsal's first update
    schedule_steps_in_update: Int = None  # of the scheduler
    schedule_length: Int = None  # its steps until it ends
    passes_in_epoch: Int = None
    data_rows: Int = None
    largest_rates: list[float] = []  # the largest learning rate of each rank
    weights_sums: list[float] = []  # of the weights of each rank that train, at the end
    has_adapters: Flag = None
    adapters_train: Flag = None  # some weight of PEFT's layers; None without any
    is_trainer: Flag = None  # of transformers
    unchanged_parameters: Int = None  # that should train, and are at the end what they were
    unchanged: list[str] = []  # the names of three of them, the largest first
    resumed_in: Int = None  # the step of the checkpoint that a Trainer goes on from
    moments_lost: bool = False  # its optimizer keeps states, and began without any
    passes_without_update: Int = None  # since the last update
    updates_by_another: int = 0  # optimizer, of weights that the watched one has
    gradients_kept: int = 0  # of the first steps, those that began with gradients of the step before
    without_gradients: int = 0  # of the first steps, those that updated by gradients of zeros
    usual_norm: Float = None  # of what is clipped: the median
    largest_decay: Float = None  # weight decay times learning rate
    clipped_scaled: Flag = None  # gradients were clipped that a GradScaler had scaled
    clipped_part: Flag = None  # FSDP1's parts of gradients were clipped by the norm of this rank's alone
    loss_unscaled: Flag = None  # in fp16, without a scale
    has_schedule: Flag = None
    schedule_steps: int = 0
    other_schedule_steps: int = 0  # of schedules of other optimizers
    orders_repeated: int = 0  # epochs that began with the batches of an earlier one
    evaluated_on_trained: Flag = None  # on the data set of the training
    evaluations_in_training: int = 0  # with dropout on
    tie_lost: bool = False  # of the first and last weights, which the model's config ties


class CellOfRun(Section):
    """The place of a run in a protocol. All None for a run that was started by hand."""

    protocol: Text = None
    part: Text = None
    scale: Text = None
    repeat: Int = None


class ScriptTraining(Section):
    """One training of document S002's published script, which runs several in one process."""

    name: str
    batch: int
    weights_from: Text = None
    optimizer: Text = None
    steps: PositiveInt
    training_s: PositiveFloat
    peak_bytes: Peak = None
    losses: Annotated[list[float], Field(min_length=1)]
    evals: list[dict[str, float]] = []
    deepspeed_initialize_calls: Int = None


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

    arm: Text = None
    distributed_type: Text = None
    device: Text = None
    ranks: Annotated[int, Field(gt=0, le=65536)] | None = None
    ranks_counted: Int = None  # the number of ranks in a real collective
    virtual_ranks: Int = None
    backend: Text = None
    wrapper: Text = None
    optimizer: Text = None
    optimizer_settings: dict = {}
    stage: Int = None
    offload_optimizer: Text = None
    offload_param: Text = None
    clipping: Float = None
    accumulation: Int = None
    bucket_elements: Int = None
    bucket_bytes: Int = None
    overlap: Flag = None
    deepspeed: dict | None = None  # the config that the engine resolved
    fsdp: dict | None = None  # units, mesh, policies; None without FSDP2
    attention: Text = None
    checkpointing: Flag = None
    compiled: Flag = None
    threads: Int = None
    autocast: Text = None
    loss_scale: Float = None
    tf32: Flag = None
    allocator: Text = None  # what the environment asks of PyTorch's: 2.9.1 ignores one of its two names
    parameters: PositiveInt | None = None
    held_parameters: Int = None
    trained_parameters: Int = None  # None in records before weights could be frozen
    held_parameters_per_rank: list[int] = []
    second_partition_ranks: Int = None  # ranks that share a second copy of the weights; None without hpZ
    second_partition_parameters: Int = None  # elements of that copy on this rank at the update
    sequence_ranks: Int = None  # ranks that share rows, each with a part of the tokens; None without Ulysses
    tensor_ranks: Int = None  # ranks that divide each layer among themselves; None without AutoTP
    built_in_parts: Flag = None  # stage 3: no rank ever held the whole model
    dtypes: dict[str, str | None] = {}
    steps: Int = None
    rows_per_step: PositiveInt | None = None
    tokens_per_step: Int = None
    learning_rates: list[float] = []
    weights_checksum: Text = None  # before the first step
    data_checksum: Text = None
    data_source: Text = None
    memory_cap: MemoryCap | None = None
    saved: Saved | None = None
    patches: list[str] = []  # names of the study's patches to libraries
    instruments_failed: Text = None  # why the instruments gave no numbers
    save_failed: Text = None
    runs: list[ScriptTraining] = []
    logging_steps: Int = None

    @property
    def offloads(self) -> dict[str, str]:
        """Where parts of the state are, if not on the device."""
        homes = {"optimizer": self.offload_optimizer, "weights": self.offload_param}
        return {part: home for part, home in homes.items() if home not in (None, "none")}


class Device(Section):
    name: str
    memory_bytes: int


class HardwareOfRun(Section):
    """The machine, without its name or address."""

    devices: list[Device] = []
    driver: Text = None
    cpu: Text = None
    cores: Int = None
    host_memory_bytes: Int = None
    system: Text = None
    calibration: dict | None = None  # the machine.json that ZERO_STUDY_MACHINE named

    @property
    def gpus_line(self) -> str:
        """Return the GPUs in words: "2 x NVIDIA H200", or "no GPU"."""
        counts = Counter(device.name for device in self.devices)
        return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "no GPU"


class Machine(Section):
    """One machine of a run on several."""

    ranks: list[int] = []
    hardware: HardwareOfRun = HardwareOfRun()


class Evaluation(Section):
    """Loss and metric of an evaluation, after `step` optimizer steps."""

    step: int
    eval_loss: float
    accuracy: Annotated[float, Field(ge=0, le=1)] | None = None
    perplexity: Float = None


class Loss(Section):
    """Losses averaged over ranks. A virtual run has none."""

    train: list[float] = []
    eval: list[Evaluation] = []


class Time(Section):
    """Seconds of the timed steps."""

    setup_s: NonNegativeFloat | None = None
    step_s: list[PositiveFloat] = []  # of each step, on its slowest rank
    window_s: PositiveFloat | None = None  # wall time of all timed windows
    flops_per_rank_and_step: Float = None


class RankMemory(Section):
    """Peaks of one rank. The device's are None without a GPU."""

    peak_allocated_bytes: Peak = None
    peak_reserved_bytes: Peak = None
    device_used_bytes: Peak = None
    host_peak_bytes: Peak = None
    nvme_read_bytes: Bytes = None
    nvme_written_bytes: Bytes = None


class RankComponents(Section):
    """One rank's memory at the peak of a step and after it, by component, in bytes."""

    at_peak: dict[str, NonNegativeInt] | None = None
    after_step: dict[str, NonNegativeInt] = {}
    tracked_peak_bytes: PositiveInt
    tracked_peak_step_before_bytes: Bytes = None
    allocator_peak_bytes: Bytes = None  # of the same step; includes what libraries allocate


class Components(Section):
    per_rank: list[RankComponents] = []


class Memory(Section):
    per_rank: list[RankMemory] = []
    components: Components = Components()


class Collective(Section):
    """Calls and bytes of one kind of collective in one step. Bytes are those of the full tensor."""

    calls: NonNegativeInt
    bytes: NonNegativeInt
    bytes_by_dtype: dict[str, NonNegativeInt]
    # By the ranks that take part, such as "0 2", if not all do.
    bytes_by_group: dict[Annotated[str, Field(pattern=r"^\d{1,5}( \d{1,5})*$")], NonNegativeInt] = {}

    def by_ranks(self, ranks: int) -> dict[tuple[int, ...], int]:
        """Return bytes by the ranks that take part, of `ranks` in all. Those of no named group went among all ranks."""
        groups = {tuple(map(int, group.split())): size for group, size in self.bytes_by_group.items()}
        return {tuple(range(ranks)): self.bytes - sum(groups.values())} | groups


class Traffic(Section):
    per_rank: list[dict[str, Collective]] = []
    kernel_bytes_written: list[NonNegativeInt | None] = []


class Error(Section):
    """Why a run is not done."""

    kind: str
    message: str
    where: Text = None
    what_to_do: str
