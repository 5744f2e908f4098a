"""The conformance suite: it finds planted faults, says what happened to a rank, and what a release changed."""

import ast
import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from study.cli.differences import diff
from study.conform import cases, checks, command, models, releases, script, suite
from study.conform.cases import Case, Reference, Unequal, bound
from study.conform.suite import ADAPTERS, PROPERTIES, Adapter, PropertyAnswer
from study.core.errors import Stop
from study.known import faults
from tests.conftest import ROOT, python, ranks_of, table

PYTORCH = ADAPTERS["ddp"].path.read_text()


def own(path: Path, text: str, **settings) -> Adapter:
    path.write_text(text)
    return Adapter(str(path), "mine", settings, name=path.stem)


# --- the suite finds faults ----------------------------------------------------------------------------------------

PLANTED = table("conform/planted.toml")


@pytest.mark.parametrize("fault", PLANTED["adapter"])
def test_a_fault_planted_into_an_adapter_is_found(fault, ranks, tmp_path):
    before, after, wanted = PLANTED["adapter"][fault]
    assert PYTORCH.count(before) == 1
    settings = {"groups": 1} if wanted.startswith(("bf16", "fp16")) else {}
    answer = ranks.ask(own(tmp_path / "mine.py", PYTORCH.replace(before, after), **settings), PROPERTIES[wanted])
    assert (answer.answer, answer.kind) == ("fails", "differs")


# Asked here; the whole suite names a fault by any of its properties.
ASKED = ("sgd", "adamw", "clip", "forty-updates", "unequal-ranks", "checkpoint", "norms")


@pytest.mark.parametrize("fault", PLANTED["others"])
def test_a_fault_of_another_kind_is_found(fault, ranks, tmp_path):
    before, after = PLANTED["others"][fault]
    text = PYTORCH.replace(before, after)
    if "average" in fault:
        text = text.replace("grad_sync = last", "grad_sync = False")
    assert text != PYTORCH
    adapter = own(tmp_path / "mine.py", text)
    kinds = [ranks.ask(adapter, PROPERTIES[name]).kind for name in ASKED]
    assert "differs" in kinds


def script_of(adapter: Adapter, name: str, folder: Path) -> Path:
    path = folder / f"{adapter.name}-{name}.py"
    script.write(path, adapter, PropertyAnswer(adapter.name, name, "2.13.0", "", "", "fails", "it is off"))
    return path


def script_of_ddp(folder: Path, factor: str, name: str = "momentum") -> Path:
    """The script of DDP and a property. Gradients that are a factor too large are a fault."""
    return script_of(
        own(folder / "mine.py", PYTORCH.replace("loss / trainer", f"loss * {factor} / trainer")), name, folder
    )


@pytest.mark.parametrize(("factor", "code"), [("1.001", 1), ("1", 0)])
def test_a_failure_is_a_script_of_its_own(factor, code, tmp_path):
    """The ranks are forked here; the script starts them itself in the slow test."""
    done = ranks_of(script_of_ddp(tmp_path, factor).read_text(), tmp_path)
    assert (done.code, "is allowed" in done.output) == (code, bool(code)), done.output


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "name", "code"), [("1.001", "momentum", 1), ("1", "checkpoint", 0)])
def test_the_script_starts_its_ranks(factor, name, code, tmp_path):
    done = python("-I", script_of_ddp(tmp_path, factor, name), cwd=tmp_path)
    assert done.returncode == code, done.stderr[-2000:]


def test_no_name_of_a_script_is_defined_twice_or_never(tmp_path):
    for adapter in {each.path: each for each in ADAPTERS.values()}.values():
        path = script_of(adapter, "sgd", tmp_path)
        assert "from study" not in path.read_text()
        statements = ast.parse(path.read_text()).body
        names = [each.name for each in statements if isinstance(each, ast.FunctionDef | ast.ClassDef)]
        assert len(names) == len({*names}) >= 50
    ruff = python("-m", "ruff", "check", "--isolated", "--select", "F821", tmp_path)
    assert ruff.returncode == 0, ruff.stdout


# --- what happened to a rank ---------------------------------------------------------------------------------------

REST = "".join(f"def {name}(*_): pass\n" for name in ("forward_backward", "step", "whole_weights"))


@pytest.mark.parametrize(("line", "expected"), PLANTED["library"].items())
def test_an_ending_has_its_words(line, expected, ranks, tmp_path):
    """Of a library that fails while it builds the training, or of the adapter itself."""
    library = tmp_path / f"library_{abs(hash(line))}.py"
    library.write_text(f"def fail(model):\n    {line}\n")
    call = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {library.stem}; {library.stem}.fail(model)"
    body = line if "# adapter" in line else call
    adapter = own(tmp_path / "mine.py", f"def build(model, optimizer, options):\n    {body}\n{REST}")
    answer = ranks.ask(adapter, PROPERTIES["sgd"], limit_s=1)
    assert answer.answer == expected[0]
    assert answer.words.startswith(expected[1])


