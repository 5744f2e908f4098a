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


def train(folder: Path, model, each=lambda *_: None, **half) -> None:
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


def healthy_default_device(folder: Path) -> None:
    """It is a mode of functions, which calls what takes the place of `Tensor.backward` a second time."""
    with torch.device("cpu"):
        train(folder, layers(), lambda *_: None)


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


def swapped(folder: Path) -> None:
    """The best weights are loaded into another model, and the optimizer updates the first."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with watched(folder, model, optimizer):
        for step in range(STEPS):
            if step == STEPS // 3:
                model = copy.deepcopy(model)
            inputs, targets = rows(step)
            optimizer.zero_grad()
            functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()


def healthy_part(folder: Path) -> None:
    """After some steps the loop calls the layers one by one."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with watched(folder, model, optimizer):
        for step in range(STEPS):
            inputs, targets = rows(step)
            outputs = model(inputs) if step < STEPS // 3 else model[2](model[1](model[0](inputs)))
            functional.mse_loss(outputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()


def averaged(folder: Path, put_back: bool) -> None:
    """Each evaluation is of averaged weights."""
    model = layers()
    mean = [each.detach().clone() for each in model.parameters()]

    def evaluate(step: int, _) -> None:
        for each, now in zip(mean, model.parameters(), strict=True):
            each.lerp_(now.detach(), 0.1)
        if step % 4 != 3:
            return
        kept = [each.detach().clone() for each in model.parameters()]
        for each, now in zip(mean, model.parameters(), strict=True):
            now.data.copy_(each)
        model.eval()
        with torch.no_grad():
            model(rows(step)[0])
        model.train()
        for each, now in zip(kept, model.parameters(), strict=True):
            if put_back:
                now.data.lerp_(each, 1.0)

    train(folder, model, evaluate)


def averaged_left_in(folder: Path) -> None:
    averaged(folder, put_back=False)


def healthy_averaged(folder: Path) -> None:
    averaged(folder, put_back=True)


def healthy_slow_weights(folder: Path) -> None:
    """Lookahead: in every fourth step weights go back halfway, and an evaluation follows."""
    model = layers()
    slow = [each.detach().clone() for each in model.parameters()]

    def go_back(step: int, _) -> None:
        if step % 4 == 3:
            for each, now in zip(slow, model.parameters(), strict=True):
                each.lerp_(now.detach(), 0.5)
                now.data.copy_(each)
        if step % 8 == 7:
            with torch.no_grad():
                model.eval()(rows(step)[0])
            model.train()

    train(folder, model, go_back)


def seeded_in_each_step(folder: Path) -> None:
    train(folder, layers(), lambda *_: torch.manual_seed(0))


def healthy_seeds(folder: Path) -> None:
    train(folder, layers(), lambda step, _: torch.manual_seed(step))


def healthy_without_dropout(folder: Path) -> None:
    """Nothing is drawn, so that the seed does not matter."""
    model = layers()
    model[1].p = 0.0
    train(folder, model, lambda *_: torch.manual_seed(0))


def of_tokens(folder: Path, classes_second) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(WIDTH, 32), torch.nn.Linear(32, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with watched(folder, model, optimizer):
        for step in range(STEPS):
            ids = torch.randint(WIDTH, (8, 12), generator=torch.Generator().manual_seed(step))
            logits = model(ids[:, :-1])
            functional.cross_entropy(classes_second(logits), ids[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()


def view_exchanges(folder: Path) -> None:
    of_tokens(folder, lambda logits: logits.view(8, WIDTH, 11))


def reshape_exchanges(folder: Path) -> None:
    of_tokens(folder, lambda logits: logits[:4].repeat(2, 1, 1)[:, :, :].float().reshape(8, WIDTH, 11))


def healthy_transpose(folder: Path) -> None:
    of_tokens(folder, lambda logits: logits.transpose(1, 2))


LOOPS = {
    swapped: ["model_not_run"],
    healthy_part: [],
    averaged_left_in: ["moved_in_evaluation"],
    healthy_averaged: [],
    healthy_slow_weights: [],
    seeded_in_each_step: ["dropout_repeated"],
    healthy_seeds: [],
    healthy_without_dropout: [],
    view_exchanges: ["view_for_transpose"],
    reshape_exchanges: ["view_for_transpose"],
    healthy_transpose: [],
    checkpoint_of_weights: ["moments_lost"],
    healthy_checkpoint: [],
    healthy_descent: [],
    unknown_to_the_optimizer: ["weights_unchanged"],
    generated: ["cleared_on_purpose"],
    looks_ahead: ["cleared_on_purpose"],
    looks_ahead_with_zeros: ["cleared_on_purpose"],
    unfrozen_on_the_way: [],
    healthy_default_device: [],
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


def test_autocast_is_seen_also_where_a_model_trains_in_evaluation_mode(tmp_path):
    train(tmp_path / "run", layers().eval(), dtype=torch.bfloat16)
    run = store.load(tmp_path / "run")
    assert run.observed.autocast == "bf16"
    assert "eval_while_training" in {each.id for each in about(tmp_path / "run").findings}


def test_autocast_of_an_evaluation_with_gradients_is_not_that_of_the_training(tmp_path):
    model = layers()

    def evaluate(step: int, _) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.eval()(rows(step)[0])
        model.train()

    train(tmp_path / "run", model, evaluate)
    assert store.load(tmp_path / "run").observed.autocast is None
