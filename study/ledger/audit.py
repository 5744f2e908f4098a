"""Audit of a record before it counts as evidence: numbers that can be computed in two ways must agree.

It looks for the faults of published benchmarks: a total divided by the mean step, ranks averaged instead of added, the
peak of sparse operations, half a step read as a whole step, counts of several steps, an empty run counted as a success.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

from study.io import files
from study.io import parsing as texts
from study.ledger import audit_memory, audit_settings, audit_time, audit_traffic
from study.ledger.tolerances import same
from study.records import store
from study.records.schema import Record
from study.spec.shapes import SHAPES, VOCABULARY

CHANCE = (0.75, 1.5)  # first loss over the loss of a guess, with random weights (0.94 to 1.02 in kept records)
DRAWN = ("random", "in_place")
NEEDED = {
    "requested": ("model", "data", "precision", "micro_batch", "accumulation", "sequence"),
    "observed": ("ranks", "steps", "parameters", "rows_per_step", "tokens_per_step"),
}
MEASURED = {"loss": True, "time": True, "memory": True, "traffic": True, "energy": True, "observed": {"runs"}}


def faults(record: Record, reached: float | None = None) -> list[str]:
    """Why a finished run is not evidence, in words. Empty if it is evidence.

    `reached`: FLOP/s that matrix products were measured to reach on the same device.
    """
    if record.status != "done":
        return []
    if record.is_script:
        checks = (_impossible, _script, audit_time.wall)
    elif any(_lacks(record)):  # the other checks compute with these values
        checks = (_lacks, _impossible)
    else:
        checks = (
            *(_impossible, _did_something, audit_settings.promises, audit_settings.batch),
            *(audit_time.rates, audit_time.operations, audit_time.wall),
            *(audit_memory.memory, audit_memory.reports_of_all_ranks, audit_traffic.counts, _curve),
            *(audit_settings.engine, audit_memory.parameter_shares, audit_memory.state_shares),
            *(audit_traffic.collectives_of_the_stage, audit_time.device, audit_settings.command),
            *(audit_traffic.kernel, audit_traffic.links, functools.partial(audit_time.utilization, reached=reached)),
        )
    return [fault for check in checks for fault in check(record)]


def _lacks(record: Record) -> Iterator[str]:
    for part, names in NEEDED.items():
        for name in names:
            value = getattr(getattr(record, part), name)
            if value is None or (not isinstance(value, str) and not value > 0):
                yield f"{part}.{name} is {value} in a finished run"


def _impossible(record: Record) -> Iterator[str]:
    """No measured number is negative. Only the first one is named. The schema refuses infinity and NaN."""
    numbers = _numbers(record.model_dump(include=MEASURED))
    yield from itertools.islice((f"{path} is {n}" for path, n in numbers if n < 0), 1)


def _numbers(value, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, (dict, list)):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(part, f"{path}.{name}" if path else name)
    elif isinstance(value, (int, float)):
        yield path, value


def _did_something(record: Record) -> Iterator[str]:
    """A run that did nothing is not a success."""
    steps, losses = record.observed.steps, record.loss.train
    if record.requested.init != "none" and not record.time.step_s:
        yield "the run is done, but no step was timed"
    if 0 in record.time.step_s:
        yield "a step took no time"
    if record.is_virtual:
        if losses or record.loss.eval:
            yield "the run is virtual, but has a loss"
    elif not losses:
        yield "the run is done, but has no loss"
    elif len(losses) != steps:
        yield f"{steps} steps have {len(losses)} losses"
    elif len(losses) > 2 and len(set(losses)) == 1:
        yield "the loss is the same at every step"


def _curve(record: Record) -> Iterator[str]:
    """With random weights a curve begins at the loss of a guess."""
    loss, requested = record.loss, record.requested
    if record.is_virtual:
        return
    for each in loss.eval:
        if each.step > record.observed.steps:
            yield f"an evaluation after step {each.step} of {record.observed.steps}"
        if each.accuracy is not None and each.accuracy > 1:
            yield f"the accuracy is {each.accuracy}"
        if each.perplexity is not None and not _is_exp(each.perplexity, each.eval_loss):
            yield f"the perplexity is {each.perplexity}, but the loss {each.eval_loss}"
    vocabulary = SHAPES.get(requested.model, {}).get("vocab_size")
    vocabulary = vocabulary or (VOCABULARY if requested.data == "embedded" else None)
    choices = {"imdb": 2, "wikitext": vocabulary}.get(requested.task)
    if loss.train and choices and requested.init in DRAWN:
        share = loss.train[0] / math.log(choices)
        if not CHANCE[0] <= share <= CHANCE[1]:
            yield f"the first loss is {loss.train[0]:.4g}, {share:.3g} times that of a guess"


def _is_exp(power: float, exponent: float) -> bool:
    return exponent < 700 and same(power, math.exp(exponent))


def _script(record: Record) -> Iterator[str]:
    """Each training of the published script did something."""
    if not record.observed.runs:
        yield "the script is done, but no training is recorded"
    for number, training in enumerate(record.observed.runs, start=1):
        if not training.steps or not training.losses:
            yield f"training {number} is done, but took no step or has no loss"
        if not training.training_s or training.peak_bytes == 0:
            yield f"training {number} took no time, or no memory"


def beside(record: Record, folder: Path) -> list[str]:
    """How the `steps.jsonl` beside a record disagrees with it, if there is one."""
    path = folder / "steps.jsonl"
    if record.status != "done" or record.is_virtual or record.is_script or not path.is_file():
        return []
    losses, evals = [], []
    try:
        content = files.read_below(folder, path.name, store.MAX_BYTES)
        for line in map(texts.from_json, content.decode().splitlines()):
            if line["step"] == 1 and "loss" in line:
                losses, evals = [], []  # the lines above are of an earlier launch into this folder
            if "loss" in line:
                losses.append(line["loss"])
            elif "eval_loss" in line:
                evals.append((line["step"], line["eval_loss"]))
    except OSError as error:
        return [f"steps.jsonl cannot be read: {files.why(error)}"]
    except (ValueError, TypeError, KeyError):
        return ["steps.jsonl cannot be read"]
    pairs = itertools.zip_longest(losses, record.loss.train)
    if wrong := [step for step, pair in enumerate(pairs, start=1) if None in pair or not same(*pair)]:
        return [f"steps.jsonl has another loss at step {wrong[0]}"]
    if evals != [(each.step, each.eval_loss) for each in record.loss.eval]:
        return ["steps.jsonl has other evaluations"]
    return []
