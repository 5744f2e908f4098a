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
from study.predictor.estimate import estimate
from study.predictor.memory import sequence, tensor
from study.predictor.memory.memory_kinds import reserve_bytes
from study.predictor.room import HOST_PROCESS_BYTES
from study.predictor.setup import Setup, distribution, trainers_name
from study.predictor.timing.steptime import Machine, StepTime, step_time
from study.spec import arms
from study.spec.arms import Arm
from study.spec.optimizers import refusal

SEPARABLE = 0.1  # step times that differ by less than this share, and SEPARABLE_S, count as equal
SEPARABLE_S = 0.005
SHARING = (2, 4, 8)  # sizes of the groups of GPUs that share rows or layers
MISS = 0.1  # a peak may be larger than predicted by this share: most published peaks on GPUs were within it
BUCKET_ELEMENTS = 50_000_000  # 100 MB in 16 bits: messages of that size come near a link's speed. Assumed
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")


@dataclass(frozen=True)
class Untried:
    """An arm that was not tried on these GPUs, because it cannot fit."""

    arm: str
    limit: str  # why
    precision: str | None = None
    states_bytes: int | None = None  # of the model states, if these alone do not fit
    fits: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """An arm with its best settings, and what it is predicted to need."""

    arm: str
    fits: bool
    limit: str  # why it does not fit; if it fits, what limits its speed
    precision: str
    checkpointing: bool
    micro_batch: int  # the largest that fits
    accumulation: int
    row_ranks: int = 1  # GPUs that read the same rows, because each has a part of the sequence or of the layers
    bucket_elements: int | None = None  # None without DeepSpeed
    peak_bytes: int
    headroom_bytes: float  # after the reserve; negative if it does not fit
    components: dict[str, int] = field(default_factory=dict)  # at the peak
    host_bytes: float  # of a node, for all its ranks
    sent_bytes: float  # by a rank on the link, in a step
    step_s: float | None = None  # None if it does not fit
    step_interval_s: tuple[float, float] | None = None
    tokens_per_s: float | None = None

    @property
    def is_tight(self) -> bool:
        """Return whether it fits only if the prediction is accurate."""
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

    @property
    def slowness_s(self) -> float:
        """Return the seconds of a step, or infinity if it does not fit."""
        return math.inf if self.step_s is None else self.step_s


@dataclass(frozen=True)
class Advice:
    """Every arm, and which one to use."""

    question: Question
    rows: tuple[Row | Untried, ...]
    choice: Row | None  # None: nothing fits
    alternative: Row | None  # the simplest arm that fits; if that is the choice, the best of the others

    @property
    def tried(self) -> list[Row]:
        return [row for row in self.rows if isinstance(row, Row)]


def advise(question: Question) -> Advice:
    """Return every arm as a row, and the choice."""
    check(question)
    rows = tuple(best_of_arm(question, arms.load_arm(name)) for name in arms.NAMES)
    fitting = [row for row in rows if isinstance(row, Row) and row.fits]
    if "single" in {row.arm for row in fitting}:  # one GPU shares nothing: there, only offloading can help
        fitting = [row for row in fitting if row.arm == "single" or row.offloads]
    choice = best_of(fitting)
    if choice is None:
        return Advice(question, rows, None, None)
    others = [row for row in fitting if row is not choice]
    simpler = [row for row in others if row.simplicity < choice.simplicity]
    alternative = min(simpler, key=lambda row: row.simplicity) if simpler else best_of(others)
    return Advice(question, rows, choice, alternative)


def best_of(rows: list[Row]) -> Row | None:
    """Return the simplest of the rows whose predicted time counts as equal to the fastest.

    Rows with fewer drawbacks come first. Barely fitting is a drawback. So is offloading, because the speed of the host
    is unknown.
    """
    if not rows:
        return None
    fewest = min(row.drawbacks for row in rows)
    rows = [row for row in rows if row.drawbacks == fewest]
    longest_s = (1 + SEPARABLE) * min(row.slowness_s for row in rows) + SEPARABLE_S
    return min((row for row in rows if row.slowness_s <= longest_s), key=lambda row: row.simplicity)


def best_of_arm(question: Question, arm: Arm) -> Row | Untried:
    """Return the best setting of an arm; if none fits, the one that comes closest."""
    if (limit := _lack(question, arm)) is not None:
        return Untried(arm.name, limit)
    if arm.row_ranks == 1:
        return _best(question, on_nodes(arm, question))
    among = [ranks for ranks in SHARING if _lack_of_groups(question, arm, ranks) is None]
    rows = [_best(question, sharing_rows(arm, ranks)) for ranks in among]
    fitting = [row for row in rows if isinstance(row, Row) and row.fits]
    return best_of(fitting) or rows[-1]


