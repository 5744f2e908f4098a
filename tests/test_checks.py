"""Checks over records: what they find, what they refuse to find, and which evidence counts for which claim."""

from types import SimpleNamespace

import pytest
import shaped
from shaped import changed, failed, finished, put, script

from study.errors import Stop
from study.ledger import choosing
from study.ledger.choosing import choose
from study.ledger.record_checks import counted, equal, observed, order, ran, ratio, same_loss
from study.records import evidence, metrics
from study.records.evidence import Evidence
from study.records.schema import Record

ZERO2 = {"arm": "zero2"}
SIDES = {"of": {"arm": "zero2"}, "to": {"arm": "ddp"}}


def claim(kind: str, **conditions):
    """All that a check over records reads of a claim."""
    return SimpleNamespace(kind=kind, conditions=conditions)


def gathered(*records: dict) -> Evidence:
    return Evidence(tuple(map(shaped.run, records)))


def seeds(arm: str, count: int = 3, **how) -> list[dict]:
    """Runs of an arm, a seed each."""
    return [finished(f"{arm}-{how.get('precision', '')}{seed}", arm, seed=seed, **how) for seed in range(count)]


# --- comparability -------------------------------------------------------------------------------------------------

H200 = {"device": "NVIDIA H200"}


@pytest.mark.parametrize(
    ("kind", "counting", "deciding"),
    [
        ("bytes", {"model": "gemma2-9b", "ranks": 8, "sequence": 2048, "link": "nvswitch"} | H200, {"accumulation": 4}),
        ("bytes", {}, {"checkpointing": True}),
        ("memory", H200, {"model": "gemma2-9b", "ranks": 8, "precision": "fp32"}),
        ("time", {"data": "hub"}, {"ranks": 8, "model": "gemma2-9b", "link": "nvswitch"} | H200),
        ("capacity", {"data": "hub"}, H200),
        ("convergence", {"data": "hub"}, {"model": "bert-large"}),
        ("configuration", {"model": "gemma2-9b", "precision": "fp32", "ranks": 64} | H200, {}),
    ],
)
def test_evidence_from_other_conditions_counts_by_kind(kind, counting, deciding):
    for name, value in (counting | deciding).items():
        chosen = choose(gathered(finished()), claim(kind, **{name: value}), ZERO2)
        assert (len(chosen.runs), len(chosen.others)) == ((1, 0) if name in counting else (0, 1)), name
        assert name in " ".join(chosen.differs), "differences are reported either way"
    assert len(choose(gathered(finished()), claim(kind, **counting), ZERO2).runs) == 1


def test_a_relative_finding_lets_more_in():
    """A share of the states, and whether two losses are equal, do not depend on the size of a model."""
    for case in (claim("memory", model="gemma2-9b"), claim("convergence", model="bert-large", ranks=4, **H200)):
        assert choose(gathered(finished()), case, ZERO2).runs == ()
        assert len(choose(gathered(finished()), case, ZERO2, relative=True).runs) == 1


@pytest.mark.parametrize("kind", choosing.TRANSFERS)
def test_virtual_ranks_count_for_what_is_real_in_them(kind):
    chosen = choose(gathered(finished(virtual=True, ranks=8)), claim(kind, ranks=8), ZERO2)
    assert bool(chosen.runs) == (kind in ("bytes", "memory", "configuration"))
    assert "virtual ranks" in chosen.differs[0]


@pytest.mark.parametrize(
    ("wanted", "has", "same"),
    [
        ({"model": "bert-large-uncased"}, {"model": "bert-large"}, True),
        ({"model": "google/gemma-2-9b"}, {"model": "gemma2-9b"}, True),
        ({"model": "gpt2"}, {"model": "gpt2-medium"}, False),
        ({"precision": "bf16"}, {"precision": "bf16_cast"}, True),
        ({"precision": "bf16_cast"}, {"precision": "bf16"}, False),
        ({"ranks": [2, 4]}, {"ranks": 4}, True),
        ({"parameters": 8e8}, {}, False),
        ({"parameters": 8e5}, {}, True),
    ],
)
def test_names_that_mean_the_same(wanted, has, same):
    assert (choosing.differences(shaped.run(**has), claim("time", **wanted)) == {}) == same


