"""A script's own Accelerator beside its launcher: what counts, what is refused, and what is right and not told."""

import re
from pathlib import Path

import accelerate
import pytest

from study.cli.stack import stack
from study.configs.engines import contradictions, texts_of
from study.known.stacks import Flags

MADE = "from accelerate import Accelerator\n{}accelerator = Accelerator({})\nmodel = accelerator.prepare(model)\n"
DS = "distributed_type: DEEPSPEED\nnum_processes: 4\n{}deepspeed_config:\n  zero_stage: 2\n  {}\n"
DDP = "distributed_type: MULTI_GPU\nnum_processes: 4\n{}"
FSDP = "distributed_type: FSDP\nnum_processes: 4\n{}fsdp_config:\n  fsdp_version: 2\n"
WITH_JSON = DS.format("", "deepspeed_config_file: conf/ds.json").replace("  zero_stage: 2\n", "")
JSON = '{{"zero_optimization": {{"stage": 2}}, "train_micro_batch_size_per_gpu": 1{}}}'
PASSES, PRECISION = "gradient_accumulation_steps", "mixed_precision"
FOUR, BF16 = f"{PASSES}=4", f"{PRECISION}='bf16'"
EIGHT = DS.format("", f"{PASSES}: 8")
OVERRULED = "accumulation_of_launcher"
LAUNCH = "accelerate launch --config_file acc.yaml {} train.py"

# What the Accelerator is given, the launcher's yaml and flags, and DeepSpeed's json; and what is said, with a part.
TOLD = [
    (FOUR, EIGHT, "", "", OVERRULED, "8 of acc.yaml does, .* says nothing"),
    (FOUR, EIGHT, "--gradient_accumulation_steps 2", "", OVERRULED, "2 of the launcher's --gradient"),
    (FOUR, DS.format("", ""), "--gradient-accumulation-steps=2", "", OVERRULED, "2 of the launcher's"),
    (FOUR, "", "--use_deepspeed --gradient_accumulation_steps 2", "", OVERRULED, "2 of the launcher's"),
    (FOUR, WITH_JSON, "", f', "{PASSES}": 8', OVERRULED, "8 of ds.json does, .* warns"),
    (FOUR, WITH_JSON, "", "", OVERRULED, "1 of ds.json, which has none does, .* warns"),
    (FOUR, WITH_JSON, f"--{PASSES} 2", f', "{PASSES}": "auto"', OVERRULED, "2 of .* says nothing"),
    (FOUR, DDP.format(""), f"--{PASSES} 8", "", "launcher_overruled", "counts .*, and not 8 of the"),
    (FOUR, FSDP.format(""), f"--multi_gpu --{PASSES} 8", "", "launcher_overruled", "counts .*, and not 8 of the"),
    (BF16, DDP.format("mixed_precision: fp16\n"), "", "", "launcher_overruled", "and not fp16 of acc.yaml"),
    (BF16, FSDP.format("mixed_precision: bf16\n"), "--mixed_precision fp16", "", "launcher_overruled", "launcher's"),
    (BF16, DS.format("mixed_precision: fp16\n", ""), "", "", "launcher_overruled", "and not fp16 of acc.yaml"),
    (f"{PRECISION}='no'", DDP.format("mixed_precision: fp16\n"), "", "", "launcher_overruled", "=no .*, and not fp16"),
    (BF16, WITH_JSON, "", ', "fp16": {"enabled": true}', "precision_refused", "is bf16, and ds.json enables fp16"),
    ("", WITH_JSON, "--mixed_precision bf16", ', "fp16": {"enabled": true}', "precision_refused", "launcher's"),
    (BF16, WITH_JSON, "", ', "bf16": {"enabled": false}', "precision_overruled", "ds.json has it off"),
]
RIGHT = [
    ("", EIGHT, "", ""),
    ("", EIGHT, "--gradient_accumulation_steps 2", ""),
    ("", WITH_JSON, "", f', "{PASSES}": 8, "bf16": {{"enabled": true}}'),
    ("", DDP.format("mixed_precision: bf16\n"), "", ""),
    ("gradient_accumulation_steps=8", EIGHT, "", ""),
    (f"{FOUR}, {BF16}", DS.format("", ""), "", ""),
    (f"{FOUR}, {BF16}", WITH_JSON, "", f', "{PASSES}": "auto", "bf16": {{"enabled": "auto"}}'),
    (f"{FOUR}, {BF16}", WITH_JSON, "", f', "{PASSES}": 4.0, "bf16": {{"enabled": true}}'),
    (BF16, DDP.format("mixed_precision: 'no'\n"), "", ""),  # as `accelerate config` writes it of itself
    (BF16, DDP.format("mixed_precision: bf16\n"), "", ""),
    (BF16, DDP.format("mixed_precision: fp16\n"), "--mixed_precision bf16", ""),
    (f"{PRECISION}='no'", WITH_JSON, "", ', "bf16": {"enabled": true}'),
    (f"{PRECISION}='fp8'", DDP.format("mixed_precision: bf16\n"), "", ""),
    (f"{PASSES}=args.steps, {PRECISION}=args.mixed", EIGHT + "mixed_precision: fp16\n", "", ""),
    ("**kwargs", EIGHT + "mixed_precision: fp16\n", "", ""),
    ("gradient_accumulation_plugin=plugin", EIGHT, "", ""),
    (f"{FOUR}, deepspeed_plugin=DeepSpeedPlugin(gradient_accumulation_steps=4)", EIGHT, "", ""),
    (FOUR, DDP.format(""), "", ""),
]


