"""Published measurements: how rows are read, which setups they describe, and the errors of predictions."""

import csv
from dataclasses import replace

import pytest

from study.core.errors import Stop
from study.predict.estimate import estimate
from study.predict.library import Library
from study.predict.outside import described, published
from study.predict.outside.described import NotPredicted, library_of, model_of, training_of
from study.predict.outside.predicting import of_row
from study.predict.outside.published import Row
from study.predict.trace.transformer import SELECTIVE

GPT = {
    "set": "known",
    "source": "VIA-Research/vTrain",
    "model": "GPT L12 h1024 a16",
    "n_gpus": "4",
    "arm": "ddp (Megatron)",
    "seq": "1024",
    "micro_batch": "2",
    "grad_acc": "2",
    "config": "gpt-l12-h1024-a16-p1024",
    "dtype": "bf16_cast",
    "recompute": "yes",
    "gpu_name": "A100-80GB",
}


def row(**values) -> Row:
    return Row.model_validate(dict.fromkeys(Row.model_fields) | GPT | values)


def file(path, *lines: dict):
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(Row.model_fields))
        writer.writeheader()
        writer.writerows(GPT | line for line in lines)
    return path


# --- rows ----------------------------------------------------------------------------------------------------------


def test_rows_are_of_many_sources_each_with_an_address_and_columns_that_the_readme_explains():
    rows = published.rows()
    assert {each.source for each in rows} == set(published.sources())
    assert all(each.url_or_path for each in rows)
    assert all((each.config and each.dtype) or each.not_predicted for each in rows)
    assert len({each.key for each in rows}) == len(rows)
    sets = {published.set_number(each.set): set() for each in rows}
    for each in rows:
        sets[published.set_number(each.set)].add(each.source)
    assert sorted(sets) == [0, 1, 2, 3, 4, 5, 6]
    assert sum(map(len, sets.values())) == len(published.sources()), "a source is in one set"
    explained = (published.FOLDER / "README.md").read_text()
    columns = list(Row.model_fields)
    assert all(f"| `{name}` " in explained for name in columns[columns.index("adapter") :])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"memory_GB": "lots"}, "line 3: memory_GB must be a number"),
        ({"step_time_s": "-1"}, "line 3: step_time_s .*-1"),
        ({"dtype": "int8"}, "line 3: dtype .*'int8'"),
        ({"micro_batch": "32 (of all GPUs?)"}, "line 3: micro_batch must be a whole number"),
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
    with pytest.raises(Stop, match="cannot be read"):
        published.read(tmp_path / "none.csv", Row)


def test_seconds_of_a_step_come_from_tokens_where_the_row_has_only_those():
    assert row(tokens_per_s_per_gpu=8192).step_s == pytest.approx(2 * 2 * 1024 / 8192)
    assert row(tokens_per_s_per_gpu=8192, step_time_s=3).step_s == 3
    assert row(tokens_per_s_per_gpu=8192, grad_acc=None).step_s == pytest.approx(2 * 1024 / 8192)
    assert row(tokens_per_s_per_gpu=8192, parallel="pp2").step_s is None


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


def test_a_row_is_a_setup():
    training = training_of(
        row(deepspeed='{"stage": 2, "reduce_bucket_size": 1000}', optimizer="foreach", loss="chunked")
    )
    setup, machine = training.setup, training.machine
    assert (setup.ranks, setup.sequence, setup.micro_batch, setup.accumulation) == (4, 1024, 2, 2)
    assert (setup.precision, setup.checkpointing, setup.optimizer, setup.loss) == (
        "bf16_cast",
        True,
        "foreach",
        "chunked",
    )
    assert setup.deepspeed == {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}
    assert (machine.gpu, machine.gpus_per_node, machine.network) == ("A100-80GB", 4, None)
    setup = training_of(row(fsdp="shard_grad_op", group="2", grad_acc=None)).setup
    assert (setup.fsdp, setup.group, setup.accumulation) == ("shard_grad_op", 2, 1)


def test_memory_needs_no_known_gpu():
    measured = {"memory_GB": 10, "step_time_s": 1}
    assert [*of_row(row(**measured, gpu_name=None, not_predicted="the GPU is not said"))] == ["memory"]
    assert [*of_row(row(**measured, rows_are="padded"))] == ["memory"], "their mean is not said"


@pytest.mark.parametrize("change", [{}, {"config": None}])
def test_a_row_that_is_not_predicted_says_why(change):
    refused = row(memory_GB=8, not_predicted="parallel dualpipe is not modelled", **change)
    assert of_row(refused) == {}
    with pytest.raises(NotPredicted, match="parallel dualpipe is not modelled"):
        training_of(refused)


ADAPTERS = {"adapter": "lora", "adapter_rank": 8, "adapter_dtype": "fp32", "deepspeed": None, "dtype": "bf16_pure"}


