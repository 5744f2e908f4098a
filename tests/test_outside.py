"""Published measurements: how rows are read, which setups they describe, and the errors of predictions."""

import csv
import itertools
import json
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from study.cli.outside import outside
from study.errors import Stop
from study.predictor.architecture import parameters
from study.predictor.estimate import estimate
from study.predictor.outside import compare, models, rows, setups, sources, summary, words, written
from study.predictor.outside.compare import Compared, Quantity, compared, key_of
from study.predictor.outside.rows import Row
from study.predictor.outside.setups import NoSetup, training_of

GPT = {
    "source": "a lab",
    "model": "GPT L12 h1024 a16",
    "gpu": "A100-80GB",
    "n_gpus": "4",
    "arm": "ddp (Megatron)",
    "precision": "fp16",
    "seq": "1024",
    "micro_batch": "2",
    "grad_acc": "2",
    "activation_checkpointing": "full",
    "notes": "flash attention",
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


def test_the_project_has_rows_of_many_sources_and_each_says_where_it_is_from():
    own = rows.own()
    assert len(own) >= 500
    assert {each.source for each in own} == set(sources.own())
    assert len(sources.own()) >= 8
    assert all(each.url_or_path for each in own)


def test_what_is_not_known_is_none_and_a_count_may_be_the_source_s_words(tmp_path):
    (read,) = rows.read(file(tmp_path / "rows.csv", {"grad_acc": "", "micro_batch": "32 (of all GPUs?)", "mfu": " "}))
    assert (read.grad_acc, read.micro_batch, read.mfu, read.seq) == (None, "32 (of all GPUs?)", None, 1024)
    with pytest.raises(NoSetup, match="the micro-batch is '32"):
        training_of(read)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"memory_GB": "lots"}, "line 3: memory_GB must be a number"),
        ({"step_time_s": "-1"}, "line 3: step_time_s .*-1"),
        ({"tier": "D"}, "line 3: tier .*'D'"),
        ({"source": ""}, "line 3: source"),
    ],
)
def test_an_error_names_the_line_the_column_and_what_came(change, sentence, tmp_path):
    with pytest.raises(Stop, match=sentence):
        rows.read(file(tmp_path / "rows.csv", {}, change))


def test_a_column_that_is_missing_is_named_and_one_more_is_left_alone(tmp_path):
    path = file(tmp_path / "rows.csv", {})
    lines = path.read_text().splitlines()
    path.write_text(f"{lines[0]},more\n{lines[1]},1\n")
    assert rows.read(path)[0].n_gpus == 4
    path.write_text(path.read_text().replace("n_gpus", "gpus"))
    with pytest.raises(Stop, match="lacks the column n_gpus"):
        rows.read(path)
    with pytest.raises(Stop, match="cannot be read"):
        rows.read(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("peak torch allocated; after-init allocated 43.47 GB", "allocated"),
        ("peak active 25.5 GiB", "allocated"),
        ("peak reserved/active GiB as printed *1.0737", "reserved"),
        ("nvidia-smi MB/1000", "driver"),
        ("peak, as printed", None),
        (None, None),
    ],
)
def test_kinds_of_memory(said, kind):
    assert row(memory_kind=said).kind == kind


def test_seconds_of_a_step_come_from_tokens_where_the_row_has_only_those():
    assert row(tokens_per_s_per_gpu=8192).step_s == pytest.approx(2 * 2 * 1024 / 8192)
    assert row(tokens_per_s_per_gpu=8192, step_time_s=3).step_s == 3
    assert row(tokens_per_s_per_gpu=8192, grad_acc=None).step_s == pytest.approx(2 * 1024 / 8192)
    assert row(tokens_per_s_per_gpu=8192, micro_batch="32 (of all GPUs?)").step_s is None


# --- models and setups ---------------------------------------------------------------------------------------------


def test_models_of_formulas_have_the_parameters_that_their_sources_print():
    """Exactly: MosaicML's MPT at every row length, and vTrain's GPTs."""
    exact = {
        (each.model, each.params, each.seq): parameters(models.model_of(each.model, each.params, each.seq))
        for each in rows.own()
        if each.source in ("mosaicml/llm-foundry", "VIA-Research/vTrain")
    }
    assert len(exact) > 50
    assert all(count == params for (_, params, _), count in exact.items())


