"""DeepSpeed Ulysses: what ranks that share rows send each other around attention (0.19.8, ulysses_sp.py).

Each rank has a part of the tokens. Before attention the ranks exchange queries, keys and values, so that each has all
tokens of some heads; after attention they exchange back. The backward pass does the same with the gradients.
"""

import functools
from dataclasses import dataclass

from study.errors import Stop
from study.predictor.setup import Setup
from study.predictor.tracing.transformer import Transformer

EXCHANGES = 4  # in a pass over a layer: of queries, keys, values, and what attention makes of them
POSITION_BYTES = 8  # each layer gathers the positions of a row, which are int64


@dataclass(frozen=True)
class Heads:
    """The attention of a model."""

    layers: int
    queries: int
    keys: int
    width: int


@functools.cache
def heads(model: Transformer) -> Heads:
    """Return what Ulysses reads from a model's config. Raise Stop if DeepSpeed or Accelerate refuse the model."""
    config = model.dimensions
    queries = config.get("num_attention_heads")
    keys = config.get("num_key_value_heads")
    if not queries or not keys or not model.has_fused_attention:
        what = f"Ulysses divides attention by heads of keys, and the config of {model.family} names none"
        if config and keys:
            what = f"Ulysses needs fused attention, and {model.family} has none"
        raise Stop(what, "use a decoder such as a Llama, or an arm that divides no rows", "unavailable")
    if silent := [name for name in ("num_hidden_layers", "hidden_size") if name not in config]:
        raise Stop(f"the config says no {' and no '.join(silent)}", "write it into config.json", "unavailable")
    width = config.get("head_dim") or config["hidden_size"] // queries
    return Heads(config["num_hidden_layers"], queries, keys, width)


def refusal(model: Transformer, ranks: int) -> str | None:
    """Return why `ranks` ranks cannot share rows of a model; None if they can."""
    try:
        attention = heads(model)
    except Stop as stop:
        return stop.what
    if attention.queries % ranks or (attention.keys % ranks and ranks % attention.keys):
        return f"{attention.queries} heads and {attention.keys} of keys do not divide evenly among {ranks} ranks"
    return None


def exchanged(setup: Setup) -> dict[str, int]:
    """Bytes by collective that a rank moves in a step among the ranks that share its rows, counted as in records."""
    among = setup.sequence_ranks
    if among == 1:
        return {}
    if reason := refusal(setup.model, among):
        raise Stop(reason, "give another model, or fewer ranks for a row", "unavailable")
    forward = 2 if setup.checkpointing else 1
    passes = setup.accumulation * heads(setup.model).layers
    positions = setup.sequence * POSITION_BYTES  # of one row: all rows have the same
    return {"all_to_all": layer_bytes(setup) * (forward + 1) * passes, "all_gather": positions * forward * passes}


def layer_bytes(setup: Setup) -> int:
    """Bytes that a rank exchanges in a forward or backward pass over a layer."""
    attention = heads(setup.model)
    keys = max(attention.keys, setup.sequence_ranks)  # if there are fewer than ranks, they are repeated
    # Under autocast, queries and keys are rotated in fp32, and attention itself converts them to 16 bits.
    rotated = setup.weight_bytes if setup.autocast else setup.product_bytes
    return setup.tokens * attention.width * (rotated + setup.product_bytes) * (attention.queries + keys)
