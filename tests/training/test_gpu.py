"""What only an NVIDIA GPU can show: every arm on CUDA, and the instruments against the allocator.

pytest -m gpu tests/training/test_gpu.py      some ten minutes; the first run compiles DeepSpeed's operators besides
"""

import time

import pytest
import torch

from study.core import doctor
from study.core.arms import NAMES, all_paths, load_arm, read
from study.core.settings import TrainerFlags, resolve
from study.measure.clock import Clock
from study.records.schema import Record
from study.records.sections import MemoryCap
from study.training import models, tasks
from study.training.data import load_data
from tests.conftest import DECODERS_ALONE, launch, traceback_of_ours

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

# Not 64 tokens: attention by cuDNN in PyTorch 2.11 is said to end in no number where masked rows are half of 128.
REVIEWS = ("--task", "imdb", "--data", "embedded", "--init", "random")
TINY = (*REVIEWS, "--model", "bert-tiny", "--no-tf32", "--steps", "20", "--train-rows", "200", "--sequence", "128")
LARGE = (*REVIEWS, "--model", "bert-large", "--steps", "25", "--log-every", "20", "--train-rows", "400")


@pytest.fixture(scope="session")
def on_gpu(tmp_path_factory, cache):
    """A function that trains an arm on one GPU with some flags, once a session, and gives its record."""
    runs: dict[tuple, Record] = {}

    def train(arm: str, *flags: str) -> Record:
        if stop := doctor.why_not(read(all_paths()[arm]), gpus=1):
            pytest.skip(f"{arm}: {stop.what}")
        if (arm, flags) not in runs:
            launcher = () if arm == "single" else ("--num_processes", "1")
            run = launch(arm, tmp_path_factory.mktemp("gpu") / arm, *flags, cache=cache, launcher=launcher)
            assert run.code == 0, run.output
            runs[arm, flags] = run.record
        return runs[arm, flags]

    return train


# --- every arm -----------------------------------------------------------------------------------------------------


def backend_on_a_gpu(name: str) -> str | None:
    """What Accelerate 1.15 opens: gloo too for FSDP2's parameters in host memory."""
    arm = load_arm(name)
    if arm.distributed_type == "NO":
        return None
    return "cuda:nccl,cpu:gloo" if arm.fsdp and arm.offload_param == "cpu" else "nccl"


@pytest.mark.parametrize("arm", [name for name in NAMES if name not in ("hsdp", *DECODERS_ALONE)])  # hsdp needs four
def test_every_arm_trains_and_loses_what_one_gpu_alone_loses(arm, on_gpu):
    """In fp32 without TF32, twenty steps, dropout on. The sums of some kernels are in another order each time."""
    record, alone = on_gpu(arm, *TINY), on_gpu("single", *TINY)
    seen = record.observed
    assert (seen.device, seen.ranks, seen.backend) == ("cuda", 1, backend_on_a_gpu(arm))
    assert (seen.wrapper == "DistributedDataParallel") == (arm == "ddp")
    assert record.loss.train == pytest.approx(alone.loss.train, abs=2e-4)
    assert record.loss.train[-1] < record.loss.train[0]
    (rank,) = record.memory.per_rank
    assert rank.peak_reserved_bytes >= rank.peak_allocated_bytes > 4 * 4_000_000, "at least the weights"
    assert rank.device_used_bytes >= rank.peak_allocated_bytes, "the context comes on top"
    assert min(record.time.step_s) > 0
    assert record.hardware.devices[0].memory_bytes > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_cast"])
@pytest.mark.parametrize("arm", ["single", "zero2", "zero3", "zero3_cpu"])
def test_sixteen_bits(arm, precision, on_gpu):
    """The trainer itself stops where the dtypes are not what the recipe says."""
    record, alone = on_gpu(arm, *TINY, "--precision", precision), on_gpu("single", *TINY, "--precision", precision)
    assert record.loss.train == pytest.approx(alone.loss.train, abs=0.05)
    assert (record.observed.loss_scale is not None) == (precision == "fp16")


@pytest.mark.parametrize("arm", ["zero1_cpu", "zero2_cpu", "zero3_cpu"])
def test_offloading_takes_deepspeeds_adam_and_spares_the_device(arm, on_gpu):
    record, without = on_gpu(arm, *LARGE), on_gpu(arm.removesuffix("_cpu"), *LARGE)
    assert record.observed.optimizer == "DeepSpeedCPUAdam"
    assert without.observed.optimizer == "AdamW"
    ((on_host,), (on_device,)) = (run.memory.per_rank for run in (record, without))
    spared = on_device.peak_allocated_bytes - on_host.peak_allocated_bytes
    assert spared > 8 * record.observed.parameters, "two moments of four bytes, at the least"


