"""Checks for another precision than was asked for. They know DeepSpeed 0.19.8 and Accelerate 1.15.0."""

from study.io.numbers import size
from study.records.findings import Finding
from study.spec.settings import AUTOCAST
from study.watcher.facts import Facts

FIRST_SCALE = 65536  # the initial loss scale of DeepSpeed and torch
HALVES = tuple(AUTOCAST.values())


def precision(facts: Facts) -> list[Finding] | None:
    weights = facts.observed.dtypes.get("weights")
    if weights is None:
        return None
    findings = [_recipe(facts, weights), _upcast(facts, weights), _no_copy(facts, weights), _loss_scale(facts)]
    if facts.observed.stage == 0 and "bfloat16" in weights.split():
        sentence = "Stage 0 with bf16 takes an empty Adam step first: the first real update is a quarter too small"
        findings.append(Finding(sentence, "use DDP, or stage 1", "bf16_first_step"))
    return [finding for finding in findings if finding]


def _recipe(facts: Facts, weights: str) -> Finding | None:
    """A cast instead of autocast, or neither of the two."""
    wanted, seen = facts.promised.precision, facts.observed
    if wanted not in AUTOCAST:
        return None
    if seen.stage is not None and AUTOCAST[wanted] in weights.split() and seen.autocast is None:
        return Finding(
            f"{wanted} is a cast here, not autocast: the weights are {AUTOCAST[wanted]}, and so is the loss",
            "for the arithmetic of DDP set `mixed_precision: no` and DeepSpeed's torch_autocast; compare losses that "
            "are computed from `logits.float()`",
            "bf16_is_two_recipes",
        )
    if seen.autocast != wanted and weights == "float32":
        sentence = f"Precision is fp32 although {facts.source} says {wanted}: there is no autocast"
        return Finding(sentence, "call the prepared model, or run the forward pass under `accelerator.autocast`")
    return None


def _upcast(facts: Facts, weights: str) -> Finding | None:
    if facts.promised.weights not in HALVES or weights != "float32" or facts.whole_bytes is None:
        return None
    return Finding(
        f"The model was loaded in {facts.promised.weights} and is trained in float32: its weights take "
        f"{size(facts.whole_bytes)} instead of {size(facts.whole_bytes // 2)}",
        "something upcasts it on the way, as FSDP's mixed precision does: switch that off, or load it in float32",
    )


def _no_copy(facts: Facts, weights: str) -> Finding | None:
    kinds = facts.observed.dtypes
    if weights not in HALVES or kinds.get("moments") != weights or kinds.get("master"):
        return None
    sentence = f"The optimizer updates {weights} weights without an fp32 copy: small updates are rounded away"
    return Finding(sentence, "keep the weights in float32 and use autocast, or let DeepSpeed keep the copy")


def _loss_scale(facts: Facts) -> Finding | None:
    seen = facts.observed
    patched = "lower_loss_scale_on_overflow" in seen.patches
    if seen.autocast != "fp16" or not seen.stage or seen.loss_scale != FIRST_SCALE or patched:
        return None
    return Finding(
        f"The loss scale is still {FIRST_SCALE}: under fp16 autocast DeepSpeed never lowers it, and silently skips "
        "every step whose gradients overflow",
        "look whether the weights change; use bf16, or DeepSpeed's own fp16 section",
        "autocast_fp16_never_lowers_its_scale",
    )
