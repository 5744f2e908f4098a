"""Answers for what people combine with sharding: adapters, quantized weights, recomputation, a second model.

Each is a sentence with its numbers and the public threads that ask for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from study.errors import Stop
from study.io.numbers import size
from study.machine.gpus import GPUS
from study.predictor.estimate import estimate
from study.predictor.setup import Setup

FOUR_BITS = 0.5  # bytes of a weight
PREFIX = "https://github.com/"


@dataclass(frozen=True)
class Answer:
    """A sentence, and the addresses of the threads."""

    id: str
    sentence: str
    threads: tuple[str, ...]


def answers(setup: Setup, gpu: str | None = None, beside: float = 0.0) -> list[Answer]:
    """Return what a setup's combinations cost. `beside` is the share of the GPU that another program takes."""
    found = [
        *_frozen_gathered(setup),
        *_quantized(setup),
        *_recomputed(setup),
        *_beside(setup, gpu, beside),
        *_compiled(setup),
    ]
    return [Answer(id, sentence, tuple(PREFIX + thread for thread in threads)) for id, sentence, threads in found]


def in_words(answer: Answer) -> str:
    return f"{answer.sentence} ({', '.join(answer.threads)})"


Found = Iterator[tuple[str, str, tuple[str, ...]]]


def gathers(setup: Setup) -> bool:
    """Return whether the ranks gather weights for each layer, because each holds only a part."""
    return setup.ranks > 1 and (setup.stage == 3 or setup.fsdp == "full_shard")


def check_share(beside: float) -> None:
    if not 0 <= beside < 1:
        raise Stop(f"--beside must be at least 0 and less than 1 (got {beside})", "give a share, such as 0.55")


def beside_bytes(gpu: str, beside: float) -> float:
    """Return the bytes of a GPU that are not this training's."""
    return beside * GPUS[gpu].memory_bytes


def _frozen_gathered(setup: Setup) -> Found:
    """Frozen weights need no gradient and no state, but stage 3 shards and gathers them as all others."""
    if not (setup.model.is_partly_frozen and gathers(setup)):
        return
    whole = estimate(replace(setup, deepspeed=None, fsdp=None, group=None))
    moved = estimate(setup).traffic.get("all_gather", 0)
    more = whole.peak_bytes - estimate(setup).peak_bytes
    yield (
        "frozen_gathered",
        f"{setup.model.trained / setup.model.parameters:.2%} of the weights train, and {size(moved)} of weights are "
        "gathered in each step, nearly all of them frozen. Shard nothing that is frozen: under DDP a step moves "
        f"{size(sum(whole.traffic.values()))}, and a rank holds {size(whole.peak_bytes)} at the peak, "
        f"{size(abs(more))} {'more' if more > 0 else 'less'}",
        ("deepspeedai/DeepSpeed/issues/5109", "deepspeedai/DeepSpeed/issues/6507"),
    )


def _quantized(setup: Setup) -> Found:
    """Weights of bitsandbytes are integers unless their storage has another type; libraries shard floats alone."""
    if not (setup.model.is_partly_frozen and gathers(setup)):
        return
    held = FOUR_BITS * (setup.model.parameters - setup.model.trained)
    yield (
        "quantized_whole",
        f"If the frozen weights are loaded in 4 bits (QLoRA), each rank holds all {size(held)} of them and not "
        f"{size(held / setup.sharing_ranks)}: integers are not sharded, neither at load nor later. With "
        "bnb_4bit_quant_storage=torch.bfloat16 (the dtype of the other weights) FSDP shards them",
        ("huggingface/peft/issues/1972", "huggingface/peft/issues/2016", "deepspeedai/DeepSpeed/issues/5637"),
    )


def _recomputed(setup: Setup) -> Found:
    if not (setup.model.is_partly_frozen and setup.checkpointing):
        return
    kept = estimate(replace(setup, checkpointing=False)).peak_bytes - estimate(setup).peak_bytes
    yield (
        "recomputed_frozen",
        f"Recomputation saves {size(kept)} at the peak. With frozen embeddings its reentrant kind gives adapters no "
        "gradient: pass use_reentrant=False, or call model.enable_input_require_grads()",
        ("deepspeedai/DeepSpeed/pull/7780", "deepspeedai/DeepSpeed/pull/8214", "verl-project/verl/issues/3380"),
    )


def _beside(setup: Setup, gpu: str | None, beside: float) -> Found:
    """A reference model or an inference engine has a part of the GPU, and gets the weights after each update."""
    if not (gpu and beside):
        return
    taken = beside_bytes(gpu, beside)
    free = GPUS[gpu].memory_bytes - taken - sum(estimate(setup).after_step.values())
    text = f"{size(taken)} of each {gpu} belong to another program; between steps {size(max(0.0, free))} are free"
    if gathers(setup):
        elements = setup.model.parameters
        largest = max(tensor.elements for tensor in setup.model.tensors)
        whole = elements * setup.weight_bytes
        one = largest * setup.weight_bytes
        enough = "fit" if whole <= free else "do not fit"
        text += (
            f". To hand new weights to an inference engine a rank gathers them: all at once take {size(whole)} and "
            f"{enough}, tensor by tensor {size(one)} at most"
        )
    threads = ("modelscope/ms-swift/issues/7986", "huggingface/trl/pull/3133", "vllm-project/vime/pull/190")
    yield "beside", text, threads


def _compiled(setup: Setup) -> Found:
    """DeepSpeed's `compile` section asks for DeepCompile, and the script has to start it."""
    if (setup.deepspeed or {}).get("compile", {}).get("deepcompile"):
        text = (
            "DeepCompile is not predicted: this is the training without it. It needs an NVIDIA GPU, PyTorch 2.6 and a "
            "stage from 1 to 3, and begins when the script calls engine.compile(); until then DeepSpeed 0.19.8 trains "
            "without it, and logs one line. It refuses managed_gradient_accumulation=false"
        )
        yield "deepcompile", text, ("deepspeedai/DeepSpeed/pull/7154", "deepspeedai/DeepSpeed/pull/7366")
