"""What FSDP1 keeps of frozen layers whose units reentrant checkpointing computes again.

For a unit without trained weights, FSDP1 hooks the gradients of the unit's inputs, and it removes the hooks only when
the backward pass ends (`_register_post_backward_reshard_only_hook`, torch 2.4 and 2.13). If reentrant checkpointing is
around the unit, these inputs are leaves. Their accumulators hold them and their gradients as long as the hooks exist,
unless Python's garbage collector comes by. `tests/test_reentrant.py` shows it with PyTorch. The trainers of
transformers do this until release 4.51; since 4.52, checkpointing is inside a layer.
"""

from dataclasses import replace

from study.predictor.memory.profile import Gradient, Held, Profile
from study.predictor.setup import Setup


def with_kept_inputs(setup: Setup, traced: Profile) -> Profile:
    """Return a trace's activations with the inputs of layers, and their gradients, kept until the pass ends.

    The gradient that a layer's backward pass begins with is in the trace already.
    """
    config = setup.model.dimensions
    width = config["n_embd"] if "n_embd" in config else config["hidden_size"]
    input_bytes = setup.tokens * width * setup.weight_bytes
    begun: list[str] = []  # layers whose backward pass has begun, the last layer first

    def more(held: Held) -> Held:
        done = len(begun) - 1
        return held._replace(kept=held.kept + (done + max(done - 1, 0)) * input_bytes)

    gradients = []
    for gradient in traced.gradients:
        block = gradient.tensor.block
        if block.startswith("layer.") and block not in begun:
            begun.append(block)
        if begun:
            gradient = Gradient(gradient.tensor, more(gradient.most), more(gradient.complete))
        gradients.append(gradient)
    return replace(traced, gradients=tuple(gradients))
