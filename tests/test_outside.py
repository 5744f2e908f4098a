"""Published measurements: how rows are read, which setups they describe, and the errors of predictions."""

import csv
import hashlib
import json
import os
import sys
import tomllib
from dataclasses import replace

import numpy as np
import pytest

from study.bench import published_errors
from study.cli.outside import outside, read_settings
from study.errors import Stop
from study.ledger import ratios
from study.predictor.estimate import estimate
from study.predictor.library import Library
from study.predictor.outside import described, published, stored, trainings
from study.predictor.outside.described import FP32_MODULES, NotPredicted, library_of, model_of, training_of
from study.predictor.outside.published import NO_DROPOUT, Row
from study.predictor.outside.trainings import Compared, ComparedRow, compare
from study.predictor.tracing.transformer import SELECTIVE
from study.report import outside as in_words

FROZEN = published.FOLDER / "frozen.csv"
GPT = {
    "source": "a lab",
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


LLAMA = json.dumps(
    {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
)


def row(**values) -> Row:
    return Row.model_validate(dict.fromkeys(Row.model_fields) | GPT | values)


def file(path, *lines: dict):
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(Row.model_fields))
        writer.writeheader()
        writer.writerows(GPT | line for line in lines)
    return path


# --- rows ----------------------------------------------------------------------------------------------------------


def test_the_project_has_rows_of_many_sources_and_each_says_where_it_is_from():
    rows = published.rows()
    assert len(rows) >= 500
    frozen = published.read_rows(FROZEN)
    assert {each.source for each in (*rows, *frozen)} == set(published.sources())
    assert all(each.url_or_path for each in rows)
    assert all(each.config or each.not_predicted for each in rows)


def test_frozen_rows_are_those_that_were_declared_before_any_was_predicted():
    header, *lines = FROZEN.read_text().splitlines(keepends=True)
    splits = tomllib.loads((published.FOLDER / "splits.toml").read_text())["split"]
    for split in splits:
        mine = [line for line in lines if line.endswith(f",{split['name']}\n")]
        assert len(mine) == split["rows"]
        assert hashlib.sha256("".join([header, *mine]).encode()).hexdigest() == split["sha256"], split["name"]
    assert sum(split["rows"] for split in splits) == len(lines)


def test_frozen_rows_are_tests_of_sources_of_their_own_with_columns_that_the_readme_explains():
    rows = published.read_rows(FROZEN)
    assert {each.role for each in rows} == {"test"}
    assert not {each.source for each in rows} & {each.source for each in published.rows()}
    assert all(
        each.url_or_path and each.tier and (each.memory_GB or each.step_time_s or each.tokens_per_s_per_gpu)
        for each in rows
    )
    conditions = [name for name, field in Row.model_fields.items() if not field.is_required()]
    explained = (published.FOLDER / "README.md").read_text()
    assert all(f"| `{name}` " in explained for name in conditions)
    later = {"fsdp_units", "adapter_dropout"}  # conditions that were found after the rows were frozen
    assert set(conditions) - later <= set(FROZEN.read_text().partition("\n")[0].split(","))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"memory_GB": "lots"}, "line 3: memory_GB must be a number"),
        ({"step_time_s": "-1"}, "line 3: step_time_s .*-1"),
        ({"tier": "D"}, "line 3: tier .*'D'"),
        ({"dtype": "int8"}, "line 3: dtype .*'int8'"),
        ({"source": ""}, "line 3: source"),
    ],
)
def test_an_error_names_the_line_the_column_and_the_value(change, sentence, tmp_path):
    with pytest.raises(Stop, match=sentence):
        published.read_rows(file(tmp_path / "rows.csv", {}, change))


def test_a_missing_column_is_named_and_another_one_is_ignored(tmp_path):
    path = file(tmp_path / "rows.csv", {})
    lines = path.read_text().splitlines()
    path.write_text(f"{lines[0]},more\n{lines[1]},1\n")
    assert published.read_rows(path)[0].n_gpus == 4
    path.write_text(path.read_text().replace("n_gpus", "gpus"))
    with pytest.raises(Stop, match="lacks the column n_gpus; unknown: gpus, more"):
        published.read_rows(path)
    with pytest.raises(Stop, match="cannot be read"):
        published.read_rows(tmp_path / "none.csv")


@pytest.mark.parametrize("name", ["config", "dtype"])
def test_a_file_whose_rows_all_lack_what_predictions_need_stops_at_once(name, tmp_path):
    path = file(tmp_path / "rows.csv", {name: ""}, {name: ""})
    with pytest.raises(Stop, match=f"no row of .* has a value for {name}"):
        published.read_rows(path)
    assert len(published.read_rows(path, {name: "bf16"})) == 2


