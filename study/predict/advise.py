"""Which arm to use on given GPUs, and with which settings. Predicted, not measured.

For each arm the search tries what an expert would try: with and without checkpointing of activations, large buckets
and then small ones, and the most rows per pass that fit, because more rows per pass never take longer. If these fill
the card, fewer rows.
"""

import itertools
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Literal

from study.core import arms
from study.core.arms import Arm
from study.core.errors import Stop
from study.core.gpus import Gpu
from study.core.optimizers import refusal
from study.core.text import one_by_one
from study.predict.allocator import headroom_bytes
from study.predict.estimate import HOST_PROCESS_BYTES
from study.predict.prediction import Prediction
from study.predict.question import (
    MOST_ROWS,
    PlaceFlags,
    Precision,
    Question,
    StepFlags,
    TrainingFlags,
    settled_arm,
    usual_precision,
    with_buckets,
    zero_of,
)
from study.predict.trace.transformer import Transformer
from study.predict.training import Training

SEPARABLE = 1.1  # recomputation has to be so many times as fast: both times of an arm err alike
# The arms in the order of arms.NAMES, and before zero3_cpu its variant that leaves the weights on the GPUs.
AT = arms.NAMES.index("zero3_cpu")
ORDER = (*arms.NAMES[:AT], "zero3_opt_cpu", *arms.NAMES[AT:])
# An arm is preferred to one before it in ORDER if it is predicted so many times as fast, and named if it fits only
# just then.
# Times of one source err alike: of the published pairs of arms that are predicted 1.25 times apart or more, 57 of 57
# were measured in that order, and 9 of 16 of those that are 1.1 to 1.25 apart.
FASTER = 1.25
OFFLOADING_PAYS = 0.6  # of the seconds without it: its interval is wide, so it has to be nearly twice as fast
FULL = 0.95  # of a GPU, by what nvidia-smi will show: a choice, as a small miss of the prediction fills the rest
MOST_GPUS = 64  # the most that `fewest` tries
SHARING = "zero3_ulysses"  # whose ranks share sequences. How long a step takes with it no published row has tested
MORE_ROWS = 4  # times the batch: what an advice compares with where the host decides
Fits = Literal["yes", "only just", "no"]
MISS = 0.1  # a peak may be larger than predicted by this share: most published peaks on GPUs were within it


@dataclass(frozen=True, kw_only=True)
class Row:
    """An arm with its best settings, and what it is predicted to need."""

    arm: str
    gpu: Gpu
    fits: bool
    limit: str  # why it does not fit; if it fits, what limits its speed
    precision: Precision
    checkpointing: bool
    micro_batch: int  # the largest that fits, with room if one does
    accumulation: int
    bucket_elements: int | None = None  # None without DeepSpeed
    sync_each_batch: bool = False  # FSDP2: gradients are reduced in each micro-batch
    peak_bytes: int
    headroom_bytes: float  # after the reserve; negative if it does not fit
    driver_bytes: int | None = None  # what nvidia-smi will show; of the choice and the alternative
    host_bytes: float  # of a node, for all its ranks
    step_s: float | None = None  # None if it does not fit
    step_interval_s: tuple[float, float] | None = None

    @property
    def is_tight(self) -> bool:  # it fits only if the prediction is accurate
        return fits_on(self.gpu, self.peak_bytes, self.driver_bytes) == "only just"

    @property
    def offloads(self) -> bool:
        return arms.load_arm(self.arm).offload_optimizer != "none"

    @property
    def seconds(self) -> float:
        """Of a step; infinite if it does not fit, so that no such row is the fastest."""
        return self.step_s or inf


