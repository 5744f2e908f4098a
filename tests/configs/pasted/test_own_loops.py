"""A loop of one's own that clips scaled gradients, or gives all rows to each rank of DDP, is told by its script."""

from pathlib import Path

import pytest

from study.configs.pasted import own_loops
from study.configs.pasted.answer import answer
from study.configs.pasted.read import read
from study.known.rules import ROOT

SCALED = """scaler = torch.amp.GradScaler({given})
for rows in loader:
    {backward}
    {between}
    scaler.step(optimizer)
    scaler.update()
"""
BACKWARD, CLIP = (
    "scaler.scale(model(rows).loss / 4).backward()",
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
)
UNSCALE = "scaler.unscale_(optimizer)"
# What stands between the scaled backward pass and the step, and whether scaled gradients are clipped.
BETWEEN = {
    CLIP: True,
    f"{CLIP}\n    {UNSCALE}": True,
    f"if step % 4 == 0:\n        {CLIP}": True,
    "nn.utils.clip_grad_value_(model.parameters(), 1.0)": True,
    f"{UNSCALE}\n    {CLIP}": False,
    f"if scaler:\n        {UNSCALE}\n    {CLIP}": False,
    f"if not use_amp:\n        {CLIP}": False,
    "accelerator.clip_grad_norm_(model.parameters(), 1.0)": False,
    f"unscaled(optimizer)\n    {CLIP}\ndef unscaled(optimizer):\n    {UNSCALE}\nif 1:": False,
    "pass": False,
}


def ids(script: str, symptom: str = "") -> list[str]:
    return [each.id for each in answer(script, symptom, scripts={Path("train.py"): script}).found]


@pytest.mark.parametrize("between", BETWEEN)
def test_gradients_that_are_clipped_while_they_are_scaled_are_told(between):
    script = SCALED.format(given="", backward=BACKWARD, between=between)
    assert ("clipped_scaled" in ids(script)) is BETWEEN[between]


@pytest.mark.parametrize(("given", "backward"), [("enabled=False", BACKWARD), ("", "model(rows).loss.backward()")])
def test_where_nothing_is_scaled_clipping_needs_no_unscaling(given, backward):
    assert "clipped_scaled" not in ids(SCALED.format(given=given, backward=backward, between=CLIP))


LOADER = "loader = DataLoader(data, batch_size=4, shuffle=True)"
OWN = """from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
data = load()
{loader}
model = DDP(model)
for rows in loader:
    model(rows).loss.backward()
"""
# Loaders, and whether each rank reads all rows.
LOADERS = {
    LOADER: True,
    f"{LOADER}  # without a DistributedSampler": True,
    LOADER.replace("True", "False"): False,
    LOADER.replace("shuffle=True", "sampler=DistributedSampler(data)"): False,
    f"sampler = DistributedSampler(data) if ddp else None\n{LOADER}": False,
    f"data = data[rank::world_size]\n{LOADER}": False,
    f"data = data.shard(ranks, rank)\n{LOADER}": False,
    f"data = Rows(rank, world_size)\n{LOADER}": False,
    f"{LOADER}\nloader = accelerator.prepare(loader)": False,
    f"{LOADER}\nlightning.Trainer().fit(model, loader)": False,
    f"import deepspeed\n{LOADER}": False,
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_loader_that_ddp_does_not_divide_is_told(loader):
    script = OWN.format(loader=loader)
    assert ("not_divided" in ids(script)) is LOADERS[loader]
    told = answer(script, "ranks read the same data", scripts={Path("train.py"): script})
    assert (told.id == "not_divided") is LOADERS[loader]
    assert ("not known here" in told.unknown) is not LOADERS[loader]
    assert "not_divided" not in ids(script.replace("DDP(", "wrapped(").replace("nn.parallel", "nn.mine"))


def test_it_answers_no_hang():
    script = OWN.format(loader=LOADER)
    told = answer(script, "it hangs after step 100", scripts={Path("train.py"): script})
    assert "not_divided" not in [each.id for each in told.found]
    assert any("[not_divided]" in note for note in told.notes)


def test_it_stands_beside_what_explains_more():
    script = OWN.format(loader=LOADER)
    told = answer(f"step 1 loss 9 grad_norm nan\nstep 2 loss nan\n{script}", scripts={Path("train.py"): script})
    assert told.id == "norm-nan-first"
    assert any("train.py:4: DataLoader(data, batch_size=4, shuffle=True). " in note for note in told.notes)


def test_scripts_that_are_right_have_none():
    rooms = ("examples", "tests/rehearsal", "reproductions", "study")
    paths = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    assert len(paths) > 100
    for path in paths:
        assert [*own_loops.mistakes(read(""), {path: path.read_text()})] == [], path
