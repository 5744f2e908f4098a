"""The options of a trace, and what is true of a model in every training."""

from enum import Enum
from typing import NamedTuple


class Recomputation(Enum):
    """What the backward pass computes again: of each layer nothing, all, or a part."""

    NONE = False
    ALL = True
    SELECTIVE = -1  # torchtitan's: all but attention and every second product


class TraceOptions(NamedTuple):
    """All that decides a pass over a model, besides the number of rows."""

    sequence: int
    precision: str  # fp32, bf16, bf16_cast; or bf16_gathered: autocast over weights that FSDP gathers in bf16
    attention: str
    checkpointing: int = False  # the value of a Recomputation
    loss: str = "whole"  # from all logits; in_place: by a kernel that overwrites them; chunked: by one without them
    zero3_linear: bool = False  # linear layers are stage 3's own: see kernels.py
    cuda: bool = False  # kernels keep what CUDA's do: see study/core/models/on_cuda.py
    logits: str = "fp32"  # or as_computed: the type of the logits in the loss
    frozen: str = "as_weights"  # or bf16, or bf16_except_norms: the type of the frozen weights
    quantized_bits: int = 0  # of frozen linear layers, which bitsandbytes' products read; 0: none
    keeps_logits: bool = False  # the loop holds the model's output during the backward pass


class Look(NamedTuple):
    """All that is true of a model in every training."""

    kind: str  # decoder, encoder, seq2seq, vision or speech
    family: str
    tensors: list[tuple[str, list[int], str, bool]]
    buffers_bytes: int
    has_fused_attention: bool  # by PyTorch's scaled_dot_product_attention
    limit: int | None  # tokens of a row
    vocabulary: int | None
    has_checkpointing: bool  # transformers can recompute its activations
