"""Match the size of a tensor with what a training makes: logits, scores of attention, weights, states, buckets.

A match is exact if every factor is known, and round if an unknown count of tokens would be a multiple of 256.
"""

import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from study.core.shapes import SHAPES
from study.predict.front import BUCKETS, Setup
from study.watch.oom.reading import Asked

ROUND = 256  # tokens: lengths and their products with rows are mostly multiples of it
LONGEST = 2**21  # tokens of a pass
FEWEST = 64
EXACT = 3
IS_ROUND = 2
POSSIBLE = 1
OF_TOKENS = ("logits", "attention", "activations")  # they grow with the tokens of a pass
ORDER = (*OF_TOKENS, "weights", "optimizer", "buckets")  # of equally sure causes
# transformers' names of a config's numbers
NAMES = {
    "vocabulary": ("vocab_size",),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "ffn": ("intermediate_size", "ffn_dim", "n_inner", "d_ff"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
}
COMMON = tomllib.loads(Path(__file__).with_name("common.toml").read_text())
SMALL_SHAPES = ("-micro", "-tiny")
USUAL_BUCKETS = {"reduce_bucket_size": 5e8}
COMMON_ODDNESS = 7  # without a model, a count must be this round
MOST_COMMON = 3  # and so many are named
DTYPES = {4: "4 bytes", 2: "2 bytes", 1: "1 byte"}
EMBEDDING = "the embedding or the head"
STATES_BYTES = 16  # of a trained weight in 16 bits: itself, its gradient, its master copy and two moments
SHARED_BYTES = {"zero1": 12, "zero2": 14, "zero3": 16, "fsdp": 16, "hsdp": 16}  # of these, those that ranks divide
WIDTH_OF_A_LAYER = 128  # Llama and Qwen have a layer for about so much width; GPT-2 and OPT have more


@dataclass(frozen=True)
class Match:
    """A tensor of the asked size. `factors` is its size as a person writes it."""

    cause: str
    factors: str
    points: int
    oddness: int = 0  # an unknown count without its factors of two: 4,096 tokens have 1
    seen: str = ""  # in the traced pass


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """What is known of a model and its passes. None is unknown."""

    vocabulary: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    heads: int | None = None
    sequence: int | None = None
    rows: int | None = None
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of_config(cls, config: dict, **known) -> "Dimensions":
        """Return the dimensions of a config of transformers."""
        text = config.get("text_config")
        if not isinstance(text, dict):
            text = config
        numbers = {ours: _first(text, theirs) for ours, theirs in NAMES.items()}
        known = {name: value for name, value in known.items() if value is not None}
        return cls(**{**numbers, **known})

    @property
    def tokens(self) -> int | None:
        return self.sequence and self.sequence * (self.rows or 1)

    @property
    def has_shape(self) -> bool:
        return any((self.vocabulary, self.hidden, self.ffn, self.heads, self.weights))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the weights; without a model, those that its numbers make."""
        if self.weights:
            return self.weights
        hidden = self.hidden or 0
        ffn = self.ffn or 0
        shapes = {
            EMBEDDING: (self.vocabulary or 0, hidden),
            "a feed-forward layer": (ffn, hidden),
            "a gated feed-forward layer": (2 * ffn, hidden),
            "an attention layer": (hidden, hidden),
            "query, key and value": (3 * hidden, hidden),
        }
        return {name: shape for name, shape in shapes.items() if math.prod(shape)}

    @property
    def parameters(self) -> int | None:
        """Return about how many weights a decoder of this width has. None if its width is unknown."""
        if self.hidden is None or self.ffn is None:
            return None
        of_a_layer = 4 * self.hidden**2 + 3 * self.hidden * self.ffn
        return self.hidden // WIDTH_OF_A_LAYER * of_a_layer + 2 * (self.vocabulary or 0) * self.hidden


def _first(config: dict, names: tuple[str, ...]) -> int | None:
    return next((config[name] for name in names if config.get(name)), None)


def states_bytes(model: Dimensions, arm: str | None, ranks: int | None) -> float | None:
    """Return about what a rank holds of weights, gradients and Adam's states. None if it is unknown, or offloaded."""
    if model.parameters is None or (arm or "").endswith(("_cpu", "_nvme")):
        return None
    of_arms = (shared for name, shared in SHARED_BYTES.items() if (arm or "").startswith(name))
    shared = STATES_BYTES if arm is None else next(of_arms, 0)
    return model.parameters * (STATES_BYTES - shared + shared / (ranks or 1))


def matches(request: Asked, model: Dimensions, setup: Setup | None = None) -> list[Match]:
    """Return what has the asked size, the surest first and one for each cause."""
    if request.is_small:
        return []
    candidates = [*_of_tokens(request, model), *_attention(request, model), *_exact(request, _weights(model))]
    if setup is not None:
        candidates += _exact(request, _states(setup))
        candidates = list(_traced(request, setup, candidates))
    return _best(candidates)


def common(request: Asked) -> list[Match]:
    """Return what has the asked size in common models, for a user who named none: weights, and round counts."""
    shapes = {name: config for name, config in SHAPES.items() if not name.endswith(SMALL_SHAPES)}
    models = {name: Dimensions.of_config(config) for name, config in (shapes | COMMON["models"]).items()}
    by_cause: dict[str, list[Match]] = {}
    for name, model in models.items():
        for match in matches(request, model):
            if match.points >= IS_ROUND and match.oddness <= COMMON_ODDNESS:
                by_cause.setdefault(match.cause, []).append(_as_in(name, match))
    joined = [_joined(each) for each in by_cause.values()]
    return sorted(joined, key=lambda match: match.oddness)


def _as_in(name: str, match: Match) -> Match:
    """Return the match of a common model. Widths are round, so many tensors have their sizes; vocabularies are not."""
    points = IS_ROUND if EMBEDDING in match.factors else POSSIBLE
    return replace(match, points=points, factors=f"{match.factors} (as in {name})")


def _joined(same_cause: list[Match]) -> Match:
    """Return the matches of several models as one."""
    surest = max(match.points for match in same_cause)
    different = {
        match.factors.partition(" (as in")[0]: match for match in reversed(same_cause) if match.points == surest
    }
    best = sorted(different.values(), key=lambda match: match.oddness)[:MOST_COMMON]
    return replace(best[0], factors=", or ".join(match.factors for match in best))


def _best(candidates: list[Match]) -> list[Match]:
    """Return the surest match of each cause, the surest cause first."""
    best: dict[str, Match] = {}
    for match in sorted(candidates, key=lambda match: (-match.points, match.oddness, ORDER.index(match.cause))):
        best.setdefault(match.cause, match)
    return list(best.values())


def _of_tokens(request: Asked, model: Dimensions) -> Iterator[Match]:
    """Yield logits and activations: a number for each token. Any count of tokens can be that of logits."""
    widths = [
        ("logits", model.vocabulary, "words"),
        ("activations", model.ffn, "(the width of the feed-forward layer)"),
        ("activations", model.hidden, "(the width of the layers)"),
    ]
    for (cause, width, what), element in itertools.product(widths, (4, 2)):
        if not width:
            continue
        tokens, points = _count(request, width * element, model.tokens)
        if cause == "activations" and points < EXACT:
            points -= 1
        if points > 0:
            about = "about " if cause == "logits" and points == POSSIBLE else ""
            factors = f"{about}{tokens:,} tokens x {width:,} {what} x {DTYPES[element]}"
            yield Match(cause, factors, points, _odd(tokens))


def _count(request: Asked, unit: int, known: int | None) -> tuple[int, int]:
    """Return how many units the requested size has, and how likely that count is: known, round, any, or none."""
    low = -(-request.low // unit)
    high = request.high // unit
    if known and low <= known <= high:
        return known, EXACT
    if high < max(low, FEWEST) or low > LONGEST:
        return 0, 0
    roundest = _roundest(low, high)
    return (roundest, IS_ROUND) if roundest % ROUND == 0 else ((low + high) // 2, POSSIBLE)


def _roundest(low: int, high: int) -> int:
    """Return the number between two that the largest power of two divides."""
    power = 1
    while high // (2 * power) * 2 * power >= max(low, 1):
        power *= 2
    return high // power * power


def _odd(number: int) -> int:
    return number // (number & -number)


def _attention(request: Asked, model: Dimensions) -> Iterator[Match]:
    """Yield scores of all heads, and masks of none, whose lengths are known or round."""
    rows = {model.rows or 1, 1, 2, 4, 8}
    scores = itertools.product([model.heads] if model.heads else [], (4, 2), rows)
    masks = itertools.product([1], (4, 2, 1), rows)
    for heads, element, count in itertools.chain(scores, masks):
        match = _square(request, model, heads, element, count)
        if match:
            yield match


def _square(request: Asked, model: Dimensions, heads: int, element: int, rows: int) -> Match | None:
    low = math.isqrt(max(0, request.low - 1) // (rows * heads * element)) + 1
    high = math.isqrt(request.high // (rows * heads * element))
    if high < max(low, ROUND):
        return None
    length = _roundest(low, high)
    points = IS_ROUND if rows == (model.rows or 1) else POSSIBLE
    if model.sequence and low <= model.sequence <= high:
        length = model.sequence
        points = EXACT
    elif length % ROUND:
        return None
    of_rows = f"{rows} rows x " if rows > 1 else ""
    of_heads = f"{heads} heads x " if heads > 1 else ""
    factors = f"{of_rows}{of_heads}{length:,} x {length:,} tokens x {DTYPES[element]}"
    return Match("attention", factors, points, _odd(length))


def _exact(request: Asked, tensors: Iterator[tuple[str, float, str]]) -> Iterator[Match]:
    """Yield the tensors of this size, whose elements do not depend on tokens."""
    for (cause, elements, what), element in itertools.product(tensors, (4, 2)):
        if request.low <= elements * element <= request.high:
            yield Match(cause, what.format(DTYPES[element]), EXACT)


def _weights(model: Dimensions) -> Iterator[tuple[str, float, str]]:
    for name, shape in model.shapes.items():
        if len(shape) > 1:
            sizes = " x ".join(f"{size:,}" for size in shape)
            yield "weights", math.prod(shape), f"{sizes} x {{}}, the shape of {name}"


def _states(setup: Setup) -> Iterator[tuple[str, float, str]]:
    """Yield flat copies of gradients, a master copy or a moment, of all trained elements or a rank's part; buckets."""
    trained = sum(tensor.elements for tensor in setup.model.tensors if tensor.trains)
    ranks = setup.sharing_ranks if setup.stage or setup.fsdp else 1
    part = -(-trained // ranks)
    yield "optimizer", trained, f"{trained:,} elements x {{}}, all trained elements"
    yield "optimizer", part, f"{part:,} elements x {{}}, 1/{ranks} of the trained elements"
    if not setup.stage:
        return
    zero = USUAL_BUCKETS | (setup.deepspeed or {}).get("zero_optimization", {})
    for name in BUCKETS:
        elements = zero.get(name)
        if isinstance(elements, int | float):
            yield "buckets", elements, f"{int(elements):,} elements x {{}}, {name}"


def _traced(request: Asked, setup: Setup, candidates: list[Match]) -> Iterator[Match]:
    """Yield the matches. Those of tokens gain or lose by what the traced pass has of the asked size."""
    tape = setup.model.tape(setup.trace_options, setup.micro_batch)
    sizes = [entry[1] for entry in tape if entry[0] == "made"]
    same = [size for size in sizes if request.low <= size <= request.high]
    if not same:
        yield from candidates
        return
    tensors = f"{len(same)} of the {len(sizes):,} tensors of this pass have this size, as traced"
    exact = [match for match in candidates if match.points == EXACT]
    if not exact:
        yield Match("activations", f"{same[0]:,} bytes", IS_ROUND, seen=tensors)
    for match in candidates:
        is_seen = match in exact and match.cause in OF_TOKENS
        yield replace(match, points=EXACT + 1, seen=tensors) if is_seen else match
