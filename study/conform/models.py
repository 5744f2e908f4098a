"""Tiny models, one for each shape of parameters and of their use that a way of sharding can get wrong.

Activations are smooth, so that small differences stay small.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

FEATURES = 4  # of inputs and of targets
NORM = 4.0  # the weights of layer norms


class Plain(nn.Module):
    """Layers with residuals. The others are like it, with one thing changed."""

    may_leave_some = False  # parameters without a gradient
    shares = False  # one weight between two layers
    is_sparse = False  # the gradients of some parameters are sparse tensors
    bias = True
    frozen: tuple[str, ...] = ()  # how the names of frozen parameters begin

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width, self.bias)
        self.blocks = nn.ModuleList([nn.Linear(width, width, self.bias) for _ in range(layers)])
        self.last = nn.Linear(width, FEATURES, self.bias)
        self.change(width)
        # An optimizer gets only what is trained, and a library has to find out for itself.
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(self.frozen))

    def change(self, width: int) -> None:
        """Add to the parameters, or replace some."""

    def body(self, hidden: Tensor) -> Tensor:
        for number in range(len(self.blocks)):
            hidden = hidden + torch.tanh(self.layer(number, hidden))
        return hidden

    def layer(self, number: int, hidden: Tensor) -> Tensor:
        return self.blocks[number](hidden)

    def enter(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.first(inputs.to(self.first.weight.dtype)))

    def leave(self, hidden: Tensor) -> Tensor:
        return self.last(hidden)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        # The loss is in fp32, whatever the weights are.
        return functional.mse_loss(self.leave(self.body(self.enter(inputs))).float(), targets.float())


class Tied(Plain):  # the last two layers share their weight
    shares = True

    def change(self, width):
        self.blocks[-1].weight = self.blocks[-2].weight


class Frozen(Plain):  # the first block is frozen
    frozen = ("blocks.0",)


class MostlyFrozen(Plain):  # only the last layer is trained
    frozen = ("first", "blocks")


class Lora(Plain):  # frozen layers, each with a small trained product beside it
    frozen = ("first", "blocks", "last")

    def change(self, width):
        # PEFT begins with zeros in the second. Here both parts of the product have gradients from the first update on.
        self.lora = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)) for _ in self.blocks]
        )

    def layer(self, number, hidden):
        return super().layer(number, hidden) + self.lora[number](hidden)


class Unused(Plain):  # a layer is in the model, and no pass uses it
    may_leave_some = True

    def change(self, width):
        self.unused = nn.Linear(width, width)


class Scalars(Plain):  # parameters with one element each: fewer elements than ranks
    def change(self, width):
        self.gains = nn.ParameterList([torch.ones(1) for _ in range(3)])

    def body(self, hidden):
        for gain in self.gains:
            hidden = hidden * gain
        return super().body(hidden)


class UsedThenUnused(Plain):  # a layer that passes over sequences of even length do not use
    may_leave_some = True

    def change(self, width):
        self.sometimes = nn.Linear(FEATURES, width)

    def uses(self, inputs):
        return inputs.shape[1] % 2 == 1

    def enter(self, inputs):
        hidden = super().enter(inputs)
        if self.uses(inputs):
            hidden = hidden + self.sometimes(inputs.to(self.sometimes.weight.dtype))
        return hidden


# The layer is used only for microbatches whose first input is positive: the data decides, rank by rank.
class OneRank(UsedThenUnused):
    def uses(self, inputs):
        # `microbatch` makes it positive on even ranks only: on the others the layer gets no gradient.
        return inputs.flatten()[0] > 0


class Sparse(Plain):  # words, whose gradient has the rows of those that a pass uses and no others
    is_sparse = True

    def change(self, width):
        self.words = nn.Embedding(8, width, sparse=True)

    def enter(self, inputs):
        # Each rank's rows have words of their own. Without tanh, the gradient would share its memory with that of the
        # other sum, and DDP of torch 2.13.0 divides it in place: the first layer's would be half of what it is.
        words = (inputs[..., 0] * 4).long().clamp(-4, 3) + 4
        return super().enter(inputs) + torch.tanh(self.words(words))


class Twice(Plain):  # each block is called twice in a pass
    def body(self, hidden):
        return super().body(super().body(hidden))


class Recomputed(Plain):  # activations of the blocks are computed again in the backward pass
    reentrant = False

    def layer(self, number, hidden):
        return checkpoint(super().layer, number, hidden, use_reentrant=self.reentrant)


class RecomputedReentrant(Recomputed):  # the same, by PyTorch's older way
    reentrant = True


class LoraRecomputed(Recomputed, Lora):  # the layers are frozen, and what is before and behind them trains
    frozen = ("blocks",)  # type: ignore[assignment]
    # Elements of frozen weights on this rank, as the backward pass comes from each layer. A rank is a process.
    held = []  # type: ignore[var-annotated]  # noqa: RUF012

    def layer(self, number, hidden):
        hidden.register_hook(self.count)
        return super().layer(number, hidden)

    def count(self, _):
        # Of FSDP2's weights a rank has a part, but while it has them whole.
        self.held.append(sum(getattr(each, "_local_tensor", each).numel() for each in self.blocks.parameters()))


class LoraRecomputedReentrant(LoraRecomputed):
    reentrant = True


class Matrices(Plain):  # no biases
    bias = False


class Outside(Plain):  # the weight of the first layer is used a second time, outside its module
    def leave(self, hidden):
        return super().leave(hidden) + functional.linear(hidden, self.first.weight.t())


class Reordered(Plain):  # the order of the blocks depends on the length of the sequence
    def body(self, hidden):
        # A way that fetches weights ahead, in the order of the last pass, meets others than it expects.
        blocks = list(self.blocks)
        if hidden.shape[1] % 2 == 0:
            blocks.reverse()
        for block in blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return hidden


# A mixture of as many experts as blocks. A token's position decides its expert. The last one gets no token.
class Experts(Plain):
    may_leave_some = True

    def body(self, hidden):
        tokens = hidden.flatten(0, -2)
        # The last part is empty: that expert is called, and its gradient is zero or none.
        parts = [*tokens.tensor_split(len(self.blocks) - 1), tokens[:0]]
        mixed = torch.cat([torch.tanh(expert(part)) for expert, part in zip(self.blocks, parts, strict=True)])
        return hidden + mixed.view_as(hidden)


class Transposed(Plain):  # a weight whose elements do not lie in the order of its shape
    def change(self, width):
        # Transposed, copied and transposed back: the same values, with the strides of the transposed ones.
        weight = self.get_parameter("blocks.0.weight")
        weight.data = weight.data.t().contiguous().t()


class Buffered(Plain):  # a buffer scales the activations
    def change(self, width):
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def body(self, hidden):
        return super().body(hidden * self.scale)


class Delegating(Plain):  # each block is in a wrapper that passes unknown attributes on to it
    class Wrapper(nn.Sequential):
        def __getattr__(self, name):
            # nn.Module's own way finds what is registered here: parameters, and the wrapped module.
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self._modules.get("0"), name)

    def change(self, width):
        self.blocks = nn.ModuleList(map(Delegating.Wrapper, self.blocks))


class Normed(Plain):  # layer norms: parameters of another kind, that users keep out of weight decay
    def change(self, width):
        norms = [nn.LayerNorm(width) for _ in self.blocks]
        for norm in norms:  # so large that weight decay moves it far
            nn.init.constant_(norm.weight, NORM)
        self.norms = nn.ModuleList(norms)

    def layer(self, number, hidden):
        return super().layer(number, self.norms[number](hidden))


class Mask(nn.Module):  # dropout whose mask is decided by its input, so that every way to shard draws the same
    def forward(self, hidden, inputs):
        if not self.training:
            return hidden
        places = torch.arange(hidden.shape[-1], dtype=inputs.dtype)
        return hidden * 2 * (torch.sin(1000 * inputs[..., :1] + places) > 0).to(hidden.dtype)


class Dropped(Plain):  # dropout, in training mode alone
    def change(self, width):
        self.mask = Mask()

    def enter(self, inputs):
        return self.mask(super().enter(inputs), inputs)


class BatchNormed(Plain):  # a mean and a deviation over the rows of a rank, and running ones in buffers
    def change(self, width):
        self.norm = nn.BatchNorm1d(width)

    def enter(self, inputs):
        return self.norm(super().enter(inputs).transpose(1, 2)).transpose(1, 2)


class Counted(Plain):  # a buffer counts the passes in training mode, and scales the activations
    passes: Tensor

    def change(self, width):
        self.register_buffer("passes", torch.zeros(()))

    def enter(self, inputs):
        if self.training:
            self.passes += 1
        return super().enter(inputs) / (1 + self.passes)


class Direct(Plain):  # parameters belong to the root module and to no layer
    def change(self, width):
        self.direct = nn.Parameter(torch.full((3, width), 0.1))

    def body(self, hidden):
        return super().body(hidden + self.direct.sum(0))


class Empty(Direct):  # a parameter has no elements
    def change(self, width):
        self.direct = nn.Parameter(torch.empty(0))