def _lack(question: Question, arm: Arm) -> str | None:
    """Return what an arm lacks on these GPUs, whatever its settings; None if it can be tried."""
    if arm.distributed_type == "NO" and question.gpus > 1:
        return "one GPU only"
    if arm.uses_nvme and question.disk_bytes_per_s is None:
        return "no disk"
    if arm.divides_ranks and question.gpus <= question.local:
        return "one node"
    if arm.divides_ranks and question.local == 1:
        return "one GPU a node"
    if arm.row_ranks > 1:
        lacks = [_lack_of_groups(question, arm, ranks) for ranks in SHARING]
        return None if None in lacks else lacks[0]
    return None


def _lack_of_groups(question: Question, arm: Arm, ranks: int) -> str | None:
    """Return why so many GPUs cannot share rows or layers. They are in one node, as each layer waits for the others."""
    if question.local % ranks:
        return "one GPU" if question.gpus == 1 else "GPUs in a node"
    if arm.tensor_ranks > 1:
        return "its layers" if tensor.refusal(question.model, ranks) else None
    return "attention" if question.sequence % ranks or sequence.refusal(question.model, ranks) else None


def sharing_rows(arm: Arm, ranks: int) -> Arm:
    """Return the arm with `ranks` GPUs for the same rows."""
    if arm.sequence_ranks > 1:
        return replace(arm, sequence_ranks=ranks)
    return replace(arm, deepspeed=(arm.deepspeed or {}) | {"tensor_parallel": {"autotp_size": ranks}})


def _best(question: Question, arm: Arm) -> Row | Untried:
    """Return the best setting of an arm on these GPUs."""
    precision = question.precision or usual_precision(arm)
    if refusal(arm, trainers_name(question.optimizer), precision):
        return Untried(arm.name, "its optimizer", precision)
    if (states := least_bytes(question, arm, precision)) > GPUS[question.gpu].memory_bytes:
        return Untried(arm.name, "GPU memory", precision, states)
    tried: list[Row] = []
    for checkpointing in _recomputations(question):
        settled = replace(question, precision=precision, checkpointing=checkpointing)
        tried += [most_rows(settled, each, miss) for miss in (MISS, 0) for each in with_buckets(arm)]
        if not any(row.headroom_bytes >= 0 for row in tried):
            break  # without checkpointing it would need more; tracing a model takes seconds for each setting
    return best_of([row for row in tried if row.fits]) or max(tried, key=lambda row: row.headroom_bytes)


def _recomputations(question: Question) -> tuple[bool, ...]:
    """Return whether to try with recomputed activations, without, or both."""
    if question.checkpointing is not None:
        return (question.checkpointing,)
    return (True, False) if question.model.has_checkpointing else (False,)


def zero_of(arm: Arm) -> dict:
    """Return the section zero_optimization of an arm's DeepSpeed config; empty without DeepSpeed."""
    return (arm.deepspeed or {}).get("zero_optimization", {})


def with_zero(arm: Arm, settings: dict) -> Arm:
    return replace(arm, deepspeed=(arm.deepspeed or {}) | {"zero_optimization": zero_of(arm) | settings})


