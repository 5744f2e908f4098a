"""The table of known faults is what was asked, and `study stack` says which of them apply."""

import io
import itertools
import json
import re
import resource
import textwrap
import time
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import tyro
from packaging.version import Version

from study.cli.differences import diff
from study.cli.stack import stack
from study.configs.pasted import condense
from study.conform import releases, suite
from study.core import arms
from study.core.errors import Stop
from study.core.options import parsed
from study.known import faults, lists, patterns
from study.known import which_apply as rules
from study.known.faults import ANY, Fault, named, table
from study.known.stacks import Flags, Stack
from study.known.which_apply import which_apply
from tests.cases import for_each
from tests.cli.test_cli import in_this_process
from tests.conftest import ROOT, python
from tests.conftest import table as cases
from tests.shaped import changed, finished, put

LORA = "--stage 3 --peft --checkpointing"
OF_SCRIPTS = {"cuda", "keys", "script", "peft", "reentrant", "trainer"}  # conditions that no setting of a config is
STACKS = cases("known/stacks.toml")


def asked(words: str) -> dict:
    """The answer to what somebody types after `study stack`."""
    return parsed(stack, tyro.conf.OmitArgPrefixes, prog="study stack", args=words.split())


def answers(words: str) -> dict[str, str]:
    """`applies` or `applies if`, by the ids of faults."""
    return {row["id"]: row["answer"] for row in asked(words)["faults"]}


# --- the table -------------------------------------------------------------------------------------------------------


BUGS = pd.read_csv(releases.COMMITTED.parent / "known/bugs.csv")


@for_each("fault", table().fault, ids=lambda fault: fault.id)
def test_a_fault_rests_on_what_is_there(fault):
    """What can be told without the rest of the repository is told when the table is read."""
    script = f"reproductions/{fault.script}.py"
    assert not fault.script or (ROOT / script).is_file(), f"there is no {script}: correct `script`, or add it"
    read = fault.upstream or re.search(r"\.py\b|https://|#\d+", fault.why + fault.found)
    assert fault.rests_on != "sources, not run" or read, (
        "name the file that was read in `why`, or the thread in `upstream`"
    )
    if fault.rests_on == "two runs":
        (run,) = BUGS[BUGS["thread"].str.endswith(f"#{fault.upstream.rpartition('/')[2]}")].itertuples()
        assert [run.before, run.after] == [fault.until, *re.findall("right in ([^;]+)", fault.releases)]
    for package in (fault.when or {}).keys() & table().asked.keys():
        assert f"the release of {package} " in fault.asks[package], f"say `the release of {package}` in `ask`"
    if fault.when is not None:
        no_list = fault.package not in table().asked and "script" not in fault.when
        assert not no_list, "of TRL and PEFT no list is kept: ask in `script` what decides"


def test_conditions_can_be_what_flags_and_configs_say():
    """The values at the head of the table are those of the flags; a setting of a config answers all others."""
    conditions = table().questions.keys() - {"release", "range", "keys", "script", "optimizer"} - table().asked.keys()
    assert conditions == table().values.keys()
    assert conditions - OF_SCRIPTS <= {*table().settings.values()}
    for name, kind in typing.get_type_hints(Flags).items():
        literals = {each for part in typing.get_args(kind) for each in typing.get_args(part)}
        if name in conditions and literals:
            assert literals <= {*table().values[name]}, name
    assert len(table().fault) >= 75


WRONG = cases("known/wrong_faults.toml")


