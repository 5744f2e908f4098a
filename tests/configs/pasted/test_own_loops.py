"""What a loop of one's own does wrong is told by its script, and a loop that is right has no alarm."""

from pathlib import Path
from textwrap import indent

import pytest

from study.configs.oom.reading import BETWEEN_TEXTS
from study.configs.pasted import own_loops
from study.configs.pasted.answer import answer
from study.configs.pasted.read import read
from study.known.rules import ROOT
from tests.cases import for_each
from tests.cli.test_cli import in_this_process

SCALED = """scaler = torch.amp.GradScaler({given})
for rows in loader:
    {backward}
    {between}
    scaler.step(optimizer)
    scaler.update()
"""
BACKWARD, CLIP = (
    "scaler.scale(model(rows).loss / 4).backward()",
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
)
UNSCALE = "scaler.unscale_(optimizer)"
# What stands between the scaled backward pass and the step, and whether scaled gradients are clipped.
BETWEEN = {
    CLIP: True,
    f"{CLIP}\n    {UNSCALE}": True,
    f"if step % 4 == 0:\n        {CLIP}": True,
    "nn.utils.clip_grad_value_(model.parameters(), 1.0)": True,
    f"{UNSCALE}\n    {CLIP}": False,
    f"if scaler:\n        {UNSCALE}\n    {CLIP}": False,
    f"if not use_amp:\n        {CLIP}": False,
    "accelerator.clip_grad_norm_(model.parameters(), 1.0)": False,
    f"unscaled(optimizer)\n    {CLIP}\ndef unscaled(optimizer):\n    {UNSCALE}\nif 1:": False,
    "pass": False,
}


def ids(script: str, symptom: str = "") -> list[str]:
    return [each.id for each in answer(script, symptom, scripts={Path("train.py"): script}).found]


@pytest.mark.parametrize("between", BETWEEN)
def test_gradients_that_are_clipped_while_they_are_scaled_are_told(between):
    script = SCALED.format(given="", backward=BACKWARD, between=between)
    assert ("clipped_scaled" in ids(script)) is BETWEEN[between]


@pytest.mark.parametrize(("given", "backward"), [("enabled=False", BACKWARD), ("", "model(rows).loss.backward()")])
def test_where_nothing_is_scaled_clipping_needs_no_unscaling(given, backward):
    assert "clipped_scaled" not in ids(SCALED.format(given=given, backward=backward, between=CLIP))


