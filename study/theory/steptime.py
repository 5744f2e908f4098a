"""Seconds of an optimizer step, from operations, bytes and datasheets. An interval: at best, and at worst.

How much of its peak a GPU reaches depends on the model and the rows. A product of matrices of widths `a` and `b` with
`t` tokens takes 2 t a b operations and moves t a + t b + a b elements, so that its memory traffic takes, of the time of
its operations, (1/a + 1/b + 1/t) times what the GPU computes per byte (the roofline model). Norms, activation
functions, additions and the gradients add to that traffic. And a GPU waits where Python is slower to launch a layer
than the GPU is to run it.

The constants below were chosen so that the interval holds most published iterations of vTrain (GPT on A100, kernels
not fused: near the worst), MosaicML's llm-foundry (MPT on A100 and H100, FSDP, fused attention) and IBM's
fms-acceleration (Llama and Mistral on A100: near the best, also because causal attention skips half of the operations
that are counted). In DeepSpeed's own examples of stage 3 a layer of few tokens took 10 to 15 ms. Nothing was measured
here.
"""

import functools
from dataclasses import dataclass

from study.machine.gpus import GPUS
from study.spec.arms import Arm
from study.theory import papers
from study.theory.architecture import Architecture, tensors, trained
from study.theory.estimate import Estimate
from study.theory.question import Question
from study.theory.transformer import Transformer


@dataclass(frozen=True)
class Pace:
    """How fast a machine is, against its datasheets."""

    share: float  # of a GPU's peak, in large products
    traffic: float = 0  # memory traffic of a layer, in that of its products alone
    launch_s: float = 0  # of a layer's kernels, for a forward and a backward pass
    fetch_s: float = 0  # the same in stage 3, where Python gathers and releases the weights of each module
    update_bytes: int = 0  # of memory traffic for each parameter that a GPU updates
    link_share: float = 1  # of a link's bandwidth
    pcie_share: float = 1  # of it, between GPUs that share PCIe switches or go through the host


# Adam reads and writes at least fp32 weights and two moments, reads a gradient and writes 16-bit weights: 28 bytes.
BEST = Pace(0.85, traffic=2, launch_s=0.3e-3, fetch_s=0.3e-3, update_bytes=28)
WORST = Pace(0.5, traffic=7, launch_s=3e-3, fetch_s=15e-3, update_bytes=56, link_share=0.7, pcie_share=0.3)


def step_s(
    question: Question, arm: Arm, prediction: Estimate, micro_batch: int
) -> tuple[tuple[float, float], dict[str, float]]:
    """Seconds of a step if all overlaps at the best pace, and if nothing does at the worst; the parts of the latter."""
    best, worst = BEST, WORST
    if question.efficiency is not None:
        best, worst = Pace(question.efficiency), Pace(question.efficiency, link_share=0.7, pcie_share=0.7)
    best, worst = (_seconds(question, arm, prediction, micro_batch, pace) for pace in (best, worst))
    return (papers.overlapped_s(best), sum(worst.values())), worst


@functools.cache
def narrowness(model: Architecture | Transformer) -> float:
    """1/a + 1/b of the layers' matrices, the mean over their elements."""
    shapes = [
        tensor.shape[-2:] for tensor in tensors(model) if len(tensor.shape) > 1 and tensor.block.startswith("layer")
    ]
    elements = sum(a * b for a, b in shapes)
    return sum(a + b for a, b in shapes) / elements if elements else 0.0


def layers(model: Architecture | Transformer) -> int:
    return len({tensor.block for tensor in tensors(model) if tensor.block.startswith("layer")})


def _seconds(question: Question, arm: Arm, prediction: Estimate, micro_batch: int, pace: Pace) -> dict[str, float]:
    """Seconds of a step by the resource that takes them."""
    gpu, ranks, tokens = GPUS[question.gpu], question.gpus, micro_batch * question.sequence
    accumulation = question.batch // ranks // micro_batch
    whole = question.precision == "fp32"
    peak = gpu.single_flops_per_s if whole else gpu.half_flops_per_s
    moving = (2 if whole else 1) * peak / gpu.memory_bytes_per_s * (narrowness(question.model) + 1 / tokens)
    flops = prediction.flops_per_rank_and_step
    computing = flops / (peak * pace.share) + flops / peak * pace.traffic * moving
    launches = accumulation * layers(question.model) * (4 / 3 if question.checkpointing else 1)
    seconds = {"compute": max(computing, launches * (pace.fetch_s if arm.stage == 3 else pace.launch_s))}
    offloads = arm.offload_optimizer != "none"
    if not offloads:
        updated = trained(question.model) / (ranks if arm.stage else 1)
        seconds["update"] = pace.update_bytes * updated / gpu.memory_bytes_per_s
    if ranks > 1:
        share = pace.pcie_share if question.link.startswith("pcie") else pace.link_share
        sent = papers.wire_bytes(prediction.traffic, ranks)
        seconds["link"] = sent / (papers.LINKS[question.link].bytes_per_s * share)
    if not offloads:
        return seconds
    # Gradients go down in each pass that reduces them, and those of earlier passes come up to be added to
    # (stage_1_and_2.py, async_accumulate_grad_in_cpu_via_gpu; stage3.py, partition_grads). Weights come up once a step,
    # or, if they live on the host, for each forward and each backward pass (ZeRO-Infinity, 4.1).
    part = (2 if question.precision == "bf16_cast" else 4) * trained(question.model) / ranks
    passes = accumulation if arm.stage > 1 else 1
    moved = part * (4 * passes - 1 if arm.offload_param != "none" else 2 * passes)
    seconds["host link"] = moved / (papers.LINKS[gpu.host_link].bytes_per_s * pace.link_share)
    # A host updates what all its ranks own; the published speed is that of a whole host.
    updated = trained(question.model) * question.local / ranks
    seconds["update on host"] = updated / 1e9 * papers.CPU_ADAM_S_PER_BILLION
    if arm.uses_nvme:
        disk_bytes = prediction.nvme_bytes["read_per_step"] + prediction.nvme_bytes["written_per_step"]
        seconds["disk"] = question.local * disk_bytes / question.disk_bytes_per_s
    return seconds