@pytest.mark.parametrize("arm", ["ddp", "zero2", "zero3_cpu"])
def test_a_virtual_rank_runs_with_values_and_without(arm, on_gpu):
    """Without values the device holds nothing, and what it would hold is what the rank with values does."""
    flags = (*TINY, "--virtual-ranks", "8")
    record, empty = on_gpu(arm, *flags), on_gpu(arm, *flags, "--init", "none")
    assert sum(count.bytes for count in record.traffic.per_rank[0].values()) > 0
    held, without = (run.memory.components.per_rank[0] for run in (record, empty))
    assert without.allocator_peak_bytes is None
    assert held.allocator_peak_bytes > 0
    assert without.tracked_peak_bytes == pytest.approx(held.tracked_peak_bytes, rel=0.01)


# --- instruments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["single", "ddp", "zero2", "zero3", "zero2_cpu", "zero3_cpu"])
def test_components_add_up_to_the_allocators_peak(arm, on_gpu):
    """Within 2 %: libraries take workspaces of the allocator that are no tensors, and it rounds up to 512 bytes.

    cuBLAS takes 32 MiB for each thread that calls it, so that what offloads needs more rows to be large enough.
    """
    record = on_gpu(arm, *LARGE, *(("--micro-batch", "16") if arm.endswith("_cpu") else ()))
    (held,), (rank,) = record.memory.components.per_rank, record.memory.per_rank
    assert sum(held.at_peak.values()) == held.tracked_peak_bytes
    assert held.tracked_peak_bytes == pytest.approx(held.allocator_peak_bytes, rel=0.02)
    # The timed steps are alike.
    assert rank.peak_allocated_bytes == pytest.approx(held.allocator_peak_bytes, rel=0.02)


def test_the_clock_of_events_agrees_with_the_hosts():
    """A piece of work that keeps the device busy for a while: both clocks see the same, within a tenth."""
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(10):
        a @ a
    torch.cuda.synchronize()
    clock, started = Clock(), time.perf_counter()
    with clock.window(lambda: None) as tick:
        for _ in range(20):
            for _ in range(10):
                a @ a
            tick()
    host_s = time.perf_counter() - started
    assert sum(clock.step_s) == pytest.approx(host_s, rel=0.1)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(("task", "model"), [("imdb", "bert-tiny"), ("wikitext", "gpt-tiny")])
def test_no_step_makes_the_gpu_wait(task, model, tmp_path):
    """Forward pass, backward pass and update under PyTorch's own alarm for anything that waits for the device."""
    settings = TrainerFlags(task=task, model=model, data="embedded", init="in_place", sequence=64, cache_dir=tmp_path)
    settings = resolve(settings, True)
    data, device = load_data(settings), torch.device("cuda")
    model = models.build_model(settings, models.model_config(settings, data.vocabulary), device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = [{name: rows[:8].pin_memory() for name, rows in data.train.items()} for _ in range(2)]
    try:
        for batch in batches:  # the first may do what is done once
            on_device = {name: rows.to(device, non_blocking=True) for name, rows in batch.items()}
            tasks.row_losses(settings, model, on_device)[0].mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_cap_is_kept_and_told(tmp_path, cache):
    """GPT-2 holds some 2 GB of states: it runs under 6 GiB, and under 1 GiB it is out of memory, and says so."""
    flags = ("--task", "wikitext", "--model", "gpt2", "--data", "embedded", "--init", "in_place", "--sequence", "128")
    flags = (*flags, "--steps", "4", "--warmup-steps", "2", "--eval-rows", "4", "--micro-batch", "2")
    roomy, tight = (
        launch("single", tmp_path / gib, *flags, "--memory-cap-gib", gib, cache=cache) for gib in ("6", "1")
    )
    assert roomy.code == 0, roomy.output
    assert roomy.record.memory.per_rank[0].peak_reserved_bytes <= 6 * 2**30
    assert roomy.record.observed.memory_cap == MemoryCap(bytes=6 * 2**30, emulated_by="PyTorch's allocator")
    assert (tight.code == 0, tight.record.status) == (False, "oom")
    assert "the device ran out of memory" in tight.record.error.message
    assert not traceback_of_ours(tight.output)