LOADER = "loader = DataLoader(data, batch_size=4, shuffle=True)"
OWN = """from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
data = load()
{loader}
model = DDP(model)
for rows in loader:
    model(rows).loss.backward()
"""
# Loaders, and whether each rank reads all rows.
LOADERS = {
    LOADER: True,
    f"{LOADER}  # without a DistributedSampler": True,
    LOADER.replace("True", "False"): False,
    LOADER.replace("shuffle=True", "sampler=DistributedSampler(data)"): False,
    f"sampler = DistributedSampler(data) if ddp else None\n{LOADER}": False,
    f"data = data[rank::world_size]\n{LOADER}": False,
    f"r, n = dist.get_rank(), dist.get_world_size()\nrows = data[r::n]\ndata = TensorDataset(rows)\n{LOADER}": False,
    f"rows = data[dist.get_rank() :: 2]\n{LOADER.replace('data,', 'TensorDataset(rows),')}": False,
    f"r = dist.get_rank()\ndevice = torch.device(r)\nrows = load(device)\n{LOADER}": True,
    f"data = data.shard(ranks, rank)\n{LOADER}": False,
    f"data = Rows(rank, world_size)\n{LOADER}": False,
    f"{LOADER}\nloader = accelerator.prepare(loader)": False,
    f"torch.manual_seed(17)\n{LOADER}": True,
    f"from torch.utils.data.distributed import DistributedSampler\n{LOADER}": True,
    f"data = [json.loads(line) for line in open(path)]\n{LOADER}": True,
    f"options = json.loads(Path(config).read_text())\n{LOADER}": False,
    f"torch.manual_seed(17 + dist.get_rank())\n{LOADER}": False,
    f"class Rows(Dataset):\n    at = dist.get_rank()\ndata = Rows()\n{LOADER}": False,
    f"def main(rank):\n    return Rows()\n{LOADER}": True,
    f"parallelize_module(model, mesh['tp'], plan)\n{LOADER}": False,
    f"{LOADER}\nlightning.Trainer().fit(model, loader)": False,
    f"import deepspeed\n{LOADER}": False,
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_loader_that_ddp_does_not_divide_is_told(loader):
    script = OWN.format(loader=loader)
    assert ("not_divided" in ids(script)) is LOADERS[loader]
    told = answer(script, "ranks read the same data", scripts={Path("train.py"): script})
    assert (told.id == "not_divided") is LOADERS[loader]
    assert ("not known here" in told.unknown) is not LOADERS[loader]
    assert "not_divided" not in ids(script.replace("DDP(", "wrapped(").replace("nn.parallel", "nn.mine"))


@pytest.mark.parametrize("loader", LOADERS)
def test_as_is_one_that_fsdp_does_not_divide(loader):
    sharding = "from torch.distributed.fsdp import fully_shard\ndist.init_process_group('nccl')\nfully_shard(model)\n"
    script = sharding + "\n".join(OWN.format(loader=loader).splitlines()[1:]).replace("DDP(", "moved(")
    assert ("not_divided" in ids(script)) is LOADERS[loader]


def test_it_answers_no_hang():
    script = OWN.format(loader=LOADER)
    told = answer(script, "it hangs after step 100", scripts={Path("train.py"): script})
    assert "not_divided" not in [each.id for each in told.found]
    assert any("[not_divided]" in note for note in told.notes)


def test_it_stands_beside_what_explains_more():
    script = OWN.format(loader=LOADER)
    told = answer(f"step 1 loss 9 grad_norm nan\nstep 2 loss nan\n{script}", scripts={Path("train.py"): script})
    assert told.id == "norm-nan-first"
    assert any("train.py:4: DataLoader(data, batch_size=4, shuffle=True). " in note for note in told.notes)


SHARD = "for block in model.layers:\n    fully_shard(block)\nfully_shard(model)"
ADAM = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)"
TRAIN = """for rows in loader:
    loss = model(**rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ACCELERATE = """accelerator = Accelerator(gradient_accumulation_steps={steps})
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for step, rows in enumerate(loader):
"""
ACC = ACCELERATE.replace(
    "model, optimizer", "optimizer = torch.optim.AdamW(model.parameters())\nmodel, optimizer", 1
).replace("torch.optim.AdamW(model.parameters()), loader", "optimizer, loader")
UPDATE = "optimizer.step()\n{0}optimizer.zero_grad()\n"
CROSS = "loss = F.cross_entropy"
FOUR, EIGHT = " " * 4, " " * 8
WITHIN = f"{FOUR}with accelerator.accumulate(model):\n"
BACKWARD_4 = f"{EIGHT}accelerator.backward(loss)\n{EIGHT}" + UPDATE.format(EIGHT)
STEPS = "gradient_accumulation_steps"
OF_PLUGIN = ACC.format(steps="").replace(f"{STEPS}=", "")
ENGINE = "import deepspeed\nengine, *_ = deepspeed.initialize(model=model, config=config)\nfor rows in loader:\n"
OF_ENGINE = "    engine.backward(loss)\n    engine.step()\n"
# Loops, and the mistakes of each: none, if it is right.
OWN_LOOPS = {
    f"{ADAM}\n{SHARD}\n{TRAIN}": ["optimizer_of_other_tensors"],
    f"{ADAM.replace('AdamW', 'SGD')}\nmodel = FSDP(model, auto_wrap_policy=policy)\n{TRAIN}": [
        "optimizer_of_other_tensors"
    ],
    f"def wrap(model):\n    fully_shard(model)\n{ADAM}\nwrap(model)\n{TRAIN}": ["optimizer_of_other_tensors"],
    f"{ADAM}\nif args.fsdp:\n    fully_shard(model)\n{TRAIN}": ["optimizer_of_other_tensors"],
    f"{ADAM.replace('model.p', 'params=model.p')}\n{SHARD}\n{TRAIN}": ["optimizer_of_other_tensors"],
    f"{SHARD}\n{ADAM}\n{TRAIN}": [],
    f"{ADAM}\n{SHARD}\n{ADAM}\n{TRAIN}": [],
    f"{ADAM}\nmodel = DDP(model)\n{TRAIN}": [],
    f"{ADAM}\nmodel = FSDP(model, use_orig_params=True)\n{TRAIN}": [],
    f"{ADAM}\nfully_shard(teacher)\n{TRAIN}": [],
    f"if args.ddp:\n    {ADAM}\nelse:\n    fully_shard(model)\n    {ADAM}\n{TRAIN}": [],
    f"{ADAM}\nmodel, optimizer = accelerator.prepare(model, optimizer)\n{TRAIN}": [],
    f"{ADAM}\n{TRAIN}".replace("    optimizer.zero_grad()\n", ""): ["never_cleared"],
    f"{ADAM}\n{TRAIN}".replace("optimizer.zero_grad()", "scheduler.step()"): ["never_cleared"],
    f"{ADAM}\nscaler = GradScaler()\n{TRAIN}".replace("loss.backward", "scaler.scale(loss).backward")
    .replace("optimizer.step()", "scaler.step(optimizer)")
    .replace("    optimizer.zero_grad()\n", ""): ["never_cleared"],
    f"import torch.nn.functional as F\n{ADAM}\n{TRAIN}".replace("optimizer.zero_grad()", "pass"): ["never_cleared"],
    f"from torch.nn import functional\n{ADAM}\n{TRAIN}".replace("optimizer.zero_grad()", "pass"): ["never_cleared"],
    f"from torch.func import functional_call\n{ADAM}\n{TRAIN}".replace("optimizer.zero_grad()", "pass"): [],
    f"{ADAM}\n{TRAIN}".replace("optimizer.zero_grad()", "model.zero_grad()"): [],
    f"{ADAM}\n{TRAIN}".replace("optimizer.zero_grad()", "for each in model.parameters(): each.grad = None"): [],
    f"{ADAM}\n{TRAIN}".replace("optimizer.zero_grad()", "clear(optimizer)"): [],
    f"{ADAM}\n{TRAIN.replace('loss.backward()', 'engine.backward(loss)')}\nimport deepspeed".replace(
        "    optimizer.zero_grad()\n", ""
    ): [],
    f"for rows in loader:\n    {ADAM}\n    model(rows).loss.backward()\n    optimizer.step()\n": [],
    f"{ACC.format(steps=4)}{WITHIN}{EIGHT}loss = model(**rows).loss / 4\n{BACKWARD_4}": ["divided_again"],
    f"{ACC.format(steps=16)}{WITHIN}{EIGHT}loss = loss_of(rows)\n{EIGHT}loss /= 16\n{BACKWARD_4}": ["divided_again"],
    f"{ACC.format(steps='args.accum')}{WITHIN}{EIGHT}loss = f(rows) / args.accum\n{BACKWARD_4}": ["divided_again"],
    # By what the library itself says: it divides by that in any case.
    f"{OF_PLUGIN}{WITHIN}{EIGHT}loss = f(rows) / accelerator.{STEPS}\n{BACKWARD_4}": ["divided_again"],
    f"{OF_PLUGIN}{WITHIN}{EIGHT}loss = f(rows) / 4\n{BACKWARD_4}": [],  # of the launcher may be 1
    f"{ENGINE}    loss = f(rows) / engine.{STEPS}()\n{OF_ENGINE}": ["divided_again"],
    f"{ENGINE}    loss = f(rows)\n{OF_ENGINE}".replace("d(loss", f"d(loss / engine.{STEPS}()"): ["divided_again"],
    f"config = {{'{STEPS}': args.accum}}\n{ENGINE}    loss = f(rows)\n    loss /= args.accum\n{OF_ENGINE}": [
        "divided_again"
    ],
    f"{ENGINE}    loss = f(rows) / engine.{STEPS}()\n{OF_ENGINE}".replace("(loss)", "(loss, scale_wrt_gas=False)"): [],
    f"{ENGINE}    loss = f(rows) / rows.tokens\n{OF_ENGINE}": [],
    f"config = {{'{STEPS}': 48}}\n{ENGINE}    loss = f(rows) / 4\n{OF_ENGINE}": [],
    f"{ENGINE}    loss = f(rows)\n{OF_ENGINE}    print(loss / engine.{STEPS}())\n": [],
    f"{ENGINE}    loss = f(rows)\n{OF_ENGINE}    loss = loss / engine.{STEPS}()\n": [],
    f"{ACC.format(steps=4)}{WITHIN}{EIGHT}loss = model(**rows).loss\n{BACKWARD_4}": [],
    f"{ACC.format(steps=4)}{WITHIN}{EIGHT}loss = model(**rows).loss / rows.tokens\n{BACKWARD_4}": [],
    f"{ACC.format(steps=4)}{WITHIN}{EIGHT}loss = model(**rows).loss\n{BACKWARD_4}    print(loss / 4)\n": [],
    f"{ACC.format(steps=1)}{FOUR}loss = model(**rows).loss / 4\n{BACKWARD_4}".replace(EIGHT, FOUR): [],
    f"{ACC.format(steps=4)}{FOUR}loss = model(**rows).loss\n{BACKWARD_4}".replace(EIGHT, FOUR): ["accumulate_unused"],
    f"{ACC.format(steps=4)}{FOUR}loss = model(**rows).loss\n{FOUR}accelerator.backward(loss)\n"
    f"{FOUR}if step % 4 == 3:\n{EIGHT}{UPDATE.format(EIGHT)}": [],
    f"AutoModelForCausalLM\n{CROSS}(out.logits.flatten(0, 1), rows['labels'].flatten())": ["labels_not_moved"],
    f"AutoModelForCausalLM\n{CROSS}(out.logits[:, :-1].flatten(0, 1), rows['labels'][:, 1:].flatten())": [],
    f"BertForMaskedLM\n{CROSS}(out.logits.flatten(0, 1), rows['labels'].flatten())": [],
    f"{SHARD}\nnorm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\nprint(norm)": ["norm-is-partial"],
    f"{SHARD}\nprint(clip_grad_norm_(model.parameters(), 1.0).item())": ["norm-is-partial"],
    f"{SHARD}\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)": [],
    f"{SHARD}\nnorm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)": [],
    f"{SHARD}\nself.norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)": [],
    f"{SHARD}\ndef f():\n    n = torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n    return n": [
        "norm-is-partial"
    ],
    f"{SHARD}\nself.norm = clip_grad_norm_(model.parameters(), 1.0)\nlog({{'norm': self.norm}})": ["norm-is-partial"],
    f"{SHARD}\nreturned = [clip_grad_norm_(model.parameters(), 1.0)]": ["norm-is-partial"],
    f"{SHARD}\nnorm = clip_grad_norm_(model.parameters(), 1.0).full_tensor()": [],
}


@for_each("script", OWN_LOOPS)
def test_a_loop_has_the_mistakes_that_it_makes_and_no_other(script):
    found = answer(script, scripts={Path("train.py"): script}).found
    assert [each.id for each in found] == OWN_LOOPS[script]
    assert all(each.line.startswith("train.py:") for each in found)


KEPT = "for rows in loader:\n    loss = model(rows).loss\n    {}\n    loss.backward()\n    {}\n    optimizer.step()\n"
KEPT += "    optimizer.zero_grad()\n"
LOOPS_THAT_KEEP = {
    KEPT.format("losses.append(loss)", "pass"): True,
    KEPT.format("pass", "self.losses.append(loss)"): True,
    KEPT.format("pass", "total += loss"): True,
    KEPT.format("pass", "total += loss").replace("loss.backward", "scaler.scale(loss / 4).backward"): True,
    KEPT.format("pass", "total += loss").replace("loss.backward()", "accelerator.backward(loss)"): True,
    KEPT.format("losses.append(loss.item())", "total += loss.detach()"): False,
    KEPT.format("pass", "losses.append(float(loss))"): False,
    KEPT.format("pass", "loss = loss.detach()\n    losses.append(loss)"): False,
    KEPT.format("loss += model.extra", "pass"): False,
    KEPT.format("pass", "total += loss\n    if step % 10 == 0:\n        total = 0"): False,
    KEPT.format("pass", "losses.append(loss)\n    losses.clear()"): False,
    "for rows in loader:\n    total = 0\n    for row in rows:\n        loss = model(row)\n        loss.backward()\n"
    "        total += loss\n    optimizer.step()\n    optimizer.zero_grad()\n": False,
    "for epoch in range(3):\n    total = 0\n" + indent(KEPT.format("pass", "total += loss"), "    "): True,
}


@pytest.mark.parametrize("loop", LOOPS_THAT_KEEP)
def test_losses_that_are_kept_with_their_graphs_are_told_where_memory_grows(loop):
    told = answer(loop, "GPU memory grows every step", scripts={Path("train.py"): loop})
    assert ("losses_kept" in [each.id for each in told.found]) is LOOPS_THAT_KEEP[loop]


@pytest.mark.parametrize(("kept", "is_told"), [("losses.append(loss)", True), ("losses.append(loss.item())", False)])
def test_an_error_of_memory_names_the_line_that_keeps_losses(tmp_path, monkeypatch, capsys, kept, is_told):
    log, script = tmp_path / "train.log", tmp_path / "train.py"
    log.write_text("CUDA out of memory. Tried to allocate 786.00 MiB.")
    script.write_text(KEPT.format("pass", kept))
    assert not in_this_process(monkeypatch, f"oom {log} {script}")
    said = " ".join(capsys.readouterr().out.split())
    assert (f"In the script: {script}:5: {kept}." in said) is is_told


def test_what_cannot_make_what_was_seen_is_told_beside_it():
    clipped = "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    script = f"{ADAM}\n{SHARD}\n{TRAIN}    {clipped}\n    print(norm)\n"
    told = answer(script, "loss does not go down", scripts={Path("train.py"): script})
    assert told.id == "optimizer_of_other_tensors"
    assert "norm-is-partial" not in [each.id for each in told.found]
    assert any("[norm-is-partial]" in note for note in told.notes)


def test_scripts_that_are_right_have_none():
    rooms = ("examples", "tests/rehearsal", "reproductions", "study")
    paths = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    wrong = {"optimizer_before_fsdp.py": "optimizer_of_other_tensors", "gradients_not_cleared.py": "never_cleared"}
    assert len(paths) > 100
    for path in paths:
        found = [each.id for each in own_loops.mistakes(read(""), {path: path.read_text()})]
        mistake = wrong.get(path.name) if path.parent.name == "mistakes" else None
        assert found == [mistake] * bool(mistake), path


@pytest.mark.parametrize(("yaml", "is_told"), [("1", False), ("4", True)])
def test_of_one_micro_batch_deepspeed_divides_nothing(yaml, is_told):
    script = f"{ACC.format(steps='args.accum')}{WITHIN}{EIGHT}loss = f(rows) / args.accum\n{BACKWARD_4}"
    launched = f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  {own_loops.PASSES}: {yaml}\n"
    found = answer(f"{launched}{BETWEEN_TEXTS}{script}", scripts={Path("train.py"): script}).found
    assert ("divided_again" in [each.id for each in found]) is is_told


# --- clipping by torch, by what divides the training

PREPARE = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
BY_TORCH = f"from torch.nn.utils import clip_grad_norm_\n{PREPARE}{TRAIN}"
CLIPPED = {
    f"{PREPARE}{TRAIN}    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n": True,
    f"{BY_TORCH}    clip_grad_norm_(model.parameters(), 1.0)\n": True,
    f"engine, *_ = deepspeed.initialize(model=net)\n{TRAIN}    nn.utils.clip_grad_norm_(engine.parameters(), 1)": True,
    f"model = FSDP(model)\n{TRAIN}    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n": True,
    f"{PREPARE}{TRAIN}    accelerator.clip_grad_norm_(model.parameters(), 1.0)\n": False,
    f"{PREPARE}{TRAIN}    torch.nn.utils.clip_grad_norm_(probe.parameters(), 1.0)\n": False,
    f"{BY_TORCH}    clip_grad_norm_(model.parameters(), 1.0)\n    accelerator.clip_grad_norm_(parameters, 1)\n": False,
    f"{TRAIN}    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n": False,
}
ENGINES = {
    "zero_stage: 1": "clipped_nothing",
    "zero_stage: 2": "clipped_nothing",
    "zero_stage: 3": "clipped_nothing",
    "distributed_type: FSDP\nfsdp_version: 1": "clipped_part",
    "distributed_type: FSDP\nfsdp_version: 2": "",
    "distributed_type: MULTI_GPU": "",
}


@for_each("engine", ENGINES)
@for_each("script", CLIPPED)
def test_clipping_by_torch_is_told_where_it_clips_nothing_or_a_part(script, engine):
    told = answer(f"{engine}\n{BETWEEN_TEXTS}{script}", scripts={Path("train.py"): script})
    clips = [each.id for each in told.found if each.id.startswith("clipped_")]
    assert clips == ([ENGINES[engine]] if CLIPPED[script] and ENGINES[engine] else [])


def test_a_fault_of_the_table_is_told_once():
    script = next(iter(CLIPPED))
    text = f"torch==2.6.0\nfsdp_version: 1\ndistributed_type: FSDP\nnum_processes: 4\n{BETWEEN_TEXTS}{script}"
    told = answer(text, scripts={Path("train.py"): script})
    assert (told.id, told.applying) == ("clipped_part", ())
    assert "fsdp1-clips-by-own-shard" not in [each.id for each in told.found]


# --- DeepSpeed's engine, which counts the micro-batches itself

ENGINE = """engine, *_ = deepspeed.initialize(model=net, config={config})
for step, rows in enumerate(loader):
    engine.backward(engine(rows).loss)
    {steps}
