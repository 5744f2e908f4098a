"""One rank of a loading cell: a process of its own, whose memory `loading.py` reads from outside.

At the end of each phase it waits, so that the memory of all ranks can be read at one moment.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

TOKENS = 16


class Rank:
    """A rank of a cell."""

    def __init__(self, settings: dict):
        self.cell = settings
        self.way: str = settings["way"]
        self.folder = Path(settings["folder"])
        self.number = int(os.environ["RANK"])

    def ended(self, phase: str) -> None:
        """Say that a phase has ended here, and wait for the other ranks."""
        (self.folder / f"{phase}-{self.number}").touch()
        while not (self.folder / f"{phase}-go").exists():
            time.sleep(0.005)

    def run(self) -> None:
        """Load a model, prepare it, and train one step, as far as the cell says."""
        self.ended("start")
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        late = self.way == "zero3_late"  # the training is configured after the model was loaded
        accelerator = None if late else self.group()
        if late:
            import deepspeed  # noqa: F401
        self.ended("imports")
        model = self.load()
        self.ended("from_pretrained")
        if self.cell["last"] != "from_pretrained":
            accelerator = accelerator or self.group()
            model, optimizer = self.prepare(accelerator, model)
            self.ended("prepare")
        if self.cell["last"] == "step":
            self.step(accelerator, model, optimizer)
            self.ended("step")
        names = ("transformers", "accelerate", "torch", "deepspeed")
        versions = {name: sys.modules[name].__version__ for name in names if name in sys.modules}
        (self.folder / f"software-{self.number}").write_text(json.dumps(versions))

    def group(self) -> Any:
        """Return Accelerate's main object, which starts the group of ranks and registers the config of stage 3."""
        import accelerate

        if self.way.startswith("zero3"):
            import deepspeed

            config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
            config |= {"zero_optimization": {"stage": 3}, "bf16": {"enabled": self.cell["dtype"] == "bfloat16"}}
            deepspeed.init_distributed("gloo")
            return accelerate.Accelerator(deepspeed_plugin=accelerate.DeepSpeedPlugin(hf_ds_config=config))
        from study.training.patches import fsdp_without_a_gpu

        accelerator = accelerate.Accelerator(cpu=True)
        if self.way.startswith("fsdp2"):
            efficient = self.way == "fsdp2_efficient"
            os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(efficient).lower()
            plugin = accelerate.utils.FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=efficient
            )
            plugin.transformer_cls_names_to_wrap = self.cell["layers"]
            fsdp_without_a_gpu(plugin, "no")
        return accelerator

    def load(self) -> Any:
        import torch
        import transformers

        kind = getattr(transformers, self.cell["class"])
        dtype = getattr(torch, self.cell["dtype"])
        if self.way == "meta" and self.number:
            with torch.device("meta"):
                config = kind.config_class.from_pretrained(self.cell["model_folder"], trust_remote_code=False)
                return kind(config).to(dtype)
        return kind.from_pretrained(self.cell["model_folder"], dtype=dtype, trust_remote_code=False)

    def prepare(self, accelerator: Any, model: Any) -> tuple[Any, Any]:
        import torch

        if self.way == "meta":
            self.shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return (model, optimizer) if self.way == "meta" else accelerator.prepare(model, optimizer)

    def shard(self, model: Any) -> None:
        """Shard a model without Accelerate, and let rank 0 send what it has loaded."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
        from torch.distributed.fsdp import fully_shard

        values = {} if self.number else model.state_dict()
        model.to("meta")
        model.tie_weights()
        for module in list(model.modules()):
            if type(module).__name__ in self.cell["layers"]:
                fully_shard(module)
        fully_shard(model)
        model.to_empty(device="cpu")
        model.tie_weights()
        set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))

    def step(self, accelerator: Any, model: Any, optimizer: Any) -> None:
        import torch

        loss = model(input_ids=torch.ones(1, TOKENS, dtype=torch.long))[0].float().pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()


if __name__ == "__main__":
    Rank(json.loads(sys.argv[1])).run()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an ordinary exit
