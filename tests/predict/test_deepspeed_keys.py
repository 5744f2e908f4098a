"""A key of somebody's DeepSpeed config on which memory depends is counted, or said not to be."""

import pytest

from study.configs.settings import descriptions
from study.core.arms import load_arm
from study.core.library_defaults import library_defaults
from study.predict import deepspeed_keys as keys
from study.predict.architecture import named
from study.predict.placement import Placement
from study.predict.prediction import estimate
from tests.predict.trainings import placed, training_of

# By their value the arm is chosen, or they have options of their own.
OF_ARM = (
    "reduce_bucket_size",
    "offload_optimizer.device",
    "offload_param.device",
    "stage",
    "train_micro_batch_size_per_gpu",
)
OTHER = {
    keys.GRADIENTS_KEPT_IN: "fp32",
    "zero_optimization.overlap_comm": False,
    "zero_optimization.sub_group_size": 1000,
    "zero_optimization.stage3_prefetch_bucket_size": 1e9,
    "zero_optimization.stage3_param_persistence_threshold": 0,
    "zero_optimization.stage3_max_live_parameters": 0,
    "zero_optimization.stage3_max_reuse_distance": 0,
    "zero_optimization.use_multi_rank_bucket_allreduce": False,
}
# They peak at different moments.
TRAININGS = (("gpt-j-6b", "zero1", 2, 2048), ("gpt-j-6b", "zero3", 2, 8), ("gpt2-xl", "zero3", 8, 8))


def section(path: str, value) -> dict:
    content = value
    for name in reversed(path.split(".")):
        content = {name: content}
    return content


def changed(path: str):
    """A value that is not DeepSpeed's default."""
    of_section, _, key = path.rpartition(".")
    return OTHER.get(path, not library_defaults("deepspeed").get(of_section, {}).get(key))


@pytest.mark.parametrize("path", keys.COUNTED)
def test_a_counted_key_changes_a_prediction(path):
    differ = []
    for model, name, ranks, tokens in TRAININGS:
        arm = load_arm(name)
        usual = training_of(named(model), precision="bf16_cast", ranks=ranks, accumulation=2, sequence=tokens)
        both = (arm, keys.with_keys(arm, keys.counted(section(path, changed(path)))))
        told = [estimate(placed(usual, **vars(Placement.of(each, ranks, "cuda")))) for each in both]
        differ.append(told[0] != told[1])
    assert any(differ)


@pytest.mark.parametrize("value", ["x", [1], -1, float("inf"), float("nan"), "perhaps", {"a": 1}, "1e400"])
@pytest.mark.parametrize("path", keys.COUNTED)
def test_what_deepspeed_does_not_take_is_not_counted(path, value):
    config = section(path, value)
    assert (keys.counted(config), keys.in_words(config, 3, is_arm=False)) == ((), [])


@pytest.mark.parametrize("path", keys.NOT_COUNTED + keys.OF_AN_ARM)
def test_any_other_key_is_said_not_to_be_counted(path):
    of_section, _, key = path.rpartition(".")
    known = library_defaults("deepspeed").get(of_section, {})
    assert key in known
    assert path in str(keys.in_words(section(path, changed(path)), 3, is_arm=False))
    assert keys.in_words(section(path, known[key]), 3, is_arm=False) == keys.in_words({}, 3, is_arm=False) == []
    assert keys.in_words(section(path, "auto"), 3, is_arm=False) == []


def test_every_setting_that_changes_memory_is_counted_or_told():
    paths = [each.deepspeed for each in descriptions().values() if each.deepspeed and "memory" in str(each.changes)]
    known = (*keys.COUNTED, *keys.NOT_COUNTED, *keys.OF_AN_ARM)
    assert [path for path in paths if path not in known and not path.endswith(OF_ARM)] == []


def test_sums_in_fp32_with_stage_1_are_another_optimizer():
    config = section(keys.GRADIENTS_KEPT_IN, "fp32")
    assert "with stage 1" in str(keys.in_words(config, 1, is_arm=True))
    assert keys.in_words(config, 3, is_arm=False) == ["Counted of the config: data_types.grad_accum_dtype fp32."]
