"""What a script that is given answers is not asked of who gives it, and nothing stops because it names no library."""

import re
from pathlib import Path

import pytest
from packaging.version import Version

from study.cli.diagnosis import diagnose
from study.cli.stack import stack
from study.configs import model_losses, scripts
from study.configs.code import that_counts, with_defaults
from study.configs.oom.said import stated
from study.configs.pasted.read import read
from study.configs.priorities import AskedStack, ranked
from study.configs.stacks import described
from study.core.files import value_at
from study.known.faults import ANY, table
from study.known.stacks import Flags, Stack
from study.known.which_apply import applies
from tests.cases import for_each

RELEASES = "torch==2.6.0\ntransformers==4.49.0\naccelerate==1.4.0\ndeepspeed==0.16.4\n"
FLAGS = Flags(stage=2, passes=8)
PLAIN = "import torch\nfor rows in loader:\n    loss = model(rows)\n"
TRAINER = "from transformers import Trainer\ntrainer = Trainer(model)\ntrainer.train()\n"
SCHEDULE = scripts.rows()["Does lr_scheduler_type name another schedule than the config's scheduler"]
OPTIMIZER = scripts.rows()["Does optim name another optimizer than the config's"]
OWN_LOSS = next(name for name in scripts.rows() if name.startswith("Has the trainer a loss of its own"))
EACH_UPDATES = next(name for name in scripts.rows() if name.startswith("Does the loop call accelerator.backward"))
SCHEDULED = next(name for name in scripts.rows() if name.startswith("Is a prepared scheduler"))
ACCUMULATES = next(row for name, row in scripts.rows().items() if name.startswith("Does the loop use accelerator.acc"))
CLIPPED = next(row for name, row in scripts.rows().items() if name.startswith("Does the script call clip_grad_norm_"))
ACCUMULATION = next(row for name, row in scripts.rows().items() if "the DeepSpeed config another or none" in name)
CLIPS_OWN = scripts.rows()["Does the script clip by torch.nn.utils.clip_grad_norm_"]
PER_PROCESS = next(row for name, row in scripts.rows().items() if "divided by the number of processes" in name)
GEMMA_2 = scripts.rows()["Is the model Gemma-2, without eager or FlashAttention"]
FROM_SCRATCH = scripts.rows()["Is the model built by from_config, to train from scratch"]
CHILDREN = next(row for name, row in scripts.rows().items() if "whose modules draw their children's weights" in name)
PRECOMPUTED = scripts.rows()["Is it DPO or KTO with precompute_ref_log_probs"]
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
    r"state_dict_type\s*=\s*\W?(?:\w+\.)?FULL_STATE_DICT": "state_dict_type='FULL_STATE_DICT'",
    r"activation_offloading\s*=\s*False": "activation_offloading=False",
    r"activation_offloading\s*=\s*True": "activation_offloading=True",
    r"use_liger_kernel\s*=\s*False": "use_liger_kernel=False",
    r"(?s)\A(?=.*\b(?:DPO|KTO)Trainer\().*\buse_liger_kernel\s*=\s*True": "DPOTrainer(use_liger_kernel=True)",
    r"precompute_ref_log_probs\s*=\s*False": "precompute_ref_log_probs=False",
    PRECOMPUTED.yes: "KTOTrainer(precompute_ref_log_probs=True)",
    r"\b(?:ORPO|CPO)Trainer\(": "CPOTrainer(",
    r"use_vllm\s*=\s*True": "use_vllm=True",
    r"(?s)\A(?!.*use_vllm).*\b(?:GRPO|RLOO)Trainer\(": "GRPOTrainer(",
    r"average_tokens_across_devices\s*=\s*True": "average_tokens_across_devices=True",
    SCHEDULE.no: "lr_scheduler_type='linear'; 'WarmupDecayLR'".replace("'", '"'),
    SCHEDULE.yes: "lr_scheduler_type='cosine'",
    OPTIMIZER.needs: "TrainingArguments(optim=mine)",
    OPTIMIZER.no: """optim='adamw_torch'; "AdamW\"""",
    OPTIMIZER.yes: "optim='paged_adamw_8bit'",
    ACCUMULATES.yes: "with accelerator.no_sync(model):",
    scripts.rows()[EACH_UPDATES].yes: "model = accelerator.prepare(model)\naccelerator.backward(loss)",
    scripts.rows()[SCHEDULED].no: "Accelerator(gradient_accumulation_steps=2).accumulate(model)",
    CLIPPED.needs: "accelerator.clip_grad_norm_(parameters, limit)",
    ACCUMULATION.needs: "Accelerator(gradient_accumulation_steps=steps)",
    CLIPS_OWN.yes: "torch.nn.utils.clip_grad_norm_(parameters, 1.0)",
    PER_PROCESS.needs: "accelerator.prepare(model, scheduler)",
    PER_PROCESS.no: "Accelerator(split_batches=True)",
    PER_PROCESS.yes: "n = steps / a.num_processes\na.prepare(model, scheduler)\nscheduler.step()",
    FROM_SCRATCH.yes: "TrainingArguments()\nAutoModel.from_config(config)",
    CHILDREN.yes: "TrainingArguments()\nGPT2LMHeadModel._from_config(GPT2Config())",
    GEMMA_2.yes: 'from_pretrained("google/gemma-2-9b")',
    GEMMA_2.no: 'from_pretrained("google/gemma-2-9b", attn_implementation="eager")',
    scripts.rows()["reentrant"].yes: "SFTTrainer(peft_config=lora)",
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


