"""Tensor parallelism by DeepSpeed's AutoTP (0.19.8), or beside FSDP2: a rank's part of each layer, and what it sends.

Queries, keys, values, gate and up are divided by columns, the two projections back by rows, and an untied head by its
vocabulary. Norms and embeddings are whole on each rank (module_inject/layers.py).
"""

import functools
from dataclasses import replace

from study.core.errors import Stop
from study.predict.memory.profile import Tensor
from study.predict.trace.transformer import Transformer

TRIED = ("llama", "qwen2", "qwen3", "mistral")  # the families for which this code knows the division
# linear layers of a layer: each needs an all-reduce, in the backward or in the forward pass. torch's plans for Llama
# gather the inputs of attention and of the MLP, so they sum twice (torchtitan, models/llama3/infra/parallelize.py).
BY_COLUMNS = 5
BY_ROWS = 2
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
NEEDED = (*DIVIDED, "hidden_size", "num_hidden_layers", "vocab_size")


def refusal(model: Transformer, ranks: int) -> str | None:
    """Return why the layers of a model cannot be divided among `ranks` ranks; None if they can."""
    config = model.dimensions
    if model.family not in TRIED:
        return f"how layers of {model.family} are divided is unknown here"
    if silent := [name for name in NEEDED if type(config.get(name)) is not int]:
        return f"the config says no {' and no '.join(silent)}"
    uneven = [f"{config[name]} {name}" for name in DIVIDED if config[name] % ranks]
    return f"{' and '.join(uneven)} do not divide evenly among {ranks} ranks" if uneven else None


@functools.cache
def of_a_rank(model: Transformer, ranks: int) -> Transformer:
    """Return the part of a rank as a model: fewer heads, narrower feed-forward layers, and the whole output matrix."""
    if reason := refusal(model, ranks):
        raise Stop(reason, "give another model, or fewer ranks for a layer", "unavailable")
    config = model.dimensions
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    parts = {name: config[name] // ranks for name in DIVIDED}
    one = Transformer.of(config | parts | {"head_dim": width}, f"a rank's part of {model.name}")
    return replace(model, name=one.name, config=one.config)  # one side of each adapter is divided as its layer


@functools.cache
def tensors_of_a_rank(model: Transformer, ranks: int) -> tuple[Tensor, ...]:
    """The parameter tensors of a rank, with its part of the output matrix."""
    return tuple(part(tensor, ranks) for tensor in of_a_rank(model, ranks).tensors)


def part(tensor: Tensor, ranks: int) -> Tensor:
    """A rank's part of a tensor of `of_a_rank`: the output matrix is divided, too."""
    if tensor.name != "lm_head.weight":
        return tensor
    return Tensor(tensor.name, (tensor.shape[0] // ranks, *tensor.shape[1:]), tensor.block, tensor.trains)


def exchanged(setup) -> dict[str, int]:
    """Bytes by collective that a rank moves in a step among the ranks that divide its layers, counted as in records.

    A layer's outputs are summed in the type of the products; the gradients of its inputs in the type of the values
    between layers. Megatron-LM and torch sum once for queries, keys and values; AutoTP sums for each of them.
    """
    if setup.tensor_ranks == 1:
        return {}
    config = setup.model.dimensions
    forward = BY_ROWS * setup.product_bytes * (2 if setup.checkpointing else 1)
    backward = (BY_ROWS if setup.fsdp else BY_COLUMNS) * setup.weight_bytes
    elements = setup.tokens * config["hidden_size"]
    moved = {"all_reduce": elements * (forward + backward) * config["num_hidden_layers"]}
    if any(tensor.name == "lm_head.weight" for tensor in of_a_rank(setup.model, setup.tensor_ranks).tensors):
        moved["all_reduce"] += elements * setup.weight_bytes
        moved["all_gather"] = setup.tokens * config["vocab_size"] * setup.product_bytes
    return {kind: size * setup.accumulation for kind, size in moved.items()}
