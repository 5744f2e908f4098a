"""Checks that need no run: arithmetic, missing statements, theory, bounds, what fits, sources."""

import math

import pytest

from study.errors import Stop
from study.ledger import citations
from study.ledger.arguments import calls_of
from study.ledger.checks import KINDS
from study.ledger.citations import cited, read_form, searched
from study.ledger.memory_checks import fits
from study.ledger.step_checks import bound
from study.ledger.theory_checks import arithmetic, quotient, stated
from study.predictor.outside import published
from study.predictor.outside.published import Row

WEIGHTS_TOO = {"stage": 3, "ranks": 4, "parameters": 1e9, "weights_too": True}
INFINITY = {"sequence": 1024, "bytes_per_s": 70e9, "peak_flops_per_s": 70e12, "moved": "weights_gradients"}
THEORY = KINDS["theory"].functions


def theory(quantity: str, **given):
    (call,) = calls_of(THEORY[quantity], given, "theory")
    return THEORY[quantity](**call)


@pytest.mark.parametrize(
    ("given", "expected", "working"),
    [
        ({"times": [2847, 8, 3600], "over": [144, 2048]}, 278.0, "2847 x 8 x 3600 / 144 / 2048 = 278"),
        ({"times": [2847, 8], "over": [144], "plus": [1]}, 159.2, "2847 x 8 / 144 + 1 = 159.2"),
        ({"plus": [4, 4, 1]}, 9, "4 + 4 + 1 = 9"),
        ({"over": [4]}, 0.25, "1 / 4 = 0.25"),
        ({"times": [45], "over": [76], "saved": True}, 1 - 45 / 76, "1 - 45 / 76 = 0.4079"),
    ],
)
def test_arithmetic_shows_what_it_did(given, expected, working):
    finding = arithmetic(**given)
    assert finding.value == pytest.approx(expected, rel=1e-3)
    assert finding.working == working


def test_nothing_is_divided_by_0():
    with pytest.raises(Stop, match="divides by 0"):
        arithmetic(times=[1], over=[0])


def test_stated_counts_and_names_what_is_not_said():
    finding = stated(needed=["seed", "batch", "learning rate"], given=["batch"])
    assert (finding.value, finding.working) == (2, "1 of 3 are given; not given: seed, learning rate")
    assert stated(needed=["seed"], given=["seed", "more"]).value == 0


def test_a_bound_is_a_share_of_the_peak():
    """20 billion parameters at 1200 samples of 1024 tokens a second: 6 N tokens, on eight A100 of 312 TFLOP/s."""
    speed = {"samples_per_s": 1200, "tokens_per_sample": 1024}
    finding = bound(parameters=20e9, gpus=8, gpu="A100-80GB", **speed)
    assert finding.value == pytest.approx(6 * 20e9 * 1200 * 1024 / (8 * 312e12))
    assert finding.value > 50
    assert bound(parameters=20e9, gpus=8, gpu="A100-80GB", tokens_per_s=1200 * 1024).value == finding.value
    with pytest.raises(Stop, match="a bound needs a speed"):
        bound(parameters=1, gpus=1, gpu="L4", samples_per_s=1)
    with pytest.raises(Stop, match="'A1' is not a known GPU"):
        bound(parameters=1, gpus=1, gpu="A1", tokens_per_s=1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"parameters": 1.4e9, "stage": 0, "gpu": "V100-32GB"}, "fits"),  # ZeRO paper: 16 bytes each
        ({"parameters": 7e9, "stage": 0, "gpu": "H100-80GB"}, "does not fit"),
        ({"parameters": 13e9, "stage": 2, "ranks": 8, "gpu": "H100-80GB"}, "fits"),
        ({"parameters": 13e9, "stage": 2, "ranks": 8, "gpu": "H100-80GB", "rest_bytes": 40e9}, "does not fit"),
        ({"parameters": 7e9, "stage": 0, "gpu": "H100-80GB", "recipe": "bf16-adam"}, "fits"),
        ({"parameters": 1e9, "stage": 0, "memory_bytes": 16e9}, "fits"),
        ({"parameters": 1e9, "stage": 0, "memory_bytes": 15.9e9}, "does not fit"),
        ({"model": "gemma2-9b", "arm": "zero3", "ranks": 8, "gpu": "H100-80GB"}, "fits"),
    ],
)
def test_states_fit_or_not(given, expected):
    finding = fits(**given, states_only=True)
    assert finding.value == expected
    assert "GB" in finding.working


