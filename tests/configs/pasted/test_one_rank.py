"""A line of a given script that one rank alone runs, and that waits for all, is named where a training hangs."""

from pathlib import Path

import accelerate
import pytest

from study.configs import scripts
from study.configs.oom.reading import BETWEEN_TEXTS
from study.configs.pasted.answer import answer
from study.configs.pasted.one_rank import on_one_rank, skipped_alone
from tests.cases import for_each
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
    "int(os.environ.get('LOCAL_RANK', 0)) == 0",
    "not dist.get_rank()",
    "not (step % 10 or rank != 0)",
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
    "dist.all_reduce(loss)": "hang_a_branch",
    "torch.distributed.barrier()": "hang_a_branch",
    "dist.gather(loss, losses)": "hang_a_branch",
    "losses = dist.all_gather_object(losses, loss)": "hang_a_branch",
    "dist.broadcast(loss, 0)": "hang_a_branch",
    "deepspeed.comm.barrier()": "hang_a_branch",
    "self.accelerator.wait_for_everyone()": "hang_a_branch",
    "losses.append(accelerator.gather(loss))": "hang_a_branch",
    "acc.gather_for_metrics(loss)": "hang_a_branch",
    "accelerator.reduce(loss)": "hang_a_branch",
    "engine(batch)": "hang_evaluation",
    "loss = self.model(**batch).loss.item()": "hang_evaluation",
    "sum(engine(b).item() for b in batches)": "hang_evaluation",
    "model.module(batch)": "hang_evaluation",
    "model.generate(**prompt)": "hang_evaluation",
    "accelerator.unwrap_model(model).generate(**prompt)": "hang_evaluation",
    "trainer.evaluate()": "hang_evaluation",
    "evaluate(model, loader)": "hang_evaluation",
    "self.validate_epoch(model=accelerator.unwrap_model(model))": "hang_evaluation",
    "utils.generate_samples(engine)": "hang_evaluation",
}


def script(guard: str, call: str) -> str:
    return f"def main():\n    train()\n    if {guard}:\n        print('saving')\n        {call}\n"


@for_each("guard", GUARDS)
@for_each("call", CALLS)
def test_the_line_that_one_rank_runs_alone_is_the_answer_to_a_hang(guard, call):
    told = answer(HANG, scripts={Path("train.py"): script(guard, call)})
    assert told.id == CALLS[call]
    assert told.found[0].line.startswith("train.py:5: ")
    assert told.found[0].line.removeprefix("train.py:5: ") in call


