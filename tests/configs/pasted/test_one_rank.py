"""A line of a given script that one rank alone runs, and that waits for all, is named where a training hangs."""

from pathlib import Path

import pytest

from study.configs import scripts
from study.configs.oom.reading import BETWEEN_TEXTS
from study.configs.pasted.answer import answer
from study.configs.pasted.one_rank import on_one_rank
from tests.cli.test_cli import in_this_process
from tests.configs.pasted.test_pasted import WORK

HANG = "zero_stage: 3, world_size: 4\n" + WORK.format(rank=0, index=1580, kind="_ALLGATHER_BASE", elements=466119168)
GUARDS = [
    "accelerator.is_main_process",
    "accelerator.is_local_main_process and step % 100 == 0",
    "trainer.is_world_process_zero()",
    "state.is_local_process_zero",
    "rank == 0",
    "args.local_rank in [-1, 0]",
    "torch.distributed.get_rank() == 0",
    "int(os.environ['RANK']) == 0",
]
CALLS = {
    "trainer.save_model('out')": "hang_saving",
    "model.save_pretrained('out')": "hang_saving",
    "accelerator.unwrap_model(model).save_pretrained('out')": "hang_saving",
    "accelerator.save_state('out')": "hang_saving",
    "engine.save_checkpoint('out')": "hang_saving",
    "get_model_state_dict(model)": "hang_saving",
    "torch.save(accelerator.get_state_dict(model), 'out')": "hang_saving",
    "weight.full_tensor()": "hang_a_gather",
}


def script(guard: str, call: str) -> str:
    return f"def main():\n    train()\n    if {guard}:\n        print('saving')\n        {call}\n"


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("call", CALLS)
def test_the_line_that_one_rank_runs_alone_is_the_answer_to_a_hang(guard, call):
    told = answer(HANG, scripts={Path("train.py"): script(guard, call)})
    assert told.id == CALLS[call]
    assert told.found[0].line.startswith("train.py:5: ")
    assert told.found[0].line.removeprefix("train.py:5: ") in call


@pytest.mark.parametrize(
    ("guard", "call"),
    [
        ("True", "trainer.save_model('out')"),
        ("not accelerator.is_main_process", "trainer.save_model('out')"),
        ("is_deepspeed_zero3_enabled() or trainer.is_world_process_zero()", "trainer.save_model('out')"),
        ("rank == 0", "tokenizer.save_pretrained('out')"),
        ("rank == 0", "model.config.save_pretrained('out')"),
        ("rank == 0", "model.save_pretrained('out', state_dict=states)"),
        ("rank == 0", "print('model.save_pretrained(out)')"),
        ("rank == 0", "this is no Python"),
    ],
)
def test_what_all_ranks_run_or_waits_for_none_is_not_named(guard, call):
    assert [*on_one_rank({"train.py": script(guard, call)})] == []


@pytest.mark.parametrize(
    "text", ["The loss is nan with ZeRO stage 3", HANG.replace("zero_stage: 3", "distributed_type: MULTI_GPU")]
)
def test_without_a_hang_or_shards_no_line_is_named(text):
    told = answer(text, scripts={Path("train.py"): script(GUARDS[0], "trainer.save_model('out')")})
    assert "hang_saving" not in [each.id for each in told.found]


AFTER = "trainer.train()\nif trainer.accelerator.is_main_process:\n    trainer.save_model('out')\n"
BAR = "zero_stage: 3\n  4%|#  | {step}/1250 [28:22<11:20:45, 34.04s/it]\n"


@pytest.mark.parametrize(
    ("text", "symptom", "is_blamed"),
    [
        (BAR.format(step=50) + HANG, "", False),
        (BAR.format(step=1250) + HANG, "", True),
        (BAR.format(step=1250) + "{'train_runtime': 9.1}\n" + HANG, "", True),
        ("zero_stage: 3", "it hangs after step 50", False),
        ("zero_stage: 3", "it hangs when it saves", True),
        ("zero_stage: 3", "", False),
    ],
)
def test_a_line_after_the_training_is_blamed_only_where_the_training_ended(text, symptom, is_blamed):
    told = answer(text, symptom, scripts={Path("train.py"): AFTER})
    assert ("hang_saving" in [each.id for each in told.found]) is is_blamed
    assert any("hangs when it is reached: train.py:3:" in note for note in told.notes) is not is_blamed
    assert "hangs when it is reached" in told.nothing or "hang" in symptom or HANG in text


def test_a_script_beside_a_log_says_nothing_of_what_was_done_last():
    log = "zero_stage: 3\n{'loss': 1.4, 'grad_norm': 3.1, 'epoch': 0.04}\n" + HANG
    alone, beside = answer(log), answer(log + BETWEEN_TEXTS + AFTER, scripts={Path("train.py"): AFTER})
    assert beside.found[0].remedy == alone.found[0].remedy


def test_diagnose_names_the_line_of_a_script_beside_a_log(tmp_path, monkeypatch, capsys):
    log, train = tmp_path / "train.log", tmp_path / "train.py"
    log.write_text(HANG)
    train.write_text(script("accelerator.is_main_process", "accelerator.save_state('out')"))
    assert not in_this_process(monkeypatch, f"diagnose {log} {train}")
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("Likely: Only rank 0 saves")
    assert f"In the text: {train}:5: accelerator.save_state('out')" in said


def test_a_text_that_ends_with_the_name_of_a_script_is_no_file():
    assert scripts.among(("hangs " * 4000 + "in train.py", "missing.py", "train.log")) == {}
