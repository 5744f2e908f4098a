"""Small loops of one rank, as people write them for more than one model, pass or precision: what is named in each."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn import functional

from study.records import store
from study.watch import WatchCallback, watch
from study.watch.about import about

STEPS = 24
WIDTH = 16
# A tiny model costs nothing but its states and the time between steps.
COSTS = {"states_replicated", "activations_dominate", "outside_steps", "straggler"}


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, WIDTH, generator=made)
    return inputs, inputs.sum(1, keepdim=True)


def layers(out: int = 1) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, out))


def watched(folder: Path, model, optimizer):
    return watch(model=model, optimizer=optimizer, run_dir=folder)


def generated(folder: Path) -> None:
    """A generator and a discriminator in turn."""
    generator, model = torch.nn.Linear(WIDTH, WIDTH), layers()
    first, optimizer = (torch.optim.Adam(each.parameters(), 1e-3) for each in (generator, model))
    with watched(folder, model, optimizer):
        for step in range(STEPS):
            real, _ = rows(step)
            made = generator(torch.randn(8, WIDTH))
            optimizer.zero_grad()
            (model(made.detach()).mean() - model(real).mean()).backward()
            optimizer.step()
            first.zero_grad()
            (-model(made)).mean().backward()
            first.step()


def looks_ahead(folder: Path, to_none: bool = True) -> None:
    """SAM: the gradients of a first pass serve a step to where those of the second are taken."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with watched(folder, model, optimizer):
        for step in range(STEPS):
            inputs, targets = rows(step)
            functional.mse_loss(model(inputs), targets).backward()
            moves = [0.01 * each.grad for each in model.parameters()]
            with torch.no_grad():
                for each, move in zip(model.parameters(), moves, strict=True):
                    each += move
            optimizer.zero_grad(set_to_none=to_none)
            functional.mse_loss(model(inputs), targets).backward()
            with torch.no_grad():
                for each, move in zip(model.parameters(), moves, strict=True):
                    each -= move
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)


def looks_ahead_with_zeros(folder: Path) -> None:
    looks_ahead(folder, to_none=False)


def train(folder: Path, model, each=lambda step: None, **half) -> None:
    """Train, and call `each` after each update, with the optimizer."""
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), 1e-3)
    with watched(folder, model, optimizer):
        for step in range(STEPS):
            inputs, targets = rows(step)
            with torch.autocast("cpu", **half) if half else torch.enable_grad():
                outputs = model(inputs)
            functional.mse_loss(outputs.float(), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            each(step, optimizer)


def unfrozen_on_the_way(folder: Path) -> None:
    """The head, which is a hundredth of the model, trains first."""
    model = layers()
    model[0].requires_grad_(False)
    head = next(model[2].parameters())
    assert head.numel() < 0.1 * sum(each.numel() for each in model.parameters())

    def unfreeze(step: int, optimizer) -> None:
        if step == STEPS // 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters()})

    model[2].bias.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    model.append(torch.nn.Linear(1, 1))
    train(folder, model, unfreeze)


def half_without_a_scale(folder: Path) -> None:
    train(folder, layers(), lambda *_: None, dtype=torch.float16)


def go_on(folder: Path, **given) -> None:
    """A Trainer that goes on from its checkpoint."""
    data = [{"inputs": each, "labels": each.sum()} for each, _ in map(rows, range(8))]

    def trainer(*callbacks, steps: int) -> transformers.Trainer:
        arguments = {"max_steps": steps, "save_steps": 4, "use_cpu": True, "report_to": [], "disable_tqdm": True}
        arguments |= {"save_strategy": "steps", "learning_rate": 1e-3} | given
        where = transformers.TrainingArguments(str(folder.parent / "out"), **arguments)
        return transformers.Trainer(Alone(), where, train_dataset=data, callbacks=list(callbacks))

    trainer(steps=4).train()
    trainer(WatchCallback(folder), steps=STEPS).train(resume_from_checkpoint=True)


class Alone(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, inputs, labels):
        return {"loss": functional.mse_loss(self.layers(inputs).mean((1, 2)), labels)}


def checkpoint_of_weights(folder: Path) -> None:
    go_on(folder, save_only_model=True)


def healthy_checkpoint(folder: Path) -> None:
    go_on(folder)


def healthy_descent(folder: Path) -> None:
    """Plain SGD has no states."""
    go_on(folder, save_only_model=True, optim="sgd")


def unknown_to_the_optimizer(folder: Path) -> None:
    """The head was replaced after the optimizer was made."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model[2] = torch.nn.Linear(256, 1)
    with watched(folder, model, optimizer):
        for step in range(STEPS):
            inputs, targets = rows(step)
            functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()


LOOPS = {
    checkpoint_of_weights: ["moments_lost"],
    healthy_checkpoint: [],
    healthy_descent: [],
    unknown_to_the_optimizer: ["weights_unchanged"],
    generated: ["cleared_on_purpose"],
    looks_ahead: ["cleared_on_purpose"],
    looks_ahead_with_zeros: ["cleared_on_purpose"],
    unfrozen_on_the_way: [],
    half_without_a_scale: ["loss_unscaled"],
}


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_what_is_wrong_with_a_loop_is_named_and_nothing_else(loop, tmp_path):
    folder = tmp_path / "run"
    loop(folder)
    assert sorted({each.id for each in about(folder).findings} - COSTS) == LOOPS[loop]


def test_unchanged_weights_have_names(tmp_path):
    unknown_to_the_optimizer(tmp_path / "run")
    said = [each.sentence for each in about(tmp_path / "run").findings if each.id == "weights_unchanged"]
    assert said[0].endswith("what they were, such as 2.weight, 2.bias")


def test_losses_are_read_in_fp16_without_a_scale(tmp_path):
    half_without_a_scale(tmp_path / "run")
    run = store.load(tmp_path / "run")
    assert len(run.loss.train) == STEPS
    assert run.watched.targets.read > 0
