"""Somebody's script as rank 0 of N: what it holds is what a real rank holds, and how it fails is how it would fail."""

import json
import re
import subprocess
import textwrap
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from study.core.errors import Stop
from study.core.gpus import GPUS, num_gpus
from study.records import store
from study.rehearsal.on_gpu import on_gpu
from study.rehearsal.request import PROGRESS, Answer, Request
from study.rehearsal.scripts import locate
from study.rehearsal.start import ProgressOfSteps, run_request
from study.watch.about import about
from tests.conftest import python
from tests.rehearsal.warm import study

SLOW = pytest.mark.slow


def study_virtual(script, *options, ranks: int = 2) -> subprocess.CompletedProcess:
    return study("virtual", script, f"--ranks={ranks}", *options)


def rehearsed(script, *options, ranks: int = 2) -> dict:
    """Return the answer of a script that reaches its steps."""
    done = study_virtual(script, "--json", *options, ranks=ranks)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["error"] is None, done.stdout + done.stderr
    told = [*answer["findings"], *answer["contradictions"]]
    is_fine = not answer["faults"] and not answer["remarks"] and all(each["may_be"] for each in told)
    assert answer["fine"] == (done.returncode == 0) == is_fine
    return answer


# --- equal to real ranks

PAIRS = [
    ("accelerate_loop", "zero3", ()),
    *[("accelerate_loop", arm, SLOW) for arm in ("ddp", "zero1", "zero2", "zero3_cpu")],
    *[("trainer_glue", arm, SLOW) for arm in ("ddp", "zero2", "zero3")],
    *[("trl_sft", arm, SLOW) for arm in ("ddp", "zero2", "zero3", "zero3_cpu")],
]


@pytest.mark.parametrize(("script", "arm"), [pytest.param(script, arm, marks=marks) for script, arm, marks in PAIRS])
def test_a_rehearsed_rank_holds_what_a_real_one_holds(script, arm, forked_example):
    real = forked_example(script, arm).memory.components.per_rank[0]
    answer = rehearsed(f"examples/{script}.py", f"--config_file=accelerate_configs/{arm}.yaml")
    data = real.at_peak.pop("other", 0)  # the data set, which is the host's
    assert answer["all_bytes"] == pytest.approx(real.tracked_peak_bytes - data, rel=1e-3)
    assert sum(answer["parts"].values()) == pytest.approx(answer["all_bytes"], rel=0.006)
    assert answer["observed"]["backend"] == "fake"
    small = 0.001 * real.tracked_peak_bytes  # a batch more or less
    for role, size in real.at_peak.items():
        assert answer["parts"].get(role, 0) == pytest.approx(size, rel=0.01, abs=small), role


@pytest.fixture
def forked_example(tmp_path):
    """Run an example on two gloo ranks, and return its record."""
    from study.records import store
    from tests.conftest import forked

    def run(script: str, arm: str):
        folder = tmp_path / "real"
        config = f"accelerate_configs/{arm}.yaml"
        ended = forked(folder, config=config, script=f"examples/{script}.py", flags=(f"--run_dir={folder}",))
        assert ended.code == 0, ended.output
        return store.load(folder)

    return run


def test_offloaded_states_are_the_hosts_and_a_gpu_is_asked():
    answer = rehearsed("examples/deepspeed_loop.py", "--gpu=H100", "--", "--stage=2", "--accumulation=2", ranks=4)
    assert (answer["observed"]["stage"], answer["observed"]["accumulation"], answer["fits"]) == (2, 2, "yes")
    assert answer["device"]["host"] == 0
    assert answer["peak_bytes"] <= answer["device"]["reserved"] < answer["device"]["driver"]


def test_words_that_a_model_chose_are_zeros_on_all_ranks(written):
    """A tokenizer that decodes what was in memory before ends with an OverflowError."""
    gathers = "        assert not accelerator.gather(model(x).argmax(-1)).cpu().numpy().any()\n"
    assert rehearsed(written(LOOP.rstrip(" ") + gathers))["peaks"]


def test_nothing_is_imported_that_the_script_does_not_import(written):
    looks = "        assert 'transformers.trainer' not in sys.modules\n"
    assert rehearsed(written("import sys\nimport transformers\n", LOOP.rstrip(" ") + looks))["peaks"]


OFTEN = """
    import copy
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    assert torch.accelerator.current_accelerator().type == "cuda" and torch.accelerator.is_available()
    assert init_device_mesh("cuda", (2,)).size() == 2
    torch.nn.init.trunc_normal_(model[0].weight, std=0.02)
    teacher = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for i, (x, y) in enumerate(loader):
        with torch.no_grad():
            wanted = teacher(x)
        logits = model(x)
        loss = torch.nn.functional.mse_loss(logits, wanted) + torch.nn.functional.cross_entropy(logits, y)
        (loss / 2).backward()
        if torch.isnan(loss) or not torch.isfinite(loss).all():
            raise ValueError("the loss is no number")
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
            accelerator.save_state(f"{__file__}-state")
            accelerator.load_state(f"{__file__}-state")
"""


