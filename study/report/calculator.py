"""The page that answers `study estimate` and `study advise` without a server, for built-in shapes. It looks up a table.

`tools/calculator_tables.py` writes the table, `reports/calculator.json`.
"""

import json
from typing import Any

from study.core.arms import ROOT, load_arm
from study.core.gpus import GPUS
from study.core.shapes import models as known_models
from study.core.text import rounded, size
from study.predict.front import (
    FRAGMENTATION,
    FULL,
    HOST_PROCESS_BYTES,
    MISS,
    OUTSIDE_AT_MOST_BYTES,
    PlaceFlags,
    Precision,
    Question,
    StepFlags,
    TrainingFlags,
    Transformer,
    default_sequence,
    estimate,
    named,
    reserve_bytes,
    settled_arm,
)
from study.report.accuracy import accuracy_of_memory

FILE = ROOT / "reports" / "calculator.json"  # a wheel has none
ARMS = (  # the simplest first, as in `study arms`
    *("single", "ddp", "zero1", "zero2", "zero3", "zero1_cpu", "zero2_cpu", "zero3_cpu", "zero3_nvme"),
    *("fsdp2", "fsdp2_grad_op", "fsdp2_cpu"),
)
# Which keep whole gradients between the micro-batches of a step: FSDP2 as Accelerate steers it, and stage 1.
GATHERING = ("zero1", "zero1_cpu", "fsdp2", "fsdp2_grad_op", "fsdp2_cpu")
GPUS_TRIED = (1, 2, 4, 8, 16, 32, 64)
LONGER_TOKENS = (4096, 8192, 32768, 131072)  # than what `study advise` takes, for models that have as many positions
RELATIVE_TOKENS = 8192  # at most, for models with relative positions: as many as others have mostly
MICRO_BATCHES = (1, 2, 4, 8)  # sequences
ACCUMULATIONS = (1, 8)  # micro-batches in a step: with three or more a GPU takes what it takes with eight, within 1 %
ACTIVATIONS = ("recomputed", "kept")
# What fits with so many times its peak reserved, and so much outside, fits by `study estimate` as well. By its replay
# the most of 8,341 drawn cells was 1.35, 1.59, 1.86 and 2.98 times, and 1.93 GB outside. They have peaks above 4 GB:
# smaller ones fit each card. On several GPUs what offloads also reserves less than so many times the peak of the same
# arm without offloading: of 1,592 drawn cells at most 1.54 times that of zero1, 1.74 of zero2, 1.54 of zero3 and 1.63
# of fsdp2. The table has peaks alone: what the 39,700 doubtful cells reserve takes two hours.
RESERVED = {
    1.5: ("single", "ddp"),
    1.7: ("zero1", "zero3", "fsdp2_grad_op"),
    2: ("zero2", "fsdp2", "zero3_cpu", "zero3_nvme"),
    3.2: ("zero1_cpu", "zero2_cpu", "fsdp2_cpu"),
}
BESIDE_BYTES = 2e9
PRECISION: Precision = "bf16_cast"  # of all arms, so that they compare
SHOWN: dict[str, Any] = {  # at first: README's training
    "model": "llama3-8b",
    "sequence": 2048,
    "micro_batch": 1,
    "accumulation": 1,
    "activations": "recomputed",
    "gpus": 8,
    "gpu": "H100-80GB",
}


def arms_of(gpus: int) -> list[str]:
    """Return the arms that make sense. A GPU alone shares nothing, but its states can leave it."""
    if gpus > 1:
        return [name for name in ARMS if name != "single"]
    return [name for name in ARMS if name == "single" or load_arm(name).offload_optimizer != "none"]


def sequences(model: Transformer) -> list[int]:
    """Return the tokens of a sequence that can be chosen."""
    shortest = default_sequence(model)
    return [shortest, *(each for each in LONGER_TOKENS if shortest < each <= (model.positions or RELATIVE_TOKENS))]