"""
ACCUMULATED, EVERY = "{'gradient_accumulation_steps': 8}", "if step % 8 == 7:\n        engine.step()"
STEPS = {
    (ACCUMULATED, EVERY): True,
    (ACCUMULATED, EVERY.replace("8", "args.every")): True,
    (ACCUMULATED, "if (step + 1) % 8:\n        continue\n    engine.step()"): True,
    (ACCUMULATED, "engine.step()"): False,
    (ACCUMULATED, f"{EVERY}\n    engine.step()"): False,
    (ACCUMULATED, "if step % 8 == 7:\n        print(step)\n    engine.step()"): False,
    (ACCUMULATED, "if not is_late:\n        engine.step()"): False,
    (ACCUMULATED, f"engine.set_gradient_accumulation_boundary(step % 8 == 7)\n    {EVERY}"): False,
    ("{'gradient_accumulation_steps': 8, 'managed_gradient_accumulation': False}", EVERY): False,
    ("{'gradient_accumulation_steps': 1}", EVERY): False,
}


@pytest.mark.parametrize(("config", "steps"), STEPS)
def test_an_engine_that_steps_after_some_passes_alone_counts_them_twice(config, steps):
    script = ENGINE.format(config=config, steps=steps)
    told = answer(script, "the loss falls far too slowly", scripts={Path("train.py"): script})
    assert ("steps_counted_twice" in [each.id for each in told.found]) is STEPS[config, steps]
    if STEPS[config, steps]:
        assert "only one of 8 of these calls" in told.found[0].sentence


# --- what may make steps slow

SLOW = """rank = int(os.environ["LOCAL_RANK"])
loader = DataLoader(data, {workers})
test_loader = DataLoader(data, num_workers=0)
model = DDP(model.cuda(), {ddp})
for rows in loader:
    loss = model(rows).loss
    loss.backward()
    {read}