def test_all_of_it_fits_or_not():
    given = {"model": "gemma2-9b", "ranks": 8, "gpu": "H100-80GB", "sequence": 2048, "attention": "eager"}
    assert fits(arm="ddp", **given).value == "does not fit"
    assert fits(arm="zero3", checkpointing=True, **given).value == "fits"
    assert fits(arm="zero3", micro_batch=64, **given).value == "does not fit"
    lean = fits(arm="zero3_cpu", checkpointing=True, host_memory_bytes=1e9, **given)
    assert (lean.value, "on the host" in lean.working) == ("does not fit", True)
    numbers = {"parameters": 20e9, "layers": 44, "hidden": 6144}
    assert fits(arm="zero3_cpu", ranks=8, gpu="A100-80GB", checkpointing=True, **numbers).value == "fits"


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"parameters": 1e9, "stage": 0}, "exactly one of gpu and memory_bytes"),
        ({"parameters": 1e9, "gpu": "L4", "states_only": True}, "neither arm nor stage is given"),
        ({"model": "gpt2", "gpu": "L4"}, "only an arm has more than model states"),
        ({"parameters": 1e9, "gpu": "L4", "arm": "ddp"}, "no model is given"),
        ({"model": "gpt2", "gpu": "L4", "arm": "zero9"}, "'zero9' is not an arm"),
    ],
)
def test_what_cannot_be_said_is_a_sentence(given, what):
    with pytest.raises(Stop, match=what):
        fits(**given)


@pytest.mark.parametrize(
    ("quantity", "expected", "given"),
    [
        ("parameters", 335_143_938, {"model": "bert-large"}),
        ("states_bytes", 16e9, {"stage": 0, "ranks": 8, "parameters": 1e9}),
        ("states_bytes", 2e9, {"stage": 1, "ranks": 4, "parameters": 1e9, "recipe": "fp32-adam", "part": "optimizer"}),
        ("states_bytes", 0.25, {"stage": 3, "ranks": 64, "parameters": 1}),
        ("states_saving", 1 - 3.75 / 16, {"stage": 2, "ranks": 8}),
        ("states_saving", 1 - 2 / 3.75, {"stage": 3, "over": 2, "ranks": 8}),
        ("states_ratio", 4, {"stage": 1, "ranks": "limit"}),
        ("states_ratio", 8, {"stage": 2, "ranks": "limit"}),
        ("states_ratio", math.inf, {"stage": 3, "ranks": "limit"}),
        ("states_ratio", 64, {"stage": 3, "ranks": 64}),
        ("states_ratio", 8, {"stage": 1, "ranks": 8, "part": "optimizer"}),
        ("largest_parameters", 2e9, {"stage": 0, "ranks": 1, "memory_bytes": 32e9}),
        ("largest_parameters", 8e9, {"stage": 3, "ranks": 8, "memory_bytes": 32e9, "rest_bytes": 16e9}),
        ("fewest_ranks", 750, {"stage": 3, "parameters": 1.5e12, "memory_bytes": 32e9}),
        ("fewest_ranks", math.inf, {"stage": 2, "parameters": 1.5e12, "memory_bytes": 32e9}),
        ("fewest_ranks", 1, {"stage": 0, "parameters": 1e9, "memory_bytes": 16e9}),
        ("rest_bytes", 7.5e9, {"memory_bytes": 45e9, "stage": 2, "ranks": 8, "parameters": 1e10}),
        # ZeRO-Offload, table 1: 2 M bytes on the device, and 14 M on the host.
        ("offloaded_states_bytes", 2e9, {"stage": 2, "ranks": 1, "home": "device", "parameters": 1e9}),
        ("offloaded_states_bytes", 14e9, {"stage": 2, "ranks": 1, "home": "host", "parameters": 1e9}),
        ("offloaded_states_bytes", 0, WEIGHTS_TOO | {"home": "device"}),
        ("offloaded_states_bytes", 4e9, WEIGHTS_TOO | {"home": "host"}),
        ("traffic_ratio", 1, {"stage": 2}),
        ("traffic_ratio", 1.5, {"stage": 3}),
        ("link_bytes_per_s", 900e9, {"link": "nvswitch", "directions": 2}),
        ("float_format", 8, {"dtype": "bf16", "bits": "exponent"}),
        ("float_format", 16, {"dtype": "fp16", "bits": "all"}),
        # ZeRO-Infinity, section 4: 70 GB/s keep a V100 of 70 TFLOP/s half busy at about 1000 operations a byte.
        ("offload_efficiency", 1024 / 2024, INFINITY | {"micro_batch": 1}),
        ("offload_efficiency", 2048 / 3048, INFINITY | {"micro_batch": 2}),
    ],
)
def test_theory_says_what_the_papers_say(quantity, expected, given):
    finding = theory(quantity, **given)
    assert finding.value == (expected if math.isinf(expected) else pytest.approx(expected, rel=0.01))
    assert finding.working


