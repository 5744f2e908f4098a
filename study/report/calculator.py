"""The page that answers `study estimate` without a server. Its script looks the answer up in tables of the package."""

import base64
import gzip
import json
from collections.abc import Iterable
from pathlib import Path

from study.io.numbers import size
from study.machine.gpus import GPUS
from study.predictor.advice.advise import MISS
from study.predictor.advice.settled import BUCKET_ELEMENTS
from study.predictor.estimate import estimate
from study.predictor.memory.loading import HOST_PROCESS_BYTES
from study.predictor.memory.memory_kinds import FRAGMENTATION, OUTSIDE_AT_MOST_BYTES, reserve_bytes
from study.predictor.timing.pace import peak_flops_per_s
from study.predictor.tracing.transformer import Transformer
from study.report import charts, style
from study.report.calculator_tables import ARMS, FILE, GPUS_TRIED, LEAST_TOKENS, PART_OF, setup_of
from study.report.outside import accuracy
from study.report.templating import TEMPLATES, write_page
from study.report.topics import memory
from study.spec import arms
from study.spec.shapes import config_of

SCRIPT = "calculator.js"
MODEL, GPU_COUNT, GPU, PRECISION = "llama3-8b", 8, "H100-80GB", "bf16_cast"  # what the page shows first
ROWS = {"rows": 1, "tokens": 2048, "passes": 16, "batch": 16 * GPU_COUNT}  # a batch as `study advise` assumes it
OPTIMIZERS = {"adamw": "AdamW", "adamw_8bit": "AdamW with 8-bit states", "sgd": "SGD with momentum"}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose config.json the page reads
PRECISIONS = {
    "bf16_cast": "bf16 weights, fp32 master copy",
    "bf16": "bf16 autocast, fp32 weights",
    "fp32": "fp32",
}


def write(out: Path, titles: dict[str, str], is_alone: bool = False) -> Path:
    """Write the page. Before its script runs, and without JavaScript, it shows the answer to the first question.

    If it is alone, it contains its style and its script, and leads to no other page.
    """
    tables = FILE.read_bytes()
    models = json.loads(gzip.decompress(tables))["models"]
    by_size = sorted(GPUS, key=lambda name: -GPUS[name].memory_bytes)
    choices = {
        "model_names": [(name, name) for name in sorted(models, key=lambda name: name != MODEL)],
        "gpu_counts": [(count, count) for count in GPUS_TRIED],
        "gpu_names": [(name, f"{name} ({size(GPUS[name].memory_bytes)})") for name in by_size],
        "precisions": list(PRECISIONS.items()),
        "optimizers": list(OPTIMIZERS.items()),
        "shown": {"model": MODEL, "gpus": GPU_COUNT, "gpu": GPU, "precision": PRECISION, "optimizer": "adamw"} | ROWS,
        "least_tokens": LEAST_TOKENS,
    }
    words = {
        "accuracy": accuracy(),
        "miss": f"{MISS:.0%}",
        "reserve": f"{size(OUTSIDE_AT_MOST_BYTES)} and {FRAGMENTATION:.0%}",
        "bars": _bars(),
        "conditions": f"{GPU_COUNT} x {GPU}, {MODEL}. Predicted.",
    }
    known = machines() | {"configs": configs(models)}
    values = choices | words | {"tables": base64.b64encode(tables).decode(), "machines": known, "script": SCRIPT}
    if is_alone:
        style_sheet, site, script = ((TEMPLATES / name).read_text() for name in ("site.css", "site.js", SCRIPT))
        values |= {"style": style_sheet, "script": site + script}
    path = out / "calculator.html"
    write_page(path, path.name, titles=titles, here="calculator", **values)
    return path


def configs(models: Iterable[str]) -> dict[str, dict]:
    """Return the configs of the models whose families the page can compare with a pasted one."""
    every_config = {name: config_of(name) for name in models}
    return {name: config for name, config in every_config.items() if config["model_type"] in FAMILIES}


def _bars() -> charts.Bars:
    """Return every arm's answer to the first question."""
    model = Transformer.of(config_of(MODEL), MODEL)
    rows = {"micro_batch": ROWS["rows"], "sequence": ROWS["tokens"], "accumulation": ROWS["passes"]}
    setups = {arm: setup_of(model, PRECISION, arm, GPU_COUNT, **rows) for arm in ARMS}
    parts = {arm: parts_of(estimate(setup).at_peak) for arm, setup in setups.items()}
    return charts.bars(parts, style.PARTS, "Memory at the peak by arm")


def parts_of(components: dict[str, int]) -> dict[str, int]:
    """Return bytes by the calculator's parts."""
    parts = dict.fromkeys(memory.PARTS, 0)
    names = list(parts)
    for role, size_bytes in components.items():
        parts[names[PART_OF[role]]] += size_bytes
    return parts


def machines() -> dict:
    """Return what the page knows beside its tables."""
    parts = list(memory.PARTS)
    return {
        "gpu_kinds": {name: _gpu(name) for name in GPUS},
        "arms": {name: _arm(name) for name in ARMS},
        "precisions": PRECISIONS,
        "optimizers": OPTIMIZERS,
        "bucket_elements": BUCKET_ELEMENTS,
        "host_process_bytes": HOST_PROCESS_BYTES,
        "miss": MISS,
        "colours": {part: style.PARTS[part] for part in parts},
        "activations": parts.index("activations"),
        "optimizer": parts.index("optimizer"),
        "other": parts.index("other"),
    }


def _arm(name: str) -> dict:
    arm = arms.load_arm(name)
    is_alone, offloads = arm.distributed_type == "NO", arm.offload_optimizer != "none"
    known = {"alone": is_alone, "offloads": offloads, "buckets": arm.deepspeed is not None}
    return known | {"place": arms.NAMES.index(name), "colour": style.colour(name)}


def _gpu(name: str) -> dict:
    gpu = GPUS[name]
    speeds = {"half_flops_per_s": peak_flops_per_s(name, False), "single_flops_per_s": peak_flops_per_s(name, True)}
    return {"memory_bytes": gpu.memory_bytes, "has_bf16": gpu.has_bf16, "reserve_bytes": reserve_bytes(gpu)} | speeds
