"""An estimate in words and as a table."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from study.core.arms import Arm
from study.core.errors import Stop
from study.core.gpus import GPUS, Gpu
from study.core.recipes import RECIPES
from study.core.text import binary_size, count, number_of, rounded, size
from study.known.findings import finding
from study.predict.front import (
    ANY_GPU,
    HOST_PROCESS_BYTES,
    Estimate,
    Fits,
    Hardware,
    MemoryKinds,
    Prediction,
    Recomputation,
    StepTime,
    Training,
    deepspeed_keys,
    fits_on,
    papers,
    reserve_bytes,
)
from study.report.accuracy import links
from study.report.rows import of_card, of_others, only_just

FITS = {"yes": "It fits on {}.", "only just": "It fits only just on {}.", "no": "It does not fit on {}."}


@dataclass(frozen=True)
class Needs:
    """What a rank of a training needs."""

    arm: str
    precision: str
    is_usual_precision: bool  # nobody asked for it
    training: Training
    estimate: Estimate
    kinds: MemoryKinds | None  # of a card that is large enough. None: of a rank without a GPU
    fits: Fits | None  # None: nobody said which kind of GPU, or it trains on CPUs
    step: StepTime | None  # None: neither a kind of GPU nor a machine.json
    machine: Hardware | None
    inside_nodes: dict[str, int]  # of the traffic, between ranks of one node, if there are several nodes

    @classmethod
    def of(
        cls,
        arm: Arm,
        precision: str,
        is_usual: bool,
        training: Training,
        machine: Hardware | None,
        per_node: int | None = None,
    ) -> Self:
        """Return what a rank needs; with a machine also whether it fits there, and the time of a step.

        `per_node` are the GPUs of a node, of which bytes between nodes need no more.
        """
        prediction = Prediction(training)
        kinds = fits = None
        if training.placement.on_gpu:
            has_room = machine and fits_on(machine.gpu, prediction.memory.peak_bytes) != "no"
            kinds = prediction.kinds(machine.gpu if machine and has_room else None)
        if machine and kinds:
            if arm.uses_nvme and not machine.disk_bytes_per_s:
                remedy = "give --disk, such as 6GB/s (study calibrate --disk measures yours), or leave --gpu out"
                raise Stop(f"the time of {arm.name} depends on the disk", remedy)
            fits = fits_on(machine.gpu, prediction.memory.peak_bytes, kinds.driver)
        step = prediction.step(machine) if machine else None
        nodes = machine or (Hardware(gpu=GPUS[ANY_GPU], gpus_per_node=per_node) if per_node else None)
        inside = prediction.inside_nodes(nodes) if nodes else {}
        needs = prediction.memory
        if training.placement.ranks == 1:  # records count collectives that libraries call there too, and send nothing
            needs = replace(needs, traffic={})
        return cls(arm.name, precision, is_usual, training, needs, kinds, fits, step, machine, inside)

    @property
    def gpu(self) -> Gpu | None:
        """The kind of GPU on which it trains. None: nobody said which, or it trains on CPUs."""
        return self.machine.gpu if self.machine and self.kinds else None

    @property
    def host_bytes_of_node(self) -> int | None:
        """What all ranks of a node hold on its host. None: nobody said which machine it is."""
        return self.machine.gpus_per_node * self.estimate.host_bytes if self.machine else None


def in_words(needs: Needs) -> list[str]:
    """The peak, whether it fits, and what both were predicted for."""
    gpu, whole = needs.gpu, needs.estimate
    # Three numbers are called memory: what PyTorch allocates, what it holds, and what nvidia-smi shows. The last one
    # depends on the GPU, so it is told only with --gpu.
    memory = "GPU memory" if needs.kinds else "memory"
    ranks = needs.training.placement.ranks
    # Cards, `study advise` and PyTorch's errors mean GiB.
    peak = f"{size(whole.peak_bytes)} ({binary_size(whole.peak_bytes)})"
    text = f"A rank of {ranks} with {needs.arm} needs {peak} of {memory} at the peak, predicted."
    lines = []
    if gpu and needs.kinds and needs.fits:
        reserve = size(reserve_bytes(gpu))
        card = f"{gpu.kind} ({size(gpu.memory_bytes)}, less {reserve} for context and fragmentation)"
        text += f" {FITS[needs.fits].format(card)}"
        # What nvidia-smi shows of a training that does not fit is the whole card.
        if needs.kinds.driver and needs.fits != "no":
            text += f" nvidia-smi, which counts in GiB, will show {of_card(needs.kinds.driver, gpu)}."
        if needs.fits == "only just":
            lines.append(only_just(gpu, whole.peak_bytes, needs.kinds.driver))
    return [text, *lines, *autocast_note(needs.precision, needs.training, needs.gpu), _taken(needs)]


def _taken(needs: Needs) -> str:
    """Two answers that differ often differ in these."""
    batch, precision, gpu = needs.training.batch, needs.precision, needs.gpu
    rows = f"{needs.training.model.rows_in_words(batch.rows, batch.tokens)} per micro-batch"
    is_kept = batch.recomputation is Recomputation.NONE
    activations = "kept (--checkpointing recomputes them)" if is_kept else "recomputed"
    by_default = f" (the default of {needs.arm}; --precision sets it)" if needs.is_usual_precision else ""
    passes = f"{number_of(batch.passes, 'micro-batches')} in a step (--accumulation)"
    text = f"Taken as: {rows}, {passes}, {precision}{by_default}, activations {activations}"
    if needs.training.optimizer == "sgd":
        text += ", SGD with momentum"
    if gpu and needs.machine and needs.training.placement.ranks > 1:
        text += f", {links(needs.machine, needs.training.placement.ranks)} (--link, --gpus-per-node)"
    text += "".join(f", {each}" for each in deepspeed_keys.of_stage_3(needs.training.placement.zero)) + "."
    if gpu and precision.startswith("bf16") and not gpu.has_bf16:
        meant = "DeepSpeed's fp16 is meant, which has as many bytes" if precision == "bf16_cast" else "fp16 is meant"
        text += f" A {gpu.kind} has no bf16: {meant}."
    if gpu and precision == "fp32":
        text += f" {finding('fp32_is_tf32').said}"
    return text


def autocast_note(precision: str, training: Training, gpu: Gpu | None = None) -> list[str]:
    """Return what a rank needs with the 16-bit weights that DeepSpeed usually has, if autocast was asked for."""
    if not (RECIPES[precision].autocast and training.placement.deepspeed):
        return []
    cast = Prediction.of(replace(training, recipe=RECIPES["bf16_cast"]))
    peak_bytes = cast.memory.peak_bytes
    needs = f"{size(peak_bytes)} ({binary_size(peak_bytes)})"
    text = f"{finding('autocast_keeps_fp32_weights', precision=precision).said} It needs {needs}"
    if gpu is None:
        return [f"{text}."]
    fits = FITS[fits_on(gpu, peak_bytes, cast.kinds(gpu).driver)].format(gpu.kind)
    return [f"{text}. {fits}"]


def table(estimate: Estimate, training: Training) -> list[dict]:
    """The parts of the peak, and of what is on the host."""
    parts = estimate.at_peak | {"total": estimate.peak_bytes}
    parts |= {f"on the host: {role}": role_bytes for role, role_bytes in estimate.on_host.items()}
    named = {}
    # A measured rank cannot tell them apart either.
    if 0 < (copies := training.copies_bytes) <= estimate.at_peak.get("activations", 0):
        named["activations"] = f"activations, and up to {size(copies)} of weights that autocast has cast"
    if training.placement.in_ddp:
        named["gradients"] = "gradients, and DDP's buckets"
    if estimate.peak_when == "update":
        named["temporaries"] = "update's copies"
    rows = [{"component": named.get(part, part), "per rank": size(part_bytes)} for part, part_bytes in parts.items()]
    if not {"gradients", "on the host: gradients"} & parts.keys():
        # The peak of one micro-batch is often at its loss, before the backward pass has made a gradient.
        rows.insert(0, {"component": "gradients", "per rank": "none yet"})
    return rows


def model_states(needs: Needs) -> dict[str, float]:
    """What a rank holds by the ZeRO paper, which has a formula for some ways to train."""
    training, stage = needs.training, papers.STAGES.get(needs.arm)
    if stage is None or training.model.is_partly_frozen:
        return {}
    return papers.states_bytes(
        training.model.parameters, stage, training.placement.ranks, needs.precision, training.optimizer
    )


def of_states(needs: Needs, held: Mapping[str, float]) -> list[str]:
    """Whatever activations take, these are known. The paper's own have 16-bit weights."""
    if not held:
        return []
    parts = ", ".join(f"{states} {size(held_bytes)}" for states, held_bytes in held.items())
    total = sum(held.values())
    of = f"{count(needs.training.model.parameters)} parameters"
    of += " with fp32 weights" if RECIPES[needs.precision].autocast else ""
    lines = [f"model states alone, divided as in the ZeRO paper, of {of}: {size(total)} ({parts})"]
    if needs.arm == "zero1" and needs.estimate.peak_bytes < total:
        lines.append(finding("stage_1_keeps_no_gradients").said)
    return lines


