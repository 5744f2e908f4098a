"""Answers for what people combine with sharding: adapters, quantized weights, recomputation, a second model.

Each is a sentence with its numbers and the public threads that ask for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from study.io.numbers import size
from study.machine.gpus import GPUS
from study.predictor.advice.question import beside_bytes
from study.predictor.estimate import estimate
from study.predictor.memory.memory_kinds import outside_bytes
from study.predictor.setup import QUANTIZED_BYTES, Setup
from study.predictor.timing.steptime import Machine, StepTime, step_time
from study.spec.arms import OFFLOADS

SEVERAL = 8  # passes in a step, among which its one update is divided
HOST = "update on host"  # a part of a step
PREFIX = "https://github.com/"
# What reentrant recomputation does with frozen embeddings whose output requires no gradient: if only adapters train,
# and if the head trains, too. Measured with torch 2.13, DeepSpeed 0.19.8 and transformers 5.23 by
# tests/test_recompute_frozen.py. All other combinations have the losses of a training without recomputation.
NO_GRADIENT = "stops at the first backward pass (the loss has no grad_fn)"
SILENT = "leaves the adapters as they are and says nothing"
REENTRANT = {
    "one process": (NO_GRADIENT, SILENT),
    "DDP": (NO_GRADIENT, "stops in the second step (a reduction has not finished)"),
    "ZeRO": ("stops at the first backward pass (loss must be a scalar tensor)", SILENT),
    "FSDP2": (NO_GRADIENT, SILENT),
}


@dataclass(frozen=True)
class Answer:
    """A sentence, and the addresses of the threads."""

    id: str
    sentence: str
    threads: tuple[str, ...]


def answers(setup: Setup, machine: Machine | None = None, other_share: float = 0.0) -> list[Answer]:
    """Return what a setup's combinations cost. `other_share` is the share of the GPU that another program takes."""
    rows = [
        *_frozen_gathered(setup),
        *_quantized(setup),
        *_recomputed(setup),
        *_other_program(setup, machine, other_share),
        *_offloaded(setup, machine),
        *_compiled(setup),
    ]
    return [Answer(id, sentence, tuple(PREFIX + thread for thread in threads)) for id, sentence, threads in rows]


def in_words(answer: Answer) -> str:
    return f"{answer.sentence} ({', '.join(answer.threads)})"


Found = Iterator[tuple[str, str, tuple[str, ...]]]


def gathers(setup: Setup) -> bool:
    """Return whether the ranks gather weights for each layer, because each holds only a part."""
    return setup.ranks > 1 and (setup.stage == 3 or setup.fsdp == "full_shard")


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
    """Quantized models are built outside zero.Init (transformers 5.23), and FSDP shards floats alone."""
    if not (setup.model.is_partly_frozen and gathers(setup)):
        return
    packed = setup if setup.quantized else replace(setup, quantized="nf4")
    elements = sum(map(packed.packed_elements, packed.model.tensors))
    whole_bytes = elements * QUANTIZED_BYTES[packed.quantized or "nf4"]
    holds = "Each rank" if setup.quantized else "If the frozen weights are quantized (QLoRA), each rank"
    yield (
        "quantized_whole",
        f"{holds} holds all {size(whole_bytes)} of {packed.quantized} weights while it loads them: transformers builds "
        f"such a model outside zero.Init. In training it holds {size(packed.scales_bytes)} of scales, and "
        f"{size((whole_bytes - packed.scales_bytes) / setup.sharing_ranks)} of weights: DeepSpeed shards them when it "
        "prepares the model, and FSDP if bnb_4bit_quant_storage is the dtype of the other weights",
        ("huggingface/peft/issues/1972", "huggingface/peft/issues/2016", "deepspeedai/DeepSpeed/issues/5637"),
    )


def _recomputed(setup: Setup) -> Found:
    if not (setup.model.is_partly_frozen and setup.checkpointing):
        return
    without = replace(setup, checkpointing=False)
    kept = estimate(without).peak_bytes - estimate(setup).peak_bytes
    engine = _engine(setup)
    yield (
        "recomputed_frozen",
        f"Recomputation saves {size(kept)} at the peak. With frozen embeddings, both of its kinds train adapters as "
        "without it, in each stage, if transformers 5.23 switches it on: it lets the embeddings' output require a "
        f"gradient. Elsewhere the reentrant kind gives adapters none: under {engine} it {REENTRANT[engine][0]}; if the "
        f"head trains as well, it {REENTRANT[engine][1]}. Pass use_reentrant=False, or call "
        "model.enable_input_require_grads()",
        ("deepspeedai/DeepSpeed/pull/7780", "deepspeedai/DeepSpeed/pull/8214", "verl-project/verl/issues/3380"),
    )
    if setup.fsdp and setup.checkpointing is True:
        older = replace(setup, library=replace(setup.library, keeps_inputs=True))
        more = estimate(older).peak_bytes - estimate(setup).peak_bytes
        yield (
            "kept_by_fsdp1",
            f"FSDP1 with reentrant recomputation needs {size(more)} more at the peak, if transformers is older than "
            "4.52: it keeps the inputs of frozen layers and their gradients until the backward pass ends. Pass "
            "use_reentrant=False, or use FSDP2",
            ("pytorch/pytorch/issues/95805", "pytorch/pytorch/pull/101982"),
        )


