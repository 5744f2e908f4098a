"""Records shaped as real ones, with every number in its place.

They are made up: what they say of arms is what the tests want them to say.
"""

import datetime
import json
import math
import random
import zlib
from pathlib import Path

import pandas as pd

from study.core import arms
from study.core.shapes import SHAPES, VOCABULARY
from study.predict.architecture import named
from study.records.runs import Run, Runs, load
from study.records.schema import Record

BYTES = {"fp32": 4, "bf16": 4, "bf16_cast": 2}
ENGINE = "DeepSpeedEngine"
DTYPE = {4: "float32", 2: "bfloat16"}
START = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
GPU = {"name": "NVIDIA H200", "memory_bytes": 150 * 10**9}
STEPS, SEQUENCE = 12, 64
FACTORS = (1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.005)  # of the seconds of a step
COMMIT = "0123456789abcdef"


def finished(
    run_id: str = "run",
    arm: str = "zero2",
    ranks: int = 2,
    seed: int = 42,
    model: str = "gpt-tiny",
    precision: str = "bf16_cast",
    micro_batch: int = 2,
    step: float = 0.1,
    loss: float = 2.0,
    gpu: bool = False,
    virtual: bool = False,
    **changes,
) -> dict:
    """A record that is done, as JSON. `step` and `loss` set its seconds and its end; see `changed` for `changes`."""
    promised, count, weight_bytes = arms.read(arms.all_paths()[arm]), named(model).parameters, BYTES[precision]
    number = zlib.crc32(run_id.encode())  # no two runs start at once, or take the same times
    start = START + datetime.timedelta(milliseconds=number)
    held = -(-count // ranks) if promised.stage == 3 else count
    rows, writers, dtype = micro_batch * ranks, 1 if virtual else ranks, DTYPE[weight_bytes]
    requested = {"arm": arm, "model": model, "precision": precision, "seed": seed, "sequence": SEQUENCE}
    requested |= {"micro_batch": micro_batch, "accumulation": 1, "virtual_ranks": ranks if virtual else None}
    requested |= {"task": "wikitext", "data": "embedded", "init": "random", "steps": STEPS, "warmup_steps": 5}
    requested |= {"attention": "sdpa", "tf32": True, "lr": 1e-3}
    requested |= {"run_dir": f"runs/{run_id}", "config_file": f"accelerate_configs/{arm}.yaml"}
    batch = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": 1}
    observed = {name: getattr(promised, name) for name in ("distributed_type", "stage", *arms.OFFLOADS)}
    observed |= {
        "arm": arm,
        "device": "cuda" if gpu else "cpu",
        "ranks": ranks,
        "ranks_counted": None if virtual else ranks,
        "virtual_ranks": ranks if virtual else None,
        "backend": "nccl" if gpu else "gloo",
        "wrapper": ENGINE if promised.stage else "DistributedDataParallel",
        "optimizer": "AdamW",
        "accumulation": 1,
        "deepspeed": promised.deepspeed and promised.deepspeed | batch,
        "autocast": "bf16" if precision == "bf16" else None,
        "parameters": count,
        "held_parameters": held,
        "held_parameters_per_rank": [held] * writers,
        "steps": STEPS,
        "rows_per_step": rows,
        "tokens_per_step": rows * SEQUENCE,
        "data_checksum": "aa",
        "dtypes": {"weights": dtype, "gradients": dtype, "master": "float32", "moments": "float32"},
    }
    classes = 2 if changes.get("requested__task") == "imdb" else SHAPES[model]["vocab_size"] or VOCABULARY
    first = math.log(classes) + seed / 10_000  # as of a guess, and of no two seeds alike
    falling = [loss * (1 + 0.5 / (number + 1)) for number in range(1, STEPS - 1)]
    losses = {"train": [first, *falling, loss], "eval": [{"step": STEPS, "eval_loss": loss}]}
    step_s = [step * factor for factor in random.Random(number).sample(FACTORS, len(FACTORS))]
    flops = named(model).flops_per_row(SEQUENCE) * micro_batch
    record = Record(
        run_id=run_id,
        status="done",
        started_utc=start.isoformat(),
        finished_utc=(start + datetime.timedelta(seconds=3 + 3 * STEPS * step)).isoformat(),
        commit=COMMIT,
        dirty=False,
        requested=requested,
        observed=observed,
        hardware={"devices": [GPU] * ranks * gpu, "cpu": "Some CPU", "cores": 2, "host_memory_bytes": 25 * 10**9},
        software={"python": "3.11.7", "torch": "2.13.0", "deepspeed": "0.19.8"},
        loss={} if virtual else losses,
        time={"setup_s": 1.0, "step_s": step_s, "window_s": math.fsum(step_s), "flops_per_rank_and_step": flops},
        memory=_memory(promised.stage, count, weight_bytes, ranks, writers, gpu),
        traffic=_traffic(promised.stage or 0, count, weight_bytes, writers),
    )
    return changed(record.model_dump(mode="json", by_alias=True), **changes)


def _memory(stage: int | None, count: int, weight_bytes: int, ranks: int, writers: int, gpu: bool) -> dict:
    part = count // ranks if stage else count
    weights = weight_bytes * (part if stage == 3 else count)
    held = {"weights": weights, "master": 4 * part, "moments": 8 * part, "gradients": weights, "activations": 10**6}
    total = sum(held.values())
    peaks = {"host_peak_bytes": 6 * 10**8}
    if gpu:
        peaks |= {"peak_allocated_bytes": total + 10**6, "peak_reserved_bytes": total + 2 * 10**6}
        peaks |= {"device_used_bytes": total + 10**9}
    of_rank = {"at_peak": held, "after_step": {"weights": weights}, "tracked_peak_bytes": total}
    return {"per_rank": [peaks] * writers, "components": {"per_rank": [of_rank] * writers}}


def _traffic(stage: int, count: int, weight_bytes: int, writers: int) -> dict:
    """As DeepSpeed 0.19.8 and DDP really move it."""
    size = count * weight_bytes
    kinds = {0: ["all_reduce"], 3: ["reduce_scatter", "all_gather"]}.get(stage, ["all_reduce", "all_gather"])
    counts = {"calls": 4, "bytes": size, "bytes_by_dtype": {DTYPE[weight_bytes]: size}}
    return {"per_rank": [dict.fromkeys(kinds, counts)] * writers}


def script(run_id: str = "script", repair: str = "none", seed: int = 42, **changes) -> dict:
    """A record of the published script: three trainings in one run."""
    fields, goes_on = finished(run_id, "single", 1, seed, "bert-tiny", "fp32"), repair == "none"
    starts = ["the initial weights"] * 3
    if goes_on:
        starts[1:] = ["the end of training 1", "the end of training 2"]
    plan = [("standard", 8, 0.6), ("zero", 8, 0.3 if goes_on else 0.6), ("zero", 16, 0.5)]
    trainings = []
    for (name, batch, loss), start in zip(plan, starts, strict=True):
        is_engaged = repair == "engaged" and name == "zero"
        trainings.append(
            {
                "name": name,
                "batch": batch,
                "weights_from": start,
                "trained_by": ENGINE if is_engaged else "BertForSequenceClassification",
                "steps": 50,
                "training_s": 1.0 + 0.01 * len(trainings),
                "peak_bytes": 10**9,
                "losses": [loss + 0.1, loss + seed / 1000],
                "evals": [{"step": 50, "eval_loss": loss + seed / 1000}],
                "deepspeed_initialize_calls": int(is_engaged),
            }
        )
    fields["requested"] |= {"task": "imdb", "repair": repair}
    fields["memory"].pop("components")
    observed = {"arm": "single", "ranks": 1, "runs": trainings, "logging_steps": 10, "data_checksum": "aa"}
    return changed(fields | {"observed": observed, "time": {"setup_s": 0.5}, "traffic": {}}, **changes)


def changed(fields: dict, **changes) -> dict:
    """The same with some fields otherwise, each named by its path, as in time__mfu=2; a number is a place in a list."""
    fields = json.loads(json.dumps(fields))  # ranks that are equal are not the same dict any more
    for path, value in changes.items():
        *above, last = path.split("__")
        place = fields
        for name in above:
            place = place[int(name)] if name.isdigit() else place[name]
        place[int(last) if last.isdigit() else last] = value
    return fields


def failed(run_id: str, status: str = "oom", **settings) -> dict:
    """A run that ended early: all that is known is what was asked for."""
    empty = {name: {} for name in ("loss", "time", "memory", "traffic")}
    error = {"kind": "MemoryError", "message": "no more memory", "where": "rank 0", "what_to_do": "ask for less"}
    return finished(run_id, **settings) | empty | {"status": status, "error": error}


def put(folder: Path, *records: dict) -> Path:
    """Each record in a run folder of its own."""
    for fields in records:
        place = folder / fields["run_id"]
        place.mkdir(parents=True)
        (place / "record.json").write_text(json.dumps(fields))
    return folder


def record(fields: dict | None = None, **settings) -> Record:
    """The same as a record, of `finished`, or of what `script` or `failed` gave."""
    return Record.model_validate(finished(**settings) if fields is None else changed(fields, **settings))


def run(fields: dict | None = None, environment: str = "A", **settings) -> Run:
    checked = record(fields, **settings)
    return Run(Path("runs") / checked.run_id, checked, environment)


def rows(table: pd.DataFrame) -> list[dict]:
    """The rows of a table; what is not known is None."""
    known = table.astype(object).where(table.notna(), None)
    return [{str(name): value for name, value in row.items()} for row in known.to_dict("records")]


def runs(*folders: Path) -> Runs:
    """What lies below the folders, as the project loads it."""
    return load(folders)
