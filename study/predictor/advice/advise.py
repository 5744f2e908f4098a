"""Which arm to use on given GPUs, and with which settings. Predicted, not measured.

For each arm the search tries what an expert would try: with and without checkpointing of activations, large buckets
and then small ones, and the most rows per pass that fit, because more rows per pass never take longer. The search
knows nothing about the arms: `estimate` knows what they hold and send, and the order of `arms.NAMES` how simple they
are. Arms that divide rows or layers are not advised: no published row has tested their time.
"""

import bisect
import math
from dataclasses import dataclass, field, replace

from study.machine.gpus import GPUS
from study.predictor import papers
from study.predictor.advice.question import Given, Question, check
from study.predictor.advice.settled import machine_of, settled_arm, setup_of, usual_precision, with_buckets, zero_of
from study.predictor.estimate import estimate
from study.predictor.memory.loading import HOST_PROCESS_BYTES
from study.predictor.memory.memory_kinds import memory_kinds, reserve_bytes
from study.predictor.setup import QUANTIZED_BYTES, Setup, trainers_name
from study.predictor.step_time import step_time
from study.predictor.tracing.transformer import Transformer
from study.spec import arms
from study.spec.arms import Arm
from study.spec.optimizers import refusal

SEPARABLE = 0.1  # step times of one arm that differ by less than this share count as equal: its errors are alike
OFFLOADING_PAYS = 0.6  # of the seconds without it: its interval is wide, so it has to be nearly twice as fast
FULL = 0.99  # of a GPU's bytes: nvidia-smi shows the whole card
MOST_GPUS = 64  # the most that `fewest` tries
MISS = 0.1  # a peak may be larger than predicted by this share: most published peaks on GPUs were within it


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
    bucket_elements: int | None = None  # None without DeepSpeed
    peak_bytes: int
    headroom_bytes: float  # after the reserve; negative if it does not fit
    driver_bytes: int | None = None  # what nvidia-smi will show; of the choice and the alternative, if that is known
    fills_card: bool = False  # if `driver_bytes` are known
    components: dict[str, int] = field(default_factory=dict)  # at the peak
    host_bytes: float  # of a node, for all its ranks
    step_s: float | None = None  # None if it does not fit
    step_interval_s: tuple[float, float] | None = None
    tokens_per_s: float | None = None

    def leaves(self, share: float) -> bool:
        """Return whether this share of the peak stays free."""
        return self.headroom_bytes >= share * self.peak_bytes

    @property
    def is_tight(self) -> bool:
        """Return whether it fits only if the prediction is accurate."""
        return self.fills_card or not self.leaves(MISS)

    @property
    def simplicity(self) -> tuple[int, bool]:
        """Smaller is simpler."""
        return arms.NAMES.index(self.arm), self.checkpointing

    @property
    def offloads(self) -> bool:
        return arms.load_arm(self.arm).offload_optimizer != "none"

    @property
    def drawbacks(self) -> tuple[bool, bool]:
        """More is worse: fitting only just ends in a lack of memory, offloading only takes longer."""
        return self.is_tight, self.offloads


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
    """Return every arm that makes sense here as a row, and the choice."""
    check(question)
    rows = [best_of_arm(question, arms.load_arm(name)) for name in arms.NAMES if _makes_sense(name, question)]
    choice: Row | None = None
    alternative: Row | None = None
    for _ in arms.NAMES:  # a choice that fills the card fits only just, so another may be better
        fitting = [row for row in rows if isinstance(row, Row) and row.fits]
        choice = best_of(fitting)
        alternative = choice and _alternative(fitting, choice)
        unknown = {
            row.arm: _with_driver(question, row) for row in (choice, alternative) if row and not row.driver_bytes
        }
        if not unknown:
            break
        rows = [unknown.get(row.arm, row) for row in rows]
    return Advice(question, tuple(rows), choice, alternative)


def fewest(model: Transformer, gpu: str, given: Given, least: int = 1) -> Advice | None:
    """Return the advice for the fewest GPUs that keep the states, from `least` on by powers of two; None: no number."""
    counts = (least * 2**n for n in range(7) if least * 2**n <= MOST_GPUS)
    possible = (gpus for gpus in counts if (given.batch or gpus) % gpus == 0)
    advices = (advise(Question.of(model, gpus, gpu, given)) for gpus in possible)
    return next((each for each in advices if each.choice and not each.choice.offloads), None)


