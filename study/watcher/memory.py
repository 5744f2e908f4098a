"""Checks for memory that could be saved, by the components at the peak of the rank that holds most."""

from study.io.numbers import count, size
from study.records.findings import Finding
from study.watcher.facts import Facts

LARGE = 0.1  # of the peak: a smaller share gets no finding
DDP_BUCKET_BYTES = 25 * 2**20  # DDP's bucket_cap_mb
FLOOR_ELEMENTS = 10_000


def master_copies(facts: Facts) -> list[Finding] | None:
    kinds = facts.observed.dtypes
    if not kinds.get("weights"):
        return None
    if not facts.zero or kinds.get("weights") != "float32" or kinds.get("master") != "float32":
        return []
    copy_bytes = (facts.peak or {}).get("master")
    if copy_bytes is None and facts.observed.parameters and facts.observed.ranks:
        copy_bytes = 4 * facts.observed.parameters // facts.observed.ranks
    takes = f": {size(copy_bytes)} on a rank" if copy_bytes else ""
    sentence = f"Optimizer states hold fp32 copies of fp32 weights{takes}, which add nothing; ZeRO always keeps them"
    return [
        Finding(
            sentence, "train in bf16 if the loss allows it: then the copy is needed, and weights are halved", "S002-43"
        )
    ]


def saved_bytes(facts: Facts) -> int | None:
    """The bytes that partitioning saves on a rank: optimizer states, from stage 2 gradients, in stage 3 weights.

    The fp32 copy of fp32 weights, which only ZeRO keeps, is subtracted. Negative if ZeRO costs more than it saves.
    """
    seen, element = facts.observed, facts.weight_bytes
    if None in (seen.parameters, seen.ranks, element):
        return None
    others = 1 - 1 / seen.ranks
    copies = others if element == 2 else -1 / seen.ranks
    each = 8 * others + 4 * copies + element * others * ((facts.zero >= 2) + (facts.zero >= 3))
    return int(seen.parameters * each)


def bucket_bytes(facts: Facts) -> int | None:
    """The bytes of the buckets at the peak; from the settings if memory was not measured by component."""
    if facts.peak is not None:
        return facts.peak.get("buckets", 0)
    elements, element = facts.observed.bucket_elements, facts.weight_bytes
    if None in (elements, element):
        return None
    return elements * element * (2 if facts.observed.overlap and facts.zero < 3 else 1)


def buckets(facts: Facts) -> list[Finding] | None:
    taken, saved = bucket_bytes(facts), saved_bytes(facts)
    if not facts.zero:
        return [] if facts.is_known else None
    if None in (taken, saved):
        return None
    findings, elements = [], facts.observed.bucket_elements
    if taken > saved > 0 and elements:
        best = suggested_elements(facts, saved)
        if best < elements:
            findings.append(
                Finding(
                    f"Buckets of {size(taken)} hide the {size(saved)} that stage {facts.zero} saves on a rank: their "
                    f"size is reduce_bucket_size, {count(elements)} elements, however small the model is",
                    f"set reduce_bucket_size to {best} ({size(best * facts.weight_bytes)} each) in a DeepSpeed json",
                    "L-35",
                )
            )
    if facts.zero < 3 and facts.observed.overlap and (facts.peak is None or taken >= LARGE * facts.peak_bytes):
        sentence = f"overlap_comm keeps two buckets instead of one: {size(taken // 2)} more on each rank"
        findings.append(
            Finding(sentence, "set overlap_comm to false, or halve reduce_bucket_size", "overlap_comm_buffers")
        )
    return findings