def _engine(setup: Setup) -> str:
    if setup.stage:
        return "ZeRO"
    if setup.fsdp:
        return "FSDP2"
    return "DDP" if setup.ranks > 1 else "one process"


def _other_program(setup: Setup, machine: Machine | None, other_share: float) -> Found:
    """A reference model or an inference engine has a part of the GPU, and gets the weights after each update."""
    if not (machine and other_share):
        return
    gpu = machine.gpu
    total = GPUS[gpu].memory_bytes
    taken = beside_bytes(gpu, other_share)
    whole = estimate(setup)
    states = sum(whole.after_step.values())
    most = max(0.0, 1 - (whole.peak_bytes + outside_bytes(setup.ranks)) / total)
    weights = setup.model.parameters * setup.weight_bytes
    text = (
        f"{size(taken)} of each {gpu} belong to another program; between steps {size(max(0.0, total - taken - states))}"
        f" are free. The training itself fits beside {most:.0%}; an inference engine that sleeps during the update "
        "(vLLM's sleep mode) counts at the weight sync alone. "
    )
    part: float = weights
    if gathers(setup):
        part = weights / setup.sharing_ranks
        largest = max(tensor.elements for tensor in setup.model.tensors) * setup.weight_bytes
        ends = "fits" if states + weights <= total - taken else "runs out of memory"
        text += (
            f"A sync that gathers all weights at once adds {size(weights)} to {size(states)} of states and {ends}; "
            f"tensor by tensor it adds {size(largest)} at most. "
        )
    text += f"A reference model adds {size(part)} to each rank"
    threads = ("modelscope/ms-swift/issues/7986", "huggingface/trl/pull/3133", "vllm-project/vime/pull/190")
    yield "beside", text, threads


def _offloaded(setup: Setup, machine: Machine | None) -> Found:
    """Offloading trades memory of the GPU for seconds on the host and on the link to it."""
    kept = _without_offload(setup)
    if not (setup.on_gpu and machine and kept != setup):
        return
    gpu = machine.gpu
    passes = SEVERAL * setup.accumulation
    offloaded = step_time(setup, machine)
    on_gpu = step_time(kept, machine)
    longer = offloaded.seconds / on_gpu.seconds
    ours, theirs = (step_time(replace(each, accumulation=passes), machine).seconds for each in (setup, kept))
    whole = estimate(kept).peak_bytes
    saved = whole - estimate(setup).peak_bytes
    fits = "fits" if whole + outside_bytes(setup.ranks) <= GPUS[gpu].memory_bytes else "does not fit"
    yield (
        "offloaded",
        f"Offloading makes a step {longer:.1f} times as long, predicted: {offloaded.seconds:.3g} s instead of "
        f"{on_gpu.seconds:.3g} s ({_parts(offloaded, setup, machine)}); with {SEVERAL} times the passes in a step "
        f"{ours / theirs:.1f} times. It saves {size(saved)} of {size(whole)}: without it the training {fits} on {gpu}. "
        "SuperOffload and ZenFlow are not predicted. They run the host's update beside the passes, and so save at most "
        f"{offloaded.parts.get(HOST, 0.0):.3g} s of a step; ZenFlow is wrong in stages 1 and 2 of DeepSpeed 0.19.8",
        ("deepspeedai/DeepSpeed/issues/7966", "deepspeedai/DeepSpeed/issues/6834", "deepspeedai/DeepSpeed/issues/5469"),
    )


def _without_offload(setup: Setup) -> Setup:
    kept = {name: value for name, value in _zero(setup).items() if name not in OFFLOADS}
    config = setup.deepspeed and setup.deepspeed | {"zero_optimization": kept}
    return replace(setup, deepspeed=config, fsdp_offload=False)


def _zero(setup: Setup) -> dict:
    return (setup.deepspeed or {}).get("zero_optimization", {})


def _parts(step: StepTime, setup: Setup, machine: Machine) -> str:
    """Return the parts of a step that offloading makes longer. That of a disk is unknown without its speed."""
    names = {HOST: "the host's update", "disk": "the disk", "link": "links"}
    parts = [f"{name} {step.parts[part]:.3g} s" for part, name in names.items() if part in step.parts]
    on_disk = any((_zero(setup).get(part) or {}).get("device") == "nvme" for part in OFFLOADS)
    is_left_out = on_disk and setup.stage == 3 and machine.disk_bytes_per_s is None
    return ", ".join([*parts, *["the disk's time is not counted"] * is_left_out])


def _compiled(setup: Setup) -> Found:
    """DeepSpeed's `compile` section asks for DeepCompile, and the script has to start it."""
    if (setup.deepspeed or {}).get("compile", {}).get("deepcompile"):
        text = (
            "DeepCompile is not predicted: this is the training without it. It needs an NVIDIA GPU, PyTorch 2.6 and a "
            "stage from 1 to 3, and begins when the script calls engine.compile(); until then DeepSpeed 0.19.8 trains "
            "without it, and logs one line. It refuses managed_gradient_accumulation=false"
        )
        yield "deepcompile", text, ("deepspeedai/DeepSpeed/pull/7154", "deepspeedai/DeepSpeed/pull/7366")