def test_runs_are_chosen_by_what_they_are():
    cell = {"protocol": "h100", "part": "stages", "scale": "tiny", "repeat": 1}
    runs = gathered(finished("a"), finished("b", "zero3", cell=cell), finished("c", ranks=4), script("d"), failed("e"))
    for where, names in (
        (ZERO2, "a c"),  # what is not done is not a measurement
        ({"arm": ["zero2", "zero3"], "ranks": 2}, "a b"),
        ({"script": "as_printed"}, "d"),
        ({"repair": "none"}, "d"),
        ({"stage": 3}, "b"),
        ({"batch": 8}, "c"),
        ({"protocol_part": "stages"}, "b"),
        ({"run": "b"}, "b"),
    ):
        assert " ".join(run.name for run in choose(runs, claim("configuration"), where).runs) == names


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ({"arm": "zreo3"}, "did you mean 'zero3'"),
        ({"precision": "bf61"}, "'bf16'"),
        ({"offload": "disk"}, "choose one of nvme, cpu, none"),
        ({"armm": "zero3"}, "did you mean 'arm'"),
    ],
)
def test_a_value_that_no_run_can_have_is_an_error(where, words):
    """The verdict used to be "not tested here", as if that run had not been made yet."""
    with pytest.raises(Stop) as caught:
        choose(gathered(finished()), claim("bytes"), where)
    assert words in f"{caught.value.what}. {caught.value.remedy}"


def test_an_arm_of_somebody_else_is_known_by_its_records():
    foreign = gathered(finished(), changed(finished("other"), requested__arm="their_own"))
    assert len(choose(foreign, claim("bytes"), {"arm": "their_own"}).runs) == 1


@pytest.mark.parametrize("path", ["energy.joules", "tme.mfu", "time.forward_s", "forward_s"])
def test_a_path_that_leads_nowhere_in_any_record_is_an_error(path):
    """The verdict used to be inconclusive, as if these records lacked the value."""
    for runs in ((), (finished(),)):
        with pytest.raises(Stop, match=r"record has no field|There is no quantity"):
            observed(gathered(*runs), claim("time"), field=path, where=ZERO2)
        with pytest.raises(Stop, match=r"record has no field|There is no quantity"):
            ratio(gathered(*runs), claim("time"), quantity=path, **SIDES)


def test_runs_are_gathered_once_and_without_the_half_written(tmp_path):
    put(tmp_path / "here", finished("same"), failed("running", "oom") | {"status": "running", "error": None})
    put(tmp_path / "copy", finished("same"))
    runs = evidence.gather(shaped.runs(tmp_path))
    assert [run.name for run in runs.runs] == ["same"]
    assert "half-written" in runs.set_aside[0]


# --- observed, ran -------------------------------------------------------------------------------------------------


def seen(*records: dict, kind: str = "memory", **arguments):
    return observed(gathered(*records), claim(kind), **{"where": {}} | arguments)


def test_observed_numbers_have_their_range_and_texts_must_agree():
    peak = "memory.per_rank.0.host_peak_bytes"
    finding = seen(finished("a"), finished("b", memory__per_rank__0__host_peak_bytes=7 * 10**8), field=peak)
    assert (finding.value, finding.interval, finding.evidence) == (6.5e8, (6e8, 7e8), ("a", "b"))
    parts = "memory.components.per_rank.0.at_peak"
    share = seen(finished(), field=f"{parts}.master", over=f"{parts}.weights")
    assert share.value == pytest.approx(1)  # 4 / 2 ranks bytes a parameter, over 2
    both = finished("a"), finished("b", "zero3")
    assert seen(*both, field="observed.wrapper", kind="configuration").value == "DeepSpeedEngine"
    unlike = seen(*both, field="observed.arm", kind="configuration")
    assert (unlike.value, unlike.without) == (None, "inconclusive")
    assert "they disagree (zero2, zero3)" in unlike.working
    unknown = seen(finished(), field="memory.per_rank.0.peak_allocated_bytes")
    assert (unknown.value, unknown.without) == (None, "inconclusive")
    assert "is not in the records" in unknown.working