def test_what_scripts_often_do_goes_on_and_another_model_has_a_part(written):
    """They ask for any accelerator, make a mesh and first values, copy a model, check a loss, accumulate, and load."""
    answer = rehearsed(written(OFTEN))
    assert answer["parts"]["other_models"] == (8 * 8 + 8 + 8 * 2 + 2) * 4
    assert answer["observed"]["accumulation"] == 2


PLAIN = """
    import copy
    import os
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.utils.data import DataLoader, IterableDataset
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.distributed.init_process_group("nccl")

    class Stream(IterableDataset):
        def __iter__(self):
            return ((torch.randn(8), 1) for _ in range(64))

    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 2))
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).to(local_rank)
    average = copy.deepcopy(model)
    device = torch.device(local_rank)
    parallel = torch.nn.parallel.DistributedDataParallel(model, [local_rank])
    parallel.register_comm_hook(None, default_hooks.bf16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    losses = torch.zeros(1, device=local_rank)
    for x, y in DataLoader(Stream(), batch_size=4):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = -torch.distributions.Categorical(logits=parallel(x.to(device))).log_prob(y.to(device)).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for x in DataLoader(torch.randn(64, 8), batch_size=16):
                model(x)
        model.train()
"""


def test_a_loop_of_pytorch_alone_is_seen_as_it_is(tmp_path):
    """A stream without a length, a device by its number, DDP's hook, a distribution that looks at its logits,
    a GradScaler, averaged weights, an evaluation in between."""
    script, folder = tmp_path / "plain.py", tmp_path / "run"
    script.write_text(textwrap.dedent(PLAIN))
    folder.mkdir()
    answer = run_request(Request(str(script), [], 2, 2, 2, gpu="H100"), folder, 300)
    assert answer.failure is None, answer.failure.trace
    assert (answer.batch, answer.batches_read[-1], answer.calls) == ([4, 8], [4, 8], 1)
    record = store.read(folder / store.RECORD)
    assert (record.observed.accumulation, record.observed.autocast) == (1, "fp16")
    held = record.memory.components.per_rank[0].at_peak
    statistics = 2 * 64 * 4 + 8
    assert held["other_models"] == (8 * 64 + 64 + 2 * 64 + 64 * 2 + 2) * 4 + statistics, "the averaged weights"
    assert {each.id for each in about(folder).findings if not each.costs} == set()


LOOKS_AHEAD = """
    graphs = [torch.randn(5 + i % 6, 8) for i in range(40)]
    loader = DataLoader(graphs, batch_size=4, collate_fn=torch.cat)  # whose nodes follow each other
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        for ahead in (True, False):
            accelerator.backward(model(x).square().mean())
            if ahead:
                with torch.no_grad():
                    for each in model.parameters():
                        each.add_(each.grad, alpha=0.05)
            else:
                optimizer.step()
            optimizer.zero_grad()
"""


def test_graphs_in_one_tensor_and_a_step_that_looks_ahead_are_no_mistakes(written):
    """The nodes of a batch are more than the data set's rows. Both passes of a step, as SAM's, read one batch."""
    answer = rehearsed(written(LOOKS_AHEAD), ranks=4)
    assert (answer["fine"], [each["id"] for each in answer["findings"]]) == (True, ["cleared_on_purpose"])


OTHERWISE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator({})
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(256, 8), torch.randint(0, 2, (256,))), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("given", "told"), [("gradient_accumulation_steps=4", ["accumulation_of_launcher"]), ("", [])])
def test_what_the_launcher_says_otherwise_is_no_fine_answer(given, told, tmp_path):
    """Its exit code is that of `study stack`, which tells the same."""
    script, config = tmp_path / "script.py", tmp_path / "acc.yaml"
    script.write_text(OTHERWISE.format(given))
    section = "{zero_stage: 2, gradient_accumulation_steps: 2, gradient_clipping: 1.0}"
    config.write_text(f"distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {section}\n")
    answer = rehearsed(script, f"--config_file={config}")
    assert [each["id"] for each in answer["contradictions"]] == told


WITHOUT_A_LOADER = """
import deepspeed, torch
from transformers import LlamaConfig, LlamaForCausalLM
small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**small, vocab_size=64))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(5):
    words = torch.randint(0, 64, (2, 32)).to(engine.device)
    engine.backward(engine(input_ids=words, labels=words).loss)
    engine.step()
"""


