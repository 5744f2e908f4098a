"""`study estimate`, `study advise` and `study virtual`: what a rank needs, which arm to use, and a virtual rank."""

import dataclasses
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from study.cli import steps
from study.errors import Stop
from study.io.numbers import short, size
from study.io.tables import say, show
from study.machine import hub
from study.machine.gpus import GPUS, gpu_named, num_gpus
from study.predictor import room
from study.predictor.advice import advise as advising
from study.predictor.advice import answer, configure
from study.predictor.advice.purchase import fewest, remedies
from study.predictor.advice.question import Given, Question, bytes_of, counts_of, node_size
from study.predictor.architecture import Architecture
from study.predictor.estimate import Estimate
from study.predictor.estimate import estimate as predict
from study.predictor.memory.memory_kinds import MemoryKinds, in_words, memory_kinds
from study.predictor.outside.written import accuracy
from study.predictor.papers import recipe_of, states_bytes
from study.predictor.setup import Frozen, Fsdp, Loss, Optimizer, Setup, trainers_name
from study.predictor.timing import steptime
from study.predictor.tracing.transformer import CUDA_DIFFERENCES, Transformer
from study.predictor.wanted import Wanted, asked_for, count_of
from study.records import store
from study.records.schema import Record
from study.spec import arms, optimizers
from study.spec.arms import ROOT
from study.spec.optimizers import refusal
from study.spec.options import AsJson
from study.spec.settings import Flags, Settings, check, resolve
from study.spec.shapes import SHAPES, is_local
from study.sweeps import launches
from study.sweeps.protocol import Cell

WIDTH = 100
Model = Annotated[Wanted, tyro.conf.arg(name="")]
Precision = Literal["fp32", "bf16", "fp16", "bf16_cast", "bf16_pure"]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What is predicted for a rank. A bare number of parameters gives no more than the paper's model states."""

    parameters: float
    whole: Estimate | None = None
    kinds: MemoryKinds | None = None
    step: steptime.StepTime | None = None