def test_times_and_losses_decide_claims_of_their_kind_only():
    """Claims of other kinds accept evidence from other machines."""
    runs = gathered(finished())
    with pytest.raises(Stop, match="step_s is of kind time, but the claim is of kind memory"):
        ratio(runs, claim("memory"), quantity="step_s", **SIDES)
    for check, arguments in ((observed, {"field": "train_loss", "where": {}}), (same_loss, LOSS_OF_ARMS)):
        with pytest.raises(Stop, match="is of kind convergence, but the claim is of kind time"):
            check(runs, claim("time"), **arguments)


def test_times_of_resumed_runs_are_unknown():
    """They cover only the part after an interruption. `observed` once read them as if they were whole."""
    resume = {"run_id": "x", "step": 1, "arm": "zero2", "ranks": 2, "route": "load_state"}
    runs = [changed(fields, checkpoints={"resumes": [resume]}) for fields in seeds("zero2", 4)]
    for field in ("step_s", "setup_s"):
        finding = seen(*runs, field=field, kind="time")
        assert (finding.value, finding.missing) == (None, f"records with {field}")
        assert seen(*seeds("zero2", 4), field=field, kind="time").value > 0


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_runs_say_nothing_of_seconds(count):
    runs = gathered(*seeds("zero2", count), *seeds("ddp", count))
    finding = ratio(runs, claim("time"), quantity="step_s", **SIDES)
    assert (finding.value, finding.without) == (None, "inconclusive")
    assert f"needs 3 runs of each (got {count})" in finding.working
    finding = observed(runs, claim("time"), field="step_s", where=ZERO2)
    assert (finding.value, finding.missing) == (None, "3 runs")


def test_ran_says_how_runs_ended():
    runs = gathered(finished("a"), failed("b"), failed("c", "failed"), finished("d", "zero3"))
    assert ran(runs, claim("capacity"), where={"arm": "zero3"}).value == "done"
    both = ran(runs, claim("capacity"), where=ZERO2)
    assert (both.value, both.evidence) == (None, ("a", "b")), "other failures say nothing"
    yet_to_come = ran(runs, claim("capacity"), where={"arm": "fsdp2_hybrid"})
    assert (yet_to_come.value, yet_to_come.without) == (None, "not tested here")


def test_weights_without_values_do_not_show_that_a_model_fits():
    with_values = finished("a", virtual=True, ranks=8)
    without = finished("b", virtual=True, ranks=8, requested__init="none")
    assert ran(gathered(without), claim("memory", ranks=8), where=ZERO2).value is None
    assert ran(gathered(with_values, without), claim("memory", ranks=8), where=ZERO2).evidence == ("a",)
    how = {"field": "observed.wrapper", "kind": "configuration"}
    assert seen(finished("a"), **how).basis == "measured"
    assert seen(finished("a"), with_values | {"run_id": "c"}, **how).basis == "virtual"
    assert seen(finished("c", requested__init="none"), **how).basis == "virtual"


# --- counted -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "accumulation", "volume", "tensors"),
    [("ddp", 1, 2, 1), ("zero1", 1, 3, 2), ("zero2", 4, 9, 5), ("zero3", 1, 2, 2), ("zero3", 4, 5, 5)],
)
def test_counted_over_the_weights(arm, accumulation, volume, tensors):
    runs = gathered(finished(arm=arm, accumulation=accumulation))
    for unit, expected in (("volume", volume), ("tensors", tensors)):
        finding = counted(runs, claim("bytes"), where={"arm": arm}, per="parameters", unit=unit)
        assert finding.value == pytest.approx(expected)


def test_counted_over_another_arm_cell_by_cell():
    runs = gathered(*[finished(f"{arm}{n}", arm, accumulation=n) for arm in ("ddp", "zero2") for n in (1, 4)])
    bytes_claim, over = claim("bytes"), {"arm": "ddp"}
    single = counted(runs, bytes_claim, where={"arm": "zero2", "accumulation": 1}, over=over)
    assert (single.value, single.evidence) == (1.5, ("zero21", "ddp1"))
    both = counted(runs, bytes_claim, where=ZERO2, over=over)
    assert (both.value, both.interval) == (3, (1.5, 4.5))
    assert counted(runs, bytes_claim, where=ZERO2, collective="all_gather", per="parameters").value == 1
    assert counted(runs, bytes_claim, where=ZERO2, unit="calls").value == 8


