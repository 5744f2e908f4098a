"""Weights have shapes but no values. Data has values, and so has what is computed from data alone.

An operation with one argument without values gives a result without values; one of real tensors alone runs.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from study.core.models.values import WithoutValues
from study.measure.traffic import MOVES_NOTHING
from study.rehearsal import ranks
from study.rehearsal.moments import Enough, Moments
from study.rehearsal.user_code import NoValue, Script

aten = torch.ops.aten
COMPARES = {aten.gt, aten.lt, aten.ge, aten.le, aten.eq, aten.ne}
# Operations that take indices, with the dimension of their first argument that limits them, and what it counts.
INDEXED = {aten.embedding.default: (0, "rows of an embedding"), aten.nll_loss_forward.default: (-1, "classes")}
READS = {aten._local_scalar_dense.default, aten.nonzero.default}
MASKED = {aten.index.Tensor, aten.masked_select.default}
# Data decides by masks, labels and lengths. A larger tensor, such as labels beside each word of a vocabulary, would
# fill the host.
LARGE_BYTES = 2**26
NEEDS_VALUES = "DynamicOutputShapeException", "DataDependentOutputException", "UnsupportedFakeTensorException"
# Said by PyTorch of tensors without values, and by NumPy of the zeros in place of large ones.
HAS_NO_VALUES = ".numpy() is not supported for tensor subclasses", "assignment destination is read-only"


class Values(TorchDispatchMode):
    """Answers where the value of a tensor without values is read, and fills in collectives of real tensors."""

    shapes: "Shapes"

    def __init__(self, script: Script, agreement: ranks.Agreement | None = None, most_collectives: int | None = None):
        super().__init__()
        self.agreement = agreement
        self.most_collectives = most_collectives
        self.script = script
        self.collectives: list[tuple[str, str | None, int | None]] = []
        self._rest = WithoutValues()

    def note(self, collective: str, elements: int | None = None) -> None:
        self.collectives.append((collective, self.script.place(), elements))
        if len(self.collectives) == self.most_collectives:
            raise Enough

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in READS and isinstance(args[0], FakeTensor):
            return self._chosen(args[0]) if function is aten.nonzero.default else self._read(args[0])
        if function.overloadpacket in COMPARES and args[0].dim() == 0 and isinstance(args[0], FakeTensor):
            value = self.script.named_value()
            if value is not None:
                return function(torch.tensor(value), *args[1:], **(kwargs or {}))
        if function is aten._grouped_mm.default:
            return self._rest.__torch_dispatch__(function, types, args, kwargs)
        if function in BY_LENGTHS and isinstance(args[0], FakeTensor):
            with self.shapes.only():
                return BY_LENGTHS[function](*args)
        check_range(function, args)
        function, args = self._known(function, args)
        result = function(*args, **(kwargs or {}))
        if function.namespace in ("c10d", "_c10d_functional"):
            self._collective(function, args)
        if isinstance(result, FakeTensor) and (changed := _changed(function, args, kwargs)) is not None:
            return changed
        if (
            self.shapes.has_begun
            and not self.shapes.real
            and type(result) is torch.Tensor
            and result.nbytes > LARGE_BYTES
        ):
            with self.shapes.only():
                return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype)
        return result

    def _known(self, function, args: tuple) -> tuple[Any, tuple]:
        """Return an operation and its arguments so that the shape of its result is known."""
        if function in MASKED:
            return aten.index.Tensor, self._by_positions(*args)
        if function in ranks.BY_ELEMENTS:  # the fake group copies, and so goes by shapes
            return function, (args[0].view(-1), args[1].reshape(-1), *args[2:])
        return function, args

    def _collective(self, function, args) -> None:
        name = function._schema.name.partition("::")[2]
        if name in MOVES_NOTHING:  # a rank that drops what it gathered waits for nothing, and stops nobody
            return
        self.note(name.strip("_"), ranks.elements(function, args))
        ranks.fill_in(function, args)
        if self.agreement is not None:
            with _disable_current_modes():
                self.agreement.note(function, args)

    def _chosen(self, mask: FakeTensor) -> torch.Tensor:
        """Return positions, as many as --value says: a router that weights decide has no others."""
        count = self.script.named_value()
        if count is None:
            what = f"it chooses some of {mask.numel():,} elements by values that do not exist here"
            remedy = "where your script does, --value NAME=COUNT says how many, with a NAME that stands in the line"
            raise NoValue(f"{what}. What to do: {remedy}.")
        with self.shapes.only():
            return torch.empty(int(count), mask.dim(), dtype=torch.int64)

    def _by_positions(self, tensor: torch.Tensor, chosen: list[torch.Tensor | None] | torch.Tensor) -> tuple:
        """Return a tensor and indices without masks: how much a mask chooses is known, whatever it chooses from."""
        if isinstance(chosen, torch.Tensor):  # `masked_select` lets both have fewer dimensions
            shape = torch.broadcast_shapes(tensor.shape, chosen.shape)
            tensor, chosen = tensor.expand(shape), [chosen.expand(shape)]
        indices: list[torch.Tensor | None] = []
        for index in chosen:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
            elif isinstance(index, FakeTensor):
                indices += self._chosen(index).unbind(1)
            else:
                with _disable_current_modes():
                    indices += index.nonzero().unbind(1)
        return tensor, indices

    def _read(self, tensor: FakeTensor) -> float | bool:
        read = self.script.value_of(tensor)
        if tensor.dtype == torch.bool:
            return bool(read)
        return read if tensor.is_floating_point() else int(read)


def packed(padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences one after the other, and how many go on at each place. Lengths are data, and so have values."""
    with _disable_current_modes():
        go_on = (lengths > torch.arange(int(lengths.max()))[:, None]).sum(1)
        tokens = int(lengths.sum())
    return padded.new_empty(tokens, *padded.shape[2:]), go_on


