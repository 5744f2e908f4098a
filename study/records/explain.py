"""Explains how the peaks of two runs differ, by component, in bytes and in sentences."""

from dataclasses import dataclass
from typing import Any

from study.errors import Stop
from study.io.numbers import count, size
from study.records.schema import RankMemory, Record

KINDS = {
    "model states": ("weights", "master", "gradients", "moments"),
    "buckets": ("buckets",),
    "gathered weights": ("gathered_weights",),
    "activations": ("activations",),
    "temporaries": ("temporaries",),
    "staging, swap": ("staging", "swap"),
}
UNTRACKED = "not tracked"
OFFLOADED = {"optimizer_home": ("master", "moments"), "weights_home": ("weights",)}
MAX_SENTENCES = 3
NEGLIGIBLE = 0.05  # of all that changes: a smaller part gets no sentence

# The reasons for a component that grew, and for one that shrank, from the sources of DeepSpeed 0.19.8.
GREW = {
    "weights": "the weights are not partitioned, are in a wider dtype, or are kept twice",
    "master": "the optimizer keeps an fp32 copy of the weights; DeepSpeed does so even for fp32 weights",
    "gradients": "gradients are not partitioned, of several microbatches, or copied for the update",
    "moments": "this rank holds the optimizer states of a larger part of the model",
    "buckets": "their size is reduce_bucket_size, however small the model is and however many ranks share it",
    "gathered_weights": "stage 3 gathers whole weights to use them, and releases them only after "
    "stage3_max_live_parameters and stage3_max_reuse_distance, a billion parameters by default",
    "staging": "offloaded tensors pass through buffers",
    "swap": "tensors on disk pass through buffers",
}
SHRANK = {
    "weights": "a rank keeps only its partition, or a narrower dtype",
    "master": "a rank keeps the fp32 copy of its partition only, or none",
    "gradients": "a rank keeps the gradients of its partition only, or they were already moved into buckets",
    "moments": "a rank keeps the optimizer states of its partition only, or they are on disk",
    "buckets": "there are fewer buckets, or their dtype is narrower",
    "gathered_weights": "fewer weights are gathered at once",
}
OF_FSDP = {"gathered_weights": "FSDP gathers the weights of a module to use them, and frees them afterwards"}
OF_PARTS = {
    "activations": "ranks that read the same rows each keep a part: of their tokens, or of each layer",
    "weights": "each rank keeps its part of the layers; norms and embeddings it keeps whole",
}
EITHER = {
    "activations": "no stage partitions activations, so with equal rows and tokens the peaks are at different moments",
    "temporaries": "single operations need them briefly: copies, norms, flattened gradients",
    "other": "the data set on this rank, and what was allocated before training",
}
SETTINGS = (
    *("task", "model", "precision", "micro_batch", "accumulation", "sequence", "checkpointing", "dropout"),
    *("lora_rank", "train_only"),
)
OBSERVED = ("parameters", "ranks", "device", "attention")


@dataclass(frozen=True)
class Peak:
    """The peak of the rank that held most. Values that need a GPU are None without one."""

    components: dict[str, int]
    tracked_bytes: int
    allocated_bytes: int | None
    reserved_bytes: int | None
    device_used_bytes: int | None


def peak(record: Record) -> Peak:
    """The peak of the rank that held most. A Stop if the record has no memory by component."""
    ranks = {number: rank for number, rank in enumerate(record.memory.components.per_rank) if rank.at_peak}
    if not ranks:
        raise Stop(
            f"{record.run_id} ({record.arm or 'unknown'}, {record.status}) has no memory by component",
            "Run it again to its end, without --no-instruments",
        )
    exact = [number for number, rank in ranks.items() if sum((rank.at_peak or {}).values()) == rank.tracked_peak_bytes]
    number = max(exact or ranks, key=lambda number: ranks[number].tracked_peak_bytes)
    components, tracked_bytes = dict(ranks[number].at_peak or {}), ranks[number].tracked_peak_bytes
    if rest_bytes := tracked_bytes - sum(components.values()):  # seldom; shown as a gap rather than spread
        components["not told apart"] = rest_bytes
    device = record.memory.per_rank[number] if number < len(record.memory.per_rank) else RankMemory()
    return Peak(
        components, tracked_bytes, device.peak_allocated_bytes, device.peak_reserved_bytes, device.device_used_bytes
    )


def explain(a: Peak, b: Peak) -> list[dict]:
    """The difference of two peaks by component, the largest difference first.

    The tracked rows sum to the difference of the two tracked peaks. `share` is a component's part of all changes,
    whether it grows or shrinks. The last three rows lead from there to the memory that the device reports as used:
    memory that only the allocator sees, memory that it reserves but does not use, and memory outside it. On a CPU they
    are None.
    """
    kind_of = {role: kind for kind, roles in KINDS.items() for role in roles}
    rows = [
        _row(name, kind_of.get(name, "other"), a.components.get(name, 0), b.components.get(name, 0))
        for name in a.components | b.components
    ]
    changed_bytes = sum(abs(row["difference_bytes"]) for row in rows)
    for row in rows:
        row["share"] = abs(row["difference_bytes"]) / changed_bytes if changed_bytes else None
    rows.sort(key=lambda row: -abs(row["difference_bytes"]))
    beyond = {
        "seen by the allocator alone": ("allocated_bytes", "tracked_bytes"),
        "reserved and not in use": ("reserved_bytes", "allocated_bytes"),
        "outside the allocator": ("device_used_bytes", "reserved_bytes"),
    }
    for name, (upper, lower) in beyond.items():
        rows.append(_row(name, UNTRACKED, *(_minus(getattr(run, upper), getattr(run, lower)) for run in (a, b))))
    return rows