def test_a_single_rank_sends_nothing():
    alone = gathered(finished("alone", ranks=1))
    assert counted(alone, claim("bytes"), where=ZERO2).without == "not tested here"
    assert counted(alone, claim("bytes"), where=ZERO2 | {"ranks": 1}).value > 0


# --- ratio, order --------------------------------------------------------------------------------------------------


def time_ratio(*records: dict, quantity: str = "step_s", **sides):
    return ratio(gathered(*records), claim("time"), quantity=quantity, **SIDES | sides)


def test_a_ratio_is_of_medians_with_an_interval():
    runs = seeds("zero2", 5, step=0.3) + seeds("ddp", 5, step=0.1)
    finding = time_ratio(*runs)
    assert finding.value == pytest.approx(3)
    assert finding.interval[0] <= finding.value <= finding.interval[1]
    assert len(finding.evidence) == 10
    assert time_ratio(*runs, of=SIDES["to"], to=SIDES["of"], saved=True).value == pytest.approx(2 / 3)


def test_a_size_needs_a_single_run_of_each():
    runs = gathered(finished("a", "zero2", ranks=4), finished("b", "ddp", ranks=4))
    finding = ratio(runs, claim("memory"), quantity="component.master", **SIDES, saved=True)
    assert (finding.value, finding.evidence) == (0.75, ("a", "b"))
    assert 0 < ratio(runs, claim("memory"), quantity="peak_bytes", **SIDES).value < 1


def test_unlike_cells_are_not_compared():
    """Another batch, machine, or version: there is no ratio."""
    others = {
        "requested__micro_batch": 4,
        "hardware__cpu": "Other CPU",
        "software__torch": "2.14.0",
        "commit": "fedcba",
    }
    for field, value in others.items():
        finding = time_ratio(*seeds("zero2"), *(changed(fields, **{field: value}) for fields in seeds("ddp")))
        assert (finding.value, finding.without) == (None, "inconclusive")
        assert finding.working == f"no cell was run on both sides: they differ in {field.rpartition('__')[2]}"


def test_scaling_needs_runs_on_a_single_rank():
    two = [finished(f"r{n}", "zero2", ranks=2, seed=n) for n in range(3)]
    single = [finished(f"s{n}", "zero2", ranks=1, seed=n, step=0.2) for n in range(3)]
    sides = {"quantity": "tokens_per_s", "of": {"ranks": 2}, "to": {"ranks": 1}}
    without = time_ratio(*two, **sides)
    assert (without.value, without.without) == (None, "not tested here")
    assert time_ratio(*two, *single, **sides).value == pytest.approx(4)


def test_arms_of_unlike_states_are_not_compared():
    """OpenTau: Adam held its moments in bf16 in one arm only, which was three times as fast."""
    assert time_ratio(*seeds("zero2"), *seeds("ddp")).value == pytest.approx(1)
    unlike = [changed(fields, observed__dtypes__moments="float16") for fields in seeds("ddp")]
    finding = time_ratio(*seeds("zero2"), *unlike)
    assert finding.value is None
    assert "moments are float32 on one side and float16 on the other" in finding.working


@pytest.mark.parametrize(
    ("name", "ours", "theirs"), [("micro_batch", 8, 2), ("batch", 16, 4), ("device", "NVIDIA H200", "CPU")]
)
def test_what_the_sides_name_may_differ_and_what_decides_it(name, ours, theirs):
    """A batch is rows and passes, a device another machine."""
    how = {"gpu": True} if name == "device" else {"micro_batch": 8, "step": 0.2}
    runs = seeds("zero2") + [fields | {"run_id": fields["run_id"] + "b"} for fields in seeds("zero2", **how)]
    finding = time_ratio(*runs, quantity="tokens_per_s", of={name: ours}, to={name: theirs})
    assert finding.value == pytest.approx(1 if name == "device" else 2)


def test_several_cells_make_an_interval_that_holds_them_all():
    runs = []
    for precision, step in (("fp32", 0.2), ("bf16_cast", 0.4)):
        runs += seeds("zero2", precision=precision, step=step) + seeds("ddp", precision=precision)
    finding = time_ratio(*runs)
    assert finding.value == pytest.approx(3)
    assert finding.interval == (pytest.approx(2), pytest.approx(4))


