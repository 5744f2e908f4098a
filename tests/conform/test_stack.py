"""The table of known faults is what was asked, and `study stack` says which of them apply."""

import itertools
import json
import re
import resource
import subprocess
import sys

import pytest
from conftest import ROOT
from packaging.version import Version

from study.cli import diagnosis
from study.conform import releases, stack, suite
from study.conform.faults import named, table
from study.conform.stack import Flags, answered, described
from study.core import arms
from study.core.errors import Stop

LORA = {"stage": 3, "peft": True, "checkpointing": True}


def answers(*words: str, **flags) -> dict[str, str]:
    """`applies` or `applies if`, by the ids of faults."""
    return {row["id"]: row["answer"] for row in answered(described(words, Flags(**flags)))["faults"]}


def study(words: str, folder) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "study.cli", *words.split()], capture_output=True, text=True, cwd=folder, check=False
    )


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_table_is_whole():
    faults = table().fault
    assert len({fault.id for fault in faults}) == len(faults) >= 75
    for fault in faults:
        asked = fault.asked or table().asked[fault.package]
        assert {fault.since, fault.until} <= {*asked}, fault.id
        assert re.match(rf"{fault.since}( to {fault.until})?(;|$)", fault.releases), fault.id
        for release in re.findall(r"right in ([\d.]+)(?: and ([\d.]+))?", fault.releases):
            assert not any(fault.has(Version(each)) for each in release if each), fault.id
        assert not fault.script or (ROOT / "reproductions" / f"{fault.script}.py").is_file()
        assert fault.upstream.startswith("https://") or not fault.upstream
        assert fault.rests_on != "script" or fault.script, fault.id
        if fault.when is not None:
            assert all((fault.symptom, fault.do)), fault.id
            assert fault.when.keys() <= table().questions.keys()
            assert fault.when.keys() - {"keys", "script", "peft", "reentrant", "trainer"} <= table().settings.keys()


def test_the_releases_that_were_asked_are_those_of_the_kept_answers():
    kept = releases.answers()
    for package, adapters in {"deepspeed": "zero", "accelerate": "accelerate-(?!conf|rep)"}.items():
        assert {*kept[kept["adapter"].str.match(adapters)][package]} == {*table().asked[package]}


def test_a_range_is_as_wide_as_the_answers_and_no_wider():
    """In each release of a range that was asked, one of its properties fails; in those beside it one holds."""
    kept = releases.answers()
    checked = 0
    for fault in table().fault:
        if fault.rests_on != "answers" or not fault.adapters or fault.properties == ("*",):
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


def test_diagnose_has_the_range_and_the_remedy_of_the_table():
    from study.watch.findings import finding, texts

    uses = {id: text["fault"] for id, text in texts().items() if "fault" in text}
    assert len(uses) >= 4
    assert {named(fault).id for fault in uses.values()} == {*uses.values()}
    found = finding("frozen_weights_gathered", memory_bytes=10**9)
    assert "DeepSpeed 0.19.3 to 0.19.8" in found.sentence
    assert "deepspeed 0.19.2" in found.remedy
    assert "TRL" in found.remedy
    assert found.evidence == "reproductions/stage3_keeps_frozen_weights.py"


# --- which faults apply ----------------------------------------------------------------------------------------------


def test_releases_and_flags_are_a_whole_question():
    assert answers("deepspeed==0.17.6", stage=2, passes=4)["last-pass-only"] == "applies"
    for words, flags in [
        ("deepspeed==0.17.5", {"stage": 2, "passes": 4}),
        ("deepspeed==0.18.3", {"stage": 2, "passes": 4}),
        ("deepspeed==0.17.6", {"stage": 1, "passes": 4}),
        ("deepspeed==0.17.6", {"stage": 2, "passes": 1}),
        ("deepspeed==0.17.6", {"stage": 2, "passes": 4, "offload": "cpu"}),
        ("torch==2.13.0", {"fsdp2": True, "passes": 4}),
    ]:
        assert "last-pass-only" not in answers(words, **flags), (words, flags)
    assert answers("deepspeed==0.17.6", stage=2)["last-pass-only"] == "applies if"
    assert answers("deepspeed==0.19.3", stage=1, passes=2)["inner-forward"] == "applies if"  # only the script knows


@pytest.mark.parametrize(
    ("words", "flags", "answer"),
    [
        ("deepspeed==0.19.8 trl==1.16.0", {}, "applies"),
        ("deepspeed==0.19.8 trl==1.16.0", {"reentrant": False}, "applies"),  # TRL overrules it
        ("deepspeed==0.19.8 trl==1.16.0", {"trainer": "own", "reentrant": False}, None),
        ("deepspeed==0.19.8 trl==1.17.0", {}, "applies if"),  # whose sources nobody has read
        ("deepspeed==0.19.8", {}, "applies if"),
        ("deepspeed==0.19.8", {"reentrant": True}, "applies"),
        ("deepspeed==0.19.2 trl==1.16.0", {}, None),
        ("deepspeed==0.19.7 trl==1.16.0", {}, "applies"),
        ("deepspeed==0.19.9 trl==1.16.0", {}, "applies if"),  # it is newer than all that were asked
        ("deepspeed trl==1.16.0", {}, "applies if"),
        ("trl==1.16.0", {}, "applies if"),
        ("trl==1.16.0", {"stage": None, "fsdp2": True}, None),
    ],
)
def test_a_trainer_forces_a_setting_and_a_release_that_was_not_asked_is_no_answer(words, flags, answer):
    assert answers(*words.split(), **(LORA | flags)).get("frozen-weights-stay") == answer