def _makes_sense(name: str, question: Question) -> bool:
    """Return whether an arm can differ from simpler ones here. One GPU shares nothing, but it can offload."""
    arm = arms.load_arm(name)
    if arm.row_ranks > 1 or (arm.uses_nvme and question.disk_bytes_per_s is None):
        return False
    if arm.divides_ranks:
        return question.gpus > question.local > 1
    alone = arm.distributed_type == "NO"
    return alone or arm.offload_optimizer != "none" if question.gpus == 1 else not alone


def _with_driver(question: Question, row: Row) -> Row:
    """Return a row with what nvidia-smi will show."""
    driver_bytes = memory_kinds(setup_of_row(question, row), question.gpu).driver
    return replace(row, driver_bytes=driver_bytes, fills_card=fills(question.gpu, driver_bytes))


def fills(gpu: str, driver_bytes: int | None) -> bool:
    """Return whether nvidia-smi will show the whole card."""
    return driver_bytes is not None and driver_bytes >= FULL * GPUS[gpu].memory_bytes


def _alternative(fitting: list[Row], choice: Row) -> Row | None:
    """Return the simplest of the other rows, if it is simpler than the choice, or else the best of them."""
    others = [row for row in fitting if row is not choice]
    simpler = [row for row in others if row.simplicity < choice.simplicity]
    return min(simpler, key=lambda row: row.simplicity) if simpler else best_of(others)


def setup_of_row(question: Question, row: Row) -> Setup:
    """Return the setup that a row was predicted for."""
    settled = replace(question, precision=row.precision, checkpointing=row.checkpointing)
    arm = settled_arm(arms.load_arm(row.arm), question.gpus, question.local, row.bucket_elements)
    return setup_of(settled, arm, row.micro_batch)


def best_of(rows: list[Row]) -> Row | None:
    """Return the row to use: one that leaves room, and one that keeps the states on the GPUs.

    Unless offloading is nearly twice as fast: its time depends on the host, which is not known.
    """
    rows = _with_room(rows)
    kept = _simplest_of_fastest([row for row in rows if not row.offloads])
    offloading = _simplest_of_fastest([row for row in rows if row.offloads])
    if kept is None or offloading is None:
        return kept or offloading
    pays = (offloading.step_s or math.inf) < OFFLOADING_PAYS * (kept.step_s or 0)
    return offloading if pays else kept


def _simplest_of_fastest(rows: list[Row]) -> Row | None:
    """Return the simplest of the rows whose predicted time counts as equal to the fastest."""
    fastest = min((row for row in rows if row.step_s), key=lambda row: row.step_s or 0, default=None)
    equal = [row for row in rows if fastest and counts_as_equal(fastest, row)]
    return min(equal, key=lambda row: row.simplicity, default=None)


def counts_as_equal(fastest: Row, row: Row) -> bool:
    """Return whether each of two predicted times lies in the other's interval. One arm has one error: there 10 % do."""
    if not (fastest.step_s and row.step_s and fastest.step_interval_s and row.step_interval_s):
        return False
    if row.arm == fastest.arm:
        return row.step_s <= (1 + SEPARABLE) * fastest.step_s
    return row.step_s <= fastest.step_interval_s[1] and fastest.step_s >= row.step_interval_s[0]


def _with_room(rows: list[Row]) -> list[Row]:
    """Return the rows that do not fit only just, or all if none does."""
    return [row for row in rows if not row.is_tight] or rows


def best_of_arm(question: Question, arm: Arm) -> Row | Untried:
    """Return the best setting of an arm; if none fits, the one that comes closest."""
    arm = settled_arm(arm, question.gpus, question.local)
    precision = question.precision or usual_precision(arm)
    if refusal(arm, trainers_name(question.optimizer), precision):
        return Untried(arm.name, "its optimizer", precision)
    if (states := least_bytes(question, arm, precision)) > GPUS[question.gpu].memory_bytes:
        return Untried(arm.name, "GPU memory", precision, states)
    recomputations = [question.checkpointing]
    if question.checkpointing is None:
        recomputations = [True, False] if question.model.has_checkpointing else [False]
    tried: list[Row] = []
    for checkpointing in recomputations:
        tried += _with_most_rows(replace(question, precision=precision, checkpointing=checkpointing), arm)
        if all(row.headroom_bytes < 0 for row in tried):
            break  # without checkpointing it would need more
    fitting = _with_room([row for row in tried if row.fits])
    best = best_of([_timed(question, row) for row in fitting])
    return best or max(tried, key=lambda row: row.headroom_bytes)


