"""What a script that is given answers is not asked of who gives it, and nothing stops because it names no library."""

import re

import pytest
from packaging.version import Version

from study.cli.stack import stack
from study.configs import scripts
from study.configs.priorities import AskedStack, ranked
from study.configs.stacks import described
from study.known.faults import ANY, table
from study.known.which_apply import Flags, Stack, applies

RELEASES = "torch==2.6.0\ntransformers==4.49.0\naccelerate==1.4.0\ndeepspeed==0.16.4\n"
FLAGS = Flags(stage=2, passes=8)
PLAIN = "import torch\nfor rows in loader:\n    loss = model(rows)\n"
TRAINER = "from transformers import Trainer\ntrainer = Trainer(model)\ntrainer.train()\n"
OWN_LOSS = next(name for name in scripts.rows() if name.startswith("Has the trainer a loss of its own"))
SFT = """from transformers import AutoModelForCausalLM
from trl import SFTTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B")
SFTTrainer(model=model).train()
print(generated_text)
"""
# What has a pattern that cannot be typed as it stands.
SAID = {
    "(?i)schedule_?free": "ScheduleFreeAdamW",
    r"""deepspeed["\x27]?\s*[=:](?!=)""": "deepspeed='ds.json'",
    r"\.deepspeed\s*=": "args.deepspeed = 'ds.json'",
    r"torch_compile\s*=\s*False": "torch_compile=False",
    r"(?m)^\w+\s*=\s*torch\.compile\(": "model = torch.compile(model)",
    r"dtype\s*=\s*\W?(?:torch\.)?(?:bfloat16|float16|bf16|fp16|half)\b": "dtype=torch.bfloat16",
    r"dtype\s*=\s*\W?(?:torch\.)?(?:float32|float16)\b": 'torch_dtype="float16"',
    r"dtype\s*=\s*\W?(?:torch\.)?float32\b": "dtype=torch.float32",
    r"max_grad_norm\W?\s*[=:]\s*1(?:\.0*)?\b": "max_grad_norm=1.0",
    r"activation_offloading\s*=\s*False": "activation_offloading=False",
    r"average_tokens_across_devices\s*=\s*True": "average_tokens_across_devices=True",
    r"\baccelerator\.(?:accumulate|no_sync)\(": "with accelerator.accumulate(model):",
    scripts.rows()[OWN_LOSS].no: "AutoModelForCausalLM; SFTTrainer(",
}
PATTERNS = [
    (name, key, pattern)
    for name, row in scripts.rows().items()
    for key in ("needs", "no", "yes")
    if (pattern := getattr(row, key))
]


def typed(pattern: str) -> str:
    """The first text that a pattern finds."""
    return SAID.get(pattern) or re.sub(r"\(\?i\)|\\b|\\", "", pattern).split("|")[0]


def seen(text: str, folder, releases: str = RELEASES, flags: Flags = FLAGS) -> Stack:
    (folder / "train.py").write_text(text)
    (folder / "requirements.txt").write_text(releases)
    found, _ = described((str(folder / "requirements.txt"), str(folder / "train.py")), flags)
    return found


@pytest.mark.parametrize(("name", "key", "pattern"), PATTERNS, ids=lambda part: part[:60])
def test_each_answer_is_that_of_a_script_and_no_other(name, key, pattern, tmp_path):
    """Without what it needs the answer is no, unless it may be elsewhere; with it nothing is said, or what it says."""
    has = typed(pattern)
    assert re.search(pattern, has)
    said = {"needs": None, "no": False, "yes": True}[key]
    if not scripts.rows()[name].since:
        assert seen(f"{PLAIN}{has}\n", tmp_path).shown.get(name) is said
        assert seen(f"{PLAIN}# {has}\n", tmp_path).shown.get(name) is not True, "a comment is no code"
    if key == "needs" and not scripts.rows()[name].since:
        assert seen(PLAIN, tmp_path).shown[name] is False
        (tmp_path / "mine.py").touch()
        assert name not in seen(f"import mine\n{PLAIN}", tmp_path).shown
        assert name not in seen(f"from transformers import HfArgumentParser\n{PLAIN}", tmp_path).shown


@pytest.mark.parametrize("name", scripts.rows())
def test_each_question_is_one_of_the_table_and_its_answer_decides(name):
    asking = [fault for fault in table().fault if name in (*fault.conditions, fault.conditions.get("script"))]
    assert asking, "no fault asks this: correct the name of the row"
    for fault in asking:
        releases = {**dict.fromkeys(table().asked, ANY), fault.package: Version(fault.since)}
        wanted = fault.conditions.get(name, True)
        for answer in (True, False):
            found = applies(fault, Stack(releases, {"trainer": None}, shown={name: answer}))
            if answer is not wanted:
                assert found is None
            else:
                assert found
                condition = name if name in fault.conditions else "script"
                assert condition not in {question.condition for question in found.why}


