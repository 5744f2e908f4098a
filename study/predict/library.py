"""What a training library does otherwise than today's Accelerate, transformers and PyTorch."""

from dataclasses import dataclass
from typing import Literal


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