@for_each(("name", "key", "pattern"), PATTERNS, ids=lambda part: part[:60])
def test_each_answer_is_that_of_a_script_and_no_other(name, key, pattern, tmp_path):
    """Without what it needs the answer is no, unless it may be elsewhere; with it nothing is said, or what it says."""
    has = typed(pattern)
    without = scripts.rows()[name].otherwise or False
    assert re.search(pattern, has)
    said = {"needs": None, "no": False, "yes": True}[key]
    if not scripts.rows()[name].since:
        assert seen(f"{PLAIN}{has}\n", tmp_path).shown.get(name) is said
        assert seen(f"{PLAIN}# {has}\n", tmp_path).shown.get(name) is not True, "a comment is no code"
    if key == "needs" and not scripts.rows()[name].since:
        assert seen(PLAIN, tmp_path).shown[name] == without
        (tmp_path / "mine.py").touch()
        assert name not in seen(f"import mine\n{PLAIN}", tmp_path).shown
        assert name not in seen(f"from transformers import HfArgumentParser\n{PLAIN}", tmp_path).shown


@for_each("name", scripts.rows())
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
    loop = f"from accelerate import Accelerator\naccelerator = Accelerator(gradient_accumulation_steps=8)\n{text}"
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


LOOP = """from accelerate import Accelerator
accelerator = Accelerator({})
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for batch in loader:
    loss = model(batch)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
"""
ACCUMULATED = LOOP.replace("    loss =", "    with accelerator.accumulate(model):\n        loss =")
YAML = """distributed_type: DEEPSPEED
num_processes: 8
deepspeed_config: {gradient_accumulation_steps: 4, gradient_clipping: 0.5, zero_stage: 2}
"""
JSON = '{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}'
NEW, OLD = "accelerate==1.15.0 deepspeed==0.17.6", "accelerate==1.6.0 deepspeed==0.17.6"


@for_each(
    ("releases", "script", "config", "expected"),
    [
        # Each micro-batch is an update then, so none is lost: last-pass-only is no fault of it.
        (NEW, LOOP, YAML, {"each-micro-batch-updates": "applies", "last-pass-only": None, "L-56": None}),
        (NEW, ACCUMULATED, YAML, {"each-micro-batch-updates": None, "last-pass-only": "applies"}),
        (NEW, LOOP, JSON, {"each-micro-batch-updates": "applies", "L-56": "applies"}),
        (NEW, LOOP.replace("0.5)", "args.clip)"), JSON, {"L-56": "applies if"}),
        (NEW, LOOP.replace("loader:", "loader:\n    if accelerator.sync_gradients: pass"), YAML,
            {"each-micro-batch-updates": "applies if", "last-pass-only": "applies"}),
        (OLD, LOOP, YAML, {"each-micro-batch-updates": None, "schedule-in-each-micro-batch": "applies if"}),
        (OLD, LOOP.replace("scheduler", "other"), YAML, {"schedule-in-each-micro-batch": None}),
        # Accelerate counts what its yaml or the script says, and before 1.8.0 not what a json of DeepSpeed does.
        (OLD, ACCUMULATED, YAML, {"schedule-in-each-micro-batch": None, "no-sync-refused": "applies"}),
        (OLD, ACCUMULATED, JSON, {"schedule-in-each-micro-batch": "applies if", "no-sync-refused": "applies if"}),
        (OLD, ACCUMULATED.replace("{}", "gradient_accumulation_steps=4"), JSON,
            {"no-sync-refused": "applies", "accumulation-of-the-config": None}),
        (NEW, ACCUMULATED.replace("{}", "gradient_accumulation_steps=2"), JSON,
            {"accumulation-of-the-config": "applies"}),
        (NEW, ACCUMULATED.replace("{}", ""), JSON, {"accumulation-of-the-config": None}),
        (NEW, LOOP, JSON.replace("1.0", '"auto"'), {"L-56": "applies"}),
        (NEW, LOOP.replace("0.5)", "1.0)"), JSON.replace("1.0", '"auto"'), {"L-56": None}),
        # What a yaml lacks is the Accelerator's number of passes, and a clipping of 1.0 in all releases.
        (NEW, ACCUMULATED.replace("{}", "gradient_accumulation_steps=4"), "{distributed_type: DEEPSPEED}",
            {"last-pass-only": "applies", "accumulation-of-the-config": None, "L-56": "applies",
             "clips-by-default": None}),
    ],
)  # fmt: skip
def test_a_loop_of_accelerate_and_its_config_answer_together(releases, script, config, expected, tmp_path):
    (tmp_path / "train.py").write_text(script.replace("{}", ""))
    (tmp_path / "config.yaml").write_text(config)
    words = (*releases.split(), str(tmp_path / "train.py"))
    faults = stack(words, config=tmp_path / "config.yaml", flags=Flags())["faults"]
    answers = {row["id"]: row["answer"] for row in faults}
    assert {id: answers.get(id) for id in expected} == expected


