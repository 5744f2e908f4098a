"""Which arm to use on given GPUs, and with which settings. Predicted, not measured.

For each arm the search tries what an expert would try: with and without checkpointing of activations, large buckets
and then small ones, and the most rows per pass that fit, because more rows per pass never take longer. The search
knows nothing about the arms: `estimate` knows what they hold and send, and the order of `arms.NAMES` how simple they
are.
"""

import bisect
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from study.errors import Stop
from study.machine.gpus import GPUS
from study.predictor import papers
from study.predictor.advice.question import HALF, Question, beside_bytes, check
from study.predictor.advice.settled import machine_of, settled_arm, setup_of, usual_precision, with_buckets, zero_of
from study.predictor.estimate import estimate
from study.predictor.memory import sequence, tensor
from study.predictor.memory.loading import HOST_PROCESS_BYTES
from study.predictor.memory.memory_kinds import memory_kinds, reserve_bytes
from study.predictor.setup import QUANTIZED_BYTES, Setup, trainers_name
from study.predictor.timing.steptime import step_time
from study.spec import arms
from study.spec.arms import Arm
from study.spec.optimizers import refusal

SEPARABLE = 0.1  # step times that differ by less than this share, and SEPARABLE_S, count as equal
SEPARABLE_S = 0.005
OFFLOADING_PAYS = 0.6  # of the seconds without it: its interval is wide, so it has to be nearly twice as fast
FULL = 0.99  # of a GPU's bytes: nvidia-smi shows the whole card
SHARING = (2, 4, 8)  # sizes of the groups of GPUs that share rows or layers
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
    checkpointing: int  # as a setup's
    micro_batch: int  # the largest that fits
    accumulation: int
    row_ranks: int = 1  # GPUs that read the same rows, because each has a part of the sequence or of the layers
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
    def simplicity(self) -> tuple[int, int]:
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


def advise(question: Question, with_half: bool = True) -> Advice:
    """Return every arm as a row, and the choice. `with_half`: also try to recompute every second layer."""
    check(question)
    rows = [best_of_arm(question, arms.load_arm(name)) for name in arms.NAMES]
    choice = best_of(_usable(rows))
    if with_half and choice and question.checkpointing is None and (half := _of_half(question, choice)):
        rows[rows.index(choice)] = half
        choice = half
    if choice is None:
        return Advice(question, tuple(rows), None, None)
    alternative = _alternative(_usable(rows), choice)
    two = [row for row in (choice, alternative) if row]
    kinds = [memory_kinds(setup_of_row(question, row), question.gpu) for row in two]
    shown = {row.arm: _with_driver(question, row, each.driver) for row, each in zip(two, kinds, strict=True)}
    shown_rows = tuple(shown.get(row.arm, row) for row in rows)
    return Advice(question, shown_rows, shown[choice.arm], alternative and shown[alternative.arm])


def _with_driver(question: Question, row: Row, driver_bytes: int | None) -> Row:
    """Return a row with what nvidia-smi will show."""
    return replace(row, driver_bytes=driver_bytes, fills_card=fills(question.gpu, driver_bytes, question.beside))


def fills(gpu: str, driver_bytes: int | None, other_share: float = 0.0) -> bool:
    """Return whether nvidia-smi will show the whole card, of which another program may have a share."""
    if driver_bytes is None:
        return False
    return driver_bytes + beside_bytes(gpu, other_share) >= FULL * GPUS[gpu].memory_bytes


def _usable(rows: Sequence[Row | Untried]) -> list[Row]:
    """Return the rows that fit. One GPU shares nothing: if all fits there, only offloading can help."""
    fitting = [row for row in rows if isinstance(row, Row) and row.fits]
    alone = any(row.arm == "single" for row in fitting)
    return [row for row in fitting if row.arm == "single" or row.offloads or not alone]


def _alternative(fitting: list[Row], choice: Row) -> Row | None:
    """Return the simplest of the other rows, if it is simpler than the choice, or else the best of them."""
    others = [row for row in fitting if row is not choice]
    simpler = [row for row in others if row.simplicity < choice.simplicity]
    return min(simpler, key=lambda row: row.simplicity) if simpler else best_of(others)