@dataclass(frozen=True)
class Advice:
    """The arms that were compared, and which of them to use."""

    question: Question
    rows: tuple[Row, ...]
    choice: Row | None  # None: nothing fits
    alternative: Row | None  # what would be the choice without it, or what fits only just, but faster or on the GPUs
    ways_out: tuple[tuple[str, Row], ...] = ()  # where it offloads: options that need none. Else: options that fit
    # If GPUs were looked for: the fewest with which offloading fits, and those with which something else does, at least
    # only just.
    with_offloading: int | None = None
    only_just: int | None = None

    @property
    def keeps_with_room(self) -> bool:  # whether an arm needs neither offloading nor an accurate prediction
        return any(row.fits and not row.offloads and not row.is_tight for row in self.rows)


def advise(question: Question) -> Advice:
    """Every arm that makes sense here as a row, and the choice."""
    rows = [best_of_arm(question, arm) for arm in one_by_one(_arms(question), "arm")]
    choice, alternative = _chosen_with_room(question, rows)
    return Advice(question, tuple(rows), choice, alternative, _ways_out(question, choice))


def _chosen_with_room(question: Question, rows: list[Row]) -> tuple[Row | None, Row | None]:
    """The choice and the alternative, when it is known what nvidia-smi will show of them: these rows are replaced."""
    while True:
        choice, alternative = _chosen(rows)
        unknown = [row for row in (choice, alternative) if row and row.driver_bytes is None]
        if not unknown:
            return choice, alternative
        # What nvidia-smi will show takes a replay of the allocator, so only rows that may be advised get it. A row that
        # fills the card fits only just, and then another one may be better: choose again.
        for row in unknown:
            rows[rows.index(row)] = _with_room(question, row)


def _chosen(rows: list[Row]) -> tuple[Row | None, Row | None]:
    """The choice and the alternative of an advice."""
    fitting = [row for row in rows if row.fits]
    choice = best_of(fitting)
    others = [row for row in fitting if row is not choice]
    faster = [row for row in others if choice and row.is_tight and _is_preferred_by_others(row, choice)]
    return choice, min(faster, key=lambda row: row.seconds) if faster else best_of(others)


def _is_preferred_by_others(row: Row, choice: Row) -> bool:
    """Whether a row is much faster; or keeps on the GPUs what the choice does not, as practice is."""
    return FASTER * row.seconds <= choice.seconds or (choice.offloads and not row.offloads)


def _ways_out(question: Question, choice: Row | None) -> tuple[tuple[str, Row], ...]:
    """What people do before they offload: a loss in pieces; on a single GPU moments of 8 bits, bf16 throughout.

    Where nothing fits, these also with offloading and recomputing, and ranks that share a sequence.
    """
    if choice and not choice.offloads:
        return ()
    options = [] if question.chunked_loss else [("--chunked-loss", replace(question, chunked_loss=True))]
    if choice is None and question.checkpointing is False and question.model.look.has_checkpointing:
        again = replace(question, checkpointing=True)
        options = [("--checkpointing", again)]
        options += [] if again.chunked_loss else [("--checkpointing --chunked-loss", replace(again, chunked_loss=True))]
    if question.gpus == 1 and not question.model.is_partly_frozen:
        eight = [("--optimizer adamw_8bit", replace(question, optimizer="adamw_8bit"))]
        if question.gpu.has_bf16:  # else it is fp16, in which small moments become 0
            pure = replace(question, precision="bf16_pure")
            eight += [
                ("--precision bf16_pure", pure),
                ("--precision bf16_pure --optimizer adamw_8bit", replace(pure, optimizer="adamw_8bit")),
            ]
        options = eight if choice else [*options, *eight]
    found = []
    for option, asked in options:
        with suppress(Stop):  # a loss in pieces is not traced of every model where PyTorch is missing
            of_question = [arm for arm in _arms(asked) if choice is None or arm.offload_optimizer == "none"]
            row, _ = _chosen_with_room(asked, [best_of_arm(asked, arm) for arm in of_question])
            if row:
                found.append((option, row))
    found = found[:2]
    if choice is None and all(row.offloads for _, row in found):
        for option, asked in (("", question), *options):
            with suppress(Stop):  # of ranks that do not fill groups, and of attention without heads
                row = best_of_arm(asked, arms.load_arm(SHARING))
                if row.fits:
                    return *found, (option, _with_room(asked, row))
    return tuple(found)