def test_a_quantity_over_the_same_elsewhere_or_over_another():
    given = {"where": {"parameters": 1e9, "ranks": 8}, "of": {"stage": 0}}
    assert quotient(quantity="states_bytes", to={"stage": 3}, **given).value == 8
    other = {"quantity": "offloaded_states_bytes", "stage": 2, "home": "device"}
    assert quotient(quantity="states_bytes", to=other, **given).value == 8


def test_one_recipe_is_found_from_three_memory_figures():
    """Figures computed with a recipe of 16 bytes give this recipe back; those of document 000 give another one."""
    of_16 = [theory("states_bytes", stage=stage, ranks=8, parameters=9e9).value + 5e9 for stage in (0, 2, 3)]
    given = {"memory_bytes": of_16, "stages": [0, 2, 3], "ranks": 8, "parameters": 9e9}
    assert theory("fitted_bytes_per_parameter", **given).value == pytest.approx(16)
    assert theory("fitted_bytes_per_parameter", **given, part="weights").value == pytest.approx(2)
    assert "5 GB are not states" in theory("fitted_bytes_per_parameter", **given).working
    printed = given | {"memory_bytes": [76e9, 45e9, 28e9], "parameters": 9.24e9}
    assert theory("fitted_bytes_per_parameter", **printed).value == pytest.approx(5.94, rel=0.01)
    with pytest.raises(Stop, match="stages 0, 2 and 3"):
        theory("fitted_bytes_per_parameter", **given | {"stages": [0, 1, 2]})


def test_what_deepspeed_moves_is_not_what_the_paper_says():
    given = {"arm": "zero2", "over": "ddp", "model": "gpt2"}
    assert theory("deepspeed_traffic_ratio", **given).value == pytest.approx(1.5, rel=1e-3)
    assert theory("deepspeed_traffic_ratio", unit="tensors", **given).value == pytest.approx(2, rel=1e-3)
    assert theory("deepspeed_traffic_ratio", accumulation=4, **given).value == pytest.approx(4.5, rel=1e-3)
    assert theory("traffic_bytes", arm="ddp", model="gpt2", ranks=8).value == pytest.approx(4 * 124_439_808)


def test_peaks_have_their_components():
    given = {"model": "gpt2", "ranks": 8, "micro_batch": 4}
    whole = theory("peak_bytes", arm="zero3", **given).value
    assert 0 < theory("peak_bytes", arm="zero3", part="moments", **given).value < whole
    saved = theory("peak_saving", arm="zero3", over="ddp", **given).value
    assert saved == pytest.approx(1 - whole / theory("peak_bytes", arm="ddp", **given).value)
    assert theory("activation_bytes", model="gpt2", micro_batch=8, sequence=512).value > 1e9


def test_time_is_an_interval_and_speed_its_inverse():
    arms = {"arm": "zero3", "over": "ddp", "model": "gemma2-9b", "sequence": 2048, "batch": 144, "micro_batch": 2}
    given = arms | {"gpus": 8, "gpu": "H100-80GB", "link": "nvswitch"}
    step = theory("step_ratio", **given)
    assert step.interval[0] < step.value < step.interval[1]
    speed = theory("step_ratio", **given, speed=True)
    assert speed.interval == pytest.approx((1 / step.interval[1], 1 / step.interval[0]))
    slow = theory("step_ratio", **given | {"link": "pcie3"})
    assert slow.interval[1] > step.interval[1], "a slower link, a slower stage 3"
    with pytest.raises(Stop, match="5 does not divide the 18 rows of a rank"):
        theory("step_ratio", **given | {"micro_batch": 5})


def test_a_quotient_of_intervals_is_an_interval():
    where = {"arm": "zero3", "over": "ddp", "model": "gpt2", "sequence": 512, "micro_batch": 8, "batch": 64}
    where |= {"gpus": 8, "gpu": "A100-80GB", "link": "nvlink3"}
    of, to = {"batch": 512}, {"batch": 64}
    finding = quotient(quantity="step_ratio", of=of, to=to, where=where)
    above, below = (theory("step_ratio", **where | side) for side in (of, to))
    assert finding.value == pytest.approx(above.value / below.value)
    expected = above.interval[0] / below.interval[1], above.interval[1] / below.interval[0]
    assert finding.interval == pytest.approx(expected)
    states = {"quantity": "states_bytes", "where": {"parameters": 1e9, "ranks": 8}}
    assert quotient(of={"stage": 0}, to={"stage": 3}, **states).interval is None


def test_other_precisions_are_compared():
    given = {"arm": "zero2", "over": "zero2", "model": "gpt2", "sequence": 1024, "batch": 8, "micro_batch": 8}
    given |= {"gpus": 1, "gpu": "V100-32GB"}
    step = theory("step_ratio", **given, precision="fp32", precision_over="bf16_cast")
    assert step.value > 2, "no TF32"
    assert "zero2 in fp32 over zero2 in bf16_cast" in step.working


