"""The rules of `study diagnose`, each for the finding of the same name in findings.toml.

A rule returns False if it finds nothing. Otherwise it returns True, or the values that its sentence shows: names that
end in `_bytes` are shown as sizes, and `memory_bytes` and `traffic_bytes` are what the finding costs. A rule raises
Unknown if the record lacks a value that it needs.
"""

from typing import Any

from study.io.numbers import count, short, size
from study.machine.disk import LEAST_SWAPPED_BYTES
from study.spec.arms import OFFLOADS
from study.spec.settings import AUTOCAST
from study.watcher.facts import REDUCING, Facts, Unknown, known

Result = bool | dict[str, Any]
FEW = 1e-5  # of the weights: enough to average a loss, but less than the gradients of LoRA
ADAMS = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")
FIRST_SCALE = 65536  # the initial loss scale of DeepSpeed and torch
HALVES = tuple(AUTOCAST.values())
LARGE = 0.1  # of the peak: a smaller share gets no finding
DDP_BUCKET_BYTES = 25 * 2**20  # DDP's bucket_cap_mb
FLOOR_ELEMENTS = 10_000
REPEATED = 1.5  # times the bytes of all weights: more means that they were moved more than once


# --- the engine ----------------------------------------------------------------------------------------------------


def deepspeed_off_in_published_script(facts: Facts) -> Result:
    if not facts.record.is_script:
        raise Unknown
    runs = [run for run in facts.observed.runs if run.arguments_say_deepspeed and not run.deepspeed_initialize_calls]
    return bool(runs) and {"names": " and ".join(run.name for run in runs)}


def deepspeed_off(facts: Facts) -> Result:
    stage = facts.promised.stage
    is_off = known(facts.promised.deepspeed) and facts.stage == 0 and facts.observed.stage is None
    return is_off and {"with_stage": "" if stage is None else f" with ZeRO stage {stage}"}


def other_stage(facts: Facts) -> Result:
    return known(facts.promised.deepspeed) and known(facts.promised.stage) != known(facts.observed.stage)


def fsdp_off_on_a_cpu(facts: Facts) -> Result:
    return _fsdp_is_off(facts) and facts.observed.device == "cpu"


def fsdp_off(facts: Facts) -> Result:
    return _fsdp_is_off(facts) and facts.observed.device != "cpu"


def _fsdp_is_off(facts: Facts) -> bool:
    wrapper = known(facts.observed.wrapper)
    return known(facts.promised.fsdp) and (wrapper == "DistributedDataParallel" or not facts.sharded)


def separate_trainings(facts: Facts) -> Result:
    counted = facts.observed.ranks_counted or facts.ranks
    return (facts.promised.ranks or 1) > counted and {"counted": counted}


def no_wrap(facts: Facts) -> Result:
    return not _shares_gradients(facts) and facts.observed.distributed_type == "NO"


def gradients_not_shared(facts: Facts) -> Result:
    if _shares_gradients(facts) or facts.observed.distributed_type == "NO":
        return False
    return {"reduced_bytes": facts.moved_bytes(*REDUCING)}


def _shares_gradients(facts: Facts) -> bool:
    if facts.ranks == 1 or facts.sharded:
        return True
    return facts.moved_bytes(*REDUCING) > FEW * facts.weights_bytes


# --- clipping and accumulation -------------------------------------------------------------------------------------


def clip_grad_norm_ignored(facts: Facts) -> Result:
    """DeepSpeed clips at the value of its config, not at the one that the script gives clip_grad_norm_."""
    clipping = known(facts.observed.clipping)
    return facts.observed.stage is not None and facts.record.watched.clip_grad_norm not in (None, clipping)


def clipping_by_default(facts: Facts) -> Result:
    known(facts.observed.stage)
    clips = known(facts.observed.clipping) > 0 and facts.promised.clipping is None
    return clips and not clip_grad_norm_ignored(facts)


def clipping_zero_dropped(facts: Facts) -> Result:
    return _clips_otherwise(facts) and facts.observed.stage is not None and known(facts.promised.clipping) <= 0


def clipping_missing(facts: Facts) -> Result:
    return _clips_otherwise(facts) and facts.observed.stage is None


def clipping_differs(facts: Facts) -> Result:
    return _clips_otherwise(facts) and facts.observed.stage is not None and known(facts.promised.clipping) > 0


def _clips_otherwise(facts: Facts) -> bool:
    """Return whether gradients are clipped at another value than promised. All values up to 0 mean off."""
    promised = max(known(facts.promised.clipping), 0)
    return promised != max(known(facts.observed.clipping), 0) and not clip_grad_norm_ignored(facts)


def accumulation_set_twice(facts: Facts) -> Result:
    return known(facts.promised.accumulation) != known(facts.observed.accumulation)


# --- precision -----------------------------------------------------------------------------------------------------


def cast_instead_of_autocast(facts: Facts) -> Result:
    dtype = AUTOCAST.get(facts.promised.precision or "")
    is_cast = dtype in facts.weights.split() and facts.observed.autocast is None
    return is_cast and facts.observed.stage is not None and {"dtype": dtype}


