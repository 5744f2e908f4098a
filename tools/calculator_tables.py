"""Writes `reports/calculator.json.gz`: the memory of the built-in shapes under each arm, as tables of the calculator.

`python tools/calculator_tables.py` computes them as `study estimate` does, in minutes. Rows and
tokens stay open: what is held at a moment of a step is a number of bytes, and a polynomial for the activations. Of all
moments the tables have those that are the peak for some rows and tokens. The buckets are those of `study advise`.
"""

import gzip
import itertools
import json
import sys
from dataclasses import dataclass

import numpy

from study.core import arms, optimizers
from study.core.recipes import RECIPES
from study.core.shapes import SHAPES, config_of
from study.predict.engines import engine_of
from study.predict.estimate import memory
from study.predict.optimizer_states import Optimizer
from study.predict.placement import Placement
from study.predict.prediction import estimate
from study.predict.question import with_buckets
from study.predict.trace import committed
from study.predict.trace.asked import TraceOptions
from study.predict.trace.tape import Gradient, Held, Profile, Tape
from study.predict.trace.transformer import Transformer
from study.predict.training import Batch, Recomputation, Training
from study.report.calculator import ARMS, FILE, GPUS_TRIED, LEAST_TOKENS
from study.report.topics.memory import PARTS

MODES = {"kept": Recomputation.NONE, "recomputed": Recomputation.ALL}
PRECISIONS = ("bf16_cast", "bf16", "fp32")
OPTIMIZERS: tuple[Optimizer, ...] = ("adamw_8bit", "sgd")  # besides AdamW: the peak differs by their states alone
KINDS = ("decoder", "encoder", "seq2seq")  # whose rows have tokens
SAMPLES = [(rows, LEAST_TOKENS + more) for rows in (2, 3, 1) for more in range(3)]
GROUPS = (slice(0, 6), slice(6, 9))  # the samples of passes over several rows, and over one row
# A pass makes activations and temporaries. The calculator shows them as one part.
PART_OF = {role: part for part, roles in enumerate(PARTS.values()) for role in roles}
PART_OF["temporaries"] = PART_OF["activations"]
GRID = [(rows, tokens) for rows in (0, 1, 5, 30, 1000) for tokens in (0, 60, 500, 2000, 8000, 100_000)]  # beyond least


class Bytes(float):
    """Bytes of activations in each sample, with a row for each candidate. They add up like a number."""

    samples: numpy.ndarray

    @classmethod
    def of(cls, samples: numpy.ndarray) -> "Bytes":
        most = cls(samples.max())
        most.samples = samples
        return most

    def __add__(self, other: float) -> "Bytes":
        return Bytes.of(self.samples + (other.samples if isinstance(other, Bytes) else int(other)))

    __radd__ = __add__

    def __sub__(self, other: float) -> "Bytes":
        return Bytes.of(self.samples - int(other))


def differences(samples: numpy.ndarray) -> numpy.ndarray:
    """Return the coefficients of the polynomials through samples, exactly.

    With u tokens and v rows more than the least, a polynomial is the sum of 1, u and u (u - 1) / 2, and for several
    rows of v times the same, each with its coefficient. u and v are never negative.
    """
    first, second, third = (samples[..., start::3] for start in range(3))
    of_tokens = numpy.stack([first, second - first, third - 2 * second + first], axis=-1)
    of_tokens[..., 1:, :] -= of_tokens[..., :1, :]
    return of_tokens.reshape(samples.shape)


def highest(polynomials: numpy.ndarray) -> list[int]:
    """Return the places of the polynomials that are the largest for some rows and tokens, and few others."""
    rows, tokens = numpy.array(GRID, dtype=float).T
    terms = numpy.stack([numpy.ones_like(tokens), tokens, tokens * (tokens - 1) / 2])
    if polynomials.shape[1] == 6:
        terms = numpy.concatenate([terms, rows * terms])
    chosen = numpy.unique((polynomials @ terms).argmax(axis=0)).tolist()
    _, others = numpy.unique(polynomials, axis=0, return_index=True)
    while len(others := others[~_are_covered(polynomials[others], polynomials[chosen])]):
        chosen.append(int(others[polynomials[others].sum(axis=1).argmax()]))
    return chosen


def _are_covered(polynomials: numpy.ndarray, chosen: numpy.ndarray) -> numpy.ndarray:
    """Return for each polynomial whether a mean of two chosen ones is nowhere lower."""
    first, second = chosen[:, None, :].astype(float), chosen[None, :, :].astype(float)
    slope, lack = first - second, polynomials[:, None, None, :] - second
    with numpy.errstate(divide="ignore", invalid="ignore"):
        share = lack / slope  # the first one's least share of the mean, or its most
    least = numpy.where(slope > 0, share, 0).max(axis=-1, initial=0)
    most = numpy.where(slope < 0, share, 1).min(axis=-1, initial=1)
    possible = numpy.all((slope != 0) | (lack <= 0), axis=-1)
    return (possible & (least <= most)).any(axis=(1, 2))


