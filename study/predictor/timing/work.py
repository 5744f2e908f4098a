"""The work of a GPU for a microbatch: matrix products by their sizes, attention, bytes moved, kernels.

The model is followed kernel by kernel (`tracing/tracing.py`).
"""

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

from study.predictor.memory.profile import Tensor
from study.predictor.memory.tensor import of_a_rank, tensors_of_a_rank
from study.predictor.setup import QUANTIZED_BYTES, Setup
from study.predictor.tracing.transformer import Transformer

EXPERT = "of_an_expert"
# Kernels of an expert: its tokens are found, three products, the gate, the weights, the sum. A test counts them.
LOOP_KERNELS = {"forward": 10, "backward": 20}
# The host's work for a product with quantized weights, in kernels beside the product's, in both passes. Other kinds: 7
# and 4. Measured with bitsandbytes 0.50 on two CPU cores (reproductions/laboratories/host_hooks.py); int8: counted in
# 0.43.3.
QUANTIZED_KERNELS = {"nf4_double": (9, 6), "int8": (25, 10)}


@dataclass(frozen=True)
class Product:
    """`number` products of an m x k with a k x n matrix."""

    number: int
    m: int
    n: int
    k: int
    element_bytes: int | None = None  # of the factors; None: as a setup's products

    @property
    def flops(self) -> int:
        return 2 * self.number * self.m * self.n * self.k

    @property
    def elements(self) -> int:
        """Elements of both factors and of the product."""
        return self.number * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclass(frozen=True)
class Work:
    """The kernels of a pass over a block of a model."""

    products: tuple[Product, ...] = ()
    attention_flops: float = 0  # of fused kernels; written-out attention is products and moved bytes
    attention_kernels: int = 0
    moved_bytes: float = 0  # read and written by all other kernels
    moving_kernels: int = 0
    lasting_bytes: float = 0  # of these, for weights that are quantized: no fusing spares them
    python_kernels: int = 0  # Python that takes the host as long as launching so many kernels

    def and_then(self, other: "Work") -> "Work":
        """Return the kernels of both."""
        return Work(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Work)))

    @property
    def kernels(self) -> int:
        return len(self.products) + self.attention_kernels + self.moving_kernels + self.python_kernels


@dataclass(frozen=True)
class Block:
    """A layer, or an end of the model: the work of its forward and backward pass, including recomputation."""

    name: str
    forward: Work
    backward: Work
    tensors: tuple[Tensor, ...] = field(repr=False, default=())

    def with_work(self, changed: Callable[[Work], Work]) -> "Block":
        """Return the block with other work in both passes."""
        return replace(self, forward=changed(self.forward), backward=changed(self.backward))

    @property
    def is_layer(self) -> bool:
        return self.name.startswith("layer.")

    @functools.cached_property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    def modules_above(self, elements: int) -> int:
        """Return the number of modules that have a tensor with more than `elements` elements."""
        return len({tensor.name.rpartition(".")[0] for tensor in self.tensors if tensor.elements > elements})

    @functools.cached_property
    def trained(self) -> int:
        return sum(tensor.elements for tensor in self.tensors if tensor.trains)

    @functools.cached_property
    def trained_tensors(self) -> int:
        return sum(tensor.trains for tensor in self.tensors)


def has_single_kernels(model: Transformer) -> bool:
    """Return whether norms and activation functions are single kernels already. Fusing them only saves casts then."""
    return model.family == "bert" or model.dimensions.get("activation_function") == "gelu"