def suggested_elements(facts: Facts, saved: int) -> int:
    """A bucket as large as DDP's, or less, so that buckets take at most a tenth of the saving. Two digits."""
    copies = 2 if facts.observed.overlap and facts.zero < 3 else 1
    elements = min(DDP_BUCKET_BYTES, saved // 10 // copies) // facts.weight_bytes
    digits = max(0, len(str(elements)) - 2)
    return max(FLOOR_ELEMENTS, elements // 10**digits * 10**digits)


def gathered_weights(facts: Facts) -> list[Finding] | None:
    if facts.zero < 3:
        return [] if facts.is_known else None
    if facts.peak is None or facts.whole_bytes is None or facts.observed.ranks is None:
        return None
    findings, whole, gathered = [], facts.whole_bytes, facts.peak.get("gathered_weights", 0)
    after = max((r.after_step.get("gathered_weights", 0) for r in facts.record.memory.components.per_rank), default=0)
    if after >= whole // 2 and after >= LARGE * facts.peak_bytes:
        sentence = (
            f"Stage 3 keeps {size(after)} of {size(whole)} of weights whole between steps: tensors of at most "
            "stage3_param_persistence_threshold elements are never partitioned"
        )
        findings.append(Finding(sentence, "set stage3_param_persistence_threshold to 0, or use stage 2", "L-09"))
    if gathered >= 0.9 * whole and gathered >= LARGE * facts.peak_bytes and facts.observed.ranks > 1:
        sentence = (
            f"At its peak stage 3 holds all weights gathered, {size(gathered)}: it releases only what exceeds "
            "stage3_max_live_parameters and stage3_max_reuse_distance, a billion parameters by default"
        )
        remedy = "set both to a fraction of the model's parameters (each layer is then gathered twice), or use stage 2"
        findings.append(Finding(sentence, remedy, "L-09"))
    held, fair = facts.observed.held_parameters_per_rank, facts.observed.parameters / facts.observed.ranks
    if held and max(held) > 1.5 * fair and facts.observed.ranks > 1:
        share = max(held) / facts.observed.parameters
        part = 1 / facts.observed.ranks
        sentence = f"A rank holds {share:.0%} of the parameters instead of {part:.0%}: not all are partitioned"
        findings.append(Finding(sentence, "look for modules outside the prepared model, such as embeddings", "S003-38"))
    return findings


def activations(facts: Facts) -> list[Finding] | None:
    if facts.peak is None:
        return None
    held = facts.peak.get("activations", 0)
    if facts.observed.checkpointing or held < facts.peak_bytes / 2:
        return []
    return [
        Finding(
            f"Activations are {size(held)} of the {size(facts.peak_bytes)} at the peak; no ZeRO stage partitions them",
            "recompute them (`model.gradient_checkpointing_enable()`), or take fewer rows per pass and more passes",
            "P1-26",
        )
    ]


def one_rank(facts: Facts) -> list[Finding] | None:
    seen = facts.observed
    if seen.ranks is None:
        return None
    if seen.ranks > 1 or not facts.zero:
        return []
    if seen.offload_optimizer not in (None, "none") or seen.offload_param not in (None, "none"):
        return []
    costs = ""
    if facts.peak is not None:
        copy_bytes = facts.peak.get("master", 0) if seen.dtypes.get("weights") == "float32" else 0
        costs = f", and costs {size(copy_bytes + facts.peak.get('buckets', 0))} of copies and buckets"
    sentence = f"On one rank stage {facts.zero} partitions nothing{costs}: plain training needs less memory"
    return [Finding(sentence, "train without DeepSpeed, or offload the optimizer states to the host", "S002-16")]


def replicated(facts: Facts) -> list[Finding] | None:
    seen = facts.observed
    if None in (facts.peak, seen.ranks):
        return None
    if facts.sharded or seen.ranks == 1:
        return []
    states = {role: facts.peak.get(role, 0) for role in ("weights", "gradients", "master", "moments")}
    sharable = states["moments"] + states["master"]
    if sum(states.values()) < facts.peak_bytes / 2:
        return []
    saved = sharable - sharable // seen.ranks
    return [
        Finding(
            f"Each of the {seen.ranks} ranks holds all {size(sum(states.values()))} of model states: data parallelism "
            "copies them, however many ranks there are",
            f"if memory is short, stage 1 partitions the optimizer states: {size(saved)} less on a rank, before its "
            "buckets",
            "S001-84",
        )
    ]
