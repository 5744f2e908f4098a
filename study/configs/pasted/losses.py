"""Read the losses, norms and rates that trainers print: what is zero, not a number, constant, or ends too early.

Lines of the Hugging Face Trainer and what stands on it, of DeepSpeed, Accelerate's examples, Lightning, torchtitan and
progress bars. A healthy training has none of these signs; GRPO's loss begins at 0, and fp16 skips its first steps.
"""

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from study.configs.pasted.tracebacks import Seen, line_at

NUMBER = r"[\"']?\s*[:=]?\s*[\"']?(-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|nan|inf))(?![\w.%])"
VALUES = {
    "loss": re.compile(rf"(?<![\w/.-])(?:train[_/ ])?loss{NUMBER}", re.IGNORECASE),
    "norm": re.compile(rf"(?<![\w.-])(?:train/|actor/)?(?:grad(?:ient)?[_ ]?norm|gnorm){NUMBER}", re.IGNORECASE),
    "rate": re.compile(rf"(?<![\w.-])(?:learning[_ ]rate|lr){NUMBER}", re.IGNORECASE),
}
OVERFLOW = re.compile(r"OVERFLOW! Rank \d+ Skipping step\. Attempted loss scale: ([\d.e+]+)")
BAR = re.compile(r"\|\s*(\d+)/(\d+) \[[\d:]+<[\d:?]+,\s*([\d.]+)(s/it|it/s)")
WORDS = re.compile("loss|norm", re.IGNORECASE)
OTHER = re.compile(r"eval_loss|\bFile \"|Traceback|Error")
LONGEST = 2000  # characters of a line
SQRT2 = 2**0.5
SCALE = 65_536
FEW, MANY = 3, 8  # lines that are a sign
MOST_LINES = 20_000
SHARE = 0.9  # of the steps: a rate that is 0 after them is as it should be


@dataclass(frozen=True)
class Line:
    """What one line of a trainer says. None: it does not say that."""

    place: int
    loss: float | None
    norm: float | None
    rate: float | None
    is_reinforced: bool  # GRPO and the like, where a loss of 0 is usual


def lines(text: str) -> list[Line]:
    """Return the lines with a loss or a norm, in their order."""
    found = []
    end = 0
    for row in text.splitlines(keepends=True):
        place, end = end, end + len(row)
        if len(row) > LONGEST or not WORDS.search(row) or OTHER.search(row):
            continue
        values = {name: _value(pattern, row) for name, pattern in VALUES.items()}
        if values["loss"] is not None or values["norm"] is not None:
            found.append(Line(place, is_reinforced="reward" in row, **values))
        if len(found) == MOST_LINES:
            break
    return found


def _value(pattern: re.Pattern, row: str) -> float | None:
    match = pattern.search(row)
    return float(match[1]) if match else None


def signs(text: str) -> list[Seen]:
    """Return what the lines of a trainer show, the surest first."""
    told = lines(text)
    return [*_losses(text, told), *_norms(text, told), *_overflows(text), *_rates(text, told), *_seconds(text)]


def _losses(text: str, told: list[Line]) -> Iterator[Seen]:
    with_loss = [line for line in told if line.loss is not None and not line.is_reinforced]
    losses = [line.loss for line in with_loss if line.loss is not None]
    if not losses:
        return
    bad = [line for line in with_loss if line.loss is not None and not abs(line.loss) < float("inf")]
    if bad:
        sentence = "The loss is not a number"
        if bad[0] != with_loss[0]:
            sentence += " from some step on: it was finite before"
        do = "look at the rows of that step, what divides by a count of labels, fp16 overflow, and the learning rate; go on from a checkpoint before it"
        yield _sign(text, bad[0], "loss-nan", sentence, do, "likely")
    zeros = [line for line in with_loss if line.loss == 0]
    is_last = len(zeros) >= 2 and losses[-1] == 0
    odd = [line for line in zeros if line.norm is None or not 0 < line.norm < float("inf") or _is_sqrt2(line.norm)]
    if is_last and odd and (max(losses) > 0.05 or len(zeros) == len(losses)):
        norms = {f"{line.norm:.4g}" for line in zeros if line.norm is not None}
        beside = f", with grad_norm {' or '.join(sorted(norms))}" if 0 < len(norms) <= 2 else ""
        sentence = f"The loss is exactly 0{beside}: NaN is printed so by the Trainer, or no label is counted"
        do = "print the loss itself before the Trainer's filter (logging_nan_inf_filter=False); look for rows whose labels are all -100 (truncation, a wrong template), and fp16"
        yield _sign(text, zeros[0], "loss-zero", sentence, do, "likely")
    if len(losses) >= MANY and len(set(losses)) == 1 and losses[0] != 0:
        sentence = f"The loss is {losses[0]:g} in each of {len(losses)} lines: nothing is trained"
        do = "look whether the learning rate is 0, whether the optimizer has the model's tensors (make it after FSDP or adapters), and whether each step is skipped (fp16 overflow)"
        yield _sign(text, with_loss[0], "loss-constant", sentence, do, "likely")


