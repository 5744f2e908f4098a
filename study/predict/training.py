"""A training: a model, a recipe, a batch, a placement and a loop. Every prediction depends on it alone."""

import functools
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal

from study.core.errors import Stop
from study.core.recipes import Recipe
from study.predict.loop import OURS, Loop, spared_bytes, with_fused_layers
from study.predict.optimizer_states import Optimizer
from study.predict.placement import Placement
from study.predict.trace.options import Recomputation, TraceOptions
from study.predict.trace.tape import Pass, Profile, Tensor
from study.predict.trace.transformer import Transformer, traced


@dataclass(frozen=True)
class Batch:
    """What a rank reads in an optimizer step."""

    rows: int = 8  # of a pass; ranks that share rows count shared ones
    passes: int = 1
    tokens: int = 128  # of a row
    recomputation: Recomputation = Recomputation.NONE


# The loss: from all logits at once, as in the trainer; by a kernel that overwrites them; or in pieces, as in Liger.
Loss = Literal["whole", "in_place", "chunked"]
Frozen = Literal["as_weights", "bf16", "bf16_without_autocast", "bf16_except_norms"]
Quantized = Literal["nf4", "nf4_double", "int8"]
# Bytes of a quantized element, and of its scales: bitsandbytes has one of 4 bytes for 64 elements, and can quantize
# these to a byte, with one of 4 bytes for 256 of them (QLoRA, arXiv 2305.14314, section 3). Scales of rows are few.
PACKED = {None: (0, 0), "nf4": (0.5, 4 / 64), "nf4_double": (0.5, 1 / 64 + 4 / 64 / 256), "int8": (1, 0)}
QUANTIZED_BYTES = {kind: sum(both) for kind, both in PACKED.items()}