def moved(needs: Needs) -> list[str]:
    """What is on the host, what moves in a step, and how long that takes."""
    whole = needs.estimate
    host = f"host memory: {size(whole.host_bytes)} a rank"
    if needs.machine and needs.host_bytes_of_node:
        ranks = needs.machine.gpus_per_node
        with_processes = needs.host_bytes_of_node + ranks * HOST_PROCESS_BYTES
        host += f", {size(needs.host_bytes_of_node)} a node of {number_of(ranks, 'GPUs')}, "
        host += f"and {size(with_processes)} with {size(HOST_PROCESS_BYTES)} for each process"
    if whole.host_bytes:
        host += " (`study advise` says whether a node has so much)"
    lines = [f"{host}; {collectives(whole.traffic, needs.inside_nodes)}"]
    if needs.step:
        lines.append(time_line(needs.step))
    return lines


def collectives(traffic: Mapping[str, int], inside: Mapping[str, int] | None = None) -> str:
    """Return the bytes of each kind. An all-reduce moves its own twice: as a reduce-scatter, and as an all-gather.

    `inside` are those that stay in a node, if there are several nodes and some do.
    """
    sent = []
    for kind, sent_bytes in traffic.items():
        notes = ["sent twice"] if kind == "all_reduce" else []
        if inside:
            near = inside.get(kind, 0)
            places = {"inside nodes": near, "between nodes": sent_bytes - near}
            notes += [f"{size(part)} {where}" for where, part in places.items() if part > 0]
        sent.append(f"{kind} {size(sent_bytes)}" + (f" ({', '.join(notes)})" if notes else ""))
    return f"collectives of a step: {', '.join(sent) or 'none'}"


def time_line(step: StepTime) -> str:
    loops = of_others(step.seconds, step.low_s, step.high_s, step.is_known)
    return f"time, predicted: {rounded(step.seconds, '.3g')} s per step, limited by {step.limit}; {loops}"
