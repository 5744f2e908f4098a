"""What rank 0 holds, from the beginning of a script to its last update: a `MemoryWatch` over all of it."""

import functools
import gc
import sys
import time
import weakref
from collections.abc import Mapping
from importlib.metadata import version
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer
from torch.utils._pytree import tree_leaves

from study.measure import roles
from study.measure.memory import MemoryWatch
from study.records import store
from study.records.schema import Record
from study.records.sections import Components, Memory, Observed, RankComponents, RankMemory
from study.rehearsal.lengths import Lengths
from study.rehearsal.mistakes import Mistakes
from study.rehearsal.moments import COARSE, Moments
from study.rehearsal.request import Answer, Request
from study.rehearsal.values import Shapes
from study.watch.session import new_record

# What offloading keeps on the host, by role. Gradients go there as soon as they are reduced.
WITH_OPTIMIZER = {"master", "moments", "gradients", "staging", "swap"}
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed")
PROGRESS_S = 1.0  # between two signs of it
NO_OPTIMIZER = SimpleNamespace(state={})


class Count:
    """Follows a script's updates, and what is held meanwhile."""

    shapes: Shapes

    def __init__(self, request: Request, progress: Path):
        self.request = request
        self.progress = progress  # the file that says where the script is
        self._told_s = time.monotonic()
        self._layers: dict[int, str] = {}  # of the model, by the ids of its modules
        self._layer = ""  # that was called last
        self.answer = Answer()
        self.lengths = Lengths(request, self.answer)
        self.record: Record | None = None
        device = "cuda" if request.real and torch.cuda.is_available() else "cpu"
        self.watch = MemoryWatch(device, self._roles, collect=False, counts=self._counts, log=self.answer.log)
        self.moments = Moments(request, self.watch)
        self.engine: Any = None  # DeepSpeed's
        self.optimizer: Any = None  # whose steps end the updates
        self.model: Any = None
        # Other optimizers that step, as a GAN's second, with their models; and those that did so in this update.
        self._beside: weakref.WeakKeyDictionary[Any, weakref.ref] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self.mistakes = Mistakes()
        self._model: Any = None  # without its wrappers
        self._modules: set[int] = set()  # of it, and others that were called
        self._others: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._on_host: dict[int, weakref.ref] = {}  # storages that were there before the training, such as a data set
        self._calls = 0  # of the model that trains, which is known after the first update
        self._called_at = 0  # storages that had been made when the outermost module was called
        self._given: list[int] = []  # the shape of the last batch of a loader
        self._given_at: str | None = None
        self._read: list[int] = []  # the shape of the update's largest batch
        self._parts: dict[str, int] | None = None
        self._after_step: dict[str, int] | None = None
        torch_optimizer.register_optimizer_step_pre_hook(self._before_update)
        torch_optimizer.register_optimizer_step_post_hook(self._after_update)
        nn.modules.module.register_module_forward_pre_hook(self._before_forward)

    # --- what counts

    def _counts(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is the GPU's: it has no values, or it was made in a pass, as masks are."""
        if time.monotonic() > self._told_s + PROGRESS_S:
            self._tell()
        # Of real tensors, data sets are the host's, and batches take their bytes on a GPU once they are moved there.
        if self.moments.on_host or tensor.device.type == "meta":
            return False
        if isinstance(tensor, FakeTensor) or self.request.real:
            return True
        return self.shapes.has_begun and id(tensor.untyped_storage()) not in self._on_host

    def _roles(self) -> dict[int, str]:
        if self.model is None:
            return {}
        claimed = roles.claimed_storages(self.model, self.optimizer)
        for optimizer, of in list(self._beside.items()):
            if (model := of()) is not None:
                claimed |= roles.claimed_storages(model, optimizer)
        for other in self._others:
            theirs = roles.claimed_storages(other, NO_OPTIMIZER)
            claimed = dict.fromkeys(theirs, "other_models") | claimed
        return claimed

    # --- what happens

    def take_batch(self, batch) -> None:
        """Note what a loader gives."""
        self.answer.batches += 1
        self._tell()
        leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
        self.answer.batch_bytes = max(self.answer.batch_bytes, sum(each.nbytes for each in tensors))
        if tensors and not self.moments.is_over:
            self._given = list(max(tensors, key=torch.Tensor.numel).shape)
            self._given_at = self.shapes.values.script.place()

    def _tell(self) -> None:
        """Say where the script is, and what shows that it goes on within a long micro-batch."""
        doing = "importing and building"
        if self.shapes.has_begun or self.answer.batches:
            doing = f"step {self.answer.updates + 1} of {self.request.steps + 1}"  # one more shows the peak's parts
        if self.moments.is_over:
            doing = "after its updates"
        batch = f", batch {self.answer.batches}" if self.answer.batches else ""
        made = f", {len(self.answer.log):,} tensors made or freed" if self.answer.log else ""
        self.progress.write_text(f"{doing}{batch}{self._layer}{made}")
        self._told_s = time.monotonic()

    def _before_forward(self, module, inputs) -> None:
        trains = module.training and torch.is_grad_enabled()
        self.moments.called(trains)
        self._layer = self._layers.get(id(module), self._layer)
        if torch.is_grad_enabled():  # an evaluation between two updates is no part of them
            self.mistakes.outermost = self.mistakes.outermost or module  # which may train in evaluation mode
            if module is self.mistakes.outermost:
                self._called_at = self.watch.made
            self._note_read(inputs)
            self.answer.batch, self.answer.batch_at = self._given, self._given_at
        if self._model is not None and not self.moments.is_over:
            # Without adapters a model is its own reference: it is called without gradients, and as it trains.
            self._calls += module is self._model and (module.training or torch.is_grad_enabled())
            if id(module) not in self._modules:
                self._note_other(module)
        if trains and not self.shapes.has_begun:
            self._leave_out_data()
            self.mistakes.begin(module)
            for name, each in module.named_modules():
                if isinstance(each, nn.ModuleList):
                    for number, layer in enumerate(each):
                        self._layers[id(layer)] = f", {name}.{number} ({number + 1} of {len(each)})"
            self.answer.loading_peak_bytes = self.watch.peak
            self.answer.first_step_at = len(self.answer.log)
            self.watch.peak = self.watch.total

    def _note_read(self, inputs: tuple) -> None:
        """Note what a module reads that has values: a batch. The loader may be a batch ahead of the model."""
        if not inputs or type(inputs[0]) is not torch.Tensor or self.request.real:
            return
        if self.watch.was_made_after(self._called_at, inputs[0]):  # by the model, such as a table of distances
            return
        if inputs[0].ndim and inputs[0].numel() > prod(self._read, start=1 if self._read else 0):
            self._read = list(inputs[0].shape)

    def _note_other(self, module) -> None:
        """Note what a step calls beside the model that trains: a reference model, a teacher. Wrappers are none."""
        inside = set(map(id, module.modules()))
        if not inside & self._modules and next(module.parameters(), None) is not None:
            self._others.add(module)
            self.answer.has_other_models = True
        self._modules |= inside

    def _leave_out_data(self) -> None:
        """Do not count what exists before the training and has values, but for the buffers of models."""
        if self.request.real:
            self.shapes.has_begun = True
            return
        objects = gc.get_objects()
        modules = [each for each in objects if issubclass(type(each), nn.Module) and "_buffers" in vars(each)]
        buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
        self.shapes.has_begun = True
        self.watch.follow(buffers)
        known = set(map(id, buffers))
        for item in objects:
            if type(item) is torch.Tensor and item.layout == torch.strided and id(item) not in known:
                storage = item.untyped_storage()
                key = id(storage)
                self._on_host[key] = weakref.ref(storage, functools.partial(self._forget, key))

    def _forget(self, key: int, _: weakref.ref) -> None:
        self._on_host.pop(key, None)

    def _before_update(self, optimizer, *_) -> None:
        if self.engine is None:
            self._know(optimizer)
        if self.watch.close_to_peak is not None:
            self.watch.mark()

    def _know(self, optimizer) -> None:
        """Note who steps. Of several optimizers the first ends the updates, or one that steps twice without it."""
        if self.optimizer in (None, optimizer):
            self.optimizer = optimizer
            self._stepped.clear()
        elif optimizer in self._stepped:
            self._beside[self.optimizer] = weakref.ref(self.model)
            self.model, self.optimizer = self._beside.pop(optimizer)() or self.model, optimizer
            self._stepped.clear()
        else:
            self._stepped.add(optimizer)
            if optimizer not in self._beside:
                self._beside[optimizer] = weakref.ref(model_of(optimizer) or self.model or nn.Module())

    def _after_update(self, optimizer, *_) -> None:
        if self.engine is None and optimizer is self.optimizer:
            self.end_update()

    def end_update(self) -> None:
        """Note an update's peak. After the last one that is asked for, one more shows what the peak consists of."""
        answer = self.answer
        if (loader := self.moments.updated()) is not None:  # of a stream, it is neither true nor false
            self.mistakes.loader = loader
            self.lengths.trained(loader)
        self.mistakes.updated(self.record.watched if self.record else None)
        if self.moments.is_over:
            self.moments.end_if_seen()
            return
        answer.updates += 1
        answer.peaks.append(self.watch.peak)
        if self.watch.device_type == "cuda":
            answer.cuda_peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        answer.batches_read.append(self._read)
        self._read = []
        calls, self._calls = self._calls, 0
        if answer.updates == 1:
            self._describe()
            self.watch.sorts_every = COARSE
        else:
            answer.calls = calls
        if answer.updates < self.request.steps:
            self.watch.peak = self.watch.total
        elif answer.updates == self.request.steps:
            self._parts = self.watch.at_peak
            self.watch.sorts_every = None
            self.watch.look_again()
        else:
            self._parts = self.watch.at_peak or self._parts  # this update may have had shorter rows
            self._after_step = self.watch.by_role()
            self.moments.end_if_seen()

    def _describe(self) -> None:
        if self.engine is not None:
            self.model, self.optimizer = self.engine, self.engine.optimizer
        else:
            self.model = model_of(self.optimizer) or self.mistakes.outermost
        self.watch.in_ddp = isinstance(self.model, DistributedDataParallel)
        name = f"{Path(self.request.script).stem}-virtual"
        accelerator = alive("accelerate.accelerator", "Accelerator")
        trainer = alive("transformers.trainer", "Trainer")
        arguments = trainer.args if trainer else None
        self.record = new_record(name, accelerator, self.model, self.optimizer, arguments)
        self.record.observed.virtual_ranks = self.request.ranks
        self.record.observed.dtypes = roles.dtypes(self.model, self.optimizer)
        self.mistakes.look(self.record, self.model, self.optimizer, accelerator)
        self._model = model = roles.plain_model(self.model)
        self._modules = set(map(id, model.modules()))
        for module in gc.get_objects():  # a copy with averaged weights is called in no step
            if issubclass(type(module), nn.Module) and module._parameters and id(module) not in self._modules:
                self._others.add(module)
        adapters = getattr(model, "peft_config", {})
        self.answer.lora_rank = next((getattr(each, "r", None) for each in adapters.values()), None)

    def finish(self, folder: Path) -> Answer:
        """Complete the record, and return the answer."""
        answer = self.answer
        if self.record is None:
            return answer
        on_host = host_roles(self.record.observed)
        answer.host = self.watch.numbers(on_host) if on_host else []
        parts = self._parts or (self.watch.at_peak if answer.updates > 1 else None)
        after = self._after_step or self.watch.by_role()
        self.moments.close()
        answer.moments = self.moments.done
        rank = RankComponents(at_peak=parts, after_step=after, tracked_peak_bytes=max(answer.peaks))
        self.record.memory = Memory(per_rank=[RankMemory()], components=Components(per_rank=[rank]))
        self.record.observed.steps = answer.updates
        self.record.observed.accumulation = self.mistakes.log.passes or self.record.observed.accumulation
        answer.batch = answer.batch or max(answer.batches_read, key=prod, default=[])  # of a script without a loader
        rows = answer.batch[0] if answer.batch else None
        self.record.watched.rows_per_pass = min(filter(None, (rows, self.mistakes.most_rows)), default=None)
        if self._beside:
            names = {type(each).__name__: None for each in (self.optimizer, *self._beside)}
            self.record.observed.optimizer = " and ".join(names)
        if any(of() is not self.model for of in self._beside.values()):  # passes of several models are no micro-batches
            self.record.observed.accumulation = self.record.watched.passes_cleared = None
            self.record.watched.gradients_kept = 0
        answer.releases = {name: version(name) for name in LIBRARIES if name in sys.modules}
        config: Any = getattr(self._model, "config", None)
        answer.vocabulary = getattr(config, "vocab_size", None)
        if hasattr(config, "to_json_string"):
            (folder / "config.json").write_text(config.to_json_string(use_diff=False))
        self.record.status = "done"
        self.record.finished_utc = store.now_utc()
        store.write(folder, self.record)
        return answer


def host_roles(seen: Observed) -> set[str]:
    """Return the roles of what is kept on the host."""
    on_host = set()
    if "optimizer" in seen.offloads:
        on_host |= WITH_OPTIMIZER
    if "weights" in seen.offloads:
        on_host.add("weights")
    return on_host


def alive(module: str, name: str) -> Any:
    """Return the object of a class of an imported module, or of one that inherits from it. None if there is none."""
    # Not of a package: transformers imports its Trainer when it is asked for it.
    kind = getattr(sys.modules.get(module), name, None)
    if kind is None:
        return None
    return next((each for each in gc.get_objects() if issubclass(type(each), kind)), None)


def model_of(optimizer) -> nn.Module | None:
    """Return the outermost module with a parameter of an optimizer: the model in all wrappers. None if none has it."""
    parameter = optimizer.param_groups[0]["params"][0]
    parents: dict[int, nn.Module] = {}
    owner = None
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module) or "_modules" not in vars(module):
            continue
        for child in module.children():
            parents[id(child)] = module
        if any(each is parameter for each in module._parameters.values()):
            owner = module
    while id(owner) in parents:
        owner = parents[id(owner)]
    return owner