def _norms(text: str, told: list[Line]) -> Iterator[Seen]:
    with_norm = [line for line in told if line.norm is not None and not line.is_reinforced]
    norms = [line.norm for line in with_norm if line.norm is not None]
    if len(norms) < 2:
        return
    if all(_is_sqrt2(norm) for norm in norms[-2:]):
        sentence = "grad_norm is 1.414, the square root of 2, in step after step: a norm of buffers, not of gradients"
        do = "under stages 1 and 2 set overlap_comm to false, and see whether it goes"
        yield _sign(text, with_norm[-1], "norm-sqrt2", sentence, do, "likely")
    if all(not abs(norm) < float("inf") for norm in norms[-2:]):
        sentence = "grad_norm is nan or inf to the end: each update is skipped, or makes the weights NaN"
        do = "look at the first step with it: its rows, the learning rate, fp16 (take bf16); under stages 1 and 2 try overlap_comm: false"
        yield _sign(text, with_norm[-1], "norm-nan", sentence, do, "likely")
    if len(norms) >= FEW and not any(norms):
        sentence = "grad_norm is 0 in all lines: no gradient reaches a weight that trains"
        do = "look whether anything trains (print_trainable_parameters), whether all labels are -100, and whether the frozen embeddings cut the graph (enable_input_require_grads)"
        yield _sign(text, with_norm[0], "norm-zero", sentence, do, "likely")
    if len(norms) >= MANY and len(set(norms)) == 1 and norms[0] and not _is_sqrt2(norms[0]):
        sentence = f"grad_norm is {norms[0]:g} in each of {len(norms)} lines: it is not measured anew in each step"
        do = "compare it with torch.nn.utils.get_total_norm of the gradients; a constant norm may be that after clipping"
        yield _sign(text, with_norm[0], "norm-constant", sentence, do, "possible")
    finite = [norm for norm in norms if abs(norm) < float("inf")]
    if len(finite) >= FEW and 0.01 * SCALE < statistics.median(finite) < 1000 * SCALE:
        sentence = f"grad_norm is about {statistics.median(finite):,.0f}: as if a loss scale of 65,536 were left in it"
        do = "divide it by 65,536: if the result is usual, gradients are not unscaled before the norm is taken; take DeepSpeed's bf16 section"
        yield _sign(text, with_norm[0], "norm-scaled", sentence, do, "possible")


def _overflows(text: str) -> Iterator[Seen]:
    scales = [float(match[1]) for match in OVERFLOW.finditer(text)]
    # fp16 begins with a scale that is too high, and halves it: some ten steps at first are usual.
    if len(scales) > 20 or (scales and scales[-1] <= 1):
        place = [match.start() for match in OVERFLOW.finditer(text)][-1]
        sentence = f"fp16 overflows in step after step ({len(scales)} skipped): no update is taken in them"
        do = "train in bf16; a model that was trained in bf16 mostly overflows in fp16"
        rests_on = "deepspeed/runtime/fp16/loss_scaler.py"
        yield Seen("overflow-skips", sentence, do, "likely", rests_on, place=place, line=line_at(text, place))


def _rates(text: str, told: list[Line]) -> Iterator[Seen]:
    rated = [line for line in told if line.rate is not None]
    rates = [line.rate for line in rated if line.rate is not None]
    if len(rates) < FEW:
        return
    ended = next((number for number in range(len(rates)) if not any(rates[number:])), len(rates))
    if ended == 0:
        sentence = "The learning rate is 0 in all lines: no weight changes"
        do = "look at the scheduler (warm-up longer than the training, total steps of 0) and whether each step is skipped"
        yield _sign(text, rated[0], "rate-zero", sentence, do, "likely")
    elif len(rates) - ended >= FEW and ended < SHARE * len(rates):
        sentence = f"The learning rate is 0 in the last {len(rates) - ended} of {len(rates)} lines: the schedule ended too early"
        do = "count its steps once: a scheduler that Accelerate prepared steps once for each rank (give it steps x ranks, or do not prepare it), and one that is stepped in each pass counts accumulation as well"
        yield _sign(text, rated[ended], "rate-ends-early", sentence, do, "likely")


def _seconds(text: str) -> Iterator[Seen]:
    seconds = [(float(m[3]) if m[4] == "s/it" else 1 / max(float(m[3]), 1e-9), m.start()) for m in BAR.finditer(text)]
    if len(seconds) < 3 * MANY:
        return
    part = len(seconds) // 4
    early = statistics.median(second for second, _ in seconds[part : 2 * part])
    late = statistics.median(second for second, _ in seconds[-part:])
    if late > 3 * early:
        place = seconds[-part][1]
        sentence = f"Steps take {late:.3g} s at the end and {early:.3g} s before: they become slower"
        do = "look at what grows (memory near its limit: `torch.cuda.empty_cache` warnings of DeepSpeed, a list of losses with graphs, longer rows) and at the loader"
        yield Seen("steps-slow-down", sentence, do, "possible", "the progress bar", place=place, line=line_at(text, place))


def _is_sqrt2(norm: float) -> bool:
    return abs(norm - SQRT2) < 1e-3


def _sign(text: str, line: Line, id: str, sentence: str, do: str, sure) -> Seen:
    rests_on = "the lines of the trainer"
    return Seen(id, sentence, do, sure, rests_on, place=line.place, line=line_at(text, line.place))