FSDP = "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: VERSION}\n"
CLIPPING = LOOP.replace("accelerator.clip", "torch.nn.utils.clip")
LENGTH = "scheduler = cosine(optimizer, len(loader) / accelerator.num_processes)\n"
SCHEDULING = LOOP.replace("model, optimizer, loader, scheduler = ", LENGTH + "model, optimizer, loader, scheduler = ")
BARE = CLIPPING.replace("torch.nn.utils.", "").replace("from", "from torch.nn.utils import clip_grad_norm_\nfrom", 1)
OWN_SHARD, TOO_SOON = "fsdp1-clips-by-own-shard", "schedule-steps-per-process"


@pytest.mark.parametrize(
    ("script", "version", "fault", "answer"),
    [
        (CLIPPING, 1, OWN_SHARD, "applies"),
        (BARE, 1, OWN_SHARD, "applies"),
        (CLIPPING, 2, OWN_SHARD, None),
        (LOOP, 1, OWN_SHARD, "applies if"),
        (CLIPPING + "model.clip_grad_norm_(0.5)", 1, OWN_SHARD, "applies if"),
        (CLIPPING + "ShardingStrategy.NO_SHARD", 1, OWN_SHARD, None),
        (CLIPPING.replace("clip_grad_norm_", "clip_grad_value_"), 1, OWN_SHARD, None),
        (SCHEDULING, 1, TOO_SOON, "applies"),
        (SCHEDULING, 2, TOO_SOON, "applies"),
        (LOOP, 1, TOO_SOON, "applies if"),
        (SCHEDULING.replace("scheduler)", ")"), 1, TOO_SOON, None),
        (SCHEDULING.replace("{}", "split_batches=True"), 1, TOO_SOON, None),
        (SCHEDULING.replace("/ accelerator", "* accelerator"), 1, TOO_SOON, "applies if"),
    ],
)
def test_a_loop_shows_what_takes_a_rank_for_all_or_all_for_a_rank(script, version, fault, answer, tmp_path):
    (tmp_path / "train.py").write_text(script.replace("{}", ""))
    (tmp_path / "config.yaml").write_text(FSDP.replace("VERSION", str(version)))
    words = ("accelerate==1.5.2", "torch==2.6.0", str(tmp_path / "train.py"))
    faults = stack(words, config=tmp_path / "config.yaml", flags=Flags())["faults"]
    assert {row["id"]: row["answer"] for row in faults}.get(fault) == answer


@pytest.mark.parametrize(
    ("trainer", "optimizer"),
    [("Trainer(model)", "adamw"), ("Trainer(model, TrainingArguments(optim=name))", None), ("loss.backward()", None)],
)
def test_a_trainer_that_names_no_optimizer_has_the_default(trainer, optimizer, tmp_path):
    shown = seen(f"from transformers import Trainer, TrainingArguments\n{trainer}\n", tmp_path).shown
    assert shown.get("optimizer") == optimizer


RAW = "import torch\nfor rows in loader:\n    loss = model(rows)\n    loss.backward()\n"


