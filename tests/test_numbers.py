"""Every number of README and GUIDE is computed here from records, is held by words named here, or is generated."""

import json
import math
import re
from functools import cache
from statistics import median

import pytest
from conftest import ROOT

from study.measure.components import ComponentLook
from study.predictor.advice.advise import SEPARABLE, SHARING
from study.predictor.architecture import named
from study.predictor.outside import stored
from study.predictor.papers import RECIPES
from study.records import runs
from study.report.topics import checkpoints, conformance, traffic
from study.spec import shapes
from study.spec.arms import NAMES
from study.spec.shapes import config_of
from study.sweeps import protocol
from study.watcher.instruments import CollectiveLook
from study.watcher.watch import AFTER

WORDS = {12: "twelve", 17: "seventeen"}
NUMBER = re.compile(r"(?<![\w.\-/])\d[\d,.]*(?:e-?\d+)?|\b(?:twelve|seventeen)\b")
GENERATED = re.compile(r"<!-- (\w+):start.*?<!-- \1:end -->", re.DOTALL)
COMMAND = re.compile(r"^ {4}\S.*?(?= # |$)", re.MULTILINE)  # without its comment
# Numbers that are no results: code, links, quoted outputs, and names, ranks and versions that somebody chose.
NAMED = re.compile(
    r"`[^`]*`|\]\([^)]*\)|[“\"][^”\"]*[”\"]|\b00\d\b|\(1[;)]|DeepSpeed [\d.]+|Accelerate [\d.]+|Python [\d.]+"
    r"|\b(?:[Ss]tages?|[Rr]anks?|ZeRO|Llama|on|step) \d+(?:(?:,| to| and| or) \d+)*"
    r"|\b\d+(?:, \d+)*(?: or \d+)? ranks?\b"
)
HELD = {  # words of the documents, and the words of a file that hold them
    "a Python later than 3.11,": ("Makefile", "a Python other than 3.11"),
    "a community article of 2025": ("study/ledger/claims/000.toml", "(3 September 2025)"),
    "at 1.0 by default since June 2026": (
        "study/watcher/settings.toml",
        "at 1.0 unless its config says otherwise, since June 2026",
    ),
    "another program has 55 % of each GPU": ("GUIDE.md", "--beside 0.55"),
    "exit code 137": ("tests/test_oom.py", '("Command exited with code 137", "host")'),
    "equal those of DDP to 1e-5 at every step": ("tests/test_parity.py", 'TOLERANCE = {"fp32": 1e-5'),
    "differs by 4 kB of data rows": ("tests/test_virtual.py", "abs=4096"),
    "no buckets of 25 MiB": ("study/training/setup.py", "BUCKET_MIB = 25"),
    "at 2.5 for an hour of a GPU": ("GUIDE.md", "--price 2.5"),
    "each component is within 1 % of its prediction": ("tests/test_optimizers.py", "rel=0.01"),
}


@cache
def loaded(name: str) -> runs.Runs:
    return runs.load(ROOT / "reports/cpu-2core/runs" / name)


def kept(path: str):
    text = (ROOT / "reports" / path).read_text()
    return [json.loads(line) for line in text.splitlines()] if path.endswith("l") else json.loads(text)


def of_part(name: str, part: str, arm: str | None = None) -> list[runs.Run]:
    return [run for run in loaded(name).done if run.record.cell.part == part and arm in (None, run.arm)]


def far(*pair: runs.Run) -> float:
    return max(abs(a - b) for a, b in zip(*(run.record.loss.train for run in pair), strict=True))


def within(differences: list[float]) -> str:
    """The power of ten that no difference is above."""
    return f"1e{math.ceil(math.log10(max(differences)))}"


def cost_of_watch() -> str:
    cost = kept("cpu-2core/watch_cost.json")
    share = {each: f"{100 * value + 1e-9:.2f} %" for each, value in cost["added_cpu_share"].items()}
    step_ms = 1e3 * cost["step_cpu_s"]["median"]
    return f"{share['median']} of CPU time ({share['low']} to {share['high']}) to steps of {step_ms:.0f} ms"


def divided(source: str, quantity: str, without: set[str] = frozenset()) -> list[float]:
    """The errors of published rows of divided models, in per cent, without some models."""
    rows = [each for each in stored.predictions() if each.row.parallel and source in each.row.source]
    rows = [each for each in rows if each.row.model not in without]
    pairs = [one for row in rows for one in row.quantities if one.quantity == quantity]
    return [100 * (one.predicted / one.measured - 1) for one in pairs]


