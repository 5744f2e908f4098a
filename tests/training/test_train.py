"""The arms, trained for real: does each do what its file says, and do the meters agree with each other?"""

import warnings

import pytest
import torch

from study.core.arms import NAMES, all_paths, read
from study.core.settings import TrainerFlags
from study.measure import readback
from study.records import metrics
from study.records.schema import Record
from study.report.of_record import predicted
from tests.conftest import DECODERS_ALONE, RANKS, SEQUENCE, STEPS, TRAINED, left_running, table
from tests.wire import wire_bytes_per_rank

TRUTH = table("training/truth.toml")  # by hand, and not read from the arms' files
ALONE = ("--no-instruments", "--eval-rows", "8")
ARMS = [name for name in NAMES if name not in DECODERS_ALONE]
ZERO = [name for name in ARMS if name.startswith("zero")]
FSDP = [name for name in NAMES if name.startswith("fsdp2")]


@pytest.fixture
def of(trained):
    """A function that gives the record of an arm that is trained as in all these tests, or with other flags."""
    return lambda arm, *flags: trained(arm, *(flags or TRAINED)).record


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_is_what_its_name_says_and_steps_like_ddp(arm, trained, of):
    """The same weights, rows, learning rates, optimizer settings and threads as DDP, read back from the run."""
    run, record, ddp = trained(arm, *TRAINED), of(arm), of("ddp").observed
    seen, ranks = record.observed, RANKS.get(arm, 2)
    assert "Traceback" not in run.output
    assert record.status == "done"
    homes = [seen.offload_optimizer, seen.offload_param]
    assert " ".join(map(str, [seen.distributed_type, seen.stage, *homes, seen.optimizer])) == TRUTH["is"][arm]
    assert (seen.ranks, seen.ranks_counted, seen.tokens_per_step) == (ranks, ranks, 8 * SEQUENCE * ranks)
    assert (seen.clipping, seen.accumulation) == (0.0, 1)
    assert set(seen.dtypes.values()) <= {"float32", None}
    assert left_running(run.folder) == []
    assert not list(run.folder.parent.glob("nvme/*")), "the disk folder is left empty"

    for name in ("weights_checksum", "data_checksum", "learning_rates", "parameters", "threads"):
        assert getattr(seen, name) == getattr(ddp, name), name
    assert len(seen.learning_rates) == STEPS
    for name in ("betas", "eps", "weight_decay"):
        assert seen.optimizer_settings[name] == ddp.optimizer_settings[name], name
    if arm in ZERO:
        assert seen.bucket_elements * 4 == ddp.bucket_bytes == 25 * 2**20
        assert seen.overlap is ddp.overlap is True
        # On by itself, and it waits for the device before and after each pass.
        assert seen.deepspeed["timers"] == {"throughput": {"enabled": False}}

    lines = [line for line in run.steps if "loss" in line]
    assert [line["loss"] for line in lines] == pytest.approx(record.loss.train, rel=1e-6)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert record.loss.eval[-1].accuracy == run.steps[-1]["accuracy"]
    warnings = [line for line in (run.folder / "log.txt").read_text().splitlines() if "warn" in line.lower()]
    assert len(warnings) < STEPS, "what libraries warn of at every step is not logged"


def components(record: Record, when: str = "after_step") -> dict:
    """Bytes by role on the first rank, by parameter of the model."""
    held = getattr(record.memory.components.per_rank[0], when)
    return {role: size / record.observed.parameters for role, size in held.items()}