def test_a_gpu_is_used_for_a_share_of_its_peak_or_of_the_time():
    given = {"arm": "zero3_cpu", "model": "gpt3-13b", "gpus": 1, "gpu": "A100-40GB", "sequence": 2048, "batch": 32}
    given |= {"micro_batch": 16, "checkpointing": True}
    peak, time = (theory("utilization", counts=counts, **given) for counts in ("operations", "kernels"))
    assert 0 < peak.interval[0] < peak.value < peak.interval[1] < 1
    assert peak.value < time.value <= 1
    assert peak.value < 0.8, "recomputed operations are not counted, and the host updates"


@pytest.fixture
def known(tmp_path, monkeypatch):
    """Two sources, each read in its own way."""
    entry = '[[source]]\nid = "{}"\ntitle = "A paper"\naddress = "https://arxiv.org/abs/1910.02054"\nread = "{}"\n'
    (tmp_path / "sources.toml").write_text(entry.format("P1", "original") + entry.format("P2", "translation"))
    monkeypatch.setattr(citations, "FOLDER", tmp_path)
    return tmp_path


def test_a_source_gives_a_value_or_agrees_or_is_silent(known):
    value = cited(source="P2", where="table 4", sentence="2.57", value=0.26)
    assert (value.value, value.evidence, value.sentence) == (0.26, ("P2",), "2.57")
    assert "P2 (translation), table 4" in value.working, "how it was read is told"
    how = {"where": "section 7", "sentence": "The volume is 3.", "says": "stage 3 moves 1.5 times"}
    agrees = cited(source=["P1", "P2"], agrees=False, **how)
    assert (agrees.value, agrees.instead_of, agrees.evidence) == (False, True, ("P1", "P2"))
    silent = searched(looked_in=["P1", "P2"], where="all of it", source="P1", nearest="It is large.")
    assert (silent.value, silent.without, silent.sentence) == (None, "inconclusive", "It is large.")
    assert "read: P1 (original), P2 (translation)" in silent.working


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"source": "P9", "value": 1}, "'P9' is not a source"),
        ({"source": "P1"}, "exactly one of value and agrees"),
        ({"source": "P1", "value": 1, "agrees": True, "says": "so"}, "exactly one of value and agrees"),
        ({"source": "P1", "agrees": True}, "but not what the source says"),
    ],
)
def test_a_citation_is_whole(known, given, what):
    with pytest.raises(Stop, match=what):
        cited(where="section 1", sentence="So it is.", **given)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('[[source]]\nid = "P1"\ntitle = "A"\nread = "original"\n', "address is missing"),
        ('[[source]]\nid = "P1"\ntitle = "A"\naddress = "a"\nread = "hearsay"\n', "got 'hearsay'"),
        ('[[source]]\nid = "P1"\ntitle = "A"\naddress = "a"\nread = "original"\n' * 2, "source P1 appears twice"),
        ("[[source", "sources.toml' cannot be read"),
    ],
)
def test_the_list_of_sources_is_checked(known, text, what):
    (known / "sources.toml").write_text(text)
    with pytest.raises(Stop, match=what):
        citations.sources()


def test_the_list_of_sources_is_parsed_once(known, monkeypatch):
    """A report asks for it more than a thousand times."""
    read = []
    monkeypatch.setattr(citations, "read_form", lambda *given: read.append(given) or read_form(*given))
    for _ in range(3):
        assert citations.sources().keys() == {"P1", "P2"}
    assert len(read) == 1


def test_others_speeds_are_compared_on_one_machine_and_by_rows():
    given = {"model": "M", "gpu": "G", "n_gpus": 2, "seq": 64, "micro_batch": 1, "step_time_s": 1.0}
    empty = dict.fromkeys(Row.model_fields) | {"set": "known"} | given
    listed = [
        Row.model_validate(empty | {"source": source, "arm": arm, "micro_batch": rows, "n_gpus": gpus})
        for source, arm, rows, gpus in [
            ("a", "ddp", 1, 2),
            ("a", "zero1", 3, 2),
            ("b", "zero1", 9, 2),
            ("a", "zero1", 9, 4),
        ]
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published, "known", lambda: listed)
        citations._comparable.cache_clear()
        found = citations.published(of={"arm": "^zero"}, to={"arm": "^ddp$"})
        nothing = citations.published(of={"arm": "^fsdp"}, to={"arm": "^ddp$"})
    citations._comparable.cache_clear()
    assert (found.value, found.interval, found.evidence) == (3, (3, 3), ("a",))
    assert nothing.value is None
    with pytest.raises(Stop, match="'arms' is not a column"):
        citations.published(of={"arms": "zero"}, to={"arm": "ddp"})