def test_an_adapter_that_cannot_be_imported_is_a_sentence(ranks, tmp_path):
    with pytest.raises(Stop, match=r"broken\.py cannot be imported \(ModuleNotFoundError: No module named"):
        ranks.ask(own(tmp_path / "broken.py", "import a_package_that_nobody_has"), PROPERTIES["sgd"])


def test_an_adapter_may_import_its_functions(ranks, tmp_path):
    own(tmp_path / "right.py", PYTORCH)
    first = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    mine = own(tmp_path / "mine.py", f"{first}from right import *\n")
    assert command._adapter(str(mine.path)).path == mine.path
    assert ranks.ask(mine, PROPERTIES["one-update"]).answer == "holds"
    half = own(tmp_path / "half.py", "from math import *\n")
    with pytest.raises(Stop, match="does not define build, forward_backward, step, whole_weights"):
        ranks.ask(half, PROPERTIES["one-update"])


@pytest.mark.parametrize(
    "adapter", sorted({*(each.path for each in ADAPTERS.values()), ROOT / "examples/zero_by_hand/adapter.py"})
)
def test_an_adapter_is_whole(adapter):
    assert command._adapter(str(adapter)).path == adapter


def test_what_an_adapter_lacks_is_not_applicable(ranks, tmp_path):
    without = own(tmp_path / "mine.py", PYTORCH.replace("def save(", "def keep("))
    assert ranks.ask(without, PROPERTIES["checkpoint"]).words == "the adapter has no save"
    assert ranks.ask(without, PROPERTIES["schedule-stairs"]).words == "the adapter has no schedules"
    alone = ranks.ask(ADAPTERS["single"], PROPERTIES["four-ranks"])
    assert alone.words == "ranks of the property: 4; of the adapter: 1"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "ddp"])
def test_ddp_and_one_process_hold_everything(name, ranks):
    answers = [ranks.ask(ADAPTERS[name], each).answer for each in PROPERTIES.values()]
    assert {*answers} <= {"holds", "not applicable"}
    assert answers.count("holds") >= 70


# --- the properties and their bounds -------------------------------------------------------------------------------


def test_the_tables_are_whole():
    settings = {field.name for field in dataclasses.fields(Case)}
    for each in PROPERTIES.values():
        assert callable(getattr(checks, each.check))
        assert issubclass(getattr(models, each.model), models.Plain)
        assert set(each.case) <= settings
        assert each.case.get("curve", "") in cases.CURVES
        assert each.needs in ("", "save", "schedules", "inner", "loss_scale")
    for fault in faults.table().fault:
        assert set(fault.adapters) <= set(ADAPTERS)
        assert set(fault.properties) <= {*PROPERTIES, "*"}


def test_another_order_of_sums_stays_within_the_bound_and_a_fault_does_not(monkeypatch):
    case = Case(passes=3)
    expected, start = Reference(case, 4).run().weights(), cases.first_weights(case)
    lost = Reference(case, 3).run().weights()  # without the gradients of a rank
    in_order = cases.microbatch
    monkeypatch.setattr(
        cases,
        "microbatch",
        lambda case, update, passed, rank: in_order(case, update, 2 - passed, 3 - rank),
    )
    seen = Reference(case, 4).run().weights()
    moved = cases.largest(expected[name] - start[name] for name in start)
    off = cases.largest(expected[name] - seen[name] for name in start)
    assert 0 < off < bound(case, 4, case.updates) * moved
    assert cases.largest(expected[name] - lost[name] for name in start) > 100 * off


def test_a_difference_is_worse_than_nothing():
    with pytest.raises(Unequal, match="is nan off"):
        cases.hold_weights({"a": torch.tensor([torch.nan])}, {"a": torch.ones(1)}, 1.0, "the weights")
    with pytest.raises(Unequal, match="shape"):
        cases.hold_weights({"a": torch.ones(2)}, {"a": torch.ones(1)}, 1.0, "the weights")


@pytest.mark.parametrize(("held", "keeps"), [([3, 4, 5], False), ([5, 4, 5], False), ([6, 4, 5], True)])
def test_frozen_weights_that_stay_are_a_difference(held, keeps):
    """The backward pass begins with the last layer."""
    seen = SimpleNamespace(model=SimpleNamespace(held=held[::-1]))
    trained = SimpleNamespace(run=lambda: seen)
    with pytest.raises(Unequal, match="6 after it") if keeps else contextlib.nullcontext():
        checks.frozen_weights_leave(lambda case: trained, Case())


# --- releases ------------------------------------------------------------------------------------------------------