def estimate(
    wanted: Model,
    *,
    arm: str = "zero3",
    ranks: int = 8,
    precision: Precision = "bf16_cast",
    recipe: str | None = None,
    micro_batch: int = 1,
    accumulation: int = 1,
    sequence: int | None = None,
    checkpointing: bool = False,
    attention: Literal["sdpa", "eager"] | None = None,
    loss: Loss = "whole",
    optimizer: Optimizer = "fused",
    fsdp: Fsdp | None = None,
    frozen: Frozen = "as_weights",
    gpu: str | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    cuda: tuple[Literal["attention", "dropout", "autocast"], ...] = CUDA_DIFFERENCES,
    explain: bool = False,
    as_json: AsJson = False,
) -> dict | None:
    """Predict the memory of one rank and the bytes that it moves in a step. Nothing is run.

    With --gpu the time of a step is predicted too. With --params alone, only the ZeRO paper's model states are given.

    Args:
        wanted: The model.
        arm: Name of an arm; `study arms` lists them.
        ranks: Number of processes that train together, one per GPU.
        precision: As in the trainer.
        recipe: Names the bytes per parameter of the paper's model states: mixed-adam, fp32-adam and others. Default:
            the recipe of the precision and the optimizer.
        micro_batch: Rows per rank and pass.
        accumulation: Passes per step.
        sequence: Tokens per row. Default: 1024, or as many as the model reads.
        checkpointing: Recompute activations in the backward pass.
        attention: sdpa: fused. eager: written out. Default: sdpa if transformers has it for the model.
        loss: How the loss is computed. whole: from all logits at once, as in the trainer. in_place: by a kernel that
            overwrites the logits. chunked: part by part, as Liger does.
        optimizer: fused: PyTorch's fused AdamW, as in the trainer. foreach: AdamW with a copy of a moment during the
            update. The others are the trainer's.
        fsdp: Instead of an arm, predict PyTorch's own FSDP without Accelerate, with each layer as a unit.
        frozen: The dtype of weights that do not train. as_weights: that of the other weights. bf16: bf16, under
            autocast.
        device: cuda: offloaded tensors are in host memory. cpu: host and device are one memory.
        cuda: Where the CUDA kernels keep other bytes than the CPU's, and the prediction follows CUDA. Only for models
            that are predicted from their config.json, and with --device cuda.
        gpu: Kind of GPU: H100, A100-40GB, L4 and others. Adds the time of a step, and how PyTorch's allocator frees
            cached memory when the GPU is nearly full.
        explain: With --gpu: list every constant behind the predicted time, with its source.
        as_json: Print the prediction as JSON.
    """
    chosen = arms.load_arm(arm)
    if fsdp is None and (stop := refusal(chosen, trainers_name(optimizer), precision)):
        raise stop
    if explain and gpu is None:
        raise Stop("--explain needs a predicted time", "give --gpu")
    if wanted.params is not None and wanted == Wanted(params=wanted.params):
        if gpu is not None:
            what = "the time of a step depends on the model's layers"
            raise Stop(what, "give --layers and --hidden, or leave out --gpu")
        prediction = Prediction(count_of(wanted.params))
    else:
        model = asked_for(wanted, sequence or 1)
        options = {"ranks": ranks, "precision": precision, "micro_batch": micro_batch, "accumulation": accumulation}
        options |= steps.defaults_of(model, sequence, attention) | {"checkpointing": checkpointing, "loss": loss}
        options |= {"optimizer": optimizer, "frozen": frozen, "device": device, "cuda": cuda}
        setup = Setup(model=model, fsdp=fsdp, **options) if fsdp else Setup.of_arm(model, arm, **options)
        prediction = _predicted(setup, gpu and gpu_named(gpu))
    stage = {"full_shard": 3, "shard_grad_op": 2}.get(fsdp, chosen.stage or 0)
    states = states_bytes(prediction.parameters, stage, ranks, recipe or recipe_of(precision, optimizer))
    if as_json:
        return {"arm": fsdp or arm, "ranks": ranks} | _prediction_as_dict(prediction, states)
    _show_bytes("the ZeRO paper's model states", states | {"total": sum(states.values())})
    if prediction.whole:
        _show_prediction(prediction, with_kinds=device != "cpu")
        if explain:
            _show_constants(prediction.step, gpu_named(gpu))
        say("", *_wrapped([accuracy()]))


def _predicted(setup: Setup, gpu: str | None) -> Prediction:
    whole = predict(setup)
    step = None
    if gpu is not None:
        machine = steptime.Machine(gpu=gpu, gpus_per_node=node_size(setup.ranks, gpu, None))
        step = steptime.step_time(setup, machine)
    return Prediction(whole.parameters, whole, memory_kinds(setup, gpu), step)


def _prediction_as_dict(prediction: Prediction, states: dict[str, float]) -> dict:
    whole, kinds, step = prediction.whole, prediction.kinds, prediction.step
    return {
        "parameters": prediction.parameters,
        "published_states_bytes": states,
        "estimate": whole and dataclasses.asdict(whole),
        "kinds": kinds and dataclasses.asdict(kinds),
        "step": step and steps.as_dict(step),
    }


def _show_prediction(prediction: Prediction, with_kinds: bool) -> None:
    whole = prediction.whole
    say("", f"predicted at the peak ({whole.peak_when}), buffers and temporaries included:")
    _show_bytes("component", whole.at_peak | {"total": whole.peak_bytes})
    if with_kinds:
        say("", *_wrapped([in_words(prediction.kinds)]))
    moved = ", ".join(f"{kind} {size(moved_bytes)}" for kind, moved_bytes in whole.traffic.items()) or "none"
    say("", f"host memory: {size(whole.host_bytes)}; collectives of a step: {moved}")
    if prediction.step:
        say(f"time, predicted: {steps.in_words(prediction.step)}")


