"""Measures a rank's memory peaks and disk traffic, and in untimed steps every live storage by component."""

import contextlib
import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from study.core.machine import fields, text
from study.measure.hardware import CUDA
from study.measure.roles import before_each_update, claimed_storages, within_each_update
from study.records.sections import RankComponents, RankMemory


def reset_peaks() -> None:
    """Forget the peaks so far. Called after the warm-up steps."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):  # not Linux, or not allowed: `host_peak_bytes` then spans the whole process
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the kernel's own peak of the resident set


def peaks() -> RankMemory:
    """Return this rank's peaks since `reset_peaks`. The device's are None without a GPU."""
    result = RankMemory()
    if (kib := fields("/proc/self/status").get("VmHWM")) is not None:  # Linux
        result.host_peak_bytes = int(kib.split()[0]) * 1024
    if CUDA:
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        result.peak_allocated_bytes = torch.cuda.max_memory_allocated()
        result.peak_reserved_bytes = torch.cuda.max_memory_reserved()
        # Taken on the device by anyone: includes the CUDA context and NCCL, which PyTorch does not count.
        result.device_used_bytes = total_bytes - free_bytes
    return result


def io_bytes() -> dict[str, int | None]:
    """Return bytes that this process has moved so far, by the kernel. None if it does not count them.

    `wchar`: passed to write calls, to files and to gloo's sockets. `read_bytes` and `write_bytes`: what a disk read and
    wrote for it, by direct I/O, but not the page cache.
    """
    counts = fields("/proc/self/io")
    unknown = dict.fromkeys(("wchar", "read_bytes", "write_bytes"))
    return unknown | {name: int(count) for name, count in counts.items()}


def difference(after: int | None, before: int | None) -> int | None:
    """Return what was counted between two readings. None if one of them is unknown."""
    return None if after is None or before is None else after - before


# --- memory by component -------------------------------------------------------------------------------------------


@dataclass
class Live:
    """A live storage."""

    ref: weakref.ref
    size: int
    phase: str  # that allocated it
    role: str | None = None  # if one was marked
    number: int = 0  # in the order of allocation


class MemoryWatch(TorchDispatchMode):
    """Tracks every live storage through the operations of a step: the total, its peak, and the components at the peak.

    It sees what the Python dispatcher sees, on a CPU as on a GPU, so a machine without a GPU shows what a device would
    hold. The peak is known only afterwards, so it takes two steps. The first measures the peak. After `look_again`, the
    second sorts the live storages by role, found by address, at each new maximum close to that peak.
    """

    def __init__(
        self,
        device_type: str,
        roles: Callable[[], dict[int, str]],
        collect: bool = True,
        counts: Callable[[torch.Tensor], bool] | None = None,  # which tensors; all by default
        log: list[tuple[int, int]] | None = None,  # gets each storage's number and its bytes, 0 when it is freed
    ):
        super().__init__()
        self.counts = counts
        self.log = log
        self.device_type = device_type
        self.roles = roles
        self.collect = collect
        self.total = self.peak = 0
        self.close_to_peak: float | None = None
        self.at_peak: dict[str, int] | None = None
        self.sorts_every: float | None = None  # share of the peak by which it must rise, far from a known one
        self.gloo = dist.is_initialized() and dist.get_backend() == "gloo"
        self.failed: Exception | None = None
        self.is_updating = False
        self.in_ddp = False  # what the backward pass all-reduces are DDP's buckets
        self._live: dict[int, Live] = {}
        self.made = 0
        self._sorted_bytes = 0

    def __enter__(self):
        if self.collect:
            gc.collect()
        for item in gc.get_objects():
            if issubclass(type(item), torch.Tensor):  # by type: isinstance would read __class__ of lazy proxies
                self._add(item, "before")  # what no frame of a step allocates: weights, states, the data set
        self.peak = self.total
        # Resizing as well: FSDP frees and allocates with it, and the dispatcher does not see that.
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int):
            result = resize(storage, size)
            if (live := self._live.get(id(storage))) is not None:
                self._change(live, size)
                self._rise()
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        return super().__exit__(*error)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """What is made within is the optimizer step's: DeepSpeed flattens and copies gradients with autograd on."""
        self.is_updating = True
        try:
            yield
        finally:
            self.is_updating = False

    def look_again(self) -> None:
        """From now on, sort storages at each new maximum that is close to the last step's peak."""
        # Steps are not alike to the byte: where the last peak stood, this step may be a little lower.
        self.close_to_peak = 0.99 * self.peak
        self.peak = 0
        self.at_peak = None
        self._rise()

    def sort_again(self) -> None:
        """Sort once more if the peak is here: what was made last may have got a role since."""
        if self.at_peak is not None and self.total == self.peak:
            self.at_peak = self.by_role()

    def sort_from_here(self, every: float) -> None:
        """From now on, find a peak of its own, and sort storages whenever it has risen by this share."""
        self.sorts_every, self._sorted_bytes = every, 0
        self.peak, self.close_to_peak, self.at_peak = 0, None, None
        self._rise()

    def mark(self) -> None:
        """Remember the current roles, for storages that outlive the tensors that give them a role."""
        roles = self.roles()
        for live, storage in self._alive():
            if storage.nbytes():
                live.role = roles.get(storage._cdata, live.role)

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were there before the watch, or before it counted their kind."""
        for tensor in tensors:
            self._add(tensor, "before")
        self._rise()

    def of_the_backward_pass(self, since: int) -> None:
        """Take storages that were made after the one of this number for those of the backward pass."""
        for live in list(self._live.values()):
            if live.number > since:
                live.phase = "backward"

    def _of(self, tensor: torch.Tensor) -> Live | None:
        """Return the storage of a tensor. None if it is not followed, as on another device."""
        return self._live.get(id(tensor.untyped_storage()))

    def was_made_after(self, number: int, tensor: torch.Tensor) -> bool:
        live = self._of(tensor)
        return live is not None and live.number > number

    def numbers(self, wanted: set[str]) -> list[int]:
        """Return the numbers of live storages with one of these roles."""
        roles = self.roles()
        return [live.number for live, storage in self._alive() if roles.get(storage._cdata, live.role) in wanted]

    def _alive(self) -> list[tuple[Live, torch.UntypedStorage]]:
        # They are held while they are sorted: if gloo's threads freed one, the parts would not add up.
        storages = [(live, live.ref()) for live in list(self._live.values())]
        return [(live, storage) for live, storage in storages if storage is not None]

    def by_role(self) -> dict[str, int]:
        """Return live bytes by role. A storage without a role is named by the phase that allocated it."""
        alive = self._alive()
        roles = self.roles()
        sums: Counter[str] = Counter()
        for live, storage in alive:
            if live.size:
                sums[roles.get(storage._cdata) or live.role or PHASE_ROLES[live.phase]] += live.size
        return dict(sorted(sums.items()))  # in the order of names: the collector's has no meaning

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.prim.device.default:  # of tensors without values: over half of all calls
            return args[0].device
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it comes again with the local parts
        out = function(*args, **(kwargs or {}))
        try:
            self._follow(function, args, out)
        except Exception as error:  # an operation that this cannot follow must not end the training
            self.failed = self.failed or error
        return out

    def _follow(self, function, args, out) -> None:
        # gloo's reduce-scatter splits a tensor that the dispatcher has not seen: its own copy of the input.
        if function is torch.ops.aten.split.Tensor and self._of(args[0]) is None:
            self._set_apart(args[0])
        # Most operations give one tensor, and tree_leaves takes as long as a small operation.
        # That of a view is known already.
        for leaf in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        if self.in_ddp and function is torch.ops.c10d.allreduce_.default and self._phase() == "backward":
            for bucket in tree_leaves(args[0]):
                if (live := self._of(bucket)) is not None:
                    live.role = live.role or "buckets"
        self._rise()

    def _rise(self) -> None:
        """Raise the peak to the total if that is higher; close to the last step's peak, also sort what is live."""
        # A maximum far below the last peak will be exceeded, so it need not be exact.
        if self.gloo and self.total > self.peak and self.total >= (self.close_to_peak or 0):
            _let_threads_finish()
        if self.total > self.peak:
            self.peak = self.total
            if self.sorts_every is not None and self.peak > (1 + self.sorts_every) * self._sorted_bytes:
                self.at_peak = self.by_role()
                self._sorted_bytes = self.peak
            if self.close_to_peak is not None and self.peak >= self.close_to_peak:
                self.at_peak = self.by_role()
                self.peak = sum(self.at_peak.values())  # gloo's threads may have freed something meanwhile

    def _add(self, tensor: torch.Tensor, phase: str | None = None) -> None:
        """Follow a tensor's storage. By default it belongs to the current phase."""
        if tensor.device.type != self.device_type:
            return
        try:
            storage = tensor.untyped_storage()
            key = id(storage)
            if key not in self._live and self.counts is not None and not self.counts(tensor):
                return
            if key not in self._live and not isinstance(tensor, FakeTensor):
                storage.data_ptr()
        except (NotImplementedError, RuntimeError):
            return  # a tensor without memory, as torch.compile uses for tracing
        if key in self._live:
            self._change(self._live[key], storage.nbytes())  # resized in place
            return
        live = Live(weakref.ref(storage, lambda _: self._gone(key)), storage.nbytes(), phase or self._phase())
        live.number = self.made = self.made + 1
        self._live[key] = live
        self.total += live.size
        self._note(live, live.size)

    def _phase(self) -> str:
        """Return the part of a step that the current operation belongs to, as autograd knows it."""
        if torch._C._current_graph_task_id() != -1:  # within autograd's engine, also where checkpointing computes again
            return "backward"
        is_update = self.is_updating or not torch.is_grad_enabled()  # PyTorch's optimizers run under no_grad
        return "update" if is_update else "forward"

    def _change(self, live: Live, size: int) -> None:
        if live.phase != "gloo":  # gloo's copies do not count
            self.total += size - live.size
            live.size = size
            self._note(live, size)

    def _note(self, live: Live, size: int) -> None:
        if self.log is not None:
            self.log.append((live.number, size))

    def _set_apart(self, tensor: torch.Tensor) -> None:
        """Do not count gloo's copy: it runs a reduce-scatter as an all-reduce of a copy, which it then splits.

        Neither NCCL nor a virtual rank makes this copy, so it does not count as the arm's memory.
        """
        self._add(tensor, "gloo")
        if (live := self._of(tensor)) is not None:
            self.total -= live.size
            live.size = 0

    def _gone(self, key: int) -> None:  # called by Python in any thread, when nothing refers to a storage any more
        live = self._live.pop(key)
        self.total -= live.size
        self._note(live, 0)