def _job(folder: Path, made: str, yaml: str, flags: str, json: str, before: str = "") -> list[Path]:
    (folder / "train.py").write_text(MADE.format(before, made))
    (folder / "run.sh").write_text(LAUNCH.format(flags) if yaml else f"accelerate launch {flags} train.py")
    (folder / "conf").mkdir()
    (folder / "conf" / "ds.json").write_text(JSON.format(json))  # that the yaml names: nobody else does
    (folder / "acc.yaml").write_text(yaml)
    return [folder / name for name in ("train.py", "run.sh", *(["acc.yaml"] if yaml else []))]


@pytest.mark.parametrize(("made", "yaml", "flags", "json", "id", "part"), TOLD)
def test_what_the_launcher_says_otherwise_is_told_once(made, yaml, flags, json, id, part, tmp_path, capsys):
    files = _job(tmp_path, made, yaml, flags, json)
    (told,) = [each for each in contradictions(texts_of(files)) if not each.id.startswith("engine")]
    assert told.id == id
    assert re.search(part, told.sentence)
    assert "train.py:2" in told.sentence or made == ""
    answer = stack(("accelerate==1.15.0", *map(str, files)), flags=Flags())
    printed = " ".join(capsys.readouterr().out.split())
    assert answer["fine"] <= told.may_be
    for other in ("[accumulation-of-the-config]", "[config-mismatch]", "config's accumulation", "config's prec"):
        assert other not in printed


@pytest.mark.parametrize(("made", "yaml", "flags", "json"), RIGHT)
def test_a_right_script_is_not_accused(made, yaml, flags, json, tmp_path):
    files = _job(tmp_path, made, yaml, flags, json)
    assert not [each for each in contradictions(texts_of(files)) if "two_configs" not in each.id]


@pytest.mark.parametrize(
    ("before", "command"),
    [
        ("", "torchrun train.py"),  # which reads no yaml
        ("", "python train.py"),
        ("", "accelerate launch other.py"),
        ("", "accelerate launch --config_file b.yaml train.py"),  # which is not here
        ("", "accelerate launch --config_file acc.yaml train.py\naccelerate launch train.py"),
        ("import os\nos.environ['ACCELERATE_MIXED_PRECISION'] = 'bf16'\n", LAUNCH.format("")),
        ("if test:\n    accelerator = Accelerator()\n", LAUNCH.format("")),  # which one counts is not known
    ],
)
def test_what_does_not_surely_launch_a_script_contradicts_nothing(before, command, tmp_path):
    files = _job(tmp_path, f"{FOUR}, {BF16}", EIGHT + "mixed_precision: fp16\n", "", "", before)
    (tmp_path / "run.sh").write_text(command)
    assert [*contradictions(texts_of(files))] == []


def test_the_scripts_precision_counts_in_what_applies(tmp_path):
    """Accelerate takes fp16 of the script, and bf16 of the yaml nowhere: a fault of fp16 applies."""
    files = _job(tmp_path, f"{PRECISION}='fp16'", DS.format("mixed_precision: bf16\n", ""), "", "")
    answer = stack(("accelerate==1.15.0", "deepspeed==0.19.8", *map(str, files)), flags=Flags())
    assert "fp16-next-scale" in {each["id"] for each in answer["faults"] if each["answer"] == "applies"}


def test_the_lines_of_accelerate_that_decide_are_there():
    of = {name: (Path(accelerate.__file__).parent / name).read_text() for name in ("accelerator.py", "state.py")}
    assert (
        'parse_choice_from_env("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", gradient_accumulation_steps)'
        in (of["accelerator.py"])
    )
    assert "self.gradient_accumulation_steps = deepspeed_gradient_accumulation_steps" in of["accelerator.py"]
    assert re.search(r'parse_choice_from_env\("ACCELERATE_MIXED_PRECISION", "no"\)\s+if mixed_prec', of["state.py"])


