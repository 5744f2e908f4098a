"""Published measurements: how rows are read, which setups they describe, and the errors of predictions."""

import csv
import tomllib

import pytest

from study.core.errors import Stop
from study.predict.outside import published
from study.predict.outside.predicting import model_of, of_row, training_of
from study.predict.outside.published import Facts, Row
from study.predict.setup import Library
from study.predict.trace.transformer import SELECTIVE

GPT = {
    "set": "known",
    "source": "VIA-Research/vTrain",
    "model": "GPT L12 h1024 a16",
    "n_gpus": "4",
    "seq": "1024",
    "micro_batch": "2",
    "grad_acc": "2",
    "config": "gpt-l12-h1024-a16-p1024",
    "dtype": "bf16_cast",
    "checkpointing": "yes",
    "gpu_name": "A100-80GB",
}


def row(**values) -> Row:
    return Row.model_validate(dict.fromkeys(Facts.model_fields) | GPT | values)


def file(path, *lines: dict):
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(Row.model_fields))
        writer.writeheader()
        writer.writerows(GPT | line for line in lines)
    return path


# --- rows ----------------------------------------------------------------------------------------------------------


def test_rows_are_of_many_sources_each_with_an_address_and_columns_that_the_readme_explains():
    rows = published.rows()
    sources = tomllib.loads((published.FOLDER / "sources.toml").read_text())["source"]
    assert {each.source for each in rows} == {source["name"] for source in sources if source["licence"]}
    assert all(each.url_or_path for each in rows)
    assert all((each.config and each.dtype) or each.not_predicted for each in rows)
    assert len({each.key for each in rows}) == len(rows)
    sets = {(each.source, published.set_number(each.set)) for each in rows}
    assert {number for _, number in sets} == {0, 1, 2, 3, 4, 5, 6}
    assert len(sets) == len(sources), "a source is in one set"
    explained = (published.FOLDER / "README.md").read_text()
    columns = list(Row.model_fields)
    assert all(f"`{name}`" in explained for name in columns[columns.index("config") :])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"memory_GB": "lots"}, "line 3: memory_GB must be a number"),
        ({"step_time_s": "-1"}, "line 3: step_time_s .*-1"),
        ({"dtype": "int8"}, "line 3: dtype .*'int8'"),
    ],
)
def test_an_error_names_the_line_the_column_and_the_value(change, sentence, tmp_path):
    with pytest.raises(Stop, match=sentence):
        published.read(file(tmp_path / "rows.csv", {}, change), Row)


def test_a_missing_column_is_named_and_another_one_is_ignored(tmp_path):
    path = file(tmp_path / "rows.csv", {})
    lines = path.read_text().splitlines()
    path.write_text(f"{lines[0]},more\n{lines[1]},1\n")
    assert published.read(path, Row)[0].n_gpus == 4
    path.write_text(path.read_text().replace("n_gpus", "gpus"))
    with pytest.raises(Stop, match="line 2: n_gpus is missing"):
        published.read(path, Row)


def test_seconds_of_a_step_come_from_tokens_where_the_row_has_only_those():
    for values, seconds in (
        ({}, 2 * 2 * 1024 / 8192),
        ({"step_time_s": 3}, 3),
        ({"grad_acc": None}, 2 * 1024 / 8192),
        ({"parallel": "pp2"}, None),
        ({"rows_are": "padded", "seq_mean": 300}, 2 * 2 * 300 / 8192),
    ):
        assert row(tokens_per_s_per_gpu=8192, **values).step_s == seconds


# --- setups --------------------------------------------------------------------------------------------------------


def test_models_have_the_parameters_that_their_sources_print():
    """Exactly: MosaicML's MPT at every row length, and vTrain's GPTs."""
    exact = {
        each.config: (each.params, model_of(each.config).parameters)
        for each in published.rows()
        if each.config and each.source in ("mosaicml/llm-foundry", "VIA-Research/vTrain")
    }
    assert len(exact) > 50
    assert all(count == params for params, count in exact.values())


