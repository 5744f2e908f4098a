"""Commands that predict: advice for a model and some GPUs, an estimate of one rank, and one virtual rank."""

import dataclasses
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from study.errors import Stop
from study.machine.gpus import num_gpus
from study.records import store
from study.records.schema import Record
from study.spec.arms import ROOT
from study.spec.settings import Settings, check, resolve
from study.sweeps import launches
from study.sweeps.protocol import Cell
from study.text.numbers import size
from study.text.tables import say, show
from study.theory import advise as advising
from study.theory import configure, room
from study.theory.advise import Advice
from study.theory.architecture import Wanted, asked_for, count_of
from study.theory.estimate import estimate as predict
from study.theory.papers import OF_PRECISION, states_bytes
from study.theory.setup import Loss, Optimizer, Setup, arm_named
from study.theory.transformer import CUDA_DIFFERENCES

AsJson = Annotated[bool, tyro.conf.arg(name="json")]
Model = Annotated[Wanted, tyro.conf.arg(name="")]
Precision = Literal["fp32", "bf16", "fp16", "bf16_cast"]


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
    device: Literal["cuda", "cpu"] = "cuda",
    cuda: tuple[Literal["attention", "dropout", "autocast"], ...] = CUDA_DIFFERENCES,
    as_json: AsJson = False,
) -> None:
    """Predict what a rank will hold and move in a step. Nothing is run.

    Args:
        wanted: The model. --params alone give the ZeRO paper's model states, and no more.
        arm: A file in accelerate_configs/.
        ranks: How many processes share the training.
        precision: As in the trainer.
        recipe: For the paper's model states: mixed-adam, fp32-adam and others. Default: what the precision means.
        micro_batch: Rows per rank and pass.
        accumulation: Passes per step.
        sequence: Tokens per row. Default: 1024, or as many as the model reads.
        checkpointing: Recompute activations.
        attention: Fused (sdpa), or written out (eager). Default: fused where transformers has it for the model.
        loss: From all logits at once, as the trainer computes it, or chunked, as fused kernels do (Liger).
        optimizer: PyTorch's fused AdamW, as the trainer's, or foreach, which needs a copy of a moment.
        device: On a GPU, offloaded tensors are in host memory; on a CPU there is only one memory.
        cuda: On a GPU: in what CUDA's kernels are followed where they keep other bytes than a CPU's. Of a config.json.
        as_json: Print it as JSON.
    """
    chosen, whole = arm_named(arm), None
    if wanted.params is not None and wanted == Wanted(params=wanted.params):
        params = count_of(wanted.params)
    else:
        model = asked_for(wanted, sequence or 1)
        setup = Setup.of_arm(
            model,
            arm,
            ranks=ranks,
            precision=precision,
            micro_batch=micro_batch,
            accumulation=accumulation,
            sequence=min(1024, model.positions or 1024) if sequence is None else sequence,
            attention=attention or ("sdpa" if model.has_fused_attention else "eager"),
            loss=loss,
            optimizer=optimizer,
            checkpointing=checkpointing,
            device=device,
            cuda=cuda,
        )
        whole = predict(setup)
        params = whole.parameters
    states = states_bytes(params, chosen.stage or 0, ranks, recipe or OF_PRECISION[precision])
    if as_json:
        answer = {"arm": arm, "ranks": ranks, "parameters": params, "published_states_bytes": states}
        return say(json.dumps(answer | {"estimate": whole and dataclasses.asdict(whole)}, indent=1))
    _show_bytes("the ZeRO paper's model states", states | {"total": sum(states.values())})
    if whole:
        say("", f"predicted at the peak ({whole.peak_when}), buffers and temporaries included:")
        _show_bytes("component", whole.at_peak | {"total": whole.peak_bytes})
        moved = ", ".join(f"{kind} {size(moved_bytes)}" for kind, moved_bytes in whole.traffic.items()) or "none"
        say("", f"host memory: {size(whole.host_bytes)}; collectives of a step: {moved}")


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
    if ranks < 2:
        raise Stop(f"--ranks must be at least 2 (got {ranks})", "give 2 or more")
    settings = replace(settings, virtual_ranks=ranks, init=settings.init or "none", run_dir=None, instruments=True)
    if settings.steps is None:
        settings = replace(settings, steps=2, warmup_steps=1)
    check(settings)
    room.check(resolve(settings, gpu), chosen, gpu)
    changed = {name: value for name, value in vars(settings).items() if value != getattr(Settings, name)}
    with tempfile.TemporaryDirectory() as folder:
        cell = Cell("", "virtual", "tiny", arm, None, changed)
        command = launches.command(cell, Path(folder) / "run", settings.nvme_dir)
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
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
    gpus: int,
    gpu: str,
    link: str | None = None,
    host_memory: str,
    sequence: int,
    batch: int,
    precision: Precision = "bf16_cast",
    checkpointing: bool = False,
    disk: str | None = None,
    gpus_per_node: int = 8,
    write: Path | None = None,
    nvme_dir: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Say which arms fit, how fast they should be, and which to take. Everything is predicted; nothing is run.

    Args:
        wanted: The model.
        gpus: How many there are, over all nodes.
        gpu: Which: A100-80GB, H100-80GB, L4 and others.
        link: Between them, the slowest on the way: nvswitch, pcie4, ib-hdr and others. One GPU needs none.
        host_memory: Of a node, such as 1TB.
        sequence: Tokens per row.
        batch: Rows per optimizer step, over all GPUs.
        precision: As in the trainer.
        checkpointing: Recompute activations.
        disk: What a node's disk reads and writes, such as 6GB/s. Without one nothing is offloaded to disk.
        gpus_per_node: They share a host.
        write: A new file for an Accelerate config, with a DeepSpeed json beside it where one is needed.
        nvme_dir: The folder on the disk, for that config.
        as_json: Print it as JSON.
    """
    host_bytes = advising.bytes_of(host_memory, "--host-memory")
    disk_bytes_per_s = disk and advising.bytes_of(disk, "--disk", "B/s")
    question = (asked_for(wanted, sequence), gpus, gpu, link, host_bytes, sequence, batch, precision, checkpointing)
    advice = advising.advise(
        advising.Question(*question, disk_bytes_per_s=disk_bytes_per_s, gpus_per_node=gpus_per_node)
    )
    if as_json:
        say(json.dumps(dataclasses.asdict(advice) | {"in_words": advising.sentences(advice)}, indent=1))
    else:
        _show_advice(advice)
    for path in configure.write(write, advice, nvme_dir=nvme_dir) if write else []:
        sys.stderr.write(f"written: {path}\n")


def _show_advice(advice: Advice) -> None:
    sizes = {"peak": "peak_bytes", "spare": "headroom_bytes", "host": "host_bytes", "sent": "sent_bytes"}
    rows = []
    for row in advice.rows:
        known = {name: getattr(row, field) for name, field in sizes.items()}
        rows.append(
            {"predicted": row.arm, "fits": "yes" if row.fits else "no", "limit": row.limit}
            | {"rows/pass": row.micro_batch, "passes": row.accumulation}
            | {"largest part": max(row.components, key=row.components.get, default=None)}
            | {name: None if size_bytes is None else size(size_bytes) for name, size_bytes in known.items()}
            | {"s/step": row.step_s and "{:.3g} to {:.3g}".format(*row.step_s)}
            | {"tokens/s": row.tokens_per_s and "{1:.0f} to {0:.0f}".format(*row.tokens_per_s)}
        )
    show(rows)
    say("", *advising.sentences(advice))