def test_what_a_source_says_of_all_its_rows_fills_in_empty_fields(tmp_path):
    path = file(tmp_path / "rows.csv", {"attention": "eager", "deepspeed": '{"stage": 1}'}, {})
    path.write_text(path.read_text().replace(",loss,", ",others_loss,"))
    says = tmp_path / "says.toml"
    says.write_text('attention = "sdpa"\nloss = "chunked"\ndeepspeed = { stage = 2 }\n')
    first, second = published.read_rows(path, read_settings(says))
    assert (first.attention, second.attention) == ("eager", "sdpa")
    assert [training_of(each).setup.stage for each in (first, second)] == [1, 2]
    assert second.loss == "chunked"
    says.write_text("atention = 1\n")
    with pytest.raises(Stop, match="'atention' is not a column"):
        read_settings(says)
    says.write_text('attention = "flash"\n')
    with pytest.raises(Stop, match=r"line 3: attention .*'flash'"):
        published.read_rows(path, read_settings(says) | {"loss": "whole"})


def test_seconds_of_a_step_come_from_tokens_where_the_row_has_only_those():
    assert row(tokens_per_s_per_gpu=8192).step_s == pytest.approx(2 * 2 * 1024 / 8192)
    assert row(tokens_per_s_per_gpu=8192, step_time_s=3).step_s == 3
    assert row(tokens_per_s_per_gpu=8192, grad_acc=None).step_s == pytest.approx(2 * 1024 / 8192)
    assert row(tokens_per_s_per_gpu=8192, micro_batch="32 (of all GPUs?)").step_s is None


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
    setup = training_of(row(fsdp="shard_grad_op", group="2", seq="4096", grad_acc=None)).setup
    assert (setup.fsdp, setup.group, setup.accumulation) == ("shard_grad_op", 2, 1)
    assert setup.sequence == 1024, "the model reads no more"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"config": None}, "the columns config and dtype are empty"),
        ({"config": None, "not_predicted": "tp4 is not modelled"}, "tp4 is not modelled"),
        ({"micro_batch": "32 (of all GPUs?)"}, "micro_batch is '32 .of all GPUs?"),
        ({"n_gpus": None}, "n_gpus is None, no number"),
    ],
)
def test_a_row_that_is_no_setup_says_why(change, reason):
    with pytest.raises(NotPredicted, match=reason):
        training_of(row(**change))


def test_memory_needs_no_known_gpu():
    compared = compare(row(gpu_name=None, memory_GB=10, step_time_s=1, not_predicted="the GPU is not said"))
    assert [each.quantity for each in compared.quantities] == ["memory"]
    assert compared.reason == "time: the GPU is not said"


def test_a_condition_that_no_prediction_takes_into_account_refuses_the_row(tmp_path):
    path = file(tmp_path / "rows.csv", {"memory_GB": "8"})
    header, line = path.read_text().splitlines()
    unknown = {"parallel": "dualpipe", "products": "nvfp4", "recompute_part": "ops:megatron", "trained_too": "lm_head"}
    unknown |= {"experts": "deepep", "offload": "activations", "optimizer_name": "lion"}
    for name, value in unknown.items():
        path.write_text(f"{header},{name},host\n{line},{value},EPYC\n{line},,EPYC\n")
        refused, plain = map(compare, published.read_rows(path))
        assert (refused.quantities, refused.reason) == ((), f"{name} {value} is not modelled")
        assert plain.quantities
    varied = compare(row(memory_GB=8, step_time_s=1, rows_are="padded", deepspeed=None))
    assert [each.quantity for each in varied.quantities] == ["memory"]
    assert varied.reason == "time: rows are padded, and their mean is not said"
    with pytest.raises(NotPredicted, match="recomputation of 5 of 12 layers"):
        training_of(row(recompute_part="layers=5", recompute=None))
    with pytest.raises(NotPredicted, match="rows vary"):
        training_of(row(seq_mean=300))