@functools.cache
def blocks(setup: Setup) -> tuple[Block, ...]:
    """Return the work of a microbatch, block by block, in the order of the forward pass."""
    if setup.tensor_ranks > 1:
        seen = blocks(replace(setup, model=of_a_rank(setup.model, setup.tensor_ranks), tensor_ranks=1))
        own = {tensor.name: tensor for tensor in tensors_of_a_rank(setup.model, setup.tensor_ranks)}
        return tuple(replace(block, tensors=tuple(own[each.name] for each in block.tensors)) for block in seen)
    if setup.sequence_ranks > 1:  # attention has all tokens in some heads: more work than some tokens in all heads
        parts = blocks(replace(setup, sequence=setup.row_tokens, sequence_ranks=1))
        return tuple(each.with_work(lambda work: _more_attention(work, setup)) for each in parts)
    if setup.checkpointing and setup.library.recomputes_whole_layers:
        return _with_whole_layers_again(setup, blocks(replace(setup, checkpointing=False)))
    return _traced(setup)


def _with_whole_layers_again(setup: Setup, kept: tuple[Block, ...]) -> tuple[Block, ...]:
    """Return blocks whose layers are computed again from end to end, from those that keep their activations."""
    same: dict[Work, Work] = {}

    def backward(block: Block) -> Work:
        both = block.forward.and_then(block.backward)
        return same.setdefault(both, both) if setup.computes_again(block.name) else block.backward

    return tuple(replace(block, backward=backward(block)) for block in kept)


def _more_attention(work: Work, setup: Setup) -> Work:
    return replace(work, attention_flops=work.attention_flops * setup.sequence_ranks)


def _traced(setup: Setup) -> tuple[Block, ...]:
    options = setup.trace_options._replace(fused_norms=False)  # of memory alone
    kernels = setup.model.traced(options, setup.micro_batch, setup.library.one_row_as_two).work
    tensors: dict[str, list[Tensor]] = defaultdict(list)
    for tensor in setup.model.tensors:
        tensors[tensor.block] += _of_each_expert(tensor) if setup.library.experts_loop else [tensor]
    same: dict[Work, Work] = {}  # layers that do the same share one object

    def work(phase: str, name: str) -> Work:
        total = _work(kernels.get((phase, name), []))
        again = ["forward"] if phase == "backward" and setup.computes_again(name) else []
        for each in [phase, *again]:
            total = total.and_then(_dequantization(setup, tensors[name], each)) if setup.quantized else total
            total = total.and_then(_loop(tensors[name], each)) if setup.library.experts_loop else total
        return same.setdefault(total, total)

    kept = {name: tuple(map(setup.as_kept, each)) for name, each in tensors.items()}
    return tuple(Block(name, work("forward", name), work("backward", name), kept[name]) for name in tensors)


def _of_each_expert(tensor: Tensor) -> list[Tensor]:
    """Return the matrices of a mixture's tensor: three modules for each expert, of which gate and up are one tensor."""
    if len(tensor.shape) < 3 or not tensor.block.startswith("layer."):
        return [tensor]
    parts = tensor.shape[0] * (2 if "gate_up" in tensor.name else 1)
    shape = (tensor.elements // parts,)
    return [replace(tensor, name=f"{tensor.name}.{number}.{EXPERT}", shape=shape) for number in range(parts)]


def _loop(tensors: list[Tensor], phase: str) -> Work:
    """Return the kernels of a loop over experts, which wait for the host. Their bytes are those of all at once."""
    experts = sum(tensor.name.endswith(EXPERT) for tensor in tensors) // 3
    return Work(moving_kernels=experts * LOOP_KERNELS[phase])


def _dequantization(setup: Setup, tensors: list[Tensor], phase: str) -> Work:
    """Return the kernels that make 16-bit weights of quantized ones, before each product with them."""
    packed = [size for size in map(setup.packed_elements, tensors) if size]
    moved = sum(packed) * (QUANTIZED_BYTES[setup.quantized or "nf4"] + 2)
    kernels = QUANTIZED_KERNELS.get(setup.quantized or "nf4", (7, 4))[phase == "backward"]
    python = ((3 if setup.library.fused_adapters else kernels) - 1) * len(packed)  # Unsloth calls its kernels alone
    return Work(moved_bytes=moved, moving_kernels=len(packed), lasting_bytes=moved, python_kernels=python)


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