@pytest.mark.slow
def test_other_models_have_the_parameters_of_their_rows():
    """Names round, and some leave out embeddings."""
    known = {(each.config, each.params) for each in published.rows() if each.config and each.params}
    assert len(known) > 20
    for name, params in known:
        assert model_of(name).parameters == pytest.approx(params, rel=0.05), name


@pytest.mark.parametrize(
    ("change", "predicted"),
    [
        ({"gpu_name": None}, ["memory"]),
        ({"time_not_predicted": "rows are padded, and their mean is not said"}, ["memory"]),
        ({"memory_not_predicted": "what is kept of 8-bit products depends on the library"}, ["time"]),
        ({"not_predicted": "parallel dualpipe is not modelled"}, []),
        ({"config": None}, []),
    ],
)
def test_what_is_not_predicted(change, predicted):
    assert [*of_row(row(memory_GB=10, step_time_s=1, **change))] == predicted


ADAPTERS = {"adapter": "lora", "adapter_rank": 8, "deepspeed": None, "dtype": "bf16"}
ZERO = {"stage": 2, "reduce_bucket_size": 1000}


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({}, {"ranks": 4, "sequence": 1024, "micro_batch": 2, "accumulation": 2, "precision": "bf16_cast"}),
        ({"grad_acc": None}, {"accumulation": 1, "checkpointing": True}),
        ({"deepspeed": '{"stage": 2, "reduce_bucket_size": 1000}'}, {"deepspeed": {"zero_optimization": ZERO}}),
        (ADAPTERS | {"frozen": "bf16_without_autocast"}, {"frozen": "bf16_without_autocast"}),
        (ADAPTERS | {"quantized": "nf4"}, {"quantized": "nf4"}),
        ({"checkpointing": "2"}, {"checkpointing": 2}),
        ({"checkpointing": "-1"}, {"checkpointing": SELECTIVE}),
        ({"fsdp": "full_shard", "group": "2", "fsdp_offload": "yes"}, {"fsdp": "full_shard", "fsdp_offload": True}),
        ({"sequence_ranks": "2", "deepspeed": '{"stage": 3}'}, {"sequence_ranks": 2, "row_tokens": 512}),
        (
            {"fused_kernels": "yes", "logits": "as_computed", "deepspeed": "{}", "keeps_cache": "yes"},
            {"library": Library(fused_layers=True, logits="as_computed", keeps_cache=True)},
        ),
        ({"torch_major": "1"}, {"library": Library(torch_major=1, bucket_view=False)}),  # others' DDP keeps both
    ],
)
def test_columns_of_a_row_are_those_of_its_setup(change, values):
    training = training_of(row(**change))
    assert {name: getattr(training.setup, name) for name in values} == values
    assert training.setup.model.lora_rank == change.get("adapter_rank")
    assert (training.machine.gpu, training.machine.gpus_per_node) == ("A100-80GB", 4)


def test_adapters_and_padded_rows():
    """The time is that of the longest row of a pass."""
    adapted = row(**ADAPTERS | {"adapter": "dora", "adapter_targets": "c_attn c_fc", "adapter_dropout": "yes"})
    training = training_of(adapted.model_copy(update={"timed_seq": 450}))
    model = training.setup.model
    assert (model.dora, model.adapter_dropout, model.lora_targets) == (True, True, ("c_attn", "c_fc"))
    assert (training.setup.sequence, training.timed.sequence) == (1024, 450)


def test_a_flat_share_of_the_peak_counts_no_recomputation():
    (predicted,) = of_row(row(step_time_s=1)).values()
    flops = 3 * 2 * (12 * (1024 * 12 * 1024**2 + 2 * 1024**2 * 1024) + 1024 * 1024 * 50257) * 2 * 2
    assert predicted.flat == pytest.approx(flops / (0.4 * 312e12), rel=1e-6)