def totals(rows: list[dict]) -> dict:
    """The two tracked peaks as a row, to be shown below the rows of `explain`."""
    tracked = [row for row in rows if row["kind"] != UNTRACKED]
    return _row("all that is tracked", "", *(sum(row[key] for row in tracked) for key in ("a_bytes", "b_bytes")))


def _minus(upper: int | None, lower: int | None) -> int | None:
    return None if upper is None or lower is None else upper - lower


def _row(name: str, kind: str, a: int | None, b: int | None) -> dict:
    difference = _minus(b, a)
    return {"component": name, "kind": kind, "a_bytes": a, "b_bytes": b, "difference_bytes": difference, "share": None}


def unlike(a: Record, b: Record) -> str | None:
    """A sentence on how two runs differ besides their arm; None if they do not."""
    pairs: dict[str, tuple[Any, Any]] = {
        name: (getattr(a.requested, name), getattr(b.requested, name)) for name in SETTINGS
    }
    pairs |= {name: (getattr(a.observed, name), getattr(b.observed, name)) for name in OBSERVED}
    pairs["optimizer"] = (a.requested.optimizer or "adamw", b.requested.optimizer or "adamw")
    pairs["measure version"] = (a.measure_version, b.measure_version)
    differ = [
        f"{name.replace('_', ' ')} {first} and {second}" for name, (first, second) in pairs.items() if first != second
    ]
    return f"These runs differ in more than the arm: {'; '.join(differ)}." if differ else None


def sentences(a: Record, b: Record) -> list[str]:
    """Up to three sentences on the largest differences."""
    rows = [row for row in explain(peak(a), peak(b)) if row["kind"] != UNTRACKED]
    names = (str(a.arm), str(b.arm)) if a.arm != b.arm else ("the first run", "the second")
    texts = [text for text in (_one_memory(a), _one_memory(b)) if text]
    texts += [_sentence(row, rows, names, b) for row in rows if (row["share"] or 0) > NEGLIGIBLE]
    return texts[:MAX_SENTENCES] or ["At the peak both hold the same."]


def _one_memory(record: Record) -> str | None:
    """A note for a run on a CPU with offloading: on a GPU, offloaded tensors would not be in the counted memory."""
    homes, components = record.memory.components, peak(record).components
    roles = [role for home, roles in OFFLOADED.items() if getattr(homes, home) not in (None, "none") for role in roles]
    held = [role for role in roles if components.get(role)]
    if record.observed.device != "cpu" or not held:
        return None
    amount = f"{size(sum(components[role] for role in held))} of {record.arm}'s peak"
    return (
        f"On this CPU host and device share one memory: {amount} ({' and '.join(held)}) "
        "would be in host memory on a machine with a GPU."
    )


def _sentence(row: dict, rows: list[dict], names: tuple[str, str], b: Record) -> str:
    """Return how the two runs differ in a component, and why."""
    name, more = row["component"], row["difference_bytes"]
    words, amount = name.replace("_", " "), size(abs(more))
    lead = f"{names[1]} holds {amount} {'more' if more > 0 else 'less'} of {words} than {names[0]}"
    if more > 0 and not row["a_bytes"]:
        lead = f"{names[1]} holds {amount} of {words} that {names[0]} does not have"
    reasons = [reason for reason in (_reason(name, more > 0, b), _outweighs(row, rows, b)) if reason]
    return f"{lead}: {';'.join(reasons)}." if reasons else f"{lead}."


def _reason(name: str, grew: bool, b: Record) -> str | None:
    """Return why a component of the second run is larger, or smaller, than that of the first."""
    if grew and name in OF_FSDP and (b.arm or "").startswith(("fsdp", "hsdp")):
        return OF_FSDP[name]
    divided = b.observed.tensor_ranks or (b.observed.sequence_ranks and name == "activations")
    if not grew and divided and name in OF_PARTS:
        return OF_PARTS[name]
    return (GREW if grew else SHRANK).get(name) or EITHER.get(name)


def _outweighs(row: dict, rows: list[dict], b: Record) -> str | None:
    """Return a remark if buckets or gathered weights take more than is saved of the model states."""
    saved = -sum(other["difference_bytes"] for other in rows if other["kind"] == "model states")
    if row["kind"] not in ("buckets", "gathered weights") or not row["difference_bytes"] > saved > 0:
        return None
    model = f" on a model of {count(b.observed.parameters)} parameters" if b.observed.parameters else ""
    return f"{model} that is more than the {size(saved)} of model states it saves"
