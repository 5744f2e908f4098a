"""One rank of a loading cell. `study.bench.loading` starts it as a process of its own, and reads its memory from outside.

At the end of each phase it waits, so that the memory of all ranks can be read at one moment.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

CELL = json.loads(sys.argv[1])
FOLDER = Path(CELL["folder"])
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WAY = CELL["way"]
TOKENS = 16


def ended(phase: str) -> None:
    """Say that a phase has ended here, and wait for the other ranks."""
    (FOLDER / f"{phase}-{RANK}").touch()
    while not (FOLDER / f"{phase}-go").exists():
        time.sleep(0.005)


ended("start")

import accelerate
import torch
import transformers

if WAY.startswith("zero3"):
    import deepspeed
else:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    from study.training.patches import fsdp_without_a_gpu

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
CLASS = getattr(transformers, CELL["class"])
DTYPE = getattr(torch, CELL["dtype"])


def group() -> Any:
    """Return Accelerate's main object, which starts the group of ranks and registers the config of stage 3."""
    if WAY.startswith("zero3"):
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
        config |= {"zero_optimization": {"stage": 3}, "bf16": {"enabled": torch.bfloat16 == DTYPE}}
        deepspeed.init_distributed("gloo")
        return accelerate.Accelerator(deepspeed_plugin=accelerate.DeepSpeedPlugin(hf_ds_config=config))
    if WAY.startswith("fsdp2"):
        efficient = WAY == "fsdp2_efficient"
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(efficient).lower()
        plugin = accelerate.utils.FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=efficient
        )
        accelerator = accelerate.Accelerator(cpu=True)
        fsdp_without_a_gpu(plugin, "no")
        return accelerator
    return accelerate.Accelerator(cpu=True)


def load() -> torch.nn.Module:
    if WAY == "meta" and RANK:
        with torch.device("meta"):
            return CLASS(CLASS.config_class.from_pretrained(CELL["model_folder"])).to(DTYPE)
    return CLASS.from_pretrained(CELL["model_folder"], dtype=DTYPE)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def prepare(accelerator: Any, model: Any) -> tuple[Any, Any]:
    if WAY == "meta":  # without Accelerate: shard, and let rank 0 send what it has loaded
        values = model.state_dict() if RANK == 0 else {}
        model = model.to("meta")
        model.tie_weights()
        layers = {type(layer) for layer in model.modules() if type(layer).__name__ in model._no_split_modules}
        for module in model.modules():
            if type(module) in layers:
                fully_shard(module)
        fully_shard(model)
        model.to_empty(device="cpu")
        model.tie_weights()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, values, options=options)
        return model, optimizer_of(model)
    if WAY.startswith("fsdp2"):
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = CELL["layers"]
    return accelerator.prepare(model, optimizer_of(model))


def step(accelerator: Any, model: Any, optimizer: Any) -> None:
    loss = model(input_ids=torch.ones(1, TOKENS, dtype=torch.long))[0].float().pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()


LATE = WAY == "zero3_late"  # the training is configured after the model was loaded
accelerator = None if LATE else group()
ended("imports")
model: Any = load()
ended("from_pretrained")
if CELL["last"] != "from_pretrained":
    accelerator = accelerator or group()
    model, optimizer = prepare(accelerator, model)
    ended("prepare")
if CELL["last"] == "step":
    step(accelerator, model, optimizer)
    ended("step")
names = ("transformers", "accelerate", "torch")
(FOLDER / f"software-{RANK}").write_text(json.dumps({name: sys.modules[name].__version__ for name in names}))
sys.stdout.flush()
os._exit(0)