def test_an_order_is_each_against_the_next():
    steps = [(0.1, 0.2, 0.3), (0.1, 0.3, 0.2), (0.1, 0.1, 0.3), (0.1, 0.098, 0.3), (0.1, 0.098, 0.3)]
    arms, answers = ["ddp", "zero2", "zero3"], [True, False, True, False, True]
    for step_s, within, expected in zip(steps, (0, 0, 0, 0, 0.05), answers, strict=True):
        runs = gathered(*(fields for arm, step in zip(arms, step_s, strict=True) for fields in seeds(arm, step=step)))
        for quantity in ("step_s", "tokens_per_s"):  # less is better, and more is
            assert order(runs, claim("time"), quantity=quantity, arms=arms, within=within).value is expected
    with pytest.raises(Stop, match="at least two arms"):
        order(runs, claim("time"), quantity="step_s", arms=["ddp"])


def test_an_order_is_undecided_if_an_interval_reaches_both_sides():
    steps = {"ddp": (0.1, 0.11, 0.2), "zero2": (0.09, 0.12, 0.19)}
    runs = gathered(*(finished(f"{arm}{n}", arm, seed=n, step=steps[arm][n]) for arm in steps for n in range(3)))
    finding = order(runs, claim("time"), quantity="step_s", arms=["ddp", "zero2"])
    assert (finding.value, finding.missing) == (None, "more runs: an interval reaches both sides")


# --- equal ---------------------------------------------------------------------------------------------------------


def test_equal_compares_a_field_cell_by_cell():
    """Each run is compared with those of its own cell: differences between cells do not matter."""
    runs = [finished(f"{arm}-{rows}", arm, micro_batch=rows, loss=rows) for arm in ("ddp", "zero2") for rows in (1, 4)]
    same = equal(gathered(*runs), claim("convergence"), field="loss.train", **SIDES)
    assert same.value is True
    assert "in 2 cells of 2, 4 runs" in same.working
    off = changed(runs[-1], loss__train__0=runs[-1]["loss"]["train"][0] * (1 + 1e-5))
    for within, expected in ((0, False), (1e-6, False), (1e-4, True)):
        found = equal(gathered(*runs[:-1], off), claim("convergence"), field="loss.train", within=within, **SIDES)
        assert found.value is expected
    short = changed(runs[-1], loss__train=runs[-1]["loss"]["train"][:1])
    assert equal(gathered(*runs[:-1], short), claim("convergence"), field="loss.train", **SIDES).value is False


def test_equal_needs_both_sides_to_have_it():
    runs = gathered(finished("a", "ddp"), changed(finished("b", "zero2"), observed__weights_checksum=None))
    found = equal(runs, claim("configuration"), field="observed.weights_checksum", **SIDES)
    assert (found.value, found.missing) == (None, "records with observed.weights_checksum")
    other_seeds = gathered(finished("a", "ddp", seed=1), finished("b", "zero2", seed=2))
    assert equal(other_seeds, claim("convergence"), field="loss.train", **SIDES).value is None


# --- same_loss -----------------------------------------------------------------------------------------------------

LOSS_OF_ARMS = {"arms": ["ddp", "zero2"], "margin": 0.01}


def compared_losses(*records: dict, **how):
    return same_loss(gathered(*records), claim("convergence"), **LOSS_OF_ARMS | how)


def losses(arm: str, values, first: int = 0) -> list[dict]:
    """Runs of an arm that end at these losses, a seed each."""
    return [finished(f"{arm}{seed}", arm, seed=seed, loss=loss) for seed, loss in enumerate(values, first)]


LOWER = {"direction": "lower"}


@pytest.mark.parametrize(
    ("shift", "noise", "how", "expected"),
    [
        (0.0, 0.0, {}, True),
        (0.001, 0.0001, {}, True),
        (0.1, 0.0001, {}, False),
        (0.0, 0.1, {}, None),  # the seeds differ by more than the margin: nothing is shown
        (0.0, 0.001, {"margin": 0.0001}, None),
        (0.1, 0.0001, {"margin": 0.2}, True),  # another margin is another answer
        # a one-sided test: losses that are higher, or equal within the margin, are not lower
        (-0.1, 0.0001, LOWER, True),
        (0.0, 0.0001, LOWER, False),
        (-0.01, 0.0001, LOWER, False),
        (0.1, 0.0001, LOWER, False),
        (-0.1, 0.2, LOWER, None),
    ],
)
@pytest.mark.parametrize("curve", ["eval", "train"])
def test_losses_are_equivalent_or_lower_or_not_or_undecided(shift, noise, how, expected, curve):
    ours = losses("zero2", (2 + n / 50 + shift + noise * (-1) ** n for n in range(4)))
    finding = compared_losses(*ours, *losses("ddp", (2 + n / 50 for n in range(4))), curve=curve, **how)
    assert finding.value is expected
    assert f"margin of {how.get('margin', 0.01):.3%}; seed to seed" in finding.working