def ctc(rows: torch.Tensor, _targets, _lengths, lengths: torch.Tensor | list[int], *_) -> tuple[torch.Tensor, ...]:
    """Return a loss for each sequence, and what is kept: for each token, and each blank beside one."""
    with _disable_current_modes():
        longest = 2 * int(max(lengths)) + 1
    return rows.new_empty(len(lengths)), rows.new_empty(len(lengths), len(rows), longest)


# Operations whose results have shapes that lengths give.
BY_LENGTHS: dict[Any, Callable] = {
    aten._pack_padded_sequence.default: packed,
    aten._ctc_loss.default: ctc,
    aten._ctc_loss.Tensor: ctc,
}


def check_range(function, args) -> None:
    """Raise IndexError for what ends a kernel of a GPU: a token or a label that a model has no row or class for."""
    if function not in INDEXED:
        return
    dimension, what = INDEXED[function]
    limited, indices = args[:2]
    if isinstance(limited, FakeTensor) and not isinstance(indices, FakeTensor) and indices.numel():
        largest, limit = int(indices.max()), limited.shape[dimension]
        if largest >= limit:
            raise IndexError(f"index {largest} is out of range: the model has {limit} {what}")


def _changed(function, args, kwargs) -> torch.Tensor | None:
    """Return the tensor with values that an operation writes to. What comes back is another, in the same place."""
    written = (kwargs or {}).get("out")
    if written is None and function._schema.name.endswith("_") and args:
        written = args[0]
    return written if type(written) is torch.Tensor else None


class OnOneDevice(TorchFunctionMode):
    """The GPU is this process's memory: `cuda` names it, and a tensor without values can be read as zeros."""

    def __init__(self, moments: Moments, script: Script):
        super().__init__()
        self.moments = moments
        self.script = script

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in ("numpy", "tolist", "__array__") and args and isinstance(args[0], FakeTensor):
            with self.moments.made_on_host():
                return zeros_instead(args[0], name)
        if name == "item" and isinstance(args[0], FakeTensor) and args[0].is_floating_point():
            is_given = self.script.named_value() is not None
            value = function(*args, **kwargs)
            return value if is_given else self.script.unknown(value)
        if function is torch.device and args and isinstance(args[0], int):  # of the machine's accelerator
            return torch.device("cuda", *args)
        if name == "cuda":
            return args[0]
        # Other names of the host are also those of this process's GPU, such as `.to(accelerator.device)`.
        goes_to_host = name == "cpu" or (
            name == "to" and len(args) > 1 and isinstance(args[1], str) and args[1] == "cpu"
        )
        if self.moments.copies_to_host and goes_to_host and isinstance(args[0], FakeTensor):
            with self.moments.made_on_host():
                copy = function(*args, **kwargs)
                return copy.detach().clone() if copy is args[0] else copy
        if (
            name in ("isnan", "isinf", "isfinite")
            and isinstance(args[0], FakeTensor)
            and args[0].numel() <= LARGE_BYTES
        ):
            with _disable_current_modes():  # a rehearsed training goes well
                return torch.full(args[0].shape, name == "isfinite")
        if "device" in kwargs:
            kwargs = kwargs | {"device": on_cpu(kwargs["device"])}
        if name == "to" and len(args) > 1:
            args = (args[0], *map(on_cpu, args[1:]))
        if name in ("pin_memory", "record_stream"):
            return args[0]
        return function(*args, **kwargs)


