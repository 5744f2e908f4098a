"""The settings that are known to change losses or memory: what each changes, and why. The first matter most."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A setting by our name. `keys` are its names in files."""

    name: str
    changes: str
    why: str
    keys: str = ""
    unless: object = None  # the value that changes nothing
    one_sided: bool = False  # report any other value even if only one side has the setting


CAUSES = (
    Cause(
        "clipping",
        "losses",
        "DeepSpeed clips at 1.0 unless its config says otherwise, since June 2026 (PR 8068), and did not before; "
        "without DeepSpeed only the script or the Trainer clips",
        "gradient_clipping max_grad_norm",
        unless=0,
        one_sided=True,
    ),
    Cause("weights at the start", "losses", "the trainings start from different weights", "weights_checksum"),
    Cause("data", "losses", "the rows differ, or their order", "data_checksum"),
    Cause(
        "precision",
        "losses, memory",
        "a cast keeps weights, gradients and the loss in 16 bits; autocast keeps weights and loss in fp32",
        "enabled mixed_precision bf16 fp16 dtype autocast",
        unless="fp32",
        one_sided=True,
    ),
    Cause("weights", "losses, memory", "upcast weights take twice the memory and round differently"),
    Cause(
        "rows per step",
        "losses",
        "an update averages over rows per pass x passes x ranks",
        "train_batch_size rows_per_step tokens_per_step",
    ),
    Cause(
        "accumulation",
        "losses, bytes moved",
        "each pass's loss is divided by it, which is right only if all passes have equally many rows and tokens; "
        "stages 2 and 3 reduce gradients after each pass",
        "gradient_accumulation_steps",
        unless=1,
        one_sided=True,
    ),
    Cause(
        "rows per pass and rank",
        "memory",
        "activations grow with it; if the rows per step are equal, losses are nearly equal",
        "train_micro_batch_size_per_gpu per_device_train_batch_size micro_batch",
    ),
    Cause(
        "ranks",
        "losses, memory",
        "each rank has its own rows and dropout masks; a scheduler that Accelerate prepared steps once for each rank",
        "num_processes ranks_counted",
    ),
    Cause("learning rate", "losses", "the updates have another size", "lr learning_rate"),
    Cause("schedule", "losses", "the learning rates differ from step to step", "lr_scheduler_type"),
    Cause(
        "warm-up steps",
        "losses",
        "the first rates differ; a scheduler that Accelerate prepared counts steps x ranks",
        "warmup_num_steps warmup_steps lr_warmup_steps",
    ),
    Cause("warm-up ratio", "losses", "the first rates differ", "warmup_ratio"),
    Cause("steps", "losses", "where a schedule ends decides its rates from the start", "total_num_steps max_steps"),
    Cause("epochs", "losses", "where a schedule ends decides its rates from the start", "num_train_epochs"),
    Cause(
        "optimizer",
        "losses, memory",
        "with offloading, DeepSpeed's CPU Adam replaces it, in AdamW mode only if the script's optimizer is AdamW",
        "optim type adam_w_mode",
    ),
    Cause("zero_force_ds_cpu_optimizer", "losses, time", "false keeps the script's optimizer under offloading"),
    Cause("betas", "losses", "Adam's averages are longer or shorter", "adam_beta1 adam_beta2"),
    Cause("eps", "losses", "it bounds Adam's step where gradients are small", "adam_epsilon"),
    Cause("weight decay", "losses", "decoupled in AdamW, part of the gradient in Adam", "weight_decay"),
    Cause(
        "loss scale",
        "losses",
        "DeepSpeed's and PyTorch's scalers skip different steps after an overflow",
        "loss_scale initial_scale_power loss_scale_window",
        one_sided=True,
    ),
    Cause(
        "dtype of reduced gradients",
        "losses, bytes moved",
        "sums in 16 bits round differently",
        "communication_data_type",
    ),
    Cause(
        "dtype of accumulated gradients",
        "losses, memory",
        "sums over passes in 16 bits round differently",
        "grad_accum_dtype",
    ),
    Cause("dropout", "losses", "the masks differ"),
    Cause("seed", "losses", "drawn weights, the order of rows and dropout masks differ"),
    Cause("seed of the data", "losses", "the order of the rows differs", "data_seed"),
    Cause("label smoothing", "losses", "it changes the loss function", "label_smoothing_factor"),
    Cause("noise on embeddings", "losses", "noise is added in training", "neftune_noise_alpha"),
    Cause("average_tokens_across_devices", "losses", "the loss is averaged over all tokens, or on each rank first"),
    Cause("parameters", "losses, memory", "the models differ"),
    Cause("sequence", "losses, memory", "the rows differ; activations grow with it"),
    Cause(
        "engine",
        "memory, logged norms",
        "clip_grad_norm_ returns the engine's norm under DeepSpeed and nothing at its stage 0; elsewhere it may return "
        "the norm of one rank's part",
        "distributed_type wrapper arm config_file",
    ),
    Cause(
        "stage",
        "memory, bytes moved",
        "1 partitions optimizer states, 2 also gradients, 3 also weights",
        "zero_stage",
    ),
    Cause(
        "sharding",
        "memory, bytes moved",
        "it decides what each rank holds",
        "fsdp_sharding_strategy fsdp_reshard_after_forward",
    ),
    Cause(
        "offload_optimizer",
        "memory, time, last digits",
        "states are in host memory or on disk, and DeepSpeed's CPU Adam updates them",
        "device offload_optimizer_device",
        unless="none",
        one_sided=True,
    ),
    Cause(
        "offload_param",
        "memory, time",
        "weights come from host memory or disk, only in stage 3",
        "device offload_param_device fsdp_offload_params",
        unless="none",
        one_sided=True,
    ),
    Cause(
        "reduce_bucket_size",
        "memory",
        "stages 1 to 3 allocate a bucket of so many elements, whatever the size of the model",
        "bucket_elements",
    ),
    Cause("overlap_comm", "memory, time", "stages 1 and 2 then keep two buckets", "overlap"),
    Cause("stage3_param_persistence_threshold", "memory, bytes moved", "smaller tensors are never partitioned"),
    Cause("stage3_max_live_parameters", "memory, bytes moved", "up to so many parameters stay gathered"),
    Cause("stage3_max_reuse_distance", "memory, bytes moved", "parameters that are used again sooner stay gathered"),
    Cause("stage3_prefetch_bucket_size", "memory, time", "so many parameters are gathered ahead"),
    Cause("sub_group_size", "memory", "stage 3 updates so many parameters at a time"),
    Cause(
        "checkpointing",
        "memory, time",
        "activations are recomputed instead of kept",
        "gradient_checkpointing fsdp_activation_checkpointing",
        unless=False,
        one_sided=True,
    ),
    Cause("attention", "memory, last digits", "the kernels differ in what they keep and how they round"),
    Cause("fused kernels (Liger)", "memory, last digits", "logits are not kept whole", "use_liger_kernel"),
    Cause("compiled", "memory, last digits", "fused kernels round differently", "torch_compile compile"),
    Cause("TF32", "losses", "products of fp32 matrices have ten bits of mantissa", "tf32"),
    Cause("device", "last digits", "kernels differ"),
    Cause("version of deepspeed", "losses, memory", "defaults changed, such as that of clipping in June 2026"),
    Cause("version of torch", "last digits", "kernels differ"),
    Cause("version of transformers", "losses", "models, drawn weights and the Trainer's defaults change"),
    Cause("version of accelerate", "losses", "the values that it fills in for auto change"),
)
KEYS = frozenset(key for cause in CAUSES for key in (cause.name, *cause.keys.split()))
