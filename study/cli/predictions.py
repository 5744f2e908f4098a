"""Commands that predict: advice for a model and some GPUs, an estimate of one rank, and one virtual rank."""

import dataclasses
import functools
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
from study.machine import hub
from study.machine.gpus import GPUS, gpu_named, num_gpus
from study.outside.written import accuracy
from study.records import store
from study.records.schema import Record
from study.spec import optimizers
from study.spec.arms import ROOT
from study.spec.optimizers import refusal
from study.spec.settings import Settings, check, resolve
from study.spec.shapes import SHAPES, is_local
from study.sweeps import launches
from study.sweeps.protocol import Cell
from study.text.numbers import short, size
from study.text.tables import say, show
from study.theory import advise as advising
from study.theory import answer, configure, room, steptime
from study.theory.advise import Advice
from study.theory.architecture import Wanted, asked_for, count_of
from study.theory.estimate import estimate as predict
from study.theory.memory_kinds import in_words, memory_kinds
from study.theory.papers import recipe_of, states_bytes
from study.theory.purchase import fewest, remedies
from study.theory.question import Given, Question, bytes_of, counts_of, node_size
from study.theory.setup import Frozen, Fsdp, Loss, Optimizer, Setup, arm_named, trainers_name
from study.theory.transformer import CUDA_DIFFERENCES

WIDTH = 100
AsJson = Annotated[bool, tyro.conf.arg(name="json")]
Model = Annotated[Wanted, tyro.conf.arg(name="")]
Precision = Literal["fp32", "bf16", "fp16", "bf16_cast", "bf16_pure"]


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
    """Predict what a rank will hold and move in a step, and how long it takes. Nothing is run.

    Args:
        wanted: The model. --params alone give the ZeRO paper's model states, and no more.
        arm: A file in accelerate_configs/.
        ranks: How many processes share the training.
        precision: As in the trainer.
        recipe: For the paper's model states: mixed-adam, fp32-adam and others. Default: what the precision and the
            optimizer mean.
        micro_batch: Rows per rank and pass.
        accumulation: Passes per step.
        sequence: Tokens per row. Default: 1024, or as many as the model reads.
        checkpointing: Recompute activations.
        attention: Fused (sdpa), or written out (eager). Default: fused where transformers has it for the model.
        loss: From all logits at once, as the trainer computes it; in_place, by a kernel that overwrites them; or
            chunked, as Liger does it.
        optimizer: PyTorch's fused AdamW, as the trainer's; foreach, which needs a copy of a moment; or another one
            of the trainer's.
        fsdp: PyTorch's own sharding, a layer a unit, instead of an arm: full_shard or shard_grad_op.
        frozen: Weights that do not train: as the others, or under autocast in bf16.
        device: On a GPU, offloaded tensors are in host memory; on a CPU there is only one memory.
        cuda: On a GPU: in what CUDA's kernels are followed where they keep other bytes than a CPU's. Of a config.json.
        gpu: Which: H100, A100-40GB, L4 and others. With it, the time of a step is predicted as well, and what PyTorch
            gives back near the end of its memory.
        explain: With --gpu: every constant that went into the time, and where it comes from.
        as_json: Print it as JSON.
    """
    chosen, whole, kinds, step = arm_named(arm), None, None, None
    if fsdp is None and (stop := refusal(chosen, trainers_name(optimizer), precision)):
        raise stop
    if explain and gpu is None:
        raise Stop("--explain is about the time of a step", "give --gpu")
    if wanted.params is not None and wanted == Wanted(params=wanted.params):
        if gpu is not None:
            raise Stop(
                "the time of a step depends on the model's layers", "give --layers and --hidden, or leave out --gpu"
            )
        params = count_of(wanted.params)
    else:
        model = asked_for(wanted, sequence or 1)
        of_arm = functools.partial(Setup.of_arm, model, arm, ranks=ranks)
        setup = (functools.partial(Setup, model=model, ranks=ranks, fsdp=fsdp) if fsdp else of_arm)(
            precision=precision,
            micro_batch=micro_batch,
            accumulation=accumulation,
            sequence=min(1024, model.positions or 1024) if sequence is None else sequence,
            attention=attention or ("sdpa" if model.has_fused_attention else "eager"),
            loss=loss,
            optimizer=optimizer,
            frozen=frozen,
            checkpointing=checkpointing,
            device=device,
            cuda=cuda,
        )
        whole, kinds = predict(setup), memory_kinds(setup, gpu and gpu_named(gpu))
        params = whole.parameters
        if gpu is not None:
            node = node_size(setup.ranks, gpu_named(gpu), None)
            step = steptime.step_time(setup, steptime.Machine(gpu=gpu_named(gpu), gpus_per_node=node))
    stage = {"full_shard": 3, "shard_grad_op": 2}.get(fsdp, chosen.stage or 0)
    states = states_bytes(params, stage, ranks, recipe or recipe_of(precision, optimizer))
    if as_json:
        answer = {"arm": fsdp or arm, "ranks": ranks, "parameters": params, "published_states_bytes": states}
        predicted = {"estimate": whole and dataclasses.asdict(whole), "kinds": kinds and dataclasses.asdict(kinds)}
        return answer | predicted | {"step": step and steps.as_dict(step)}
    _show_bytes("the ZeRO paper's model states", states | {"total": sum(states.values())})
    if whole:
        say("", f"predicted at the peak ({whole.peak_when}), buffers and temporaries included:")
        _show_bytes("component", whole.at_peak | {"total": whole.peak_bytes})
        if device != "cpu":
            say("", *_wrapped([in_words(kinds)]))
        moved = ", ".join(f"{kind} {size(moved_bytes)}" for kind, moved_bytes in whole.traffic.items()) or "none"
        say("", f"host memory: {size(whole.host_bytes)}; collectives of a step: {moved}")
        if step:
            say(f"time, predicted: {steps.in_words(step)}")
        if explain:
            say("")
            show([{"busy": part, "s": short(busy_s)} for part, busy_s in steps.parts(step)])
            say("")
            show(steps.explained(step, gpu_named(gpu)))
        say("", *_wrapped([accuracy()]))