def test_a_script_without_a_loader_that_clips_by_default_is_fine_and_its_seconds_are_predicted(tmp_path):
    """A loop that makes its own batches is fed them all the same, and a default is a remark."""
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_A_LOADER)
    answer = rehearsed(script, "--gpu=H100", ranks=8)
    [remark] = [each for each in answer["findings"] if each["id"] == "clipping_by_default"]
    assert (answer["fine"], remark["may_be"]) == (True, True)
    assert answer["step"]["seconds"] > 0


DIVIDED_TWICE = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    model = parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_weights_are_divided_by_tensor_and_by_data_ranks(written):
    in_quarters = 8 * 64 + 64 + 64 * 8
    assert rehearsed(written(DIVIDED_TWICE), ranks=4)["parts"]["weights"] == (in_quarters / 4 + 8 / 2) * 4


WIDE = """
    model = torch.nn.Sequential(torch.nn.Linear(8, 1024), torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 2))
"""


def test_shapes_that_fsdp2_looks_for_once_take_no_memory(written, tmp_path):
    """The first update finds the shapes of its results with tensors of whole weights, which exist nowhere."""
    config = tmp_path / "fsdp2.yaml"
    config.write_text("{distributed_type: FSDP, fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: NO_WRAP}}")
    first, second, *_ = rehearsed(written(WIDE, LOOP), f"--config_file={config}", ranks=8)["peaks"]
    assert first <= second, "which begins with the moments as well"