@pytest.mark.slow
def test_published_models_have_the_parameters_of_their_rows():
    reasons, counted = [], 0
    for name, params, sequence in {(each.model, each.params, each.seq or 512) for each in rows.own() if each.params}:
        try:  # some models have as many positions as the rows that they were trained on
            counted += parameters(models.model_of(name, params, sequence)) == pytest.approx(params, rel=models.NEAR)
        except models.Unknown as reason:
            reasons.append(str(reason))
    assert counted > 20
    assert all("not known" in reason for reason in reasons), "known dimensions contradict no row"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {"deepspeed": None, "fsdp": None, "precision": "bf16_cast", "checkpointing": True, "ranks": 4}),
        (
            {"arm": "fsdp_full_shard(zero3)", "precision": "amp_bf16/DEFAULT"},
            {"fsdp": "full_shard", "precision": "bf16"},
        ),
        ({"arm": "fsdp_shard_grad_op(zero2)"}, {"fsdp": "shard_grad_op", "precision": "fp16", "optimizer": "foreach"}),
        ({"arm": "fsdp2", "precision": "pure bf16 (params, grads, states)"}, {"precision": "bf16_pure"}),
        ({"arm": "ddp", "precision": "fp32", "activation_checkpointing": "none"}, {"precision": "fp32", "ranks": 4}),
        ({"arm": "single baseline", "n_gpus": "1"}, {"ranks": 1}),
        ({"arm": "zero1(distributed optimizer) tp1 pp1 dp4 cp1"}, {"precision": "bf16_cast", "optimizer": "fused"}),
        ({"arm": "ddp +chunked CE"}, {"loss": "chunked", "accumulation": 2, "micro_batch": 2, "sequence": 1024}),
    ],
)
def test_a_row_is_a_setup(change, expected):
    setup = training_of(row(**change)).setup
    assert {name: getattr(setup, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("arm", "stage", "offloaded"),
    [
        ("zero1 hand-tuned", 1, set()),
        ("ZeRO-2", 2, set()),
        ("deepspeed stage 3", 3, set()),
        ("zero2+cpu offload optimizer", 2, {"offload_optimizer"}),
        ("zero3+cpu offload params+optimizer", 3, {"offload_optimizer", "offload_param"}),
    ],
)
def test_a_stage_has_deepspeed_s_defaults_and_what_is_offloaded(arm, stage, offloaded):
    training = training_of(row(arm=arm))
    zero = training.setup.deepspeed["zero_optimization"]
    assert zero["stage"] == stage
    assert {name for name in zero if name.startswith("offload")} == offloaded
    assert "reduce_bucket_size" not in zero
    assert "DeepSpeed's default bucket sizes" in training.assumed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arm": "zero1 dp32 tp4 pp1"}, r"parallelism \(tp4\) is not modelled"),
        ({"arm": "fsdp2(2) cp4"}, r"\(cp4\) is not modelled"),
        ({"precision": "amp_fp8/DEFAULT"}, "8-bit products"),
        ({"arm": "zero2 Muon"}, "an optimizer other than Adam"),
        ({"arm": "zero3+deepcompile"}, "compiler"),
        ({"activation_checkpointing": "selective"}, "recomputation of selected activations"),
        ({"activation_checkpointing": "full+offload"}, "offloaded activations"),
        ({"precision": ""}, "the precision is not said"),
        ({"arm": "zero offload"}, "the stage is not said"),
        ({"arm": "zero2+offload optimizer+params"}, "stage 2 offloads no more"),
        ({"arm": "something new"}, "how the training is distributed is not known"),
        ({"seq": ""}, "the tokens of a row is not said"),
        ({"model": "13B"}, "dimensions of 13B are not known"),
        ({"params": "1e9"}, "make 255,131,648 parameters, the row says 1,000,000,000"),
        ({"notes": "paged/8-bit optimizer in the recipe"}, "8-bit or paged states"),
    ],
)
def test_a_row_that_is_no_setup_says_why(change, reason):
    values = {name: value or None for name, value in change.items()}
    with pytest.raises(NoSetup, match=reason):
        training_of(row(**values))