@pytest.mark.parametrize(
    ("text", "is_past"),
    [
        (RAW, True),
        (RAW.replace("loss.b", "scaler.scale(loss / 4).b"), True),
        (f"import accelerate\n{RAW}", False),
        (f"import mine\n{RAW}", False),
        (TRAINER, False),
    ],
)
def test_a_loop_without_accelerate_has_none_of_its_faults(text, is_past, tmp_path, capsys):
    """pip freeze lists it, because transformers asks for it."""
    (tmp_path / "mine.py").touch()
    used = seen(text, tmp_path, "torch==2.13.0\ntransformers==5.23.0\naccelerate==1.15.0\n", Flags(fsdp2=True))
    assert ("accelerate" not in used.releases) is is_past
    assert used.said["trainer"] == ("trainer" if "Trainer" in text else "own")
    stack((str(tmp_path / "requirements.txt"), str(tmp_path / "train.py")), flags=Flags(fsdp2=True))
    assert ("The script trains without accelerate: none of its faults" in capsys.readouterr().out) is is_past


LIGHTNING = """from lightning import Trainer
trainer = Trainer(devices=8, strategy={}, precision="bf16-mixed", accumulate_grad_batches=4)
"""


@pytest.mark.parametrize(
    ("strategy", "stage", "offload"),
    [
        ('"deepspeed_stage_2"', 2, "none"),
        ('"deepspeed_stage_3_offload"', 3, "cpu"),
        ("DeepSpeedStrategy(stage=2)", 2, "none"),
        ("DeepSpeedStrategy(stage=3, offload_optimizer=True)", 3, "cpu"),
        ("FSDPStrategy()", "FSDP1", "none"),
        ("FSDPStrategy(cpu_offload=True)", "FSDP1", "cpu"),
    ],
)
def test_lightning_says_its_stage_and_passes(strategy, stage, offload, tmp_path):
    used = seen(LIGHTNING.replace("{}", strategy), tmp_path, "deepspeed==0.18.2\n", Flags())
    assert (used.said["stage"], used.said["passes"], used.said["offload"]) == (stage, 4, offload)
    assert used.said["trainer"] is None, "it is not that of transformers"


ENVIRONMENT = """- `Accelerate` version: 1.11.0
- `Accelerate` default config:
        - distributed_type: DEEPSPEED
        - deepspeed_config: {'gradient_clipping': 1.0, 'offload_optimizer_device': 'none', 'zero_stage': 2}
"""


@pytest.mark.parametrize(
    "text", [ENVIRONMENT, 'My ds.json:\n{"zero_optimization": {"stage": 2}, "gradient_clipping": 1}\n']
)
def test_a_config_in_a_text_answers_what_is_asked_of_a_config(text, tmp_path):
    (tmp_path / "issue.txt").write_text(f"deepspeed==0.19.8\n{text}")
    answer = stack((str(tmp_path / "issue.txt"),), flags=Flags())
    assert {"clips-by-default", "L-01", "L-46", "L-47"}.isdisjoint(row["id"] for row in answer["faults"])


@pytest.mark.parametrize(("call", "is_whole"), [("GRPOConfig(beta=0.1)", True), ("GRPOConfig(**kwargs)", False)])
def test_a_reward_with_arguments_of_its_own_leaves_a_script_whole(call, is_whole, tmp_path):
    reward = "def reward(completions, **kwargs):\n    return [0.0 for _ in completions]\n"
    text = f"from trl import GRPOConfig, GRPOTrainer\n{reward}GRPOTrainer(model, reward, {call}).train()\n"
    shown = seen(text, tmp_path, "trl==1.0.0\n", Flags()).shown
    assert (shown.get("Is it DPO or KTO with use_liger_kernel") is False) is is_whole


@pytest.mark.parametrize("trainer", ["trl", "trainer", "axolotl"])
def test_a_trainer_is_not_asked_for_an_accelerator_of_ones_own(trainer):
    answer = stack(("accelerate==1.15.0", "deepspeed==0.19.8"), flags=Flags(stage=2, passes=4, trainer=trainer))
    assert {"L-56", "accumulation-of-the-config", "each-micro-batch-updates"}.isdisjoint(
        row["id"] for row in answer["faults"]
    )


def test_a_method_and_its_argument_in_a_script_are_an_answer(tmp_path, capsys):
    """Of TRL no list of releases is kept, so none is named as right."""
    (tmp_path / "train.py").write_text(
        "from trl import DPOConfig, DPOTrainer\nDPOTrainer(DPOConfig(use_liger_kernel=True))\n"
    )
    answer = stack(("trl==1.10.0", str(tmp_path / "train.py")), flags=Flags(ddp=True))
    assert [row["id"] for row in answer["faults"] if row["answer"] == "applies"] == ["trl-liger-past-ddp"]
    assert "no known fault of trl" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "is_whole"),
    [("def reward(completions, **kwargs): ...", True), ("args = GRPOConfig(**kwargs)", False)],
)
def test_a_signature_that_takes_any_arguments_reads_none_from_elsewhere(line, is_whole, tmp_path):
    assert ("peft" in seen(f"{PLAIN}{line}\n", tmp_path).shown) is is_whole


