"""Match the size of a tensor with what a training makes: logits, scores of attention, weights, states, buckets.

A match is exact if every factor is known, and round if an unknown count of tokens would be a multiple of 256.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from study.oom.reading import Asked
from study.predictor.setup import Setup
from study.spec.shapes import SHAPES

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
# of models that are no built-in shapes, from their config.json
VOCABULARIES = {
    "Llama 2": 32_000,
    "Qwen2.5-14B": 152_064,
    "Qwen3.5": 248_320,
    "gpt-oss": 201_088,
    "DeepSeek-V3": 129_280,
}
SMALL_SHAPES = ("-micro", "-tiny")
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
COMMON_ODDNESS = 7  # without a model, a count must be this round
MOST_COMMON = 3  # and so many are named
DTYPES = {4: "4 bytes", 2: "2 bytes", 1: "1 byte"}


class Match(NamedTuple):
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
    owner: str = ""  # the model that has these numbers, if the user named none

    @classmethod
    def of_config(cls, config: dict, **known) -> "Dimensions":
        """Return the dimensions of a config of transformers."""
        inner = config.get("text_config")
        text = inner if isinstance(inner, dict) else config
        numbers = {name: next((text[key] for key in keys if text.get(key)), None) for name, keys in NAMES.items()}
        return cls(**{**numbers, **{name: value for name, value in known.items() if value is not None}})

    @property
    def tokens(self) -> int | None:
        return self.sequence and self.sequence * (self.rows or 1)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the weights; without a model, those that its numbers make."""
        if self.weights:
            return self.weights
        hidden = self.hidden
        ffn = self.ffn
        shapes = {"the embedding or the head": (self.vocabulary, hidden), "a feed-forward layer": (ffn, hidden)}
        shapes |= {"a gated feed-forward layer": (ffn and 2 * ffn, hidden), "an attention layer": (hidden, hidden)}
        shapes["query, key and value"] = (hidden and 3 * hidden, hidden)
        return {name: (a, b) for name, (a, b) in shapes.items() if a and b}


def matches(asked: Asked, model: Dimensions, setup: Setup | None = None) -> list[Match]:
    """Return what has the asked size, the surest first and one for each cause."""
    if asked.is_small or asked.high <= 0:
        return []
    matches = [*_of_tokens(asked, model), *_attention(asked, model), *_exact(asked, model, setup)]
    return _best(matches if setup is None else list(_traced(asked, setup, matches)))


def common(asked: Asked) -> list[Match]:
    """Return what has the asked size in common models, for a user who named none: weights, and round counts."""
    models = {name: Dimensions.of_config(config) for name, config in SHAPES.items() if not name.endswith(SMALL_SHAPES)}
    models |= {name: Dimensions(vocabulary=vocabulary) for name, vocabulary in VOCABULARIES.items()}
    found: dict[str, dict[str, Match]] = {}  # by cause and factors
    for name, model in models.items():
        for match in matches(asked, model):
            if match.points >= IS_ROUND and match.oddness <= COMMON_ODDNESS:
                like = match._replace(points=POSSIBLE, factors=f"{match.factors} (as in {name})")
                found.setdefault(match.cause, {}).setdefault(match.factors, like)
    joined = []
    for each in found.values():
        best = sorted(each.values(), key=lambda match: match.oddness)[:MOST_COMMON]
        joined.append(best[0]._replace(factors=", or ".join(match.factors for match in best)))
    return sorted(joined, key=lambda match: match.oddness)


def _best(found: list[Match]) -> list[Match]:
    """Return the surest match of each cause, the surest cause first."""
    best: dict[str, Match] = {}
    for match in sorted(found, key=lambda match: (-match.points, match.oddness, ORDER.index(match.cause))):
        best.setdefault(match.cause, match)
    return list(best.values())


def _roundest(low: int, high: int) -> int:
    """Return the number between two that the largest power of two divides."""
    power = 1
    while high // (2 * power) * 2 * power >= max(low, 1):
        power *= 2
    return high // power * power


