"""The values that describe a training. Every prediction depends on them alone."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod
from typing import Literal

from study.core import arms
from study.core.errors import Stop
from study.core.settings import AUTOCAST, HALF_WEIGHTS
from study.predict.trace.tape import Tensor
from study.predict.trace.transformer import TraceOptions, Transformer, tensors_of_a_rank


@dataclass(frozen=True, kw_only=True)
class Library:
    """How a library, or one of its older releases, differs from today's.

    Each field moves the error of the rows of more than one published source by a point of a per cent.
    """

    fused_layers: bool = False  # norms and gates are single kernels, or layers are compiled, and keep less
    logits: Literal["fp32", "as_computed"] = "fp32"  # for the loss; older models of transformers leave them in 16 bits
    keeps_logits: bool = False  # the loop holds the model's outputs until the backward pass has ended
    keeps_cache: bool = False  # the model returns keys and values: transformers 4 under a checkpointing not its own
    torch_major: int = 2  # PyTorch 1 set gradients to zero and kept them, and its CUDA context had all kernels
    bucket_view: bool = True  # DDP's gradients are its buckets, as in the trainer; PyTorch's default keeps both


Loss = Literal["whole", "in_place", "chunked"]
Optimizer = Literal["fused", "foreach", "single_tensor", "adamw_8bit", "sgd", "adafactor", "muon"]
ADAMW = ("fused", "foreach", "single_tensor")  # its implementations
Fsdp = Literal["full_shard", "shard_grad_op"]
Frozen = Literal["as_weights", "bf16", "bf16_without_autocast", "bf16_except_norms"]
Quantized = Literal["nf4", "nf4_double", "fp4", "int8"]
# Bytes of a quantized element, and of its scales: bitsandbytes has one of 4 bytes for 64 elements, and can quantize
# these to a byte, with one of 4 bytes for 256 of them (QLoRA, arXiv 2305.14314, section 3). Scales of rows are few.
PACKED_BYTES = {"nf4": 0.5, "nf4_double": 0.5, "fp4": 0.5, "int8": 1.0}
SCALES_BYTES = {"nf4": 4 / 64, "nf4_double": 1 / 64 + 4 / 64 / 256, "fp4": 4 / 64, "int8": 0.0}
QUANTIZED_BYTES = {kind: PACKED_BYTES[kind] + SCALES_BYTES[kind] for kind in PACKED_BYTES}

FP8 = (
    "the memory of a training in fp8 depends on the library, and is unknown here: weights, gradients and states stay "
    "in 16 or 32 bits, and copies in 8 bits come on top (https://github.com/NVIDIA/TransformerEngine/issues/1429)"
)
MUON = "what DeepSpeed's Muon holds under a ZeRO stage (whole matrices, and buffers for them) is not predicted"

# What DeepSpeed leaves to AdamW, by name, so Muon gets GPT-2's `wte` (deepspeed/__init__.py, set_optimizer_flags).
NOT_FOR_MUON = ("embed", "lm_head")
LEAST_8BIT_ELEMENTS = 4096  # bitsandbytes 0.50: smaller tensors keep fp32 (optim/optimizer.py, min_8bit_size)
BLOCK_ELEMENTS = 256  # with one fp32 scale for each block of a moment
QUANTILES_BYTES = 2 * 256 * 4  # the values that 8 bits stand for: a table for each moment, shared by all tensors


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model and how it is trained."""

    model: Transformer
    deepspeed: dict | None = field(default=None, hash=False)  # an arm's config; None: one process, or DDP
    ranks: int = 1
    precision: str = "fp32"
    micro_batch: int = 8
    accumulation: int = 1
    sequence: int = 128
    attention: str = "sdpa"
    checkpointing: int = False  # True: of all layers; n: of every n-th layer; SELECTIVE: of cheap operators
    device: str = "cpu"
    data_bytes: int = 0  # the part of the data set that a rank holds
    # The loss: from all logits at once, as in the trainer; by a kernel that overwrites them; or chunked, as in Liger.
    loss: Loss = "whole"
    optimizer: Optimizer = "fused"  # the trainer's AdamW; foreach needs a copy of a moment during the update
    fsdp: Fsdp | None = None  # PyTorch's own sharding; then deepspeed is None
    # Size of the groups of ranks that shard states (and weights), if each group holds all of them: FSDP's HYBRID_SHARD,
    # or stage 1 within a node. None: all ranks are one group.
    group: int | None = None
    # torch: each layer and the root are units; accelerate: more units, as in the arms
    fsdp_by: Literal["torch", "accelerate"] = "torch"
    fsdp_offload: bool = False  # weights, gradients and optimizer states are on the host
    # The type of frozen weights: that of the others; bf16 under autocast; bf16, and each product in its weight's type;
    # bf16 under autocast except norms, which TRL keeps in fp32 beside a base in few bits.
    frozen: Frozen = "as_weights"
    quantized: Quantized | None = None  # how frozen linear layers are kept, except the head
    tensor_ranks: int = 1  # ranks that divide each layer and read the same rows
    sequence_ranks: int = 1  # ranks that share rows, each with a part of the tokens; micro_batch counts shared rows
    library: Library = field(default_factory=Library)

    def __post_init__(self):
        for name in ("ranks", "micro_batch", "accumulation", "sequence"):
            if getattr(self, name) < 1:
                raise Stop(f"{name} must be at least 1 (got {getattr(self, name)})", "give 1 or more")
        if self.precision == "fp8":
            raise Stop(FP8, "give bf16: fp8 needs no less, unless the library keeps weights in 8 bits", "unavailable")
        if self.optimizer == "muon" and self.stage:
            raise Stop(MUON, "measure it, or give another optimizer", "unavailable")
        if self.quantized and not self.model.is_partly_frozen:
            raise Stop("quantized weights do not train", "train adapters: give --lora-rank as well")
        if self.tensor_ranks > 1 and self.model.lora_rank and not self.fsdp:
            raise Stop("how AutoTP divides adapters is unknown here", "shard by FSDP", "unavailable")
        # What is divided evenly, and among how many. None: it is not divided.
        groups = {"divide layers": self.tensor_ranks, "share rows": self.sequence_ranks, "shard states": self.group}
        for what, size in groups.items():
            if self.ranks % (size or 1):
                raise Stop(f"{self.ranks} ranks do not {what} in groups of {size}", f"give a multiple of {size}")
        if self.sequence % self.sequence_ranks:
            what = f"{self.sequence_ranks} ranks do not divide a row of {self.sequence} tokens"
            raise Stop(what, f"give tokens that are a multiple of {self.sequence_ranks}")

    @classmethod
    def of_arm(cls, model: Transformer, arm_name: str, *, ranks: int = 1, **values) -> "Setup":
        """The setup of an arm in `accelerate_configs/`. An arm for one process has one rank."""
        arm = arms.load_arm(arm_name)
        if arm.distributed_type == "NO":
            ranks = 1
        return cls(model=model, ranks=ranks, **distribution(arm, ranks), **values)

    @classmethod
    def of_settings(cls, model: Transformer, settings, **values) -> "Setup":
        """Return the setup of a run, from its settings or from the requested values of its record."""
        names = ("precision", "micro_batch", "accumulation", "sequence", "attention", "checkpointing")
        values |= {name: getattr(settings, name) for name in names}
        if settings.optimizer not in ("adamw", None):  # None: of older records
            values["optimizer"] = settings.optimizer
        return cls(model=model, **values)

    @property
    def stage(self) -> int:
        return self._zero["stage"]

    @property
    def sharing_ranks(self) -> int:
        """The ranks over which states are sharded, if they are."""
        return self.group or self.ranks

    @property
    def state_ranks(self) -> int:
        """Return the number of ranks that shard the same states: those that have the same part of each layer."""
        return self.sharing_ranks // self.tensor_ranks

    @property
    def second_partition(self) -> int | None:
        """Return the number of ranks that share a second copy of the weights (ZeRO++'s hpZ). None: no copy."""
        among = self._zero["zero_hpz_partition_size"]
        return min(among, self.ranks) if self.stage == 3 and among > 1 else None

    @property
    def _zero(self) -> dict:
        return arms.zero_optimization(self.deepspeed)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a rank."""
        return self.micro_batch * self.row_tokens

    @property
    def row_tokens(self) -> int:
        """Tokens of a row on a rank."""
        return self.sequence // self.sequence_ranks

    def computes_again(self, block: str) -> bool:
        """Return whether the backward pass computes a block again."""
        kind, _, place = block.partition(".")
        return bool(self.checkpointing) and kind == "layer" and int(place) % self.checkpointing == 0

    @property
    def has_own_linear(self) -> bool:
        """Return whether stage 3 computes linear layers itself. PyTorch's keep the gathered weights in the graph."""
        return self.stage == 3 and self._zero.get("memory_efficient_linear", True)

    @property
    def trace_options(self) -> TraceOptions:
        """Return all that a trace of the model depends on."""
        attention = self.attention if self.model.has_fused_attention else "eager"
        return TraceOptions(
            *(self.row_tokens, self._traced_precision, attention, self.checkpointing, self.loss, self.has_own_linear),
            cuda=self.on_gpu,
            logits=self.library.logits,
            frozen=self.frozen.removesuffix("_without_autocast") if self._has_frozen_bf16 else "as_weights",
            quantized_bits=int(8 * PACKED_BYTES[self.quantized]) if self.quantized else 0,
            keeps_logits=self.library.keeps_logits and not self.library.keeps_cache,
        )

    @property
    def _has_frozen_bf16(self) -> bool:
        """Return whether frozen weights are in bf16 beside trained ones in fp32."""
        return self.model.is_partly_frozen and self.autocast and self.frozen != "as_weights"

    @property
    def _traced_precision(self) -> str:
        """Return the precision of the trace. A trace knows fewer kinds than a training."""
        if self._has_frozen_bf16 and self.frozen == "bf16_without_autocast":
            return "fp32"
        if self.precision in AUTOCAST:  # fp16 is as wide as bf16
            return "bf16_gathered" if self.fsdp else "bf16"
        return "bf16_cast" if self.precision in HALF_WEIGHTS else self.precision

    @property
    def autocast(self) -> bool:
        """Return whether products use 16-bit copies of fp32 weights. FSDP gathers the weights in 16 bits already."""
        return self.precision in AUTOCAST and not self.fsdp

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of the weights in a pass, and of the values between layers.

        Accelerate's FSDP gathers fp32 weights in the 16 bits of autocast (MixedPrecision.param_dtype).
        """
        gathered_in_half = self.fsdp and self.precision in AUTOCAST
        return 2 if self.precision in HALF_WEIGHTS or gathered_in_half else 4

    @property
    def reduced_bytes(self) -> int:
        """Bytes of an element of a gradient as ranks reduce it. DeepSpeed's Ulysses sums in fp32 (engine.py)."""
        return 4 if self.deepspeed and self.sequence_ranks > 1 else self.weight_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of an element of the weights that the optimizer updates, and of their gradients."""
        return 2 if self.precision in HALF_WEIGHTS else 4

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parameter tensors as ranks keep, divide and gather them."""
        if self.tensor_ranks > 1:
            return tensors_of_a_rank(self.model, self.tensor_ranks)
        return tuple(map(self.as_kept, self.model.tensors)) if self.quantized else self.model.tensors

    def as_kept(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the model as ranks keep it: a quantized one has fewer elements of the weights' type.

        DeepSpeed shards integers as well, once it has the model (0.19.8 with Linear4bit of bitsandbytes 0.50.2, run on
        two ranks). FSDP needs quantized weights in a float's type.
        """
        if self.quantized is None or not self.packed_elements(tensor):
            return tensor
        elements = ceil(tensor.elements * PACKED_BYTES[self.quantized] / self.weight_bytes)
        return replace(tensor, shape=(elements, 1), packed=True)

    def kept_bytes(self, tensor: Tensor) -> int:
        """Return the bytes of an element of a kept tensor between passes."""
        if tensor.packed:
            return self.weight_bytes
        in_half = not tensor.trains and self.frozen != "as_weights" and self.precision in AUTOCAST
        return 2 if in_half else self.stored_bytes

    @property
    def scales_bytes(self) -> int:
        """Bytes of the scales of quantized weights. They are no parameters, so each rank holds all of them."""
        if self.quantized is None:
            return 0
        return ceil(SCALES_BYTES[self.quantized] * sum(map(self.packed_elements, self.model.tensors)))

    def packed_elements(self, tensor: Tensor) -> int:
        """Return the elements of a tensor that are kept quantized: of a frozen linear layer, except the head.

        The experts of a layer are linear layers where they compute one after the other.
        """
        linear = len(tensor.shape) == 2 and tensor.block.startswith("layer.")
        return tensor.elements if self.quantized and linear and not tensor.trains else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of an element of each moment, and of a master copy."""
        return 2 if self.precision == "bf16_pure" else 4

    @property
    def keeps_master(self) -> bool:
        """Return whether an fp32 copy of the weights is kept without DeepSpeed, too."""
        return self.precision == "bf16_cast"

    def moments_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Return the bytes of the optimizer's moments, for tensors as it has them."""
        return held_bytes(self.optimizer, tensors, self.state_bytes)

    def made_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Return the most bytes that an update makes beside weights, gradients and moments."""
        return made_bytes(self.optimizer, tensors, self.state_bytes)

    @property
    def product_bytes(self) -> int:
        """Bytes of an element in matrix products, except those of quantized weights, which are in 16 bits."""
        return 4 if self.precision == "fp32" else 2

    @property
    def has_half_products(self) -> bool:
        """Return whether most matrix products are in 16 bits."""
        return self.product_bytes == 2 or self.quantized is not None


def trainers_name(optimizer: Optimizer) -> str:
    """The trainer's name for an optimizer. All AdamW implementations have the same name."""
    return "adamw" if optimizer in ADAMW else optimizer


def distribution(arm: arms.Arm, ranks: int) -> dict:
    """Return the fields of a setup that say how an arm distributes the training over `ranks` ranks."""
    sharing = arm.sharing_ranks(ranks)
    if arm.fsdp is None:
        shared = {"sequence_ranks": arm.sequence_ranks, "tensor_ranks": arm.tensor_ranks}
        return {"deepspeed": arm.deepspeed} | {name: among for name, among in shared.items() if among > 1}
    kind = "full_shard" if arm.fsdp["fsdp_reshard_after_forward"] else "shard_grad_op"
    by = {"fsdp": kind, "fsdp_by": "accelerate", "fsdp_offload": arm.fsdp["fsdp_offload_params"]}
    return by | ({"group": sharing} if arm.replicas > 1 else {})


# --- what an optimizer keeps as moments, and what it makes during an update. DDP and one process give it each tensor as
# it is, FSDP2 a rank's rows of each tensor, and DeepSpeed's ZeRO one flat vector of all. Optimizers that work by
# matrices or by blocks keep another number of bytes for a vector.


def held_bytes(optimizer: str, tensors: Sequence[Tensor], state_bytes: int) -> int:
    """Bytes of all moments. `state_bytes` are those of an element, unless the optimizer keeps 8 bits."""
    if optimizer != "adamw_8bit":
        return state_bytes * sum(_elements(optimizer, each) for each in tensors)
    large = [each.elements for each in tensors if each.elements >= LEAST_8BIT_ELEMENTS]
    small = sum(each.elements for each in tensors) - sum(large)
    scaled = sum(elements + 4 * ceil(elements / BLOCK_ELEMENTS) for elements in large)
    return 2 * (4 * small + scaled) + (QUANTILES_BYTES if large else 0)


def _elements(optimizer: str, each: Tensor) -> int:
    if optimizer == "sgd":
        return each.elements
    if optimizer == "muon" and len(each.shape) >= 2 and not any(word in each.name.lower() for word in NOT_FOR_MUON):
        return each.elements
    if optimizer == "adafactor":  # torch 2.13: a row and a column of each matrix, and all of a vector
        rows = each.shape[:-1]
        return prod(rows) + each.elements // rows[-1] if rows else each.elements
    return 2 * each.elements


def made_bytes(optimizer: str, tensors: Sequence[Tensor], state_bytes: int) -> int:
    """The most bytes that an update makes beside weights, gradients and moments, one tensor at a time.

    Memory inside bitsandbytes' operator for CPUs is not counted: records do not see it, and the kernel for GPUs needs
    none.
    """
    if optimizer == "foreach":
        return state_bytes * sum(each.elements for each in tensors)
    if optimizer == "single_tensor":  # the root of a second moment
        return state_bytes * max((each.elements for each in tensors), default=0)
    if optimizer == "adafactor":  # the estimate of the second moments; for a vector its squares as well
        return state_bytes * max((each.elements * (1 if len(each.shape) > 1 else 2) for each in tensors), default=0)
    return 0