def test_what_is_unsaid_is_listed_as_assumed_and_what_the_source_says_is_not():
    unsaid = {"grad_acc": None, "activation_checkpointing": None, "notes": None, "n_gpus": "64", "gpu": "A100"}
    training = training_of(row(**unsaid))
    assert set(training.assumed) == {"one pass per step", "activations are not recomputed", "attention is fused"}
    assert len(training.assumed_of_machine) == 2
    assert (training.machine.gpu, training.machine.gpus_per_node) == ("A100-80GB", 8)
    own = next(each for each in rows.own() if each.source == "VIA-Research/vTrain")
    assert training_of(own).setup.attention == "eager"
    assert "attention is fused" not in training_of(own).assumed


def test_a_group_is_as_large_as_the_row_says_or_a_node():
    hybrid = {"arm": "zero1 hybrid (of 4 GPUs)", "n_gpus": "16"}
    assert training_of(row(**hybrid)).setup.group == 4
    training = training_of(row(arm="hsdp+compile", n_gpus="16"))
    assert (training.setup.group, training.setup.fsdp) == (8, "full_shard")
    assert "weights are sharded within nodes of 8 GPUs" in training.assumed
    with pytest.raises(NoSetup, match="within groups of ranks"):
        training_of(row(arm="zero3 hybrid (of 4 GPUs)", n_gpus="16"))


def test_what_would_not_fit_was_recomputed():
    """The source does not say so, and written-out attention over many rows would not fit."""
    unsaid = {"activation_checkpointing": None, "micro_batch": "256", "notes": "eager attention", "step_time_s": 1}
    training = training_of(row(**unsaid))
    assert training.setup.checkpointing
    assert "activations are recomputed: kept, they would not fit" in training.assumed
    small = training_of(row(**unsaid | {"micro_batch": "1"}))
    assert not small.setup.checkpointing


@pytest.mark.parametrize(
    ("family", "notes", "fused"),
    [("llama", "foak-fast-kernels", True), ("llama", "none", False), ("gpt_bigcode", "foak-fast-kernels", False)],
)
def test_kernels_are_fused_where_the_source_fuses_them(family, notes, fused):
    """fms-acceleration has kernels for Llama's norms and rotations, and for GPT-BigCode's loss alone."""
    assert setups.fused_kernels(row(notes=notes), SimpleNamespace(family=family)) == fused


def test_a_source_says_that_its_kernels_are_fused():
    assert training_of(row(source="jzhang38/TinyLlama")).machine.fused_kernels
    assert not training_of(row()).machine.fused_kernels


@pytest.mark.slow
def test_the_cache_of_gpt_bigcode_is_held_until_the_loss():
    """24 layers keep the tensor of query, key and value: 2,304 numbers of 2 bytes a token, as was measured."""
    for each in (each for each in rows.own() if each.micro_batch == 8 and "santacoder" in each.model):
        training = training_of(each)
        held, spared = (estimate(replace(training.setup, keeps_cache=cache)).peak_bytes for cache in (True, False))
        assert held - spared == 24 * (2048 + 2 * 128) * 2 * 8 * 2048
        assert held == pytest.approx(each.memory_bytes, rel=0.002)


def test_a_source_says_what_joins_its_nodes():
    assert training_of(row(source="InternLM/InternEvo", n_gpus="64")).machine.network == "eth-50"
    assert training_of(row(n_gpus="64")).machine.network is None


def test_a_machine_that_is_not_known_is_said_and_memory_needs_none():
    training = training_of(row(gpu="not stated"))
    assert (training.machine, training.no_machine) == (None, "the GPU is not said")
    assert training_of(row(gpu="V100 (16 on one node)", n_gpus="16")).machine.gpus_per_node == 16
    each = compared(row(gpu="not stated", memory_GB=10, step_time_s=1))
    assert [quantity.quantity for quantity in each.quantities] == ["memory"]
    assert each.reason == "time: the GPU is not said"


# --- judging -------------------------------------------------------------------------------------------------------


def judged(predicted: list[float], measured: list[float], **change) -> list[Compared]:
    """Rows of one table with these predicted and measured times."""
    interval = (0.5, 1.5)
    return [
        Compared(row(step_time_s=m, **change), (Quantity("time", p, m, interval, {"flat": 2 * m}),), None, ())
        for p, m in zip(predicted, measured, strict=True)
    ]