def of_losses() -> list[str]:
    smoke = {run.arm: run for run in loaded("smoke").done if run.model == "bert-tiny"}
    is_equal = {far(smoke[arm], smoke["ddp"]) for arm in ("fsdp2", "fsdp2_grad_op", "fsdp2_cpu")} == {0}
    resumed = {run.name: run for run in loaded("resume").done}
    moves = [(run, run.record.checkpoints.resumes[-1].run_id) for name, run in resumed.items() if "-to-" in name]
    moved = [far(run, resumed[name]) for run, name in moves]
    (alone,) = of_part("dimensions", "alone", "ddp")
    compiled = [far(*pair) for arm in NAMES if (pair := of_part("dimensions", "compiled", arm))]
    autocast = far(*of_part("nodes", "autocast", "fsdp2"), *of_part("nodes", "autocast", "ddp"))
    return [
        f"equal DDP's in all {smoke['ddp'].requested.steps if is_equal else None} steps",
        f"differ by at most {within(moved)} from those of the run that did not move",
        f"DDP's by at most {within([far(run, alone) for run in of_part('dimensions', 'parity')])} in "
        f"{alone.requested.steps} steps",
        f"eager mode by at most {within(compiled)} in {of_part('dimensions', 'compiled')[0].requested.steps} steps",
        f"differ from DDP's by {autocast:.0e} (`gpt-tiny`)".replace("e-0", "e-"),
    ]


def of_bytes() -> list[str]:
    smoke = {run.arm: run for run in loaded("smoke").done if run.model == "bert-tiny"}
    peaks = {arm: f"**{sum(run.components.values()) / 1e6:.0f} MB**" for arm, run in smoke.items()}
    gathered = smoke["fsdp2"].record.traffic.per_rank[0]["all_gather"].bytes / (4 * smoke["fsdp2"].parameters)
    sent = traffic.between_nodes(loaded("nodes")).groupby("arm")["between_mb"].min()
    saved = checkpoints.table(loaded("resume"))
    off = saved["bytes_per_parameter"] / saved["predicted_bytes_per_parameter"] - 1
    each = saved.groupby("arm")["bytes_per_parameter"].mean()
    recipe, moments = RECIPES["mixed-adam"], RECIPES["fp32-adam"][2]
    return [
        f"a checkpoint has **{each['single']:.0f} bytes a parameter**",
        f"2 write {each['zero2']:.0f}, because",
        f"predicts this within {math.ceil(100 * off.abs().max())} %",
        f"rows of {smoke['fsdp2'].requested.sequence} tokens, as in",
        f"| {peaks['fsdp2']}: ",
        f"stage 3: {peaks['zero3']}",
        f"gathers of the weights | **{gathered:.0f}** a step",
        f"moves {sent['hsdp']:.1f} MB in collectives between nodes, where FSDP2 moves {sent['fsdp2']:.0f}.",
        f"what changes the {sum(recipe)} bytes",
        f"takes {sum(recipe)} bytes a parameter: {recipe[0]} for weights, {recipe[1]} for gradients, "
        f"{recipe[2] - moments} for the master copy, {moments} for two moments",
        f"**{sum(RECIPES['fp32-adam'])}** with `bf16: true`, because Accelerate then trains in fp32",
        f"**{sum(RECIPES['bf16-adam'])}** without",
        f"Adafactor keeps {RECIPES['mixed-adafactor'][2]} bytes a parameter",
    ]