# --- a script that counts its micro-batches itself

LOOP = """from accelerate import Accelerator
parser.add_argument("--accum", type=int, default=8)
args = parser.parse_args()
accelerator = Accelerator({given})
optimizer = AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for i, batch in enumerate(loader):
    {loss}
    {guard}
        optimizer.step()
        optimizer.zero_grad()
"""
BACKWARD, EVERY = "accelerator.backward(model(**batch).loss / args.accum)", "if (i + 1) % args.accum == 0:"
ONE = DS.format("", f"{PASSES}: 1")
# What the Accelerator is given, a micro-batch, its guard, the yaml, the script's flags, DeepSpeed's json, if it is told
COUNTED = [
    ("", BACKWARD, EVERY, ONE, "", "", True),
    ("", BACKWARD, EVERY, DS.format("", ""), "", "", True),
    ("", BACKWARD, EVERY, ONE, "--accum 4", "", True),
    ("", BACKWARD, "if i % 4 == 3 or i == len(loader) - 1:", ONE, "", "", True),
    ("", BACKWARD, "if i % 4 != 3:\n        continue\n    if True:", ONE, "", "", True),
    ("", BACKWARD, EVERY, WITH_JSON, "", "", True),
    (f"{PASSES}=args.accum", BACKWARD, EVERY, ONE, "", "", True),
    (f"{PASSES}=1", BACKWARD, EVERY, WITH_JSON, "", f', "{PASSES}": "auto"', True),
    ("", BACKWARD, EVERY, ONE, "--accum 1", "", False),
    ("", BACKWARD, "if i % 1 == 0:", ONE, "", "", False),
    ("", BACKWARD, "if True:", ONE, "", "", False),
    ("", BACKWARD, EVERY.replace("if", "print(i)\n    if True or"), ONE, "", "", True),
    ("", f"{EVERY}\n        print(i)\n    {BACKWARD}", "if True:", ONE, "", "", False),
    ("", f"with accelerator.accumulate(model):\n        {BACKWARD}", EVERY, ONE, "", "", False),
    ("", BACKWARD, "if accelerator.sync_gradients and i % 8:", ONE, "", "", False),
    ("", BACKWARD.replace("accelerator", "engine"), EVERY, ONE, "", "", False),
    ("", BACKWARD, EVERY, DDP.format(""), "", "", False),
    ("", BACKWARD, EVERY, FSDP.format(""), "", "", False),
    ("", BACKWARD, EVERY, DS.format("", f"{PASSES}: 8"), "", "", False),  # before Accelerate 1.8.0 the engine counts
    ("", BACKWARD, EVERY, WITH_JSON, "", f', "{PASSES}": 8', False),
    (f"{PASSES}=8", BACKWARD, EVERY, WITH_JSON, "", f', "{PASSES}": "auto"', False),
    ("deepspeed_plugin=plugin", BACKWARD, EVERY, ONE, "", "", False),
]


@pytest.mark.parametrize(("given", "loss", "guard", "yaml", "flags", "json", "is_told"), COUNTED)
def test_micro_batches_that_a_script_counts_are_told_where_deepspeed_updates_in_each(
    given, loss, guard, yaml, flags, json, is_told, tmp_path
):
    files = _job(tmp_path, "", yaml, "", json)
    files[0].write_text(LOOP.format(given=given, loss=loss, guard=guard))
    files[1].write_text(f"{LAUNCH.format('')} {flags}")
    told = [each for each in contradictions(texts_of(files)) if each.id.startswith("counted_by")]
    may_be = not is_told and "8" in (given + yaml + json).replace("num_processes: 8", "")
    assert [(each.id, each.is_surely_wrong) for each in told] == [("counted_by_script", True)] * is_told + [
        ("counted_by_both", False)
    ] * may_be


@pytest.mark.parametrize(("flags", "of"), [("", "=8 of"), ("--accum 4", "=4 of"), ("--accum 1", "")])
def test_an_argument_of_the_script_counts_as_the_command_gives_it(flags, of, tmp_path):
    files = _job(tmp_path, "", ONE, "", "")
    files[0].write_text(LOOP.format(given=f"{PASSES}=args.accum", loss="pass", guard="if 1:"))
    files[1].write_text(f"{LAUNCH.format('')} {flags}")
    told = [each.sentence for each in contradictions(texts_of(files))]
    assert [of in each for each in told] == [True] * bool(of)
    assert not [*contradictions(texts_of([files[0], files[2]]))]  # a command may give another number
