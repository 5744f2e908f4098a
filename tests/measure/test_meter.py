"""The meters, on allocations of known size: totals, peaks and roles by hand; the clock; the kernel's own peaks."""

import mmap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from study.measure import memory
from study.measure.clock import Clock
from study.measure.hardware import CUDA
from study.measure.memory import MemoryWatch
from study.measure.roles import within_each_update

KIB = 1024
MIB = 2**20


def zeros(kib: int, **more) -> torch.Tensor:
    return torch.zeros(kib * KIB // 4, **more)


def watching(roles=None) -> MemoryWatch:
    return MemoryWatch("cpu", roles or dict)


def addresses(**named: torch.Tensor) -> dict[int, str]:
    return {tensor.untyped_storage()._cdata: role for role, tensor in named.items()}


# --- memory: the total and its peak --------------------------------------------------------------------------------


def test_total_and_peak_by_hand():
    """8, then 24, then 16, then 20 KiB: the peak is 24, wherever it ends. Views are the memory of what they show."""
    with watching() as watch:
        start = watch.total
        a = zeros(8)
        b = zeros(16)
        assert watch.total - start == 24 * KIB
        views = [a.view(2, -1), a[10:20], a.add_(1), a.detach()]
        del a
        assert watch.total - start == 24 * KIB, "the views hold it"
        del views
        assert watch.total - start == 16 * KIB
        c = zeros(4)
        assert (watch.total - start, watch.peak - start) == (20 * KIB, 24 * KIB)
        del b, c
        assert watch.total == start


class Wrapper:
    """As DeepSpeed's around an optimizer: what it copies in a step is made with autograd on."""

    __module__ = "deepspeed.by_hand"
    optimizer = SimpleNamespace()

    def step(self, kib: int) -> None:
        assert torch.is_grad_enabled()
        zeros(kib)


def test_what_only_autograd_holds_is_counted():
    """The saved output of exp outlives the Python tensor, until the backward pass has used it."""
    with watching() as watch:
        leaf = zeros(32, requires_grad=True)
        start = watch.total
        loss = leaf.exp().sum()
        assert watch.total - start == 32 * KIB + 4, "exp's output, and the sum"
        loss.backward()
        assert watch.total - start == 32 * KIB + 4, "it is gone, and the gradient is there"
        leaf.grad = None
        assert watch.total - start == 4


def test_a_resized_storage_is_followed():
    """As stage 3 resizes: seen at the next operation that gives a tensor on it."""
    with watching() as watch:
        start = watch.total
        a = zeros(16)
        a.untyped_storage().resize_(0)
        a.detach()
        assert watch.total == start
        a.untyped_storage().resize_(32 * KIB)
        a.detach()
        assert watch.total - start == 32 * KIB
        del a
        assert watch.total == start


# --- memory: what stands at the peak -------------------------------------------------------------------------------


class Training:
    """A weight of 64 KiB, its gradient, and a buffer."""

    def __init__(self):
        self.weight = zeros(64, requires_grad=True)
        self.buffer = zeros(24)

    def roles(self) -> dict[int, str]:
        gradient = {} if self.weight.grad is None else addresses(gradients=self.weight.grad)
        return addresses(weights=self.weight, buckets=self.buffer) | gradient


def test_what_a_busy_thread_has_yet_to_let_go_is_not_at_the_peak(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    held, go = [], threading.Event()

    def thread() -> None:
        go.wait()
        sum(range(30_000))  # it is runnable, and has not come to it yet
        held.clear()

    worker = threading.Thread(target=thread)
    worker.start()
    try:
        with watching() as watch:
            before = watch.total
            held.append(zeros(32))
            go.set()
            kept = zeros(16)
            assert watch.total - before == kept.nbytes, "the test's own thread came to its end"
            assert watch.peak - before == 32 * KIB
    finally:
        worker.join()
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("where", "role"),
    [
        ("forward", "activations"),
        ("backward", "temporaries"),
        ("recomputation", "temporaries"),  # a forward pass within the backward pass
        ("update", "temporaries"),
        ("engine", "temporaries"),  # DeepSpeed's step copies gradients with autograd on, around the optimizer's own
    ],
)
def test_what_has_no_role_is_named_by_its_phase(where, role):
    """A peak of 1 MiB planted in each phase, and asked for by what it is called there."""
    training, engine = Training(), Wrapper()

    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if where in ("backward", "recomputation"):
                with torch.set_grad_enabled(where == "recomputation"):
                    zeros(1024)
            return gradient.clone()

    with watching(training.roles) as watch:
        known = watch.by_role()
        for _ in range(2):
            assert watch.at_peak is None, "where the peak stands is not known before a step is over"
            loss = Spike.apply(training.weight.exp()).sum()
            if where == "forward":
                zeros(1024)
            loss.backward()
            with within_each_update(engine, watch.updating):
                engine.step(1024 if where == "engine" else 1)
            assert "step" not in vars(engine), "it is as it was"
            with torch.no_grad():
                if where == "update":
                    zeros(1024)
                training.weight.grad = None
            if watch.close_to_peak is None:
                watch.look_again()
    assert (watch.at_peak["weights"], watch.at_peak["buckets"]) == (64 * KIB, 24 * KIB)
    assert watch.at_peak.get("other") == known.get("other")
    assert watch.at_peak[role] >= 1 * MIB
    assert sum(watch.at_peak.values()) == watch.peak
    others = {"activations", "temporaries"} - {role}
    assert all(watch.at_peak.get(other, 0) < 1 * MIB for other in others)


def test_what_gets_its_role_after_it_was_made_has_it_at_the_peak():
    """As a bucket of DeepSpeed, which is a list's once it exists. It may be the peak itself."""
    shown: dict[int, str] = {}
    with watching(lambda: shown) as watch:
        zeros(48)
        watch.look_again()
        bucket = zeros(48)
        shown |= addresses(buckets=bucket)
        assert "buckets" not in watch.at_peak
        watch.sort_again()
        assert watch.at_peak["buckets"] == 48 * KIB
        del bucket
        watch.sort_again()
    assert watch.at_peak["buckets"] == 48 * KIB, "it is no more where the peak was"


def test_a_mark_outlives_the_tensor_that_showed_it():
    """As DDP's buckets outlive the gradients that are views of them. Without a mark the role goes with the tensor."""
    shown: dict[int, str] = {}
    with watching(lambda: shown) as watch:
        bucket = zeros(48)
        shown |= addresses(gradients=bucket)
        assert watch.by_role()["gradients"] == 48 * KIB
        shown.clear()
        assert "gradients" not in watch.by_role()
        shown |= addresses(gradients=bucket)
        watch.mark()
        shown.clear()
        assert watch.by_role()["gradients"] == 48 * KIB


# --- clock ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(CUDA, reason="the clock of a GPU sees kernels, not sleeps")
def test_the_clock_counts_ticks():
    """A time per tick, window after window; the barrier is called once, before the clock starts."""
    clock, waited = Clock(), []

    def barrier():
        time.sleep(0.05)
        waited.append(len(clock.step_s))

    for ticks in (3, 1, 0):
        with clock.window(barrier) as tick:
            for _ in range(ticks):
                time.sleep(0.01)
                tick()
    assert len(clock.step_s) == 4
    assert waited == [0, 3, 4]
    assert all(step_s >= 0.01 for step_s in clock.step_s)
    assert min(clock.step_s) < 0.05, "the barrier's time is in none"


# --- the kernel's own numbers --------------------------------------------------------------------------------------


def can_reset() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


needs_reset = pytest.mark.skipif(not can_reset(), reason="this kernel does not let a process forget its memory peak")


@needs_reset
def test_host_peak_rises_by_what_is_touched_and_is_forgotten():
    slack = 1 * MIB  # the kernel keeps its count in batches of pages per core
    memory.reset_peaks()
    before_bytes = memory.peaks().host_peak_bytes
    block = mmap.mmap(-1, 64 * MIB)  # not from the heap, which may hand out what it holds already
    block[:: mmap.PAGESIZE] = bytes(64 * MIB // mmap.PAGESIZE)
    block.close()
    freed_bytes = memory.peaks().host_peak_bytes
    assert freed_bytes - before_bytes >= 64 * MIB - slack
    memory.reset_peaks()
    assert memory.peaks().host_peak_bytes <= freed_bytes - 64 * MIB + slack


def test_a_storage_may_be_let_go_while_roles_are_marked():
    """By the loop over the storages itself, which holds each for a moment, or by a thread of gloo's."""
    held = []

    class LettingGo(dict):
        def get(self, key, default=None):
            held.clear()
            return default

    with MemoryWatch("cpu", LettingGo) as watch:
        held.extend(torch.ones(1000) for _ in range(3))
        before = watch.total
        watch.mark()
        assert watch.total < before


def test_the_components_are_those_of_a_step_like_the_one_before():
    """A first step may take more: it builds what the others find."""
    model, more = torch.nn.Linear(64, 64), iter([10**6, 0, 0])
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        first = torch.ones(next(more))
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        del first

    held = memory.memory_by_component(step, model, optimizer, "cpu")
    assert sum(held.at_peak.values()) == held.tracked_peak_bytes == held.tracked_peak_step_before_bytes < 10**6
