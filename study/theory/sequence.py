"""DeepSpeed Ulysses: what ranks that share rows send each other around attention (0.19.8, ulysses_sp.py).

Each has a part of the tokens. Before attention they exchange queries, keys and values, so that each has all tokens of
some heads; after it they exchange back. The backward pass does the same with the gradients.
"""

from dataclasses import dataclass

from study.errors import Stop
from study.theory.architecture import Architecture
from study.theory.setup import Setup
from study.theory.transformer import Transformer

EXCHANGES = 4  # in a pass over a layer: of queries, keys, values, and what attention makes of them
POSITION_BYTES = 8  # each layer gathers the positions of a row, which are int64


@dataclass(frozen=True)
class Heads:
    """The attention of a model."""

    layers: int
    count: int
    of_keys: int
    width: int


def heads(model: Architecture | Transformer) -> Heads:
    """What Ulysses asks a model's config. A Stop where DeepSpeed or Accelerate refuse the model."""
    if isinstance(model, Architecture) and model.family == "llama":
        return Heads(model.layers, model.heads, model.kv_heads, model.head_width)
    config = {} if isinstance(model, Architecture) else model.dimensions
    count, of_keys = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if not count or not of_keys or not model.has_fused_attention:
        what = f"Ulysses divides attention by heads of keys that a config names, and {model.family} has none"
        if config and of_keys:
            what = f"Ulysses takes fused attention alone, and {model.family} has none"
        raise Stop(what, "take a decoder such as a Llama, or an arm that divides no rows", "unavailable")
    if silent := [name for name in ("num_hidden_layers", "hidden_size") if name not in config]:
        raise Stop(f"the config says no {' and no '.join(silent)}", "write it into config.json", "unavailable")
    width = config.get("head_dim") or config["hidden_size"] // count
    return Heads(config["num_hidden_layers"], count, of_keys, width)


def refusal(model: Architecture | Transformer, ranks: int) -> str | None:
    """Why rows of a model are not shared by so many ranks."""
    try:
        its = heads(model)
    except Stop as stop:
        return stop.what
    if its.count % ranks or (its.of_keys % ranks and ranks % its.of_keys):
        return f"{its.count} heads and {its.of_keys} of keys do not come out even on {ranks} ranks"
    return None


def exchanged(setup: Setup) -> dict[str, int]:
    """Bytes by collective that a rank's step moves among those that share its rows, as records count them."""
    among = setup.sequence_ranks
    if among == 1:
        return {}
    if reason := refusal(setup.model, among):
        raise Stop(reason, "give another model, or fewer ranks for a row", "unavailable")
    forward, passes = 2 if setup.checkpointing else 1, setup.accumulation * heads(setup.model).layers
    positions = setup.sequence * POSITION_BYTES  # one row's: they are alike in all
    return {"all_to_all": layer_bytes(setup) * (forward + 1) * passes, "all_gather": positions * forward * passes}


def layer_bytes(setup: Setup) -> int:
    """What a rank exchanges in a pass over a layer, forward or backward."""
    its = heads(setup.model)
    of_keys = max(its.of_keys, setup.sequence_ranks)  # fewer are repeated, until each rank has one
    # Under autocast queries and keys are rotated in fp32, and taken to 16 bits by attention itself.
    rotated = setup.weight_bytes if setup.autocast else setup.product_bytes
    return setup.tokens * its.width * (rotated + setup.product_bytes) * (its.count + of_keys)
