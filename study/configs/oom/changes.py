"""Changes of one thing in a training, the mildest first, and the part of memory that each makes smaller."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from study.configs.oom.causes import Cause
from study.configs.oom.training import Described
from study.predict.front import AttentionKernel, Transformer

# Causes that stand beside the tensor that was asked for: any change leaves more room.
BESIDE = ("oom-fragmentation", "oom-other-process")
TOKENS = frozenset(("activations", "logits"))
IN_PIECES = "--chunked-loss, as by Liger"  # the loss
RECOMPUTED = "activations recomputed"
FUSED = "`fused=True` in AdamW (the Trainer's `optim: adamw_torch_fused`; `torch_adam` of DeepSpeed has the same key)"
# What takes as little in both, where a model has both: PyTorch's own is everywhere.
ATTENTIONS: dict[AttentionKernel, str] = {"sdpa": "sdpa", "flash2": "flash_attention_2"}  # in transformers' words
SYNCED = "GradientAccumulationPlugin(sync_each_batch=True)"  # of Accelerate
IN_BUCKETS = "gradient_as_bucket_view=True"  # of DDP
STATES = frozenset(("optimizer", "gradients", "weights"))
# Each arm holds less on a GPU than the one before it: what it divides, or takes to the host, besides.
HOLD_LESS: dict[str, frozenset[str]] = {
    "ddp": frozenset(),
    "zero1": frozenset(("optimizer",)),
    "zero2": frozenset(("gradients",)),
    "zero3": frozenset(("weights",)),
    "zero3_cpu": STATES,
}
HOLD_LESS_OF_FSDP = {"fsdp2_grad_op": frozenset[str](), "fsdp2": frozenset(("weights",)), "fsdp2_cpu": STATES}
HOLD_LESS_OF_HSDP = {"hsdp": frozenset[str](), "fsdp2": STATES, "fsdp2_cpu": STATES}


@dataclass(frozen=True)
class Change:
    """A change of one thing, and the parts of memory that it makes smaller."""

    words: str
    training: Described
    shrinks: frozenset[str]

    def shrinks_part(self, cause: Cause) -> bool:
        """Whether it makes the part of memory smaller to which a cause belongs."""
        return not self.shrinks.isdisjoint(cause.part_of)


def that_help(cause: Cause, given: Described, model: Transformer | None = None) -> list[Change]:
    """Return the single changes that help against a cause.

    Tokens share the GPU with all else, and so does what is there for a moment: any change leaves them room. States may
    be made before any token is seen, beside all other states.
    """
    changes = [*single_changes(given, model)]
    if not cause.part_of or not TOKENS.isdisjoint(cause.part_of):
        return changes
    return [change for change in changes if not change.shrinks <= TOKENS]


def single_changes(given: Described, model: Transformer | None = None) -> Iterator[Change]:
    """Yield changes of one thing each, the mildest first.

    Other kernels for attention and for the update, a loss in pieces, fewer sequences, recomputation, gradients reduced
    at once or in DDP's buckets, an arm that holds less.
    """
    yield from _fused_kernels(given, model)
    if not given.chunked_loss:
        yield Change(IN_PIECES, replace(given, chunked_loss=True), frozenset(("logits",)))
    rows = given.micro_batch or 1
    while rows > 1:
        rows //= 2
        fold = (given.micro_batch or 1) // rows
        passes = "twice" if fold == 2 else f"{fold} times"
        fewer = replace(given, micro_batch=rows, accumulation=fold * (given.accumulation or 1))
        yield Change(f"--micro-batch {rows} and {passes} the accumulation", fewer, TOKENS)
    if not given.checkpointing:
        yield Change(RECOMPUTED, replace(given, checkpointing=True), frozenset(("activations",)))
    if holds_whole_gradients(given):
        yield Change(SYNCED, replace(given, sync_each_batch=True), frozenset(("gradients",)))
    # With several micro-batches the gradients of the first ones lie beside the buckets all the same.
    if given.arm == "ddp" and (given.accumulation or 1) == 1 and not given.bucket_view:
        yield Change(IN_BUCKETS, replace(given, bucket_view=True), frozenset(("gradients",)))
    yield from _arms_that_hold_less(given)


def several_changes(given: Described) -> Iterator[Change]:
    """Yield changes of two things, for where no single one is enough."""
    if holds_whole_gradients(given) and not given.checkpointing:
        both = replace(given, checkpointing=True, sync_each_batch=True)
        yield Change(f"{RECOMPUTED} and {SYNCED}", both, frozenset(("activations", "gradients")))


def holds_whole_gradients(given: Described) -> bool:
    """Whether a rank of FSDP holds all gradients between the micro-batches of a step, as Accelerate reduces once."""
    return (given.accumulation or 1) > 1 and may_hold_whole_gradients(given)


def may_hold_whole_gradients(given: Described) -> bool:
    """With two ranks, as in small groups of hsdp, parts in fp32 are as large as whole ones in 16 bits."""
    divides = (given.arm or "").startswith("fsdp") and (given.ranks or 1) > 2
    return divides and not (given.plain or given.sync_each_batch)


def _fused_kernels(given: Described, model: Transformer | None) -> Iterator[Change]:
    """Yield kernels that make no scores of attention, if the model has such, and no roots of all second moments."""
    if model and model.attention_taken(given.attention_kernel or "sdpa") == "eager":
        for kernel, name in ATTENTIONS.items():
            if model.attention_taken(kernel) != "eager":
                fused = replace(given, attention_kernel=kernel)
                yield Change(f"`attn_implementation`: {name}", fused, frozenset(("activations",)))
                break
    on_host = (given.arm or "").endswith(("_cpu", "_nvme")) or (given.homes or ("none",))[0] != "none"
    if given.optimizer in ("foreach", "single_tensor") and not on_host:
        yield Change(FUSED, replace(given, optimizer="adamw"), frozenset(("optimizer",)))


def _arms_that_hold_less(given: Described) -> Iterator[Change]:
    order = next((each for each in (HOLD_LESS_OF_FSDP, HOLD_LESS_OF_HSDP) if given.arm in each), HOLD_LESS)
    # The same 16 bits of Accelerate or of a Trainer are autocast with DDP, and 16-bit weights with DeepSpeed.
    precision = None if given.arm == "ddp" and given.precision in ("bf16", "fp16") else given.precision
    shrinks: frozenset[str] = frozenset()
    is_later = False
    for arm, divides in order.items():
        if is_later:
            shrinks |= divides
            yield Change(f"--arm {arm}", replace(given, arm=arm, homes=None, precision=precision), shrinks)
        is_later = is_later or arm == given.arm