CAUSAL = """from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, Trainer, TrainingArguments
MODEL = "{model}"
model = AutoModelForCausalLM.from_pretrained(MODEL)
trainer = Trainer(model=model, args=TrainingArguments(deepspeed="ds.json"), data_collator=DataCollatorForSeq2Seq())
trainer.train()
"""
OWN = """class Mine(Trainer):
    def compute_loss(self, model, inputs, **kw):
        return {loss}
"""
TWICE, SUMMED = "passes-divided-twice-under-deepspeed", "passes-summed-by-own-losses"


@for_each(
    ("model", "release", "replaced", "twice", "summed"),
    [
        ("Qwen/Qwen2.5-14B", "4.48.3", "", "applies", None),
        ("meta-llama/Llama-3.1-8B-Instruct", "4.46.2", "", "applies", None),
        ("mistralai/Mistral-7B-v0.1", "4.48.3", "", "applies", None),
        ("mistralai/Mistral-7B-v0.1", "4.47.1", "", None, None),
        ("gpt2", "4.48.1", "", "applies if", "applies if"),  # which release began it was not read
        ("gpt2", "4.47.1", "", None, None),
        ("Qwen/Qwen2.5-14B", "4.49.0", "", None, None),
        ("mine/of-my-own", "4.48.3", "", "applies if", "applies if"),
        ("Qwen/Qwen2.5-14B", "4.48.3", "trainer.compute_loss = mine", "applies if", "applies if"),
        ("Qwen/Qwen2.5-14B", "4.48.3", "from trl import DPOTrainer\nDPOTrainer", "applies if", "applies if"),
        ("Qwen/Qwen2.5-14B", "4.48.3", "head = AutoModelForTokenClassification", *2 * ["applies if"]),
        ("Qwen/Qwen2.5-14B", "4.48.3", "from trl import DPOTrainer", "applies", None),  # which is used nowhere
        ("Qwen/Qwen2.5-14B", "4.48.3", OWN.format(loss="model(**inputs).loss"), "applies if", "applies"),
        ("Qwen/Qwen2.5-14B", "4.48.3", OWN.format(loss='f(model, kw["num_items_in_batch"])'), "applies if", None),
        ("Qwen/Qwen2.5-14B", "4.48.3", OWN.format(loss="super().compute_loss(model, inputs)"), *2 * ["applies if"]),
    ],
)
def test_the_model_that_a_script_names_answers_what_is_asked_of_it(model, release, replaced, twice, summed, tmp_path):
    used = seen(f"{CAUSAL.format(model=model)}{replaced}\n", tmp_path, RELEASES.replace("4.49.0", release))
    found = {fault.id: applies(fault, used) for fault in table().fault if fault.id in (TWICE, SUMMED)}
    assert [each and each.answer for each in (found[TWICE], found[SUMMED])] == [twice, summed]


def test_what_a_model_answers_is_asked_by_a_fault():
    asked = {fault.conditions.get("script") for fault in table().fault}
    assert {model_losses.HANDED, model_losses.OWN_LOSS} <= asked


@pytest.mark.parametrize("symptom", ["norm", "grad_norm is four times too small", "grad_norm is smaller than with DDP"])
def test_diagnose_names_the_faults_with_a_symptom_that_stack_names_of_the_same_files(symptom, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("requirements.txt").write_text(RELEASES.replace("4.49.0", "4.48.3"))
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 4}')
    for model in ("Qwen/Qwen2.5-14B", "mine/of-my-own"):
        Path("train.py").write_text(
            CAUSAL.format(model=model).replace('.json"', '.json", gradient_accumulation_steps=4')
        )
        words = ("requirements.txt", "train.py", "ds.json")
        told = diagnose(words, symptom=symptom)[0]
        named = {row["id"]: row["answer"] for row in stack(words, flags=Flags(), symptom=symptom)["faults"]}
        assert named[TWICE] == ("applies" if model.startswith("Qwen") else "applies if")
        assert (told["sure"] == "sure") == (named[TWICE] == "applies")
        assert TWICE in (told["id"], *told["may"])
        assert "What was seen" not in " ".join(told["questions"])


