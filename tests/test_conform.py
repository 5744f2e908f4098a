"""The conformance suite: it finds planted faults, and says what happened to a rank."""

import ast
import functools
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ranks_of

from study.cli.commands import start
from study.conform import cases, checks, output, scripts, suite
from study.conform.cases import Case, Difference, Reference, bound, microbatch, new_model
from study.conform.ranks import FUNCTIONS, case_of
from study.conform.suite import DEFAULTS, PROPERTIES, Property
from study.core.errors import Stop

ROOT = Path(__file__).resolve().parents[1]
FAULTS = {"sum": "sgd", "stale": "ranks-agree", "clip": "clip"}  # with a property that finds it


def toy(fault: str, folder: Path) -> suite.Adapter:
    """Return the toy library and its adapter in one file, with a fault planted."""
    library = (ROOT / "examples" / "toy_sharding.py").read_text()
    adapter = (ROOT / "examples" / "toy_adapter.py").read_text()
    library = library.replace('os.environ.get("TOY_FAULT", "")', repr(fault))
    path = folder / f"toy_{fault}.py"
    path.write_text(library + adapter.replace("from toy_sharding import Sharded\n", ""))
    return suite.Adapter(path.stem, str(path))


def hold(adapter: suite.Adapter, names: list[str], ranks: suite.Ranks, shrink: bool = False) -> dict[str, suite.Result]:
    found = suite.run(adapter, [PROPERTIES[name] for name in names], ranks, lambda result: None, shrink)
    return {result.property: result for result in found}


# --- the suite finds faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_into_the_toy_library_is_found(fault, ranks, tmp_path):
    name = FAULTS[fault]
    assert hold(toy("", tmp_path), [name], ranks)[name].status == "holds"
    result = hold(toy(fault, tmp_path), [name], ranks, shrink=fault == "sum")[name]
    assert result.status == "fails"
    assert fault != "sum" or result.shrunk["width"] < DEFAULTS["width"], "it was not made smaller"


