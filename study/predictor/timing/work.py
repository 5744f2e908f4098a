"""What a GPU has to do for a microbatch: matrix products by their sizes, attention, bytes moved, kernels.

A traced model is followed kernel by kernel (`tracing.py`). For the shapes that have formulas, the products follow from
their matrices, and `kernels.json` has the bytes and the number of all other kernels, as lines through traces of
transformers' own modules. A test compares both ways.
"""

import functools
import json
from collections import defaultdict
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

from study.predictor.architecture import NAMES, Architecture, tensors
from study.predictor.memory.profile import Tensor
from study.predictor.memory.tensor import of_a_rank, tensors_of_a_rank
from study.predictor.setup import Setup
from study.predictor.tracing.transformer import Transformer

PHASES = ("forward", "backward")
GROUPED = ("llama", "gemma2")  # families whose heads may share keys and values
TRANSPOSED = ("gpt2",)  # families that store their matrices as inputs x outputs


class Product(NamedTuple):
    """`count` products of an m x k with a k x n matrix."""

    count: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.count * self.m * self.n * self.k

    @property
    def elements(self) -> int:
        """Elements of both factors and of the product."""
        return self.count * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclass(frozen=True)
class Work:
    """The kernels of a pass over a block of a model."""

    products: tuple[Product, ...] = ()
    attention_flops: float = 0  # of fused kernels; written-out attention is products and moved bytes
    attention_kernels: int = 0
    moved_bytes: float = 0  # read and written by all other kernels
    moving_kernels: int = 0

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products) + self.attention_flops

    @property
    def kernels(self) -> int:
        return len(self.products) + self.attention_kernels + self.moving_kernels


@dataclass(frozen=True)
class Block:
    """A layer, or an end of the model: the work of its forward and backward pass, including recomputation."""

    name: str
    forward: Work
    backward: Work
    tensors: tuple[Tensor, ...] = field(repr=False, default=())

    @property
    def is_layer(self) -> bool:
        return self.name.startswith("layer.")

    @functools.cached_property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    def modules_above(self, elements: int) -> int:
        """How many modules have a tensor with more than `elements` elements."""
        return len({tensor.name.rpartition(".")[0] for tensor in self.tensors if tensor.elements > elements})

    @functools.cached_property
    def trained(self) -> int:
        return sum(tensor.elements for tensor in self.tensors if tensor.trains)


def has_single_kernels(model: Architecture | Transformer) -> bool:
    """Whether norms and activation functions already are single kernels, so that fusing them only saves casts."""
    return isinstance(model, Architecture) and (model.family == "bert" or model.activation == "gelu")


@functools.cache
def blocks(setup: Setup) -> tuple[Block, ...]:
    """The work of a microbatch, block by block, in the order of the forward pass."""
    if setup.tensor_ranks > 1:
        seen = blocks(replace(setup, model=of_a_rank(setup.model, setup.tensor_ranks), tensor_ranks=1))
        own = {tensor.name: tensor for tensor in tensors_of_a_rank(setup.model, setup.tensor_ranks)}
        return tuple(replace(block, tensors=tuple(own[each.name] for each in block.tensors)) for block in seen)
    if setup.sequence_ranks > 1:  # attention has all tokens in some heads: more work than some tokens in all heads
        return tuple(
            replace(block, **{phase: _more_attention(getattr(block, phase), setup.sequence_ranks) for phase in PHASES})
            for block in blocks(replace(setup, sequence=setup.row_tokens, sequence_ranks=1))
        )
    if isinstance(setup.model, Transformer):
        return _seen(setup)
    return _by_formulas(setup)


def _more_attention(work: Work, times: int) -> Work:
    return replace(work, attention_flops=work.attention_flops * times)


# --- traced --------------------------------------------------------------------------------------------------------


def _seen(setup: Setup) -> tuple[Block, ...]:
    model, rows, passes = setup.model, setup.micro_batch, defaultdict(list)
    for phase, block, kind, count, *line in model.work(setup.way, rows):
        numbers = [start + slope * rows for start, slope in zip(line[::2], line[1::2], strict=True)]
        passes[phase, block].append((kind, count, numbers))
    same: dict[Work, Work] = {}  # layers that do the same share one object

    def work(phase: str, name: str) -> Work:
        seen = _work(passes[phase, name])
        return same.setdefault(seen, seen)

    return tuple(
        Block(name, work("forward", name), work("backward", name), of_block)
        for name, of_block in _by_block(setup.model).items()
    )


def _work(kernels: list[tuple[str, int, list[int]]]) -> Work:
    moved = [(count, numbers[0]) for kind, count, numbers in kernels if kind == "other"]
    fused = [(count, numbers[0]) for kind, count, numbers in kernels if kind == "attention"]
    products = []
    for kind, count, numbers in kernels:
        if kind == "product":
            products += [Product(*numbers)] * count
    return Work(
        products=tuple(products),
        attention_flops=sum(flops for _, flops in fused),
        attention_kernels=sum(count for count, _ in fused),
        moved_bytes=sum(size for _, size in moved),
        moving_kernels=sum(count for count, _ in moved),
    )