def zeros_instead(tensor: FakeTensor, name: str) -> np.ndarray | list:
    """Return zeros as an array or as a list. Of large ones all rows are one, which cannot be written to."""
    dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
    if tensor.numel() * dtype.itemsize <= LARGE_BYTES:
        return getattr(torch.zeros(tensor.shape, dtype=dtype), name)()
    if name == "tolist":
        raise NoValue(f"a list of {tensor.numel()} values that do not exist here is asked for")
    # One row stands for all. With one number NumPy's argmax is a hundred times as slow.
    return np.broadcast_to(torch.zeros(tensor.shape[-1], dtype=dtype).numpy(), tensor.shape)


def on_cpu(device):
    """Return this process's memory for any name of a GPU. Other values stay."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    is_number = isinstance(device, int) and not isinstance(device, bool)  # as in `x.to(local_rank)`
    if is_number or (isinstance(device, str) and device.partition(":")[0] == "cuda"):
        return "cpu"
    return device


class Shapes:
    """The mode in which new tensors have no values, and where it is entered: once, however deep."""

    def __init__(self, values: Values, watch: TorchDispatchMode, real: bool = False):
        self.real = real  # nothing is without values
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.values = values
        self.watch = watch
        self.has_begun = False  # the training
        values.shapes = self
        self._inside = False

    def only(self) -> AbstractContextManager[None]:
        """Within it new tensors have no values."""
        return self._entered(True)

    def not_only(self) -> AbstractContextManager[None]:
        """Within `only`: new tensors have values again, such as an optimizer's count of its steps."""
        return self._entered(False)

    @contextlib.contextmanager
    def _entered(self, inside: bool) -> Iterator[None]:
        if self.real or self._inside == inside:
            yield
            return
        self._inside = inside
        mode = self.mode if inside else contextlib.nullcontext()
        try:
            # The watch counts what this mode makes, so it is above it. Its own __enter__ begins a count. The same modes
            # below would see each operation a second time.
            with _disable_current_modes(), mode, self.values, _Again(self.watch):
                yield
        finally:
            self._inside = not inside

    def wrap(self, function: Callable) -> Callable:
        """Return a function in which new tensors have no values."""
        if self.real:
            return function

        def call(*args, **kwargs):
            with self.only():
                for argument in args:
                    # Some losses make the gradient of a head themselves, from zeros. A bucket without values cannot
                    # take the place of its memory.
                    if isinstance(argument, FakeTensor) and type(argument.grad) is torch.Tensor:
                        argument.grad = torch.empty_like(argument.grad)
                return function(*args, **kwargs)

        call.__wrapped__ = function  # type: ignore[attr-defined]
        call.__name__ = getattr(function, "__name__", "call")
        call.__doc__ = function.__doc__
        return call

    def wrap_all(self, owner: type) -> None:
        """Let new tensors of every method of a class have no values."""
        for name, method in list(vars(owner).items()):
            if isinstance(method, staticmethod):
                setattr(owner, name, staticmethod(self.wrap(method.__func__)))
            elif callable(method) and not isinstance(method, type) and name not in ("__del__", "__getattr__"):
                setattr(owner, name, self.wrap(method))

    def weights(self) -> None:
        """From now on no new parameter has values, whoever makes it: `nn.Parameter(torch.empty(...))`."""
        if self.real:
            return
        parameter: Any = torch.nn.Parameter
        original = parameter.__new__

        def make(cls, data=None, requires_grad=True):
            if data is not None and type(data) in (torch.Tensor, torch.nn.Parameter) and data.device.type == "cpu":
                with self.only():
                    data = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype)
            return original(cls, data, requires_grad)

        parameter.__new__ = staticmethod(make)


class _Again:
    """A dispatch mode once more on the stack, without beginning anew."""

    def __init__(self, mode: TorchDispatchMode):
        self.mode = mode

    def __enter__(self) -> None:
        TorchDispatchMode.__enter__(self.mode)

    def __exit__(self, *error) -> None:
        TorchDispatchMode.__exit__(self.mode, *error)