def on_nodes(arm: Arm, question: Question) -> Arm:
    """Return the arm with groups of ranks as large as the nodes, if it has groups."""
    if arm.replicas > 1:
        return replace(arm, replicas=max(2, question.gpus // question.local))
    return with_zero(arm, {"zero_hpz_partition_size": question.local}) if arm.divides_ranks else arm


def usual_precision(arm: Arm) -> str:
    """DeepSpeed keeps fp32 master copies of 16-bit weights. Without it Accelerate keeps the weights in fp32."""
    return "bf16_cast" if arm.deepspeed else "bf16"


def least_bytes(question: Question, arm: Arm, precision: str) -> int:
    """Return the bytes of model states that an arm keeps on a GPU. If they do not fit, the arm does not fit."""
    if arm.offload_optimizer != "none":
        return 0
    stage = 3 if arm.fsdp else arm.stage or 0
    trains = trained(question.model)
    ranks = arm.sharing_ranks(question.gpus)
    recipe = papers.recipe_of(precision, question.optimizer)
    states = sum(papers.states_bytes(trains, stage, ranks, recipe).values())
    frozen = (parameters(question.model) - trains) / (ranks if stage == 3 else 1)
    return int(states + frozen * (2 if question.frozen == "bf16" else papers.RECIPES[recipe][0]))


def with_buckets(arm: Arm) -> Iterator[Arm]:
    """The arm with large buckets, then with its own."""
    if large := {name: BUCKET_ELEMENTS for name in BUCKETS if name in zero_of(arm)}:
        yield with_zero(arm, large)
    yield arm


def most_rows(question: Question, arm: Arm, miss: float) -> Row:
    """Return the row with the most rows per pass that fit even if the peak is larger by the share `miss`.

    If nothing fits, it has a single row per pass.
    """
    share = question.batch * arm.row_ranks // question.gpus
    small = [rows for rows in range(1, math.isqrt(share) + 1) if share % rows == 0]
    sizes = sorted({*small, *(share // rows for rows in small)})
    best = row_of(question, arm, sizes[0])
    if best.headroom_bytes >= miss * best.peak_bytes:
        fits, too_many = 0, len(sizes)
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            row = row_of(question, arm, sizes[middle])
            if row.headroom_bytes >= miss * row.peak_bytes:
                best, fits = row, middle
            else:
                too_many = middle
    return timed(question, arm, best)


def row_of(question: Question, arm: Arm, micro_batch: int) -> Row:
    """Return what an arm needs with `micro_batch` rows per pass. The question has a precision."""
    gpu = GPUS[question.gpu]
    setup = setup_of(question, arm, micro_batch)
    prediction = estimate(setup)
    headroom = gpu.memory_bytes - reserve_bytes(gpu) - prediction.peak_bytes
    host_bytes = question.local * (prediction.host_bytes + HOST_PROCESS_BYTES)
    limit = ""
    if headroom < 0:
        limit = "GPU memory"
    elif host_bytes > question.host_memory_bytes:
        limit = "host memory"
    return Row(
        arm=arm.name,
        fits=not limit,
        limit=limit,
        precision=setup.precision,
        checkpointing=setup.checkpointing,
        micro_batch=micro_batch,
        accumulation=setup.accumulation,
        row_ranks=arm.row_ranks,
        bucket_elements=zero_of(arm).get("reduce_bucket_size"),
        peak_bytes=prediction.peak_bytes,
        headroom_bytes=headroom,
        components=prediction.at_peak,
        host_bytes=host_bytes,
        sent_bytes=papers.wire_bytes(dict(prediction.traffic), question.gpus),
    )


def timed(question: Question, arm: Arm, row: Row) -> Row:
    """Return the row with its predicted time, if it fits."""
    if not row.fits:
        return row
    step = _step_time(setup_of(question, arm, row.micro_batch), machine_of(question))
    speed = question.batch * question.sequence / step.seconds
    interval_s = (step.low_s, step.high_s)
    return replace(row, limit=step.limit, step_s=step.seconds, step_interval_s=interval_s, tokens_per_s=speed)


@functools.lru_cache(maxsize=64)  # the search often ends at the same rows with and without `miss`
def _step_time(setup: Setup, machine: Machine) -> StepTime:
    return step_time(setup, machine)


def machine_of(question: Question) -> Machine:
    """Return the machine of a question, whose link is the slowest one: with several nodes, the link between nodes."""
    several = question.gpus > question.local
    return Machine(
        gpu=question.gpu,
        gpus_per_node=question.local,
        link=None if several else question.link,
        network=question.link if several else None,
        disk_bytes_per_s=question.disk_bytes_per_s,
    )


def step_of(question: Question, arm: Arm, micro_batch: int) -> StepTime:
    """Return the predicted step of an arm. It need not fit."""
    check(question)
    share = question.batch * arm.row_ranks // question.gpus
    if share % micro_batch:
        what = f"a micro_batch of {micro_batch} does not divide the {share} rows of a rank"
        raise Stop(what, "give another micro_batch")
    return step_time(setup_of(question, arm, micro_batch), machine_of(question))


def setup_of(question: Question, arm: Arm, micro_batch: int) -> Setup:
    return Setup(
        model=question.model,
        **distribution(arm, question.gpus),
        ranks=question.gpus,
        precision=question.precision or usual_precision(arm),
        micro_batch=micro_batch,
        accumulation=question.batch * arm.row_ranks // question.gpus // micro_batch,
        sequence=question.sequence,
        attention="sdpa" if question.model.has_fused_attention else "eager",
        checkpointing=bool(question.checkpointing),
        frozen=question.frozen,
        optimizer=question.optimizer,
        device="cuda",
    )
