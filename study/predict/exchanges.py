"""What ranks send to each other in a pass because they share rows: DeepSpeed Ulysses (0.19.8, ulysses_sp.py).

Each rank has a part of the tokens. Before attention the ranks exchange queries, keys and values, so that each has all
tokens of some heads; after attention they exchange back. The backward pass does the same with the gradients.
"""

from collections import Counter

from study.core.errors import Stop
from study.predict.training import Recomputation, Training

SHARED = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "hidden_size")
POSITION_BYTES = 8  # each layer gathers the positions of a row, which are int64


def exchanged_rows(training: Training) -> Counter[str]:
    """Bytes by collective that a rank moves in a step among the ranks that share its rows, counted as in records."""
    ranks = training.placement.sequence_ranks
    if ranks == 1:
        return Counter()
    model, product_bytes = training.model, training.recipe.product_bytes
    config = model.dimensions
    known = [config.get(name) or 0 for name in SHARED]
    queries, keys, layers, width = known
    if not model.look.has_fused_attention or 0 in known or queries % ranks or (keys % ranks and ranks % keys):
        what = f"ranks share sequences by fused attention, with heads for each: {model.family} has {queries} and {keys}"
        raise Stop(what, "give another model, or fewer ranks for a sequence", "unavailable")
    heads = queries + max(keys, ranks)  # if there are fewer than ranks, those of keys are repeated
    # Under autocast, queries and keys are rotated in fp32, and attention itself converts them to 16 bits.
    rotated = training.weight_bytes if training.autocast else product_bytes
    # Four tensors travel. Queries and keys have the first type, the output and the values the second; in both pairs one
    # has the heads of the queries, and one those of the keys.
    layer = training.tokens * (config.get("head_dim") or width // queries) * (rotated + product_bytes) * heads
    forward = 1 if training.batch.recomputation is Recomputation.NONE else 2  # passes
    # Integers have no gradient, so the backward pass gathers none, except where it runs a layer again.
    positions = training.batch.tokens * POSITION_BYTES * forward  # of one row: all rows have the same
    passes = training.batch.passes * layers
    return Counter(all_to_all=layer * (forward + 1) * passes, all_gather=positions * passes)
