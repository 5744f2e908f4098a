"""What a GPU's kernels keep for the backward pass, where a CPU's keep more."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional

from study.core.models.on_cuda import AsOnCuda
from study.rehearsal.request import Answer, Request

TORCH: Any = torch  # whose parts are replaced


def kernels(request: Request, answer: Answer) -> AbstractContextManager:
    """Return what a script runs in. With --gpu its operations keep what a GPU's keep."""
    if request.real:
        return nullcontext()
    if request.gpu is None:
        note_scores(answer)
        return nullcontext()
    mode = AsOnCuda("eager")  # whatever its attention is, a softmax of its own is as CUDA's
    run_backward = TORCH.autograd._engine_run_backward

    def backward(*args, **kwargs):
        with mode:  # `backward` puts it aside, and layers may run again
            return run_backward(*args, **kwargs)

    TORCH.autograd._engine_run_backward = backward
    return mode


def note_scores(answer: Answer) -> None:
    """Note whether attention drops some of its scores: a CPU's fused kernel is not taken then."""
    attend = functional.scaled_dot_product_attention

    def noted(query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
        answer.keeps_scores |= dropout_p > 0
        return attend(query, key, value, attn_mask, dropout_p, *args, **kwargs)

    vars(functional)["scaled_dot_product_attention"] = noted
