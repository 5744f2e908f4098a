"""Audit of a record's settings: the observed training is the requested one."""

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

from study.errors import Stop
from study.ledger.tolerances import same
from study.records.schema import Observed, Record
from study.spec import arms, optimizers
from study.spec.settings import AUTOCAST, HALF_WEIGHTS

PROFILERS = ("wall_clock_breakdown", "flops_profiler", "comms_logger", "memory_breakdown")


def promises(record: Record) -> Iterator[str]:
    """The observed values are the requested ones."""
    requested, observed, dtypes = record.requested, record.observed, record.observed.dtypes
    expected = {name: getattr(requested, name) for name in ("accumulation", "checkpointing", "arm", "virtual_ranks")}
    expected["compiled"] = requested.compile
    expected["autocast"] = requested.precision if requested.precision in AUTOCAST else None
    if arm := _arm(requested.arm):
        expected |= {name: getattr(arm, name) for name in ("stage", "offload_optimizer", "offload_param")}
        if arm.distributed_type == "DEEPSPEED":
            expected["wrapper"] = "DeepSpeedEngine"
        if arm.fsdp and observed.fsdp is None:
            yield "the arm is sharded by FSDP2, but no FSDP2 was observed"
    for name, value in expected.items():
        if (real := getattr(observed, name)) != value:
            yield f"{name}: requested {value!r}, observed {real!r}"
    weights = "bfloat16" if requested.precision in HALF_WEIGHTS else "float32"
    if dtypes.get("weights") != weights:
        yield f"weights: {requested.precision} means {weights}, observed {dtypes.get('weights')}"
    promised = optimizers.moments_dtypes(requested.optimizer, requested.precision)
    if dtypes.get("moments") not in {*promised, None}:  # None: on the disk
        yield f"the optimizer's moments are {dtypes['moments']}; every arm must have {' or '.join(sorted(promised))}"
    if arm and observed.optimizer not in (classes := optimizers.classes(requested.optimizer, arm)):
        yield f"the optimizer is {observed.optimizer}, but {' or '.join(sorted(classes))} was requested"
    if observed.ranks_counted not in (None, observed.ranks):
        yield f"{observed.ranks} ranks, but {observed.ranks_counted} took part in a collective"
    for name in PROFILERS:
        section = (observed.deepspeed or {}).get(name)
        if section is True or (isinstance(section, dict) and section.get("enabled")):
            yield f"DeepSpeed's {name} was on, which adds synchronisation"


@functools.lru_cache
def _arm(name: str | None) -> arms.Arm | None:
    """None if this repository does not have the arm, or no longer has it."""
    path = arms.all_paths().get(name)
    try:
        return arms.read(path) if path else None
    except Stop:
        return None


def row_ranks(observed: Observed) -> int:
    """How many ranks read the same rows, because they share each row or divide the layers."""
    return (observed.sequence_ranks or 1) * (observed.tensor_ranks or 1)


def batch(record: Record) -> Iterator[str]:
    """The batch contains the ranks and the passes exactly once."""
    requested, observed, engine = record.requested, record.observed, record.observed.deepspeed or {}
    micro_batch, passes = requested.micro_batch, requested.accumulation
    groups = observed.ranks // row_ranks(observed)
    rows = micro_batch * passes * groups
    if observed.rows_per_step != rows:
        product = f"{micro_batch} rows x {passes} passes x {groups} ranks are {rows}"
        yield f"{observed.rows_per_step} rows a step, but {product}"
    if observed.tokens_per_step != observed.rows_per_step * requested.sequence:
        yield f"{observed.tokens_per_step} tokens a step are not {observed.rows_per_step} rows of {requested.sequence}"
    for key, value in (("train_micro_batch_size_per_gpu", micro_batch), ("gradient_accumulation_steps", passes)):
        if isinstance(engine.get(key), int) and engine[key] != value:
            yield f"DeepSpeed's {key} is {engine[key]}, but {value} was requested"


def engine(record: Record) -> Iterator[str]:
    """The config that DeepSpeed resolved agrees with its objects."""
    observed, config = record.observed, record.observed.deepspeed
    if config is None:
        if observed.wrapper == "DeepSpeedEngine":
            yield "DeepSpeed's resolved config is not recorded"
        return
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    resolved = {"stage": zero.get("stage", 0), "clipping": config.get("gradient_clipping", observed.clipping)}
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name)
        resolved[name] = section.get("device", "none") if isinstance(section, dict) else "none"
    for name, value in resolved.items():
        if (real := getattr(observed, name)) != value:
            yield f"{name}: DeepSpeed resolved {value!r}, observed {real!r}"
    homes = record.memory.components
    for home, name in (("optimizer_home", "offload_optimizer"), ("weights_home", "offload_param")):
        if (where := getattr(homes, home)) not in (None, getattr(observed, name)):
            yield f"{home} is {where!r}, but {name} is {getattr(observed, name)!r}"


def command(record: Record) -> Iterator[str]:
    """The recorded request is that of the command line."""
    requested = record.requested
    for flag, text in dict(itertools.pairwise(record.argv)).items():  # of a flag given twice, the last counts
        value = getattr(requested, flag[2:].replace("-", "_"), None) if flag.startswith("--") else None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                agrees = same(float(text), value) or float(text) == value
            except ValueError:
                agrees = True  # a word that stands for a number
        else:
            agrees = flag not in ("--model", "--precision", "--task") or value == text
        if not agrees:
            yield f"the command says {flag} {text}, but {value!r} is recorded"
    if requested.config_file and requested.arm and Path(requested.config_file).stem != requested.arm:
        yield f"the arm is {requested.arm}, but its file is {Path(requested.config_file).name}"