def _with_most_rows(question: Question, arm: Arm) -> list[Row]:
    """Return the settings with the most rows per pass that fit with a margin, or else just fit."""
    share = question.batch // question.gpus
    small = [rows for rows in range(1, math.isqrt(share) + 1) if share % rows == 0]
    sizes = sorted({*small, *(share // rows for rows in small)})
    large = with_buckets(arm)
    variants = [arm] if large is arm else [large, arm]  # smaller buckets pay only if more rows fit
    settings: list[Row] = []
    for miss in (MISS, 0.0):
        for each in variants:
            most = max((row.micro_batch for row in settings if row.leaves(miss)), default=0)
            if larger := [size for size in sizes if size > most]:
                settings.append(most_rows(question, each, miss, larger))
        if any(row.fits and not row.is_tight for row in settings):
            break
    return settings


def least_bytes(question: Question, arm: Arm, precision: str) -> int:
    """Return the bytes of model states that an arm keeps on a GPU. If they do not fit, the arm does not fit."""
    if arm.offload_optimizer != "none":
        return 0
    stage = 3 if arm.fsdp else arm.stage or 0
    trains = question.model.trained
    ranks = arm.sharing_ranks(question.gpus)
    recipe = papers.recipe_of(precision, question.optimizer)
    states = sum(papers.states_bytes(trains, stage, ranks, recipe).values())
    frozen = (question.model.parameters - trains) / (ranks if stage == 3 else 1)
    return int(states + frozen * (QUANTIZED_BYTES[question.quantized] if question.quantized else 2))


def most_rows(question: Question, arm: Arm, miss: float, sizes: list[int]) -> Row:
    """Return the setting with the most of these rows per pass that leaves the share `miss` of the peak free.

    If none does, it has the fewest rows. All rows in one pass come first: FSDP2 then sums no whole gradients, and needs
    less than with two passes of half the rows.
    """
    whole = row_of(question, arm, sizes[-1])
    if whole.leaves(miss):
        return whole
    fewer = sizes[:-1]
    fitting = bisect.bisect_left(fewer, True, key=lambda rows: not row_of(question, arm, rows).leaves(miss))
    return row_of(question, arm, sizes[max(0, fitting - 1)])


def row_of(question: Question, arm: Arm, micro_batch: int) -> Row:
    """Return what an arm needs with `micro_batch` rows per pass, without its time. The question has a precision."""
    setup = setup_of(question, arm, micro_batch)
    gpu = GPUS[question.gpu]
    prediction = estimate(setup)
    headroom = gpu.memory_bytes - reserve_bytes(gpu) - prediction.peak_bytes
    host_bytes = question.local * (prediction.host_bytes + HOST_PROCESS_BYTES)
    limit = "host memory" if host_bytes > question.host_memory_bytes else ""
    if headroom < 0:
        limit = "GPU memory"
    return Row(
        arm=arm.name,
        fits=not limit,
        limit=limit,
        precision=setup.precision,
        checkpointing=bool(setup.checkpointing),
        micro_batch=setup.micro_batch,
        accumulation=setup.accumulation,
        bucket_elements=zero_of(arm).get("reduce_bucket_size"),
        peak_bytes=prediction.peak_bytes,
        headroom_bytes=headroom,
        components=prediction.at_peak,
        host_bytes=host_bytes,
    )


def _timed(question: Question, row: Row) -> Row:
    step = step_time(setup_of_row(question, row), machine_of(question))
    speed = question.batch * question.sequence / step.seconds
    interval_s = (step.low_s, step.high_s)
    return replace(row, limit=step.limit, step_s=step.seconds, step_interval_s=interval_s, tokens_per_s=speed)