@for_each(
    ("guard", "call"),
    [
        ("True", "trainer.save_model('out')"),
        ("not is_compiled", "trainer.save_model('out')"),
        ("is_deepspeed_zero3_enabled() or trainer.is_world_process_zero()", "trainer.save_model('out')"),
        ("rank == 0", "evaluate.load('accuracy')"),
        ("rank == 0", "evaluate(ema_model)"),
        ("rank == 0", "run_evaluation(predictions)"),
        ("rank == 0", "validate_config(model)"),
        ("rank == 0", "tokenizer.save_pretrained('out')"),
        ("rank == 0", "tok.save_pretrained('out')"),
        ("rank == 0", "self.processing_class.save_pretrained('out')"),
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


@pytest.mark.parametrize(("stage", "looked"), [("3", True), ("2", False), ("1", False), ("", None)])
def test_a_forward_pass_on_one_rank_is_named_where_it_gathers_and_said_to_be_unread_where_nothing_says(stage, looked):
    told = answer(f"zero_stage: {stage}\nit hangs", scripts={Path("train.py"): script("rank == 0", "model(batch)")})
    assert ([each.id for each in told.found] == ["hang_evaluation"]) is bool(looked)
    assert any("nothing was found in train.py" in note for note in told.notes) is not looked or looked is None
    assert any("Forward passes were not looked at" in note for note in told.notes) is (looked is None)


def test_a_script_that_is_no_python_is_said_to_be_unread():
    told = answer("zero_stage: 3\nit hangs", scripts={Path("train.py"): "this is no Python"})
    assert "train.py is no Python, and was not read" in told.notes[0]


def test_no_forward_pass_of_a_library_is_taken_for_that_of_one_rank():
    library = Path(accelerate.__file__).parent
    files = {path: path.read_text() for path in library.rglob("*.py") if "is_main_process" in path.read_text()}
    assert len(files) > 3
    assert [*on_one_rank(files, ("hang_evaluation",))] == []


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
    assert any("may hang when it is reached: train.py:3:" in note for note in told.notes) is not is_blamed
    assert "may hang when it is reached" in told.nothing or "hang" in symptom or HANG in text


@pytest.mark.parametrize(
    ("stage", "call", "waits"),
    [
        *(
            (stage, call, True)
            for stage in "0123"
            for call in ("acc.save_state('out')", "model.save_checkpoint('out')")
        ),
        ("2", "self.accelerator.save_state('out')", True),
        ("2", "trainer.save_state()", False),  # writes on rank 0 alone
        ("2", "trainer.save_model('out')", False),  # gathers nothing
        ("2", "logger.save_checkpoint('out')", False),
        ("DDP", "acc.save_state('out')", False),
    ],
)
def test_a_checkpoint_on_one_rank_is_told_with_each_stage_of_deepspeed(stage, call, waits):
    said = f"zero_stage: {stage}" if stage.isdigit() else "distributed_type: MULTI_GPU"
    told = answer(said, scripts={Path("train.py"): script("acc.is_main_process", call)})
    assert any("waits in a barrier [hang_saving]" in note for note in told.notes) is waits


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


# Scripts, with the line that some ranks run alone: 0 is none.
SCRIPTS = {
    "x = dist.get_rank()\nif x == 0:\n    dist.barrier()": 3,
    "master = ddp_rank == 0\nif master:\n    dist.barrier()": 3,
    "master = True\nif ddp:\n    master = ddp_rank == 0\nif master:\n    dist.barrier()": 5,
    "from torch.distributed import all_reduce as add\nif rank == 0:\n    add(x)": 3,
    "from accelerate.utils import gather_object\nif rank == 0:\n    gather_object(x)": 3,
    "import torch.distributed as td\nif rank == 0:\n    td.barrier()": 3,
    "if rank != 0:\n    pass\nelse:\n    dist.barrier()": 4,
    "if rank > 0:\n    dist.barrier()": 2,
    "rank = dist.get_rank()\nif rank:\n    dist.barrier()": 3,
    "if not accelerator.is_main_process:\n    accelerator.wait_for_everyone()": 2,
    "def f():\n    if rank != 0:\n        return\n    print()\n    dist.barrier()": 5,
    "for x in y:\n    if rank != 0:\n        continue\n    dist.all_reduce(x)": 4,
    "for x in y:\n    if not is_main_process:\n        break\n    dist.all_reduce(x)": 4,
    "if rank != 0:\n    sys.exit(0)\ndist.barrier()": 3,
    "if rank == 0:\n    print()\nelse:\n    return\ndist.barrier()": 5,
    "try:\n    with a:\n        if rank == 0:\n            dist.barrier()\nfinally:\n    pass": 4,
    "if rank == 0:\n    dist.all_reduce(x)\nelse:\n    dist.barrier()": 2,
    "x = dist.all_reduce(y) if rank == 0 else y": 1,
    "x = y if rank != 0 else dist.all_reduce(y)": 1,
    "def f():\n    return gather(dist.all_gather(x, y) if accelerator.is_main_process else None)": 2,
    "rank == 0 and dist.barrier()": 1,
    "rank != 0 or dist.barrier()": 1,
    "if rank == 0 and dist.all_reduce(x):\n    pass": 1,
    "if rank == 1:\n    dist.barrier()": 2,
    "if 0 == rank:\n    dist.barrier()": 2,
    "if rank < 1:\n    dist.barrier()": 2,
    "if rank == world_size - 1:\n    dist.barrier()": 2,
    "if dist.get_rank() == dist.get_world_size() - 1:\n    dist.barrier()": 2,
    "if rank != 1:\n    return\ndist.barrier()": 3,
    "def save():\n    write()\n    dist.barrier()\nif rank == 0:\n    save()": 3,
    "def wait():\n    dist.barrier()\ndef save():\n    wait()\nif rank == 0:\n    save()": 2,
    "class A:\n    def save(self):\n        dist.barrier()\n    def run(self):\n"
    "        if self.rank == 0:\n            self.save()": 3,
    "def save():\n    if rank != 0:\n        return\n    dist.barrier()\nif rank == 0:\n    save()": 4,
    "import torch.distributed.checkpoint as dcp\nif rank == 0:\n    dcp.save(s, checkpoint_id='o')": 3,
    "if rank == 0:\n    torch.distributed.checkpoint.save(s)": 2,
    "from torch.distributed.checkpoint import async_save\nif rank == 0:\n    async_save(s)": 3,
    "from torch.distributed import checkpoint as dcp\nif rank == 0:\n    dcp.load(s)": 3,
    "@accelerator.on_main_process\ndef log(x):\n    print(accelerator.gather(x))\nlog(x)": 3,
    "@PartialState().on_local_main_process\ndef log(x):\n    dist.all_reduce(x)": 3,
    "@acc.on_process(process_index=0)\ndef log(x):\n    acc.reduce(x)": 3,
    "@acc.on_last_process\ndef log(x):\n    acc.wait_for_everyone()": 3,
    "@rank_zero_only\ndef log(x):\n    dist.barrier()": 3,
    "class A:\n    @utilities.rank_zero_only\n    def log(self, x):\n        dist.barrier()": 4,
    "def add(x):\n    dist.all_reduce(x)\n@acc.on_main_process\ndef log(x):\n    add(x)": 2,
    "def is_main():\n    return dist.get_rank() == 0\nif is_main():\n    dist.barrier()": 4,
    # --- healthy
    "def is_main():\n    return not ddp or rank == 0\nif is_main():\n    dist.barrier()": 0,
    "def is_first():\n    return step == 0\nif is_first():\n    dist.barrier()": 0,
    "@acc.on_main_process\ndef log(x):\n    print(x)\nlog(acc.gather(x))": 0,
    "@functools.cache\ndef log(x):\n    dist.barrier()": 0,
    "@acc.on_main_process\ndef log():\n    acc.wait_for_everyone()\nif rank != 0:\n    dist.barrier()": 0,
    "x = dist.all_reduce(y) if rank == 0 else dist.all_reduce(z)": 0,
    "x = dist.all_reduce(y) if world_size > 1 else y": 0,
    "dist.is_initialized() and dist.barrier()": 0,
    "if rank == 0:\n    dist.broadcast(x, 0)\nif rank == 1:\n    dist.broadcast(x, 0)": 0,
    "if rank == 1:\n    dist.broadcast(x, 1)\nelse:\n    dist.broadcast(x, 1)": 0,
    "def save():\n    if rank != 0:\n        dist.barrier()\n    write()\nif rank == 0:\n    save()": 0,
    "def save():\n    dist.barrier()\nsave()": 0,
    "def count(ranks):\n    if ranks > 1:\n        dist.barrier()\ncount(ranks)\nif rank == 0:\n    count(1)": 0,
    "def save():\n    dist.barrier()\nif rank == 0:\n    save()\ntrainer.at_end(save)": 0,
    "class A:\n    def save(self):\n        dist.barrier()\nif rank == 0:\n    model.save()": 0,
    "class A:\n    def save(self):\n        dist.barrier()\nclass B:\n    def save(self):\n        pass\n"
    "    def run(self):\n        if rank == 0:\n            self.save()": 0,
    "import torch.distributed.checkpoint as dcp\nif rank == 0:\n    dcp.save(s, no_dist=True)": 0,
    "from torch.utils import checkpoint\nif rank == 0:\n    checkpoint.save(s)\n    torch.save(s, 'o')": 0,
    "if rank == 0:\n    dist.barrier()\nelse:\n    dist.barrier()": 0,
    "if rank == 0:\n    print()\ndist.barrier()": 0,
    "if rank == 0:\n    dist.gather(x, xs)\nelse:\n    dist.gather(x)": 0,
    "if rank not in [-1, 0]:\n    dist.barrier()\nload()\nif rank == 0:\n    dist.barrier()": 0,
    "if rank != 0:\n    dist.barrier()\n    return\nload()\ndist.barrier()": 0,
    "if rank == 0:\n    dist.barrier()\nelse:\n    accelerator.wait_for_everyone()": 0,
    "def work():\n    dist.barrier()\nif rank == 0:\n    dist.barrier()\nelse:\n    work()": 0,
    "if rank == 0:\n    dist.barrier(group=first)": 0,
    "if rank == 0:\n    dist.all_reduce(x, group=of_first)": 0,
    "if rank == 0:\n    dist.send(x, 1)\nelse:\n    dist.recv(x, 0)": 0,
    "if rank == 0 or step:\n    dist.barrier()": 0,
    "rank = os.environ.get('RANK')\nif rank:\n    dist.barrier()": 0,
    "x = f(rank)\nif x == 0:\n    dist.barrier()": 0,
    "if world_size > 1:\n    dist.barrier()": 0,
    "if rank < world_size:\n    dist.barrier()": 0,
    "if lora_rank == 0:\n    dist.barrier()": 0,
    "if rank == 0:\n    functools.reduce(f, xs)\n    indices.gather(x)\n    np.broadcast(x, y)": 0,
    "if rank == 0:\n    dist.barrier(": 0,
    "for x in y:\n    if step == 0:\n        continue\n    dist.barrier()": 0,
    "if rank == 0:\n    model.state_dict()": 0,
    "def test():\n    for b in bs:\n        model(b)\nif rank == 0:\n    test()": 3,
    "if rank == 0:\n    model.eval()\n    model = accelerator.unwrap_model(model)\n    model(b)": 4,
    "if rank == 0:\n    model = AutoModel.from_pretrained('out')\n    model.generate(b)": 0,
    "if rank == 0:\n    model, tokens = load(args.model, model=name)\n    model.generate(b)": 0,
    "with unwrap_model_for_generation(model) as model:\n    if rank == 0:\n        model.generate(b)": 0,
    "if rank == 0:\n    create_engine()\n    llm.generate(b)\n    reward_model(b)\n    model.eval()": 0,
    "if rank == 0:\n    model(b)\nelse:\n    model(b)": 0,
    "if rank == 0:\n    print()\nmodel(b)": 0,
}
STATES = (
    "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nif rank == 0:\n    s = model.state_dict()\n"
)


@for_each("text", SCRIPTS)
def test_a_script_whose_ranks_part_before_a_collective_is_told_by_its_line(text):
    lines = [each.line for each in on_one_rank({Path("train.py"): text})]
    assert [line.split(":")[1] for line in lines][:1] == ([str(SCRIPTS[text])] if SCRIPTS[text] else [])


def test_states_that_fsdp_gathers_on_one_rank_are_told():
    (seen,) = on_one_rank({Path("train.py"): STATES})
    assert seen.id == "hang_saving"
    assert seen.line == "train.py:3: model.state_dict()"


@pytest.mark.parametrize(
    ("decorator", "ranks"),
    [("on_main_process", "0"), ("on_last_process", "num_processes - 1"), ("on_process(process_index=2)", "2")],
)
def test_who_runs_a_decorated_function_is_said_once(decorator, ranks):
    text = f"@acc.{decorator}\ndef log(x):\n    acc.gather(x)\nif rank == {ranks}:\n    log(x)\n"
    (seen,) = on_one_rank({Path("train.py"): text})
    assert seen.sentence.startswith(f"Rank {ranks} waits")
    assert seen.line == "train.py:3: acc.gather(x)"


def test_who_calls_alone_is_said():
    said = [
        each.sentence for call in ("==", "!=") for each in on_one_rank({"a.py": f"if rank {call} 0:\n dist.barrier()"})
    ]
    assert ["Rank 0 waits" in said[0], "Rank 1 or above waits" in said[1]] == [True, True]


@pytest.mark.parametrize("stage", ["distributed_type: MULTI_GPU", "zero_stage: 2", ""])
def test_a_collective_on_one_rank_hangs_whatever_is_sharded_and_may_where_no_hang_is_seen(stage):
    scripts = {Path("train.py"): script("rank == 0", "dist.barrier()")}
    hung, quiet = answer(f"{stage}\nit hangs", scripts=scripts), answer(stage, scripts=scripts)
    assert [each.id for each in hung.found] == ["hang_a_branch"]
    assert hung.sure == "likely"
    assert not quiet.found
    assert "may hang when it is reached: train.py:5: dist.barrier()" in quiet.notes[0]


@pytest.mark.parametrize(
    ("makes", "call", "may"),
    [
        (
            "e, *_ = deepspeed.initialize(model=m, config={'zero_optimization': {'stage': 2}})",
            "e.save_checkpoint('c')",
            1,
        ),
        ("self.e, o, _, _ = deepspeed.initialize(args=a)", "self.e.save_checkpoint('c')", 1),
        ("import utils; e, *_ = deepspeed.initialize(model=m)", "utils.save_checkpoint(e)", 0),
        ("e, *_ = deepspeed.initialize(model=m)", "e.module.save_pretrained('c')", 0),  # whole with stages 1 and 2
        ("model = DDP(model)", "model.save_checkpoint('c')", 0),
    ],
)
def test_an_engine_that_saves_on_one_rank_may_hang_with_any_stage_and_without_being_asked(makes, call, may):
    text = f"import deepspeed\n{makes}\nif dist.get_rank() == 0:\n    {call}\n"
    told = answer(text, scripts={Path("train.py"): text})
    assert [f"may hang when it is reached: train.py:4: {call}" in note for note in told.notes] == [True] * may


@pytest.mark.parametrize("line", [5, 6])
def test_of_two_lines_that_explain_a_hang_the_one_in_a_dump_leads(line):
    text = script("rank == 0", "dist.all_reduce(v); v.full_tensor()").replace("; ", "\n        ")
    dump = f"""Process 7: python train.py
Thread 7 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:1)
    <module> (train.py:{line})
"""
    told = answer(f"fsdp_version: 2\n{dump}", "it hangs", scripts={Path("train.py"): text})
    assert told.found[0].line.startswith(f"train.py:{line}:")


@pytest.mark.parametrize("call", ["dist.barrier()", "print()"])
def test_a_hang_whose_script_shows_none_names_the_command_that_compares_ranks(call):
    told = answer("world_size: 4\nit hangs", scripts={Path("train.py"): script("rank == 0", call)})
    named = [note for note in told.notes if "`study virtual train.py --ranks 4 --evaluate`" in note]
    assert len(named) == (call == "print()")


@pytest.mark.parametrize(("second", "is_asked"), [(4, "Which counts?"), (2, "")])
def test_two_values_of_a_setting_are_not_taken_for_none(second, is_asked):
    told = answer(
        f"deepspeed accelerate\ngradient_accumulation_steps: 2\n{BETWEEN_TEXTS}gradient_accumulation_steps={second}"
    )
    assert not any("nothing here says" in each and "accumulation" in each for each in told.questions)
    assert any("gradient accumulation: 2, 4" in each for each in told.questions) is bool(is_asked)


TWO_LINES = """for epoch in range(3):
    train()
    if accelerator.is_main_process:
        metrics = accelerator.gather_for_metrics(metrics)
        accelerator.save_state("out")
"""


def of_ranks(odd: int) -> str:
    """A hang of four ranks, of which one makes another call."""
    calls = {rank: ("ALLREDUCE", 1) if rank == odd else ("_ALLGATHER_BASE", 27264) for rank in range(4)}
    return "\n".join(
        WORK.format(rank=rank, index=812, kind=kind, elements=size) for rank, (kind, size) in calls.items()
    )


def test_of_two_lines_in_one_branch_the_first_that_runs_is_the_cause():
    told = answer(of_ranks(0), scripts={Path("train.py"): TWO_LINES})
    assert [each.id for each in told.found] == ["hang_a_branch", "hang_saving", "ranks-call-differently"]
    assert told.found[0].line.startswith("train.py:4: ")


@pytest.mark.parametrize(
    ("odd", "guard", "is_likely"),
    [
        (0, "rank == 0", True),
        (0, "rank != 0", True),
        (1, "rank == 0", False),
        (2, "rank != 0", False),
        (2, "rank == 2", True),
        (3, "rank == 2", False),
    ],
)
def test_a_line_of_another_rank_than_differs_in_the_log_is_only_possible(odd, guard, is_likely):
    told = answer(of_ranks(odd), scripts={Path("train.py"): script(guard, "dist.barrier()")})
    of_line = next(each for each in told.found if each.id == "hang_a_branch")
    assert (of_line.sure == "likely") is (told.id == "hang_a_branch") is is_likely
    assert (f"another rank differs: {odd}" in of_line.sentence) is not is_likely


# --- a rank that leaves out a batch because of its own rows

LOOP = """for step, batch in enumerate(loader):
    {before}
    loss = model(**batch).loss
    {after}
    accelerator.backward(loss)
    optimizer.step()
    {end}
"""
SKIPS = {
    "after": {
        "if torch.isnan(loss):\n        continue": True,
        "value = loss.item()\n    if value > 100:\n        print(step)\n        continue": True,
        "if not torch.isfinite(loss):\n        break": True,
        "if rank == 0:\n        print(loss)": False,
        "if torch.isnan(loss):\n        raise ValueError": False,
        "if torch.isnan(loss):\n        loss = 0 * loss": False,
        "bad = torch.isnan(loss)\n    dist.all_reduce(bad)\n    if bad:\n        continue": False,
        "bad = accelerator.gather(torch.isnan(loss)).any()\n    if bad:\n        continue": False,
        "if step > limit:\n        break": False,
        "for each in batch:\n        if each is None:\n            break": False,
    },
    "before": {
        "if (batch['labels'] != -100).sum() == 0:\n        continue": True,
        "if batch is None: continue": True,
        "if step < start:\n        continue": False,
    },
    "end": {
        "if loss.item() < 0.1:\n        break": True,
        "if loss.item() < 0.1:\n        continue": False,
        "if step == last:\n        break": False,
    },
}
PLACES = [(place, line) for place, lines in SKIPS.items() for line in lines]


@for_each(("place", "line"), PLACES)
def test_a_batch_that_one_rank_alone_leaves_out_may_hang(place, line):
    script = LOOP.format(**{"before": "", "after": "", "end": "", place: line})
    told = answer(f"{HANG}{BETWEEN_TEXTS}{script}", scripts={Path("train.py"): script})
    assert (told.id == "batch_skipped_alone") is SKIPS[place][line]
    assert any("nothing was found in train.py" in each for each in told.notes) is not SKIPS[place][line]
    if told.id == "batch_skipped_alone":
        assert (told.sure, told.questions) == ("likely", ())
        assert told.found[0].line.startswith("train.py:")
    alone = answer(script, scripts={Path("train.py"): script})
    assert not alone.found
    assert not any("batch_skipped_alone" in note for note in alone.notes)  # of one process
    for several in ("DDP(model)", "deepspeed.initialize(model)", "accelerator.prepare(model)"):
        told = answer(script, scripts={Path("train.py"): f"model = {several}\n{script}"})
        may = ["[batch_skipped_alone]" in note for note in told.notes if "may hang when it is reached" in note]
        assert may == [True] * SKIPS[place][line]


FUNCTION = "def step(model, batch, limit):\n    if {test}:\n        return None\n    model(batch).backward()\n"


@pytest.mark.parametrize(("test", "is_told"), [("len(batch) < 2", True), ("limit < 2", False)])
def test_a_function_that_trains_may_leave_out_its_rows(test, is_told):
    assert bool([*skipped_alone({Path("t.py"): FUNCTION.format(test=test)})]) is is_told