def _with_room(question: Question, row: Row) -> Row:
    """The row with what nvidia-smi will show. If that fills the card: the arm with fewer rows, if these leave room."""
    driver_bytes = Prediction.of(training_of(question, row)).kinds(question.gpu).driver
    shown = replace(row, driver_bytes=driver_bytes)
    if row.is_tight or not shown.is_tight or row.micro_batch == 1 or question.optimizer_in_backward:
        return shown
    fewer = best_of_arm(question, arms.load_arm(row.arm), row.micro_batch - 1)
    if fewer.fits:
        fewer = _with_room(question, fewer)
    return shown if fewer.is_tight or not fewer.fits else fewer


def held_back(advice: Advice) -> list[tuple[str, int, int, float]]:
    """The arms that are much faster where they fit only just: with so many rows, passes and seconds.

    A row leaves room if it can. Fewer rows are more passes, and with stages 2 and 3 each has its collectives.
    """
    question, found = advice.question, []
    for row in (row for row in advice.rows if row.fits and not row.is_tight):
        training = training_of(question, row)
        for rows in (rows for rows in _sizes(question) if rows > row.micro_batch):
            passes = question.batch // question.gpus // rows
            more = Prediction.of(replace(training, batch=replace(training.batch, rows=rows, passes=passes)))
            if headroom_bytes(question.gpu, more.memory.peak_bytes) >= 0:
                step_s = more.step(question.machine).seconds
                if FASTER * step_s <= row.seconds:
                    found.append((row.arm, rows, passes, step_s))
                break
    return found


def training_of(question: Question, row: Row) -> Training:
    chosen = {name: getattr(row, name) for name in ("precision", "checkpointing", "sync_each_batch")}
    settled = replace(question, **chosen)
    arm = settled_arm(arms.load_arm(row.arm), question.gpus, question.local, row.bucket_elements)
    return settled.training(arm, row.micro_batch, row.accumulation)


def fewest(
    model: Transformer, training: TrainingFlags, place: PlaceFlags, step: StepFlags, beyond: int = 0
) -> Advice | None:
    """The advice for the fewest GPUs that keep the states and leave room: of those of a node, then of whole nodes.

    If none do, it is that for the fewest that are enough otherwise. None: no number is. A batch is rounded up to a
    multiple of them.
    """
    most = 1 if place.optimizer_in_backward else MOST_GPUS
    per_node = place.gpus_per_node or Question.of(model, replace(training, gpus=1), place).gpu.per_node
    advice = first = None
    counts: dict[bool, int] = {}  # the fewest with offloading, and those without it
    for gpus in (gpus for gpus in range(beyond + 1, most + 1) if gpus <= per_node or gpus % per_node == 0):
        rows = None if step.batch is None else ceil(step.batch / gpus) * gpus
        question = Question.of(model, replace(training, gpus=gpus), place, replace(step, batch=rows))
        fitting = [arm for arm in one_by_one(_arms(question), "arm") if _fits_somehow(question, arm)]
        offloading = {arm.offload_optimizer != "none" for arm in fitting}
        for each in offloading:
            counts.setdefault(each, gpus)
        if fitting:
            first = first or question
        if False in offloading:
            advice = advise(question)
            if advice.keeps_with_room:
                break
    else:
        advice = advise(first) if first else None
    return advice and replace(advice, with_offloading=counts.get(True), only_just=counts.get(False))


def _arms(question: Question) -> list[Arm]:
    return [arm for arm in map(arms.load_arm, ORDER) if _is_predicted(arm, question) and _may_differ(arm, question)]