def test_curves_that_cross_are_not_the_same_because_their_means_are():
    """Each quarter of a training curve must hold."""
    values = [2 + n / 1000 for n in range(3)]
    ours, theirs = losses("zero2", values), losses("ddp", values)
    assert compared_losses(*ours, *theirs, curve="train").value is True
    for fields in ours:
        shifts = [-0.05] * 6 + [0.05] * 6
        fields["loss"]["train"] = [loss + shift for loss, shift in zip(fields["loss"]["train"], shifts, strict=True)]
    crossing = compared_losses(*ours, *theirs, curve="train")
    assert crossing.value is False
    assert "quarter" in crossing.working
    assert compared_losses(*ours, *theirs, curve="eval").value is True


def test_too_few_or_too_unlike_seeds_show_nothing():
    """With three seeds far apart, no test shows that the arms differ, and none that they are equal."""
    finding = compared_losses(*losses("zero2", (1.0, 2.0, 3.0)), *losses("ddp", (1.1, 2.1, 2.9), first=10))
    assert (finding.value, finding.missing) == (None, "more seeds: see the working")
    two = seeds("zero2", 2) + seeds("ddp", 2)
    assert "2 seeds, but 3 are needed" in compared_losses(*two).working
    again = [fields | {"run_id": fields["run_id"] + "b"} for fields in two]
    assert compared_losses(*two, *again).value is None, "a seed twice counts once"


def test_the_trainings_inside_a_run_of_the_published_script():
    """The second continues the first's weights as published; with a fresh model it repeats the first."""
    sides = {"of": {"training": 1}, "to": {"training": 0}}
    runs = gathered(*(script(f"{repair}{n}", repair, seed=n) for repair in ("none", "engaged") for n in range(3)))
    for repair, alike in (("none", False), ("engaged", True)):
        finding = same_loss(runs, claim("convergence"), **sides, where={"repair": repair}, margin=0.01)
        assert finding.value is alike
    finding = ratio(runs, claim("convergence"), quantity="eval_loss", **sides, where={"repair": "none"})
    assert finding.value == pytest.approx(0.301 / 0.601, rel=0.01)
    with pytest.raises(Stop, match="A training of the script has no 'step_s'"):
        ratio(runs, claim("time"), quantity="step_s", **sides, where={"repair": "none"})


# --- values ----------------------------------------------------------------------------------------------------------


def test_of_ranks_the_one_that_holds_most():
    fields = finished(memory__per_rank__1__host_peak_bytes=9 * 10**8)
    assert metrics.value(shaped.record(fields), "host_peak_bytes") == 9 * 10**8
    unknown = shaped.record(fields, memory__per_rank__0__host_peak_bytes=None)
    assert metrics.value(unknown, "host_peak_bytes") is None, "the unknown could be larger"


def test_every_quantity_is_in_a_complete_record_and_unknown_in_an_empty_one():
    final = {"step": 1, "eval_loss": 1, "accuracy": 1, "perplexity": 1}
    more = {"observed__saved": {"bytes": 1, "parameters": 1, "dtypes": []}, "loss__eval": [final]}
    fields = finished(gpu=True, energy__joules_per_rank=[1.0, 2.0], **more)
    for rank in fields["memory"]["per_rank"]:
        rank |= {"nvme_written_bytes": 1, "nvme_read_bytes": 1}
    complete, empty = shaped.record(fields), Record(run_id="empty", started_utc="")
    assert [name for name in metrics.QUANTITIES if metrics.value(complete, name) is None] == []
    assert [name for name in metrics.QUANTITIES if metrics.value(empty, name) is not None] == []