@pytest.mark.parametrize(
    ("written", "config", "ignored"),
    [
        ('lr_scheduler_type="cosine"', '"scheduler": {"type": "WarmupLR"}', "trainers-schedule-not-used"),
        ('lr_scheduler_type="cosine"', '"scheduler": {"type": "WarmupCosineLR"}', ""),
        ('lr_scheduler_type="linear"', '"scheduler": {"type": "WarmupDecayLR"}', ""),
        ('lr_scheduler_type="cosine"', '"optimizer": {"type": "AdamW"}', ""),
        ("learning_rate=1e-5", '"scheduler": {"type": "WarmupLR"}', ""),
        ('optim="paged_adamw_8bit"', '"optimizer": {"type": "AdamW"}', "trainers-optimizer-not-used"),
        ('optim="adafactor"', '"optimizer": {"type": "AdamW"}', "trainers-optimizer-not-used"),
        ('optim="adamw_torch"', '"optimizer": {"type": "AdamW"}', ""),
        ('optim="paged_adamw_8bit"', '"scheduler": {"type": "WarmupLR"}', ""),
    ],
)
def test_what_deepspeeds_config_silently_replaces_is_told(written, config, ignored, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("requirements.txt").write_text(RELEASES.replace("4.49.0", "4.48.3"))
    Path("ds.json").write_text(f'{{"zero_optimization": {{"stage": 3}}, {config}}}')
    Path("train.py").write_text(CAUSAL.format(model="gpt2").replace('"ds.json"', f'"ds.json", {written}'))
    words = ("requirements.txt", "train.py", "ds.json")
    rows = {row["id"]: row["answer"] for row in stack(words, flags=Flags())["faults"]}
    told = {id for id in rows if id.startswith("trainers-")}
    assert told == ({ignored} if ignored else set())
    assert all(rows[id] == "applies" for id in told)
    assert {id for id in diagnose(words)[0]["applies"] if id.startswith("trainers-")} == told


@pytest.mark.parametrize(("trl", "answer"), [("0.27.0", None), ("0.28.0", True), ("1.8.0", True), ("1.17.0", None)])
def test_an_sft_trainer_of_adapters_recomputes_as_its_release_forces_it(trl, answer):
    code = {Path("train.py"): "trainer = SFTTrainer(model, args=config, peft_config=LoraConfig(r=16))\n"}
    stack = Stack.of({"trl": Version(trl)}, Flags(stage=3, trainer="trl"))
    assert scripts.shown(code, "", "", stack).get("reentrant") is answer


SCRATCH = """from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Trainer, TrainingArguments
args = TrainingArguments(deepspeed="ds.json")
tokenizer = AutoTokenizer.from_pretrained("gpt2")
model = AutoModelForCausalLM.from_config(GPT2Config())
Trainer(model=model, args=args).train()
"""
FROM_CONFIG = ("stage-3-from-config-not-initialized", "stage-3-children-not-drawn")
FINE_TUNED = SCRATCH.replace("from_config(GPT2Config())", 'from_pretrained("gpt2")')


@pytest.mark.parametrize(
    ("release", "code", "said"),
    [
        ("5.21.0", SCRATCH, ("", "applies")),
        ("5.2.0", SCRATCH, ("applies", "applies")),
        ("5.23.0", SCRATCH, ("", "")),
        ("5.2.0", FINE_TUNED, ("", "")),
        ("5.2.0", SCRATCH.replace("GPT2Config()", "LlamaConfig()"), ("applies", "applies if")),
        ("5.2.0", SCRATCH + FINE_TUNED, ("applies if", "applies if")),  # as run_clm.py: which of them ran?
    ],
)
def test_first_weights_of_stage_3_concern_who_trains_from_scratch(release, code, said, tmp_path):
    stack = seen(code, tmp_path, f"transformers=={release}\n", Flags(stage=3))
    found = [applies(fault, stack) for fault in table().fault if fault.id in FROM_CONFIG]
    assert tuple("" if each is None else "applies if" if each.why else "applies" for each in found) == said


# Each keyword of a training that is read from a script, with its value.
KEYWORDS = """cpu_offload=True, offload_params=True, offload_optimizer_device="cpu", gradient_accumulation_steps=4,
accumulate_grad_batches=4, num_processes=8, world_size=8, num_gpus=8, per_device_train_batch_size=2, micro_batch_size=2,
train_micro_batch_size_per_gpu=2, max_length=512, max_seq_length=512,
lora_rank=8, lora_r=8, num_machines=2, nnodes=2, bf16=True, fp16=True, mixed_precision="bf16", optim="adamw_torch",
gradient_checkpointing=True, activation_checkpointing=True, use_liger_kernel=True, use_reentrant=True, use_peft=True,
cpu_ram_efficient_loading=True, fsdp="full_shard", fsdp_version=2, sharding_strategy="full_shard", zero_stage=3,
sync_each_batch=True, gradient_as_bucket_view=True, load_in_4bit=True, peft_config=config, ref_model=other,
vllm_gpu_memory_utilization=0.6, attn_implementation="eager", finetuning_type="full", deepspeed="ds_zero3.json"
"""
FOREIGN = ["StateDictOptions({})", "save.options({})", "wandb.init({})", "GenerationConfig({})"]
SCRIPT = "import library\nlibrary.{}\n"


@for_each("call", FOREIGN)
@for_each("keyword", KEYWORDS.replace("\n", " ").strip().split(", "))
def test_a_keyword_counts_in_the_call_whose_keyword_it_is(keyword, call):
    of_training, elsewhere = (read(SCRIPT.format(each.format(keyword))) for each in ("ModelConfig({})", call))
    assert of_training.said or stated(of_training)
    assert (elsewhere.said, stated(elsewhere)) == ({}, {})


UNUSED = [
    "from peft import LoraConfig",
    "from trl import DPOTrainer as Preferences, SFTTrainer",
    "from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard",
    "# no LoRA here, and no DPOTrainer( either",
    '"""All weights train: no LoRA."""',
]


@pytest.mark.parametrize("line", UNUSED)
def test_a_name_counts_where_it_is_used_and_not_where_it_is_imported_or_remarked(line):
    script = f"{line}\nimport os\nfrom transformers import Trainer\nTrainer(model).train()\n"
    assert read(script).said == read(script.replace(f"{line}\n", "")).said == {"trainer": "trainer"}
    assert that_counts(script).count("\n") == script.count("\n")
    name = line.removesuffix(" either").split()[-1].strip('."')
    assert read(f"{script}{name}(model, lora_r=8)\n").said != {"trainer": "trainer"}


# --- a DeepSpeed config that a script makes

MAKES = {
    "cfg = dict(zero_optimization=dict(stage=3, overlap_comm=True))": 3,
    "zero = dict(stage=3)\ncfg = {'zero_optimization': zero, 'gradient_clipping': 1.0}": 3,
    "STAGE = 3\ncfg = dict(zero_optimization=dict(stage=STAGE))": 3,
    "cfg = {'zero_optimization': {'stage': 2}}\ncfg['zero_optimization']['stage'] = 3": 3,
    "zero = {'stage': 2}\ncfg = {'zero_optimization': zero}\nzero['stage'] = 3": 3,
    "cfg = {}\ncfg['zero_optimization'] = {'stage': 3}\ncfg.update(gradient_clipping=1.0)": 3,
    "cfg = {}\ncfg.update({'zero_optimization': {'stage': 3}})": 3,
    "base = dict(gradient_clipping=1.0)\ncfg = {**base, 'zero_optimization': {'stage': 3}}": 3,
    "json.dump({'zero_optimization': dict(stage=3)}, open('ds.json', 'w'))": 3,
    "kept = HfDeepSpeedConfig(dict(zero_optimization=dict(stage=3)))": 3,
    "args = TrainingArguments('out', deepspeed=dict(zero_optimization=dict(stage=3)))": 3,
    "cfg = dict(zero_optimization=dict(stage=2))\nif big:\n    cfg['zero_optimization']['stage'] = 3": None,
    "cfg = dict(zero_optimization=dict(stage=args.stage))": None,
    "if __name__ == '__main__':\n    cfg = dict(zero_optimization={})\n    cfg['zero_optimization']['stage'] = 3": 3,
    "cfg = {'zero_optimization': {'stage': 3}}\ncfg['zero_optimization'] = cfg": 3,
}


@for_each("script", MAKES)
def test_a_config_that_a_script_makes_is_read_as_it_is_in_the_end(script):
    seen = read(f"import deepspeed\n{script}\nlora = dict(r=8)\n")
    assert seen.said.get("stage") == MAKES[script]
    assert (value_at(seen.config.content, "zero_optimization.stage") if seen.config else None) == MAKES[script]
    assert that_counts(script).count("\n") == script.count("\n")
    assert "lora = dict(r=8)" in seen.text


def test_what_is_not_known_in_a_config_stays_as_it_is():
    seen = read("import deepspeed\ncfg = dict(train_batch_size=args.rows, zero_optimization=dict(stage=3))\n")
    assert seen.said["stage"] == 3
    assert '"train_batch_size": args.rows' in seen.text


# --- a model of text that is dense

OF_A_MODEL = """import torch
from transformers import {head}
model = {head}.from_pretrained("{name}")
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for rows in loader:
    accelerator.backward(model(**rows).loss)
    optimizer.step()
"""


@for_each("asked", model_losses.OF_PARTS)
@for_each(
    ("head", "name", "answer"),
    [
        ("AutoModelForCausalLM", "Qwen/Qwen2.5-7B", False),
        ("AutoModelForCausalLM", "mistralai/Mixtral-8x7B-v0.1", None),
        ("AutoModelForCausalLM", "mine/other", None),
        ("AutoModel", "Qwen/Qwen2.5-7B", None),
    ],
)
def test_a_dense_model_uses_all_of_itself(asked, head, name, answer, tmp_path):
    assert asked in {fault.conditions.get("script") for fault in table().fault}
    assert seen(OF_A_MODEL.format(head=head, name=name), tmp_path).shown.get(asked) is answer


PARSERS = {
    "argparse": 'p.add_argument("-m", "--model", default="Qwen/Qwen2.5-7B")\n'
    'p.add_argument("--batch-size", default=4)\np.add_argument("--lora", default=False)\n'
    "use(args.model, args.batch_size, args.lora, other.model)",
    "dataclass": "@dataclass\nclass Mine:\n    model: str = 'Qwen/Qwen2.5-7B'\n    batch_size: int = field(default=4)\n"
    "    lora: bool = False\nuse(script_args.model, script_args.batch_size, script_args.lora, other.model)",
    "typer": "@app.command()\n"
    "def main(model: str = 'Qwen/Qwen2.5-7B', batch_size: int = typer.Option(4), lora=False):\n"
    "    use(model, batch_size, lora, other.model)",
    "click": "@click.command()\n@click.option('--model', default='Qwen/Qwen2.5-7B')\n"
    "@click.option('--batch-size', default=4)\ndef main(model, batch_size, lora):\n"
    "    use(model, batch_size, lora, other.model)",
}


@pytest.mark.parametrize("parser", PARSERS)
def test_a_scripts_own_arguments_have_their_defaults_or_what_its_command_gives(parser):
    def used(command):
        text, taken = with_defaults(PARSERS[parser], command)
        assert text.count("\n") == PARSERS[parser].count("\n")
        return re.sub(r"\s+(?=[,)])", "", text).rpartition("use(")[2], taken

    last = PARSERS[parser].rpartition("use(")[2].split(", ", 2)[2]
    assert used("") == (f'"Qwen/Qwen2.5-7B", 4, {last}', ["--batch_size", "--model"])
    assert used("accelerate launch mine.py --batch_size 16") == (f'"Qwen/Qwen2.5-7B", 16, {last}', ["--model"])
    assert used("mine.py --batch-size=2 --model gpt2") == (f'"gpt2", 2, {last}', [])


@pytest.mark.parametrize(
    ("holds", "is_read"),
    [
        ("a = p.parse_args()", True),
        ("a, rest = p.parse_known_args()", True),
        ("a, t = HfArgumentParser((Mine, TrainingArguments)).parse_args_into_dataclasses()", True),
        ("a = load()", False),
        ("a = p.parse_args()\nfor a in rows:\n    pass", False),
    ],
)
def test_what_a_parser_returns_holds_its_arguments_by_any_name(holds, is_read):
    script = f"p.add_argument('--bs', default=4)\n{holds}\nDataLoader(rows, batch_size=a.bs)"
    assert with_defaults(script, "mine.py --bs 2")[0].endswith("batch_size=2   )") == is_read


def test_a_name_that_a_script_sets_itself_has_no_default():
    typer = "@app.command()\ndef main(model: str = 'gpt2'):\n    model = load(model)\n    train(model)"
    later = "p.add_argument('--bs', default=4)\nargs.bs = 8\nuse(args.bs)"
    assert [with_defaults(text) for text in (typer, later)] == [(typer, []), (later, [])]


@pytest.mark.parametrize(
    ("backward", "answer"),
    [
        ("loss.backward(); opt.step()", True),
        ("(loss / 4).backward(retain_graph=True)", True),
        ("engine.backward(loss); engine.step()", False),
        ("engine.backward(loss); other.backward()", False),  # of another model, perhaps
        ("engine.scale(loss).backward()", None),
    ],
)
def test_whose_backward_a_script_calls_is_seen_in_its_syntax(backward, answer, tmp_path):
    engine = "engine, opt, _, _ = deepspeed.initialize(model=model, config='ds.json')  # loss.backward() is DDP's\n"
    script = tmp_path / "train.py"
    script.write_text(f"import deepspeed\n{engine}for rows in loader:\n    loss = engine(rows)\n    {backward}\n")
    given = ("deepspeed==0.17.5", "torch==2.13.0", str(script))
    told, _ = described(given, Flags(stage=2), None)
    assert told.shown.get(scripts.ITSELF) is answer
    script.write_text(script.read_text().replace("deepspeed.initialize", "prepare"))
    assert not described(given, Flags(stage=2), None)[0].shown.get(scripts.ITSELF)
