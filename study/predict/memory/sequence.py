"""DeepSpeed Ulysses: what ranks that share rows send each other around attention (0.19.8, ulysses_sp.py).

Each rank has a part of the tokens. Before attention the ranks exchange queries, keys and values, so that each has all
tokens of some heads; after attention they exchange back. The backward pass does the same with the gradients.
"""

from study.core.errors import Stop
from study.predict.setup import Setup
from study.predict.trace.transformer import Transformer

NEEDED = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "hidden_size")
POSITION_BYTES = 8  # each layer gathers the positions of a row, which are int64


def refusal(model: Transformer, ranks: int) -> str | None:
    """Return why `ranks` ranks cannot share rows of a model, by DeepSpeed and Accelerate; None if they can."""
    config = model.dimensions
    if not model.has_fused_attention:
        return f"Ulysses needs fused attention, and {model.family} has none"
    if silent := [name for name in NEEDED if not config.get(name)]:
        return f"the config of {model.family} says no {' and no '.join(silent)}"
    queries, keys = config["num_attention_heads"], config["num_key_value_heads"]
    if queries % ranks or (keys % ranks and ranks % keys):
        return f"{queries} heads and {keys} of keys do not divide evenly among {ranks} ranks"
    return None


def exchanged(setup: Setup) -> dict[str, int]:
    """Bytes by collective that a rank moves in a step among the ranks that share its rows, counted as in records."""
    if setup.sequence_ranks == 1:
        return {}
    if reason := refusal(setup.model, setup.sequence_ranks):
        raise Stop(reason, "give another model, or fewer ranks for a row", "unavailable")
    config = setup.model.dimensions
    queries = config["num_attention_heads"]
    keys = max(config["num_key_value_heads"], setup.sequence_ranks)  # if there are fewer than ranks, they are repeated
    width = config.get("head_dim") or config["hidden_size"] // queries
    # Under autocast, queries and keys are rotated in fp32, and attention itself converts them to 16 bits.
    rotated = setup.weight_bytes if setup.autocast else setup.product_bytes
    layer = setup.tokens * width * (rotated + setup.product_bytes) * (queries + keys)
    forward = 2 if setup.checkpointing else 1
    positions = setup.sequence * POSITION_BYTES * forward  # of one row: all rows have the same
    passes = setup.accumulation * config["num_hidden_layers"]
    return {"all_to_all": layer * (forward + 1) * passes, "all_gather": positions * passes}
