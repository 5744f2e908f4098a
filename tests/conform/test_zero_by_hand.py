"""The five files of examples/zero_by_hand/ agree with each other, with `study conform`, and with DeepSpeed's stages."""

import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import harness
import held
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.torch_version import TorchVersion

from study.conform.suite import PROPERTIES, Adapter
from study.core.arms import load_arm
from study.core.recipes import RECIPES
from study.predict import PlaceFlags, Question, StepFlags, TrainingFlags, estimate, named
from study.records.runs import load
from study.report import of_record
from tests.conftest import ROOT, python, ranks_of

FOLDER = ROOT / "examples/zero_by_hand"
FAULTS = ROOT / "study/known/faults.toml"
NAMES = ("data_parallel", "stage1", "stage2", "stage3")
OF = {2: "two", 3: "three", 8: "eight"}
BYTES = 4 * 4 * (256 * 256 + 256)  # of the weights in fp32
LAYER = 1 / 4  # of the four layers; a bias is 1/257 of a layer
MATRIX = LAYER * 256 / 257
# Weights, gradients and moments that a rank of two holds, the most at a time, and what it sends in a step, in BYTES.
EXPECTED = {
    "data_parallel": (1, 1, 2, 4, 1),
    "stage1": (1, 1, 1, 3, 1),
    # At the last matrix of the backward pass its gradient is whole, and the part that it becomes is not there yet.
    "stage2": (1, 0.5, 1, 2.5 + MATRIX / 2, 1),
    "stage3": (0.5, 0.5, 1, 2 + MATRIX / 2 + MATRIX, 1.5),  # and its weights are gathered; the bias is done
}
# With four passes stages 2 and 3 reduce each gradient in each of them, and stage 3 gathers in each of them.
SENT_IN_FOUR_PASSES = {"data_parallel": 1, "stage1": 1, "stage2": 4 * 0.5 + 0.5, "stage3": 4 * 1.5}
TIMES = {  # of README's words
    "2": lambda m: 2,
    "3": lambda m: 3,
    "m + 1": lambda m: m + 1,
    "2 m + 1": lambda m: 2 * m + 1,
    "3 m": lambda m: 3 * m,
}
RUN_ALL = f"""
import os, sys
sys.path.insert(0, {str(FOLDER)!r})
import torch.distributed as dist
from harness import run
from data_parallel import DataParallel
from stage1 import Stage1
from stage2 import Stage2
from stage3 import Stage3

dist.init_process_group("gloo")  # once: a rank could ask the store of the run before, while it closes
end = os._exit
dist.init_process_group = dist.destroy_process_group = os._exit = lambda *_: None
for kind in (DataParallel, Stage1, Stage2, Stage3):
    run(kind)
os._exit = end
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

EACH_ALONE = f"""
import os, runpy, sys
sys.path.insert(0, {str(FOLDER)!r})
import torch._dynamo  # once, and not in each: an optimizer imports it

