"""Match the size of a tensor with what a training makes: logits, scores of attention, weights, states, buckets.

A match is exact if every factor is known, and round if an unknown count of tokens would be a multiple of 256.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from study.oom.reading import Asked
from study.predictor.setup import Setup
from study.predictor.tracing.transformer import Transformer
from study.spec.shapes import SHAPES

ROUND = 256  # tokens: lengths and their products with rows are mostly multiples of it
LONGEST = 2**21  # tokens of a pass
FEWEST = 64
EXACT = 3
IS_ROUND = 2
POSSIBLE = 1
OF_TOKENS = ("logits", "attention", "activations")  # they grow with the tokens of a pass
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
    found = [*_logits(asked, model), *_attention(asked, model), *_activations(asked, model), *_weights(asked, model)]
    if setup is not None:
        found += [*_states(asked, setup.model, setup), *_buckets(asked, setup)]
        found = [*_traced(asked, setup.model, setup, found)]
    return _best(found)


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
    for match in sorted(found, key=lambda match: (-match.points, match.oddness)):
        best.setdefault(match.cause, match)
    return list(best.values())


def _roundest(low: int, high: int) -> int:
    """Return the number between two that the largest power of two divides."""
    power = 1
    while high // (2 * power) * 2 * power >= max(low, 1):
        power *= 2
    return high // power * power


def _count(asked: Asked, unit: int, known: int | None) -> tuple[int, int] | None:
    """Return how many units the asked size has, and how sure that is: the known count, a round one, or any."""
    low = -(-asked.low // unit)
    high = asked.high // unit
    if known and low <= known <= high:
        return known, EXACT
    if high < FEWEST or high < low or low > LONGEST:
        return None
    roundest = _roundest(low, high)
    return (roundest, IS_ROUND) if roundest % ROUND == 0 else ((low + high) // 2, POSSIBLE)


def _odd(number: int) -> int:
    return number // (number & -number)


def _logits(asked: Asked, model: Dimensions) -> Iterator[Match]:
    if not model.vocabulary:
        return
    for element in (4, 2):
        if counted := _count(asked, model.vocabulary * element, model.tokens):
            tokens, points = counted
            about = "about " if points == POSSIBLE else ""
            factors = f"{about}{tokens:,} tokens x {model.vocabulary:,} words x {DTYPES[element]}"
            yield Match("logits", factors, points, _odd(tokens))


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


def _activations(asked: Asked, model: Dimensions) -> Iterator[Match]:
    for name, width in (("the feed-forward layer", model.ffn), ("the layers", model.hidden)):
        for element in (4, 2):
            counted = _count(asked, width * element, model.tokens) if width else None
            if width and counted and counted[1] >= IS_ROUND:
                points = EXACT if counted[1] == EXACT else POSSIBLE
                factors = f"{counted[0]:,} tokens x {width:,} (the width of {name}) x {DTYPES[element]}"
                yield Match("activations", factors, points, _odd(counted[0]))


def _weights(asked: Asked, model: Dimensions) -> Iterator[Match]:
    for name, shape in model.shapes.items():
        for element in (4, 2):
            if len(shape) > 1 and asked.low <= math.prod(shape) * element <= asked.high:
                sizes = " x ".join(f"{size:,}" for size in shape)
                yield Match("weights", f"{sizes} x {DTYPES[element]}, the shape of {name}", EXACT)
                return


def _states(asked: Asked, model: Transformer, setup: Setup) -> Iterator[Match]:
    """Yield the part of a rank of all trained elements: flat copies of gradients, a master copy, a moment."""
    trained = sum(tensor.elements for tensor in model.tensors if tensor.trains)
    ranks = setup.sharing_ranks if setup.stage or setup.fsdp else 1
    parts = {"all trained elements": trained, f"1/{ranks} of the trained elements": -(-trained // ranks)}
    for name, elements in parts.items():
        for element in (4, 2):
            if asked.low <= elements * element <= asked.high:
                yield Match("optimizer", f"{elements:,} elements x {DTYPES[element]}, {name}", EXACT)


def _buckets(asked: Asked, setup: Setup) -> Iterator[Match]:
    zero = (setup.deepspeed or {}).get("zero_optimization") or {}
    for name in ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"):
        elements = zero.get(name, 5e8 if name == "reduce_bucket_size" and setup.stage else None)
        for element in (4, 2):
            if isinstance(elements, (int, float)) and asked.low <= elements * element <= asked.high:
                yield Match("buckets", f"{int(elements):,} elements x {DTYPES[element]}, {name}", EXACT)


def _traced(asked: Asked, model: Transformer, setup: Setup, found: list[Match]) -> Iterator[Match]:
    """Yield the matches. Those of tokens gain or lose by what the traced pass has of the asked size."""
    sizes, _ = model.allocations(setup.trace_options, setup.micro_batch)
    numbers = [number for number, size in enumerate(sizes) if asked.low <= size <= asked.high]
    tensors = f"{len(numbers)} of the {len(sizes):,} tensors of this pass have this size, as traced"
    for match in found:
        is_traced = bool(numbers) and match.points == EXACT and match.cause in OF_TOKENS
        yield match._replace(points=EXACT + 1, seen=tensors) if is_traced else match
    if numbers and not any(match.points == EXACT for match in found):
        yield Match("activations", f"{sizes[numbers[0]]:,} bytes", IS_ROUND, seen=tensors)