def _show_constants(step: steptime.StepTime, gpu: str) -> None:
    say("")
    show([{"busy": part, "s": short(busy_s)} for part, busy_s in steps.parts(step)])
    say("")
    show(steps.explained(step, gpu))


def _show_bytes(name: str, sizes: dict[str, float]) -> None:
    show([{name: part, "per rank": size(part_bytes)} for part, part_bytes in sizes.items()])


def virtual(settings: Annotated[Flags, tyro.conf.arg(name="")], *, arm: str = "zero3", ranks: int = 8) -> None:
    """Run rank 0 of an N-rank job in one process, and print its memory and traffic. No GPU is needed.

    Without --init the tensors have shapes but no values, so that they need no memory.

    Args:
        settings: The trainer's settings.
        arm: Name of an arm; `study arms` lists them.
        ranks: Number of ranks that the job would have.
    """
    chosen, gpu = arms.load_arm(arm), num_gpus() > 0
    if settings.model and settings.model not in SHAPES and not is_local(settings.model):
        hub.config(settings.model)  # ends here if there is none; the launch would print a traceback too
    if ranks < 2:
        raise Stop(f"--ranks must be at least 2 (got {ranks})", "give 2 or more")
    settings = replace(settings, virtual_ranks=ranks, init=settings.init or "none", run_dir=None, instruments=True)
    if settings.steps is None:
        settings = replace(settings, steps=2, warmup_steps=1)
    check(settings)
    optimizers.check(settings, chosen)
    arms.check_virtual(chosen, settings.init)
    room.check(resolve(settings, gpu), chosen, gpu)
    changed = {name: value for name, value in vars(settings).items() if value != getattr(Settings, name)}
    with tempfile.TemporaryDirectory() as folder:
        cell = Cell("", "virtual", "tiny", arm, None, changed)
        command = launches.command(cell, Path(folder) / "run", settings.nvme_dir)
        try:  # in a session of its own, so that Ctrl-C does not reach the launcher, which would print a traceback
            done = subprocess.run(command, cwd=ROOT, check=False, start_new_session=True)
        except KeyboardInterrupt:  # subprocess has ended the launcher, but not its rank
            launches.end_ranks(Path(folder) / "run")
            raise
        if done.returncode != 0:
            sys.exit(1)  # the trainer has printed the reason
        _show_virtual_rank(store.load(Path(folder) / "run"))


def _show_virtual_rank(record: Record) -> None:
    rank = record.memory.components.per_rank[0]
    at_peak, after_step = rank.at_peak or {}, rank.after_step
    title = f"virtual, rank 0 of {record.observed.virtual_ranks}"
    times = {"at the peak": at_peak, "after a step": after_step}
    parts = at_peak | after_step
    show([{title: part} | {name: size(held.get(part, 0)) for name, held in times.items()} for part in parts])
    say(f"at the peak, all together: {size(rank.tracked_peak_bytes)}; rows: {record.observed.data_source}")
    moved = [(kind, sent.calls, size(sent.bytes)) for kind, sent in record.traffic.per_rank[0].items()]
    show([{"collective": kind, "calls of a step": calls, "bytes of a step": sent} for kind, calls, sent in moved])