def test_errors_are_what_they_are_by_hand():
    errors = summary.summary(judged([1.05, 1.7, 3.0, 4.2], [1, 2, 3, 4]))["a lab"].time
    assert (errors.count, errors.inside, errors.within_10, errors.within_30) == (4, 0.25, 0.75, 1)
    off = (errors.median_absolute, errors.median_signed, errors.worst)
    assert off == (pytest.approx(0.05), pytest.approx(0.025), pytest.approx(-0.15))
    assert errors.others == {"flat": 1}


def test_every_miss_of_the_projects_own_rows_is_explained_and_no_explanation_is_left_over():
    missed = summary.misses(written.own())
    assert missed
    assert [miss for miss in missed if not miss["why"]] == []
    given = {each.why for source in sources.own().values() for each in source.miss}
    assert given == {miss["why"] for miss in missed}
    (together,) = words.misses(summary.misses(judged([0.5, 0.6], [1, 1])))
    assert (together["off by"], together["rows"]) == ("-50% to -40%", 2)


def test_complete_rows_are_counted():
    """Three of four rows are complete: two of them are within 10 %, and all within 30 %."""
    members = judged([1.05, 2.5, 3.0], [1, 2, 3])
    members += [replace(each, assumed=("a guess",)) for each in judged([9.0], [1])]
    line = words.lines({"a lab": asdict(summary.summary(members)["a lab"])})[0]
    assert (line["rows"], line["complete rows"]) == (4, 3)
    assert (line["within 10 % (complete)"], line["within 30 % (complete)"]) == ("2 of 3", "3 of 3")
    assert summary.misses(members)[0] | {"why": None} == summary.misses(members)[0]


def test_what_a_simulator_says_of_itself_stands_beside_ours():
    lines = {(line["source"], line["quantity"]): line for line in words.lines(written.read()["summary"])}
    assert lines["VIA-Research/vTrain", "time"]["its simulator"] == "8.4%"
    assert lines["all", "time"]["its simulator"] != "8.4%", "of one source, not of all"


def test_kendall_s_tau_is_of_step_times_and_of_tokens_per_second():
    """Any prediction says that longer rows take longer. The order by tokens a second is harder."""
    members = [
        *judged([1.0], [1.0], seq="512"),
        *judged([2.1], [1.9], seq="1024"),
        *judged([3.9], [4.1], seq="2048"),
    ]
    order = summary.summary(members)["a lab"].order
    assert (order.tables, order.of_step_times) == (1, 1)
    assert order.of_tokens_per_s < 1
    assert summary.summary(members[:2])["a lab"].order is None


def test_a_simulator_s_own_predictions_are_read_in_its_notes():
    notes = "SimuMax predicts 828.76 ms (-1.69%)"
    kind = "real alloc 66.55 GiB; SimuMax says 66.44"
    memory, time = compare.simulated(row(memory_GB=71.46, memory_kind=kind, step_time_s=0.843, notes=notes))
    assert memory.error == pytest.approx(66.44 / 66.55 - 1, abs=1e-4)
    assert time.error == pytest.approx(-0.0169, abs=1e-4)


def test_a_flat_share_of_the_peak_counts_no_recomputation():
    quantity = next(iter(compared(row(step_time_s=1)).quantities))
    flops = 3 * 2 * (12 * (1024 * 12 * 1024**2 + 2 * 1024**2 * 1024) + 1024 * 1024 * 50257) * 2 * 2
    assert quantity.others["flat 40 % MFU"] == pytest.approx(flops / (0.4 * 312e12), rel=1e-6)


# --- what is kept --------------------------------------------------------------------------------------------------


def test_kept_predictions_are_of_the_rows_as_they_are_and_a_sample_is_as_computed():
    kept = written.read()["rows"]
    assert [each["key"] for each in kept] == [key_of(each) for each in rows.own()]
    formulas = [
        n for n, each in enumerate(rows.own()) if each.source in ("VIA-Research/vTrain", "mosaicml/llm-foundry")
    ]
    for number in formulas[::40]:
        computed = json.loads(json.dumps(compared(rows.own()[number]).as_json()))
        assert {name: computed[name] for name in written.KEPT} == kept[number]


def test_kept_predictions_are_read_as_they_were_made():
    own = written.own()
    assert [each.row for each in own] == list(rows.own())
    assert written.as_json(own)["summary"] == written.read()["summary"]


