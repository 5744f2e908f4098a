"""The arms and settings with which a library refuses an optimizer."""

from study.core.arms import Arm
from study.core.errors import Stop
from study.core.recipes import RECIPES
from study.core.settings import TrainerFlags

# Quotes of the libraries, or what they do silently (torch 2.13, bitsandbytes 0.50, DeepSpeed 0.19.8, Accelerate 1.15).
WITH_FSDP2 = {
    "adamw_8bit": "bitsandbytes.optimizer_update_8bit_blockwise got mixed torch.Tensor and DTensor (PyTorch)",
    "adafactor": "in-place operations that require placement changes are not supported (PyTorch, of a DTensor's norm)",
    "muon": "DeepSpeed's Muon is for its own stages: FSDP2 would gather each matrix inside the update",
}
WITH_OFFLOAD = "Accelerate puts DeepSpeedCPUAdam in its place without a word (map_pytorch_optim_to_deepspeed)"
PURE_WITH_OFFLOAD = (
    "bf16_optimizer_states with ZeRO-Offload requires DeepSpeedCPUAdam constructed with fp32_optimizer_states=False "
    "(DeepSpeed), and Accelerate constructs it without"
)
WITHOUT_VALUES = "0.0 cannot be raised to a negative power (PyTorch's Adafactor reads its step, which has no value)"


def refusal(arm: Arm, optimizer: str, precision: str, has_values: bool = True, saves: object = None) -> Stop | None:
    """Return why a library cannot use this optimizer under an arm, with its error if there is one. None if it can.

    `saves`: whether checkpoints are saved, or loaded.
    """
    offloads = arm.deepspeed is not None and arm.offload_optimizer != "none"
    recipe = RECIPES[precision]
    flag = f"--optimizer {optimizer}"
    refusals = [
        (offloads and optimizer != "adamw", flag, WITH_OFFLOAD),
        (optimizer == "adafactor" and not has_values, flag, WITHOUT_VALUES),
        (arm.fsdp and optimizer in WITH_FSDP2, flag, WITH_FSDP2.get(optimizer)),
        (offloads and recipe.moment_bytes == 2, f"--precision {precision}", PURE_WITH_OFFLOAD),
        (saves and arm.uses_nvme, "a checkpoint", "DeepSpeed loads no weights where states are on a disk"),
        (saves and not has_values, "a checkpoint", "there are no values"),
        (saves and not arm.deepspeed and recipe.master_bytes, "a checkpoint", "its fp32 weights would be lost"),
    ]
    for stands, given, why in refusals:
        if stands:
            return Stop(f"{given} does not go with {arm.name}: {why}", "change one of the two", "unavailable")
    return None


def check(settings: TrainerFlags, arm: Arm) -> None:
    """Raise Stop for settings of the optimizer that cannot be combined with each other or with the arm."""
    # --- with each other
    if settings.lora_rank is not None and settings.save:
        raise Stop("--save with --lora-rank would write a model that transformers cannot load", "leave out --save")
    # --- with the arm
    saves = settings.save_every or settings.resume
    if stop := refusal(arm, settings.optimizer, settings.precision, settings.init != "none", saves):
        raise stop