@pytest.mark.parametrize("arm", TRUTH["holds"])
def test_an_arm_holds_and_moves_what_its_stage_says(arm, of):
    """The premise of every comparison between arms. The kernel counts what each process wrote to its sockets."""
    ranks, share, moments, master, sent = TRUTH["holds"][arm]
    record = of(arm)
    size = record.observed.parameters
    assert record.observed.held_parameters_per_rank == pytest.approx([share * size] * ranks, rel=0.01)
    assert components(record)["moments"] == pytest.approx(moments, rel=0.01)
    assert components(record).get("master", 0) == pytest.approx(master, rel=0.01)
    moved = {kind: count.bytes / 4 / size for kind, count in record.traffic.per_rank[0].items()}
    assert moved == pytest.approx(sent, rel=1e-3, abs=1e-3)
    for counted, kernel in zip(wire_bytes_per_rank(record), record.traffic.kernel_bytes_written, strict=True):
        assert counted > 10e6
        assert kernel == pytest.approx(counted, rel=0.01)


def test_moments_on_the_disk_are_not_in_memory_between_steps(of):
    record = of("zero3_nvme")
    assert "moments" not in components(record)
    assert min(rank.nvme_written_bytes for rank in record.memory.per_rank) > 2**20
    assert min(rank.nvme_read_bytes for rank in record.memory.per_rank) > 0


def test_groups_of_ranks_are_groups(of):
    """On four ranks, two groups share everything, and reduce a part of the gradients between them: as predicted."""
    record = of("hsdp")
    assert record.observed.fsdp["mesh"] == [[2, 2]]
    groups = [("0 1", "0 2"), ("0 1", "1 3"), ("2 3", "0 2"), ("2 3", "1 3")]  # of each rank: within, and across
    for counts, (within, across) in zip(record.traffic.per_rank, groups, strict=True):
        of_ranks = {kind: list(count.bytes_by_group) for kind, count in counts.items()}
        assert of_ranks == {"all_gather": [within], "reduce_scatter": [within], "all_reduce": [across]}
    counted = {kind: count.by_ranks(4) for kind, count in record.traffic.per_rank[0].items()}
    assert {kind: sum(sizes.values()) for kind, sizes in counted.items()} == predicted(record).traffic
    between = {kind: metrics.between_nodes(sizes, 2) for kind, sizes in counted.items()}
    assert between.pop("all_reduce") == pytest.approx(2 * record.observed.parameters, rel=0.01)
    assert not any(between.values())
    peak_bytes = record.memory.components.per_rank[0].tracked_peak_bytes
    assert predicted(record).peak_bytes == pytest.approx(peak_bytes, rel=0.03)


def test_ranks_share_a_second_copy_of_the_weights_and_move_nothing_that_is_kept(of):
    """hpZ by DeepSpeed's defaults: of a small model nothing is gathered again, so the copy is made for nothing."""
    record, plain = of("zero3_hpz"), of("zero3")
    seen = record.observed
    assert (seen.second_partition_ranks, seen.ranks) == (2, 2)
    assert plain.observed.second_partition_ranks is None
    assert record.traffic.per_rank == plain.traffic.per_rank


@pytest.mark.parametrize("init", ["random", "in_place"])
def test_no_rank_builds_the_whole_of_a_model_under_stage_3(init, of):
    """Every parameter is cut in parts as it is made or loaded."""
    flags = TRAINED if init == "random" else (*ALONE, "--init", "in_place", "--steps", "6", "--sequence", "32")
    assert of("zero3", *flags).observed.built_in_parts
    assert not of("zero2").observed.built_in_parts


@pytest.mark.parametrize("arm", ARMS)
def test_components_add_up_to_the_peak(arm, of):
    memory = of(arm).memory
    rows_bytes = (800 + 200) * (SEQUENCE * 2 + 1) * 8  # the data set, as int64, held by every rank
    for held, rank in zip(memory.components.per_rank, memory.per_rank, strict=True):
        assert sum(held.at_peak.values()) == held.tracked_peak_bytes
        assert held.tracked_peak_step_before_bytes == held.tracked_peak_bytes, "two steps are alike"
        assert held.at_peak["other"] < rows_bytes + 0.5e6, "a large tensor has no role in roles.ROLES"
        assert sum(held.after_step.values()) < held.tracked_peak_bytes < rank.host_peak_bytes
        assert rank.peak_allocated_bytes is None, "a machine without a GPU has no device peak"