def _of_half(question: Question, choice: Row) -> Row | None:
    """Return a choice with every second layer recomputed, if that is faster and no arm fits as well without any."""
    if not choice.checkpointing or choice.row_ranks > 1:
        return None
    without = replace(question, checkpointing=False)
    kept = [best_of_arm(without, arms.load_arm(name)) for name in arms.NAMES]
    if any(row.drawbacks <= choice.drawbacks for row in _usable(kept)):
        return None
    with contextlib.suppress(Stop):  # it has to be traced, and torch may not be installed
        half = best_of_arm(replace(question, checkpointing=HALF), arms.load_arm(choice.arm))
        if isinstance(half, Row) and half.step_s and choice.step_s and half.drawbacks <= choice.drawbacks:
            return half if half.step_s < (1 - SEPARABLE / 2) * choice.step_s else None  # one arm errs alike
    return None


def setup_of_row(question: Question, row: Row) -> Setup:
    """Return the setup that a row was predicted for."""
    settled = replace(question, precision=row.precision, checkpointing=row.checkpointing)
    arm = settled_arm(arms.load_arm(row.arm), question.gpus, question.local, row.row_ranks, row.bucket_elements)
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
    fastest_s = min((row.step_s for row in rows if row.step_s), default=0)
    longest_s = (1 + SEPARABLE) * fastest_s + SEPARABLE_S
    equal = [row for row in rows if row.step_s and row.step_s <= longest_s]
    return min(equal, key=lambda row: row.simplicity, default=None)


def _with_room(rows: list[Row]) -> list[Row]:
    """Return the rows that do not fit only just, or all if none does."""
    return [row for row in rows if not row.is_tight] or rows


def best_of_arm(question: Question, arm: Arm) -> Row | Untried:
    """Return the best setting of an arm; if none fits, the one that comes closest."""
    if limit := _lack(question, arm):
        return Untried(arm.name, limit)
    if arm.row_ranks == 1:
        return _best(question, settled_arm(arm, question.gpus, question.local))
    lacks = {ranks: _lack_of_groups(question, arm, ranks) for ranks in SHARING}
    arms_of = [settled_arm(arm, question.gpus, question.local, ranks) for ranks, lack in lacks.items() if not lack]
    rows = [_best(question, each) for each in arms_of]
    if not rows:
        return Untried(arm.name, lacks[SHARING[0]])
    return best_of([row for row in rows if isinstance(row, Row) and row.fits]) or rows[-1]


def _lack(question: Question, arm: Arm) -> str:
    """Return what an arm lacks on these GPUs, whatever its settings; nothing if it can be tried."""
    lacks = {
        "one GPU only": arm.distributed_type == "NO" and question.gpus > 1,
        "no disk": arm.uses_nvme and question.disk_bytes_per_s is None,
        "one node": arm.divides_ranks and question.gpus <= question.local,
        "one GPU a node": arm.divides_ranks and question.local == 1,
        "recomputation": arm.row_ranks > 1 and question.checkpointing == HALF,  # what its ranks send is not known
    }
    return next((name for name, is_lacking in lacks.items() if is_lacking), "")


def _lack_of_groups(question: Question, arm: Arm, ranks: int) -> str:
    """Return why so many GPUs cannot share rows or layers. They are in one node, as each layer waits for the others."""
    if question.local % ranks:
        return "one GPU" if question.gpus == 1 else "GPUs in a node"
    if arm.tensor_ranks > 1 and question.model.lora_rank:
        return "its adapters"  # how AutoTP divides them is not known
    if arm.tensor_ranks > 1:
        return "its layers" if tensor.refusal(question.model, ranks) else ""
    return "attention" if question.sequence % ranks or sequence.refusal(question.model, ranks) else ""


def _best(question: Question, arm: Arm) -> Row | Untried:
    """Return the best setting of an arm on these GPUs."""
    precision = question.precision or usual_precision(arm)
    if refusal(arm, trainers_name(question.optimizer), precision):
        return Untried(arm.name, "its optimizer", precision)
    if (states := least_bytes(question, arm, precision)) > question.memory_bytes:
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
    share = question.batch * arm.row_ranks // question.gpus
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
    each = 2 if question.frozen == "bf16" else papers.RECIPES[recipe][0]
    return int(states + frozen * (QUANTIZED_BYTES[question.quantized] if question.quantized else each))


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
    headroom = question.memory_bytes - reserve_bytes(gpu) - prediction.peak_bytes
    host_bytes = question.local * (prediction.host_bytes + HOST_PROCESS_BYTES)
    limit = "host memory" if host_bytes > question.host_memory_bytes else ""
    if headroom < 0:
        limit = "GPU memory"
    return Row(
        arm=arm.name,
        fits=not limit,
        limit=limit,
        precision=setup.precision,
        checkpointing=setup.checkpointing,
        micro_batch=setup.micro_batch,
        accumulation=setup.accumulation,
        row_ranks=arm.row_ranks,
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