@pytest.mark.parametrize(
    ("releases", "text", "is_asked"),
    [
        (RELEASES, TRAINER, False),
        (RELEASES.replace("4.49.0", "4.47.0"), TRAINER, True),
        (RELEASES, f"{TRAINER}with accelerator.no_sync(model): pass\n", True),
        (RELEASES, "import accelerate\naccelerator.backward(loss)\nwith accelerator.accumulate(model): pass\n", True),
    ],
)
def test_a_trainer_of_a_known_release_answers_for_its_loop(releases, text, is_asked, tmp_path):
    (fault,) = [fault for fault in table().fault if fault.id == "no-sync-refused"]
    assert (applies(fault, seen(text, tmp_path, releases)) is not None) is is_asked


@pytest.mark.parametrize(
    "text", ["with accelerator.accumulate(model):\n    pass\n", "with self.accelerator.no_sync(model): pass\n"]
)
def test_a_loop_that_accumulates_by_accelerate_surely_has_its_fault(text, tmp_path, capsys):
    (fault,) = [fault for fault in table().fault if fault.id == "no-sync-refused"]
    loop = f"from accelerate import Accelerator\naccelerator = Accelerator()\n{text}"
    found = applies(fault, seen(loop, tmp_path))
    assert found
    assert not found.why, "nothing is asked"
    stack((str(tmp_path / "requirements.txt"), str(tmp_path / "train.py")), flags=FLAGS)
    assert re.search(r"1\. Accumulation calls DeepSpeed's no_sync", " ".join(capsys.readouterr().out.split()))


@pytest.mark.parametrize(
    "call", ["torch.optim.AdamW(model.parameters())", "optim.SGD(groups)", "AdamW(groups, lr=1e-5)"]
)
def test_a_script_that_makes_its_optimizer_is_not_asked_for_it(call, tmp_path):
    stack_of = seen(f"import accelerate\nfrom torch import optim\noptimizer = {call}\n", tmp_path, flags=Flags(stage=2))
    assert stack_of.said["optimizer"] == call.removeprefix("torch.").removeprefix("optim.").partition("(")[0].lower()
    assert stack_of.said["optimizer"] in table().optimizers


@pytest.mark.parametrize(
    ("trl", "added", "answer"),
    [
        ("0.19.0", "", False),
        ("0.13.0", "", None),
        ("0.19.0", "ORPOTrainer(model=model)", None),
        ("0.19.0", "class Mine(SFTTrainer): compute_loss = mine\n", None),
    ],
)
def test_a_trainer_of_trl_answers_for_its_loss_and_for_other_methods(trl, added, answer, tmp_path):
    shown = seen(f"{SFT}{added}", tmp_path, f"{RELEASES}trl=={trl}\n").shown
    assert shown.get(OWN_LOSS) is answer
    methods = [name for name in scripts.rows() if re.search("GRPO|DPO|KTO|GKD|reference that", name)]
    assert len(methods) > 5
    assert all(shown[name] is False for name in methods if "ORPO" not in name)


def test_what_a_script_and_releases_leave_open_once_comes_before_what_more_leave_open(tmp_path):
    (tmp_path / "train.py").write_text(SFT)
    listed = "torch==2.7.1\ndeepspeed==0.17.2\ntransformers==4.53.0\ntrl==0.19.0\naccelerate==1.8.1\n"
    (tmp_path / "requirements.txt").write_text(listed)
    words = (str(tmp_path / "requirements.txt"), str(tmp_path / "train.py"))
    used, _ = described(words, flags := Flags(stage=3, passes=16))
    spoken = ranked(AskedStack.of(used, flags, None, None, words)).spoken
    first_two = {"ranks-with-few-tokens-count-as-much", "stage-3-bucket-of-one"}
    assert {each.fault.id for each in spoken[:2]} == first_two


@pytest.mark.parametrize("text", ["import numpy\n", "x = 1\n", "from mine import train\ntrain(stage=2)\n"])
def test_a_script_that_names_no_library_is_answered_with_what_is_missing(text, tmp_path, capsys):
    (tmp_path / "train.py").write_text(text)
    assert "faults" in stack((str(tmp_path / "train.py"),), flags=Flags())
    printed = " ".join(capsys.readouterr().out.split())
    assert "No library is named: releases are this environment's. Give yours, such as deepspeed==0.19.8." in printed
    stack((str(tmp_path / "train.py"), "deepspeed==0.17.6"), flags=Flags())
    assert "No library is named" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "is_whole"),
    [("def reward(completions, **kwargs): ...", True), ("args = GRPOConfig(**kwargs)", False)],
)
def test_a_signature_that_takes_any_arguments_reads_none_from_elsewhere(line, is_whole, tmp_path):
    assert ("peft" in seen(f"{PLAIN}{line}\n", tmp_path).shown) is is_whole