def test_times_and_operations_of_a_step(of):
    time = of("ddp").time
    assert len(time.step_s) == STEPS - 5
    # Wall time of the windows, in which ranks wait for each other: at most the sum of each step's slowest rank.
    assert max(time.step_s) < time.window_s <= sum(time.step_s) * (1 + 1e-9)
    # 6 operations per parameter and token, in the two layers' matrices, and a little for attention and the pooler.
    matrices = 2 * (4 * 128**2 + 2 * 128 * 512)
    assert 1.0 < time.flops_per_rank_and_step / (6 * matrices * 8 * SEQUENCE) < 1.3


def test_both_tasks_are_learned_within_a_hundred_steps(of):
    reviews = of("single", *ALONE, "--sequence", "48").loss.train
    assert len(reviews) == 100
    assert 0.6 < sum(reviews[:10]) / 10 < 0.8, "a coin would get 0.69"
    assert sum(reviews[-10:]) / 10 < 0.45, "one label in twenty is wrong, so the floor is near 0.2"
    text = of("single", *ALONE, "--task", "wikitext", "--steps", "100", "--sequence", "32").loss.train
    assert 7.0 < text[0] < 8.2, "guessing gets ln 2048 = 7.6"
    assert sum(text[-10:]) / 10 < text[0] - 1.5


def test_two_ranks_learn_what_one_would_from_twice_the_rows(of):
    """The same rows in the same order whatever the ranks: without dropout the losses are those of one larger batch."""
    flags = (*ALONE, "--steps", "8", "--dropout", "0", "--sequence", "32", "--micro-batch")
    assert of("single", *flags, "16").loss.train == pytest.approx(of("ddp", *flags, "8").loss.train, abs=1e-5)


DDP = {"wrapper": "DistributedDataParallel", "distributed_type": "MULTI_CPU", "fsdp": None}


@pytest.mark.parametrize(
    ("arm", "settings", "changed", "words"),
    [
        ("ddp", {}, {"wrapper": "BertModel", "bucket_bytes": None}, "DDP: promised True, observed False"),
        ("fsdp2", {}, DDP, "distributed_type: promised FSDP, observed MULTI_CPU"),
        ("fsdp2", {}, DDP, "FSDP2: promised True, observed False"),
        ("fsdp2", {}, {"units_resharded_after_forward": 0}, "reshards after forward: promised True, observed False"),
        ("fsdp2", {}, {"reduce_dtype": "bfloat16"}, "reduce_dtype: promised None, observed bfloat16"),
        ("ddp", {"optimizer": "sgd"}, {}, "optimizer: promised MasterSGD or SGD, observed AdamW"),
        ("ddp", {"lora_rank": 2}, {}, "frozen weights: promised True, observed False"),
    ],
)
def test_what_is_not_what_the_arm_and_the_settings_promise_is_a_mismatch(arm, settings, changed, words, of):
    """Accelerate leaves a model as it is on one GPU, trains DDP for FSDP on a CPU, or a model on each rank."""
    seen, promises = of(arm).observed, read(all_paths()[arm])
    assert readback.mismatches(promises, TrainerFlags(steps=60), seen, 2) == []
    if seen.fsdp and changed.keys() <= seen.fsdp.keys():
        changed = {"fsdp": seen.fsdp | changed}
    assert words in readback.mismatches(
        promises, TrainerFlags(steps=60, **settings), seen.model_copy(update=changed), 2
    )


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_record_has_what_the_environment_sets_of_the_allocator(name, monkeypatch):
    """It decides what is reserved, and no flag of ours says it."""
    monkeypatch.setenv(name, "expandable_segments:True")
    model = torch.nn.Linear(1, 1)
    seen = readback.distribution(None, model, torch.optim.AdamW(model.parameters()))
    assert seen.allocator == "expandable_segments:True"


def test_what_is_read_back_asks_transformers_for_nothing_that_it_deprecates():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1))
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings(action="error", category=FutureWarning):
        assert readback.distribution(None, model, optimizer).checkpointing is True