def no_autocast(facts: Facts) -> Result:
    asked = facts.promised.precision
    return facts.weights == "float32" and asked in AUTOCAST and facts.observed.autocast != asked


def weights_upcast(facts: Facts) -> Result:
    if facts.weights != "float32" or facts.promised.weights not in HALVES:
        return False
    return {"wide_bytes": facts.weights_bytes, "narrow_bytes": facts.weights_bytes // 2}


def no_fp32_copy(facts: Facts) -> Result:
    dtypes = facts.observed.dtypes
    narrow = facts.weights in HALVES and dtypes.get("moments") == facts.weights and not dtypes.get("master")
    return narrow and {"weights": facts.weights}


def loss_scale_stuck(facts: Facts) -> Result:
    known(facts.weights)
    seen = facts.observed
    patched = "lower_loss_scale_on_overflow" in seen.patches
    return seen.autocast == "fp16" and bool(seen.stage) and seen.loss_scale == FIRST_SCALE and not patched


def empty_first_step(facts: Facts) -> Result:
    return "bfloat16" in facts.weights.split() and facts.observed.stage == 0


# --- offloading ----------------------------------------------------------------------------------------------------


def _section(facts: Facts, name: str) -> dict[str, Any]:
    """Return a section of `zero_optimization` in the config that the engine resolved."""
    zero = (facts.observed.deepspeed or {}).get("zero_optimization") or {}
    section = zero.get(name)
    return section if isinstance(section, dict) else {}


def _asked_home(facts: Facts, part: str) -> str:
    """Return where the optimizer states or the weights should be offloaded to."""
    known(facts.observed.stage)
    return getattr(facts.promised, part) or _section(facts, part).get("device") or "none"


def nvme_is_cpu(facts: Facts) -> Result:
    asked = _asked_home(facts, "offload_optimizer")
    return asked == "nvme" and known(facts.observed.offload_optimizer) == "cpu" and facts.stage < 3


def states_not_offloaded(facts: Facts) -> Result:
    asked = _asked_home(facts, "offload_optimizer")
    return asked != known(facts.observed.offload_optimizer) and not nvme_is_cpu(facts) and {"home": asked}


def weights_not_offloaded(facts: Facts) -> Result:
    asked = _asked_home(facts, "offload_param")
    why = f": stage {facts.stage} ignores offload_param" if facts.stage < 3 else ""
    return asked != "none" and facts.observed.offload_param in (None, "none") and {"home": asked, "why": why}


def no_nvme_path(facts: Facts) -> Result:
    stage = known(facts.observed.stage)
    parts = [part for part in OFFLOADS if getattr(facts.observed, part) == "nvme"]
    without = [part for part in parts if _section(facts, part).get("nvme_path") in (None, "none")]
    return stage == 3 and bool(without) and {"parts": " and ".join(without)}


def nothing_swapped(facts: Facts) -> Result:
    known(facts.observed.stage)
    if known(facts.observed.offload_optimizer) != "nvme":
        return False
    written = [known(rank.nvme_written_bytes) for rank in facts.record.memory.per_rank]
    return max(written, default=LEAST_SWAPPED_BYTES) < LEAST_SWAPPED_BYTES


# --- the optimizer and checkpointing -------------------------------------------------------------------------------


def optimizer_replaced(facts: Facts) -> Result:
    asked = facts.promised.optimizer
    return known(facts.observed.optimizer) == "DeepSpeedCPUAdam" and asked not in (None, *ADAMS)


def zenflow_overwrites(facts: Facts) -> Result:
    known(facts.observed.optimizer)
    return facts.observed.stage in (1, 2) and bool(_section(facts, "zenflow"))


def checkpointing_off(facts: Facts) -> Result:
    return known(facts.promised.checkpointing) and not known(facts.observed.checkpointing)


# --- memory at the peak of the rank that holds most ----------------------------------------------------------------


def fp32_copies(facts: Facts) -> Result:
    if facts.weights != "float32" or facts.observed.dtypes.get("master") != "float32" or not facts.stage:
        return False
    measured = (facts.components or {}).get("master")
    return {"memory_bytes": 4 * facts.parameters // facts.ranks if measured is None else measured}


def saved_bytes(facts: Facts) -> int:
    """Return the bytes that partitioning saves on a rank: optimizer states, from stage 2 gradients, in stage 3 weights.

    The fp32 copy of fp32 weights, which only ZeRO keeps, is subtracted. Negative if ZeRO costs more than it saves.
    """
    others = 1 - 1 / facts.ranks
    copies = others if facts.element_bytes == 2 else -1 / facts.ranks
    partitioned = (facts.stage >= 2) + (facts.stage >= 3)
    return int(facts.parameters * (8 * others + 4 * copies + facts.element_bytes * others * partitioned))


def bucket_bytes(facts: Facts) -> int:
    """Return the bytes of the buckets at the peak; from the settings if memory was not measured by component."""
    if facts.components is not None:
        return facts.components.get("buckets", 0)
    return known(facts.observed.bucket_elements) * facts.element_bytes * _buckets(facts)


def _buckets(facts: Facts) -> int:
    return 2 if facts.observed.overlap and facts.stage < 3 else 1


def suggested_elements(facts: Facts) -> int:
    """Return a bucket as large as DDP's, or less, so that buckets take a tenth of the saving at most. Two digits."""
    elements = min(DDP_BUCKET_BYTES, saved_bytes(facts) // 10 // _buckets(facts)) // facts.element_bytes
    digits = max(0, len(str(elements)) - 2)
    return max(FLOOR_ELEMENTS, elements // 10**digits * 10**digits)


def buckets_dominate(facts: Facts) -> Result:
    if not facts.stage:
        return False
    taken = bucket_bytes(facts)
    saved = saved_bytes(facts)
    elements = facts.observed.bucket_elements or 0
    best = suggested_elements(facts)
    if best >= elements or not taken > saved > 0:
        return False
    suggestion = {"best": best, "best_bytes": best * facts.element_bytes}
    return {"memory_bytes": taken, "saved_bytes": saved, "elements": count(elements)} | suggestion


def second_bucket(facts: Facts) -> Result:
    if not facts.stage:
        return False
    taken = bucket_bytes(facts)
    large = facts.components is None or taken >= LARGE * facts.peak_bytes
    return _buckets(facts) == 2 and large and {"memory_bytes": taken // 2}


def weights_stay_gathered(facts: Facts) -> Result:
    if facts.stage < 3:
        return False
    per_rank = facts.record.memory.components.per_rank
    gathered = max((rank.after_step.get("gathered_weights", 0) for rank in per_rank), default=0)
    is_large = gathered >= max(LARGE * facts.peak_bytes, facts.weights_bytes // 2)
    return is_large and {"memory_bytes": gathered, "weights_bytes": facts.weights_bytes}


def all_weights_gathered(facts: Facts) -> Result:
    if facts.stage < 3:
        return False
    gathered = facts.peak.get("gathered_weights", 0)
    is_large = gathered >= max(LARGE * facts.peak_bytes, 0.9 * facts.weights_bytes)
    return is_large and facts.ranks > 1 and {"memory_bytes": gathered}


def not_all_partitioned(facts: Facts) -> Result:
    if facts.stage < 3 or facts.ranks == 1:
        return False
    fair = facts.parameters / facts.ranks
    largest = max(facts.observed.held_parameters_per_rank, default=0)
    shares = {"share": largest / facts.parameters, "fair_share": 1 / facts.ranks}
    return largest > 1.5 * fair and shares | {"memory_bytes": int((largest - fair) * facts.element_bytes)}


def activations_dominate(facts: Facts) -> Result:
    activations = facts.peak.get("activations", 0)
    most = activations >= facts.peak_bytes / 2 and not facts.observed.checkpointing
    return most and {"memory_bytes": activations, "peak_bytes": facts.peak_bytes}


def zero_on_one_rank(facts: Facts) -> Result:
    homes = (facts.observed.offload_optimizer, facts.observed.offload_param)
    if facts.ranks > 1 or not facts.stage or any(home not in (None, "none") for home in homes):
        return False
    if facts.components is None:
        return {"costs": ""}
    copies = facts.components.get("master", 0) if facts.observed.dtypes.get("weights") == "float32" else 0
    extra = copies + facts.components.get("buckets", 0)
    return {"memory_bytes": extra, "costs": f", and costs {size(extra)} of copies and buckets"}


def states_replicated(facts: Facts) -> Result:
    peak = facts.peak
    states = sum(peak.get(role, 0) for role in ("weights", "gradients", "master", "moments"))
    if facts.ranks == 1 or facts.sharded or states < facts.peak_bytes / 2:
        return False
    sharable = peak.get("moments", 0) + peak.get("master", 0)
    return {"states_bytes": states, "memory_bytes": sharable - sharable // facts.ranks}


def second_copy_unused(facts: Facts) -> Result:
    """Weights that stage 3 does not release are not gathered in the backward pass, and then hpZ's copy is not used."""
    among = facts.observed.second_partition_ranks
    if facts.stage < 3 or among is None:
        return False
    gathers = facts.traffic.get("all_gather")
    unused = among < facts.ranks and not (gathers and gathers.bytes_by_group)
    copied = known(facts.observed.second_partition_parameters)
    return unused and {"memory_bytes": copied * facts.element_bytes}


# --- traffic, by the collectives that were counted in one step -----------------------------------------------------


def gathers_repeated(facts: Facts) -> Result:
    return facts.stage == 3 and _repeated(facts, "all_gather")


def reductions_repeated(facts: Facts) -> Result:
    return facts.stage >= 2 and _repeated(facts, *REDUCING)


def _repeated(facts: Facts, *kinds: str) -> Result:
    """Return how often a step moves the bytes of all weights, if accumulation makes it more than once."""
    moved = facts.moved_bytes(*kinds)
    times = moved / facts.weights_bytes
    repeated = known(facts.observed.accumulation) > 1 and times >= REPEATED
    return repeated and {"times": short(round(times, 1)), "traffic_bytes": moved}