def _show_bytes(name: str, sizes: dict[str, float]) -> None:
    show([{name: part, "per rank": size(part_bytes)} for part, part_bytes in sizes.items()])


def virtual(settings: Annotated[Settings, tyro.conf.arg(name="")], *, arm: str = "zero3", ranks: int = 8) -> None:
    """Run rank 0 of an N-rank job in one process, and print its memory and traffic. No GPU is needed.

    Args:
        settings: As the trainer's. Without --init the tensors have no values, and need no memory.
        arm: A file in accelerate_configs/.
        ranks: How many ranks the job would have.
    """
    chosen, gpu = arm_named(arm), num_gpus() > 0
    if settings.model and settings.model not in SHAPES and not is_local(settings.model):
        hub.config(settings.model)  # which ends here if there is none: the launch would say so below a traceback
    if ranks < 2:
        raise Stop(f"--ranks must be at least 2 (got {ranks})", "give 2 or more")
    settings = replace(settings, virtual_ranks=ranks, init=settings.init or "none", run_dir=None, instruments=True)
    if settings.steps is None:
        settings = replace(settings, steps=2, warmup_steps=1)
    check(settings)
    optimizers.check(settings, chosen)
    room.check(resolve(settings, gpu), chosen, gpu)
    changed = {name: value for name, value in vars(settings).items() if value != getattr(Settings, name)}
    with tempfile.TemporaryDirectory() as folder:
        cell = Cell("", "virtual", "tiny", arm, None, changed)
        command = launches.command(cell, Path(folder) / "run", settings.nvme_dir)
        try:  # in a session of its own, so that Ctrl-C does not reach the launcher, which prints a traceback
            done = subprocess.run(command, cwd=ROOT, check=False, start_new_session=True)
        except KeyboardInterrupt:  # which has ended the launcher, and not its rank
            launches.end_ranks(Path(folder) / "run")
            raise
        if done.returncode != 0:
            sys.exit(1)  # the trainer has said why
        _show_virtual_rank(store.load(Path(folder) / "run"))


def _show_virtual_rank(record: Record) -> None:
    rank = record.memory.components.per_rank[0]
    at_peak, after_step = rank.at_peak or {}, rank.after_step
    title = f"virtual, rank 0 of {record.observed.virtual_ranks}"
    times = {"at the peak": at_peak, "after a step": after_step}
    parts = at_peak | after_step
    show([{title: part} | {name: size(held.get(part, 0)) for name, held in times.items()} for part in parts])
    say(f"at the peak, all together: {size(rank.tracked_peak_bytes)}; rows: {record.observed.data_source}")
    moved = record.traffic.per_rank[0].items()
    show(
        [
            {"collective": kind, "calls of a step": sent.calls, "bytes of a step": size(sent.bytes)}
            for kind, sent in moved
        ]
    )


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
    """Say which arm to use and how, or how many of which GPUs are needed. Everything is predicted; nothing is run.

    Args:
        wanted: The model.
        gpus: How many there are, over all nodes: 8. Or from how many to how many to try: 1..64.
        gpu: Which: H100, A100-40GB, L4, RTX4090 and others. Default: all are tried.
        link: Between them, the slowest on the way: nvlink, pcie4, ib-hdr and others. Default: as such machines have.
        host_memory: Of a node, such as 1TB. Default: twice that of its GPUs, and at least 64 GB.
        sequence: Tokens per row. Default: 2048, or as many as the model reads.
        batch: Rows per optimizer step, over all GPUs. Default: 128, or the next multiple of the GPUs.
        precision: As in the trainer. Default: 16 bits, in the usual way of each arm.
        checkpointing: Recompute activations. Default: where it helps.
        frozen: Weights that do not train, as with --lora-rank: loaded in bf16, or as the others.
        optimizer: PyTorch's fused AdamW, foreach, or another one of the trainer's.
        disk: What a node's disk reads and writes, such as 6GB/s. Without one nothing is offloaded to disk.
        gpus_per_node: They share a host. Default: 8, or as many as such machines have.
        write: A new file for an Accelerate config, with a DeepSpeed json beside it where one is needed.
        nvme_dir: The folder on the disk, for that config.
        as_json: Print it as JSON.
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
        kinds = [gpu_named(gpu)] if gpu else list(GPUS)
        enough = [advice for kind in kinds for advice in fewest(model, counts, kind, given)]
        line = answer.needed_in_words(enough, counts)
        if as_json:
            return {"in_words": [line], "enough": [dataclasses.asdict(each) for each in enough]}
        return _show_needed(enough, line)
    advice = advising.advise(Question.of(model, counts[0], gpu, given))
    written = configure.write(write, advice, nvme_dir=nvme_dir) if write else []
    helps = [] if advice.choice else remedies(advice.question, given)
    lines = answer.in_words(advice) + (answer.remedies_in_words(helps) if helps else [])
    assumed = answer.assumptions(advice.question)
    for path in written:
        sys.stderr.write(f"written: {path}\n")
    if as_json:
        return dataclasses.asdict(advice) | {"in_words": lines, "assumed": assumed, "accuracy": accuracy()}
    say(*_wrapped(lines), "")
    show(answer.table(advice))
    say("", "Assumed:", *_wrapped(assumed, "- "), "", *_wrapped([accuracy()]))


def _show_needed(enough: list[Advice], line: str) -> None:
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