def of_predictions() -> list[str]:
    text = (ROOT / "tests/golden/kept-predictions.txt").read_text()
    rows = re.findall(r"^scoreboard \w+: (\d+), (\d+), [+-]([\d.]+)%", text, re.MULTILINE)
    count, near, worst = (how(float(row[place]) for row in rows) for place, how in enumerate((sum, sum, max)))
    board = loaded("scoreboard").done
    families, virtual = {config_of(run.model)["model_type"] for run in board}, [run for run in board if run.virtual]
    memory, times = divided("SimuMax", "memory"), divided("InternEvo", "time")
    parallel = [each.row for each in stored.predictions() if each.row.parallel]
    fitted = [row for row in parallel if row.role == "fit"]
    held_out = divided("SimuMax", "time", {row.model for row in fitted})
    low = [f"{-median(divided(source, 'memory')):.0f}" for source in ("nanotron", "InternEvo")]
    return [
        f"Of {count:.0f} peaks measured without a GPU {near:.0f} are predicted within 1 %",
        f"Of {count:.0f} peaks that were measured without a GPU, {near:.0f} are predicted within 1 %. "
        f"The worst is {worst:.1f} %",
        f"the {count:.0f} peaks; where ours",
        f"of {len(families)} families of models and {len({run.arm for run in board})} arms",
        f"{len(virtual)} are of virtual ranks, and {len(board) - len(virtual)} of two real ranks",
        f"Of {len(parallel)} published rows of divided models, {len(fitted)} of a 405B",
        f"Memory is {median(map(abs, memory)):.0f} % off in the median on SimuMax's {len(memory)} rows",
        f"and {low[0]} and {low[1]} % too low",
        f"Times are {median(map(abs, times)):.0f} % off on InternEvo's {len(times)} rows of A100, and "
        f"{median(map(abs, held_out)):.0f} % on SimuMax's {len(held_out)} rows of a 70B",
    ]


def of_tools() -> list[str]:
    known = [row for row in conformance.kept("bugs") if row["library"] == "deepspeed"]
    seen = [row["words"] for row in known if row["caught"]]
    threads = kept("oom_threads.json")
    last, before = ([row["hit"] for row in threads if (row["half"] == "last") == wanted] for wanted in (True, False))
    scale = [cell.settings["model"] for cell in protocol.cells(protocol.read("at_scale"), "tiny")]
    sizes = [named(model).parameters / 1e9 for model in scale]
    return [
        conformance.headline(),
        f"Of {len(known)} bugs that DeepSpeed mended, the suite sees {len(seen)} before the fix and not after it",
        f"{sum(not re.match(r'[A-Za-z]+Error:', words) for words in seen)} of which gave no message",
        f"{len(conformance.kept('faults'))} faults, planted one by one",
        f"The dimensions of {len(shapes.models()) - len(shapes.SHAPES)} more published models need no network",
        f"the same seed under up to {WORDS[len(NAMES)]} [",
        f"whose predicted time is within {round(100 * SEPARABLE)} % of the fastest",
        f"look at steps {AFTER + 1} to {AFTER + CollectiveLook.STEPS + ComponentLook.STEPS}",
        f"In one run it added {cost_of_watch()}",
        f"{WORDS[len({each['way'] for each in kept('cpu-2core/hangs.jsonl')})]} such ways",
        f"The causes of {len(threads)} public threads were collected",
        f"The last {len(last)} were scored once, after its rules were final: it names the cause of {sum(last)} of them",
        f"of {sum(before)} of the {len(before)} that were looked at before",
        f"from {min(sizes):.1f} to {max(sizes):.0f} billion parameters",
        f"{len(protocol.cells(protocol.read('predictions'), 'one_gpu'))} cells, which need a GPU",
        "tries groups of {}, {} and {} GPUs".format(*SHARING),
    ]


@cache
def computed() -> list[str]:
    """Sentences with their numbers, as the documents must have them."""
    return [*of_losses(), *of_bytes(), *of_predictions(), *of_tools()]


def prose(name: str) -> str:
    return " ".join(COMMAND.sub("", GENERATED.sub("", (ROOT / name).read_text())).split())


def left_over(text: str) -> list[str]:
    """What has a number that nothing here accounts for."""
    for words in (*computed(), *HELD):
        text = text.replace(words, " ")
    text = NAMED.sub(" ", text)
    return [text[max(0, each.start() - 40) : each.end() + 20] for each in NUMBER.finditer(text)]


@pytest.mark.parametrize("name", ["README.md", "GUIDE.md"])
def test_every_number_is_accounted_for(name):
    assert left_over(prose(name)) == [], f"computed are: {computed()}"


def test_what_holds_a_number_stands_where_it_is_said_to_stand():
    assert [path for path, words in HELD.values() if words not in (ROOT / path).read_text()] == []


def test_a_wrong_number_is_seen():
    guide = prose("GUIDE.md")
    for right, wrong in (
        ("250 are predicted", "251 are predicted"),
        ("moves 8.8 MB", "moves 8.9 MB"),
        ("1e-5", "1e-4"),
    ):
        assert right in guide
        assert left_over(guide.replace(right, wrong))
