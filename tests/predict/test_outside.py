"""Published measurements: how rows are read, which trainings they describe, and the errors of predictions."""

import tomllib

import pytest

from study.core.recipes import RECIPES
from study.predict.outside import published
from study.predict.outside.predicting import of_row, reading_of
from study.predict.outside.published import PublishedRow
from study.predict.placement import Fsdp
from study.predict.training import Batch, Recomputation

GPT = {
    "set": "known",
    "source": "VIA-Research/vTrain",
    "n_gpus": "4",
    "seq": "1024",
    "micro_batch": "2",
    "grad_acc": "2",
    "config": "gpt-l12-h1024-a16-p1024",
    "dtype": "bf16_cast",
    "checkpointing": "yes",
    "gpu_name": "A100-80GB",
}


def row(**values) -> PublishedRow:
    return PublishedRow.model_validate(GPT | values)


# --- rows ----------------------------------------------------------------------------------------------------------


def test_rows_are_of_many_sources_each_with_an_address():
    rows = published.rows()
    sources = tomllib.loads((published.FOLDER / "sources.toml").read_text())["source"]
    assert {each.source for each in rows} == {source["name"] for source in sources if source["licence"]}
    assert all(each.url_or_path for each in rows)
    assert all((each.config and each.dtype) or each.not_predicted for each in rows)
    assert len({each.key for each in rows}) == len(rows)
    sets = {(each.source, published.set_number(each.set)) for each in rows}
    assert len(sets) == len(sources), "a source is in one set"


def test_seconds_of_a_step_come_from_tokens_where_the_row_has_only_those():
    for values, seconds in (
        ({}, 2 * 2 * 1024 / 8192),
        ({"step_time_s": 3}, 3),
        ({"grad_acc": None}, 2 * 1024 / 8192),
        ({"parallel": "pp2"}, None),
        ({"rows_are": "padded", "seq_mean": 300}, 2 * 2 * 300 / 8192),
    ):
        assert row(tokens_per_s_per_gpu=8192, **values).step_s == seconds


# --- trainings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "predicted"),
    [
        ({"gpu_name": None}, ["memory"]),
        ({"time_not_predicted": "why"}, ["memory"]),
        ({"memory_not_predicted": "why"}, ["time"]),
        ({"not_predicted": "why"}, []),
    ],
)
def test_what_is_not_predicted(change, predicted):
    answer = of_row(row(memory_GB=10, step_time_s=1, **change))
    assert [quantity for quantity, each in answer.items() if each.ours] == predicted
    assert all(bool(each.ours) != bool(each.why) for each in answer.values()), "what is refused has a reason"


ZERO = {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({}, {"batch": Batch(2, 2, 1024, Recomputation.ALL), "recipe": RECIPES["bf16_cast"], "ranks": 4}),
        ({"grad_acc": None}, {"passes": 1, "recomputation": Recomputation.ALL}),
        ({"checkpointing": "-1"}, {"recomputation": Recomputation.SELECTIVE}),
        ({"fsdp": "full_shard", "group": "2", "fsdp_offload": "yes"}, {"fsdp": Fsdp(offloads=True), "group": 2}),
        ({"sequence_ranks": "2", "deepspeed": '{"stage": 3}'}, {"row_tokens": 512, "deepspeed": ZERO}),
        ({"fused_kernels": "yes"}, {"fused_layers": True, "bucket_view": False}),  # DDP keeps both
    ],
)
def test_columns_of_a_row_are_those_of_its_training(change, values):
    reading = reading_of(row(**change))
    training = reading.training
    told = vars(training.placement) | vars(training.batch) | vars(training.loop) | vars(training)
    told["row_tokens"] = training.row_tokens
    assert {name: told[name] for name in values} == values
    assert reading.machine.gpus_per_node == 4


def test_adapters_and_padded_rows():
    """The time is that of the longest row of a pass."""
    adapter = {"adapter": "dora", "adapter_rank": 8, "adapter_targets": "c_attn c_fc", "adapter_dropout": "yes"}
    reading = reading_of(row(**adapter, timed_seq=450))
    model = reading.training.model
    assert (model.lora_rank, model.dora, model.adapter_dropout) == (8, True, True)
    assert model.lora_targets == ("c_attn", "c_fc")
    assert (reading.training.batch.tokens, reading.timed.batch.tokens) == (1024, 450)