def _fits_somehow(question: Question, arm: Arm) -> bool:
    """Whether an arm fits with the fewest rows per pass, or with all in one, which may need less."""
    if question.checkpointing is None:
        question = replace(question, checkpointing=question.model.look.has_checkpointing)
    sizes = _sizes(question)
    question = replace(question, sync_each_batch=True)  # FSDP2 holds least so
    return any(_with_most_rows(question, arm, each).fits for each in (sizes[-1:], [sizes[0], sizes[-1]]))


def _is_predicted(arm: Arm, question: Question) -> bool:
    """Whether an arm takes the optimizer, and its time here is known."""
    # Arms that divide rows or layers are not advised: no published row has tested their time.
    if arm.row_ranks > 1 or (arm.uses_nvme and question.disk_bytes_per_s is None):
        return False
    if question.optimizer == "muon" and arm.stage:  # what DeepSpeed's Muon holds is not predicted
        return False
    return not refusal(arm, question.optimizer, question.precision or usual_precision(arm))


def _may_differ(arm: Arm, question: Question) -> bool:
    """Whether an arm can differ from simpler arms here."""
    if question.model.is_partly_frozen and arm.offload_param == "none" != arm.offload_optimizer:
        return False  # the optimizer's states of few weights take little room
    if arm.divides_ranks:  # its groups are nodes
        return question.gpus > question.local > 1
    is_alone = arm.distributed_type == "NO"
    if question.optimizer_in_backward and not is_alone:
        return False
    if question.gpus == 1:  # ranks share nothing there, but their states can leave the GPU
        return is_alone or arm.offload_optimizer != "none"
    return not is_alone


def fits_on(gpu: Gpu, peak_bytes: float, driver_bytes: int | None = None) -> Fits:
    """Say if a peak fits on a GPU beside a reserve. `driver_bytes` is what nvidia-smi will show, if that is known."""
    left_bytes = headroom_bytes(gpu, peak_bytes)
    if left_bytes < 0:
        return "no"
    # A peak may be larger than predicted; and near the end of a card PyTorch gives memory back and asks for it again.
    if left_bytes < MISS * peak_bytes or (driver_bytes or 0) >= FULL * gpu.memory_bytes:
        return "only just"
    return "yes"


def best_of(rows: list[Row]) -> Row | None:
    """The row to use, of rows that fit: one that leaves room, and one that keeps the states on the GPUs."""
    if not rows:
        return None
    rows = _roomy(rows)
    # Unless offloading is nearly twice as fast: its time depends on the host, which is not known.
    kept = [row for row in rows if not row.offloads] or rows
    limit_s = OFFLOADING_PAYS * min(row.seconds for row in kept)
    rows = [row for row in rows if row.seconds < limit_s] or kept
    # The first in ORDER of those that take hardly longer than the fastest: plain ones come before others.
    most_s = FASTER * min(row.seconds for row in rows)
    alike = [row for row in rows if row.seconds < most_s]
    return min(alike, key=lambda row: ORDER.index(row.arm))


def _roomy(rows: list[Row]) -> list[Row]:
    """The rows that leave room, or all if none does."""
    return [row for row in rows if not row.is_tight] or rows


def with_more_rows(question: Question, row: Row) -> Row:
    """The arm of a row with a larger batch."""
    return best_of_arm(replace(question, batch=MORE_ROWS * question.batch), arms.load_arm(row.arm))


def with_precision(question: Question, row: Row, precision: Precision) -> Row:
    """The arm of a row in another precision."""
    return best_of_arm(replace(question, precision=precision), arms.load_arm(row.arm))


