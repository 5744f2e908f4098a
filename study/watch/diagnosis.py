"""Diagnose a run by its record: rules for mistakes and costs. The sentence of each finding is in findings.toml.

A rule yields the ids of its findings and the values that their sentences show: names that end in `_bytes` are shown as
sizes, and `memory_bytes` and `traffic_bytes` are what the finding costs. A rule raises Unknown if the record lacks a
value that it needs.
"""

from collections.abc import Callable, Iterator
from typing import Any

from study.core.arms import OFFLOADS
from study.core.disk import LEAST_SWAPPED_BYTES
from study.core.numbers import count, short, size
from study.core.settings import AUTOCAST
from study.records.hangs import Finding
from study.records.schema import Record
from study.watch.facts import Facts, Unknown, required
from study.watch.findings import finding, ordered

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
FEW = 1e-5  # of the weights: enough to average a loss, but less than the gradients of LoRA
ADAMS = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")
FIRST_SCALE = 65536  # the initial loss scale of DeepSpeed and torch
HALVES = tuple(AUTOCAST.values())
LARGE = 0.1  # of the peak: a smaller share gets no finding
DDP_BUCKET_BYTES = 25 * 2**20  # DDP's bucket_cap_mb
FLOOR_ELEMENTS = 10_000
WHOLE = 0.9  # of the weights
NOTICEABLE_BYTES = 500e6  # of weights: a process frees less in its imports
REPEATED = 1.5  # times the bytes of all weights: more means that they were moved more than once

Results = Iterator[tuple[str, dict[str, Any]]]


# --- mistakes ------------------------------------------------------------------------------------------------------


def _deepspeed(facts: Facts) -> Results:
    seen = facts.observed
    if facts.record.is_script:
        runs = [run.name for run in seen.runs if run.arguments_say_deepspeed and not run.deepspeed_initialize_calls]
        if runs:
            yield "deepspeed_off_in_published_script", {"names": " and ".join(runs)}
    elif required(facts.promised.deepspeed):
        stage = facts.promised.stage
        if seen.stage is None:
            required(seen.wrapper)
            yield "deepspeed_off", {"with_stage": "" if stage is None else f" with ZeRO stage {stage}"}
        elif stage not in (None, seen.stage):
            yield "other_stage", {}


def _fsdp(facts: Facts) -> Results:
    wrapper = required(facts.observed.wrapper)
    if required(facts.promised.fsdp) and (wrapper == "DistributedDataParallel" or not facts.sharded):
        yield "fsdp_off_on_a_cpu" if facts.observed.device == "cpu" else "fsdp_off", {}


def _separate(facts: Facts) -> Results:
    counted = facts.observed.ranks_counted or facts.ranks
    if (facts.promised.ranks or 1) > counted:
        yield "separate_trainings", {"counted": counted}


def _gradients(facts: Facts) -> Results:
    if facts.ranks == 1 or facts.sharded:
        return
    reduced_bytes = facts.moved_bytes(*REDUCING)
    if reduced_bytes <= FEW * facts.weights_bytes:
        id = "no_wrap" if facts.observed.distributed_type == "NO" else "gradients_not_shared"
        yield id, {"reduced_bytes": reduced_bytes}


def _clipping(facts: Facts) -> Results:
    """DeepSpeed clips at the value of its config, not at the one that the script gives clip_grad_norm_."""
    seen = required(facts.observed.clipping)
    requested = facts.promised.clipping
    is_zero = facts.observed.stage is not None
    if is_zero and facts.record.watched.clip_grad_norm not in (None, seen):
        yield "clip_grad_norm_ignored", {}
    elif requested is None:
        if is_zero and seen > 0:
            yield "clipping_by_default", {}
    elif max(requested, 0) != max(seen, 0):  # all values up to 0 mean off
        with_zero = "clipping_zero_dropped" if requested <= 0 else "clipping_differs"
        yield with_zero if is_zero else "clipping_missing", {}


def _accumulation(facts: Facts) -> Results:
    if required(facts.promised.accumulation) != required(facts.observed.accumulation):
        yield "accumulation_set_twice", {}


def _loss(facts: Facts) -> Results:
    """Name passes that are not what the library takes them for: it divides each loss by the passes of a step."""
    watched = facts.record.watched
    parts = required(watched.loss_parts)
    passes = required(facts.observed.accumulation)
    if parts > 1 and parts != passes:
        yield "accumulate_unused" if passes == 1 else "passes_differ", {}
    if parts > 1 and watched.loss_divisor == parts:
        yield "loss_divided_twice", {}
    if watched.passes_cleared:
        yield "gradients_cleared", {}


