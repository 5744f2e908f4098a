"""The page that answers `study estimate` without a server: the formulas are in JavaScript, this module writes the data.

What Python resolves once (configs of arms, shapes of models, datasheets, constants) goes into the page as JSON; what
depends on the reader's numbers is computed in `templates/calculator-*.js`. tests/test_calculator.py holds the two
together over a thousand random questions.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from study.io.numbers import size
from study.machine.gpus import GPUS
from study.predictor import papers
from study.predictor.advice.advise import MISS
from study.predictor.architecture import FAMILIES, Architecture, describe
from study.predictor.estimate import estimate
from study.predictor.memory.engine import Engine
from study.predictor.memory.memory_kinds import FRAGMENTATION, OUTSIDE_AT_MOST_BYTES, reserve_bytes
from study.predictor.outside.stored import accuracy
from study.predictor.room import HOST_PROCESS_BYTES
from study.predictor.setup import Setup
from study.predictor.timing import pace, schedule, work
from study.report import charts, style
from study.report.templating import write_page
from study.report.topics import memory
from study.spec import arms
from study.spec.shapes import SHAPES, VOCABULARY

SCRIPTS = tuple(f"calculator{part}.js" for part in ("-model", "-memory", "-fsdp", "-time", ""))
# Common current decoders. They are computed as `study estimate --params --ffn` does; tracing a model from its config is
# more exact.
DECODERS = ("llama3-8b", "qwen2.5-7b", "qwen3-8b", "mistral-7b", "olmo2-7b", "phi3-mini")
OWN = "own numbers"
# The arms whose formulas the page has. One that shards within groups of ranks needs them ported first.
ARMS = (
    *("single", "ddp", "zero1", "zero1_cpu", "zero2", "zero2_cpu", "zero3", "zero3_cpu", "zero3_nvme"),
    *("fsdp2", "fsdp2_grad_op", "fsdp2_cpu"),
)
SAME_NAME = ("precision", "accumulation", "sequence")  # of a setup, in Python and in the form
FIRST: dict[str, Any] = {"model": "llama3-8b", "gpus": 8, "gpu": "H100-80GB", "precision": "bf16_cast", "microBatch": 1}
FIRST |= {"sequence": 2048, "accumulation": 1}
PRECISIONS = {
    "bf16_cast": "bf16 weights, fp32 master copy",
    "bf16": "bf16 autocast, fp32 weights",
    "fp16": "fp16 autocast, fp32 weights",
    "fp32": "fp32",
    "bf16_pure": "bf16 weights and optimizer",
}
# What an arm's config decides, as the engine reads it.
ENGINE = (
    *("stage", "overlap", "bucket_elements", "reduces_by_all_reduce", "prefetch_elements", "persistent_elements"),
    *("reuse_elements", "live_elements", "optimizer_home", "weights_home", "offloads", "pins_parts"),
)


def write(out: Path, titles: dict[str, str]) -> None:
    """The page. Before its script runs, and without JavaScript, it shows Python's answer to the first question."""
    model_names = [(name, name) for name in models()] + [(OWN, "my own numbers")]
    choices = {"model_names": model_names, "gpu_names": [(name, name) for name in GPUS], "shown": FIRST | _sizes()}
    choices |= {"precisions": list(PRECISIONS.items()), "scripts": SCRIPTS, "last_decoder": DECODERS[-1]}
    words = {
        "accuracy": accuracy(),
        "miss": f"{MISS:.0%}",
        "reserve": f"{size(OUTSIDE_AT_MOST_BYTES)} and {FRAGMENTATION:.0%}",
        "bars": _bars(),
    }
    words |= {"sentence": "", "conditions": f"{FIRST['gpus']} x {FIRST['gpu']}, {FIRST['model']}. Predicted."}
    values = choices | words | {"data": data()}
    write_page(out / "calculator.html", "calculator.html", titles=titles, here="calculator", **values)


def _sizes() -> dict[str, int]:
    return models()[FIRST["model"]]


def _bars() -> charts.Bars:
    """Every arm's answer to the first question."""
    model = Architecture(**models()[FIRST["model"]])
    values: dict[str, Any] = {"micro_batch": FIRST["microBatch"], "device": "cuda"}
    values |= {name: FIRST[name] for name in SAME_NAME}
    setups = {name: Setup.of_arm(model, name, ranks=FIRST["gpus"], **values) for name in ARMS}
    parts = {name: memory.part_bytes(estimate(setup).at_peak) for name, setup in setups.items()}
    return charts.bars(parts, style.PARTS, "Memory at the peak by arm")


def data() -> dict:
    """Everything that the page computes with."""
    return {
        "models": models(),
        "arms": {name: _arm(name) for name in ARMS},
        "gpus": {name: _gpu(name) for name in GPUS},
        "kernels": work.lines(),
        "pace": asdict(pace.pace()),
        "interval": pace.interval_factors(),
        "large": pace.LARGE,
        "update_bytes": schedule.UPDATE_BYTES,
        "cpu_adam_s_per_billion": papers.CPU_ADAM_S_PER_BILLION,
        "host_process_bytes": HOST_PROCESS_BYTES,
        "miss": MISS,
        "precisions": PRECISIONS,
        "part_of": {role: part for part, roles in memory.PARTS.items() for role in roles},
        "colours": {part: style.PARTS[part] for part in memory.PARTS},
    }


def models() -> dict[str, dict]:
    """The dimensions of the models that have formulas, by name: current decoders first, then the built-in shapes."""
    built_in = [name for name, shape in SHAPES.items() if shape["model_type"] in FAMILIES]
    decoders = {name: asdict(work.as_architecture(SHAPES[name])) for name in DECODERS}
    return decoders | {name: asdict(describe(name, VOCABULARY)) for name in built_in if not name.endswith("-micro")}


def _arm(name: str) -> dict:
    arm = arms.load_arm(name)
    about = {"alone": arm.distributed_type == "NO", "colour": style.colour(name)}
    setup = Setup.of_arm(describe("gpt2"), name, ranks=2)
    engine = Engine(setup)
    about |= {field: getattr(engine, field) for field in ENGINE}
    return about | {"fsdp": setup.fsdp, "fsdp_offload": setup.fsdp_offload}


def _gpu(name: str) -> dict:
    gpu, ceilings = GPUS[name], pace.ceilings(name)
    links = {kind: {"name": link, "bytes_per_s": papers.LINKS[link].bytes_per_s} for kind, link in _links(name)}
    return {
        "memory_bytes": gpu.memory_bytes,
        "reserve_bytes": reserve_bytes(gpu),
        "memory_bytes_per_s": gpu.memory_bytes_per_s,
        "has_bf16": gpu.has_bf16,
        "half_flops_per_s": gpu.half_flops_per_s,
        "single_flops_per_s": gpu.single_flops_per_s,
        "host_link_bytes_per_s": papers.LINKS[gpu.host_link].bytes_per_s,
        "products_ceiling": ceilings["products"][0],
        "attention_ceiling": ceilings["attention"][0],
        "moving_share": pace.moving_share_of(name),
        "multiprocessors": pace.multiprocessors(name),
        **links,
    }


def _links(name: str) -> list[tuple[str, str]]:
    return [("peer_link", GPUS[name].peer_link), ("network", GPUS[name].network)]
