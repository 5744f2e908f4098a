"""The precisions of a training: in how many bytes each keeps the states of a parameter, and computes."""

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16", "bf16_cast", "bf16_pure"]  # of the trainer


@dataclass(frozen=True)
class Recipe:
    """Bytes of an element, as the papers and PyTorch count them. What an arm changes is said where it is predicted."""

    weight_bytes: int
    gradient_bytes: int
    master_bytes: int  # of the copy that the optimizer updates; 0: there is none
    moment_bytes: int  # of optimizers that keep no 8 bits
    product_bytes: int  # of the factors of matrix products
    autocast: str | None = None  # the type to which autocast converts the factors

    @property
    def casts(self) -> bool:
        """Whether products are narrower than the weights: what Accelerate calls mixed precision."""
        return self.product_bytes < self.weight_bytes

    @property
    def scales_loss(self) -> bool:
        """Whether small gradients would be zero without a factor on the loss."""
        return self.autocast == "float16"


RECIPES = {
    "fp32": Recipe(4, 4, 0, 4, 4),
    "bf16": Recipe(4, 4, 0, 4, 2, "bfloat16"),
    "fp16": Recipe(4, 4, 0, 4, 2, "float16"),
    "bf16_cast": Recipe(2, 2, 4, 4, 2),
    "bf16_pure": Recipe(2, 2, 0, 2, 2),
}
AUTOCAST = {name: recipe.autocast for name, recipe in RECIPES.items() if recipe.autocast}
