"""Explain how the peaks of two runs differ, by component, in bytes and in sentences."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from study.core.errors import Stop
from study.core.numbers import count, size
from study.records.schema import RankMemory, Record

STATES = "model states"
KINDS = {"weights": STATES, "master": STATES, "gradients": STATES, "moments": STATES}
KINDS |= {"buckets": "buckets", "gathered_weights": "gathered weights", "activations": "activations"}
KINDS |= {"temporaries": "temporaries", "staging": "staging, swap", "swap": "staging, swap"}
UNTRACKED = "not tracked"
BEYOND = ("seen by the allocator alone", "reserved and not in use", "outside the allocator")
OFFLOADED = {"optimizer_home": ("master", "moments"), "weights_home": ("weights",)}
MAX_SENTENCES = 3
NEGLIGIBLE = 0.05  # of all that changes: a smaller part gets no sentence

# By component, why it grew and why it shrank, from the sources of DeepSpeed 0.19.8.
REASONS = {
    "weights": (
        "the weights are not partitioned, are in a wider dtype, or are kept twice",
        "a rank keeps only its partition, its part of each layer, or a narrower dtype",
    ),
    "master": (
        "the optimizer keeps an fp32 copy of the weights; DeepSpeed does so even for fp32 weights",
        "a rank keeps the fp32 copy of its partition only, or none",
    ),
    "gradients": (
        "gradients are not partitioned, of several microbatches, or copied for the update",
        "a rank keeps the gradients of its partition only, or they were already moved into buckets",
    ),
    "moments": (
        "this rank holds the optimizer states of a larger part of the model",
        "a rank keeps the optimizer states of its partition only, or they are on disk",
    ),
    "buckets": (
        "their size is reduce_bucket_size, however small the model is and however many ranks share it",
        "there are fewer buckets, or their dtype is narrower",
    ),
    "gathered_weights": (
        "stage 3 and FSDP gather whole weights to use them; stage 3 releases them only after stage3_max_live_parameters"
        " and stage3_max_reuse_distance, a billion parameters by default",
        "fewer weights are gathered at once",
    ),
    "activations": (
        "no stage partitions activations: there are more rows or tokens, or the peaks are at different moments",
        "no stage partitions activations: ranks that read the same rows each keep a part, there are fewer rows or"
        " tokens, or the peaks are at different moments",
    ),
    "temporaries": ("single operations need them briefly: copies, norms, flattened gradients",) * 2,
    "other": ("the data set on this rank, and what was allocated before training",) * 2,
    "staging": ("offloaded tensors pass through buffers", None),
    "swap": ("tensors on disk pass through buffers", None),
}
SETTINGS = (
    *("task", "model", "precision", "micro_batch", "accumulation", "sequence", "checkpointing", "dropout"),
    *("lora_rank", "train_only"),
)
OBSERVED = ("parameters", "ranks", "device", "attention")


@dataclass(frozen=True)
class Peak:
    """The peak of the rank that held most."""

    components: dict[str, int]
    beyond: dict[str, int | None]  # memory that only the device reports; None without a GPU


def peak(record: Record) -> Peak:
    """Return the peak of the rank that held most. Raise Stop if the record has no memory by component."""
    ranks = {number: rank for number, rank in enumerate(record.memory.components.per_rank) if rank.at_peak}
    if not ranks:
        what = f"{record.run_id} ({record.arm or 'unknown'}, {record.status}) has no memory by component"
        raise Stop(what, "Run it again to its end, without --no-instruments")
    # A rank whose components sum to its peak comes before one with a gap.
    exact = [number for number, rank in ranks.items() if sum((rank.at_peak or {}).values()) == rank.tracked_peak_bytes]
    number = max(exact or ranks, key=lambda number: ranks[number].tracked_peak_bytes)
    components = dict(ranks[number].at_peak or {})
    tracked_bytes = ranks[number].tracked_peak_bytes
    if rest_bytes := tracked_bytes - sum(components.values()):
        components["not told apart"] = rest_bytes
    device = record.memory.per_rank[number] if number < len(record.memory.per_rank) else RankMemory()
    levels = [tracked_bytes, device.peak_allocated_bytes, device.peak_reserved_bytes, device.device_used_bytes]
    beyond = [_difference(lower, upper) for lower, upper in pairwise(levels)]
    return Peak(components, dict(zip(BEYOND, beyond, strict=True)))


def explain(a: Record, b: Record) -> list[dict]:
    """Return the difference of two peaks by component, the largest difference first.

    The tracked rows sum to the difference of the two tracked peaks. `share` is a component's part of all changes,
    whether it grows or shrinks. The last three rows lead from there to the memory that the device reports as used.
    """
    first = peak(a)
    second = peak(b)
    rows = [
        _row(name, KINDS.get(name, "other"), first.components.get(name, 0), second.components.get(name, 0))
        for name in first.components | second.components
    ]
    changed_bytes = sum(abs(row["difference_bytes"]) for row in rows)
    for row in rows:
        row["share"] = abs(row["difference_bytes"]) / changed_bytes if changed_bytes else None
    rows.sort(key=lambda row: -abs(row["difference_bytes"]))
    return rows + [_row(name, UNTRACKED, first.beyond[name], second.beyond[name]) for name in BEYOND]


def totals(rows: list[dict]) -> dict:
    """Return the two tracked peaks as a row, to be shown below the rows of `explain`."""
    tracked = [row for row in rows if row["kind"] != UNTRACKED]
    return _row("all that is tracked", "", *(sum(row[key] for row in tracked) for key in ("a_bytes", "b_bytes")))


def _difference(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else b - a


def _row(name: str, kind: str, a: int | None, b: int | None) -> dict:
    sizes = {"a_bytes": a, "b_bytes": b, "difference_bytes": _difference(a, b)}
    return {"component": name, "kind": kind} | sizes | {"share": None}


def unlike(a: Record, b: Record) -> str | None:
    """Return a sentence on how two runs differ besides their arm; None if they do not."""

    def conditions(record: Record) -> dict[str, Any]:
        settings = {name: getattr(record.requested, name) for name in SETTINGS}
        settings |= {name: getattr(record.observed, name) for name in OBSERVED}
        return settings | {
            "optimizer": record.requested.optimizer or "adamw",
            "measure version": record.measure_version,
        }

    first = conditions(a)
    second = conditions(b)
    differ = [
        f"{name.replace('_', ' ')} {first[name]} and {second[name]}" for name in first if first[name] != second[name]
    ]
    return f"These runs differ in more than the arm: {'; '.join(differ)}." if differ else None


def sentences(a: Record, b: Record) -> list[str]:
    """Return how the peaks differ in a sentence, and up to three sentences on the largest differences."""
    every = explain(a, b)
    rows = [row for row in every if row["kind"] != UNTRACKED]
    names = (str(a.arm), str(b.arm)) if a.arm != b.arm else ("the first run", "the second")
    texts = [*_one_memory(a), *_one_memory(b)]
    texts += [_sentence(row, rows, names, b.observed.parameters) for row in rows if (row["share"] or 0) > NEGLIGIBLE]
    return [_answer(totals(every), names), *texts[:MAX_SENTENCES]]


def _answer(total: dict, names: tuple[str, str]) -> str:
    """Return by how much the second run's peak differs from the first's."""
    more_bytes = total["difference_bytes"]
    if not more_bytes:
        return f"At the peak both hold {size(total['a_bytes'])}."
    amount = (
        f"{size(abs(more_bytes))} {'more' if more_bytes > 0 else 'less'} than {names[0]} ({size(total['a_bytes'])})"
    )
    return f"At the peak {names[1]} holds {size(total['b_bytes'])}, {amount}."


def _one_memory(record: Record) -> list[str]:
    """Return a note for a run with offloading on a CPU: on a GPU, offloaded tensors are not in the counted memory."""
    homes = record.memory.components
    components = peak(record).components
    roles = [role for home, roles in OFFLOADED.items() if getattr(homes, home) not in (None, "none") for role in roles]
    offloaded = [role for role in roles if components.get(role)]
    if record.observed.device != "cpu" or not offloaded:
        return []
    amount = f"{size(sum(components[role] for role in offloaded))} of {record.arm}'s peak ({' and '.join(offloaded)})"
    where = "would be in host memory on a machine with a GPU"
    return [f"On this CPU host and device share one memory: {amount} {where}."]


def _sentence(row: dict, rows: list[dict], names: tuple[str, str], parameters: int | None) -> str:
    """Return how the two runs differ in a component, and why."""
    name = row["component"]
    more_bytes = row["difference_bytes"]
    words = name.replace("_", " ")
    amount = f"{size(abs(more_bytes))} {'more' if more_bytes > 0 else 'less'} of {words} than {names[0]}"
    if more_bytes > 0 and not row["a_bytes"]:
        amount = f"{size(more_bytes)} of {words} that {names[0]} does not have"
    text = f"{names[1]} holds {amount}"
    grew, shrank = REASONS.get(name, (None, None))
    if reason := grew if more_bytes > 0 else shrank:
        text += f": {reason}"
    saved_bytes = -sum(other["difference_bytes"] for other in rows if other["kind"] == STATES)
    if name in ("buckets", "gathered_weights") and more_bytes > saved_bytes > 0:
        model = f" on a model of {count(parameters)} parameters" if parameters else ""
        text += f";{model} that is more than the {size(saved_bytes)} of model states it saves"
    return f"{text}."