def test_a_row_names_its_model_or_has_its_config():
    named, written = (training_of(row(config=each)).setup.model for each in ("Qwen-7B-Chat", LLAMA))
    assert named.parameters == 7_721_324_544
    assert written.family == "llama"
    assert written.parameters == 2 * 512 * 64 + 64 + 2 * (4 * 64**2 + 3 * 64 * 128 + 2 * 64)
    with pytest.raises(NotPredicted, match="no JSON"):
        training_of(row(config="{"))


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
            ADAPTERS | {"quantized": "nf4", "fp32_modules": FP32_MODULES[0], "precision": "bf16 autocast"},
            {"precision": "bf16", "frozen": "as_weights"},
        ),
        (
            ADAPTERS | {"quantized": "nf4", "fp32_modules": FP32_MODULES[0], "precision": "products in bf16"},
            {"precision": "fp32", "frozen": "as_weights"},
        ),
        (
            ADAPTERS | {"quantized": "nf4", "fp32_modules": FP32_MODULES[1]},
            {"precision": "bf16", "frozen": "bf16_except_norms"},
        ),
        (ADAPTERS | {"deepspeed": '{"stage": 2}', "dtype": "bf16_cast"}, {"precision": "bf16_cast"}),
        (ADAPTERS | {"adapter": "dora", "adapter_targets": "q_proj k_proj v_proj fc1"}, {"precision": "bf16"}),
        (ADAPTERS | {"quantized": "nf4"}, {"quantized": "nf4"}),
        ({"recompute_part": "layers/2", "recompute": None}, {"checkpointing": 2}),
        ({"recompute_part": "layers=4", "recompute": None}, {"checkpointing": 3}),  # of 12
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
    assert training.setup.model.lora_targets == (("c_attn", "c_fc") if is_dora else ()), "as GPT-2 calls them"


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"source": "Anassbzdd/fitcheck"}, {"keeps_logits": True}),
        ({"keeps_cache": "with_outputs"}, {"keeps_cache": True, "keeps_logits": True}),
        ({"deepspeed": "{}", "versions": "torch 2.1"}, {"bucket_view": True}),
        ({"fused_kernels": "yes", "logits": "as_computed"}, {"fused_layers": True, "logits": "as_computed"}),
        ({"fused_kernels": "yes", "kernels": "unsloth"}, {"fused_layers": True, "fused_adapters": True}),
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


def test_the_dropout_of_adapters_is_the_rows_or_the_sources():
    """Without either it is assumed to be 0."""
    assumed = row(**ADAPTERS)
    assert (training_of(assumed).setup.model.adapter_dropout, assumed.assumptions) == (False, (NO_DROPOUT,))
    for stated in (row(**ADAPTERS, adapter_dropout=0.1), row(**ADAPTERS, source="AnswerDotAI/fsdp_qlora")):
        assert (training_of(stated).setup.model.adapter_dropout, stated.assumptions) == (True, ())
    assert row(**ADAPTERS, adapter_dropout=0, source="AnswerDotAI/fsdp_qlora").drops == 0


def test_padded_rows_are_as_long_as_the_longest_of_a_pass():
    """Of two exponential lengths the longer one is 1.5 times the mean, and none is longer than the limit."""
    varied = training_of(row(rows_are="padded", seq_mean=300, micro_batch=2))
    assert (varied.setup.sequence, described.timed_setup(varied).sequence) == (1024, 450)
    assert described.timed_setup(training_of(row(rows_are="padded", seq_mean=900, micro_batch=2))).sequence == 1024
    assert row(rows_are="padded", seq_mean=300, tokens_per_s_per_gpu=600).step_s == 2


@pytest.mark.slow
def test_the_cache_of_gpt_bigcode_is_held_until_the_loss():
    """24 layers keep the tensor of query, key and value: 2,304 numbers of 2 bytes a token, as was measured."""
    for each in (each for each in published.rows() if each.micro_batch == 8 and "santacoder" in each.model):
        setup = training_of(each).setup
        without = replace(setup, library=replace(setup.library, keeps_cache=False))
        held, spared = (estimate(one).peak_bytes for one in (setup, without))
        assert held - spared == 24 * (2048 + 2 * 128) * 2 * 8 * 2048
        assert held == pytest.approx(each.memory_bytes, rel=0.002)


# --- errors --------------------------------------------------------------------------------------------------------


def judged(predicted: list[float], measured: list[float], **change) -> list[ComparedRow]:
    """Rows of one table with these predicted and measured times."""
    return [
        ComparedRow(row(step_time_s=m, **change), (Compared("time", p, m, (0.5, 1.5), {trainings.FLAT: 2 * m}),), None)
        for p, m in zip(predicted, measured, strict=True)
    ]


def test_errors_are_what_they_are_by_hand():
    """Three of five rows are complete: two of them are within 10 %, and all within 30 %."""
    members = [*judged([1.05, 2.5, 3.0], [1, 2, 3]), *judged([9.0, 4.2], [1, 4], assumed="a guess | another")]
    assert members[-1].row.assumptions == ("a guess", "another")
    line, last = in_words.lines(members)
    assert last == line | {"source": "all", "its simulator": None}
    assert (line["rows"], line["median"], line["off by"], line["worst"]) == (5, "+5.0%", "5.0%", "+800%")
    assert (line["within 10 %"], line["within 30 %"], line["in interval"]) == ("60%", "80%", "40%")
    assert (line["complete rows"], line["off by (complete)"]) == (3, "5.0%")
    assert (line["within 10 % (complete)"], line["within 30 % (complete)"]) == ("2 of 3", "3 of 3")
    assert line[trainings.FLAT] == "100%"


