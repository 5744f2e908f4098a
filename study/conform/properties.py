"""The properties: what every way of sharding has to keep, each with where the question comes from."""

from collections.abc import Callable
from dataclasses import dataclass

from study.conform import checks, models
from study.conform.cases import Case

DDP = "PyTorch, DistributedDataParallel"
DEEPSPEED, ACCELERATE = "deepspeedai/DeepSpeed", "huggingface/accelerate"


@dataclass(frozen=True)
class Property:
    """One thing that sharded training must keep."""

    name: str
    sentence: str
    source: str
    case: Case = Case()
    check: Callable[..., None] = checks.same_training
    ranks: tuple[int, ...] = (2,)  # of each launch


def _bf16(precision: str, **more) -> Case:
    return Case(precision=precision, updates=more.pop("updates", 2), **more)


LORA, MANY = Case(models.Lora), Case(width=16, layers=4)
PROPERTIES = (
    # What a training is: losses, gradients, weights.
    Property("weights-before", "Building the training changes no weight", "ZenFlow, the ledger's reproduction zenflow_changes_weights", Case(), checks.weights_kept),
    Property("one-update", "The loss, the norm and the weights of one update are right", f"{DEEPSPEED}#966", Case(updates=1)),
    Property("sgd", "Three updates of SGD are right", f"{DEEPSPEED}#966"),
    Property("momentum", "Three updates of SGD with momentum are right", f"{DEEPSPEED}#5188", Case(optimizer="momentum")),
    Property("adamw", "Three updates of AdamW are right", f"{DEEPSPEED}#4815", Case(optimizer="adamw")),
    Property("six-updates", "Six updates of SGD with momentum are right", f"{DEEPSPEED}#4298", Case(optimizer="momentum", updates=6)),
    Property("ranks-agree", "All ranks have the same weights, to the bit", DDP, Case(optimizer="momentum"), checks.ranks_agree),
    Property("repeats", "A second run gives the same losses and weights, to the bit", f"{DEEPSPEED}#5898", Case(optimizer="adamw"), checks.repeats),
    Property("one-rank", "One rank alone trains like one process", f"{DEEPSPEED}#966", ranks=(1,)),
    Property("four-ranks", "Four ranks train like one process with all their rows", f"{DEEPSPEED}#4815", ranks=(4,)),
    # Buckets.
    Property("default-buckets", "The library's default sizes of buckets give the same training", f"{DEEPSPEED}#1302", Case(bucket=None)),
    Property("many-buckets", "Gradients that fill many buckets are all reduced", f"{DEEPSPEED}#7718", MANY),
    Property("tiny-buckets", "Buckets smaller than any parameter are right", f"{DEEPSPEED}#7718", Case(bucket=1)),
    # Accumulation.
    Property("accumulation-2", "Two passes for an update are right", f"{ACCELERATE}#1970", Case(passes=2)),
    Property("accumulation-4", "Four passes for an update are right", f"{DEEPSPEED}#7718", Case(passes=4)),
    Property("accumulation-many-buckets", "Four passes are right where gradients fill many buckets", f"{DEEPSPEED}#7718", Case(passes=4, width=16, layers=4)),
    Property("accumulation-default-buckets", "Four passes are right with the default sizes of buckets", f"{DEEPSPEED}#7718", Case(passes=4, bucket=None)),
    Property("accumulation-adamw", "Four passes are right with AdamW", f"{ACCELERATE}#1970", Case(passes=4, optimizer="adamw")),
    Property("accumulation-is-one-batch", "Three passes equal one pass over all their rows", f"{ACCELERATE}#1970", Case(passes=3), checks.one_large_batch),
    Property("ranks-are-one-batch", "Two ranks equal one pass over all their rows", DDP, Case(), checks.one_large_batch),
    # Clipping.
    Property("clip", "Gradients above the limit are clipped, and the norm before it is reported", f"{DEEPSPEED}#8068", Case(clip=0.05)),
    Property("clip-far", "A limit that is never reached changes nothing", f"{DEEPSPEED}#8068", Case(clip=1000.0)),
    Property("clip-accumulation", "The sum of all passes is clipped, not each pass", f"{DEEPSPEED}#7718", Case(clip=0.05, passes=4)),
    Property("clip-adamw", "Clipping is right before AdamW", f"{DEEPSPEED}#8068", Case(clip=0.05, optimizer="adamw")),
    Property("clip-groups", "The norm spans all groups of parameters", DDP, Case(clip=0.05, groups="rate")),
    Property("clip-frozen", "Frozen parameters do not count in the norm", f"{DEEPSPEED}#8214", Case(models.Frozen, clip=0.05)),
    Property("clip-tied", "A tied parameter counts once in the norm", "PyTorch, tied weights under clip_grad_norm_", Case(models.Tied, clip=0.05)),
    Property("clip-four-ranks", "The norm spans four ranks", f"{DEEPSPEED}#7718", Case(clip=0.05), ranks=(4,)),
    # Groups and schedules.
    Property("groups-decay", "Weight decay holds for its group only", f"{DEEPSPEED}#4298", Case(groups="decay", optimizer="adamw")),
    Property("groups-rate", "Each group has its learning rate", f"{DEEPSPEED}#4298", Case(groups="rate", optimizer="momentum")),
    Property("groups-zero-rate", "A group with a learning rate of 0 keeps its bits", f"{DEEPSPEED}#4298", Case(groups="zero"), checks.unmoved),
    Property("schedule", "The learning rate falls once for each update", f"{ACCELERATE}#1382", Case(schedule=True)),
    Property("schedule-accumulation", "The learning rate falls once for each update, not for each pass", f"{ACCELERATE}#1382", Case(schedule=True, passes=2)),
    Property("schedule-groups", "The learning rate of each group falls", f"{ACCELERATE}#1382", Case(schedule=True, groups="rate")),
    # Parameters.
    Property("frozen", "A model with a frozen layer is right", f"{DEEPSPEED}#7780", Case(models.Frozen)),
    Property("frozen-bits", "Frozen weights keep their bits, and all others move", f"{DEEPSPEED}#7780", Case(models.Frozen, optimizer="momentum"), checks.unmoved),
    Property("frozen-memory", "Frozen weights cost no gradients and no optimizer states", f"{DEEPSPEED}#5109", Case(models.MostlyFrozen, width=128, updates=1, optimizer="adamw"), checks.frozen_memory),
    Property("frozen-accumulation", "Frozen layers and four passes are right", f"{DEEPSPEED}#7780", Case(models.MostlyFrozen, passes=4)),
    Property("lora", "LoRA is right", f"{DEEPSPEED}#6507", LORA),
    Property("lora-accumulation", "LoRA with two passes, AdamW and clipping is right", f"{DEEPSPEED}#6507", Case(models.Lora, passes=2, optimizer="adamw", clip=0.05)),
    Property("tied", "Tied weights are right", "PyTorch, tied weights", Case(models.Tied)),
    Property("tied-accumulation", "Tied weights are right with two passes", "PyTorch, tied weights", Case(models.Tied, passes=2)),
    Property("unused", "A layer that no pass uses stays as it is", f"{DDP}, find_unused_parameters", Case(models.Unused)),
    Property("unused-clip", "A layer that no pass uses does not disturb clipping", f"{DDP}, find_unused_parameters", Case(models.Unused, clip=0.05)),
    Property("empty", "A parameter without elements is right", "zero-element buckets", Case(models.Empty)),
    Property("scalars", "Parameters with fewer elements than ranks are right", "padding of shards", Case(models.Scalars)),
    Property("odd-sizes", "Parameters whose sizes no number of ranks divides are right", "padding of shards", Case(width=7, layers=3)),
    Property("odd-sizes-four-ranks", "They are right on four ranks", "padding of shards", Case(width=7, layers=3, optimizer="momentum"), ranks=(4,)),
    Property("padding-row", "The row of an embedding for padding gets no gradient", "PyTorch, Embedding, padding_idx", Case(models.Embedded)),
    Property("one-rank-without-gradient", "A parameter that gets a gradient on one rank only is right", f"{DDP}, find_unused_parameters", Case(models.OneRank)),
    Property("one-rank-without-gradient-twice", "The same with two passes", f"{DDP}, find_unused_parameters", Case(models.OneRank, passes=2)),
    Property("expert-without-tokens", "An expert without tokens does not stop a mixture of experts", f"{DEEPSPEED}#7461", Case(models.Experts, layers=3)),
    Property("transposed", "A weight that is not contiguous is right", "the order of elements in flat buffers", Case(models.Transposed)),
    Property("buffers", "A buffer is used as it is", DDP, Case(models.Buffered)),
    Property("direct", "A parameter of the root module is right", "hooks on modules", Case(models.Direct)),
    Property("norms", "Layer norms are right, without weight decay", f"{DEEPSPEED}#4298", Case(models.Normed, groups="decay", optimizer="adamw")),
    # How modules are used.
    Property("twice", "A module that is called twice in a pass is right", "reuse of gathered weights", Case(models.Twice)),
    Property("recomputed", "Recomputation of activations is right", f"{DEEPSPEED}#7780", Case(models.Recomputed)),
    Property("recomputed-reentrant", "PyTorch's older recomputation is right", f"{DEEPSPEED}#7780", Case(models.RecomputedReentrant)),
    Property("weight-outside-its-module", "A weight that is used outside its module is right", f"{DEEPSPEED}#1820", Case(models.Outside)),
    Property("other-order", "Modules in another order in each update are right", "the trace of ZeRO-3", Case(models.Reordered, layers=3, lengths=(3, 4))),
    Property("nested", "Modules that take and return dictionaries and tuples are right", "hooks on modules", Case(models.Nested)),
    Property("lengths", "Sequences of changing length are right", f"{ACCELERATE}#3780", Case(lengths=(3, 7, 1))),
    Property("two-backward-passes", "The gradients of two backward passes before a step add up", f"{DDP}, no_sync", Case(updates=1), checks.two_backward_passes),
    Property("second-model", "A second model in the same process changes nothing", "the ledger's reproduction two_trainings_without_gpu", Case(updates=2), checks.second_model),
    Property("forward-alone", "A forward pass without a backward pass changes nothing", "DDP's reducer, ZeRO-3's gathered weights", Case(), checks.forward_between),
    Property("evaluation", "An evaluation between two updates changes nothing", f"{DEEPSPEED}#5394", Case(), checks.evaluation_between),
    # Precision.
    Property("autocast", "Autocast to bf16 is right", f"{DEEPSPEED}#4298", _bf16("autocast")),
    Property("autocast-accumulation", "Autocast with four passes is right", f"{ACCELERATE}#1970", _bf16("autocast", passes=4)),
    Property("bf16", "bf16 with master weights in fp32 is right", "the ledger's reproduction bf16_first_step", _bf16("bf16")),
    Property("bf16-adamw", "bf16 with master weights and AdamW is right", "the ledger's reproduction bf16_first_step", _bf16("bf16", optimizer="adamw")),
    Property("bf16-accumulation", "bf16 with four passes and clipping is right", f"{DEEPSPEED}#7718", _bf16("bf16", passes=4, clip=0.05)),
    Property("bf16-pure", "bf16 without master weights is right", "the ledger's reproduction bf16_is_two_recipes", _bf16("bf16_pure", updates=1)),
    Property("fp16-overflow", "A step whose gradients overflow is skipped, and training goes on", "the ledger's reproduction autocast_fp16_never_lowers_its_scale", Case(precision="fp16"), checks.overflow),
    # Checkpoints.
    Property("checkpoint", "A saved training goes on after loading as if it had not stopped", f"{DEEPSPEED}#5405", Case(updates=2, optimizer="momentum"), checks.checkpoint, (2, 2)),
    Property("checkpoint-adamw", "The states of AdamW are saved and loaded", f"{DEEPSPEED}#5405", Case(updates=2, optimizer="adamw"), checks.checkpoint, (2, 2)),
    Property("checkpoint-schedule", "The schedule goes on after loading", f"{DEEPSPEED}#5405", Case(updates=2, schedule=True), checks.checkpoint, (2, 2)),
    Property("checkpoint-frozen", "Frozen weights are saved and loaded", f"{DEEPSPEED}#5109", Case(models.Lora, updates=2, optimizer="adamw"), checks.checkpoint, (2, 2)),
    Property("checkpoint-fewer-ranks", "One rank loads what two saved", f"{DEEPSPEED}#5405", Case(updates=2, optimizer="momentum"), checks.checkpoint, (2, 1)),
    Property("checkpoint-more-ranks", "Four ranks load what two saved", f"{DEEPSPEED}#3810", Case(updates=2, optimizer="momentum"), checks.checkpoint, (2, 4)),
    Property("checkpoint-weights", "Where only weights are loaded, the optimizer starts anew", f"{DEEPSPEED}#2898", Case(updates=2, optimizer="momentum"), checks.checkpoint_of_weights, (2, 2)),
)  # fmt: skip
