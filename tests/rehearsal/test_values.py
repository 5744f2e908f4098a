"""Masks of data choose from tensors without values: how many they choose is known."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from study.core.models.values import WithoutValues
from study.rehearsal.moments import Moments
from study.rehearsal.run import failed
from study.rehearsal.user_code import NoValue, Script
from study.rehearsal.values import LARGE_BYTES, OnOneDevice, Shapes, Values, on_cpu


def on_one_device() -> OnOneDevice:
    return OnOneDevice(Moments(None, None), Script(Path(__file__), {}))


MASK = torch.tensor([[True, False, True], [False, True, False]])


@pytest.mark.parametrize(
    ("choose", "shape"),
    [
        (lambda logits: logits[MASK], (3, 5)),
        (lambda logits: logits[MASK.to(torch.uint8)], (3, 5)),
        (lambda logits: logits[:, MASK[0]], (2, 2, 5)),
        (lambda logits: logits[torch.tensor([1]), MASK[0]], (2, 5)),
        (lambda logits: logits[..., 0].masked_select(MASK), (3,)),
        (lambda logits: logits.masked_select(MASK[..., None]), (15,)),
        (lambda logits: logits[0, 0].masked_select(torch.ones(2, 3, 5, dtype=torch.bool)), (30,)),
        (lambda logits: logits.repeat_interleave(torch.tensor([2, 1]), dim=0), (3, 3, 5)),
    ],
)
def test_a_mask_of_data_chooses_from_what_has_no_values(choose, shape):
    values = Values(Script(Path(__file__), {}))
    shapes = Shapes(values, WithoutValues())
    with shapes.only():
        logits = torch.empty(2, 3, 5)
    with values:
        chosen = choose(logits)
    assert isinstance(chosen, FakeTensor)
    assert chosen.shape == shape


def by_lengths(kind: str, made) -> tuple[torch.Size, list[torch.Size]]:
    """Return the shapes of a result of padded sequences, and of its gradients. `made`: within it weights are made."""
    with made:
        padded, lstm = torch.empty(2, 5, 4, requires_grad=True), torch.nn.LSTM(4, 3, batch_first=True)
    lengths = torch.tensor([3, 5])
    if kind == "ctc":
        labels, of_labels = torch.tensor([[1, 2, 1], [3, 1, 0]]), torch.tensor([3, 2])
        result = functional.ctc_loss(padded.transpose(0, 1), labels, lengths, of_labels)
        return result.shape, [each.shape for each in torch.autograd.grad(result, padded)]
    sequences = pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
    result, unpacked = pad_packed_sequence(lstm(sequences)[0], batch_first=True)
    assert unpacked.equal(lengths)
    return result.shape, [each.shape for each in torch.autograd.grad(result.sum(), (padded, *lstm.parameters()))]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the real zeros that what is unpacked is written to
@pytest.mark.parametrize("kind", ["lstm", "ctc"])
def test_shapes_that_lengths_give_are_those_of_real_tensors(kind):
    values = Values(Script(Path(__file__), {}))
    shapes = Shapes(values, WithoutValues())
    real = by_lengths(kind, contextlib.nullcontext())
    with values:
        assert by_lengths(kind, shapes.only()) == real


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, LARGE_BYTES])  # of 50 values: the latter would be 13 GB
def test_what_has_no_values_is_read_as_zeros_however_large_it_is(rows, dtype):
    """A Trainer hands the predictions of an evaluation to compute_metrics, as arrays."""
    values = Values(Script(Path(__file__), {}))
    shapes = Shapes(values, WithoutValues())
    shapes.has_begun = True
    with shapes.only():
        logits = torch.empty(rows, 50, dtype=dtype)
    with values, on_one_device():
        predictions = logits.numpy()
        assert np.asarray(logits).shape == predictions.shape == (rows, 50)
    assert predictions.dtype == np.float32
    assert not predictions[-1].any()


def test_a_number_is_a_gpu():
    """`local_rank` stands where a device may."""
    with on_one_device():
        made = torch.zeros(2, device=3).to(3, torch.float64).to(device=0)
    assert (made.device.type, made.dtype) == ("cpu", torch.float64)
    assert on_cpu(True) is True, "non_blocking, of `.to`"


@pytest.mark.parametrize(("given", "decides"), [({}, True), ({"loss": 2.3}, False)])
def test_a_line_that_compares_what_does_not_exist_is_noted(given, decides):
    script = Script(Path(__file__), given)
    values = Values(script)
    shapes = Shapes(values, WithoutValues())
    with shapes.only():
        loss = torch.empty(())
    with values, OnOneDevice(Moments(None, None), script):
        number = loss.item()
        assert f"{number:.1f}" == ("2.3" if given else "0.0")
        assert not script.decides, "it was only shown"
        assert (number < 2.0) == (not given)  # this line
    assert [line.rpartition("# ")[2] for line in script.decides.values()] == ["this line"] * decides


@pytest.mark.parametrize("read", [lambda logits: logits.numpy().__setitem__(0, 1.0), torch.Tensor.tolist])
def test_what_a_script_cannot_do_without_values_is_not_its_mistake(read):
    script = Script(Path(__file__), {})
    values = Values(script)
    shapes = Shapes(values, WithoutValues())
    shapes.has_begun = True
    with shapes.only():
        logits = torch.empty(LARGE_BYTES, 50)
    with (
        values,
        on_one_device(),
        pytest.raises((NoValue, ValueError)) as caught,
    ):
        read(logits)
    assert failed(caught.value, script).kind == "value"