def _let_threads_finish() -> None:
    """Wait, at most 20 ms, while another thread of this process is runnable.

    After a collective a gloo thread holds the tensor until it is scheduled again. On a busy machine that can be after
    the next allocation: 17.5 MB too many in one of seventy runs of bert-tiny under stage 1.
    """
    for _ in range(40):
        time.sleep(0.0005)  # gives up Python's lock as well, which the thread may need
        others = [task for task in Path("/proc/self/task").glob("*") if int(task.name) != threading.get_native_id()]
        if not any(text(f"{task}/stat").rpartition(")")[2].strip().startswith("R") for task in others):
            return


PHASE_ROLES = {"before": "other", "forward": "activations", "backward": "temporaries", "update": "temporaries"}


class ComponentLook(contextlib.ExitStack):
    """Memory at the peak of a step and after it, by role, from STEPS untimed steps in a row under `MemoryWatch`.

    Not `exact`, it leaves the counters of a user's own loop untouched, and does not collect garbage.
    """

    STEPS = 1 + 2  # the first look misses the components at the peak if its step peaks lower than the step before

    def __init__(self, model, optimizer, device_type: str, exact: bool = True):
        super().__init__()
        self.mode = MemoryWatch(device_type, lambda: claimed_storages(model, optimizer), collect=exact)
        self._optimizer = optimizer
        self._exact = exact
        self._peak_before: int | None = None
        self._looks: list[RankComponents] = []  # of each step, the first of which only finds how high the peak is

    def __enter__(self) -> "ComponentLook":
        # At the update every gradient exists. DDP's buckets outlive the gradients in them.
        self.enter_context(before_each_update(self._optimizer, self._mark))
        self.enter_context(within_each_update(self._optimizer, self.mode.updating))
        self.enter_context(self.mode)
        return self

    def _mark(self) -> None:
        try:
            self.mode.mark()
        except Exception as error:  # a mistake here must not end the user's update
            self.mode.failed = self.mode.failed or error

    def step_ended(self) -> None:
        """Look, after each of the steps. Every rank takes the same number: a step has collectives."""
        look = RankComponents(
            at_peak=self.mode.at_peak,
            after_step=self.mode.by_role(),
            tracked_peak_bytes=self.mode.peak,
            tracked_peak_step_before_bytes=self._peak_before,
            # Of the same step, by the allocator: includes libraries' memory.
            allocator_peak_bytes=peaks().peak_allocated_bytes if self._exact else None,
        )
        self._looks.append(look)
        self._peak_before = look.tracked_peak_bytes
        if len(self._looks) < self.STEPS:
            self.mode.look_again()
            if self._exact:
                reset_peaks()

    def components(self) -> RankComponents | None:
        """Return the result. None if no step was followed to its end, as when a loop ends early."""
        looks = self._looks[1:] or self._looks
        # The look that found the components; of two, the one with the higher peak.
        found = max(looks, key=lambda each: (each.at_peak is not None, each.tracked_peak_bytes), default=None)
        if found is None:
            return None
        return found.model_copy(update={"after_step": looks[-1].after_step})


def memory_by_component(step, model, optimizer, device_type: str) -> RankComponents | None:
    """Take three untimed steps, on every rank, and return memory at the peak of a step and after it, by role."""
    with ComponentLook(model, optimizer, device_type) as look:
        for _ in range(look.STEPS):
            step()
            look.step_ended()
    if look.mode.failed:
        raise look.mode.failed
    return look.components()