def advise(
    wanted: Model,
    *,
    gpus: str = "1..64",
    gpu: str | None = None,
    link: str | None = None,
    host_memory: str | None = None,
    sequence: int | None = None,
    batch: int | None = None,
    precision: Precision | None = None,
    checkpointing: Literal["try", "on", "off"] = "try",
    frozen: Frozen = "bf16",
    optimizer: Optimizer = "fused",
    disk: str | None = None,
    gpus_per_node: int | None = None,
    write: Path | None = None,
    nvme_dir: Path | None = None,
    as_json: AsJson = False,
) -> dict | None:
    """Recommend an arm for a model on your GPUs, or say how many of which GPUs it needs. Nothing is run.

    Give --gpu and one number as --gpus for a recommendation. Otherwise the answer is a number of GPUs.

    Args:
        wanted: The model.
        gpus: Number of GPUs over all nodes, such as 8. Or a range to try, such as 1..64.
        gpu: Kind of GPU: H100, A100-40GB, L4, RTX4090 and others. Default: all kinds are tried.
        link: The slowest link between the GPUs: nvlink, pcie4, ib-hdr and others. Default: as such machines have.
        host_memory: Host memory of a node, such as 1TB. Default: twice that of its GPUs, and at least 64 GB.
        sequence: Tokens per row. Default: 2048, or as many as the model reads.
        batch: Rows per optimizer step, over all GPUs. Default: 128, or the next multiple of the GPUs.
        precision: As in the trainer. Default: 16 bits, in the usual way of each arm.
        checkpointing: Recompute activations in the backward pass. try: only if it helps.
        frozen: The dtype of weights that do not train, as with --lora-rank: bf16, or that of the other weights.
        optimizer: fused: PyTorch's fused AdamW. foreach: AdamW with a copy of a moment. The others are the trainer's.
        disk: Read and write speed of a node's disk, such as 6GB/s. Without it nothing is offloaded to disk.
        gpus_per_node: GPUs that share a host. Default: as many as such machines have, mostly 8.
        write: Write the recommended Accelerate config into this new file, with a DeepSpeed json beside it if needed.
        nvme_dir: For --write: the folder on the disk for offloading.
        as_json: Print the answer as JSON.
    """
    counts = counts_of(gpus)
    given = Given(
        sequence=sequence,
        batch=batch,
        link=link,
        host_memory_bytes=host_memory and bytes_of(host_memory, "--host-memory"),
        gpus_per_node=gpus_per_node,
        precision=precision,
        checkpointing={"try": None, "on": True, "off": False}[checkpointing],
        frozen=frozen,
        optimizer=optimizer,
        disk_bytes_per_s=disk and bytes_of(disk, "--disk", "B/s"),
    )
    model = asked_for(wanted, sequence or 1)
    if gpu is None or len(counts) > 1:
        if write is not None:
            raise Stop("--write needs one machine", "give --gpu and one number as --gpus")
        return _advise_number(model, counts, [gpu_named(gpu)] if gpu else list(GPUS), given, as_json)
    advice = advising.advise(Question.of(model, counts[0], gpu, given))
    for path in configure.write(write, advice, nvme_dir=nvme_dir) if write else []:
        sys.stderr.write(f"written: {path}\n")
    helps = [] if advice.choice else remedies(advice.question, given)
    lines = answer.in_words(advice) + (answer.remedies_in_words(helps) if helps else [])
    assumed = answer.assumptions(advice.question)
    if as_json:
        return dataclasses.asdict(advice) | {"in_words": lines, "assumed": assumed, "accuracy": accuracy()}
    say(*_wrapped(lines), "")
    show(answer.table(advice))
    say("", "Assumed:", *_wrapped(assumed, "- "), "", *_wrapped([accuracy()]))


def _advise_number(
    model: Architecture | Transformer, counts: list[int], kinds: list[str], given: Given, as_json: bool
) -> dict | None:
    """The fewest GPUs of each kind that are enough."""
    enough = [advice for kind in kinds for advice in fewest(model, counts, kind, given)]
    line = answer.needed_in_words(enough, counts)
    if as_json:
        return {"in_words": [line], "enough": [dataclasses.asdict(each) for each in enough]}
    say(*_wrapped([line]), "")
    show(answer.needed_table(enough))
    if enough:
        say("", "Assumed, for the first of them; give --gpus and --gpu for another:")
        say(*_wrapped(answer.assumptions(enough[0].question), "- "))


def _wrapped(lines: list[str], bullet: str = "") -> list[str]:
    indent = " " * len(bullet)
    return [
        part
        for line in lines
        for part in textwrap.wrap(bullet + line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    ]
