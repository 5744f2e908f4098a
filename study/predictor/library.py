"""What a training library does otherwise than today's Accelerate, transformers and PyTorch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Library:
    """How a library, or one of its older releases, differs from today's."""

    one_row_as_two: bool = False  # Megatron's attention: one row needs as many kernels as two; elsewhere fewer copies
    fused_layers: bool = False  # norms and gates are single kernels, or layers are compiled, and keep less
    fused_adapters: bool = False  # Unsloth's kernels of adapters beside layers in 4 bits, also fms-acceleration's
    logits: Literal["fp32", "as_computed"] = "fp32"  # for the loss; older models of transformers leave them in 16 bits
    keeps_logits: bool = False  # the loop holds the model's outputs until the backward pass has ended
    keeps_cache: bool = False  # the model returns keys and values: transformers 4 under a checkpointing not its own
    experts_loop: bool = False  # transformers 4: experts are linear layers that compute one after the other
    # Checkpointing computes whole layers again, as Megatron's and PyTorch's reentrant kind do. Else a layer is computed
    # until the backward pass has all it needs, which spares its last product. Times depend on it, and what layers with
    # adapters keep, which is taken to be the reentrant kind's.
    recomputes_whole_layers: bool = False
    # None: today's. Older releases keep inputs, compute in fp32 where values are in fp32, and dequantize more slowly.
    bitsandbytes: tuple[int, ...] = ()
    plain_linear: bool = False  # of stage 3: DeepSpeed before 0.19.4, if the model was built outside zero.Init
    torch_major: int = 2  # PyTorch 1 set gradients to zero and kept them, and its CUDA context had all kernels
    bucket_view: bool = True  # DDP's gradients are its buckets, as in the trainer; PyTorch's default keeps both
    fsdp_views: bool = False  # FSDP1's tensors are views of what it gathers and reduces; FSDP2 copies
    fsdp_waits: bool = False  # FSDP2 sums whole gradients in fp32, and reduces them in a step's last pass only
    fsdp_ends: bool = False  # embeddings and output are units of FSDP, too: torchtune's `custom_sharded_layers`
    adapter_units: bool = False  # adapters' matrices are units of FSDP1 (PEFT): the GPU waits for the host of each
    keeps_inputs: bool = False  # checkpointed units of FSDP1 keep those of frozen layers (`memory/kept.py`)