def test_the_sentence_of_accuracy_is_about_kept_errors(monkeypatch):
    errors = {"median_absolute": 0.04, "count": 120}
    groups = {
        "all": {"memory": errors, "time": errors},
        "all of role test": {"time": {"median_absolute": 0.11, "count": 340}},
    }
    monkeypatch.setattr(written, "read", lambda: {"summary": groups})
    assert "memory: median 4.0% off over 120 published cells; time: median 11% off over 340" in written.accuracy()


# --- the command ---------------------------------------------------------------------------------------------------


def test_any_file_can_be_held_against_predictions_as_json(tmp_path):
    path = file(
        tmp_path / "rows.csv", {"step_time_s": "0.2", "memory_GB": "8"}, {"arm": "zero1 tp8", "step_time_s": "1"}, {}
    )
    answer = outside(file=path, as_json=True)
    good, other, empty = answer["rows"]
    assert [quantity["quantity"] for quantity in good["quantities"]] == ["memory", "time"]
    assert good["quantities"][0]["measured"] == 8e9
    assert good["quantities"][1]["interval"][0] < good["quantities"][1]["predicted"]
    assert good["reason"] is None
    assert (other["quantities"], "tp8" in other["reason"]) == ([], True)
    assert empty["reason"] == compare.NOTHING
    assert answer["summary"]["a lab"]["time"]["count"] == 1


def test_sources_are_listed_and_errors_are_a_table(tmp_path, capsys):
    outside()
    text = capsys.readouterr().out
    assert all(name in text for name in sources.own())
    outside(
        file=file(tmp_path / "rows.csv", {"step_time_s": "0.2"}, {"source": "another", "arm": "x", "step_time_s": "1"})
    )
    text = capsys.readouterr().out
    assert "flat 40 % MFU" in text
    assert "another: 1 rows" in text
    with pytest.raises(Stop, match="there is no such row"):
        outside(source="nobody")


def test_the_interval_holds_a_share_of_rows_and_of_sources():
    members = [*judged([1.0] * 4, [1, 1, 9, 9]), *judged([1.0], [1], source="another")]
    everything = summary.summary(members)["all"]
    assert everything.time.inside == pytest.approx(3 / 5)
    assert everything.inside_of_sources == pytest.approx((2 / 4 + 1) / 2)


def test_words_are_in_per_cent():
    (line,) = words.lines({"a lab": written.as_json(judged([1.05, 1.7, 3.0], [1, 2, 3]))["summary"]["a lab"]})
    assert (line["off by"], line["worst"], line["in interval"]) == ("5.0%", "-15%", "33%")


# --- how fast ------------------------------------------------------------------------------------------------------


def cells(count: int) -> list[Row]:
    """A sweep of configurations: models of published dimensions, arms, GPUs, rows and passes."""
    ways = itertools.product(
        ("GPT L12 h1024 a16", "GPT L24 h2048 a16", "GPT L40 h5120 a40", "GPT L96 h12288 a96"),
        ("ddp", "zero1", "zero2", "zero3", "fsdp full_shard"),
        ("A100-80GB", "H100-80GB", "V100-32GB"),
        ("1", "2", "4", "8"),
        ("1", "4", "16"),
        ("8", "64"),
    )
    names = ("model", "arm", "gpu", "micro_batch", "grad_acc", "n_gpus")
    return [
        row(**dict(zip(names, way, strict=True)), memory_GB=40, step_time_s=1) for way in itertools.islice(ways, count)
    ]


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_thousand_cells_take_a_minute(count):
    """60 ms of CPU time for each cell, for memory and time."""
    chosen = cells(1440)[:: 1440 // count][:count]
    start_s = time.process_time()
    predicted = [compared(each) for each in chosen]
    assert all(len(each.quantities) == 2 for each in predicted)
    assert (time.process_time() - start_s) / count < 0.06


@pytest.mark.parametrize("source", ["VIA-Research/vTrain", pytest.param("QwenLM/Qwen", marks=pytest.mark.slow)])
def test_a_cell_that_was_seen_takes_a_tenth_of_a_second(source):
    each = next(each for each in written.own() if each.row.source == source and each.quantities).row
    compared(each)
    start_s = time.process_time()
    compared(each)
    assert time.process_time() - start_s < 0.1
