"""How ranks divide a model: its layers (tensor), their number (pipeline), rows (context) and experts.

Neighbouring ranks divide a layer, then rows, then states; the stages of a pipeline are furthest apart, as in Megatron's
default order. Its sequence parallelism is always on: ranks that divide a layer also divide what lies between layers.
"""

import itertools
from dataclasses import dataclass

from study.predictor.memory.profile import Tensor
from study.predictor.tracing.transformer import Transformer

SHORT = {"tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep", "chunks": "vp"}
FORM = rf"(({'|'.join(SHORT.values())})\d+ ?)+"  # a regular expression


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of the groups of ranks. What they leave are replicas, which share the optimizer's states."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    chunks: int = 1  # of layers on a rank; with several, the schedule is interleaved
    by_nanotron: bool = False  # otherwise as Megatron-LM does it

    @classmethod
    def of_words(cls, words: str) -> "Layout":
        """Return the layout of words such as `tp2 pp4`."""
        sizes = {word.rstrip("0123456789"): int(word[2:]) for word in words.split()}
        given: dict = {name: sizes[short] for name, short in SHORT.items() if short in sizes}
        return cls(**given)

    @property
    def in_words(self) -> str:
        sizes = {short: getattr(self, name) for name, short in SHORT.items()}
        return " ".join(f"{short}{size}" for short, size in sizes.items() if size > 1)

    @property
    def stages(self) -> int:
        """The parts of the layers, in their order: each rank of a pipeline has `chunks` of them."""
        return self.pipeline * self.chunks

    @property
    def ranks(self) -> int:
        """Ranks that have the same rows."""
        return self.tensor * self.pipeline * self.context

    def replicas(self, ranks: int) -> int:
        """Ranks that train the same part of the model on different tokens, and share its states."""
        return ranks // (self.tensor * self.pipeline)

    def elements(self, tensor: Tensor) -> int:
        """Elements of a rank's part of a tensor. Norms and biases are whole."""
        among = (1, self.tensor, self.tensor * self.expert)[min(len(tensor.shape), 3) - 1]
        return -(-tensor.elements // among)

    def refusal(self, model: Transformer, ranks: int, accumulation: int) -> str | None:
        """Return why ranks cannot divide a model so; None if they can."""
        if ranks % self.ranks:
            return f"{ranks} ranks are no multiple of those that {self.in_words} needs"
        config = model.dimensions
        heads = {name: config.get(name) for name in ("num_attention_heads", "n_head", "num_key_value_heads")}
        if uneven := [f"{count} {name}" for name, count in heads.items() if (count or 0) % self.tensor]:
            return f"{' and '.join(uneven)} do not divide evenly among {self.tensor} ranks"
        if self.stages > layers_of(model):
            return f"{layers_of(model)} layers are fewer than {self.stages} stages"
        if self.chunks > 1 and (self.pipeline == 1 or accumulation % self.pipeline):
            return f"interleaving needs passes that are a multiple of the {self.pipeline} stages (got {accumulation})"
        experts = max((tensor.shape[0] for tensor in model.tensors if len(tensor.shape) == 3), default=1)
        if experts % self.expert or self.replicas(ranks) % self.expert:
            return f"{experts} experts and {self.replicas(ranks)} replicas do not divide evenly among {self.expert}"
        return None

    def blocks(self, model: Transformer) -> list[list[str]]:
        """Return the blocks of each stage, in the order of the model. Layers are divided as evenly as possible.

        nanotron counts the head as layers, and ends a stage when its share is exceeded (models/base.py, 67c5ebb6).
        """
        layers = [f"layer.{place}" for place in range(layers_of(model))]
        ends = [round(number * len(layers) / self.stages) for number in range(self.stages + 1)]
        if self.by_nanotron:
            share = (len(layers) + head_as_layers(model)) / self.stages
            ends[1:-1] = [min(len(layers), int(share * number) + 1) for number in range(1, self.stages)]
        parts = [layers[begin:end] for begin, end in itertools.pairwise(ends)]
        parts[0] = ["embeddings", *parts[0]]
        parts[-1] = [*parts[-1], "head"]
        return parts


def layers_of(model: Transformer) -> int:
    return len({tensor.block for tensor in model.tensors if tensor.block.startswith("layer.")})


def head_as_layers(model: Transformer) -> float:
    """Return the products of the head as a number of layers. A head that shares the embeddings' matrix is as large."""
    sizes = {"layer.0": 0, "embeddings": 0}
    for tensor in model.tensors:
        if tensor.block in sizes and len(tensor.shape) > 1:
            sizes[tensor.block] += tensor.elements
    return sizes["embeddings"] / sizes["layer.0"]