@dataclass
class Event:
    """A moment of the pass: the bytes held then, and at all times since the event before it."""

    name: str
    held: int
    gradient: int  # bytes of the gradient that is complete
    since: list[int]
    last: int  # while the last kernel before it ran that moves bytes


def events(tape: Tape) -> list[Event]:
    """Return the events of a tape."""
    event_list: list[Event] = []
    since: list[int] = []
    sizes: list[int] = []
    held = last = 0
    for kind, what, *rest in tape:
        if kind == "made":
            sizes.append(what)
            held += what
        elif kind == "freed":
            held -= sizes[what]
        elif kind == "kernel":
            since.append(held)
            last = held if what else last
        elif kind == "event":
            event_list.append(Event(what, held, rest[0], since, last))
            since = []
    return event_list


class Pass:
    """A pass over a microbatch in all samples."""

    def __init__(self, model: Transformer, options: TraceOptions, is_stage_3: bool):
        tapes = [model.tape(options._replace(sequence=tokens), rows) for rows, tokens in SAMPLES]
        self.flops = numpy.array([sum(entry[2] for entry in tape if entry[0] == "kernel") for tape in tapes])
        self.inputs = numpy.array([sum(entry[1] for entry in tape if entry[0] == "inputs") for tape in tapes])
        by_name = {tensor.name: tensor for tensor in model.tensors}
        gradients: list[Gradient] = []
        at_use: dict[str, float] = {}
        before_use: dict[str, Held] = {}
        start = []
        for same in zip(*map(events, tapes), strict=True):
            kind, _, name = same[0].name.partition(" ")
            now = Bytes.of(numpy.array([[event.held for event in same]]))
            if kind == "use":
                at_use[name] = now
                before_use |= {name: Held(_most([same]), 0)} if same[0].since and is_stage_3 else {}
            if not gradients:
                start.append(same)
            if kind == "gradient":
                size = same[0].gradient
                if not gradients:
                    making = numpy.array([[event.last for event in same]])  # while the kernel runs that makes it
                    first = Held(Bytes.of(making) - size, 0)
                gradients.append(Gradient(by_name[name], Held(_most([same]) - size, 0), Held(now - size, 0)))
        self.profile = Profile(0, Held(_most(start), 0), at_use, before_use, tuple(gradients), first)


def _most(same: list[tuple[Event, ...]]) -> Bytes:
    """Return the most bytes that are held before some events: a row for each candidate."""
    chosen = []
    for samples in GROUPS:
        of_sample = [[each[number] for each in same] for number in range(len(SAMPLES))[samples]]
        points = numpy.array([[held for event in each for held in event.since] for each in of_sample]).T
        chosen.append(points[highest(differences(points))])
    rows = max(map(len, chosen))
    return Bytes.of(numpy.hstack([numpy.resize(points, (rows, points.shape[1])) for points in chosen]))


class Numbers(dict[tuple[int, ...], int]):
    """The polynomials of a table, each with its place."""

    def __missing__(self, polynomial: tuple[int, ...]) -> int:
        self[polynomial] = len(self)
        return self[polynomial]


def peaks(training: Training, kept: Profile, tables: tuple[Numbers, ...]) -> list[list[list[int]]]:
    """Return the moments that are the peak for some of several rows, and those for one row.

    A moment is the place of its activations in a table, and then the bytes of each part.
    """
    states, times, _ = memory(engine_of(training), kept)
    moments = []
    for _, now in times:
        parts, activations = [0] * len(PARTS), numpy.zeros((1, len(SAMPLES)), dtype=int)
        for role, size in [*states.items(), *now.items()]:
            if isinstance(size, Bytes):
                activations = size.samples
            else:
                parts[PART_OF[role.removeprefix("host_")]] += int(size)
        moments += [(each, parts) for each in activations]
    return [_peaks(moments, samples, table) for samples, table in zip(GROUPS, tables, strict=True)]


def _peaks(moments: list[tuple[numpy.ndarray, list[int]]], samples: slice, table: Numbers) -> list[list[int]]:
    activations = differences(numpy.array([each[samples] for each, _ in moments]))
    whole = activations.copy()
    whole[:, 0] += numpy.array([sum(parts) for _, parts in moments])
    return [[table[tuple(activations[place].tolist())], *moments[place][1]] for place in highest(whole)]


def parts_of(components: dict[str, int]) -> dict[str, int]:
    """Return bytes by the calculator's parts."""
    parts = dict.fromkeys(PARTS, 0)
    names = list(parts)
    for role, size_bytes in components.items():
        parts[names[PART_OF[role]]] += size_bytes
    return parts


