"""Which arm to use on given GPUs, and with which settings. Predicted, not measured.

For each arm the search tries what an expert would try: with and without checkpointing of activations, large buckets
and then small ones, and the most rows per pass that fit, because more rows per pass never take longer. The search
knows nothing about the arms: `estimate` knows what they hold and send, and the order of `arms.NAMES` how simple they
are.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from study.errors import Stop
from study.machine.gpus import GPUS
from study.predictor import papers
from study.predictor.advice.question import Question, check
from study.predictor.architecture import parameters, trained
from study.predictor.estimate import Estimate, estimate
from study.predictor.memory import sequence, tensor
from study.predictor.memory.memory_kinds import reserve_bytes
from study.predictor.room import HOST_PROCESS_BYTES
from study.predictor.setup import Setup, distribution, trainers_name
from study.predictor.timing.steptime import Machine, StepTime, step_time
from study.spec import arms
from study.spec.arms import Arm
from study.spec.optimizers import refusal

SEPARABLE, SEPARABLE_S = 0.1, 0.005  # step times that differ by less than both together count as equal
MISS = 0.1  # a peak may be larger than predicted by this share: most published peaks on GPUs were within it
BUCKET_ELEMENTS = 50_000_000  # 100 MB in 16 bits: messages of that size come near a link's speed. Assumed
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")


@dataclass(frozen=True)
class Row:
    """An arm with its best settings, and what it is predicted to need."""

    arm: str
    fits: bool
    limit: str  # why it does not fit; if it fits, what limits its speed
    precision: str | None = None
    checkpointing: bool | None = None
    micro_batch: int | None = None  # the largest that fits
    accumulation: int | None = None
    row_ranks: int = 1  # GPUs that read the same rows, because each has a part of the sequence or of the layers
    bucket_elements: int | None = None  # None without DeepSpeed
    peak_bytes: int | None = None
    headroom_bytes: float | None = None  # after the reserve; negative if it does not fit
    components: dict[str, int] = field(default_factory=dict)  # at the peak
    host_bytes: float | None = None  # of a node, for all its ranks
    sent_bytes: float | None = None  # by a rank on the link, in a step
    step_s: float | None = None
    step_interval_s: tuple[float, float] | None = None
    tokens_per_s: float | None = None

    @property
    def is_tight(self) -> bool:
        """Whether it fits only if the prediction is accurate."""
        return self.headroom_bytes < MISS * self.peak_bytes

    @property
    def simplicity(self) -> tuple[int, bool]:
        """Smaller is simpler."""
        return arms.NAMES.index(self.arm), self.checkpointing

    @property
    def offloads(self) -> bool:
        return arms.load_arm(self.arm).offload_optimizer != "none"

    @property
    def drawbacks(self) -> int:
        return self.offloads + self.is_tight


@dataclass(frozen=True)
class Advice:
    """Every arm, and which one to use."""

    question: Question
    rows: tuple[Row, ...]
    choice: Row | None  # None: nothing fits
    alternative: Row | None  # the simplest arm that fits; if that is the choice, the best of the others


def advise(question: Question) -> Advice:
    """Every arm as a row, and the choice."""
    check(question)
    rows = tuple(best_of_arm(question, arms.load_arm(name)) for name in arms.NAMES)
    fitting = [row for row in rows if row.fits]
    if "single" in {row.arm for row in fitting}:  # one GPU shares nothing: there, only offloading can help
        fitting = [row for row in fitting if row.arm == "single" or row.offloads]
    choice = best_of(fitting)
    others = [row for row in fitting if row is not choice]
    simpler = [row for row in others if row.simplicity < choice.simplicity]
    return Advice(question, rows, choice, min(simpler, key=lambda row: row.simplicity) if simpler else best_of(others))


def best_of(rows: list[Row]) -> Row | None:
    """The simplest of the rows whose predicted time counts as equal to the fastest.

    Rows with fewer drawbacks come first. Barely fitting is a drawback. So is offloading, because the speed of the host
    is unknown.
    """
    if not rows:
        return None
    fewest = min(row.drawbacks for row in rows)
    rows = [row for row in rows if row.drawbacks == fewest]
    longest_s = (1 + SEPARABLE) * min(row.step_s for row in rows) + SEPARABLE_S
    return min((row for row in rows if row.step_s <= longest_s), key=lambda row: row.simplicity)


def best_of_arm(question: Question, arm: Arm) -> Row:
    """The best setting of an arm; if none fits, the one that comes closest."""
    if arm.distributed_type == "NO" and question.gpus > 1:
        return Row(arm.name, False, "one GPU only")
    if arm.uses_nvme and question.disk_bytes_per_s is None:
        return Row(arm.name, False, "no disk")
    if arm.divides_ranks and (question.gpus <= question.local or question.local == 1):
        return Row(arm.name, False, "one node" if question.gpus <= question.local else "one GPU a node")
    if arm.row_ranks > 1:
        among = [ranks for ranks in (2, 4, 8) if not why_alone(question, arm, ranks)]
        rows = [_best(question, sharing_rows(arm, ranks)) for ranks in among]
        fitting = [row for row in rows if row.fits]
        return best_of(fitting) or (rows[-1] if rows else Row(arm.name, False, why_alone(question, arm, 2)))
    return _best(question, on_nodes(arm, question))


def why_alone(question: Question, arm: Arm, ranks: int) -> str | None:
    """Why so many GPUs cannot share rows or layers. They must be in one node, as each layer waits for the others."""
    if question.local % ranks:
        return "one GPU" if question.gpus == 1 else "GPUs in a node"
    if arm.tensor_ranks > 1:
        return "its layers" if tensor.refusal(question.model, ranks) else None
    return "attention" if question.sequence % ranks or sequence.refusal(question.model, ranks) else None


def sharing_rows(arm: Arm, ranks: int) -> Arm:
    """The arm with `ranks` GPUs for the same rows."""
    if arm.sequence_ranks > 1:
        return replace(arm, sequence_ranks=ranks)
    return replace(arm, deepspeed=arm.deepspeed | {"tensor_parallel": {"autotp_size": ranks}})


def _best(question: Question, arm: Arm) -> Row:
    """The best setting of an arm on these GPUs."""
    precision = question.precision or usual_precision(arm)
    if refusal(arm, trainers_name(question.optimizer), precision):
        return Row(arm.name, False, "its optimizer", precision)
    if (states := least_bytes(question, arm, precision)) > GPUS[question.gpu].memory_bytes:
        return Row(arm.name, False, "GPU memory", precision, peak_bytes=states)
    tried = []
    ways = (True, False) if question.model.has_checkpointing else (False,)
    for checkpointing in ways if question.checkpointing is None else (question.checkpointing,):
        settled = replace(question, precision=precision, checkpointing=checkpointing)
        tried += [most_rows(settled, each, miss) for miss in (MISS, 0) for each in with_buckets(arm)]
        if not any(row.headroom_bytes >= 0 for row in tried):
            break  # without checkpointing it would need more; tracing a model takes seconds for each setting
    return best_of([row for row in tried if row.fits]) or max(tried, key=lambda row: row.headroom_bytes)


def on_nodes(arm: Arm, question: Question) -> Arm:
    """The arm with groups of ranks as large as the nodes, if it has groups."""
    if arm.replicas > 1:
        return replace(arm, replicas=max(2, question.gpus // question.local))
    if not arm.divides_ranks:
        return arm
    zero = arm.deepspeed["zero_optimization"] | {"zero_hpz_partition_size": question.local}
    return replace(arm, deepspeed=arm.deepspeed | {"zero_optimization": zero})


def usual_precision(arm: Arm) -> str:
    """DeepSpeed keeps fp32 master copies of 16-bit weights. Without it Accelerate keeps the weights in fp32."""
    return "bf16_cast" if arm.deepspeed else "bf16"


def least_bytes(question: Question, arm: Arm, precision: str) -> int:
    """Bytes of model states that an arm keeps on a GPU. If they do not fit, the arm does not fit."""
    if arm.offload_optimizer != "none":
        return 0
    stage, trains = 3 if arm.fsdp else arm.stage or 0, trained(question.model)
    ranks, recipe = arm.sharing_ranks(question.gpus), papers.recipe_of(precision, question.optimizer)
    states = sum(papers.states_bytes(trains, stage, ranks, recipe).values())
    frozen = (parameters(question.model) - trains) / (ranks if stage == 3 else 1)
    return int(states + frozen * (2 if question.frozen == "bf16" else papers.RECIPES[recipe][0]))


def with_buckets(arm: Arm) -> Iterator[Arm]:
    """The arm with large buckets, then with its own."""
    zero = (arm.deepspeed or {}).get("zero_optimization", {})
    if large := {name: BUCKET_ELEMENTS for name in BUCKETS if name in zero}:
        yield replace(arm, deepspeed=arm.deepspeed | {"zero_optimization": zero | large})
    yield arm


def most_rows(question: Question, arm: Arm, miss: float) -> Row:
    """The row with the most rows per pass that fit even if the peak is larger by the share `miss`; at least one row."""
    share = question.batch * arm.row_ranks // question.gpus
    small = [rows for rows in range(1, math.isqrt(share) + 1) if share % rows == 0]
    sizes = sorted({*small, *(share // rows for rows in small)})
    most, fits, too_many = None, -1, len(sizes)
    while too_many - fits > 1:  # ends at a single row if nothing fits
        row = row_of(question, arm, sizes[middle := (fits + too_many) // 2])
        if row.headroom_bytes >= miss * row.peak_bytes:
            most, fits = row, middle
        else:
            too_many = middle
    return timed(question, arm, most or row)


def row_of(question: Question, arm: Arm, micro_batch: int) -> Row:
    """What an arm needs with `micro_batch` rows per pass."""
    gpu = GPUS[question.gpu]
    prediction = predicted(question, arm, micro_batch)
    headroom = gpu.memory_bytes - reserve_bytes(gpu) - prediction.peak_bytes
    host_bytes = question.local * (prediction.host_bytes + HOST_PROCESS_BYTES)
    lacks = "GPU memory" if headroom < 0 else "host memory" if host_bytes > question.host_memory_bytes else None
    zero = (arm.deepspeed or {}).get("zero_optimization", {})
    return Row(
        arm=arm.name,
        fits=lacks is None,
        limit=lacks or "",
        precision=question.precision,
        checkpointing=question.checkpointing,
        micro_batch=micro_batch,
        accumulation=question.batch * arm.row_ranks // question.gpus // micro_batch,
        row_ranks=arm.row_ranks,
        bucket_elements=zero.get("reduce_bucket_size"),
        peak_bytes=prediction.peak_bytes,
        headroom_bytes=headroom,
        components=prediction.at_peak,
        host_bytes=host_bytes,
        sent_bytes=papers.wire_bytes(prediction.traffic, question.gpus),
    )


def timed(question: Question, arm: Arm, row: Row) -> Row:
    """The row with its predicted time, if it fits."""
    if not row.fits:
        return row
    step = _step_time(setup_of(question, arm, row.micro_batch), Machine.of(question))
    speed = question.batch * question.sequence / step.seconds
    interval_s = (step.low_s, step.high_s)
    return replace(row, limit=step.limit, step_s=step.seconds, step_interval_s=interval_s, tokens_per_s=speed)


@functools.lru_cache(maxsize=64)  # the search often ends at the same rows with and without `miss`
def _step_time(setup: Setup, machine: Machine) -> StepTime:
    return step_time(setup, machine)


def step_of(question: Question, arm: Arm, micro_batch: int) -> StepTime:
    """The predicted step of an arm. It need not fit."""
    check(question)
    share = question.batch * arm.row_ranks // question.gpus
    if share % micro_batch:
        what = f"a micro_batch of {micro_batch} does not divide the {share} rows of a rank"
        raise Stop(what, "give another micro_batch")
    return step_time(setup_of(question, arm, micro_batch), Machine.of(question))


def predicted(question: Question, arm: Arm, micro_batch: int) -> Estimate:
    return estimate(setup_of(question, arm, micro_batch))


def setup_of(question: Question, arm: Arm, micro_batch: int) -> Setup:
    return Setup(
        model=question.model,
        **distribution(arm, question.gpus),
        ranks=question.gpus,
        precision=question.precision,
        micro_batch=micro_batch,
        accumulation=question.batch * arm.row_ranks // question.gpus // micro_batch,
        sequence=question.sequence,
        attention="sdpa" if question.model.has_fused_attention else "eager",
        checkpointing=bool(question.checkpointing),
        frozen=question.frozen,
        optimizer=question.optimizer,
        device="cuda",
    )