def test_the_remedy_is_one_that_can_be_followed_in_the_trainer():
    for trainer, words in {"trl": "pin deepspeed==0.19.2", "own": 'kwargs={"use_reentrant": False}'}.items():
        asked = described(("deepspeed==0.19.8", "trl==1.16.0"), Flags(**LORA, trainer=trainer, reentrant=True))
        (row,) = [row for row in answered(asked)["faults"] if row["id"] == "frozen-weights-stay"]
        assert words in row["do"]


def test_what_was_not_asked_is_said():
    answer = answered(described(("deepspeed==0.18.7", "torch==2.13.0", "accelerate"), Flags(stage=2, passes=4)))
    assert answer["not_asked"] == ["deepspeed 0.18.7", "accelerate (in any release)"]
    assert "never asked: deepspeed 0.18.7" in answer["first"]
    (row,) = [row for row in answer["faults"] if row["id"] == "inner-forward"]
    assert row["question"].startswith("deepspeed 0.18.7 was not asked: has it this fault? Does a loss")


FILES = {
    "freeze.txt": "accelerate==1.15.0\ndeepspeed==0.17.6\ntorch==2.13.0+cpu\n-e git+https://x/y#egg=z\n",
    "requirements.txt": "# ours\n--extra-index-url x\ndeepspeed[autotuning] == 0.17.6 ; python_version > '3.8' \\\n"
    "    --hash=sha256:00\ntransformers>=5\n",
    "uv.lock": 'version = 1\n\n[[package]]\nname = "deepspeed"\nversion = "0.17.6"\nsource = { registry = "x" }\n'
    'dependencies = [\n    { name = "torch" },\n]\n',
    "poetry.lock": '[[package]]\nname = "deepspeed"\nversion = "0.17.6"\ndescription = "d"\n\n[package.dependencies]\n'
    'torch = ">=2"\n',
}


@pytest.mark.parametrize("name", FILES)
def test_releases_are_read_from_lists_and_locks(name, tmp_path):
    (tmp_path / name).write_text(FILES[name])
    found = stack.versions((str(tmp_path / name),))
    assert found["deepspeed"] == Version("0.17.6")
    assert found.get("torch") == (Version("2.13.0") if name == "freeze.txt" else None)
    assert ("transformers" in found) == (name == "requirements.txt")
    assert found.get("transformers") is None


@pytest.mark.parametrize("word", ["numpy==2", "nowhere.txt", "deepspeed.txt", "", "\0"])
def test_words_that_name_nothing_known_are_a_sentence(word):
    with pytest.raises(Stop, match="names none of accelerate, axolotl, deepspeed"):
        stack.versions((word,))


def test_a_config_answers_what_flags_would(tmp_path):
    zero2 = {"train_batch_size": 8, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}}
    (tmp_path / "zero2.json").write_text(json.dumps(zero2))
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n")
    zenflow = zero2 | {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}
    (tmp_path / "zenflow.json").write_text(json.dumps(zenflow))
    found = {}
    words = ("deepspeed==0.19.8", "torch==2.13.0")
    for name in ("zero2.json", "fsdp.yaml", "zenflow.json"):
        answer = diagnosis.stack(words, flags=Flags(), config=tmp_path / name)
        found[name] = {row["id"]: row["answer"] for row in answer["faults"]}
    assert "L-01" not in found["zero2.json"]
    assert found["zenflow.json"]["L-01"] == "applies"
    assert "fsdp2-one-rank-without-gradient" in found["fsdp.yaml"]
    assert "one-rank-without-gradient" not in found["fsdp.yaml"]
    answer = diagnosis.stack(("deepspeed==0.17.6",), flags=Flags(), config=tmp_path / "zero2.json")
    assert not answer["fine"]
    assert re.match(r"deepspeed 0.17.6: of \d+ known faults 1 apply, and \d+ may\.$", answer["first"])


def test_the_command_says_its_answer_first_and_ends_with_it(tmp_path, capsys):
    wrong = study("stack deepspeed==0.17.6 --stage 2 --passes 4 --json", tmp_path)
    assert wrong.returncode == 1
    row = json.loads(wrong.stdout)["faults"][0]
    assert {"id", "answer", "sentence", "do", "question"} <= row.keys()
    assert (row["id"], row["answer"], row["question"]) == ("last-pass-only", "applies", "")
    right = diagnosis.stack(("deepspeed==0.19.8",), flags=Flags(stage=3), symptom="hang")
    assert (right["fine"], right["faults"][0]["symptom"]) == (True, "hang")
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == right["first"]
    assert max(len(line) for line in lines if "https://" not in line) <= 100


