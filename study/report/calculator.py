"""The page that answers `study estimate` without a server. Its script multiplies a table.

`tools/calculator_tables.py` writes the table, `reports/calculator.json.gz`.
"""

import base64
import gzip
import json

from study.core.arms import ROOT, load_arm
from study.core.gpus import GPUS
from study.core.text import size
from study.predict.front import (
    BUCKET_ELEMENTS,
    FRAGMENTATION,
    HOST_PROCESS_BYTES,
    MISS,
    OUTSIDE_AT_MOST_BYTES,
    peak_flops_per_s,
    reserve_bytes,
)
from study.report import style
from study.report.advice import accuracy
from study.report.topics import memory

FILE = ROOT / "reports" / "calculator.json.gz"  # a wheel has none
ARMS = (
    *("single", "ddp", "zero1", "zero1_cpu", "zero2", "zero2_cpu", "zero3", "zero3_cpu", "zero3_nvme"),
    *("fsdp2", "fsdp2_grad_op", "fsdp2_cpu"),
)
GPUS_TRIED = (1, 2, 4, 8, 16, 32, 64)
LEAST_TOKENS = 2  # a size of 1 leads to other kernels
MODEL = "llama3-8b"  # that the page shows first
OPTIMIZERS = {"adamw": "AdamW", "adamw_8bit": "AdamW with 8-bit states", "sgd": "SGD with momentum"}
PRECISIONS = {"bf16_cast": "bf16 weights, fp32 master copy", "bf16": "bf16 autocast, fp32 weights", "fp32": "fp32"}


def values() -> dict:
    """Return what the page shows. Without JavaScript it names the command that answers."""
    # The tables stay compressed in the page, and the browser inflates them: ten times as many bytes otherwise.
    tables = FILE.read_bytes()
    models = json.loads(gzip.decompress(tables))["models"]
    by_size = sorted(GPUS, key=lambda name: -GPUS[name].memory_bytes)
    return {
        "models": sorted(models, key=lambda name: name != MODEL),  # that which is shown first comes first
        "gpu_counts": GPUS_TRIED,
        "gpus": {name: f"{name} ({size(GPUS[name].memory_bytes)})" for name in by_size},
        "precisions": PRECISIONS,
        "optimizers": OPTIMIZERS,
        "least_tokens": LEAST_TOKENS,
        "accuracy": "; ".join(accuracy()),
        "miss": f"{MISS:.0%}",
        "reserve": f"{size(OUTSIDE_AT_MOST_BYTES)} and {FRAGMENTATION:.0%}",
        "tables": base64.b64encode(tables).decode(),
        "machines": {
            "gpu_kinds": {
                name: {
                    "memory_bytes": gpu.memory_bytes,
                    "has_bf16": gpu.has_bf16,
                    "reserve_bytes": reserve_bytes(gpu),
                    "half_flops_per_s": peak_flops_per_s(gpu, False),
                    "single_flops_per_s": peak_flops_per_s(gpu, True),
                }
                for name, gpu in GPUS.items()
            },
            "arms": {
                arm.name: {
                    "alone": arm.distributed_type == "NO",
                    "buckets": arm.deepspeed is not None,
                    "colour": style.look(arm.name)["color"],
                }
                for arm in map(load_arm, ARMS)
            },
            "bucket_elements": BUCKET_ELEMENTS,
            "host_process_bytes": HOST_PROCESS_BYTES,
            "miss": MISS,
            "colours": {part: style.PARTS[part] for part in memory.PARTS},  # the tables have a number for each
        },
    }