for name in {NAMES!r}:
    if not (child := os.fork()):
        runpy.run_path({str(FOLDER)!r} + f"/{{name}}.py", run_name="__main__")
        sys.exit()
    print(name, "ends with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

IN_THE_UPDATE = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import torch
import torch.distributed as dist
from harness import held_bytes
from one_process import Residual
from stage1 import Stage1

dist.init_process_group("gloo")
model = Residual()
optimizer = torch.optim.Adam(model.parameters())
training = Stage1(model, optimizer)
optimizer.register_step_post_hook(lambda *_: print("in the update:", *held_bytes(training), flush=True))
training.forward_backward(*torch.randn(2, 4, 256))
training.step()
"""


@pytest.fixture(scope="module")
def said_alone() -> str:
    """What one_process.py prints."""
    return python(FOLDER / "one_process.py").stdout


@pytest.fixture(scope="module")
def printed(said_alone, tmp_path_factory) -> dict[tuple[str, int], tuple[list[float], list[float]]]:
    """What each file prints, by its name and the passes of a step: its losses, and five sizes in BYTES."""
    folder = tmp_path_factory.mktemp("by-hand")
    output = said_alone
    for passes in (1, 4):
        code = f"import sys; sys.argv[1:] = ['--micro-batches', '{passes}']{RUN_ALL}"
        launched = ranks_of(code, folder)
        assert launched.code == 0, launched.output
        output += launched.output
    assert output.count("equal to one process: yes, the losses differ by ") == 8, "each says it itself"
    assert output.count("the other files are compared with these losses") == 1, "the first has nothing before it"
    named = [("one_process", 1), *((name, passes) for passes in (1, 4) for name in NAMES)]
    return dict(zip(named, numbers_in(output), strict=True))


def numbers_in(output: str) -> list[tuple[list[float], list[float]]]:
    """The losses of each run that is printed, and its sizes in BYTES."""
    runs = []
    # A message of another rank may stand before a name, in the same line.
    for block in re.split(r"(?=(?:OneProcess|DataParallel|Stage\d), \d ranks?: )", output)[1:]:
        losses, *sizes = block.splitlines()
        numbers = re.findall(r"[\d,]{5,}", " ".join(sizes[:2]))
        runs.append((
            [float(loss) for loss in losses.split(": ")[1].split()],
            [int(number.replace(",", "")) / BYTES for number in numbers],
        ))  # fmt: skip
    return runs


def test_its_notebook_shows_what_the_files_print(printed):
    cells = json.loads((ROOT / "notebooks/by_hand.ipynb").read_text())["cells"]
    *each, broken = ["".join(shown["data"]["text/plain"]) for cell in cells for shown in cell.get("outputs", [])]
    for name, (losses, sizes) in zip(("one_process", *NAMES), numbers_in("".join(each)), strict=True):
        assert losses == pytest.approx(printed[name, 1][0], rel=2e-7)
        assert sizes == printed[name, 1][1]
    assert "equal to one process: NO, the losses differ by 3e-02" in broken


def test_the_losses_are_those_of_the_file_before(printed):
    alone, parallel = printed["one_process", 1][0], printed["data_parallel", 1][0]
    assert parallel == pytest.approx(alone, rel=1e-6)  # two halves of the rows are added in another order
    said = "With one micro-batch on two ranks `data_parallel.py` and the three stages print the same digits"
    assert said in " ".join(held.README.read_text().split())
    for passes in (1, 4):
        assert printed["data_parallel", passes][0] == pytest.approx(alone, rel=1e-6)
        for name in NAMES:
            assert printed[name, passes][0] == pytest.approx(printed["data_parallel", passes][0], rel=2e-7)
    assert all(printed[name, 1][0] == parallel for name in NAMES), "the same sums, to the bit"


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_and_sends_what_its_stage_says(name, printed):
    assert printed[name, 1][1] == pytest.approx(EXPECTED[name], abs=1e-6)
    assert printed[name, 4][1][-1] == pytest.approx(SENT_IN_FOUR_PASSES[name], abs=1e-6)


def test_stage_1_keeps_no_whole_gradient_in_the_update(tmp_path):
    """A view of its part would keep the whole, as would the weight."""
    done = ranks_of(IN_THE_UPDATE, tmp_path)
    assert f"in the update: {BYTES} {BYTES // 2} {BYTES}\n" in done.output


def test_the_table_of_its_readme_is_what_the_files_print(printed):
    table = held.table()
    assert [*table.index] == ["one_process", *NAMES]
    for name, row in table.iterrows():
        *holds, sent = printed[name, 1][1] + [0] * (name == "one_process")
        expected = [*holds, sent, *(printed[name, 4][1][-2:] if name in NAMES else (4, 0))]
        assert [*row] == pytest.approx([number * BYTES / 1e6 for number in expected], abs=0.006), name


def test_its_readme_shows_what_stage_2_prints(printed):
    shown = held.README.read_text().partition("`stage2.py` prints:\n\n")[2].partition("\n\n")[0]
    losses, *sizes, _, _ = shown.splitlines()
    assert [float(loss) for loss in losses.split(": ")[1].split()] == pytest.approx(printed["stage2", 1][0], rel=2e-7)
    numbers = [int(number.replace(",", "")) / BYTES for number in re.findall(r"[\d,]{5,}", " ".join(sizes))]
    assert numbers == printed["stage2", 1][1]


def test_what_is_sent_is_the_multiple_that_its_readme_has(printed, tmp_path):
    """With two ranks an all-reduce sends P numbers: its factor of two is seen with three."""
    row = re.search(r"^\| the files \| (.+) \|$", held.README.read_text(), re.MULTILINE).group(1).split(" | ")
    launched = ranks_of(f"import sys; sys.argv[1:] = ['--micro-batches', '2']{RUN_ALL}", tmp_path, ranks=3)
    of_three = [int(sent.replace(",", "")) for sent in re.findall(r"sent in a step: ([\d,]+)", launched.output)]
    assert "From three ranks on the order of a sum may differ" in " ".join(held.README.read_text().split())
    (parallel, _), *stages = numbers_in(launched.output)
    assert all(losses == pytest.approx(parallel, rel=2e-7) for losses, _ in stages), "but for a last digit"
    for name, words, sent_bytes in zip(NAMES, row, of_three, strict=True):
        times = TIMES[words]
        assert sent_bytes == pytest.approx(times(2) * BYTES * 2 / 3, rel=1e-4), name
        assert [printed[name, m][1][-1] for m in (1, 4)] == pytest.approx([times(1) / 2, times(4) / 2]), name


def test_what_deepspeed_sends_is_what_the_page_of_traffic_has():
    row = re.search(r"^\| DeepSpeed 0.19.8 by default \| (.+) \|$", held.README.read_text(), re.MULTILINE).group(1)
    traffic = (ROOT / "reports/answers/traffic.md").read_text()
    ddp, *stages = row.split(" | ")
    of_stage = {
        stage: [
            float(number) for number in re.findall(rf"^\| stage {stage} \| ([\d.]+) \| ([\d.]+) \|$", traffic, re.M)[0]
        ]
        for stage in (1, 2, 3)
    }
    for stage, words in enumerate(stages[:2], 1):
        assert of_stage[stage] == [TIMES[words](m) / TIMES[ddp](m) for m in (1, 8)], stage
    least, most = re.search(r"stage 3 ([\d.]+) to ([\d.]+) times", traffic).groups()  # of DDP's 2, one micro-batch
    assert 2 * float(least) == TIMES["m + 1"](1), "one micro-batch"
    assert stages[2] == f"m + 1 to {2 * float(most):g} m"
    assert all(m + 1 <= 2 * sent < 3 * m for sent, m in zip(of_stage[3], (1, 8), strict=True))
    assert f"{2 * float(most):g} of Gemma2-9B with one micro-batch" in held.README.read_text()


def test_kept_records_of_stage_3_send_within_the_bounds_of_the_page():
    """The default stage 3 on two ranks or more, all weights trained by AdamW."""
    counted = []  # by micro-batch, with their number
    for run in load([ROOT / "reports"]).select(arm="zero3").done:
        asked, seen, sent = run.record.requested, run.record.observed, sum(of_record.sent_bytes(run).values())
        trains_all = seen.trained_parameters in (None, seen.parameters) and asked.lora_rank is None
        if sent and (seen.ranks or 1) > 1 and trains_all and asked.optimizer in (None, "adamw"):
            part = seen.parameters * RECIPES[asked.precision].gradient_bytes * (seen.ranks - 1) / seen.ranks
            counted.append((sent / part, asked.accumulation))
    assert len(counted) > 90
    assert all(0.99 * TIMES["m + 1"](m) < times < 3.15 * m for times, m in counted), "0.996: Whisper's fixed positions"
    (least, passes), most = min((times / m, m) for times, m in counted), max(times / m for times, m in counted)
    said = f"{least:.1f} m (of {passes} micro-batches) to {most:.1f} m"
    assert said in " ".join(held.README.read_text().split())


@pytest.mark.parametrize(
    ("arm", "ranks", "formula", "pages"),
    [
        ("zero2", 8, 3.75, ("README.md", "stages.ipynb")),
        ("zero3", 8, 2, ("README.md",)),
        ("zero3", 2, 8, ("README.md",)),
    ],
)
def test_the_peaks_with_copies_are_those_of_kept_runs(arm, ranks, formula, pages):
    """Of a recomputed Llama-3-8B. Stage 2 also keeps the matrix on a border whole."""
    at_scale = load([ROOT / "reports/cpu-2core/runs/at_scale"])
    (run,) = at_scale.select(arm=arm, model="llama3-8b", ranks=ranks, checkpointing=True).done
    (peak,) = (rank.tracked_peak_bytes for rank in run.record.memory.components.per_rank)
    for page in pages:
        text = (FOLDER / "README.md" if page == "README.md" else ROOT / "notebooks" / page).read_text()
        held_gb, peak_gb = f"{formula * run.record.observed.parameters / 1e9:.1f}", f"{peak / 1e9:.1f}"
        said = f"| stage {arm[-1]}, of {OF[ranks]} | {held_gb} GB | {peak_gb} GB |"
        assert (
            said
            if page == "README.md"
            else f"{peak_gb} GB with stage 2. By the table of section 2 they would take {held_gb}."
        ) in text


def test_stages_1_and_2_peak_alike_on_two_ranks_and_not_on_eight():
    """To the byte, as the page of memory says."""
    at_scale = load([ROOT / "reports/cpu-2core/runs/at_scale"]).select(model="llama3-8b", checkpointing=True)
    peaks = {}
    for arm, ranks in itertools.product(("zero1", "zero2"), (2, 8)):
        (run,) = at_scale.select(arm=arm, ranks=ranks, precision="bf16_cast").done
        (rank,) = run.record.memory.components.per_rank
        peaks[arm, ranks] = rank.tracked_peak_bytes
    assert peaks["zero1", 2] == peaks["zero2", 2]
    assert peaks["zero1", 8] > 1.2 * peaks["zero2", 8]
    page = (ROOT / "reports/answers/memory.md").read_text()
    assert f"A virtual rank of two holds {peaks['zero1', 2] / 1e9:.1f} GB" in page


def test_stage_2_saves_nothing_on_three_ranks_and_nearly_nothing_on_four():
    """With few activations, by prediction, as the page of memory says, and each page that names it."""

    def peak_gb(arm: str, ranks: int) -> str:
        flags = TrainingFlags(gpus=ranks, sequence=2048, precision="bf16_cast"), PlaceFlags(gpu="H100")
        question = Question.of(named("llama3-8b"), *flags, StepFlags(checkpointing=True))
        return f"{estimate(question.training(load_arm(arm), rows=1, passes=1)).peak_bytes / 1e9:.1f}"

    page = " ".join((ROOT / "reports/answers/memory.md").read_text().split())
    assert peak_gb("zero1", 3) == peak_gb("zero2", 3)
    assert f"{peak_gb('zero1', 3)} GB with either on three" in page
    assert f"{peak_gb('zero1', 4)} and {peak_gb('zero2', 4)} GB on four" in page
    assert float(peak_gb("zero1", 4)) < 1.02 * float(peak_gb("zero2", 4))
    for arm in ("zero1", "zero2"):
        row = " | ".join(f"{peak_gb(arm, ranks)} GB" for ranks in (2, 3, 4, 8))
        assert f"| `{arm}` | {row} |" in (ROOT / "GUIDE.md").read_text()
    pages = ("GUIDE.md", "reports/answers/memory.md", "examples/zero_by_hand/README.md", "notebooks/stages.ipynb")
    for name in (*pages, "study/report/templates/drag.html"):
        text = " ".join((ROOT / name).read_text().replace('\\n",', "").replace('"', "").split())
        said = "saves nothing over stage 1 on up to three (GPUs|ranks), and nearly nothing on four"
        assert re.search(said, text), name


def test_recomputing_gathers_no_third_time():
    """As its README says: the all-gathers of stage 3 have the same bytes with recomputed activations and without."""
    at_scale = load([ROOT / "reports/cpu-2core/runs/at_scale"]).select(arm="zero3", model="llama3-8b", ranks=8)
    gathered = [
        {run.record.traffic.per_rank[0]["all_gather"].bytes for run in at_scale.select(checkpointing=recomputed).done}
        for recomputed in (True, False)
    ]
    assert gathered[0] == gathered[1], "or correct the sentence in its README"
    (twice,) = gathered[0]
    assert 1.8 < twice / (2 * 8_030_261_248) < 2, "of each bf16 weight"


COPIES = r"once in fp32: (\d) P / N, which are ([\d.]+) GB in the last row"  # of a billion parameters, 8 ranks
MOST = r"with stage 3 they stop at about (\d) GB"


@pytest.mark.parametrize(("arm", "stays"), [("zero2", 2), ("zero3", 0)])
def test_the_rule_of_the_copies_is_that_of_kept_runs_of_any_size(arm, stays):
    """Stage 3 makes them by groups of whole tensors, a little above a billion elements. No peak is below the rule."""
    text = " ".join((FOLDER / "README.md").read_text().split())
    each, of_a_billion = map(float, re.search(COPIES, text).groups())
    most = float(re.search(MOST, text)[1]) if arm == "zero3" else float("inf")
    assert of_a_billion == each / 8
    at_scale = load([ROOT / "reports/cpu-2core/runs/at_scale"])
    in_the_update = set()
    for run in at_scale.select(arm=arm, precision="bf16_cast", checkpointing=True).done:
        (rank,) = run.record.memory.components.per_rank
        ranks, parameters = run.record.observed.ranks, run.record.observed.parameters
        copies = min(each * parameters / ranks, most * 1e9)
        on_top = rank.tracked_peak_bytes - (stays + (16 - stays) / ranks) * parameters
        assert on_top > 0.99 * copies, run.record.run_id
        if not {"temporaries", "gathered_weights"} & rank.at_peak.keys():
            assert on_top == pytest.approx(copies, rel=0.07), run.record.run_id  # with the matrix on a border
            in_the_update.add((run.record.requested.model, ranks))
    assert len(in_the_update) >= 2


def test_a_large_model_with_stage_3_has_its_peak_in_the_backward_pass():
    at_scale = load([ROOT / "reports/cpu-2core/runs/at_scale"])
    (run,) = at_scale.select(arm="zero3", model="qwen3-32b", ranks=8).done
    (rank,) = run.record.memory.components.per_rank
    assert rank.at_peak["gathered_weights"] > 0, "there are none in the update"
    assert f"peak of {rank.tracked_peak_bytes / 1e9:.1f} GB" in (FOLDER / "README.md").read_text()


def test_no_arm_sets_what_its_readme_says_of_zero_r():
    arms = [path for path in (ROOT / "accelerate_configs").rglob("*") if path.suffix in (".yaml", ".json")]
    assert len(arms) > 20
    assert not [path for path in arms if re.search(r"activation_checkpointing|contiguous_gradients", path.read_text())]


def test_each_stage_agrees_with_deepspeed(tmp_path):
    done = ranks_of(BESIDE_DEEPSPEED, tmp_path)
    assert done.output.count("agrees") == 3, done.output


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_is_held_to_one_process(name, ranks):
    adapter = Adapter(str(FOLDER / "adapter.py"), "mine", {"file": name}, name=name)
    for wanted in ("adamw", "accumulation-4", "four-ranks"):
        answer = ranks.ask(adapter, PROPERTIES[wanted])
        assert answer.answer == "holds", (wanted, answer.words)


def test_without_torchrun_a_stage_says_how_it_is_started():
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ended = python(FOLDER / "stage2.py", env=environment)
    assert ended.returncode == 2
    asked = f"start with torchrun --standalone --nproc-per-node 2 {FOLDER / 'stage2.py'}"
    assert asked in " ".join(ended.stderr.split()), "the path as it was typed"
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("file", "ranks", "typed", "said"),
    [
        ("stage2", 5, "--micro-batches 1", "96 samples do not divide by 5 ranks x 1 micro-batches: take others"),
        ("stage2", 2, "--micro-batches 5", "96 samples do not divide by 2 ranks x 5 micro-batches: take others"),
        ("stage2", 2, "--micro-batches 0", "96 samples do not divide by 2 ranks x 0 micro-batches: take others"),
        ("stage2", 1, "--micro-batches -1", "96 samples do not divide by 1 ranks x -1 micro-batches: take others"),
        ("stage2", 2, "--micro-batches x", "argument --micro-batches: invalid int value: 'x'"),
        ("stage3", 2, "--sdg", "unrecognized arguments: --sdg"),
        # Each would train alone, and say nothing of it.
        (
            "one_process",
            2,
            "",
            "one_process.py is one process, not 2: start it with python, or data_parallel.py with torchrun",
        ),
    ],
)
def test_a_mistake_below_torchrun_is_one_sentence_of_one_rank(file, ranks, typed, said, monkeypatch, capsys):
    """The first ends with 2, as torchrun does then. Others end with 0: else it may not come to speak."""
    monkeypatch.setattr(sys, "argv", [str(FOLDER / f"{file}.py"), *typed.split()])
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    for rank, expected in enumerate((f"{said}\n", "")[:ranks]):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(sys.argv[0], run_name="__main__")
        assert (ended.value.code, *capsys.readouterr()) == (0 if rank else 2, expected, "")


@pytest.mark.parametrize("version", ["2.2.2", "2.7.1+cpu", "2.8.0"])
def test_a_pytorch_without_reduce_scatter_on_gloo_is_named_in_one_sentence(version, monkeypatch):
    """Only the stages call it. From 2.8 on the next refusal is another one: the page names that release."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    said = f"PyTorch {version} has no reduce_scatter on gloo: take 2.8 or later, or the notebook in Colab"
    assert harness.refusal("Stage1", 2, 1) == ("" if version == "2.8.0" else said)
    assert harness.refusal("DataParallel", 2, 1) == ""
    assert "The stages need PyTorch 2.8 or later" in held.README.read_text()
    assert "PyTorch, 2.8 or later" in (ROOT / "notebooks/by_hand.ipynb").read_text()


def test_one_rank_that_torchrun_starts_is_one_process():
    address = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ended = python("-c", EACH_ALONE, env=os.environ | address)
    assert (ended.returncode, ended.stderr) == (0, "")
    *said, behind = re.split(r"(?<=ends with 0\n)", ended.stdout)
    assert behind == ""
    for name, each in zip(NAMES, said, strict=True):
        assert ", 1 rank: " in each, name
        assert "equal to one process: yes, " in each, name


def test_a_reader_of_one_line_may_leave():
    """As `| head -1` does: all is printed in one write, also without a buffer."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": os.environ | {"PYTHONUNBUFFERED": "1"}}
    with subprocess.Popen([sys.executable, FOLDER / "one_process.py"], **pipes) as started:
        assert started.stdout.read(10) == b"OneProcess"
        started.stdout.close()
        assert started.stderr.read() == b""
    assert started.returncode == 0


def test_one_process_says_nothing_of_a_comparison(said_alone):
    assert "OneProcess, 1 rank: " in said_alone
    assert "Adam hides" not in said_alone


def test_the_samples_divide_by_usual_numbers_of_ranks():
    one_process = runpy.run_path(str(FOLDER / "one_process.py"))
    for ranks in (1, 2, 3, 4, 6, 8):
        assert one_process["SAMPLES"] % (4 * ranks) == 0


def edited(folder: Path, name: str, old: str, new: str) -> Path:
    """Return a copy of the files with an edit, as a reader makes it."""
    copy = Path(shutil.copytree(FOLDER, folder / "copy"))
    text = (copy / f"{name}.py").read_text()
    assert text.count(old) == 1
    (copy / f"{name}.py").write_text(text.replace(old, new))
    return copy


IMPORTED = "import runpy, sys; sys.path.insert(0, '{folder}'); runpy.run_path('{path}', run_name='__main__')"


def launched(folder: Path, name: str, *words: str, made_in: Path, ranks: int = 2) -> str:
    """Return what a file prints on some ranks."""
    ended = ranks_of(IMPORTED.format(folder=folder, path=folder / f"{name}.py"), made_in, *words, ranks=ranks)
    assert ended.code == 0, ended.output
    return ended.output


@pytest.mark.parametrize("name", NAMES)
def test_a_deep_model_is_equal_to_one_process_as_well(name, tmp_path):
    """Its losses are larger, and so is their last digit."""
    copy = edited(tmp_path, "one_process", "96, 256, 4, 5", "96, 256, 32, 2")
    assert "equal to one process: yes, " in launched(copy, name, "--micro-batches", "4", made_in=tmp_path)


SCALE = ("        mine /= self.ranks\n", "")
LAST_ALONE = ("mine if part.grad is None else part.grad + mine", "mine")


@pytest.mark.parametrize(
    ("old", "new", "words", "verdict"),
    [
        ("            self.gather(weight)", "            pass", (), "NO, the losses differ by 3e-02"),
        ("        weight.grad = None\n", "", (), "NO, the losses differ by 2e-03"),
        ("        weight.grad = None\n", "", ("--micro-batches", "4"), "NO, the losses differ by 2e-03"),
        (*SCALE, (), "yes, the losses differ by "),  # Adam hides it
        (*SCALE, ("--sgd",), "NO, the losses differ by 2e-02"),
        (*LAST_ALONE, ("--micro-batches", "4"), "NO, the losses differ by 3e-02"),
    ],
)
def test_its_exercises_print_what_its_readme_says(old, new, words, verdict, tmp_path):
    assert f"`{verdict}" in (FOLDER / "README.md").read_text()
    said = launched(edited(tmp_path, "stage2", old, new), "stage2", *words, made_in=tmp_path)
    assert f"equal to one process: {verdict}" in said
    hidden = verdict.startswith("yes") and "--sgd" not in words
    assert ("Adam hides a wrong scale of the gradients: try --sgd as well" in said) == hidden


def test_the_fault_of_its_exercise_is_one_of_deepspeed():
    fault = next(each for each in tomllib.loads(FAULTS.read_text())["fault"] if each["id"] == "last-pass-only")
    readme = (FOLDER / "README.md").read_text()
    assert f"as DeepSpeed {fault['since']} to {fault['until']} did" in readme
    assert "[without a message](../../reports/answers/releases.md)" in readme
    assert f"{fault['since']} to {fault['until']}" in (ROOT / "reports/answers/releases.md").read_text()


def test_stage_3_over_time_is_as_its_readme_draws_it():
    """One rank, two layers of one weight each: what happens to each weight, in turn."""
    stage3 = runpy.run_path(str(FOLDER / "stage3.py"))["Stage3"]
    happened: list[tuple[torch.Tensor, str]] = []

    class Told(stage3):
        def gather(self, weight):
            happened.append((weight, "g"))
            super().gather(weight)

        def after_forward(self, layer, *args):
            happened.extend((weight, letter) for weight in layer.parameters(recurse=False) for letter in "Cf")
            super().after_forward(layer, *args)

        def reduce(self, weight):
            happened.extend((weight, letter) for letter in "Crf")
            super().reduce(weight)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
        Told(model, torch.optim.Adam(model.parameters())).forward_backward(torch.ones(1, 2))
    finally:
        dist.destroy_process_group()
    drawn = re.findall(r"layer \d  (.*) U$", held.README.read_text(), re.MULTILINE)
    for weight, row in zip(model.parameters(), drawn, strict=True):
        assert re.findall(r"\S", row) == [letter if each is weight else "." for each, letter in happened]


def test_an_all_reduce_in_stage_1_sends_what_its_readme_says(tmp_path):
    """The solution stands there, in place of the body of `reduce`."""
    readme, stage = ((FOLDER / name).read_text() for name in ("README.md", "stage1.py"))
    (sent, solution) = re.search(r"6\. `(sent in .*?)`.*?\n\n(.*?)\n\n", readme, re.DOTALL).groups()
    (body,) = re.findall(r"def reduce.*?\n(.*?)\n\n", stage, re.DOTALL)
    copy = edited(tmp_path, "stage1", body, textwrap.indent(textwrap.dedent(solution), " " * 8))
    said = launched(copy, "stage1", "--micro-batches", "4", made_in=tmp_path)
    assert f"{sent}\n" in said
    assert "equal to one process: yes, " in said


def test_weights_that_stay_until_the_backward_pass_print_what_its_readme_says(tmp_path):
    """The exercise that changes stage3.py. Without the edit the peak is the other number."""
    head = "    def after_forward(self, layer, _, output):\n"
    said = launched(edited(tmp_path, "stage3", head, f"{head}        return\n"), "stage3", made_in=tmp_path)
    peak, before, sent = re.search(
        r"7\. `(peak .*?)` instead of ([\d,]+),.*?`(sent in .*?)`", (FOLDER / "README.md").read_text(), re.DOTALL
    ).groups()
    for words in (f"; {peak}\n", f"{sent}\n", "held: weights 526,336,", "equal to one process: yes, "):
        assert words in said
    assert f"; peak {before}\n" in launched(FOLDER, "stage3", made_in=tmp_path)


@pytest.mark.parametrize(("whole", "refused"), [("weight", True), ("flat", False)])
def test_autograd_counts_the_changes_of_a_weight_and_not_of_its_storage(whole, refused, tmp_path):
    last = "dist.all_gather(list(flat.chunk(self.ranks)), mine)  # a ring sends (N - 1) / N of its bytes\n"
    copy = edited(tmp_path, "stage3", last, f"{last}        {whole}.mul_(1)\n")
    ended = ranks_of(IMPORTED.format(folder=copy, path=copy / "stage3.py"), tmp_path)
    said = "modified by an inplace operation"
    assert f"8. `{said}`" in (FOLDER / "README.md").read_text()
    assert (ended.code != 0, said in ended.output) == (refused, refused)


@pytest.mark.parametrize("ranks", [3, 8])
def test_what_more_ranks_hold_and_send_is_what_its_readme_says(ranks, tmp_path):
    said = launched(FOLDER, "stage3", made_in=tmp_path, ranks=ranks)
    weights, sent = re.search(r"held: weights ([\d,]+),.*\n(sent in a step: .*)\n", said).groups()
    solution = (FOLDER / "README.md").read_text().partition("\n9. Stage 3 holds")[2]
    assert f"`{sent}` with {OF[ranks]}" in solution
    assert re.search(rf"\b{weights} (bytes of weights )?with {OF[ranks]}\b", " ".join(solution.split()))
    assert int(sent[16:-6].replace(",", "")) < 3 * BYTES


def test_the_exercise_with_many_layers(tmp_path):
    """With many layers the peak is little more than what is held."""
    copy = edited(tmp_path, "one_process", "96, 256, 4, 5", "96, 256, 32, 2")
    held_line = re.search(r"held: .*", launched(copy, "stage3", made_in=tmp_path))[0]
    *parts, peak = (int(number.replace(",", "")) for number in re.findall(r"[\d,]{5,}", held_line))
    assert f"`peak {peak:,}`, and {sum(parts):,} are held" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_each_file_equals_one_process_with_sgd(name, tmp_path):
    assert "equal to one process: yes, " in launched(FOLDER, name, "--sgd", "--micro-batches", "4", made_in=tmp_path)