def test_every_kept_failure_is_explained():
    kept = [PropertyAnswer(**row) for row in releases.answers().to_dict("records")]
    ours = [each for each in kept if each.adapter in ADAPTERS]
    assert {each.adapter for each in ours} == {*ADAPTERS}
    assert {each.property for each in ours} == {*PROPERTIES}
    assert [each for each in ours if each.answer == "fails" and not suite.explanation(each)] == []
    # A training that hangs has a fault that hangs, whatever else is wrong with the release.
    hang = {each.id for each in faults.table().fault if "hang" in each.symptom}
    hung = [suite.explanation(each) for each in ours if each.kind == "hangs"]
    assert [each for each in hung if not any(f"[{name}]" in each for name in hang)] == []
    assert {each.answer for each in ours if each.adapter == "ddp"} == {"holds", "not applicable"}


def test_what_the_suite_sees_is_what_its_properties_can_see():
    """A property that goes takes with it the bugs that it saw. The page says how many are left."""
    bugs = pd.read_csv(releases.COMMITTED.parent / "known/bugs.csv", keep_default_na=False)
    caught = bugs[bugs["caught"]]
    assert {*caught["property"]} <= {*PROPERTIES}
    assert {*bugs["adapter"]} <= {*ADAPTERS, ""}  # none: no adapter has the settings that it needs
    told = f"of {len(bugs)} bugs that a release fixed its properties see {len(caught)}, and our adapters"
    page = " ".join((ROOT / "reports/answers/releases.md").read_text().split())
    assert f"{told} {(caught['adapter'] != '').sum()} of these" in page


def test_answers_are_returned_for_json_and_what_fails_is_shown(ranks, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "Ranks", lambda log: contextlib.nullcontext(ranks))  # a process has imported all
    assert {*command.conform()} == {"adapters", "properties"}
    wrong = tmp_path / "mine.py"
    wrong.write_text(PYTORCH.replace("loss / trainer", "loss * 1.001 / trainer"))
    answered = command.conform((str(wrong),), only="one-update")
    assert (answered["fine"], answered["answers"][0]["kind"]) == (False, "differs")
    printed = capsys.readouterr().out
    assert "mine: 0 of 1 properties hold" in printed
    assert answered["answers"][0]["words"] in " ".join(printed.split())


def test_an_answer_is_short_and_says_its_summary_once(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    answers = [PropertyAnswer("mine", f"clip-{i}", "2.13", "", "", "not applicable", "no clipping") for i in range(40)]
    answers += [PropertyAnswer("mine", f"saves-{i}", "2.13", "", "", "not applicable", "no save") for i in range(20)]
    answers += [PropertyAnswer("mine", "sgd", "2.13", "", "", "holds")]
    answers += [PropertyAnswer("mine", "adafactor", "2.13", "", "", "refused", "a flat part is no matrix " * 9)]
    answers += [PropertyAnswer("mine", "adamw", "2.13", "", "", "fails", "the weights differ by 1e-3", "differs")]
    command._show_answers("mine", answers)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mine: 1 of 3 properties hold with torch 2.13, deepspeed -, accelerate -."
    assert lines.count(lines[0]) == 1
    assert max(map(len, lines)) <= 80
    said = " ".join(" ".join(lines).split())
    assert said.index("adamw fails: the weights differ by 1e-3") < said.index("adafactor refused: a flat part")
    assert said.count("Not applicable, no clipping: clip-0, clip-1, ") == said.count("Not applicable, no save: ") == 1
    assert len(lines) < 25


def test_study_diff_lists_the_defaults_and_the_faults_that_changed_between_two_releases():
    answer = diff(Path("deepspeed==0.18.6"), Path("deepspeed==0.19.8"))
    changed, fixed, new = (answer[name] for name in ("deepspeed-configuration", "fixed", "new"))
    assert "inner-forward" in fixed
    assert {"frozen-weights-stay", "clips-by-default"} <= {*new}
    assert "two-backward-passes" not in (*fixed, *new), "it was fixed before"
    assert changed["0.0 since 0.18.6, 1.0 since 0.19.3"] == ['gradient_clipping of {"train_batch_size": 1}']
    assert "DeepSpeedZeroOffloadOptimizerConfig.pin_memory" in str(changed["false since 0.18.6, true since 0.19.5"])


def test_answers_replace_earlier_ones_of_the_same_release(tmp_path):
    first = PropertyAnswer("mine", "sgd", "2.13.0", "1.0", "", "fails", "it is off", "differs")
    path = tmp_path / "a new folder/below/answers.csv"
    releases.keep(path, [first, dataclasses.replace(first, deepspeed="1.1")])
    releases.keep(path, [dataclasses.replace(first, answer="holds")])
    assert list(releases.answers(path)["answer"]) == ["fails", "holds"]