def _count(asked: Asked, unit: int, known: int | None) -> tuple[int, int]:
    """Return how many units the requested size has, and how likely that count is: known, round, any, or none."""
    low = -(-asked.low // unit)
    high = asked.high // unit
    if known and low <= known <= high:
        return known, EXACT
    if high < max(low, FEWEST) or low > LONGEST:
        return 0, 0
    roundest = _roundest(low, high)
    return (roundest, IS_ROUND) if roundest % ROUND == 0 else ((low + high) // 2, POSSIBLE)


def _odd(number: int) -> int:
    return number // (number & -number)


def _of_tokens(asked: Asked, model: Dimensions) -> Iterator[Match]:
    """Yield logits and activations: a number for each token. Any count of tokens can be that of logits."""
    widths = [
        ("logits", model.vocabulary, "words"),
        ("activations", model.ffn, "(the width of the feed-forward layer)"),
    ]
    widths.append(("activations", model.hidden, "(the width of the layers)"))
    known = [(cause, width, what, element) for cause, width, what in widths if width for element in (4, 2)]
    for cause, width, what, element in known:
        tokens, points = _count(asked, width * element, model.tokens)
        if cause == "activations":
            points = {IS_ROUND: POSSIBLE, POSSIBLE: 0}.get(points, points)
        if points:
            about = "about " * (points == POSSIBLE and cause == "logits")
            factors = f"{about}{tokens:,} tokens x {width:,} {what} x {DTYPES[element]}"
            yield Match(cause, factors, points, _odd(tokens))


def _attention(asked: Asked, model: Dimensions) -> Iterator[Match]:
    """Yield scores of all heads, and masks of none, whose lengths are known or round."""
    for heads in filter(None, (model.heads, 1)):
        for element in (4, 2, 1) if heads == 1 else (4, 2):
            for rows in {model.rows or 1, 1, 2, 4, 8}:
                yield from _squares(asked, model, heads, element, rows)


def _squares(asked: Asked, model: Dimensions, heads: int, element: int, rows: int) -> Iterator[Match]:
    low = math.isqrt(max(0, asked.low - 1) // (rows * heads * element)) + 1
    high = math.isqrt(asked.high // (rows * heads * element))
    if high < max(low, ROUND):
        return
    is_known = bool(model.sequence and low <= model.sequence <= high)
    length = model.sequence if is_known and model.sequence else _roundest(low, high)
    if not is_known and length % ROUND:
        return
    points = EXACT if is_known else IS_ROUND - (rows != (model.rows or 1))
    what = f"{rows} rows x " * (rows > 1) + f"{heads} heads x " * (heads > 1)
    yield Match("attention", f"{what}{length:,} x {length:,} tokens x {DTYPES[element]}", points, _odd(length))


def _exact(asked: Asked, model: Dimensions, setup: Setup | None) -> Iterator[Match]:
    """Yield the tensors whose elements do not depend on tokens."""
    for cause, elements, what in [*_weights(model), *(_states(setup) if setup else [])]:
        for element in (4, 2):
            if asked.low <= elements * element <= asked.high:
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
    zero = (setup.deepspeed or {}).get("zero_optimization") or {}
    usual = {"reduce_bucket_size": 5e8} if setup.stage else {}
    for name, elements in (usual | zero).items():
        if name in BUCKETS and isinstance(elements, (int, float)):
            yield "buckets", elements, f"{int(elements):,} elements x {{}}, {name}"


def _traced(asked: Asked, setup: Setup, found: list[Match]) -> Iterator[Match]:
    """Yield the matches. Those of tokens gain or lose by what the traced pass has of the asked size."""
    sizes, _ = setup.model.allocations(setup.trace_options, setup.micro_batch)
    numbers = [number for number, size in enumerate(sizes) if asked.low <= size <= asked.high]
    tensors = f"{len(numbers)} of the {len(sizes):,} tensors of this pass have this size, as traced"
    for match in found:
        is_traced = bool(numbers) and match.points == EXACT and match.cause in OF_TOKENS
        yield match._replace(points=EXACT + 1, seen=tensors) if is_traced else match
    if numbers and not any(match.points == EXACT for match in found):
        yield Match("activations", f"{sizes[numbers[0]]:,} bytes", IS_ROUND, seen=tensors)