def best_of_arm(question: Question, arm: Arm, most_rows: int = MOST_ROWS) -> Row:
    """The best setting of an arm; if none fits, the one that comes closest, without a time."""
    recomputations: tuple = (question.checkpointing,)
    if question.checkpointing is None:
        recomputations = (True, False) if question.model.look.has_checkpointing else (False,)
    sizes = [rows for rows in _sizes(question) if rows <= most_rows]
    tried: list[Row] = []
    for checkpointing in recomputations:
        tried.append(_with_most_rows(replace(question, checkpointing=checkpointing), arm, sizes))
        if not tried[-1].fits:
            break  # without checkpointing it would need more
    if arm.fsdp and not question.sync_each_batch and all(row.is_tight or not row.fits for row in tried):
        tried.append(best_of_arm(replace(question, sync_each_batch=True), arm, most_rows))
    rows = [row for row in tried if row.fits] or tried
    return min(_roomy(rows), key=lambda row: (row.seconds * (SEPARABLE if row.checkpointing else 1), row.peak_bytes))


def _sizes(question: Question) -> list[int]:
    """The numbers of rows per pass that divide those of a rank, from the largest."""
    share = question.batch // question.gpus
    if question.optimizer_in_backward:  # it cannot wait for further passes
        return [share]
    return [rows for rows in range(share, 0, -1) if share % rows == 0]


def _predicted(question: Question, arm: Arm, rows: int) -> Prediction:
    return Prediction.of(question.training(arm, rows, question.batch // question.gpus // rows))


def _most_rows(question: Question, arm: Arm, sizes: list[int], miss: float) -> int | None:
    """The largest of some numbers of rows that fits. None: none does."""

    def fits(rows: int) -> bool:
        peak_bytes = _predicted(question, arm, rows).memory.peak_bytes
        return headroom_bytes(question.gpu, peak_bytes) >= miss * peak_bytes

    # All rows in one pass may fit where fewer do not: FSDP2 sums no whole gradients then. Of the others fewer need
    # less. Each number that is tried needs a trace.
    place = 0 if fits(sizes[0]) else bisect_left(sizes, True, 1, key=fits)
    return sizes[place] if place < len(sizes) else None


def _with_most_rows(question: Question, arm: Arm, sizes: list[int]) -> Row:
    """The most rows per pass that fit with a margin, or else just fit; if none, the fewest."""
    arm = settled_arm(arm, question.gpus, question.local)
    fewest_rows = _predicted(question, arm, sizes[-1])
    engine = fewest_rows.engine
    states_bytes = sum(size for role, size in engine.standing.items() if role not in engine.on_host)
    rows, settled = None, arm
    if states_bytes <= question.gpu.memory_bytes:  # else nothing fits
        if headroom_bytes(question.gpu, fewest_rows.memory.peak_bytes) < 0:
            sizes = [sizes[0], sizes[-1]]
        # A margin counts for more than large buckets, and large buckets for more than rows. If nothing fits, the last
        # try is left: no margin, and the arm's own buckets.
        for miss, settled in itertools.product((MISS, 0.0), (with_buckets(arm), arm)):
            rows = _most_rows(question, settled, sizes, miss)
            if rows:
                break
    rows = rows or sizes[-1]
    prediction = _predicted(question, settled, rows)
    peak_bytes = prediction.memory.peak_bytes
    left_bytes = headroom_bytes(question.gpu, peak_bytes)
    host_bytes = question.local * (prediction.memory.host_bytes + HOST_PROCESS_BYTES)
    limit = ""
    if host_bytes > question.host_memory_bytes:
        limit = "host memory"
    if left_bytes < 0:
        limit = "GPU memory"
    row = Row(
        arm=arm.name,
        gpu=question.gpu,
        fits=not limit,
        limit=limit,
        precision=question.precision or usual_precision(arm),
        checkpointing=bool(question.checkpointing),
        micro_batch=rows,
        accumulation=question.batch // question.gpus // rows,
        bucket_elements=zero_of(settled).get("reduce_bucket_size"),
        sync_each_batch=question.sync_each_batch,
        peak_bytes=peak_bytes,
        headroom_bytes=left_bytes,
        host_bytes=host_bytes,
    )
    if limit:
        return row
    step = prediction.step(question.machine)
    return replace(row, limit=step.limit, step_s=step.seconds, step_interval_s=(step.low_s, step.high_s))
