"""Configurations given to DeepSpeed and Accelerate, and the answers that are kept.

The assertions about the libraries hold for the pinned versions.
"""

import json
import re

import pytest

from study.errors import Stop
from study.ledger import files, ledger, trial_checks
from study.probes import answers
from study.probes.answers import Answer

ZERO2 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
ON_DISK = {"zero_stage": 3, "offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/fast"}


def of(config: dict | None = None, look: str = "accepted", **more) -> dict:
    return {"what": "deepspeed_config", "config": ZERO2 | (config or {}), "look": look, "ranks": 1} | more


def yaml(look: str, base: str = "plain", **change) -> dict:
    return {"what": "accelerate_yaml", "base": base, "look": look, "change": change}


def built(look: str, **arguments) -> dict:
    of = "accelerate.utils.FullyShardedDataParallelPlugin"
    return {"what": "constructed", "of": of, "arguments": arguments, "look": look}


ZERO_CONFIG = "deepspeed.runtime.zero.config.DeepSpeedZeroConfig"
TRIALS = [
    (of(), "accepted"),
    (of({"fp16": True}), "rejected"),
    (of({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "disk"}}}), "rejected"),
    (of({"zero_optimisation": {"stage": 3}}), "accepted"),  # a misspelt section is taken and ignored
    (of(look="gradient_clipping"), 1.0),
    (of(look="train_batch_size", ranks=8), 8),
    (of(look="zero_config.nonsense"), "absent"),
    (of(look="zero_config.offload_optimizer"), "none"),
    (yaml("accepted"), "accepted"),
    (yaml("resolved.gradient_clipping", deepspeed_config={"gradient_clipping": 0.0}), 1.0),
    (yaml("resolved.gradient_clipping", "zero2"), 0.0),
    (yaml("zero_optimization.offload_optimizer.nvme_path", deepspeed_config=ON_DISK), "none"),
    (yaml("launcher.offload_optimizer_nvme_path", deepspeed_config=ON_DISK), "/fast"),
    (yaml("environment.ACCELERATE_DEEPSPEED_ZERO_STAGE", deepspeed_config={"zero_stage": 3}), 3),
    (yaml("plugin.zero3_init_flag", "zero3_init_off"), False),
    (yaml("accepted", "zero3", distributed_type="MPI"), "rejected"),
    (yaml("zero_optimization.stage", "zero3"), 3),
    (yaml("launcher.num_machines", num_machines="absent"), 1),
    (yaml("environment.HOME"), "absent"),  # of whoever tries it, and not of the launcher
    ({"what": "default", "of": ZERO_CONFIG, "field": "reduce_bucket_size"}, 500_000_000),
    ({"what": "default", "of": ZERO_CONFIG, "field": "stage3_prefetch_bucket_size"}, 50_000_000),  # by its alias
    ({"what": "default", "of": "transformers.TrainingArguments", "field": "seed"}, 42),  # a dataclass
    ({"what": "default", "of": "accelerate.Accelerator", "field": "device_placement"}, True),  # an argument
    ({"what": "default", "of": "deepspeed.runtime.constants", "field": "GRADIENT_CLIPPING_DEFAULT"}, 1.0),
    ({"what": "member", "of": "accelerate.utils.DistributedType", "name": "DEEPSPEED"}, True),
    ({"what": "member", "of": "accelerate.utils.DistributedType", "name": "MPI"}, False),
    (built(look="state_dict_type", fsdp_version=2), "SHARDED_STATE_DICT"),
    (built(look="fsdp_version", fsdp_versions=2), "rejected"),
]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the kept answers, for this test alone."""
    monkeypatch.setattr(answers, "_folder", lambda: tmp_path / "trials")
    monkeypatch.setattr(answers, "REPORTS", tmp_path / "reports")
    return tmp_path / "trials"


@pytest.fixture(scope="module")
def answered() -> list[dict]:
    """All trials at once, in one process, as the ledger does."""
    trials = [trial for trial, _ in TRIALS] + [{"what": "member", "of": "accelerate.nothing", "name": "x"}]
    printed, reason = answers._process(answers.WORKER, json.dumps(trials), answers.arms.ROOT)
    assert printed, reason
    return json.loads(printed)  # whatever the libraries print, this alone is on stdout


def test_what_the_libraries_make_of_it(answered):
    for answer, (trial, expected) in zip(answered, TRIALS, strict=False):
        assert "error" not in answer, (trial, answer)
        assert (answer["found"], type(answer["found"])) == (expected, type(expected)), trial
        assert answer["told"]
        assert expected != "rejected" or re.match("rejected, .+$", answer["told"])


def test_a_failure_is_told_and_leaves_the_others_alone(answered):
    assert answered[-1] == {"error": "AttributeError: module 'accelerate' has no attribute 'nothing'"}


# --- kept ----------------------------------------------------------------------------------------------------------

SEVEN = Answer(found=7, told="seven")


def never(*_):
    pytest.fail("it was tried")


def always(answer):
    """Every trial has this answer."""
    return lambda trials: [answer] * len(trials)


def find():
    return trial_checks.TRIALS["deepspeed_config"](config=ZERO2)


def test_an_answer_is_sought_once(cache, monkeypatch):
    tried = []
    monkeypatch.setattr(answers, "_try", lambda trials: tried.append(trials) or [SEVEN] * len(trials))
    trials = [of(look="a"), of(look="b"), of(look="a")]
    assert answers.ask(trials) == answers.ask(trials) == [SEVEN] * 3
    assert [len(several) for several in tried] == [2], "both in one process, and never again"


def test_answers_are_kept_beside_the_records_and_say_where_they_were_tried(cache, monkeypatch, tmp_path):
    """Another machine with the same versions does not try this again."""
    monkeypatch.setattr(answers, "_try", always(Answer(found=7, told="in /home/me/x")))
    claims = files.read_all()
    trial = next(trial for trial in ledger.trials(claims) if trial["what"] == "default")
    answers.ask([trial])
    (cache / "of-another-version.json").write_text("{}")
    reports = tmp_path / "reports" / "some-box"
    reports.mkdir(parents=True)
    assert answers.keep_in(reports, ledger.trials(claims)) == 1
    (entry,) = json.loads((reports / "trials.json").read_text())
    assert (entry["trial"], entry["versions"]["deepspeed"]) == (trial, answers.versions()["deepspeed"])
    (cache / f"{answers.key(trial)}.json").unlink()
    monkeypatch.setattr(answers, "_try", never)
    assert answers.ask([trial]) == [Answer(found=7, told="in x (tried on some-box, with these versions)")]


def test_the_answers_in_the_repository_are_used(monkeypatch, tmp_path):
    """With the versions of the kept answers, nothing is tried again."""
    monkeypatch.setattr(answers, "_folder", lambda: tmp_path)
    path = answers.REPORTS / "cpu-2core" / "trials.json"
    entries = json.loads(path.read_text())
    monkeypatch.setattr(answers, "versions", lambda: entries[0]["versions"])
    assert answers.set_aside() == []
    assert {answers.key(entry["trial"]) for entry in entries} == {*answers._read(path)}
    assert len(entries) > 150


@pytest.fixture
def kept(cache, monkeypatch, tmp_path):
    """The file with what a script answered, in the repository."""
    monkeypatch.setattr(answers, "REPRODUCTIONS", tmp_path)
    monkeypatch.setattr(answers, "not_installed", lambda: ())
    reports = tmp_path / "reports" / "some-box"
    reports.mkdir(parents=True)
    (tmp_path / "mine.py").write_text("print('{\"found\": 7}')")
    assert trial_checks.reproduction(name="mine").value == 7
    assert answers.keep_in(reports, [MINE]) == 1
    return reports / "trials.json"


MINE = {"what": "reproduction", "name": "mine"}


def test_a_damaged_file_of_answers_is_named(kept):
    kept.write_text("{")
    answers._read.cache_clear()
    with pytest.raises(Stop, match=r"trials.json is no list of answers"):
        trial_checks.reproduction(name="mine")


def test_a_changed_script_is_noticed_and_tried_again(kept, tmp_path):
    assert answers.set_aside() == []
    (tmp_path / "mine.py").write_text("print('{\"found\": 9}')")
    assert "the answer of mine was given by other code, which has changed since" in answers.set_aside()[0]
    assert trial_checks.reproduction(name="mine").value == 9


def test_a_users_own_answer_does_not_override_the_repository(kept, cache):
    answers.cache.keep(cache, answers.key(MINE), {"found": 8, "told": "found 8"})
    finding = trial_checks.reproduction(name="mine")
    assert finding.value == 7
    assert "tried on some-box" in finding.working


def test_another_version_or_another_text_is_another_answer(cache, monkeypatch, tmp_path):
    before = answers.key(of())
    assert answers.key(of()) == before != answers.key(of(look="gradient_clipping"))
    monkeypatch.setattr(answers, "versions", lambda: {"deepspeed": "99"})
    assert answers.key(of()) != before
    monkeypatch.setattr(answers, "REPRODUCTIONS", tmp_path)
    keys = []
    for text in ("1", "2", '"""Other words."""\n2  # the same script'):
        (tmp_path / "mine.py").write_text(text)
        keys.append(answers.key({"what": "reproduction", "name": "mine"}))
    assert keys[0] != keys[1] == keys[2]


def test_only_answers_are_kept(cache, monkeypatch):
    """A failure of the trial itself is not kept. A file that holds no answer is tried again."""
    monkeypatch.setattr(answers, "_try", always("killed"))
    finding = find()
    assert (finding.value, finding.without) == (None, "inconclusive")
    assert "the trial itself failed: killed" in finding.working
    monkeypatch.setattr(answers, "_try", always(SEVEN))
    assert find().value == 7
    for content in ('{"found": 7}', "[]", "3", "{"):
        (cache / f"{answers.key(of())}.json").write_text(content)
        assert answers.ask([of()]) == [SEVEN]


def test_without_the_libraries_nothing_is_tried(cache, monkeypatch):
    monkeypatch.setattr(answers, "not_installed", lambda: ("deepspeed",))
    monkeypatch.setattr(answers, "_try", never)
    answers.prepare(ledger.trials(files.read_all()))
    finding = find()
    assert (finding.value, finding.without) == (None, "not tested here")
    assert finding.working == "deepspeed is not installed here"
    assert "make setup" in finding.missing


FORBIDDEN = [
    ({"what": "member", "of": "study.train", "name": "x"}, "study.train is in none of the modules"),
    ({"what": "default", "of": "torch.os", "field": "environ"}, "torch.os is in none of the modules"),
    ({"what": "default", "of": "accelerate.utils", "field": "__builtins__"}, "__builtins__ is private"),
    (of(look="gradient_clipping.__class__.__init__.__globals__"), "__class__ is private"),
    (built(look="fsdp_version") | {"of": "accelerate.utils.DeepSpeedPlugin"}, "DeepSpeedPlugin may not be constructed"),
    (yaml("zero_optimization", deepspeed_config={"deepspeed_config_file": "/home/me/x.json"}), "names a file"),
    ({"what": "accelerate_yaml", "base": "zero9", "change": {}, "look": "accepted"}, "there is no arm zero9"),
    ({"what": "reproduction", "name": "../evil"}, "there is no reproduction"),
    ({"what": "reproduction", "name": "/evil"}, "there is no reproduction"),
]


@pytest.mark.parametrize(("trial", "what"), FORBIDDEN)
def test_nothing_else_is_run_or_imported(cache, monkeypatch, trial, what):
    """Anybody may have written the claims file that names it."""
    monkeypatch.setattr(answers, "_run", never)
    monkeypatch.setattr(answers, "_try", never)
    (cache.parent / "evil.py").write_text("")
    function, arguments = trial_checks.TRIALS[trial["what"]], {name: trial[name] for name in trial if name != "what"}
    with pytest.raises(Stop, match=what):
        function(**arguments)
    assert trial_checks.trials_of(function, [arguments]) == []


# --- reproductions -------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path, monkeypatch, cache):
    """A function that writes a reproduction, runs it and returns its answer."""
    monkeypatch.setattr(answers, "REPRODUCTIONS", tmp_path)
    return lambda text: (tmp_path / "mine.py").write_text(text) and trial_checks.reproduction(name="mine")


def test_a_reproduction_says_what_it_found(script):
    finding = script('import json\nprint("on the way")\nprint(json.dumps({"found": False, "by": 3}))\nprint("bye")\n')
    assert finding.value is False
    assert finding.working == "reproductions/mine.py: found False (by 3)"
    assert any(words.startswith("deepspeed ") for words in finding.evidence)


def test_a_reproduction_that_fails_says_nothing_of_the_claim(script, monkeypatch):
    for text, limit_s, why in (
        ("1 / 0", 300, "ZeroDivisionError: division by zero"),
        ("print('nothing to say')", 300, "it printed no answer"),
        ("import time\ntime.sleep(60)", 1, "it took longer than 1 s"),
    ):
        monkeypatch.setattr(answers, "LIMIT_S", limit_s)
        finding = script(text)
        assert (finding.value, finding.without) == (None, "inconclusive")
        assert why in finding.working