PLANTED = {  # into the adapter of DDP: what it says, what it then says, and a property that finds it
    "gradients are a thousandth too large": ("loss / trainer", "loss * 1.001 / trainer", "sgd"),
    "the passes are not averaged": ("loss / trainer.options.passes", "loss", "accumulation-2"),
    "the ranks do not talk": ("if last or trainer.wrapped is trainer.model", "if False", "ranks-agree"),
    "gradients stay for the next update": ("trainer.model.zero_grad()", "pass", "sgd"),
    "the limit of the norm is a hundredth too large": (
        "trainer.options.clip or",
        "trainer.options.clip * 1.01 or",
        "clip",
    ),
    "the schedule counts ranks": ("scheduler.step()", "scheduler.step(), trainer.scheduler.step()", "schedule"),
    "master weights are not copied back": ("parameter.copy_(master)", "pass", "bf16-weights-in-use"),
    "the optimizer is not loaded": ('trainer.optimizer.load_state_dict(state["optimizer"])', "pass", "checkpoint"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_planted_into_ddp_is_found(fault, ranks, tmp_path):
    before, after, name = PLANTED[fault]
    text = suite.ADAPTERS["ddp"].path.read_text()
    assert text.count(before) == 1
    path = tmp_path / f"{name}.py"
    path.write_text(text.replace(before, after))
    answer = ranks.ask(suite.Adapter(name, str(path)), name, PROPERTIES[name].ranks, {})
    assert answer["status"] == "fails"
    assert answer["kind"] == "differs"


ENDS = {"sum": (1, "is allowed"), "": (0, "")}  # a fault: the exit code of the script, and what it prints


def script_of(fault: str, folder: Path) -> Path:
    case = PROPERTIES["momentum"].case | {"width": 2}
    text = scripts.script(toy(fault, folder), replace(PROPERTIES["momentum"], case=case), "About.")
    assert "from study" not in text
    (folder / "script.py").write_text(text)
    return folder / "script.py"


@pytest.mark.parametrize("fault", ENDS)
def test_a_failure_is_a_script_of_its_own(fault, tmp_path, monkeypatch):
    """Its ranks are forked here; the next test lets it start them."""
    monkeypatch.setenv("FOLDER", str(tmp_path))
    monkeypatch.setenv("LAUNCH", "0")
    code, words = ENDS[fault]
    done = ranks_of(script_of(fault, tmp_path).read_text(), tmp_path)
    assert (done.code, words in done.output) == (code, True), done.output


@pytest.mark.slow
@pytest.mark.parametrize("fault", ENDS)
def test_the_script_starts_its_ranks(fault, tmp_path):
    code, words = ENDS[fault]
    program = [sys.executable, "-I", script_of(fault, tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code, done.stderr[-2000:]
    assert (words or "holds") in done.stdout


def test_every_script_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(scripts, "parts", functools.cache(lambda path, parts=scripts.parts: list(parts(path))))
    for adapter in {each.file: each for each in suite.ADAPTERS.values()}.values():
        for check in {each.check: each for each in PROPERTIES.values()}.values():
            text = scripts.script(adapter, check, "About.")
            assert not [node for node in ast.walk(ast.parse(text)) if "study" in str(getattr(node, "module", ""))]
            (tmp_path / f"{Path(adapter.file).stem}-{check.check}.py").write_text(text)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F811", tmp_path]
    done = subprocess.run(ruff, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_script_whose_names_clash_is_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def build(*_): return bound\ndef bound(): pass\n")
    with pytest.raises(Stop, match="both define bound"):
        scripts.script(suite.Adapter("mine", str(path)), PROPERTIES["sgd"], "")


# --- what happened to a rank ---------------------------------------------------------------------------------------

ENDINGS = {
    "raise ValueError('not this one')": ("refused", "ValueError: not this one"),
    "assert not model, 'never'": ("refused", "AssertionError: never"),
    "raise NotImplementedError('we have none')": ("not applicable", "we have none"),
    "model.what_is_missing()": ("fails", "AttributeError"),
    "import os; os.kill(os.getpid(), 11)": ("fails", "a rank ended with exit code -11"),
    "import torch.distributed as d; d.get_rank() or d.barrier(); import time; time.sleep(60)": ("fails", "hangs"),
}


@pytest.mark.parametrize(("line", "expected"), ENDINGS.items())
def test_an_ending_has_its_words(line, expected, ranks, tmp_path):
    raised = "raise V" in line
    library = tmp_path / f"library_{abs(hash(line))}.py"
    library.write_text(f"def fail(model):\n    {line}\n")
    body = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {library.stem}; {library.stem}.fail(model)"
    body = body if raised or "assert" in line else line
    adapter = tmp_path / "adapter.py"
    rest = "".join(f"def {name}(*_): pass\n" for name in FUNCTIONS[1:4])
    adapter.write_text(f"def build(model, optimizer, options):\n    {body}\n{rest}")
    answer = ranks.ask(suite.Adapter("mine", str(adapter)), "sgd", (2,), {}, limit_s=3)
    assert answer["status"] == expected[0]
    assert answer["words"].startswith(expected[1])


def test_what_hangs_is_asked_again_with_more_time(monkeypatch):
    """The machine may have been busy."""
    limits = []

    def ask(adapter, name, ranks, case, limit_s=suite.LIMIT_S):
        limits.append(limit_s)
        late = {"status": "fails", "words": "hangs: not done after 40 s", "kind": "hangs"}
        return late if limit_s == suite.LIMIT_S else {"status": "holds", "words": ""}

    ranks = SimpleNamespace(ask=ask)
    (result,) = suite.run(suite.ADAPTERS["ddp"], [PROPERTIES["sgd"]], ranks, lambda result: None)
    assert result.status == "holds"
    assert limits == [suite.LIMIT_S, 3 * suite.LIMIT_S]


def test_an_adapter_that_cannot_be_imported_is_a_sentence(ranks, tmp_path):
    (tmp_path / "broken.py").write_text("import a_package_that_nobody_has")
    with pytest.raises(Stop, match=r"broken\.py cannot be imported \(ModuleNotFoundError: No module named"):
        ranks.ask(suite.Adapter("mine", str(tmp_path / "broken.py")), "sgd", (2,), {})


def test_an_adapter_without_a_function_is_not_applicable(ranks, tmp_path):
    adapter = toy("", tmp_path)
    assert hold(adapter, ["checkpoint"], ranks)["checkpoint"].words == "the adapter has no save"


# --- the properties and their bounds -------------------------------------------------------------------------------


def test_the_properties_are_whole():
    assert len(PROPERTIES) == len(suite.table("properties")["property"]) >= 50
    fields = {key: (value.__name__ if key == "model" else value) for key, value in vars(Case()).items()}
    assert fields | {"lengths": list(fields["lengths"])} == DEFAULTS
    for each in PROPERTIES.values():
        assert callable(getattr(checks, each.check))
        assert len(each.sentence) >= 20, each.name
        assert each.source
        case_of(each.case)


def test_another_order_of_sums_stays_within_the_bound_and_a_fault_does_not():
    class Reversed(Reference):
        def gradients(self, update):
            loss = super().gradients(update)
            total = [torch.zeros_like(each) for each in self.model.parameters()]
            for rank in reversed(range(self.ranks)):
                for passed in reversed(range(self.case.passes)):
                    self.model.zero_grad()
                    (self.loss(*microbatch(self.case, update, passed, rank)) / self.case.passes).backward()
                    for sum_, each in zip(total, self.model.parameters(), strict=True):
                        sum_ += each.grad / self.ranks
            for sum_, each in zip(total, self.model.parameters(), strict=True):
                each.grad = sum_
            return loss

    case = Case(passes=3)
    expected, seen = Reference(case, 4).run().weights(), Reversed(case, 4).run().weights()
    start = dict(new_model(case).named_parameters())
    moved = cases.largest(expected[name] - start[name] for name in start)
    off = cases.largest(expected[name] - seen[name] for name in start)
    assert 0 < off < bound(case, 4, case.updates) * moved
    lost = Reference(case, 3).run().weights()  # without the gradients of a rank
    assert cases.largest(expected[name] - lost[name] for name in start) > 100 * off


def test_a_difference_is_worse_than_nothing():
    with pytest.raises(Difference, match="is nan off"):
        cases.hold_weights({"a": torch.tensor([torch.nan])}, {"a": torch.ones(1)}, 1.0, "the weights")
    with pytest.raises(Difference, match="shape"):
        cases.hold_weights({"a": torch.ones(2)}, {"a": torch.ones(1)}, 1.0, "the weights")


# --- what it writes ------------------------------------------------------------------------------------------------

RESULTS = [
    suite.Result("mine", "sgd", "holds", ""),
    suite.Result("mine", "clip", "fails", "<norm> & more\x00"),
    suite.Result("mine", "bf16", "refused", "no"),
    suite.Result("mine", "checkpoint", "not applicable", "no save"),
]


def test_results_are_written_for_other_programs(tmp_path):
    output.write(tmp_path, suite.Adapter("mine", "mine.py"), RESULTS, {"torch": "2.13.0"})
    report = ET.parse(tmp_path / "mine.xml").getroot()
    assert report.attrib == {"name": "conform mine", "tests": "4", "failures": "1", "skipped": "2"}
    assert report.find(".//failure").get("message") == "<norm> & more"
    assert "1 of 3 hold" in "".join(ET.parse(tmp_path / "mine.svg").getroot().itertext())
    assert '"summary": "1 of 3 hold"' in (tmp_path / "mine.json").read_text()
    assert output.rows({"mine": RESULTS}) == [
        {"adapter": "mine", "holds": 1, "fails": 1, "refused": 1, "not applicable": 1}
    ]


def test_every_committed_failure_is_explained():
    committed = ROOT / "reports" / "conform"
    for path in sorted([*committed.glob("*.json"), *committed.glob("releases/*/*.json")]):
        if path.stem not in suite.ADAPTERS:
            continue
        results, versions = output.load(path)
        for result in results:
            if result.status == "fails":
                found = output.explanation(result, versions)
                assert found, f"{path.name}: {result.property} is not explained"
            assert path.stem != "ddp" or result.status == "holds" or result.words == "the adapter has no schedule"


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["zero4"], "'zero4' is not an adapter"),
        (["--adapter", "missing.py"], "there is no file missing.py"),
        (["ddp", "--adapter", "x.py"], "names and --adapter are given"),
        (["ddp", "--only", "xyz"], "no property has 'xyz' in its name"),
    ],
)
def test_a_mistake_is_a_sentence(words, match):
    with pytest.raises(Stop, match=match):
        start(["conform", *words])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "ddp"])
def test_ddp_and_one_process_hold_everything(name, ranks):
    results = suite.run(suite.ADAPTERS[name], list(PROPERTIES.values()), ranks, lambda result: None)
    assert {result.status for result in results} <= {"holds", "not applicable"}, [output.line(r) for r in results]
    assert sum(result.status == "holds" for result in results) >= 70


def test_a_property_of_other_ranks_is_not_applicable(ranks):
    four = Property("sgd", "Says.", "Source", ranks=(4,))
    (result,) = suite.run(suite.ADAPTERS["single"], [four], ranks, lambda result: None)
    assert result.words == "ranks of the property: 4; of the adapter: 1"
