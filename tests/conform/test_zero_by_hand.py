"""The five files of examples/zero_by_hand/ agree with each other, with `study conform`, and with DeepSpeed's stages."""

import re

import pytest
from conftest import ROOT, python, ranks_of

from study.conform.suite import PROPERTIES, Adapter

FOLDER = ROOT / "examples" / "zero_by_hand"
NAMES = ("data_parallel", "stage1", "stage2", "stage3")
BYTES = 4 * 4 * (256 * 256 + 256)  # of the weights in fp32
# Weights, gradients and moments that a rank of two holds, and what it sends in a step, in BYTES.
EXPECTED = {
    "data_parallel": (1, 1, 2, 1),
    "stage1": (1, 1, 1, 1.5),
    "stage2": (1, 0.5, 1, 1),
    "stage3": (0.5, 0.5, 1, 1.5),
}
RUN_ALL = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import torch.distributed as dist
from one_process import run
from data_parallel import DataParallel
from stage1 import Stage1
from stage2 import Stage2
from stage3 import Stage3
for kind in (DataParallel, Stage1, Stage2, Stage3):
    run(kind)
"""
BESIDE_DEEPSPEED = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import deepspeed, torch
import torch.distributed as dist
from one_process import Residual
from stage1 import Stage1
from stage2 import Stage2
from stage3 import Stage3

dist.init_process_group("gloo")
rank = dist.get_rank()

def made():
    torch.manual_seed(0)
    model = Residual()
    return model, torch.optim.Adam(model.parameters(), lr=0.1, eps=0.1)  # with 1e-8, rounding of tiny gradients grows

for stage, kind in enumerate((Stage1, Stage2, Stage3), 1):
    mine = kind(*made())
    model, optimizer = made()
    # DeepSpeed 0.19.8 clips at 1 by default, and Adam nearly hides it: it divides by the size of the gradient
    config = {{"gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True,
              "zero_force_ds_cpu_optimizer": False, "zero_optimization": {{"stage": stage}}}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(5):
        rows, targets = torch.randn(2, 2, 4, 256)[:, rank]
        ours = mine.forward_backward(rows, targets)
        mine.step()
        theirs = engine(rows, targets)
        engine.backward(theirs)
        engine.step()
        assert abs(ours.item() / theirs.item() - 1) < 1e-6, (stage, ours.item(), theirs.item())
    if rank == 0:
        print("stage", stage, "agrees", flush=True)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> dict[str, tuple[str, ...]]:
    """What each file prints: its losses, and four numbers of bytes."""
    alone = python(FOLDER / "one_process.py")
    output = alone.stdout + ranks_of(RUN_ALL, tmp_path_factory.mktemp("by-hand")).output
    losses = re.findall(r"ranks: (.*)", output)
    held = re.findall(r"weights ([\d,]+), gradients ([\d,]+), moments ([\d,]+) bytes\nsent in a step: ([\d,]+)", output)
    return {name: (losses, *held) for name, losses, held in zip(("one_process", *NAMES), losses, held, strict=True)}


def test_the_losses_are_those_of_the_file_before(printed):
    alone = [float(loss) for loss in printed["one_process"][0].split()]
    parallel = [float(loss) for loss in printed["data_parallel"][0].split()]
    assert parallel == pytest.approx(alone, rel=1e-6)  # two halves of the rows are added in another order
    assert {printed[name][0] for name in NAMES} == {printed["data_parallel"][0]}  # the same sums, to the bit


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_and_sends_what_its_stage_says(name, printed):
    found = [int(number.replace(",", "")) / BYTES for number in printed[name][1:]]
    assert found == pytest.approx(EXPECTED[name], abs=1e-6)


def test_each_stage_agrees_with_deepspeed(tmp_path):
    done = ranks_of(BESIDE_DEEPSPEED, tmp_path)
    assert done.output.count("agrees") == 3, done.output


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_is_held_to_one_process(name, ranks):
    adapter = Adapter(name, FOLDER / "adapter.py", "mine", settings={"file": name})
    for wanted in ("adamw", "accumulation-4", "four-ranks"):
        answer = ranks.ask(adapter, PROPERTIES[wanted])
        assert answer.answer == "holds", (wanted, answer.words)