def test_a_light_install_is_enough():
    code = (
        "import sys; from study.cli import diagnosis as d; d.stack((), flags=d.Flags()); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    spent = [resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime]
    for _ in range(3):  # of three, because others compute on this machine too
        study("stack deepspeed==0.19.8", ROOT)
        spent.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime)
    assert min(after - before for before, after in itertools.pairwise(spent)) < 1


@pytest.mark.parametrize("arm", arms.NAMES)
def test_nothing_is_said_to_apply_to_the_arms_of_this_study(arm):
    """They train as DDP does, to which other tests hold them."""
    config = ROOT / "accelerate_configs" / f"{arm}.yaml"
    faults = diagnosis.stack((), flags=Flags(trainer="own"), config=config)["faults"]
    assert [row["id"] for row in faults if row["answer"] == "applies"] == []
    assert bool(faults) == (arm not in ("single", "ddp"))


def test_an_explanation_is_the_first_fault_that_fits():
    lost = suite.Answer("zero2", "accumulation-4", "2.13.0", "0.17.6", "", "fails")
    assert suite.explanation(lost).startswith("known bug: deepspeedai/DeepSpeed#7718")
    assert suite.explanation(suite.Answer("zero2", "accumulation-4", "2.13.0", "0.18.3", "", "fails")) == ""


# --- public threads, with the releases and settings that they name, and stacks in which nothing is known to be wrong

THREADS = {  # by address: what it names, and the fault that it is about
    "deepspeedai/DeepSpeed/issues/7718": ("deepspeed==0.17.6 torch==2.7.1", {"stage": 2}, "last-pass-only"),
    "huggingface/accelerate/issues/3877": ("accelerate==1.11.0", {"stage": 2, "passes": 2}, "last-pass-only"),
    "huggingface/trl/issues/4631": ("trl==0.25.1 deepspeed==0.18.2", {"stage": 2}, "last-pass-only"),
    "deepspeedai/DeepSpeed/issues/8224": ("deepspeed==0.19.3", {"stage": 2, "precision": "bf16"}, "inner-forward"),
    "deepspeedai/DeepSpeed/issues/7615": ("deepspeed==0.17.6", {"stage": 3, "peft": True}, "delegating-wrapper"),
    "huggingface/transformers/issues/47254": ("deepspeed==0.19.2", LORA | {"reentrant": False}, "frozen-not-reentrant"),
    "huggingface/trl/issues/2514": ("deepspeed", LORA | {"reentrant": False}, "frozen-not-reentrant"),
    "huggingface/trl/pull/6356": ("deepspeed==0.19.3 trl==1.9.0", LORA, "frozen-weights-stay"),
    "deepspeedai/DeepSpeed/issues/7837": ("deepspeed", {"stage": 0}, "bf16-stage-0-scale"),
    "allenai/open-instruct/pull/1498": ("deepspeed", {"stage": 2}, "unmarked-backward-passes"),
}
HEALTHY = [  # the newest releases, and pins that projects publish
    ("deepspeed==0.19.8 accelerate==1.15.0 transformers==5.23.0 torch==2.13.0", {"stage": 1, "passes": 8}),
    ("deepspeed==0.19.8 accelerate==1.15.0 transformers==5.23.0 torch==2.13.0", {"stage": 2, "precision": "bf16"}),
    ("deepspeed==0.19.8 accelerate==1.15.0 trl==1.16.0 torch==2.13.0", {"stage": 3, "passes": 4}),
    ("deepspeed==0.19.8 accelerate==1.15.0 trl==1.16.0", {"stage": 2, "peft": True, "checkpointing": True}),
    ("deepspeed==0.19.8 accelerate==1.15.0 torch==2.13.0", {"stage": 2, "offload": "cpu", "optimizer": "adamw"}),
    ("deepspeed==0.19.2 transformers==5.23.0", LORA | {"reentrant": True}),  # AgileRL 2.26.1
    ("deepspeed==0.18.9 accelerate==1.13.0 trl==1.9.0 torch==2.13.0", LORA),  # axolotl 0.19.0
    ("accelerate==1.15.0 transformers==5.23.0 torch==2.13.0", {"fsdp2": True, "checkpointing": True}),
    ("accelerate==1.15.0 trl==1.16.0 torch==2.13.0", {"fsdp2": True, "peft": True}),
]


@pytest.mark.parametrize("address", THREADS)
def test_a_public_thread_gets_its_fault(address):
    words, flags, fault = THREADS[address]
    assert fault in answers(*words.split(), **flags)


@pytest.mark.parametrize(("words", "flags"), HEALTHY)
def test_nothing_is_said_to_apply_to_a_healthy_stack(words, flags):
    assert "applies" not in answers(*words.split(), **flags).values()