def fault_of_contributing() -> dict:
    """The fault that CONTRIBUTING.md shows."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = re.search(r"^    \[\[fault\]\]\n(?:    .+\n)+", text, re.MULTILINE)[0]
    (row,) = tomllib.loads(textwrap.dedent(block))["fault"]
    return row


def table_with(fault: dict, folder: Path) -> Path:
    """The table of faults with another one, and with few of its own."""
    content = tomllib.loads(faults.TABLE.read_text())
    content["fault"] = [*[each for each in content["fault"] if each["id"] == "last-pass-only"], fault]
    (folder / "faults.json").write_text(json.dumps(content))  # which is read as TOML is
    return folder / "faults.json"


@for_each("name", WRONG)
def test_a_wrong_fault_is_named_when_the_table_is_read(name, tmp_path, monkeypatch):
    wrong = WRONG[name]
    fault = fault_of_contributing() | wrong.get("fault", {})
    fault["when"] |= ({"keys": [wrong["key"]]} if "key" in wrong else {}) | wrong.get("when", {})
    fault.pop(wrong.get("without"), None)
    monkeypatch.setattr(faults, "TABLE", table_with(fault, tmp_path))
    with pytest.raises(Stop) as stop:
        table.__wrapped__()
    assert wrong["said"] in stop.value.what
    assert fault["id"] in stop.value.what
    assert stop.value.remedy == "correct that fault: Fault in study/known/faults.py explains each key"


@pytest.mark.parametrize(
    "keys",
    [
        {"zero_optimization.overlap_comm": ["none", "auto", "true", "1"]},
        {"zero_optimization.sub_group_size": 5},
        {"zero_optimization.offload_param.device": "absent"},
        {"optimizer.params.lr": True, "checkpoint.writer.any": ["x"]},
        {"deepspeed_config.zero3_init_flag": False, "max_grad_norm": ["0.5"]},
    ],
)
def test_a_fault_with_keys_that_are_right_is_read_and_told(keys, tmp_path, monkeypatch):
    fault = fault_of_contributing() | {"when": {"keys": [keys]}}
    monkeypatch.setattr(faults, "TABLE", table_with(fault, tmp_path))
    fault = table.__wrapped__().fault[-1]
    assert fault.asks["keys"] == "Is overlap_comm true?"
    for seen in (None, "auto", "none", 10, True, "x", {}):
        assert isinstance(rules._fits(seen, next(iter(keys.values()))), bool)


def test_the_releases_that_were_asked_are_those_of_the_kept_answers():
    kept = releases.answers()
    for package, adapters in {"deepspeed": "zero", "accelerate": "accelerate-(?!conf|rep)"}.items():
        assert {*kept[kept["adapter"].str.match(adapters)][package]} == {*table().asked[package]}


def test_a_range_is_as_wide_as_the_answers_and_no_wider():
    """In each release of a range that was asked, one of its properties fails; in those beside it one holds."""
    kept = releases.answers()
    checked = 0
    for fault in table().fault:
        if fault.rests_on != "tests of study conform" or not fault.adapters or fault.properties == ("*",):
            continue
        rows = kept[kept["adapter"].isin(fault.adapters) & kept["property"].isin(fault.properties)]
        failing = rows[rows["answer"].isin(["fails", "refused"])]
        inside = [each for each in {*rows[fault.package]} if each and fault.contains(Version(each))]
        assert {*inside} <= {*failing[fault.package]}, fault.id
        beside = [each for each in table().asked[fault.package] if fault.has(Version(each)) is False]
        right = {*rows[rows["answer"] == "holds"][fault.package]}
        for neighbour in re.findall(r"right in ([\d.]+)(?: and ([\d.]+))?", fault.releases):
            assert {*filter(None, neighbour)} <= right & {*beside}, fault.id
        checked += 1
    assert checked >= 20


def test_a_draft_fits_a_screen_and_is_in_the_list_of_what_was_filed():
    listed = (ROOT / "MAINTAINING.md").read_text()
    for draft in (ROOT / "reports/upstream").iterdir():
        assert len(draft.read_text().splitlines()) <= 40, draft
        assert f"| `{draft.stem}` |" in listed


def test_the_fault_that_contributing_shows_is_one():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    row = fault_of_contributing()
    Fault.model_validate_json(json.dumps(row))
    assert {"keys"} == row["when"].keys() & row["ask"].keys()
    assert f'`{row["id"]} = "deepspeed=={row["since"]} --stage 2"`' in text


def test_diagnose_has_the_range_and_the_remedy_of_the_table():
    from study.known.findings import texts

    uses = {id: text["fault"] for id, text in texts().items() if "fault" in text}
    assert len(uses) >= 4
    assert {named(fault).id for fault in uses.values()} == {*uses.values()}


# --- remedies --------------------------------------------------------------------------------------------------------

OF_TRAINER = {"offload": "none", "ranks": 2, "trainer": None, "cuda": True}  # where a fault does not say another
NAMED = re.compile(r"(?:(deepspeed|accelerate|transformers|TRL|PEFT) |(?<= or ))(\d+\.[\d.]*\d)( or later)?")
SETTING = re.compile(r"(?:take|or) stage (\d)")


def known_releases(package: str) -> set[Version]:
    """All releases of a package of which the table knows anything."""
    listed = itertools.chain(table().asked.get(package, ()), *(each.asked for each in of_package(package)))
    return {Version(release) for release in listed}


def of_package(package: str) -> list[Fault]:
    return [fault for fault in table().fault if fault.package == package and fault.when]


def recommended(fault: Fault) -> Iterator[tuple[str, Version]]:
    """The releases that its remedies name, and with `or later` those after them."""
    for do in (fault.do, *fault.do_with.values()):
        package = ""
        for name, release, later in NAMED.findall(do):
            package = name.replace("TRL", "trl") or package
            least = Version(release)
            yield package, least
            yield from ((package, each) for each in known_releases(package) if later and each > least)


def trainings(fault: Fault) -> Iterator[dict]:
    """The trainings that have it, by conditions; what no setting says is left out."""
    conditions = {name: fits for name, fits in fault.when.items() if name not in {"script", *table().asked}}
    values = [fits if isinstance(fits, list) else [fits] for fits in conditions.values()]
    for chosen in itertools.product(*values):
        facts = OF_TRAINER | dict(zip(conditions, chosen, strict=True))
        yield facts


def certain(fault: Fault, used: dict, facts: dict) -> set[str]:
    """The faults that surely apply to who has this one: what is asked about its script is so of these, too."""
    for package in fault.when.keys() & table().asked.keys():
        used = {package: Version(re.findall(r"[\d.]+", fault.when[package])[0])} | used
    key = None
    if "keys" in facts:
        first = {path: fits[0] if isinstance(fits, list) else fits for path, fits in facts["keys"].items()}
        key = {path: None if fits == "absent" else fits for path, fits in first.items()}.get
    found = [each for each in which_apply(Stack(used, facts, key)) if each.is_tested]
    questions = {each.fault.id: " ".join(question.text for question in each.why) for each in found}
    return {id for id, asked in questions.items() if asked in ("", fault.asks.get("script"))} - {fault.id}


def worse(fault: Fault, ids: set[str]) -> set[str]:
    """Those that are as silent as it, and that its remedies do not name."""
    silent = table().silent
    told = {id for id in ids if id in fault.do}
    return {id for id in ids if named(id).symptom.startswith(silent) or not fault.symptom.startswith(silent)} - told


WITH_REMEDY = [fault for fault in table().fault if fault.when]


@for_each("fault", WITH_REMEDY, ids=lambda fault: fault.id)
def test_no_remedy_brings_a_fault_that_is_as_silent(fault):
    bad = [release for release in known_releases(fault.package) if fault.has(release)]
    for facts in trainings(fault):
        before = [certain(fault, {fault.package: release}, facts) for release in bad]
        for package, release in recommended(fault):
            used = {fault.package: bad[-1], package: release}
            assert worse(fault, certain(fault, used, facts) - set.intersection(*before)) == set(), (package, release)
        for stage in SETTING.findall(fault.do):
            for release, had in zip(bad, before, strict=True):
                now = certain(fault, {fault.package: release}, facts | {"stage": int(stage)})
                assert worse(fault, now - had) == set(), (stage, release)


def test_no_remedy_of_a_trainer_is_wrong_under_another_engine():
    """Who takes TRL 1.9.0 for one thing under stage 3 does the same under DDP."""
    checked = 0
    for fault in of_package("trl") + of_package("PEFT"):
        for package, release in recommended(fault):
            same = [each for each in of_package(package) if each.when["script"] == fault.when["script"]]
            assert [each.id for each in same if each.has(release) and each.symptom.startswith(table().silent)] == []
            checked += 1
    assert checked > 10


# --- which faults apply ----------------------------------------------------------------------------------------------


@for_each("words", STACKS["typed"])
def test_what_is_typed_is_a_whole_question(words):
    """A trainer forces a setting, a release that was not asked is no answer, and a range is what may be in it."""
    (fault, answer), *others = STACKS["typed"][words].items()
    assert others == []
    assert answers(words).get(fault, "") == answer


@pytest.mark.parametrize(
    ("trainer", "remedy"),
    [("trl", "pin deepspeed==0.19.2, which needs use_reentrant=True"), ("own", 'kwargs={"use_reentrant": False}')],
)
def test_the_remedy_is_one_that_can_be_followed_in_the_trainer(trainer, remedy):
    faults = asked(f"deepspeed==0.19.8 trl==1.16.0 {LORA} --reentrant --trainer {trainer}")["faults"]
    (row,) = [row for row in faults if row["id"] == "frozen-weights-stay"]
    assert remedy in row["do"]


def test_no_remedy_names_a_release_without_the_condition_under_which_it_trains():
    """0.19.2 ends in a CheckpointError with frozen weights, without reentrance: a run on an H200 did."""
    for id in ("frozen-weights-stay", "frozen-weights-stay-in-own-layers"):
        remedies = [named(id).do, *named(id).do_with.values()]
        assert all("needs use_reentrant=True" in each for each in remedies if "0.19.2" in each)
    assert named("frozen-not-reentrant").rests_on == "runs on a GPU"


def test_releases_without_any_known_fault_are_said(capsys):
    """0.17.5 is right under stage 2, and clips wrongly under torch_autocast."""
    words = "deepspeed==0.17.6 --stage 2 --passes 4"
    assert "0.17.5" in asked(words)["free"]["deepspeed"]
    free = asked(f"{words} --precision bf16_autocast")["free"]["deepspeed"]
    assert "0.17.5" not in free
    assert free[:2] == ["0.19.8", "0.19.7"]
    printed = capsys.readouterr().out.replace("\n", " ")
    assert re.search(r"With deepspeed 0.19.8 or 0.19.7 or .* no known fault of deepspeed surely applies here", printed)
    assert asked("deepspeed==0.19.8 --stage 3 --optimizer adafactor")["free"] == {"deepspeed": []}
    assert "Each release of deepspeed that was tested has a known fault here." in capsys.readouterr().out


def test_what_was_not_asked_is_said(capsys):
    answer = asked("deepspeed==0.18.7 torch==2.13.0 accelerate --stage 2 --passes 4")
    assert answer["not_asked"] == ["deepspeed 0.18.7", "accelerate (release not said)"]
    assert "\nNot tested by us in this release: deepspeed, accelerate.\n" in capsys.readouterr().out
    (row,) = [row for row in answer["faults"] if row["id"] == "inner-forward"]
    assert row["question"].startswith(
        "Nobody tested this with deepspeed 0.18.7: 0.18.6 and 0.18.9, beside it, have it. Does a loss"
    )


# The lines of patterns.py behind which an example stands, by the name of their pattern.
PATTERNS = re.findall(
    r'^(\w+) = re\.compile\(\n    r"""\n(.*?)^    """', Path(patterns.__file__).read_text(), re.M | re.S
)
EXAMPLES = [(name, each) for name, lines in PATTERNS for each in re.findall(r"\bas: +(.+)", lines)]


@for_each(("name", "example"), EXAMPLES)
def test_each_line_of_a_pattern_reads_its_example(name, example):
    assert len(PATTERNS) == 7
    example = example.replace("\\n", "\n")
    assert getattr(patterns, name).search(example)
    if name == "LISTED":
        (found,) = lists.listed(example)
        assert found == "torch" if "torch" in example else "deepspeed"


def test_a_list_may_come_through_a_pipe(monkeypatch):
    """As a log may, for `study diagnose -`."""
    piped = io.TextIOWrapper(io.BytesIO(b"deepspeed==0.17.6\ntorch==2.10.0\n"))
    monkeypatch.setattr(condense.sys, "stdin", piped)
    assert asked("- --stage 2 --passes 4")["first"].startswith("deepspeed 0.17.6, torch 2.10.0: 1 known fault applies")


@for_each("text", STACKS["list"])
def test_a_release_is_read_from_lists_projects_locks_and_threads(text, tmp_path):
    (tmp_path / "list").write_text(text)
    for word in (str(tmp_path / "list"), text + "\n" * 300):  # in quotes: longer than a name can be
        versions = lists.releases((word,))
        assert {name: str(release) for name, release in versions.items()} == STACKS["list"][text]


@pytest.mark.parametrize("row", STACKS["several"], ids=lambda row: row["used"] or "contradiction")
def test_of_several_lists_none_is_left_out(row, tmp_path):
    """As pip takes them together. Where they contradict each other, nobody knows which release is used."""
    paths = [tmp_path / f"{number}.txt" for number, _ in enumerate(row["lists"])]
    for path, text in zip(paths, row["lists"], strict=True):
        path.write_text(text)
    for words in (paths, [*reversed(paths)], row["lists"]):
        words = tuple(map(str, words))
        assert str(lists.releases(words)["deepspeed"]) == row["used"]
        said = " ".join(lists.notes(words, lists.releases(words)))
        assert all(each in said for each in row.get("said", ()))
        assert bool(said) == ("said" in row)


@pytest.mark.parametrize("row", STACKS["rows"], ids=lambda row: row["config"] + row["flags"])
def test_passes_follow_from_rows_and_ranks_as_deepspeed_derives_them(row, tmp_path):
    config = json.loads(row["config"]) | {"zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    words = f"deepspeed==0.17.6 --config {tmp_path}/ds.json {row['flags']}"
    if "refused" in row:
        with pytest.raises(Stop, match=row["refused"]):
            asked(words)
        return
    (question,) = [fault["question"] for fault in asked(words)["faults"] if fault["id"] == "last-pass-only"] or [None]
    assert question == {None: "Has an update several micro-batches (--passes)?", 1: None, 4: ""}[row.get("passes")]


@pytest.mark.parametrize(("flags", "said"), STACKS["overruled"].items())
def test_a_flag_that_says_otherwise_than_the_config_is_told(flags, said, tmp_path, capsys):
    config = {"train_batch_size": 8, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}
    config |= {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW"},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    asked(f"deepspeed==0.19.8 --config {tmp_path}/ds.json {flags}")
    printed = " ".join(capsys.readouterr().out.split())
    assert re.findall(r"--\w+(?: \w+)? counts, and not the config's [^.]*\.", printed) == said


@pytest.mark.parametrize(("optimizer", "is_known"), [("shampoo", False), ("FusedAdam", True), ("adamw_torch", True)])
def test_an_optimizer_that_no_fault_names_is_said(optimizer, is_known, capsys):
    asked(f"deepspeed==0.19.8 --stage 2 --optimizer {optimizer}")
    assert (f"--optimizer '{optimizer}' is none of sgd, adam," in capsys.readouterr().out) != is_known


def test_a_record_says_its_own_releases_and_words_others(tmp_path):
    put(tmp_path, changed(finished("mine"), software__deepspeed="0.17.4"))
    config = f"--config {tmp_path}/mine"
    assert "deepspeed 0.17.4" in asked(config)["first"]
    assert "deepspeed 0.18.4" in asked(f"deepspeed==0.18.4 {config}")["first"]


def test_a_config_answers_what_flags_would(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in STACKS["config"].items():
        Path(name).write_text(text)
    zero2, zenflow, fsdp = (answers(f"deepspeed==0.19.8 torch==2.13.0 --config {name}") for name in STACKS["config"])
    assert "L-01" not in zero2
    assert zenflow["L-01"] == "applies"
    assert "fsdp2-one-rank-without-gradient" in fsdp
    assert "one-rank-without-gradient" not in fsdp
    answer = asked("deepspeed==0.17.6 --config zero2.json")
    assert not answer["fine"]
    assert answer["first"] == "deepspeed 0.17.6: 1 known fault applies."


@pytest.mark.parametrize(
    ("name", "config", "precision"),
    [
        ("ds.json", '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}', "bf16"),
        ("ds.json", '{"fp16": {"enabled": true}, "zero_optimization": {"stage": 1}}', "fp16"),
        (
            "ds.json",
            '{"torch_autocast": {"enabled": true, "dtype": "bfloat16"}, "zero_optimization": {"stage": 1}}',
            "bf16_autocast",
        ),
        ("fsdp.yaml", "distributed_type: FSDP\nmixed_precision: fp16\nfsdp_config: {fsdp_version: 2}", "fp16_autocast"),
        ("fsdp.yaml", "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {fsdp_version: 2}", "bf16_autocast"),
    ],
)
def test_a_precision_of_a_config_is_that_of_the_flag(name, config, precision, tmp_path, capsys):
    """Each fault that asks for a precision answers to both alike, and neither overrules the other. Of keys a flag says
    nothing."""
    (tmp_path / name).write_text(config)
    flag = "--stage 1" if name == "ds.json" else "--fsdp2"
    asking = {each.id for each in table().fault if "precision" in (each.when or {}) and "keys" not in each.when}
    seen = set()
    for release in ("0.17.5", "0.18.9"):
        listed = f"deepspeed=={release} accelerate==1.6.0 torch==2.13.0"
        by_config = {row["id"] for row in asked(f"{listed} --config {tmp_path}/{name}")["faults"]}
        assert by_config & asking == answers(f"{listed} {flag} --precision {precision}").keys() & asking
        seen |= by_config & asking
    assert seen
    asked(f"{listed} --precision {precision} --config {tmp_path}/{name}")
    assert "counts, and not" not in capsys.readouterr().out


@for_each("row", STACKS["mentioned"], ids=lambda row: f"{row['fault']}-{row['answer'] or 'not'}")
def test_what_a_config_does_not_mention_is_not_asked(row, tmp_path):
    (tmp_path / "config.json").write_text(row["config"])
    words = f"deepspeed=={row.get('deepspeed', '0.18.3')} transformers=={row.get('transformers', '5.23.0')}"
    words += " accelerate==1.13.0 torch==2.13.0 --trainer trainer"
    assert answers(f"{words} --config {tmp_path}/config.json").get(row["fault"], "") == row["answer"]
    assert row["fault"] in answers(f"{words} {row.get('flags', '--stage 3')}"), "nothing says it there"


def test_the_command_says_its_answer_first_and_with_a_fault_it_ends_with_1(monkeypatch, capsys):
    assert in_this_process(monkeypatch, "stack deepspeed==0.17.6 --stage 2 --passes 4 --json") == 1
    row = json.loads(capsys.readouterr().out)["faults"][0]
    assert {"id", "answer", "sentence", "do", "question"} <= row.keys()
    assert (row["id"], row["answer"], row["question"]) == ("last-pass-only", "applies", "")
    right = asked("deepspeed==0.19.8 --stage 3 --symptom hang")
    assert (right["fine"], right["faults"][0]["symptom"]) == (True, "hang")
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == right["first"]
    assert max(len(line) for line in lines if "https://" not in line) <= 100


@pytest.mark.parametrize(("word", "symptom"), STACKS["symptoms"].items())
def test_a_symptom_may_be_said_in_the_words_of_people(word, symptom):
    """And it comes first: a loss that is scaled is a loss, too."""
    first = asked(f"deepspeed==0.17.6 transformers==5.5.0 --trainer trainer --stage 3 --symptom {word}")["faults"]
    fitting = [symptom in row["symptom"] for row in first]
    assert fitting == sorted(fitting, reverse=True)
    assert any(fitting)


def test_each_symptom_of_a_fault_can_be_asked_for():
    for fault in of_package("deepspeed") + of_package("transformers"):
        assert any(symptom in fault.symptom for symptom in table().symptoms), fault.id


def test_a_light_install_is_enough_and_it_takes_less_than_a_second():
    code = "import sys; from study.cli import main; sys.argv = ['study', 'stack', 'deepspeed==0.19.8']"
    code += "; main(); print('torch' in sys.modules)"

    def seconds() -> float:
        before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        assert python("-c", code).stdout.splitlines()[-1] == "False"
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before_s

    assert any(seconds() < 1 for _ in range(3)), "in one of three, because others compute on this machine too"


def test_a_newcomer_reads_five_faults_that_may_apply_and_one_line_on_the_others(capsys):
    """Those of which a flag or the config speaks: stage, ranks and GPUs are said of each training."""
    words = "deepspeed==0.18.4 --stage 3 --peft --checkpointing"
    faults = asked(words)["faults"]
    printed = " ".join(capsys.readouterr().out.split())
    shown = [row for row in faults if f"May apply: {' '.join(row['sentence'].split())}" in printed]
    assert 1 <= len(shown) <= 5
    assert all({*row["when"]} & {"peft", "checkpointing"} for row in shown)
    assert all(" ".join(row["question"].split()) in printed for row in shown)
    assert re.search(rf"{len(faults) - len(shown)} more may apply.*Give --config, .*; --details lists all\.", printed)
    several = "are" if len(shown) > 1 else "is"
    assert (
        f"known faults surely applies, and {len(faults)} may, {len(shown)} of which {several} worth a look." in printed
    )
    asked(f"{words} --details")
    details = " ".join(capsys.readouterr().out.split())
    assert all(row["do"] in details for row in faults)
    asked("deepspeed==0.18.4 --stage 3")
    assert capsys.readouterr().out.count("May apply") == 3, "of nothing special the likeliest"


@pytest.mark.parametrize(
    ("release", "fault"),
    [("0.18.3", "scale-wrt-gas-unread"), ("0.17.6", "last-pass-only"), ("0.18.0", "last-pass-only")],
)
def test_a_fault_of_few_releases_that_one_question_decides_is_shown_first(release, fault, tmp_path, capsys):
    """It says more of the training than a fault of all releases does."""
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "gradient_accumulation_steps": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    words = f"deepspeed=={release} transformers==4.57.3 --trainer trainer --config {tmp_path}/ds.json"
    assert "applies" not in answers(words).values()
    first = capsys.readouterr().out.partition("May apply: ")[2].partition("May apply: ")[0]
    assert f"[{fault}]" in " ".join(first.split())
    assert "(--passes)?" in first


LISTED = "torch==2.9.1\ntransformers==4.57.3\naccelerate==1.12.0\npeft==0.18.0\ntrl==0.26.0\n"


@pytest.mark.parametrize("words", ["", "--fsdp1", "--symptom loss", "--symptom norm"])
def test_a_whole_list_shows_nothing_of_a_method_or_a_package_that_is_not_named(words, tmp_path, capsys):
    """Few train by GRPO, and what needs DeepSpeed hits nobody who does not install it."""
    path = tmp_path / "requirements.txt"
    path.write_text(LISTED)
    rows = asked(f"{path} {words}")["faults"]
    assert not re.search("May apply: (GRPO|DPO|ORPO)", capsys.readouterr().out)
    assert not {"L-46", "L-47"} & {row["id"] for row in rows}
    path.write_text(f"{LISTED}-r more.txt\n")
    assert words == "--fsdp1" or "L-46" in answers(f"{path} {words}"), "the other list may have deepspeed"
    path.write_text(f"{LISTED}deepspeed==0.19.8\n")
    assert words == "--fsdp1" or "L-46" in answers(f"{path} {words}")


def test_a_method_that_is_named_is_shown(capsys):
    words = ["trl==0.25.1", "--symptom", "the loss of GRPO differs"]
    parsed(stack, tyro.conf.OmitArgPrefixes, prog="study stack", args=words)
    assert "GRPO's losses" in " ".join(capsys.readouterr().out.split())


def test_releases_alone_name_the_worst_that_flags_decide(capsys):
    """It is wrong without a message. A trainer in the list does not hide it."""
    for words in ("deepspeed==0.17.6", "deepspeed==0.17.6 trl>=0.20 peft"):
        asked(words)
        first = capsys.readouterr().out.partition("May apply: ")[2]
        assert first.startswith("Stage 2 keeps only the last micro-batch")
    asked("transformers==4.57.1")
    assert capsys.readouterr().out.count("Nobody tested this with transformers 4.57.1") <= 3


ANSWERS = {
    "--config": [[]],
    "--stage": [["--stage", "0"], ["--stage", "1"], ["--stage", "2"], ["--stage", "3"], ["--fsdp2"], ["--ddp"]],
    "--ranks": [["--ranks", "1"], ["--ranks", "8"]],
    "--passes": [["--passes", "1"], ["--passes", "8"]],
    "--precision": [["--precision", "fp32"], ["--precision", "bf16_autocast"]],
    "--optimizer": [["--optimizer", "adamw"], ["--optimizer", "muon"]],
    "--offload": [["--offload", "none"], ["--offload", "cpu"]],
    "--trainer": [["--trainer", "own"], ["--trainer", "trl"]],
}


@pytest.mark.parametrize(
    "words",
    [
        "deepspeed==0.19.8",
        "deepspeed==0.19.8 --stage 2",
        "deepspeed==0.18.2 --stage 3 --peft",
        "torch==2.9.0 --fsdp2",
        "trl==1.8.0",
        "trl==1.8.0 transformers==5.20.0 deepspeed==0.18.2 --stage 3 --ranks 4 --passes 2",
        "accelerate==1.8.1 --stage 2 --precision bf16",
        "deepspeed --stage 1",
        "deepspeed==0.17.6 trl>=0.20 peft",
    ],
)
def test_each_flag_that_is_named_would_rule_out_a_fault(words, capsys, tmp_path):
    may = {row["id"] for row in asked(words)["faults"]}
    said = " ".join(capsys.readouterr().out.split())
    named = re.findall(r"(?:To tell which, give|Give) ([^.;]*?)(?:\.| to check)", said)
    flags = re.findall(r"--[\w-]+|the release of \w+", " ".join(named))
    assert len(flags) <= 3
    assert flags
    config = tmp_path / "ds.json"
    config.write_text('{"zero_optimization": {"stage": 2}}')
    for name in flags:
        if name.startswith("the release"):
            package = name.split()[-1]
            given = [f"{package}=={release}" for release in table().asked[package]]
        elif name == "--config":
            given = [f"--config {config}"]
        else:
            given = [" ".join(each) for each in ANSWERS.get(name, [[name], [name.replace("--", "--no-")]])]
        others = words.removeprefix(f"{package} ") if name.startswith("the release") else words
        left = [{row["id"] for row in asked(f"{each} {others}")["faults"]} for each in given]
        assert any(may - each for each in left), name


def test_the_first_lines_say_the_worst_that_applies_and_one_fault_once(capsys):
    asked("deepspeed==0.18.2 --stage 2 --passes 4")
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("deepspeed 0.18.2: 1 known fault applies. 1. Stage 2 keeps only the last micro-batch")
    assert printed.count("Stage 2 keeps only the last micro-batch") == 1


def test_ddp_and_fsdp1_can_be_asked():
    assert answers("trl==1.10.0 transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 --ddp")["trl-liger-past-ddp"]
    assert "trl-liger-past-ddp" not in answers("trl==1.10.0 --fsdp1")
    with pytest.raises(Stop, match="--fsdp1 and --ddp exclude each other"):
        asked("deepspeed==0.19.8 --ddp --fsdp1")


def test_a_symptom_may_be_a_sentence_with_numbers():
    words = ["--symptom", "loss is 0 and grad_norm 1.414 after a few hundred steps"]
    command = ["deepspeed==0.17.2", "--stage", "2", *words]
    answer = parsed(stack, tyro.conf.OmitArgPrefixes, prog="study stack", args=command)
    assert any(row["id"] == "overlap-buffer-overwritten" for row in answer["faults"][:20])
    assert answer["faults"][0]["symptom"].startswith(("norm", "loss"))
    with pytest.raises(Stop, match="names nothing that faults are known by"):
        asked("deepspeed==0.17.2 --symptom purple")


def test_of_what_was_seen_that_comes_first_of_which_most_is_said(capsys):
    words = ["deepspeed==0.19.5", "--stage", "3", "--peft", "--symptom", "out of memory"]
    answer = parsed(stack, tyro.conf.OmitArgPrefixes, prog="study stack", args=words)
    assert answer["faults"][0]["id"].startswith("frozen-weights-stay")
    first = capsys.readouterr().out.partition("May apply: ")[2]
    assert first.startswith("Each rank keeps nearly the whole frozen model")
    assert "--peft" not in first
    assert "--stage" not in first.partition("May apply: ")[0]


@pytest.mark.parametrize(
    ("old", "new", "brought"),
    [("trl==1.8.0", "trl==1.12.0", "trl-liger-past-ddp"), ("peft==0.15.1", "peft==0.15.0", "")],
)
def test_two_releases_of_any_package_are_compared_in_any_order(old, new, brought):
    there, back = diff(Path(old), Path(new)), diff(Path(new), Path(old))
    assert there == back
    assert (brought in there["new"]) == bool(brought)
    assert there["fixed"]
    with pytest.raises(Stop, match="nothing is known"):
        diff(Path("numpy==1.0"), Path("numpy==2.0"))


def test_a_release_between_two_is_as_they_are_and_that_is_said(capsys):
    """0.15.3 was not asked; 0.15.0 and 0.15.4 were. A range is not widened: beyond it nothing is inferred."""
    between = diff(Path("deepspeed==0.15.3"), Path("deepspeed==0.19.8"))
    printed = capsys.readouterr().out
    assert "Nobody tested 0.15.3: what it has is inferred by its neighbours 0.15.0 and 0.15.4." in printed
    assert "What changes in configs and defaults is known of 0.15.0 and 0.19.8" in printed
    assert between["fixed"] == diff(Path("deepspeed==0.15.4"), Path("deepspeed==0.19.8"))["fixed"] != []
    assert "Nobody tested" not in capsys.readouterr().out
    diff(Path("deepspeed==0.15.1"), Path("deepspeed==0.15.3"))
    assert "From deepspeed 0.15.1 to 0.15.3: no test of ours tells them apart." in capsys.readouterr().out
    diff(Path("deepspeed==0.17.6"), Path("deepspeed==99.0"))
    assert "Nobody tested 99.0: this is of" in capsys.readouterr().out
    with pytest.raises(Stop, match=r"no test of ours tells 98\.0 and 99\.0 apart"):
        diff(Path("deepspeed==98.0"), Path("deepspeed==99.0"))
    fault = named("clips-by-default")
    assert fault.inferred(Version("0.19.2")) is False
    assert fault.inferred(Version("99")) is None


@pytest.mark.parametrize(
    "words",
    [
        "deepspeed==0.15.3 transformers==5.10 trl==0.29",
        "deepspeed==0.15.3 transformers==5.10 trl==0.15.3",
        "deepspeed==0.15.3 accelerate==1.9.9 --stage 2",
        "deepspeed==0.18.7",
        "deepspeed==0.1.0",
        "transformers==4.57.1",
    ],
)
def test_some_faults_are_listed_where_the_range_encloses_the_release(words, capsys):
    faults = asked(words)["faults"]
    printed = " ".join(capsys.readouterr().out.split())
    inside = [row["id"] for row in faults if row["inside"]]
    listed = [row["id"] for row in faults if f"[{row['id']}]" in printed]
    assert len(listed) >= min(3, len(inside))
    assert {*listed} <= {*inside}
    assert ("more may apply" in printed) == bool(listed)


@pytest.mark.parametrize("words", STACKS["order"])
def test_what_is_wrong_without_a_message_comes_first_where_as_much_is_open(words):
    """A release between two that have a fault is not among those that nobody asked, which come last."""
    expected = STACKS["order"][words]
    assert [fault for fault in answers(words) if fault in expected] == expected


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_two_faults_ask_the_same(stage):
    asked_for = [row["question"] for row in asked(f"deepspeed==0.18.4 --stage {stage}")["faults"]]
    scripts = [question for question in asked_for if "--" not in question]
    assert len({*scripts}) == len(scripts) > 3


def test_a_fault_that_a_flag_alone_decides_names_it(capsys):
    """Without its question it would read as if it applied, below a line that says none does."""
    asked("deepspeed==0.19.5 trl==1.9.0 transformers==5.17.0 --stage 3 --peft")
    printed = " ".join(capsys.readouterr().out.split())
    assert "right in 0.19.2). [frozen-weights-stay] Are activations recomputed (--checkpointing)?" in printed


@for_each("arm", arms.NAMES)
def test_nothing_is_said_to_apply_to_the_arms_of_this_study(arm):
    """They train as DDP does, to which other tests hold them."""
    found = answers(f"--trainer own --config {ROOT}/accelerate_configs/{arm}.yaml")
    assert "applies" not in found.values()
    assert bool(found) == (arm != "single")  # of DDP, a stream that is split already


def test_a_question_names_in_its_text_what_answers_it_and_nothing_else():
    """Whatever the text: who reads it and who sorts by it see the same."""
    every_package = dict.fromkeys([*(fault.package for fault in table().fault), *table().asked], ANY)
    questions = [
        (each.fault.id, question)
        for trainer in (*table().trainers, None)
        for each in which_apply(Stack(every_package, {"trainer": trainer}))
        for question in each.why
    ]
    assert {question.condition for _, question in questions} >= {"stage", "script", "keys", "passes", "torch", "trl"}
    for id, each in questions:
        named = re.findall(r"--[a-z0-9-]+|the release of [\w-]+", each.text)
        remedy = f"{id}: its `ask` about {each.condition} must name {each.flag or 'no flag'}: {each.text}"
        assert ", ".join(named) == each.flag, remedy
        assert each.text.count("?") == 1, f"{id}: ask one question about {each.condition}: {each.text}"


def test_a_stack_leaves_the_releases_of_its_caller_alone():
    listed = {"deepspeed": Version("0.19.8"), "trl": Version("1.9.0")}
    stack = Stack.of(listed, Flags(stage=3))
    assert listed == {"deepspeed": Version("0.19.8"), "trl": Version("1.9.0")}
    assert [*stack.releases] == ["deepspeed", "trl", "transformers", "accelerate"]
    assert Stack.of({}, Flags(fsdp2=True)).releases == {"torch": ANY}


@pytest.mark.parametrize("version", ["{}", "{fsdp_version: auto}", "{fsdp_version: 2}"])
def test_an_open_version_of_fsdp_hides_no_fault_of_fsdp2(version, tmp_path):
    (tmp_path / "fsdp.yaml").write_text(f"{{output_dir: runs, fsdp: full_shard, fsdp_config: {version}}}")
    assert "fsdp2-one-rank-without-gradient" in answers(f"torch==2.13.0 --config {tmp_path}/fsdp.yaml")


def test_a_release_is_compared_as_a_release():
    assert asked("accelerate==1.15 --stage 2")["not_asked"] == ["deepspeed (release not said)"]


def test_an_explanation_is_the_first_fault_that_fits():
    lost = suite.PropertyAnswer("zero2", "accumulation-4", "2.13.0", "0.17.6", "", "fails")
    assert suite.explanation(lost).startswith("known bug: deepspeedai/DeepSpeed#7718")
    assert suite.explanation(suite.PropertyAnswer("zero2", "accumulation-4", "2.13.0", "0.18.3", "", "fails")) == ""


# --- public threads, with the releases and settings that they name, and stacks in which nothing is known to be wrong


def replayed(row: dict, folder: Path) -> dict[str, str]:
    """The answer to a list, flags and a config, as somebody would type them."""
    (folder / "list.txt").write_text(row["list"])
    (folder / "config.yaml").write_text(row.get("config", ""))  # JSON is YAML
    config = f"--config {folder}/config.yaml" if "config" in row else ""
    return answers(f"{folder}/list.txt {row.get('flags', '')} {config}")


def test_public_threads_get_their_faults(tmp_path):
    threads = STACKS["thread"]
    known = [row["at"] for row in threads if "missed" not in row]
    assert len({row["at"] for row in threads}) == len(threads) >= 20
    assert len(known) >= 0.68 * len(threads), "of those that were chosen before it was asked"
    threads += STACKS["second"] + STACKS["third"]
    missing = [row["at"] for row in threads if row.get("fault") not in {None, *replayed(row, tmp_path)}]
    assert missing == []


@for_each("row", STACKS["healthy"], ids=lambda row: row["at"])
def test_nothing_is_said_to_apply_to_a_healthy_stack(row, tmp_path):
    assert "applies" not in replayed(row, tmp_path).values()


def test_a_text_of_nothing_but_beginnings_is_read_in_seconds():
    started = time.monotonic()
    for text in ("deepspeed[" * 20_000, "deepspeed " * 20_000, "deepspeed==" * 20_000):
        assert lists.listed(text) == {"deepspeed": ANY}
    assert time.monotonic() - started < 8


@pytest.mark.parametrize("words", ["deepspeed==0.17.2", "deepspeed==0.17.2 trl==0.19.1 peft==0.16.0"])
def test_what_trains_wrongly_in_usual_precisions_comes_first(words, capsys):
    """Before faults of fp16, of which few hear anything, and of optimizers that few take."""
    asked(words)
    shown = re.findall(r"\[([\w-]+)\]", capsys.readouterr().out)
    assert shown[0] == "overlap-buffer-overwritten"
    assert not [id for id in shown if "fp16" in id or "muon" in id]


def test_a_config_may_stand_among_the_releases(tmp_path, capsys):
    config = tmp_path / "ds.json"
    config.write_text('{"zero_optimization": {"stage": 2, "overlap_comm": true}}')
    by_flag = asked(f"deepspeed==0.17.2 --config {config}")
    assert asked(f"deepspeed==0.17.2 {config}") == by_flag
    assert by_flag["faults"][0]["id"] == "overlap-buffer-overwritten"
    other = tmp_path / "other.json"
    other.write_text(config.read_text())
    for words in (f"deepspeed==0.17.2 {config} {other}", f"deepspeed==0.17.2 {config} --config {other}"):
        with pytest.raises(Stop, match="several configs are given"):
            asked(words)


def test_a_config_wins_over_a_log_and_that_is_said(tmp_path, capsys):
    config, log = tmp_path / "ds.json", tmp_path / "train.log"
    config.write_text('{"zero_optimization": {"stage": 2}}')
    log.write_text("deepspeed==0.17.2\nCPU Offload: True\nzero_stage: 3\n")
    asked(f"{log} --config {config}")
    said = " ".join(capsys.readouterr().out.split())
    assert "The config's offload_optimizer none counts, and not offload cpu of train.log:2." in said
    assert "The config's stage 2 counts, and not stage 3 of train.log:3." in said


def test_a_log_that_names_the_file_of_two_stages_is_taken_as_the_second(tmp_path, capsys):
    log = tmp_path / "train.log"
    log.write_text("deepspeed==0.17.2\n[stage_1_and_2.py:151:__init__] Reduce bucket size 500000000\nworld_size: 8\n")
    asked(str(log))
    assert "taken as stage 2. With stage 1 give --stage 1." in " ".join(capsys.readouterr().out.split())
    asked(f"{log} --stage 1")
    assert "taken as stage 2" not in " ".join(capsys.readouterr().out.split())
