"""The training that a published row describes, and what we predict of it."""

import functools
import json
from dataclasses import dataclass
from typing import NamedTuple

from study.predictor.architecture import Architecture, describe, named
from study.predictor.estimate import estimate
from study.predictor.memory.memory_kinds import memory_kinds
from study.predictor.outside.published import FOLDER, MemoryKind, Role, Row, rows
from study.predictor.setup import Setup
from study.predictor.timing.steptime import Machine, step_time
from study.predictor.tracing.transformer import Transformer
from study.spec.shapes import SHAPES


class NotPredicted(Exception):
    """Why a row, or a quantity of it, is not predicted: a sentence without its full stop."""


@dataclass(frozen=True)
class Training:
    """A row with its setup, and its machine if that is known."""

    row: Row
    setup: Setup
    machine: Machine | None


class Prediction(NamedTuple):
    """A value, and the ends of its interval if there is one."""

    value: float
    interval: tuple[float, float] | None = None


@functools.cache
def configs() -> dict[str, dict]:
    """Return the configs of the rows' models, by name. Their dimensions are published, and nothing is downloaded."""
    return json.loads((FOLDER / "configs.json").read_text())


@functools.cache
def model_of(name: str) -> Architecture | Transformer:
    """Return the model of a name in configs.json, or of a built-in shape. A GPT-2 lists what differs from GPT-2."""
    if name not in configs():
        return named(name)
    config = configs()[name]
    if config["model_type"] == "gpt2":
        return describe(SHAPES["gpt2"] | config, dropout=config.get("dropout"))
    return Transformer.of(config, name)


def training_of(row: Row) -> Training:
    """Return the training of a row, or raise NotPredicted."""
    if row.config is None or row.dtype is None:
        raise NotPredicted(row.not_predicted or "the columns config and dtype are empty")
    model = model_of(row.config)
    sequence = _count(row, "seq")
    setup = Setup(
        model=model,
        deepspeed=None if row.deepspeed is None else {"zero_optimization": json.loads(row.deepspeed)},
        fsdp=row.fsdp,
        group=row.group,
        ranks=_count(row, "n_gpus"),
        sequence=min(sequence, model.positions or sequence),
        micro_batch=_count(row, "micro_batch"),
        accumulation=1 if row.grad_acc is None else _count(row, "grad_acc"),
        precision=row.dtype,
        checkpointing=bool(row.recompute),
        attention=row.attention or "sdpa",
        optimizer=row.optimizer or "fused",
        loss=row.loss or "whole",
        logits=row.logits or "fp32",
        keeps_cache=bool(row.keeps_cache),
        device="cuda",
    )
    return Training(row, setup, _machine(row, setup.ranks))


def _count(row: Row, name: str) -> int:
    value = getattr(row, name)
    if not isinstance(value, int):
        raise NotPredicted(f"{name} is {value!r}, no number")
    return value


def _machine(row: Row, ranks: int) -> Machine | None:
    if row.gpu_name is None:
        return None
    return Machine(
        gpu=row.gpu_name,
        gpus_per_node=min(ranks, row.gpus_per_node or ranks),
        network=row.network,
        fused_kernels=bool(row.fused_kernels),
    )


def timed(role: Role) -> list[tuple[Training, Machine]]:
    """Return the rows of a role that have a step time and can be predicted."""
    measured = [training_of(row) for row in rows() if row.role == role and row.step_s is not None and row.config]
    return [(training, training.machine) for training in measured if training.machine]


def memory(training: Training, kind: MemoryKind | None) -> Prediction:
    """Return the bytes that a GPU holds at the peak of a step. Without a kind: allocated, as most programs print."""
    if kind in (None, "allocated"):
        return Prediction(float(estimate(training.setup).peak_bytes))
    gpu = training.machine.gpu if training.machine else None
    held = memory_kinds(training.setup, gpu)
    value = held.reserved if kind == "reserved" else held.driver
    if value is None:
        raise NotPredicted(f"memory as {kind} is not predicted for a model of formulas")
    return Prediction(float(value))


def step(training: Training) -> Prediction:
    """Return the seconds of a step with their interval."""
    if training.machine is None:
        raise NotPredicted(training.row.not_predicted or "the column gpu_name is empty")
    predicted = step_time(training.setup, training.machine)
    return Prediction(predicted.seconds, (predicted.low_s, predicted.high_s))
