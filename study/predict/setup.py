"""The values that describe a training. Every prediction depends on them alone."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal

from study.core import arms
from study.core.errors import Stop
from study.core.recipes import RECIPES, Recipe
from study.predict.trace.tape import Pass, Tensor
from study.predict.trace.transformer import TraceOptions, Transformer, of_a_rank, part


@dataclass(frozen=True, kw_only=True)
class Library:
    """How a library, or one of its older releases, differs from today's. Each field moves the errors of many rows."""

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
FOUR_BITS = (0.5, 4 / 64)
PACKED = {None: (0, 0), "nf4": FOUR_BITS, "nf4_double": (0.5, 1 / 64 + 4 / 64 / 256), "fp4": FOUR_BITS, "int8": (1, 0)}
QUANTIZED_BYTES = {kind: sum(both) for kind, both in PACKED.items()}

# What DeepSpeed leaves to AdamW, by name, so Muon gets GPT-2's `wte` (deepspeed/__init__.py, set_optimizer_flags).
NOT_FOR_MUON = re.compile("embed|lm_head", re.IGNORECASE)
MOMENTS = {"sgd": 1, "adafactor": 1}  # of a vector; 2 of others
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
    in_ddp: bool = False  # also a single rank, which has DDP's buckets all the same
    fsdp: Fsdp | None = None  # PyTorch's own sharding; then deepspeed is None
    # Ranks in each of the groups that hold all states, as in FSDP's HYBRID_SHARD. None: all ranks are one group.
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
        if min(self.ranks, self.micro_batch, self.accumulation, self.sequence) < 1:
            raise Stop("ranks, rows, passes and tokens must be at least 1", "give 1 or more")
        if self.optimizer == "muon" and self.stage:
            what = "the whole matrices and buffers that DeepSpeed's Muon holds under a ZeRO stage are not predicted"
            raise Stop(what, "measure it, or give another optimizer", "unavailable")
        if self.quantized and not self.model.is_partly_frozen:
            raise Stop("quantized weights do not train", "train adapters: give --lora-rank as well")
        if self.tensor_ranks > 1 and self.model.lora_rank and not self.fsdp:
            raise Stop("how AutoTP divides adapters is unknown here", "shard by FSDP", "unavailable")
        if self.sequence % self.sequence_ranks:
            what = f"{self.sequence_ranks} ranks do not divide a row of {self.sequence} tokens"
            raise Stop(what, f"give tokens that are a multiple of {self.sequence_ranks}")

    @classmethod
    def of_arm(cls, model: Transformer, arm_name: str, *, ranks: int = 1, **values) -> "Setup":
        """Return the setup of an arm in `accelerate_configs/`. An arm for one process has one rank."""
        arm = arms.load_arm(arm_name)
        ranks = 1 if arm.distributed_type == "NO" else ranks
        return cls(model=model, ranks=ranks, **distribution(arm, ranks) | values)

    @classmethod
    def of_settings(cls, model: Transformer, settings, **values) -> "Setup":
        """Return the setup of a run, from its settings or from the requested values of its record."""
        names = ("precision", "micro_batch", "accumulation", "sequence", "attention", "checkpointing")
        values |= {name: getattr(settings, name) for name in names}
        if settings.optimizer not in ("adamw", None):  # older records say none
            values["optimizer"] = settings.optimizer
        return cls(model=model, **values)

    @property
    def zero(self) -> dict:
        return arms.zero_optimization(self.deepspeed)

    @property
    def stage(self) -> int:
        return self.zero["stage"]

    @property
    def has_own_linear(self) -> bool:
        """Whether stage 3 computes linear layers itself. PyTorch's keep the gathered weights in the graph."""
        return self.stage == 3 and self.zero["memory_efficient_linear"]

    @property
    def second_partition(self) -> int | None:
        """The ranks that share a second copy of the weights (ZeRO++'s hpZ). None: no copy."""
        # 1 is DeepSpeed's default, and means no second copy.
        among = self.zero["zero_hpz_partition_size"]
        return min(among, self.ranks) if self.stage == 3 and among > 1 else None

    @property
    def sharing_ranks(self) -> int:
        """The ranks that hold all states together."""
        return self.group or self.ranks

    @property
    def state_ranks(self) -> int:
        """The ranks among which a tensor's states are divided, after layers were divided."""
        return self.sharing_ranks // self.tensor_ranks

    @property
    def row_tokens(self) -> int:
        """Tokens of a row that a rank has."""
        return self.sequence // self.sequence_ranks

    @property
    def tokens(self) -> int:
        """Tokens of a rank's microbatch."""
        return self.micro_batch * self.row_tokens

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def autocast(self) -> bool:
        """Whether products use 16-bit copies of fp32 weights. FSDP gathers the weights in 16 bits already."""
        return self.recipe.autocast is not None and not self.fsdp

    def computes_again(self, block: str) -> bool:
        """Whether the backward pass runs a block again."""
        kind, _, place = block.partition(".")
        return bool(self.checkpointing) and kind == "layer" and int(place) % self.checkpointing == 0

    @property
    def trace_options(self) -> TraceOptions:
        """All that a trace of the model depends on. A trace knows fewer kinds of training than a setup."""
        precision = "bf16_cast" if self.recipe.weight_bytes == 2 else "fp32"
        if self.recipe.autocast:
            precision = "bf16"
        frozen = "as_weights"
        if self.recipe.autocast and self.fsdp:
            # Accelerate 1.15 gathers the weights of FSDP2 in 16 bits and runs no autocast beside it: _prepare_fsdp2
            # never calls prepare_model. On an H200 that is 3.34 GB of activations where autocast would keep 4.76.
            precision = "bf16_cast" if self.fsdp_by == "accelerate" else "bf16_gathered"
        elif self.model.is_partly_frozen and self.autocast:  # frozen weights differ where the trained ones are in fp32
            frozen = self.frozen.removesuffix("_without_autocast")
            if frozen != self.frozen:
                precision = "fp32"
        return TraceOptions(
            sequence=self.row_tokens,
            precision=precision,
            attention=self.attention if self.model.has_fused_attention else "eager",
            checkpointing=self.checkpointing,
            loss=self.loss,
            zero3_linear=self.has_own_linear,
            cuda=self.on_gpu,
            logits=self.library.logits,
            frozen=frozen,
            quantized_bits=int(8 * PACKED[self.quantized][0]),
            keeps_logits=self.library.keeps_logits and not self.library.keeps_cache,
        )

    @property
    def traced(self) -> Pass:
        """A pass over a microbatch, through the part of each layer that a rank has."""
        model = self.model
        if self.tensor_ranks > 1:
            model = of_a_rank(model, self.tensor_ranks)
        return model.traced(self.trace_options, self.micro_batch)

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.precision]

    @property
    def master_bytes(self) -> int:
        """Of an element of the master copy. ZeRO's stages keep one in the type of the moments, even of such weights."""
        # For weights in fp32 the master copy is redundant. On one process with a model of 27.8M parameters it is a part
        # of 28 bytes a parameter at the peak of stages 1 and 2, where plain PyTorch has 16.6 (measured on a CPU).
        return self.recipe.moment_bytes if self.stage else self.recipe.master_bytes

    @property
    def weight_bytes(self) -> int:
        """Of the weights in a pass. Accelerate's FSDP gathers fp32 weights in 16 bits (MixedPrecision.param_dtype)."""
        # Under DDP autocast casts at each product, so weights and gradients stay in fp32: with the same bf16 two ranks
        # have 20.6 bytes a parameter under DDP and 14.2 under stage 1, most of it for this reason (measured on a CPU).
        return 2 if self.fsdp and self.recipe.autocast else self.recipe.weight_bytes

    @property
    def reduced_bytes(self) -> int:
        """Of a gradient as ranks reduce it. DeepSpeed's Ulysses sums in fp32 (engine.py)."""
        # seq_parallel_communication_data_type is fp32 by default (runtime/constants.py).
        return 4 if self.deepspeed and self.sequence_ranks > 1 else self.weight_bytes

    def kept_bytes(self, tensor: Tensor) -> int:
        """Of a kept tensor between passes."""
        if tensor.packed:
            return self.weight_bytes
        if not tensor.trains and self.frozen != "as_weights" and self.recipe.autocast:
            return 2
        return self.recipe.weight_bytes

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parameter tensors as ranks keep, divide and gather them: a quantized one as fewer elements."""
        if self.tensor_ranks > 1:
            whole = of_a_rank(self.model, self.tensor_ranks).tensors
            return tuple(part(tensor, self.tensor_ranks) for tensor in whole)
        kept = []
        for tensor in self.model.tensors:
            if self.packed_elements(tensor):
                elements = ceil(tensor.elements * PACKED[self.quantized][0] / self.weight_bytes)
                tensor = replace(tensor, shape=(elements, 1), packed=True)
            kept.append(tensor)
        return tuple(kept)

    @functools.cached_property
    def trained(self) -> tuple[Tensor, ...]:
        """The tensors that the optimizer updates."""
        return tuple(tensor for tensor in self.tensors if tensor.trains)

    def packed_elements(self, tensor: Tensor) -> int:
        """Return the elements of a tensor that are kept quantized: of a frozen linear layer, except the head."""
        is_frozen_linear = len(tensor.shape) == 2 and tensor.block.startswith("layer.") and not tensor.trains
        return tensor.elements if self.quantized and is_frozen_linear else 0

    @property
    def scales_bytes(self) -> int:
        """Bytes of the scales of quantized weights. They are no parameters, so each rank holds all of them."""
        return ceil(PACKED[self.quantized][1] * sum(map(self.packed_elements, self.model.tensors)))

    def moments_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Return the bytes of the optimizer's moments, for tensors as it has them."""
        return held_bytes(self.optimizer, tensors, self.recipe.moment_bytes)

    def made_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Return the most bytes that an update makes beside weights, gradients and moments."""
        if self.optimizer == "foreach":
            # torch._foreach_sqrt of all second moments is a new list (torch/optim/adam.py, _multi_tensor_adam).
            return self.recipe.moment_bytes * sum(each.elements for each in tensors)
        # Others work at one tensor at a time. They make the root of a second moment; or Adafactor's estimate of the
        # second moments, for a vector its squares as well.
        if self.optimizer not in ("single_tensor", "adafactor"):
            return 0
        of_vectors = 2 if self.optimizer == "adafactor" else 1
        made = [tensor.elements * (1 if tensor.is_matrix else of_vectors) for tensor in tensors]
        return self.recipe.moment_bytes * max(made, default=0)


def distribution(arm: arms.Arm, ranks: int) -> dict:
    """Return the fields of a setup that say how an arm distributes the training over `ranks` ranks."""
    sharing = arm.sharing_ranks(ranks)
    if arm.fsdp is None:
        of_arm = {name: getattr(arm, name) for name in ("deepspeed", "sequence_ranks", "tensor_ranks")}
        return of_arm | {"in_ddp": arm.distributed_type == "MULTI_GPU"}
    return {
        "fsdp": "full_shard" if arm.fsdp["fsdp_reshard_after_forward"] else "shard_grad_op",
        "fsdp_by": "accelerate",
        "fsdp_offload": arm.fsdp["fsdp_offload_params"],
        "group": None if arm.replicas == 1 else sharing,  # a single replica: all ranks shard together
    }


def held_bytes(optimizer: str, tensors: Sequence[Tensor], state_bytes: int) -> int:
    """Return the bytes of all moments, with `state_bytes` for an element unless the optimizer keeps 8 bits."""
    # DDP gives it each tensor, FSDP2 a rank's rows of each, and ZeRO one flat vector, which has no rows.
    if optimizer != "adamw_8bit":
        return state_bytes * sum(_moment_elements(optimizer, each) for each in tensors)
    sizes = [each.elements for each in tensors]
    # Two moments: of small tensors 4 bytes an element; of others 1, and 4 for each block.
    large = [size for size in sizes if size >= LEAST_8BIT_ELEMENTS]
    held = 2 * 4 * (sum(sizes) - sum(large)) + 2 * sum(size + 4 * ceil(size / BLOCK_ELEMENTS) for size in large)
    return held + QUANTILES_BYTES if large else held


def _moment_elements(optimizer: str, tensor: Tensor) -> int:
    if tensor.is_matrix:
        if optimizer == "adafactor":  # torch 2.13: a row and a column of each matrix, and all of a vector
            return tensor.elements // tensor.shape[-1] + tensor.elements // tensor.shape[-2]
        if optimizer == "muon" and not NOT_FOR_MUON.search(tensor.name):
            return tensor.elements
    return MOMENTS.get(optimizer, 2) * tensor.elements
