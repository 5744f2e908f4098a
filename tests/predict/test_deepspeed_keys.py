"""A key of somebody's DeepSpeed config on which memory depends is counted, or said not to be."""

import pytest

from study.configs.settings import descriptions
from study.core import arms
from study.core.arms import load_arm
from study.core.files import value_at
from study.core.ignored_keys import OFFLOADS
from study.core.library_defaults import library_defaults
from study.predict import deepspeed_keys as keys
from study.predict.architecture import named
from study.predict.placement import Placement
from study.predict.prediction import estimate
from tests.cases import for_each
from tests.predict.trainings import placed, training_of

# By their value the arm is chosen, or they have options of their own.
OF_ARM = (
    "offload_optimizer.device",
    "offload_param.device",
    "stage",
    "train_micro_batch_size_per_gpu",
)
OTHER = {
    keys.GRADIENTS_KEPT_IN: "fp32",
    "zero_optimization.overlap_comm": True,
    "zero_optimization.sub_group_size": 1000,
    "zero_optimization.reduce_bucket_size": 1e9,
    "zero_optimization.stage3_prefetch_bucket_size": 1e9,
    "zero_optimization.stage3_param_persistence_threshold": 0,
    "zero_optimization.stage3_max_live_parameters": 0,
    "zero_optimization.stage3_max_reuse_distance": 0,
    "zero_optimization.use_multi_rank_bucket_allreduce": False,
}
# They peak at different moments.
TRAININGS = (
    ("gpt-j-6b", "zero1", 2, 2048), ("gpt-j-6b", "zero3", 2, 8), ("gpt2-xl", "zero3", 8, 8),
    ("gpt2-xl", "zero3_cpu", 8, 8),
)  # fmt: skip
OF_ZERO = [name for name in arms.NAMES if load_arm(name).deepspeed and load_arm(name).tensor_ranks == 1]
DEFAULTS = keys.counted({"bf16": {}}, 0)


def section(path: str, value) -> dict:
    content = value
    for name in reversed(path.split(".")):
        content = {name: content}
    return content


def changed(path: str):
    """A value that is not DeepSpeed's default."""
    return OTHER.get(path, not defaults(path))


def defaults(path: str):
    of_section, _, key = path.rpartition(".")
    return library_defaults("deepspeed").get(of_section, {}).get(key)


@pytest.mark.parametrize("path", keys.COUNTED)
def test_a_counted_key_changes_a_prediction(path):
    differ = []
    for model, name, ranks, tokens in TRAININGS:
        arm = keys.with_keys(load_arm(name), DEFAULTS)
        usual = training_of(named(model), precision="bf16_cast", ranks=ranks, accumulation=2, sequence=tokens)
        both = (arm, keys.with_keys(arm, keys.counted(section(path, changed(path)), 0)))
        told = [estimate(placed(usual, **vars(Placement.of(each, ranks, "cuda")))) for each in both]
        differ.append(told[0] != told[1])
    assert any(differ)


@for_each("value", ["x", [1], -1, float("inf"), float("nan"), "perhaps", {"a": 1}, "1e400"])
@for_each("path", keys.COUNTED)
def test_what_deepspeed_does_not_take_is_not_counted(path, value):
    config = section(path, value)
    assert (keys.counted(config, 0), keys.in_words(config, 3, is_arm=False)) == (DEFAULTS, [])


@for_each("path", keys.NOT_COUNTED + keys.OF_AN_ARM)
def test_any_other_key_is_said_not_to_be_counted(path):
    of_section, _, key = path.rpartition(".")
    known = library_defaults("deepspeed").get(of_section, {})
    assert key in known
    assert path in str(keys.in_words(section(path, changed(path)), 3, is_arm=False))
    assert keys.in_words(section(path, known[key]), 3, is_arm=False) == keys.in_words({}, 3, is_arm=False) == []
    assert keys.in_words(section(path, "auto"), 3, is_arm=False) == []


class Read(dict):
    """A section that notes which of its keys are read."""

    def __init__(self, content: dict, names: set[str], path: str = ""):
        nested = {name: Read(value, names, f"{path}{name}.") for name, value in content.items() if type(value) is dict}
        super().__init__(content | nested)
        self.names, self.path = names, path

    def __getitem__(self, name):
        self.names.add(self.path + name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.names.add(self.path + name)
        return super().get(name, default)


@pytest.mark.parametrize("name", OF_ZERO)
def test_each_key_that_a_prediction_reads_is_counted_or_the_arms(name, monkeypatch):
    """What a config leaves out of these is DeepSpeed's default, and nothing of our arms' files."""
    read = set[str]()
    monkeypatch.setattr(Placement, "zero", property(lambda self: Read(arms.zero_optimization(self.deepspeed), read)))
    arm = load_arm(name)
    training = training_of(named("llama3-8b"), precision="bf16_cast", ranks=8, accumulation=2)
    told = estimate(placed(training, **vars(Placement.of(arm, 8, "cuda"))))
    assert told.peak_bytes
    assert read
    assert [path for path in read if f"zero_optimization.{path}" not in keys.COUNTED + keys.OF_AN_ARM] == [
        path for path in read if path in OF_ARM or path in OFFLOADS
    ]


@for_each("path", keys.COUNTED)
@for_each("name", OF_ZERO)
def test_what_a_config_leaves_out_is_deepspeeds_default(name, path):
    arm = load_arm(name)
    settled = keys.with_keys(arm, keys.counted({"zero_optimization": {"stage": arm.stage}}, 4096))
    assert value_at(settled.deepspeed, path) == defaults(path)
    assert arms.zero_optimization(settled.deepspeed)["overlap_comm"] is (arm.stage == 3)
    assert settled.offload_param == arm.offload_param
    assert value_at(settled.deepspeed, "zero_optimization.stage") == arm.stage


@pytest.mark.parametrize(
    ("path", "size"),
    [
        ("zero_optimization.reduce_bucket_size", 4096**2),
        ("zero_optimization.stage3_prefetch_bucket_size", 15099494),
        ("zero_optimization.stage3_param_persistence_threshold", 40960),
        ("zero_optimization.sub_group_size", 1_000_000_000),  # nobody fills it in
    ],
)
def test_auto_is_filled_in_by_the_models_width_as_accelerate_does(path, size):
    assert dict(keys.counted(section(path, "auto"), 4096))[path] == size
    assert dict(keys.counted(section(path, "auto"), 0))[path] == defaults(path)


def test_nothing_is_said_without_a_config_and_given_buckets_win():
    assert keys.counted({}, 4096) == keys.counted(None, 4096) == ()
    given = dict(keys.counted(section("zero_optimization.reduce_bucket_size", 7), 4096, buckets=9))
    assert {keys.REDUCED, keys.PREFETCHED} & given.keys() == set()


def test_every_setting_that_changes_memory_is_counted_or_told():
    paths = [each.deepspeed for each in descriptions().values() if each.deepspeed and "memory" in str(each.changes)]
    known = (*keys.COUNTED, *keys.NOT_COUNTED, *keys.OF_AN_ARM)
    assert [path for path in paths if path not in known and not path.endswith(OF_ARM)] == []


def test_sums_in_fp32_with_stage_1_are_another_optimizer():
    config = section(keys.GRADIENTS_KEPT_IN, "fp32")
    assert "with stage 1" in str(keys.in_words(config, 1, is_arm=True))
    assert keys.in_words(config, 3, is_arm=False) == ["Counted of the config: data_types.grad_accum_dtype fp32."]
