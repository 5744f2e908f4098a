"""Rules that name what a run costs in memory and traffic, and could save, by its record.

A rule yields the ids of its findings and their values: `memory_bytes` and `traffic_bytes` are what the finding costs.
"""

from study.watch.facts import REDUCING, Facts, Results

# Smaller shares than these get no finding.
LARGE = 0.1  # of the peak
WHOLE = 0.9  # of the weights
REPEATED = 1.5  # times the bytes of all weights: more means that they were moved more than once


# --- costs in memory, at the peak of the rank that holds most ------------------------------------------------------


def buckets_and_copies(facts: Facts) -> Results:
    """Name what ZeRO adds: copies of the weights in fp32, and buckets that do not shrink with the model."""
    seen = facts.seen
    buckets = facts.peak.get("buckets", 0)
    master = facts.peak.get("master", 0)
    if not facts.stage:
        return
    # On one rank ZeRO divides nothing, and adds copies and buckets: 28 bytes a parameter instead of 16.6, measured.
    if facts.ranks == 1 and not seen.offloads:
        yield "zero_on_one_rank", {"memory_bytes": buckets + master}
    # The copy is made of weights of any dtype (zero/stage_1_and_2.py:560): 4 bytes a parameter, divided by the ranks.
    if master and facts.weights == seen.dtypes.get("master") == "float32":  # on a disk they take none
        yield "fp32_copies", {"memory_bytes": master}
    # Both stages allocate a whole bucket in each backward pass, and a second one to overlap (stage_1_and_2.py:3255).
    # Stage 3 overlaps by default (zero/config.py:386), and keeps one bucket for the whole training
    # (zero/stage3.py:782).
    if facts.stage < 3 and seen.overlap and buckets >= LARGE * facts.peak_bytes:
        yield "second_bucket", {"memory_bytes": buckets // 2}
    # The default is 5e8 elements (zero/config.py:113). Measured with 27.8 million parameters in fp32, at the peak: 86
    # to 90 bytes a parameter with that default, and 16.3 to 16.6 with a bucket of the right size.
    best = facts.parameters // 10
    if buckets > facts.states_bytes and (seen.bucket_elements or 0) > best:
        yield "buckets_dominate", {"best": best, "states_bytes": facts.states_bytes, "memory_bytes": buckets}


def gathered_weights(facts: Facts) -> Results:
    """Name weights that stage 3 holds whole for longer than the layer needs them."""
    if facts.stage < 3:
        return
    large = LARGE * facts.peak_bytes
    # --- between steps: whole tensors below the threshold
    ranks = facts.record.memory.components.per_rank
    # By default that is 1e5 elements for each tensor (zero/config.py:228): all of a tiny model, and little of a large
    # one.
    kept = max((rank.after_step.get("gathered_weights", 0) for rank in ranks), default=0)
    if kept >= max(large, facts.weights_bytes // 2):
        yield "weights_stay_gathered", {"memory_bytes": kept, "weights_bytes": facts.weights_bytes}
    # --- within a step: the defaults release nothing below 10^9 elements
    # Measured on two ranks: by default a step gathers the weights 1.1 to 1.2 times, and twice with both limits at 0. So
    # the memory buys traffic: it is a cost and no mistake.
    gathered = facts.peak.get("gathered_weights", 0)
    if gathered >= max(large, WHOLE * facts.weights_bytes) and facts.ranks > 1:
        some_frozen = facts.seen.trained_parameters not in (None, facts.parameters)
        # Bisected: 0.19.2 gives frozen weights back, 0.19.3 and 0.19.8 hold them, probably since DeepSpeed's pull
        # request 8148.
        is_recomputed = facts.seen.checkpointing and some_frozen
        yield "frozen_weights_gathered" if is_recomputed else "all_weights_gathered", {"memory_bytes": gathered}


def activations(facts: Facts) -> Results:
    """Name activations that are most of the peak, which no stage can change."""
    activations = facts.peak.get("activations", 0)
    if activations >= facts.peak_bytes / 2 and not facts.seen.checkpointing:
        yield "activations_dominate", {"memory_bytes": activations, "peak_bytes": facts.peak_bytes}


def states(facts: Facts) -> Results:
    """Name states that every rank holds whole, if they are most of the peak."""
    if facts.ranks > 1 and not facts.sharded and facts.states_bytes >= facts.peak_bytes / 2:
        # Stage 1 divides the optimizer's states, and leaves weights and gradients whole.
        sharable = facts.peak.get("moments", 0) + facts.peak.get("master", 0)
        # It is not free: DeepSpeed all-reduces gradients in stage 1 as well, and gathers the weights. Measured on two
        # ranks: 1.5 times DDP's bytes (DeepSpeed's issue 7059).
        saved = sharable - sharable // facts.ranks
        if saved < LARGE * facts.peak_bytes:  # few weights train
            return
        id = "states_replicated" if facts.seen.stage is None else "stage_0_replicates"
        yield id, {"states_bytes": facts.states_bytes, "memory_bytes": saved}


# --- costs in traffic, by the collectives that were counted in one step --------------------------------------------


def traffic(facts: Facts) -> Results:
    """Yield how often a step moves the bytes of all weights, if accumulation makes it more than once.

    Under DDP those are the weights that train.
    """
    if facts.accumulation == 1:
        return
    # DDP and stage 1 can wait for the last pass; stages 2 and 3 reduce in each (runtime/engine.py:3084), and 3 gathers.
    # Measured with four passes on two ranks, what gloo sends in a step over the bytes of the fp32 weights: DDP 2.0,
    # stage 1 3.0, stage 2 9.0, stage 3 11.1.
    moved_by: dict[str, int] = {}
    trained = facts.parameters
    if facts.stage == 3:
        moved_by["gathers_repeated"] = facts.moved_bytes("all_gather")
    if facts.stage >= 2:
        moved_by["reductions_repeated"] = facts.moved_bytes(*REDUCING)
    elif facts.wrapper == "DistributedDataParallel":
        # Accelerate's `accumulate` enters DDP's no_sync by itself (accelerator.py:1176). A plain loop has to.
        moved_by["no_sync_unused"] = facts.moved_bytes(*REDUCING)
        trained = facts.seen.trained_parameters or trained
    for id, moved_bytes in moved_by.items():
        times = moved_bytes / (trained * facts.element_bytes)
        if times >= REPEATED:
            yield id, {"times": times, "traffic_bytes": moved_bytes}


COSTS = (buckets_and_copies, gathered_weights, activations, states, traffic)