@pytest.mark.parametrize("divides", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_fsdp1_answers(divides, written, tmp_path):
    config = tmp_path / "fsdp1.yaml"
    keys = f"fsdp_version: 1, fsdp_auto_wrap_policy: NO_WRAP, fsdp_sharding_strategy: {divides}"
    config.write_text(f"{{distributed_type: FSDP, fsdp_config: {{{keys}, fsdp_use_orig_params: true}}}}")
    done = study_virtual(written(LOOP), f"--config_file={config}")
    words = " ".join(done.stdout.split())
    assert "Your script decided: FSDP1; weights in float32; AdamW" in words, done.stderr
    assert "get no gradient" not in words


def test_a_model_of_ones_own_need_not_say_where_its_embeddings_are():
    from transformers import LlamaConfig, PreTrainedModel

    from study.watch.weights import tie_is_lost

    class Own(PreTrainedModel):
        config_class = LlamaConfig

    assert tie_is_lost(Own(LlamaConfig(tie_word_embeddings=True))) is False


def test_a_copy_of_weights_in_16_bits_is_in_32(written, tmp_path):
    config = tmp_path / "zero3.yaml"
    config.write_text("{distributed_type: DEEPSPEED, mixed_precision: bf16, deepspeed_config: {zero_stage: 3}}")
    script = written(LOOP.replace("x.cuda()", "x.cuda().bfloat16()"))
    dtypes = rehearsed(script, f"--config_file={config}")["observed"]["dtypes"]
    assert (dtypes["weights"], dtypes["master"], dtypes["moments"]) == ("bfloat16", "float32", "float32")


def test_fp16_computes_in_16_bits_and_scales_the_loss_as_on_a_gpu(written, tmp_path):
    """On a CPU Accelerate would do neither."""
    config = tmp_path / "fp16.yaml"
    config.write_text("{distributed_type: MULTI_GPU, mixed_precision: fp16}")
    asks = "assert model(x).dtype == torch.float32 and accelerator.optimizer_step_was_skipped is False"
    inside = "assert torch.nn.functional.linear(x, x).dtype == torch.float16"
    loop = LOOP.replace("optimizer.step()", f"optimizer.step()\n        {asks}", 1)
    loop = loop.replace("loss =", f"with accelerator.autocast(): {inside}\n        loss =")
    answer = rehearsed(written(loop), f"--config_file={config}")
    assert "loss_unscaled" not in [each["id"] for each in answer["findings"]]


def test_what_the_host_keeps_is_in_no_block_of_the_gpu():
    log = [(1, 4000), (2, 2_000_000), (3, 1000), (3, 0), (4, 500)]
    answer = Answer(log=log, host=[2], first_step_at=2)
    device = on_gpu(answer, ranks=8, stage=3)
    assert (device.peak, device.host, device.reserved) == (5000, 2_000_000, 2 * 2**20)
    assert on_gpu(Answer(log=log), 8, 3).peak == 4000 + 2_000_000 + 1000


def test_weights_that_are_cast_before_the_first_step_were_on_the_host_alone():
    """As a model that was loaded in fp32 is with DeepSpeed's bf16: the GPU gets the cast ones."""
    log = [(1, 40_000_000), (2, 40_000_000), (3, 20_000_000), (1, 0), (4, 1000)]
    answer = Answer(log=log, first_step_at=4, loaded=[(0, 2)])
    assert on_gpu(answer, 8, 2).reserved < 85_000_000 < on_gpu(Answer(log=log, first_step_at=4), 8, 2).reserved
    assert on_gpu(answer, 8, 2).peak == 40_000_000 + 20_000_000 + 1000


def test_weights_that_need_no_cast_leave_pieces_on_the_gpu_unless_both_do_not_fit():
    """A flat vector takes their place there. On a smaller GPU DeepSpeed makes it on the host."""
    gib = 2**30
    log = [(1, 20 * gib), (2, 20 * gib), (3, 40 * gib), (1, 0), (2, 0), (4, 1000)]
    answer = Answer(log=log, first_step_at=5, loaded=[(0, 2)])
    large, small = (on_gpu(answer, 8, 2, GPUS[name]) for name in ("B200", "A100-80GB"))
    assert (large.reserved // gib, small.reserved // gib) == (80, 40)
    assert large.peak == small.peak == 40 * gib + 1000


HUB = """
    import torch
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("NAMED", dtype=torch.bfloat16)
    loader = torch.utils.data.DataLoader([{"input_ids": torch.zeros(512, dtype=torch.long)}] * 64, batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch, labels=batch["input_ids"]).loss)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_built_in_config_says_offline_what_trainers_ask_of_one(tmp_path):
    """TRL takes the class of a model from `architectures`, and the tokenizer of its name."""
    path = tmp_path / "script.py"
    path.write_text(
        "from transformers import AutoConfig\n"
        "config = AutoConfig.from_pretrained('Qwen/Qwen2.5-7B')\n"
        "raise ValueError(config.architectures, config.name_or_path)\n"
    )
    ended = study_virtual(path, "--gpu=A100", ranks=2)
    assert "(['Qwen2ForCausalLM'], 'Qwen/Qwen2.5-7B')" in " ".join(ended.stdout.split())
    assert "A100 taken as A100-80GB (A100-40GB is another)" in ended.stderr


@pytest.mark.parametrize(
    ("named", "model", "most_apart"),
    [
        ("meta-llama/Llama-3.2-1B-Instruct", "llama3.2-1b", 0.2),  # a large part is made only briefly
        pytest.param("meta-llama/Meta-Llama-3-8B", "llama3-8b", 0.08, marks=SLOW),
    ],
)
def test_a_model_of_the_hub_is_the_built_in_one_offline_and_holds_what_estimate_says(
    named, model, most_apart, tmp_path
):
    """The two replay one allocator: of a log, and of a prediction. For 57.0 GB on an H200 they gave 54.7 and 52.5."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(HUB.replace("NAMED", named)))
    ended = study_virtual(path, "--config-file=accelerate_configs/zero2.yaml", "--gpu=A100", ranks=8)
    words = " ".join(ended.stdout.split())
    what = f"The config of {named} could not be read here: it is that of the built-in {model},"
    assert what in words, words + ended.stderr
    options = "--arm=zero2", "--ranks=8", "--gpu=A100", "--sequence=512", "--micro-batch=2", "--json"
    predicted = json.loads(study("estimate", f"--model={model}", *options).stdout)["kinds"]
    peak_gb, shown_gib = map(float, re.search(r"peaks at ([\d.]+) GB .*? would show ([\d.]+)", words).groups())
    assert peak_gb == pytest.approx(predicted["allocated"] / 1e9, rel=0.01)
    assert shown_gib == pytest.approx(predicted["driver"] / 2**30, rel=most_apart)


UPDATES = """
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from transformers import AutoConfig, AutoModelForCausalLM

as_the_arm = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[as_the_arm])
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("FOLDER"))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for _ in range(4):
    rows = torch.zeros(1, 16, dtype=torch.long, device=accelerator.device)
    accelerator.backward(model(input_ids=rows, labels=rows).loss)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("arm", "ranks"), [("ddp", 2), ("fsdp2", 2), ("fsdp2", 4)])
def test_an_update_of_pytorchs_adamw_holds_what_estimate_says(arm, ranks, tmp_path):
    """On a GPU it is foreach by default, which makes a root of every second moment at once."""
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 4096}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    script = tmp_path / "script.py"
    script.write_text(UPDATES.replace("FOLDER", str(tmp_path)))
    parts = rehearsed(script, f"--config-file=accelerate_configs/{arm}.yaml", "--gpu=A100", ranks=ranks)["parts"]
    flags = f"--model={tmp_path} --arm={arm} --ranks={ranks} --precision=bf16 --sequence=16 --optimizer=foreach --json"
    predicted = json.loads(study("estimate", *flags.split()).stdout)["estimate"]
    assert predicted["peak_when"] == "update"
    assert sum(parts.values()) == pytest.approx(predicted["peak_bytes"], rel=1e-4)
    roots = predicted["at_peak"]["moments"] // 2
    assert parts["temporaries"] == pytest.approx(roots, rel=1e-4)


OF_DDP = """
import torch
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("gloo")
layers = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
model = DistributedDataParallel(layers, gradient_as_bucket_view=VIEW)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    model(torch.randn(8, 256)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("is_view", [False, True])
def test_ddps_buckets_are_a_part_of_their_own_unless_gradients_lie_in_them(is_view, written):
    parts = rehearsed(written(OF_DDP.replace("VIEW", str(is_view))), ranks=4)["parts"]
    whole = 4 * 8 * (256 * 256 + 256)
    assert (parts["gradients"], parts.get("buckets")) == (whole, None if is_view else whole)


# --- with real values


def test_with_real_values_a_rank_holds_the_same(written, tmp_path):
    answers = {}
    for real in (True, False):
        lines = LOOP.replace(".cuda()", "").replace('.to("cuda")', "")
        if real:
            lines = lines.replace("accelerator.backward(loss)", "assert loss > 0.1; accelerator.backward(loss)")
        folder = tmp_path / str(real)
        folder.mkdir()
        answers[real] = run_request(Request(str(written(lines)), [], 2, 2, 2, real=real), folder, 300)
        assert answers[real].failure is None
    data = 64 * 8 * 4 + 64 * 8  # which a CPU has in the same memory
    assert max(answers[True].peaks) == max(answers[False].peaks) + data


@pytest.mark.skipif(num_gpus() > 0, reason="there is a GPU")
def test_real_values_need_a_gpu():
    ended = study_virtual("examples/trainer_glue.py", "--real")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "--real needs a GPU, and there is none here" in ended.stderr


def test_where_a_long_rehearsal_is_can_be_read(written, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    progress = ProgressOfSteps(folder)
    progress.say()
    run_request(Request(str(written(LOOP)), [], 2, 2, 2), folder, 300)
    progress.say()
    first, *_, last = capsys.readouterr().err.splitlines()  # between them every ten seconds another, on a busy machine
    assert first.startswith("importing and building (")
    assert re.match(r"step 3 of 3, batch \d+, [\d,]+ tensors made or freed \(", last)


def test_a_long_micro_batch_shows_that_it_goes_on(written, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    waits = f"""
    import time
    from pathlib import Path
    progress = Path({str(folder / PROGRESS)!r})
    x, _ = next(iter(loader))
    before = progress.read_text()
    time.sleep(1.1)
    model(x.cuda())
    raise SystemExit(f"{{before}} | {{progress.read_text()}}")
    """
    answer = run_request(Request(str(written(LOOP.partition("for ")[0], waits)), [], 2, 2, 2), folder, 300)
    made = [int(each) for each in re.findall(r"batch \d+, (\d+) tensors made or freed", answer.failure.message)]
    assert len(made) == 2, answer.failure.message
    assert made[0] < made[1]


def test_without_a_loader_the_step_and_the_layer_can_be_read(written, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    waits = f"""
    import time
    from pathlib import Path
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        def forward(self, x):
            x = self.layers[1](self.layers[0](x))
            time.sleep(1.1)
            x + 1
            raise SystemExit(Path({str(folder / PROGRESS)!r}).read_text())
    Net()(torch.randn(2, 8).cuda())
    """
    answer = run_request(Request(str(written(waits)), [], 2, 2, 2), folder, 300)
    assert "step 1 of 3, layers.1 (2 of 3)," in answer.failure.message


# --- how scripts fail

HEAD = """
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset
    accelerator = Accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    rows = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
    loader = DataLoader(rows, batch_size=4, drop_last=True)
"""
LOOP = """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.to("cuda"))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""
DECIDES = LOOP.replace("accelerator.backward(loss)", "accelerator.backward(loss)\n        if loss > 5: break")


OF_HUB = {
    "config": "from transformers import AutoConfig as A\nNAME = 'no/thing'\nx = A.from_pretrained(NAME)\n",
    "tokenizer": "from transformers import AutoTokenizer\nNAME = 'no/thing'\nx = AutoTokenizer.from_pretrained(NAME)\n",
    "weights": "from huggingface_hub import snapshot_download\nNAME = 'no/thing'\nx = snapshot_download(NAME)\n",
    "data set": "from datasets import load_dataset\nNAME = 'no/thing'\nx = load_dataset(NAME, split='train')\n",
}


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("kind", OF_HUB)
def test_what_the_hub_does_not_give_is_told_in_one_way_and_first(kind, is_early, tmp_path, monkeypatch):
    """But weights: a rehearsal needs none, and what a script itself downloads is seen when it runs."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lines = OF_HUB[kind]
    if not is_early:
        lines = f"def main():\n{textwrap.indent(lines, '    ')}\nmain()\n"
    elif kind != "weights":
        lines = lines.replace("\nx", "\nraise SystemExit('this took an hour')\nx")
    (tmp_path / "script.py").write_text(lines)
    ended = study_virtual(tmp_path / "script.py")
    words = " ".join(ended.stdout.split())
    assert ended.returncode == 1
    what = f"the {kind}{'' if kind == 'data set' else ' of'} no/thing cannot be had"
    shape = rf"A rehearsal cannot go on at script\.py:\d: {what} \([^()]+\)\. What to do: .*no/thing"
    assert re.match(shape, words), words
    assert "--skip" not in words


@pytest.fixture
def written(tmp_path):
    """Write a script of the head and more lines."""

    def write(*parts: str):
        path = tmp_path / "script.py"
        path.write_text("".join(textwrap.dedent(part) for part in (HEAD, *parts)))
        return path

    return write


FAULTS = {
    "nothing trains": ("model.requires_grad_(False)\n" + textwrap.dedent(LOOP), "does not require grad|require a grad"),
    "fewer rows than a step": ("loader = DataLoader(rows, batch_size=4096, drop_last=True)\n" + textwrap.dedent(LOOP),
                               "without an update"),
    "words that it does not know": ("import argparse\nargparse.ArgumentParser().parse_args(['--lr'])",
                                    r"SystemExit: 2 \(.*error: unrecognized arguments: --lr\)"),
    "a mistake of its own": (LOOP.replace("model(x.cuda())", "model(x.cuda(), 1)"), "takes 2 positional arguments"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_script_ends_as_it_would_on_the_machine(fault, written):
    lines, message = FAULTS[fault]
    ended = study_virtual(written(lines))
    assert ended.returncode == 1, ended.stderr
    words = " ".join(ended.stdout.split())
    assert words.startswith("It ends"), words
    assert re.search(message, words), words
    assert "Traceback" not in ended.stdout + ended.stderr


TINY = """
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = LlamaConfig(vocab_size=64, **sizes)
"""
REFUSED = {
    "import nosuch.part": "the script needs nosuch, which is not installed here",
    "raise ImportError('You need to install `bitsandbytes`')": 'take AdamW (optim="adamw_torch")',
    "AutoModelForCausalLM.from_pretrained('x', quantization_config={'load_in_4bit': True})": "no quantized weights",
    "import transformers; transformers.AutoTokenizer.from_pretrained('x')": "put the model's tokenizer there",
    "import transformers; transformers.AutoProcessor.from_pretrained('x')": "put the model's tokenizer there",
    "AutoModelForCausalLM.from_pretrained('no/model')": "give --config-of no/model=FOLDER",
    "raise RuntimeError('it requires nosuch to be installed. Run `pip install nosuch`')": "Run `pip install nosuch`",
    "torch.where(model(torch.randn(1, 8)) > 0)": "--value NAME=COUNT says how many",
    "LlamaForCausalLM(config).generate(rows, return_dict_in_generate=True)": "leave out return_dict_in_generate",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_rehearsed_is_refused_with_its_line(line, written, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ended = study_virtual(written(TINY, line), f"--config-of=x={tmp_path}")
    words = " ".join(ended.stdout.split())
    assert ended.returncode == 1
    assert words.startswith("A rehearsal cannot go on at script.py:13: "), words
    assert REFUSED[line] in words
    assert line[:40] in words


LEARNS_FROM_ANSWERS = """
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(torch.ones(64, 5, dtype=torch.int64), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        answers = model.module.generate(x, max_new_tokens=11, do_sample=True, num_return_sequences=4)
        accelerator.backward(model(answers, labels=answers).loss)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_what_generates_is_given_the_longest_answers(written):
    done = study_virtual(written(TINY, LEARNS_FROM_ANSWERS), "--gpu=H100")
    words = " ".join(done.stdout.split())
    assert "The largest micro-batch that it saw is 8 x 16" in words, words + done.stderr
    assert "`generate` was not run: each answer has the most tokens, and its cache is not counted." in words


ONE_RANK_GENERATES = """
        if accelerator.is_main_process:
            model.module.generate(x)
"""


def test_one_rank_alone_that_generates_from_divided_weights_hangs(written, tmp_path):
    config = tmp_path / "zero3.yaml"
    engine = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    (tmp_path / "zero3.json").write_text(json.dumps(engine | {"train_micro_batch_size_per_gpu": 2}))
    config.write_text(
        f"{{distributed_type: DEEPSPEED, deepspeed_config: {{deepspeed_config_file: {tmp_path}/zero3.json}}}}"
    )
    script = written(TINY, LEARNS_FROM_ANSWERS.rstrip(" "), textwrap.indent(ONE_RANK_GENERATES, "    "))
    words = " ".join(study_virtual(script, f"--config_file={config}", "--evaluate").stdout.split())
    assert re.search(r"It hangs at script\.py:\d+, as it would on 2 GPUs: rank 0 calls generate there", words), words


GAN = """
    other = torch.nn.Linear(4, 8)
    first = torch.optim.Adam(model.parameters())
    second = torch.optim.Adam(other.parameters())
    model, other, first, second, loader = accelerator.prepare(model, other, first, second, loader)
    for x, _ in loader:
        made = other(torch.randn(len(x), 4))
        first.zero_grad()
        accelerator.backward(model(x).sum() + model(made.detach()).sum())
        first.step()
        second.zero_grad()
        accelerator.backward(model(made).sum())
        second.step()
"""
TWO_KINDS = """
    optimizers = [torch.optim.Adam([each]) for each in model.parameters()]
    model, loader, *optimizers = accelerator.prepare(model, loader, *optimizers)
    for x, y in loader:
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        for each in optimizers:
            each.step()
            each.zero_grad()
"""


@pytest.mark.parametrize(("loop", "parameters"), [(GAN, 8 * 8 + 8 + 8 * 2 + 2 + 4 * 8 + 8), (TWO_KINDS, 90)])
def test_several_optimizers_end_one_update_and_all_have_moments(loop, parameters, written):
    answer = rehearsed(written(loop))
    assert len(answer["peaks"]) == 3
    assert (answer["after_step"]["moments"], answer["after_step"]["weights"]) == (2 * 4 * parameters, 4 * parameters)
    assert not answer["findings"]
    assert answer["observed"].get("accumulation") in (None, 1)


LOGS = """
    import wandb
    from torch.utils.tensorboard import SummaryWriter
    assert Accelerator(log_with="wandb").log_with == []
    wandb.init(project="mine").config.update({"lr": 1e-3})
    with SummaryWriter() as writer:
        writer.add_scalar("loss", 1.0)
"""


@pytest.mark.skipif(bool(find_spec("wandb") or find_spec("tensorboard")), reason="they are installed here")
def test_packages_that_keep_logs_are_left_out_if_they_are_not_installed(written):
    loop = LOOP.replace("optimizer.step()", "optimizer.step(); wandb.log({'loss': loss.item()})")
    done = study_virtual(written(LOGS, loop))
    words = " ".join(done.stdout.split())
    assert "peaks at" in words, words + done.stderr
    assert "Not installed here, and left out: wandb, tensorboard." in words
    read = study_virtual(written(LOGS, "torch.optim.AdamW(model.parameters(), lr=wandb.config.lr)"))
    assert "it reads a value of wandb or tensorboard, not installed here" in " ".join(read.stdout.split())


def test_a_trainer_reports_nowhere(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(TRAINS_WITH_LOGS))
    assert rehearsed(path)["peaks"]


TRAINS_WITH_LOGS = """
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=64)
    rows = [{"input_ids": torch.zeros(8, dtype=torch.long), "labels": 0}] * 64
    words = TrainingArguments("out", report_to=["wandb", "mlflow"], per_device_train_batch_size=2, max_steps=9)
    Trainer(BertForSequenceClassification(config), words, train_dataset=rows).train()
"""


HAS_A_TABLE = """
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.distances = torch.nn.Embedding(64, 2), torch.nn.Embedding(64, 1)
        def forward(self, x):
            places = torch.arange(x.shape[1])
            return self.words(x) + self.distances((places[:, None] - places).abs()).sum(0)
    model = Net()
    loader = DataLoader(TensorDataset(torch.zeros(64, 32, dtype=torch.long), torch.zeros(64, 2)), batch_size=4)
"""


def test_a_batch_is_what_the_model_is_given_and_not_what_it_makes(written):
    """T5 looks up a table of distances, which is larger than a small batch."""
    loop = LOOP.replace(
        'cross_entropy(model(x.cuda()), y.to("cuda"))', "mse_loss(model(x), y[:, None].expand(-1, 32, 2))"
    )
    done = study_virtual(written(HAS_A_TABLE, loop), "--gpu=H100")
    assert "The largest micro-batch that it saw is 4 x 32:" in " ".join(done.stdout.split()), done.stdout + done.stderr


ROUTES = """
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router = torch.nn.Linear(8, 2)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        def forward(self, x):
            chosen = self.router(x).argmax(-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                (rows,) = torch.where(chosen == number)
                mask = chosen == number
                out = out.index_add(0, rows, (expert(x) * self.router(x)[:, :1])[mask])
            return out[:, :2]
    model = Net()
"""


def test_how_many_rows_a_router_chooses_can_be_given(written):
    assert rehearsed(written(ROUTES, LOOP), "--value", "chosen=2", "mask=2")["peaks"]


def test_deepspeed_trains_in_fp16_as_on_a_gpu_and_loads_what_it_saved(written, tmp_path):
    """It refuses fp16 on most CPUs. The parts that other ranks would save are not there."""
    config = tmp_path / "zero2.yaml"
    config.write_text("{distributed_type: DEEPSPEED, mixed_precision: fp16, deepspeed_config: {zero_stage: 2}}")
    saves = f"        model.save_checkpoint('{tmp_path}/out', client_state={{'step': 1}})\n"
    loads = f"        assert model.load_checkpoint('{tmp_path}/out')[1] == {{'step': 1}}\n"
    loop = LOOP.replace("x.cuda()", "x.cuda().half()").rstrip(" ") + saves + loads
    answer = rehearsed(written(loop), f"--config_file={config}")
    assert answer["observed"]["dtypes"]["weights"] == "float16"


def test_a_script_of_one_update_is_told_what_its_peak_lacks(written):
    done = study_virtual(written("loader = DataLoader(rows, batch_size=32)\n", LOOP))
    words = " ".join(done.stdout.split())
    what = (
        "The script ended after 1 update, before which its optimizer had no moments: a second one holds 720 bytes more."
    )
    assert what in words, words + done.stderr


def test_a_name_that_a_package_lacks_fails_on_n_gpus_as_well(written):
    ended = study_virtual(written(TINY, "from transformers import NoSuchName"))
    words = " ".join(ended.stdout.split())
    assert words.startswith("It ends at script.py:13, as it would on ")
    assert "ImportError: cannot import name 'NoSuchName'" in words


FLASH = """
    from transformers import AutoModelForCausalLM, LlamaConfig
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 64}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ATTENTION", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = DataLoader(torch.randint(0, 64, (64, 128)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, rows)
    for x in loader:
        accelerator.backward(model(x, labels=x).loss)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_flash_attention_that_is_not_installed_keeps_what_pytorchs_kernel_keeps(written):
    peaks = {}
    for attention in ("sdpa", "flash_attention_2"):
        answer = rehearsed(written(FLASH.replace("ATTENTION", attention)), "--gpu=H100")
        assert answer["observed"]["attention"] == attention
        peaks[attention] = answer["peak_bytes"]
    assert peaks["flash_attention_2"] == pytest.approx(peaks["sdpa"], rel=0.01)


def test_releases_their_defaults_and_what_a_count_lacks_are_said():
    """TRL before 1.7 makes whole logits by default: the same script may fit with one release alone."""
    done = study_virtual("examples/trl_sft.py", "--gpu=H100", "--tokens=256")
    words = " ".join(done.stdout.split())
    assert "it fits, with " in words, done.stderr
    assert "kept for context, NCCL and fragmentation." in words
    assert f"trl {version('trl')}, " in words
    assert "TRL computed the loss in chunks, and made no whole logits" in words
    assert re.search("[0-9.]+ [kMG]B for each copy in fp32", words)
    assert "were lengthened from" in words


def test_a_module_or_a_program_is_a_script(tmp_path):
    package = tmp_path / "own"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sizes.py").write_text("CLASSES = 2\n")
    head, loop = (textwrap.dedent(part).replace("Linear(8, 2)", "Linear(8, CLASSES)") for part in (HEAD, LOOP))
    (package / "train.py").write_text("from .sizes import CLASSES\n" + head + loop)
    done = study("virtual", "torchrun", "--nproc-per-node=2", "-m", "own.train", folder=tmp_path)
    assert done.stdout.startswith("Rank 0 of 2, run alone"), done.stdout + done.stderr
    with pytest.raises(Stop, match="is no program in Python"):
        locate("bash")
    with pytest.raises(Stop, match="give the launch command in it"):
        locate("run.sh")
    with pytest.raises(Stop, match="there is no script nosuch"):
        locate("nosuch")


def test_a_value_that_does_not_exist_is_told_apart_and_can_be_given(written):
    script = written(DECIDES)
    ended = study_virtual(script)
    assert ended.returncode == 1
    assert "cannot go on" in ended.stdout
    assert "if loss > 5: break" in ended.stdout
    assert rehearsed(script, "--value=loss=2.3")["peaks"]


def test_a_function_can_be_left_out(written):
    script = written("def report():\n    raise SystemExit(3)\nreport()\n", LOOP)
    assert study_virtual(script).returncode == 1
    answer = rehearsed(script, "--skip=report")
    assert answer["observed"]["ranks"] == 2
    assert answer["observed"]["wrapper"] == "DistributedDataParallel"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("nowhere.py",), "there is no script"),
        (("examples/trainer_glue.py", "--ranks=0"), "--ranks must be from 1 to"),
        (("examples/trainer_glue.py", "--config_file=nowhere.yaml"), "there is no --config_file"),
        (("examples/trainer_glue.py", "--value=loss"), "takes NAME=VALUE"),
        (("examples/trainer_glue.py", "--gpu=Z9"), "is not a known GPU"),
    ],
)
def test_a_mistake_is_one_sentence(words, expected):
    ended = python("-m", "study.cli", "virtual", *words)
    assert ended.returncode == 2
    assert expected in ended.stderr
    assert ended.stderr.count("\n") <= 2