def needs(model: Transformer, arm: str, gpus: int, sequence: int) -> list[list[list[int]]]:
    """Return by activations, then by micro-batches in a step, the MB of a GPU at the peak by the size of a micro-batch.

    One line serves any number of micro-batches if all are equal, as with stage 3. Then, with an arm that offloads,
    those of a node's host memory, and on disk for each GPU. Buckets are the arm's own.
    """
    return [_lines(model, arm, gpus, sequence, activations == "recomputed") for activations in ACTIVATIONS]


def _lines(model: Transformer, arm: str, gpus: int, sequence: int, checkpointing: bool) -> list[list[int]]:
    flags = TrainingFlags(gpus=gpus, sequence=sequence, precision=PRECISION)
    question = Question.of(model, flags, PlaceFlags(gpu="H100"), StepFlags(checkpointing=checkpointing))
    settled = settled_arm(load_arm(arm), gpus, question.local)
    lines = []
    for passes in ACCUMULATIONS:
        estimates = [estimate(question.training(settled, rows, passes)) for rows in MICRO_BATCHES]
        line = [each.peak_bytes for each in estimates]
        if host_bytes := estimates[0].host_bytes:
            line += [question.local * (host_bytes + int(HOST_PROCESS_BYTES)), estimates[0].swapped_bytes]
        lines.append([megabytes(each) for each in line])
    return lines[:1] if lines[0] == lines[1] else lines


def megabytes(size_bytes: float) -> int:
    """Return whole MB whose three digits, as the page rounds them, are those of `study estimate`.

    6,204.6 MB would become 6,205, and then 6.21 GB: it is 6,204.
    """
    whole = round(size_bytes / 1e6)
    return whole if rounded(whole, ".3g") == rounded(size_bytes / 1e6, ".3g") else int(size_bytes / 1e6)


def _host_bytes(gpu: str, gpus: int) -> float:
    return Question.of(named(SHOWN["model"]), TrainingFlags(gpus=gpus), PlaceFlags(gpu=gpu)).host_memory_bytes


def values() -> dict:
    """Return what the page shows. Without JavaScript it names the command that answers."""
    models = json.loads(FILE.read_text(encoding="utf-8"))
    by_size = sorted(GPUS.items(), key=lambda kind: -kind[1].memory_bytes)
    at_most = {name: gpu.memory_bytes - reserve_bytes(gpu) for name, gpu in by_size}
    return {
        "models": models,
        "known": len(known_models()),  # by the command
        "sequences": models[SHOWN["model"]],
        "gpu_counts": GPUS_TRIED,
        "micro_batches": MICRO_BATCHES,
        "accumulations": ACCUMULATIONS,
        "activations": ACTIVATIONS,
        "gpus": {
            name: f"{name} ({size(gpu.memory_bytes)}, {gpu.memory_bytes / 2**30:.3g} GiB)" for name, gpu in by_size
        },
        "cards": {
            name: {
                "memory_bytes": gpu.memory_bytes,
                "most_bytes": at_most[name],
                "roomy_bytes": at_most[name] / (1 + MISS),
                "reserved_bytes": FULL * gpu.memory_bytes - BESIDE_BYTES,  # at most
                # By GPUs, as `study advise` takes it where nobody says it.
                "host_bytes": {gpus: _host_bytes(name, gpus) for gpus in GPUS_TRIED},
            }
            for name, gpu in by_size
        },
        "shown": SHOWN,
        "arms": ARMS,
        "gathering": GATHERING,
        "precision": PRECISION,
        "accuracy": [f"{each[0].upper()}{each[1:]}." for each in accuracy_of_memory()],
        "miss": f"{MISS:.0%}",
        "reserved": RESERVED,
        "reserved_by": {arm: times for times, arms in RESERVED.items() for arm in arms},
        "reserve": f"{size(OUTSIDE_AT_MOST_BYTES)} and {FRAGMENTATION:.0%}",
    }