@dataclass(frozen=True)
class Training:
    """A training, as far as its memory, traffic and time depend on it."""

    model: Transformer
    recipe: Recipe
    batch: Batch = field(default_factory=Batch)
    placement: Placement = field(default_factory=Placement)
    optimizer: Optimizer = "adamw"  # the trainer's, which is PyTorch's fused one
    attention: str = "sdpa"  # or eager, flash2, flash3, cudnn
    # The type of frozen weights: that of the others; bf16 under autocast; bf16, and each product in its weight's type;
    # bf16 under autocast except norms, which TRL keeps in fp32 beside a base in few bits.
    frozen: Frozen = "as_weights"
    quantized: Quantized | None = None  # how frozen linear layers are kept, except the head
    loss: Loss = "whole"
    optimizer_in_backward: bool = False  # each weight is updated as soon as its gradient is complete
    data_bytes: int = 0  # the part of the data set that a rank holds
    loop: Loop = OURS

    def __post_init__(self):
        batch, placement = self.batch, self.placement
        if min(placement.ranks, batch.rows, batch.passes, batch.tokens) < 1:
            raise Stop("ranks, sequences, micro-batches and tokens must be at least 1", "give 1 or more")
        if self.optimizer == "muon" and placement.stage:
            what = "the whole matrices and buffers that DeepSpeed's Muon holds under a ZeRO stage are not predicted"
            raise Stop(what, "measure it, or give another optimizer", "unavailable")
        if self.quantized and not self.model.is_partly_frozen:
            raise Stop("quantized weights do not train", "train adapters: give --lora-rank as well")
        if self.optimizer_in_backward:
            what = "an optimizer within the backward pass is predicted for one process and one micro-batch in a step"
            if not placement.is_alone:
                raise Stop(what, "give --arm single", "unavailable")
            if batch.passes > 1:
                raise Stop(what, "give --accumulation 1: it cannot wait for further micro-batches", "unavailable")
        if batch.tokens % placement.sequence_ranks:
            what = f"{placement.sequence_ranks} ranks do not divide a row of {batch.tokens} tokens"
            raise Stop(what, f"give tokens that are a multiple of {placement.sequence_ranks}")

    # --- the pass of a rank

    @property
    def row_tokens(self) -> int:
        """Tokens of a row that a rank has."""
        return self.batch.tokens // self.placement.sequence_ranks

    @property
    def tokens(self) -> int:
        """Tokens of a rank's microbatch."""
        return self.batch.rows * self.row_tokens

    @property
    def autocast(self) -> bool:
        """Whether products use 16-bit copies of fp32 weights. FSDP gathers the weights in 16 bits already."""
        return self.recipe.autocast is not None and not self.placement.fsdp

    def computes_again(self, block: str) -> bool:
        """Whether the backward pass runs a block again."""
        return self.batch.recomputation is not Recomputation.NONE and block.startswith("layer.")

    @property
    def trace_options(self) -> TraceOptions:
        """All that a trace of the model depends on. A trace knows fewer kinds of training."""
        fsdp = self.placement.fsdp
        precision = "bf16_cast" if self.recipe.weight_bytes == 2 else "fp32"
        if self.recipe.autocast:
            precision = "bf16"
        frozen = "as_weights"
        if self.recipe.autocast and fsdp:
            # Accelerate 1.15 gathers the weights of FSDP2 in 16 bits and runs no autocast beside it: _prepare_fsdp2
            # never calls prepare_model. On an H200 that is 3.34 GB of activations where autocast would keep 4.76.
            precision = "bf16_cast" if fsdp.by_accelerate else "bf16_gathered"
        elif self.model.is_partly_frozen and self.autocast:  # frozen weights differ where the trained ones are in fp32
            frozen = self.frozen.removesuffix("_without_autocast")
            if frozen != self.frozen:
                precision = "fp32"
        return TraceOptions(
            sequence=self.row_tokens,
            precision=precision,
            attention=self.model.attention_taken(self.attention),
            checkpointing=self.batch.recomputation.value,
            zero3_linear=self.placement.has_own_linear,
            cuda=self.placement.on_gpu,
            frozen=frozen,
            quantized_bits=int(8 * PACKED[self.quantized][0]),
            loss=self.loss,
            logits=self.loop.logits,
            keeps_logits=self.loop.keeps_logits,
        )

    @property
    def traced(self) -> Pass:
        """A pass over a microbatch."""
        return traced(self.model, self.trace_options, self.batch.rows)

    @property
    def profile(self) -> Profile:
        """The activations of a microbatch."""
        traced = self.traced.profile
        if not self.loop.fused_layers:
            return traced
        model, is_selective = self.model, self.batch.recomputation is Recomputation.SELECTIVE
        token_bytes = spared_bytes(model.family, model.dimensions, self.recipe.product_bytes, is_selective)

        def spares(block: str) -> bool:
            return block.startswith("layer.") and (is_selective or not self.computes_again(block))

        return with_fused_layers(traced, model.tensors, self.tokens * token_bytes, spares)

    # --- the tensors of a rank

    @property
    def weight_bytes(self) -> int:
        """Of the weights in a pass. Accelerate's FSDP gathers fp32 weights in 16 bits (MixedPrecision.param_dtype)."""
        # Under DDP autocast casts at each product, so weights and gradients stay in fp32: with the same bf16 two ranks
        # have 20.6 bytes a parameter under DDP and 14.2 under stage 1, most of it for this reason (measured on a CPU).
        return 2 if self.placement.fsdp and self.recipe.autocast else self.recipe.weight_bytes

    def kept_bytes(self, tensor: Tensor) -> int:
        """Of an element of a kept tensor between passes."""
        if tensor.packed:
            return self.weight_bytes
        if not tensor.trains and self.frozen != "as_weights" and self.recipe.autocast:
            return 2
        return self.recipe.weight_bytes

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parameter tensors as ranks keep, divide and gather them: a quantized one as fewer elements."""
        kept = []
        for tensor in self.model.tensors:
            if self.packed_elements(tensor):
                elements = ceil(tensor.elements * PACKED[self.quantized][0] / self.weight_bytes)
                tensor = replace(tensor, shape=(elements, 1), packed=True)
            kept.append(tensor)
        return tuple(kept)

    @property
    def copies_bytes(self) -> int:
        """Bytes of the 16-bit copies of weights that autocast keeps for products, if all are there at once."""
        if not self.autocast or self.placement.has_own_linear:
            return 0
        tied = self.model.tensors[:1] if self.model.reads_out_by_embeddings else ()
        read = [each for each in self.tensors if each.is_matrix and (each.block != "embeddings" or each in tied)]
        return sum(2 * each.elements for each in read if self.kept_bytes(each) == 4)

    def packed_elements(self, tensor: Tensor) -> int:
        """The elements of a tensor that are kept quantized: of a frozen linear layer, except the head."""
        is_frozen_linear = len(tensor.shape) == 2 and tensor.block.startswith("layer.") and not tensor.trains
        return tensor.elements if self.quantized and is_frozen_linear else 0

    @property
    def scales_bytes(self) -> int:
        """Bytes of the scales of quantized weights. They are no parameters, so each rank holds all of them."""
        return ceil(PACKED[self.quantized][1] * sum(map(self.packed_elements, self.model.tensors)))