"""
LOADED, READ, LOOKED = "loaded_in_process", "read_in_each_step", "unused_looked_for"
WELL = ("num_workers=4", "static_graph=False", "total += loss.detach()")
CAUSES = {
    WELL: [],
    ("num_workers=0", *WELL[1:]): [LOADED],
    ("batch_size=4", *WELL[1:]): [LOADED],
    ("num_workers=args.workers", *WELL[1:]): [],
    ("**given", *WELL[1:]): [],
    (*WELL[:2], "print(loss)"): [READ],
    (*WELL[:2], "total += loss.item()"): [READ],
    (*WELL[:2], "print(f'{step} {loss.item():.2f}')"): [READ],
    (*WELL[:2], "if rank == 0:\n        print(loss.item())"): [READ],
    (*WELL[:2], "if step % 50 == 0:\n        print(loss.item())"): [],
    (*WELL[:2], "if rank == 0 and step % 50 == 0:\n        print(loss.item())"): [],
    (*WELL[:2], "print('loss', step)"): [],
    (WELL[0], "find_unused_parameters=True", WELL[2]): [LOOKED],
    (WELL[0], "find_unused_parameters=True, static_graph=True", WELL[2]): [],
    ("batch_size=4", "find_unused_parameters=True", "print(loss.item())"): [LOADED, READ, LOOKED],
}


@for_each(("workers", "ddp", "read"), CAUSES)
def test_what_may_make_steps_slow_is_told_to_who_says_so(workers, ddp, read):
    script = SLOW.format(workers=workers, ddp=ddp, read=read)
    told = answer(script, "slow", scripts={Path("train.py"): script})
    causes = [each for each in told.found if own_loops.MAKES.get(each.id) == {"slow"}]
    assert [each.id for each in causes] == CAUSES[workers, ddp, read]
    assert {each.sure for each in causes} <= {"possible"}
    quiet = answer(script, scripts={Path("train.py"): script})
    assert not [each for each in (LOADED, READ, LOOKED) if any(each in note for note in quiet.notes)]
    assert not own_loops.MAKES.keys() & {LOADED, READ, LOOKED} & {each.id for each in quiet.found}
    on_cpu = answer(script.replace(".cuda()", ""), "slow", scripts={Path("train.py"): script.replace(".cuda()", "")})
    assert not {LOADED, READ} & {each.id for each in on_cpu.found}


def test_what_is_surer_stands_before_what_may_make_steps_slow():
    script = SLOW.format(workers="num_workers=0", ddp="", read="print(loss)")
    stops = "\n".join(f"step {n} | loss {3 - n / 99} | step_time {9 if n % 10 == 0 else 1} s" for n in range(1, 60))
    told = answer(f"{stops}{BETWEEN_TEXTS}{script}", "slow", scripts={Path("train.py"): script})
    assert told.id == "steps-stop"
    assert [name in " ".join(told.notes) for name in (LOADED, READ, LOOKED)] == [True, True, False]


# --- what a reading of a script can say


def test_where_nothing_is_found_in_a_script_it_is_said_that_it_was_not_run():
    script = f"accelerator = Accelerator()\n{PREPARE}{TRAIN}    accelerator.clip_grad_norm_(model.parameters(), 1.0)\n"
    told = answer(script, scripts={Path("train.py"): script})
    assert told.nothing.endswith("The script was read and not run: `study virtual train.py` runs it")
    assert "Not checked: which rows each rank reads, and how the loss is computed. `study.watch`" in told.nothing
    assert "study.watch" not in answer("What is stage 2?").nothing