def of_model(name: str) -> dict | None:
    """Return the tables of a shape; None if its passes are not in the package."""
    model = Transformer.of(config_of(name), name)
    if committed.look(model.member) is None or model.look.kind not in KINDS:
        return None
    known = {precision: _of_precision(model, precision) for precision in PRECISIONS if _is_known(model, precision)}
    return {"parameters": sum(tensor.elements for tensor in model.tensors), "positions": model.positions} | known


def training_of(
    model: Transformer,
    precision: str,
    arm: str,
    gpus: int,
    passes: int = 1,
    again: Recomputation = Recomputation.NONE,
    optimizer: Optimizer = "adamw",
) -> Training:
    batch = Batch(2, passes, LEAST_TOKENS, again)
    placement = Placement.of(with_buckets(arms.load_arm(arm)), gpus, "cuda")
    return Training(model, RECIPES[precision], batch, placement, optimizer=optimizer)


def _is_known(model: Transformer, precision: str) -> bool:
    every_option = [training_of(model, precision, arm, 2).trace_options for arm in ARMS]
    return all(committed.tape(model.member, options, 2) for options in every_option)


def _of_precision(model: Transformer, precision: str) -> dict:
    moved = {
        arm: [_moved(model, precision, arm, gpus) for gpus in GPUS_TRIED[: 1 if arm == "single" else None]]
        for arm in ARMS
    }
    passes = {mode: _of_passes(model, precision, again) for mode, again in MODES.items()}
    return {"moved": moved} | passes


def _moved(model: Transformer, precision: str, arm: str, gpus: int) -> list:
    """Return the bytes on the host in a step of one pass and of more, on disk, of each collective, and of optimizers.

    Collectives have bytes for each step and for each pass. Of an optimizer it is the difference to AdamW's states.
    """
    one, two = (estimate(training_of(model, precision, arm, gpus, passes)) for passes in (1, 2))
    each = {kind: two.traffic[kind] - size for kind, size in one.traffic.items()}
    collectives = {kind: [size - each[kind], each[kind]] for kind, size in one.traffic.items()}
    others = {name: _difference(model, precision, arm, gpus, name) for name in OPTIMIZERS}
    return [one.host_bytes, two.host_bytes, one.swapped_bytes, collectives, others]


def _difference(model: Transformer, precision: str, arm: str, gpus: int, optimizer: Optimizer) -> list[int] | None:
    """Return how many bytes more than AdamW an optimizer holds on a GPU and the host; None if a library refuses it."""
    if optimizers.refusal(arms.load_arm(arm), optimizer, precision):
        return None
    other = estimate(training_of(model, precision, arm, gpus, optimizer=optimizer))
    adamw = estimate(training_of(model, precision, arm, gpus))
    on_gpu = other.at_peak.get("moments", 0) - adamw.at_peak.get("moments", 0)
    return [on_gpu, other.host_bytes - adamw.host_bytes]


def _of_passes(model: Transformer, precision: str, again: Recomputation) -> dict:
    passes: dict[tuple, Pass] = {}
    tables = (Numbers(), Numbers())
    of_arms: dict[str, list] = {arm: [] for arm in ARMS}
    for arm, gpus in itertools.product(ARMS, GPUS_TRIED):
        if arm == "single" and gpus > 1:
            continue
        trainings = [training_of(model, precision, arm, gpus, count, again) for count in (1, 2)]
        options = trainings[0].trace_options
        if options not in passes:
            passes[options] = Pass(model, options, trainings[0].placement.stage == 3)
        one, more = (peaks(training, passes[options].profile, tables) for training in trainings)
        of_arms[arm].append([one] if one == more else [one, more])
    flops = {}
    for arm in ARMS:
        options = training_of(model, precision, arm, 1, again=again).trace_options
        flops[arm] = _polynomials(passes[options].flops)
    inputs = _polynomials(next(iter(passes.values())).inputs)
    return {"flops": flops, "inputs": inputs, "activations": [[*table] for table in tables], "arms": of_arms}


def _polynomials(samples: numpy.ndarray) -> list[list[int]]:
    return [differences(samples[part]).tolist() for part in GROUPS]


def main(names: list[str]) -> None:
    """Compute the tables of the named shapes, or of all. Others keep theirs."""
    models = json.loads(gzip.decompress(FILE.read_bytes()))["models"] if names else {}
    for name in names or [name for name in SHAPES if not name.endswith(("-micro", "-tiny"))]:
        if tables := of_model(name):
            models[name] = tables
            sys.stderr.write(f"{name}: {', '.join(precision for precision in PRECISIONS if precision in tables)}\n")
    models = {name: models[name] for name in SHAPES if name in models}
    content = json.dumps({"gpus": GPUS_TRIED, "models": models}, separators=(",", ":"))
    FILE.write_bytes(gzip.compress(content.encode(), mtime=0))


if __name__ == "__main__":
    main(sys.argv[1:])