@functools.cache
def _by_block(model: Architecture | Transformer) -> dict[str, tuple[Tensor, ...]]:
    of_block = defaultdict(list)
    for tensor in tensors(model):
        of_block[tensor.block].append(tensor)
    return {name: tuple(each) for name, each in of_block.items()}


# --- by formulas ---------------------------------------------------------------------------------------------------


def features(model: Architecture, rows: int, sequence: int, block: str) -> list[float]:
    """The values of which the bytes that a block moves are a linear function."""
    tokens, matrices = rows * sequence, [t for t in tensors(model) if t.block == "layer.0" and len(t.shape) == 2]
    if block != "layer":
        table = model.vocabulary * model.hidden
        return [tokens * model.vocabulary, tokens * model.hidden, table, rows * sequence**2]
    widths = [model.hidden, model.inner]
    if model.family in GROUPED:
        widths += [model.heads * model.head_width, model.kv_heads * model.head_width]
    scores = rows * model.heads * sequence**2
    return [*(tokens * width for width in widths), scores, sum(t.elements for t in matrices)]


def _by_formulas(setup: Setup) -> tuple[Block, ...]:
    of_kind = {}
    for name in _by_block(setup.model):
        kind = name.partition(".")[0]
        if kind not in of_kind:
            of_kind[kind] = _formula(setup, kind)
    return tuple(
        Block(name, *of_kind[name.partition(".")[0]], of_block) for name, of_block in _by_block(setup.model).items()
    )


def _formula(setup: Setup, kind: str) -> tuple[Work, Work]:
    """The forward and the backward pass over a block."""
    model, rows, sequence = setup.model, setup.micro_batch, setup.sequence
    products = [product for tensor in _matrices(model, kind) for product in _times(model, tensor, setup)]
    back = [each for p in products for each in (Product(p.count, p.m, p.k, p.n), Product(p.count, p.k, p.n, p.m))]
    fused, heads = 0, rows * model.heads
    if kind == "layer" and setup.attention == "eager":
        width = model.head_width
        scores = [Product(heads, sequence, sequence, width), Product(heads, sequence, width, sequence)]
        back += [p for p in scores for _ in range(2)]
        products += scores
    elif kind == "layer":
        fused = 4 * heads * sequence**2 * model.head_width
    passes = []
    values = features(model, rows, sequence, kind)
    for phase, of_phase, flops in (("forward", products, fused), ("backward", back, 2.5 * fused)):
        kernels, *line = lines()[f"{_family(model)} {_precision(setup)} {setup.attention} {kind} {phase}"]
        moved = sum(a * b for a, b in zip(line, values, strict=True))
        passes.append(Work(tuple(of_phase), flops, 1 if flops else 0, max(0, moved), kernels))
    if setup.checkpointing and kind == "layer":
        passes[1] = _sum(passes)
    return tuple(passes)


def _family(model: Architecture) -> str:
    return f"{model.family} {model.activation}" if model.activation else model.family


def _precision(setup: Setup) -> str:
    """The precision whose lines apply: fp16 is as wide as bf16, and the optimizer's states do not matter."""
    return {"fp16": "bf16", "bf16_pure": "bf16_cast"}.get(setup.precision, setup.precision)


def _sum(passes: list[Work]) -> Work:
    """The work of several passes together."""
    return Work(*(sum((getattr(each, part.name) for each in passes), part.default) for part in fields(Work)))


def _matrices(model: Architecture, kind: str) -> list[Tensor]:
    """The matrices of a block's products. Embeddings are looked up, but a tied head multiplies with them."""
    if kind == "embeddings":
        return []
    if kind == "head" and model.tied and model.family != "bert":
        return [next(tensor for tensor in tensors(model) if tensor.block == "embeddings")]
    name = "layer.0" if kind == "layer" else kind
    return [tensor for tensor in tensors(model) if tensor.block == name and len(tensor.shape) == 2]


def _times(model: Architecture, tensor: Tensor, setup: Setup) -> list[Product]:
    out, into = tensor.shape
    if model.family in TRANSPOSED and tensor.block.startswith("layer"):
        out, into = into, out
    # BERT's pooler and classifier see the first token of each row alone.
    tokens = setup.micro_batch if model.family == "bert" and tensor.block == "head" else setup.tokens
    return [Product(1, tokens, out, into)]


@functools.cache
def lines() -> dict[str, list[float]]:
    """By family, precision, attention, block and phase: the number of kernels, then the bytes for each feature."""
    return json.loads(Path(__file__).with_name("kernels.json").read_text())


def as_architecture(config: dict) -> Architecture:
    """A modern decoder from its config, as `architecture.decoder` makes it from a few numbers."""
    sizes = {key: next(config[name] for name in names if name in config) for key, names in NAMES.items()}
    sizes |= {"vocabulary": config["vocab_size"], "kv_heads": config.get("num_key_value_heads", sizes["heads"])}
    sizes["head_width"] = config.get("head_dim") or sizes["hidden"] // sizes["heads"]
    fixed = dict.fromkeys(("hidden_dropout", "attention_dropout", "embedding_dropout", "rotary"), 0)
    fixed |= {"biases": False, "parallel": False, "tied": config.get("tie_word_embeddings", False)}
    return Architecture(family="llama", **sizes | fixed)
