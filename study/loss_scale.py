"""fp16's loss scale: PyTorch's rule in every arm, of which DeepSpeed has to be reminded."""


def lower_on_overflow(zero) -> None:
    """Let DeepSpeed's autocast lower the loss scale when gradients overflow, as PyTorch does and as DDP meets it.

    DeepSpeed 0.19.8 sees such a step by the gradients' norm, on all ranks alike, and skips it before its GradScaler is
    asked: the scale stays as it is, and where it is too high no step is ever taken
    (`reproductions/autocast_fp16_never_lowers_its_scale.py`).
    """
    scaler, update = zero.torch_autocast_gradscaler, zero._update_scale

    def update_both(overflow: bool) -> None:
        update(overflow)
        if overflow:
            lower = scaler.get_scale() * scaler.get_backoff_factor()
            scaler.load_state_dict(scaler.state_dict() | {"scale": lower, "_growth_tracker": 0})

    zero._update_scale = update_both


def now(accelerator, optimizer) -> float | None:
    """The scale as it is: what began at 65536 was halved once for each step that overflowed. None without one."""
    scaler = getattr(optimizer.optimizer, "torch_autocast_gradscaler", None) or accelerator.scaler
    return scaler.get_scale() if scaler else None