def test_every_miss_of_the_projects_own_rows_is_explained_and_no_explanation_is_left_over():
    missed = in_words.misses(stored.predictions())
    given = {each.why for source in published.sources().values() for each in source.miss}
    assert given == {miss["why"] for miss in missed}
    (line,) = in_words.misses(judged([0.5, 0.6], [1, 1]))
    assert (line["off by"], line["rows"], line["why"]) == ("-50% to -40%", 2, "not explained")


def test_a_flat_share_of_the_peak_counts_no_recomputation():
    (compared,) = compare(row(step_time_s=1)).quantities
    flops = 3 * 2 * (12 * (1024 * 12 * 1024**2 + 2 * 1024**2 * 1024) + 1024 * 1024 * 50257) * 2 * 2
    assert compared.others[trainings.FLAT] == pytest.approx(flops / (0.4 * 312e12), rel=1e-6)


def test_each_source_has_the_same_weight_in_the_accuracy():
    """One source with many exact rows does not hide the others; and of sources that were fitted to, none counts."""
    fitted = next(name for name, source in published.sources().items() if source.role == "interval")
    members = [
        *judged([1.0] * 50, [1.0] * 50),
        *judged([0.8], [1], source=fitted),
        *judged([1.1, 0.5], [1, 1], source="c"),
    ]
    accuracy = published_errors.accuracies(members)["time"]
    assert (accuracy["rows"], accuracy["sources"]) == (53, 3)
    assert accuracy["median_error"] == pytest.approx(0.2)
    assert accuracy["too_low"] == pytest.approx((0 + 1 + 1 / 2) / 3)
    assert accuracy["inside"] is None, "no source is a test"
    assert "memory" not in published_errors.accuracies(members)


def test_the_accuracy_is_of_all_committed_rows_that_nothing_was_fitted_to():
    kept = stored.read()["accuracy"]
    assert published_errors.accuracies(stored.predictions()) == kept
    assert (kept["memory"]["rows"], kept["time"]["rows"]) == (94, 529)


# --- stored predictions, and the command ---------------------------------------------------------------------------


def test_the_interval_of_a_ratio_covers_sources_that_are_left_out():
    known, groups = ratios.accuracy(), ratios.errors()
    every = [error for group in groups.values() for error in group]
    assert known.pairs == len(every) >= 21
    assert known.sources == len(groups) >= 4
    assert 1 < np.exp(np.median(every)) < known.factor < np.exp(max(every))
    inside = []
    for name, group in groups.items():
        limit = ratios.quantile([rows for other, rows in groups.items() if other != name], ratios.COVERAGE)
        inside.append(np.mean(np.array(group) <= limit))
    assert np.mean(inside) > 0.8


def test_each_source_has_the_same_weight_in_the_interval_of_a_ratio(monkeypatch):
    off = {"a": [np.log(1.1)] * 98, "b": [np.log(1.5), np.log(2)]}
    monkeypatch.setattr(ratios, "errors", lambda: off)
    known = ratios.accuracy.__wrapped__()
    assert known.factor == pytest.approx(2), "by pairs, 98 % would be within 1.1"


def test_any_file_is_compared_with_predictions_as_json(tmp_path):
    lines = ({"step_time_s": "0.2", "memory_GB": "8"}, {"config": "", "not_predicted": "tp8", "step_time_s": "1"}, {})
    answer = outside(file=file(tmp_path / "rows.csv", *lines), as_json=True)
    good, other, empty = answer["rows"]
    assert [quantity["quantity"] for quantity in good["quantities"]] == ["memory", "time"]
    assert good["quantities"][0]["measured"] == 8e9
    assert good["quantities"][1]["interval"][0] < good["quantities"][1]["predicted"]
    assert good["reason"] is None
    assert (other["quantities"], other["reason"]) == ([], "tp8")
    assert empty["reason"] == trainings.NOTHING
    assert [line["rows"] for line in answer["summary"] if line["quantity"] == "time"] == [1, 1]


def process(_) -> int:
    return os.getpid()


def test_many_rows_are_predicted_by_other_processes_with_the_same_result(monkeypatch):
    rows = [row(step_time_s=seconds) for seconds in (1, 2, 3)]
    alone = [*map(compare, rows)]
    assert alone[0] != alone[1]
    monkeypatch.setattr(trainings, "MANY_ROWS", 3)
    monkeypatch.setattr(trainings, "ROWS_AT_ONCE", 1)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert trainings.compare_all(rows) == alone
    monkeypatch.setattr(trainings, "compare", process)
    assert os.getpid() not in trainings.compare_all(rows)
    assert trainings.compare_all(rows[1:]) == [os.getpid()] * 2, "these are few"
    monkeypatch.setitem(sys.modules, "torch", None)
    assert trainings.compare_all(rows) == [os.getpid()] * 3, "PyTorch has threads, which a fork lacks"


def test_a_source_that_nobody_published_is_named():
    with pytest.raises(Stop, match="there is no such row"):
        outside(source="nobody")
