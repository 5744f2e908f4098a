"""Measures the host's seconds for what sharding adds to a pass, on a CPU.

Rank 0 of eight runs alone, with collectives that move no data, and tensors so small that Python alone takes time. The
time of a layer is the difference between two models. What DDP, DeepSpeed and FSDP do for each parameter tensor, and the
tensors of an update, are compared with the kernels of a pass on the same machine: these ratios are the starts of
[python] in pace.toml. Seconds are of the processor, so that other work on the machine disturbs little.
"""

import functools
import importlib.util
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from study.core.recipes import RECIPES
from study.core.text import say
from study.predict.placement import Placement
from study.predict.step_time import PHASES, work
from study.predict.trace.transformer import Transformer
from study.predict.training import Batch, Training

RANKS = 8
FEW, MANY = 6, 18  # layers
WARM_UP, STEPS = 4, 14
LAYERS = 48  # of quantized products
TENSORS = 9  # of a layer, each in a module of its own
Seconds = tuple[float, float, float]  # of the forward pass, the backward pass and the update


def _config(layers: int) -> LlamaConfig:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    return LlamaConfig(vocab_size=64, num_hidden_layers=layers, **sizes)


def _model(layers: int, dtype: torch.dtype) -> Any:
    model: Any = LlamaForCausalLM(_config(layers))
    return model.to(dtype)


def kernels_of_a_layer() -> int:
    """Return the kernels of both passes over a layer, as the predictor counts them on a GPU."""
    fewer, more = (_kernels(layers) for layers in (FEW, FEW + 1))
    return more - fewer


def _kernels(layers: int) -> int:
    model = Transformer.of(_config(layers).to_dict(), "a small Llama")
    training = Training(model, RECIPES["bf16_pure"], Batch(rows=1, tokens=8), Placement(device="cuda"))
    return sum(work(training, phase).kernels for phase in PHASES)


def _steps(model: Callable, backward: Callable, update: Callable) -> Seconds:
    rows = torch.randint(0, 64, (1, 8))
    taken: list[Seconds] = []
    for _ in range(STEPS):
        clock = [time.process_time()]
        loss = model(input_ids=rows, labels=rows).loss
        clock.append(time.process_time())
        backward(loss)
        clock.append(time.process_time())
        update()
        clock.append(time.process_time())
        taken.append((clock[1] - clock[0], clock[2] - clock[1], clock[3] - clock[2]))
    forward_s, backward_s, update_s = (median(part) for part in zip(*taken[WARM_UP:], strict=True))
    return forward_s, backward_s, update_s


def by_torch(wrapped: str | None, dtype: torch.dtype, layers: int, reentrant: bool | None = None) -> Seconds:
    """Return the seconds of a step by PyTorch: alone, or under DDP, FSDP1 or FSDP2.

    `reentrant`: the kind of checkpointing. None: without.
    """
    model = _model(layers, dtype)
    if reentrant is not None:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if wrapped == "DDP":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if wrapped == "FSDP1":
        policy = ModuleWrapPolicy({LlamaDecoderLayer})
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=cpu, use_orig_params=True)
    if wrapped in ("FSDP2", "FSDP2 whole"):  # whole: its layers' weights stay so from the forward pass on
        mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
        for module in [*(each for each in model.modules() if isinstance(each, LlamaDecoderLayer)), model]:
            fully_shard(module, mesh=mesh, reshard_after_forward=False if wrapped == "FSDP2 whole" else None)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return _steps(model, torch.Tensor.backward, update)


def by_deepspeed(stage: int, layers: int) -> Seconds:
    import deepspeed

    model = _model(layers, torch.bfloat16)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    config |= {"gradient_clipping": 1.0, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return _steps(engine, engine.backward, engine.step)


def of_a_layer(step: Callable[[int], Seconds]) -> Seconds:
    few, many = step(FEW), step(MANY)
    forward_s, backward_s, update_s = ((b - a) / (MANY - FEW) for a, b in zip(few, many, strict=True))
    return forward_s, backward_s, update_s


def of_a_quantized_product(doubly: bool) -> tuple[float, float]:
    """Return the seconds of both passes of a frozen linear layer by bitsandbytes in 4 bits, less those of PyTorch's."""
    import bitsandbytes

    def both_passes(made: Callable[[], torch.nn.Module]) -> tuple[float, float]:
        layers = [made().requires_grad_(False) for _ in range(LAYERS)]
        rows = torch.randn(1, 8, 64, dtype=torch.bfloat16, requires_grad=True)
        taken = []
        for _ in range(STEPS):
            clock = [time.process_time()]
            out = functools.reduce(lambda values, layer: layer(values), layers, rows)
            clock.append(time.process_time())
            out.sum().backward()
            clock.append(time.process_time())
            taken.append((clock[1] - clock[0], clock[2] - clock[1]))
        forward_s, backward_s = (median(part) / LAYERS for part in zip(*taken[WARM_UP:], strict=True))
        return forward_s, backward_s

    options: dict[str, Any] = {"compute_dtype": torch.bfloat16, "quant_type": "nf4", "compress_statistics": doubly}
    packed = both_passes(lambda: bitsandbytes.nn.Linear4bit(64, 64, bias=False, **options).to("cpu"))
    plain = both_passes(lambda: torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))
    return packed[0] - plain[0], packed[1] - plain[1]


def main() -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    half, whole = (of_a_layer(functools.partial(by_torch, None, dtype)) for dtype in (torch.bfloat16, torch.float32))
    stage3 = of_a_layer(functools.partial(by_deepspeed, 3))
    kernel_s = sum(half[:2]) / kernels_of_a_layer()
    say(f"a kernel: {kernel_s * 1e6:.1f} us")

    def tell(what: str, seconds: float) -> None:
        say(f"{what}: {seconds * 1e6:.0f} us, {seconds / kernel_s:.1f} kernels")

    tell("stage 3, a tensor, a pass", (sum(stage3[:2]) - sum(half[:2])) / 2 / TENSORS)
    for version in ("FSDP1", "FSDP2", "FSDP2 whole"):
        unit = of_a_layer(functools.partial(by_torch, version, torch.float32))
        tell(f"{version}, a tensor, a pass", (sum(unit[:2]) - sum(whole[:2])) / 2 / TENSORS)
        tell(f"{version}, a tensor, the backward pass", (unit[1] - whole[1]) / TENSORS)
    ddp = of_a_layer(functools.partial(by_torch, "DDP", torch.bfloat16))
    tell("DDP, a gradient", (ddp[1] - half[1]) / TENSORS)
    for stage in (1, 2):
        flat = of_a_layer(functools.partial(by_deepspeed, stage))
        tell(f"stage {stage}, a gradient", (flat[1] - half[1]) / TENSORS)
        tell(f"stage {stage}, a tensor of an update", (flat[2] - half[2]) / TENSORS)
    tell("a tensor of an update", whole[2] / TENSORS)
    kinds = (functools.partial(by_torch, None, torch.bfloat16, reentrant=each) for each in (False, True))
    hooked, reentrant = (sum(of_a_layer(kind)[:2]) for kind in kinds)
    tell("checkpointing of a layer that does not re-enter, over one that does", hooked - reentrant)
    if importlib.util.find_spec("bitsandbytes"):  # of the extra `bits`
        for doubly in (False, True):
            for which, seconds in zip(("forward", "backward"), of_a_quantized_product(doubly), strict=True):
                tell(f"a product with 4-bit weights{', scales too' * doubly}, {which}", seconds)


if __name__ == "__main__":
    main()
