"""The training that a published row describes, by the columns that are our reading of it."""

import functools
import json
from dataclasses import dataclass, fields, replace
from typing import Any

from study.predict.architecture import named
from study.predict.library import Library
from study.predict.outside.published import FOLDER, Row
from study.predict.setup import Setup
from study.predict.step_time import Machine
from study.predict.trace.transformer import Transformer


@dataclass(frozen=True)
class Training:
    """A row with its setup, and its machine if the time can be predicted."""

    row: Row
    setup: Setup
    machine: Machine | None

    @property
    def timed(self) -> Setup:
        """The setup whose step took the time. Rows that are padded to the longest of a pass have fewer tokens."""
        return replace(self.setup, sequence=self.row.timed_seq or self.setup.sequence)


def training_of(row: Row) -> Training | None:
    """Return the training of a row; None: it is not predicted, and `not_predicted` says why."""
    if row.config is None or row.dtype is None or row.not_predicted:
        return None
    about = {
        "model": _model(row, row.config),
        "deepspeed": None if row.deepspeed is None else {"zero_optimization": row.deepspeed},
        "ranks": row.n_gpus,
        "accumulation": row.grad_acc or 1,
        "sequence": row.seq,
        "precision": row.dtype,
        "library": Library(
            fused_layers=row.fused_kernels, bucket_view=row.deepspeed is not None, **_columns(row, Library)
        ),
    }
    setup = Setup(device="cuda", **_columns(row, Setup) | about)
    if row.gpu_name is None or row.time_not_predicted:
        return Training(row, setup, None)
    where = {"gpu": row.gpu_name, "gpus_per_node": min(setup.ranks, row.gpus_per_node or setup.ranks)}
    return Training(row, setup, Machine(**_columns(row, Machine) | where))


def _columns(row: Row, form: type[Setup | Library | Machine]) -> dict[str, Any]:
    """Return the columns that are called as fields of a form. A few mean what the source says, and are replaced."""
    return row.model_dump(include={field.name for field in fields(form)})


def _model(row: Row, config: str) -> Transformer:
    model = model_of(config)
    if row.adapter is None:
        return model
    targets = tuple((row.adapter_targets or "").split())
    adapters: dict[str, Any] = {"lora_rank": row.adapter_rank, "lora_targets": targets, "dora": row.adapter == "dora"}
    return replace(model, **adapters, adapter_dropout=row.adapter_dropout)


@functools.cache
def configs() -> dict[str, dict]:
    """Return the configs of the rows' models, by name. Their dimensions are published, and nothing is downloaded."""
    return json.loads((FOLDER / "configs.json").read_text())


@functools.cache
def model_of(name: str) -> Transformer:
    """Return the model of a name in configs.json, of another known name, or of a config as JSON."""
    if name.startswith("{"):
        return Transformer.of(json.loads(name), "a config of the row")
    if name not in configs():
        return named(name)
    config = dict(configs()[name])
    dropout = config.pop("dropout", None)
    return Transformer.of(config, name, dropout=dropout)