@pytest.mark.parametrize(
    ("change", "values"),
    [
        (ADAPTERS, {"precision": "bf16", "frozen": "bf16_without_autocast"}),
        (ADAPTERS | {"precision": "bf16 weights, bf16 autocast"}, {"precision": "bf16", "frozen": "bf16"}),
        (ADAPTERS | {"dtype": "bf16"}, {"precision": "bf16", "frozen": "as_weights"}),
        (ADAPTERS | {"adapter_dtype": None}, {"precision": "bf16_pure"}),
        (ADAPTERS | {"adapter_dtype": None, "versions": "torch 2.4.1, peft 0.13.2"}, {"precision": "bf16"}),
        (
            ADAPTERS | {"quantized": "nf4", "fp32_modules": "norm embed_tokens lm_head", "precision": "bf16 autocast"},
            {"precision": "bf16", "frozen": "as_weights"},
        ),
        (
            ADAPTERS
            | {"quantized": "nf4", "fp32_modules": "norm embed_tokens lm_head", "precision": "products in bf16"},
            {"precision": "fp32", "frozen": "as_weights"},
        ),
        (
            ADAPTERS | {"quantized": "nf4", "fp32_modules": "norm"},
            {"precision": "bf16", "frozen": "bf16_except_norms"},
        ),
        (ADAPTERS | {"deepspeed": '{"stage": 2}', "dtype": "bf16_cast"}, {"precision": "bf16_cast"}),
        (ADAPTERS | {"adapter": "dora", "adapter_targets": "c_attn c_fc"}, {"precision": "bf16"}),
        (ADAPTERS | {"quantized": "nf4"}, {"quantized": "nf4"}),
        ({"recompute_part": "layers/2", "recompute": None}, {"checkpointing": 2}),
        ({"recompute_part": "ops:torchtitan", "recompute": None}, {"checkpointing": SELECTIVE}),
        ({"fsdp": "full_shard", "deepspeed": None, "offload": "params optimizer"}, {"fsdp_offload": True}),
        ({"parallel": "sp2", "deepspeed": '{"stage": 3}'}, {"sequence_ranks": 2, "row_tokens": 512}),
        ({"optimizer_name": "paged_adamw_8bit"}, {"optimizer": "adamw_8bit"}),
        ({"optimizer_name": "adamw", "optimizer": "foreach"}, {"optimizer": "foreach"}),
    ],
)
def test_conditions_of_a_row_are_those_of_its_setup(change, values):
    training = training_of(row(**change))
    assert {name: getattr(training.setup, name) for name in values} == values
    assert training.setup.model.lora_rank == change.get("adapter_rank")
    is_dora = change.get("adapter") == "dora"
    assert training.setup.model.dora == is_dora
    assert training.setup.model.lora_targets == (("c_attn", "c_fc") if is_dora else ())


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"source": "Anassbzdd/fitcheck"}, {"keeps_logits": True}),
        ({"keeps_cache": "with_outputs"}, {"keeps_cache": True, "keeps_logits": True}),
        ({"deepspeed": "{}", "versions": "torch 2.1"}, {"bucket_view": True}),
        ({"fused_kernels": "yes", "logits": "as_computed"}, {"fused_layers": True, "logits": "as_computed"}),
    ],
)
def test_columns_of_a_row_say_what_its_libraries_do(change, values):
    """Others' DDP has gradients beside its buckets."""
    plain = row(versions="torch 2.1")
    assert library_of(plain) == Library(bucket_view=False)
    assert library_of(row(**change)) == replace(library_of(plain), **values) != library_of(plain)


@pytest.mark.parametrize(
    ("change", "is_on"),
    [
        ({}, False),
        ({"precision": "fp32 (TF32)"}, True),
        ({"versions": "torch 1.11.0"}, True),
        ({"versions": "torch 1.12.1"}, False),
        ({"source": "lambdal/deeplearning-benchmark"}, True),
    ],
)
def test_tf32_is_on_where_a_row_or_its_release_of_pytorch_says_so(change, is_on):
    """PyTorch had it on by default from 1.7 to 1.11; NVIDIA's containers have it on."""
    machine = training_of(row(**change)).machine
    assert machine is not None
    assert machine.tf32 == is_on


def test_the_dropout_of_adapters_is_the_sources():
    """Without it it is assumed to be 0."""
    assert training_of(row(**ADAPTERS)).setup.model.adapter_dropout is False
    assert training_of(row(**ADAPTERS, source="AnswerDotAI/fsdp_qlora")).setup.model.adapter_dropout is True


def test_padded_rows_are_as_long_as_the_longest_of_a_pass():
    """Of two exponential lengths the longer one is 1.5 times the mean, and none is longer than the limit."""
    varied = training_of(row(rows_are="padded", seq_mean=300, micro_batch=2))
    assert (varied.setup.sequence, described.timed_setup(varied).sequence) == (1024, 450)
    assert described.timed_setup(training_of(row(rows_are="padded", seq_mean=900, micro_batch=2))).sequence == 1024
    assert row(rows_are="padded", seq_mean=300, tokens_per_s_per_gpu=600).step_s == 2


@pytest.mark.slow
def test_the_cache_of_gpt_bigcode_is_held_until_the_loss():
    """24 layers keep the tensor of query, key and value: 2,304 numbers of 2 bytes a token, as was measured."""
    for each in published.rows():
        if each.set != published.KNOWN or each.micro_batch != 8 or "santacoder" not in each.model:
            continue
        setup = training_of(each).setup
        without = replace(setup, library=replace(setup.library, keeps_cache=False))
        held, spared = (estimate(one).peak_bytes for one in (setup, without))
        assert held - spared == 24 * (2048 + 2 * 128) * 2 * 8 * 2048
        assert held == pytest.approx(each.memory_bytes, rel=0.002)


# --- predictions ---


def test_a_flat_share_of_the_peak_counts_no_recomputation():
    (predicted,) = of_row(row(step_time_s=1)).values()
    flops = 3 * 2 * (12 * (1024 * 12 * 1024**2 + 2 * 1024**2 * 1024) + 1024 * 1024 * 50257) * 2 * 2
    assert predicted.flat == pytest.approx(flops / (0.4 * 312e12), rel=1e-6)
