"""The callback for Lightning, driven in the order in which its Trainer calls it. Lightning itself is no dependency."""

import importlib.util
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from study.core.errors import Stop
from study.records import store
from study.watch.about import about


def imported(monkeypatch, name: str | None):
    """Import the callback where Lightning has this name, or is not there."""
    found = importlib.util.find_spec
    names = ("lightning", "pytorch_lightning")
    monkeypatch.setattr(importlib.util, "find_spec", lambda each: each == name if each in names else found(each))
    module = types.ModuleType("lightning.pytorch")
    module.Callback = object
    for each in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, each, module)
    monkeypatch.delitem(sys.modules, "study.watch.lightning", raising=False)
    return importlib.import_module("study.watch.lightning").LightningCallback


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
@pytest.mark.parametrize("error", [None, ValueError("a hole")])
def test_a_training_of_lightning_leaves_a_record(tmp_path, monkeypatch, name, error):
    callback = imported(monkeypatch, name)(tmp_path / "mine")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer = SimpleNamespace(strategy=SimpleNamespace(model=model), optimizers=[optimizer])
    callback.on_train_start(trainer, model)
    for step in range(14):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).pow(2).mean().backward()
        if step == 11:
            callback.on_validation_start(trainer, model)
        if step == 12:
            callback.on_save_checkpoint(trainer, model, {})
        optimizer.step()
    if error:
        callback.on_exception(trainer, model, error)
    else:
        callback.on_train_end(trainer, model)
    record = store.load(tmp_path / "mine")
    if error:
        assert (record.status, record.error.message) == ("failed", "ValueError: a hole")
    else:
        assert (record.status, record.observed.steps) == ("done", 14)
        assert len(record.time.step_s) == 3, "of 10 to 14, without the one that evaluates and the one that saves"


def test_what_enters_the_loss_is_read_where_only_training_step_is_called(tmp_path, monkeypatch):
    """Its modules are around somebody's model, whose forward pass a watch does not follow."""
    from tests.watch import field  # here, and not in each worker of the tests: the Trainer takes seconds

    callback = imported(monkeypatch, "lightning")(tmp_path / "mine")
    module = torch.nn.ModuleDict({"model": field.gpt2()})
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    trainer = SimpleNamespace(strategy=SimpleNamespace(model=module), optimizers=[optimizer])
    data = TensorDataset(field.sequences(48))
    callback.on_train_start(trainer, module)
    for step, (ids,) in enumerate(DataLoader(data, 4)):
        callback.on_train_batch_start(trainer, module, {"input_ids": ids}, step)
        logits = module["model"](input_ids=ids).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    module.eval()
    for step, (ids,) in enumerate(DataLoader(data, 4)):
        callback.on_validation_batch_start(trainer, module, {"input_ids": ids}, step)
    callback.on_train_end(trainer, module)
    found = [each.id for each in about(tmp_path / "mine").findings]
    assert found[:2] == ["targets_are_inputs", "evaluated_on_trained"]


def test_without_lightning_a_sentence_says_so(monkeypatch):
    with pytest.raises(Stop, match="Lightning is not installed"):
        imported(monkeypatch, None)
