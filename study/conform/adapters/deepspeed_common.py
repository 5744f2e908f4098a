"""What the adapters of DeepSpeed share: its import, its configuration and its whole weights."""

import contextlib
import logging
import os

logging.disable(logging.WARNING)
os.environ.update(DS_ACCELERATOR="cpu", TORCHDYNAMO_DISABLE="1")  # nothing here is compiled

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

get_accelerator().is_fp16_supported = lambda: True  # it is, slowly; DeepSpeed asks whether the processor is fast at it
get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)  # here once, and not in each rank
getattr(deepspeed.ops, "__compatible_ops__", None)  # some releases compile a test program for it
with contextlib.suppress(ImportError):
    import deepspeed.module_inject.auto_ep_layer

STAGE3 = {  # by default weights below 100,000 elements stay gathered on each rank: little of stage 3 would be tried
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


def configuration(options):
    zero = {"stage": options.settings["stage"]}
    if zero["stage"] == 3:
        zero |= STAGE3
    # Small buckets, so that these tiny models fill several of them.
    if options.bucket:
        zero |= {"reduce_bucket_size": options.bucket, "allgather_bucket_size": options.bucket}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": options.passes,
        "gradient_clipping": options.clip,  # 0 switches it off: the default changed to 1
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero | options.settings.get("zero", {}),
        "bf16": {"enabled": options.precision.startswith("bf16")},
    }
    if options.precision == "fp16":
        config["fp16"] = {
            "enabled": True,
            "initial_scale_power": 24,
            "loss_scale_window": options.window,
            "hysteresis": 1,
        }
    if options.precision == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    return config


def parts(weights_only):
    """Return the options of a load: which parts of a checkpoint it takes."""
    return {"load_module_only": weights_only, "load_optimizer_states": not weights_only}


def full_weights(module):
    """Return the weights in fp32."""
    parameters = dict(module.named_parameters())
    sharded = any(hasattr(parameter, "ds_id") for parameter in parameters.values())
    plain = {}
    for name, parameter in parameters.items():  # of several, releases until 0.19.6 wait only for the last one on gloo
        with deepspeed.zero.GatheredParameters([parameter], enabled=sharded):
            plain[name] = parameter.detach().float().clone()
    # 16-bit weights are copies: the optimizer has the masters, of those that it trains.
    if next(iter(parameters.values())).dtype == torch.float32:
        return plain
    masters = {name: deepspeed.utils.safe_get_full_fp32_param(parameter) for name, parameter in parameters.items()}
    return plain | {name: master for name, master in masters.items() if master is not None}