def _rows(facts: Facts) -> Results:
    """Name ranks with other numbers of rows, and ranks with the same rows. Constant inputs say nothing."""
    watched = facts.record.watched
    rows = required(watched.rows_per_rank or None)
    if len(set(rows)) > 1:
        yield "unequal_rows", {"least": min(rows), "most": max(rows), "rank": rows.index(min(rows))}
    seen = facts.observed
    if seen.tensor_ranks or seen.sequence_ranks:  # they share rows on purpose
        return
    inputs = required(watched.inputs_per_rank or None)
    alike = [rank for rank, each in enumerate(inputs) if inputs.count(each) > 1 and len(set(each)) > 1]
    if alike:
        yield "same_rows", {"ranks": ", ".join(map(str, alike)), "count": len(inputs[alike[0]])}


def _precision(facts: Facts) -> Results:
    seen = facts.observed
    weights = facts.weights
    requested = facts.promised.precision
    dtype = AUTOCAST.get(requested or "")
    if dtype in weights.split() and seen.autocast is None and seen.stage is not None:
        yield "cast_instead_of_autocast", {"dtype": dtype}
    if weights == "float32" and dtype and seen.autocast != requested:
        yield "no_autocast", {}
    if weights == "float32" and facts.promised.weights in HALVES:
        yield "weights_upcast", {"wide_bytes": facts.weights_bytes, "narrow_bytes": facts.weights_bytes // 2}
    if weights in HALVES and seen.dtypes.get("moments") == weights and not seen.dtypes.get("master"):
        yield "no_fp32_copy", {"weights": weights}
    lowered = "lower_loss_scale_on_overflow" in seen.patches
    if seen.autocast == "fp16" and seen.stage and seen.loss_scale == FIRST_SCALE and not lowered:
        yield "loss_scale_stuck", {}
    if "bfloat16" in weights.split() and seen.stage == 0:
        yield "empty_first_step", {}


def _offloading(facts: Facts) -> Results:
    seen = facts.observed
    stage = required(seen.stage)
    states = seen.offload_optimizer
    home = facts.requested_home("offload_optimizer")
    if (home, states) == ("nvme", "cpu") and stage < 3:
        yield "nvme_is_cpu", {}
    elif states not in (None, home):
        yield "states_not_offloaded", {"home": home}
    home = facts.requested_home("offload_param")
    if home != "none" and seen.offload_param in (None, "none"):
        why = f": stage {stage} ignores offload_param" if stage < 3 else ""
        yield "weights_not_offloaded", {"home": home, "why": why}
    on_disk = [part for part in OFFLOADS if stage == 3 and getattr(seen, part) == "nvme"]
    if without := [part for part in on_disk if facts.zero(part).get("nvme_path") in (None, "none")]:
        yield "no_nvme_path", {"parts": " and ".join(without)}
    written = [rank.nvme_written_bytes for rank in facts.record.memory.per_rank]
    if states == "nvme" and written and all(each is not None and each < LEAST_SWAPPED_BYTES for each in written):
        yield "nothing_swapped", {}


def _optimizer(facts: Facts) -> Results:
    if required(facts.observed.optimizer) == "DeepSpeedCPUAdam" and facts.promised.optimizer not in (None, *ADAMS):
        yield "optimizer_replaced", {}
    if facts.observed.stage in (1, 2) and facts.zero("zenflow"):
        yield "zenflow_overwrites", {}


def _checkpointing(facts: Facts) -> Results:
    if required(facts.promised.checkpointing) and not required(facts.observed.checkpointing):
        yield "checkpointing_off", {}


# --- costs in memory, at the peak of the rank that holds most ------------------------------------------------------


def _copies(facts: Facts) -> Results:
    if facts.weights == "float32" and facts.observed.dtypes.get("master") == "float32" and facts.stage:
        measured = (facts.components or {}).get("master")
        yield "fp32_copies", {"memory_bytes": 4 * facts.parameters // facts.ranks if measured is None else measured}


def saved_bytes(facts: Facts) -> int:
    """Return the bytes that partitioning saves on a rank: optimizer states, from stage 2 gradients, in stage 3 weights.

    The fp32 copy of fp32 weights, which only ZeRO keeps, is subtracted. Negative if ZeRO costs more than it saves.
    """
    others = 1 - 1 / facts.ranks
    copies = others if facts.element_bytes == 2 else -1 / facts.ranks
    partitioned = (facts.stage >= 2) + (facts.stage >= 3)
    return int(facts.parameters * (8 * others + 4 * copies + facts.element_bytes * others * partitioned))


def _buckets(facts: Facts) -> Results:
    """Suggest a bucket as large as DDP's, or less, so that buckets take a tenth of the saving at most. Two digits."""
    if not facts.stage:
        return
    buckets = 2 if facts.observed.overlap and facts.stage < 3 else 1
    elements = facts.observed.bucket_elements or 0
    if facts.components is None:
        taken = required(facts.observed.bucket_elements) * facts.element_bytes * buckets
    else:
        taken = facts.components.get("buckets", 0)
    if buckets == 2 and (facts.components is None or taken >= LARGE * facts.peak_bytes):
        yield "second_bucket", {"memory_bytes": taken // 2}
    saved = saved_bytes(facts)
    best = min(DDP_BUCKET_BYTES, saved // 10 // buckets) // facts.element_bytes
    unit = 10 ** max(0, len(str(best)) - 2)
    best = max(FLOOR_ELEMENTS, best // unit * unit)
    if best < elements and taken > saved > 0:
        yield "buckets_dominate", {
            "best": best, "best_bytes": best * facts.element_bytes,
            "memory_bytes": taken, "saved_bytes": saved, "elements": count(elements),
        }  # fmt: skip


def _gathered_weights(facts: Facts) -> Results:
    if facts.stage < 3:
        return
    large = LARGE * facts.peak_bytes
    ranks = facts.record.memory.components.per_rank
    kept = max((rank.after_step.get("gathered_weights", 0) for rank in ranks), default=0)
    if kept >= max(large, facts.weights_bytes // 2):
        yield "weights_stay_gathered", {"memory_bytes": kept, "weights_bytes": facts.weights_bytes}
    in_graph = (facts.observed.linear_parameters_kept or 0) * facts.element_bytes
    if in_graph >= large and not facts.observed.checkpointing:  # a checkpointed layer frees its graph
        yield "linear_keeps_weights", {"memory_bytes": in_graph}
        return
    gathered = facts.peak.get("gathered_weights", 0)
    if gathered >= max(large, 0.9 * facts.weights_bytes) and facts.ranks > 1:
        some_frozen = facts.observed.trained_parameters not in (None, facts.parameters)
        id = "frozen_weights_gathered" if facts.observed.checkpointing and some_frozen else "all_weights_gathered"
        yield id, {"memory_bytes": gathered}


def _partitioned(facts: Facts) -> Results:
    if facts.stage < 3 or facts.ranks == 1:
        return
    fair = facts.parameters / facts.ranks
    largest = max(facts.observed.held_parameters_per_rank, default=0)
    if largest > 1.5 * fair:
        id = "quantized_whole" if {"uint8", "int8"} & set(facts.weights.split()) else "not_all_partitioned"
        yield id, {
            "share": largest / facts.parameters, "fair_share": 1 / facts.ranks,
            "memory_bytes": int((largest - fair) * facts.element_bytes),
        }  # fmt: skip


def _activations(facts: Facts) -> Results:
    activations = facts.peak.get("activations", 0)
    if activations >= facts.peak_bytes / 2 and not facts.observed.checkpointing:
        yield "activations_dominate", {"memory_bytes": activations, "peak_bytes": facts.peak_bytes}


def _one_rank(facts: Facts) -> Results:
    homes = {facts.observed.offload_optimizer, facts.observed.offload_param}
    if facts.ranks > 1 or not facts.stage or homes - {None, "none"}:
        return
    values: dict[str, Any] = {"costs": ""}
    if facts.components is not None:
        copies = facts.components.get("master", 0) if facts.observed.dtypes.get("weights") == "float32" else 0
        extra = copies + facts.components.get("buckets", 0)
        values = {"memory_bytes": extra, "costs": f", and costs {size(extra)} of copies and buckets"}
    yield "zero_on_one_rank", values


def _replicated(facts: Facts) -> Results:
    peak = facts.peak
    states = sum(peak.get(role, 0) for role in ("weights", "gradients", "master", "moments"))
    if facts.ranks > 1 and not facts.sharded and states >= facts.peak_bytes / 2:
        sharable = peak.get("moments", 0) + peak.get("master", 0)
        yield "states_replicated", {"states_bytes": states, "memory_bytes": sharable - sharable // facts.ranks}


def _loaded_whole(facts: Facts) -> Results:
    """Name sharded ranks that each held about as much as the whole model before the loop, and gave it back."""
    freed = required(facts.record.watched.host_freed_bytes or None)
    if facts.weights_bytes < NOTICEABLE_BYTES:
        return
    if facts.sharded and facts.ranks > 1 and min(freed) >= WHOLE * facts.weights_bytes:
        yield "loaded_whole", {"each_bytes": min(freed), "node_bytes": sum(freed), "weights_bytes": facts.weights_bytes}


def _second_copy(facts: Facts) -> Results:
    """Weights that stage 3 does not release are not gathered in the backward pass, and then hpZ's copy is not used."""
    among = facts.observed.second_partition_ranks
    if facts.stage < 3 or among is None:
        return
    gathers = facts.traffic.get("all_gather")
    copied = required(facts.observed.second_partition_parameters)
    if among < facts.ranks and not (gathers and gathers.bytes_by_group):
        yield "second_copy_unused", {"memory_bytes": copied * facts.element_bytes}


# --- costs in traffic, by the collectives that were counted in one step --------------------------------------------


def _gathers(facts: Facts) -> Results:
    if facts.stage == 3:
        yield from _repeated(facts, "gathers_repeated", "all_gather")


def _reductions(facts: Facts) -> Results:
    if facts.stage >= 2:
        yield from _repeated(facts, "reductions_repeated", *REDUCING)
    elif facts.observed.wrapper == "DistributedDataParallel":
        yield from _repeated(facts, "no_sync_unused", *REDUCING)


def _repeated(facts: Facts, id: str, *kinds: str) -> Results:
    """Yield how often a step moves the bytes of all weights that it trains, if accumulation makes it more than once."""
    moved = facts.moved_bytes(*kinds)
    trained = facts.observed.trained_parameters if id == "no_sync_unused" else None
    times = moved / ((trained or facts.parameters) * facts.element_bytes)
    if required(facts.observed.accumulation) > 1 and times >= REPEATED:
        yield id, {"times": short(round(times, 1)), "traffic_bytes": moved}


RULES: list[tuple[str, Callable[[Facts], Results]]] = [  # by topic; mistakes are listed in this order
    ("whether DeepSpeed is on", _deepspeed),
    ("whether FSDP is on", _fsdp),
    ("whether the ranks train together", _separate),
    ("whether the ranks train together", _gradients),
    ("clipping", _clipping),
    ("accumulation", _accumulation),
    ("each pass and its loss", _loss),
    ("the rows of the ranks", _rows),
    ("precision", _precision),
    ("offloading", _offloading),
    ("the optimizer", _optimizer),
    ("checkpointing", _checkpointing),
    ("copies of the weights", _copies),
    ("buckets", _buckets),
    ("gathered weights", _gathered_weights),
    ("gathered weights", _partitioned),
    ("activations", _activations),
    ("ZeRO on one rank", _one_rank),
    ("what every rank holds", _replicated),
    ("what every rank holds", _loaded_whole),
    ("the second copy of hpZ", _second_copy),
    ("gathers in a step", _gathers),
    ("gradients reduced in a step", _reductions),
]


def diagnose(record: Record) -> list[Finding]:
    """Return all findings of a record: mistakes, then costs in memory, then costs in traffic, the largest cost first.

    If the list is empty, the rules of the topics that `looked_at` names found nothing.
    """
    return ordered(finding for _, findings, _ in _judged(record) for finding in findings)


def looked_at(record: Record) -> tuple[list[str], list[str]]:
    """Return the topics for which the record has the values that at least one rule needs, and the other topics."""
    judged = _judged(record)
    known = dict.fromkeys(topic for topic, _, is_known in judged if is_known)
    others = dict.fromkeys(topic for topic, *_ in judged if topic not in known)
    return list(known), list(others)


def _judged(record: Record) -> list[tuple[str, list[Finding], bool]]:
    """Return for each rule its topic, its findings, and whether the record has all that the rule needs."""
    facts = Facts(record)
    about = {"promised": facts.promised, "seen": facts.observed, "watched": record.watched}
    source = facts.promised.source or "the script"
    judged = []
    for topic, rule in RULES:
        findings: list[Finding] = []
        is_known = True
        try:
            for id, values in rule(facts):
                findings.append(finding(id, **values, source=source, **about))
        except Unknown:
            is_known = False
        judged.append((topic, findings, is_known))
    return judged
