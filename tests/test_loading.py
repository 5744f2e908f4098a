"""Host memory while a model is loaded: the cells and their halves, the prediction, and what is said about it."""

import json
from typing import get_args

import pytest
from conftest import ROOT

from study.predict.advise import advise
from study.predict.architecture import named
from study.predict.memory.loading import HOST_PROCESS_BYTES, Load, Way, loaded_bytes, on_gpus_bytes, peaks
from study.predict.question import Question
from study.report.advice import in_words

WEIGHTS = 4 * 124_439_808  # of gpt2
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


def rows_of(name: str) -> list[dict]:
    return list(map(json.loads, (ROOT / f"reports/cpu-2core/{name}.jsonl").read_text().splitlines()))


def load(way: str, **values) -> Load:
    return Load(named("gpt2"), way, **({"ranks": 8, "saved_bytes": 4, "weight_bytes": 4} | values))


def test_a_copy_of_each_rank_is_made_only_if_the_type_changes_or_the_file_cannot_be_mapped():
    assert loaded_bytes(load("plain")) == 0
    assert loaded_bytes(load("plain", saved_bytes=2)) == 8 * WEIGHTS
    assert loaded_bytes(load("plain", reads_whole=True)) == 8 * WEIGHTS
    assert loaded_bytes(load("plain", reads_whole=True, saved_bytes=2)) == 8 * 1.5 * WEIGHTS
    assert loaded_bytes(load("fsdp2_efficient", saved_bytes=2)) == 8 * WEIGHTS
    assert loaded_bytes(load("meta", saved_bytes=2)) == WEIGHTS


def test_beside_gpus_only_copies_in_another_type_are_in_host_memory():
    assert on_gpus_bytes(named("gpt2"), 8, weight_bytes=2) == 8 * HOST_PROCESS_BYTES
    assert on_gpus_bytes(named("gpt2"), 8, weight_bytes=4) == 8 * (HOST_PROCESS_BYTES + WEIGHTS)


@pytest.mark.parametrize("way", get_args(Way))
def test_more_ranks_never_need_less(way):
    for values in ({}, {"saved_bytes": 2}, {"reads_whole": True}):
        needed = [max(peaks(load(way, ranks=ranks, **values)).values()) for ranks in (1, 2, 4, 8)]
        assert needed == sorted(needed)


def test_an_advice_warns_of_a_host_that_cannot_load():
    for memory, warns in (("256GB", True), ("1TB", False)):
        question = Question.of(named("llama3-8b"), 8, "H100", precision="fp32", host_memory=memory)
        said = in_words(advise(question))
        assert any("To load it" in line for line in said) == warns


def test_30_peaks_are_predicted_within_5_percent_half_of_them_held_out():
    held_out = []  # of each close one
    for row in rows_of("loading"):
        phases = {name: row["phases"][name] for name in ("from_pretrained", "prepare") if name in row["phases"]}
        if {"prepare", row["last"]} & {*row["phases"]}:
            sizes = (ELEMENT_BYTES[row["saved"]], ELEMENT_BYTES[row["dtype"]])
            cell = Load(named(row["model"]), row["way"], row["ranks"], *sizes, reads_whole=row["files"] == "legacy")
            needed = max(peaks(cell)[name] for name in phases)
            measured = max(phase["peak_bytes"] + phase["shared_bytes"] for phase in phases.values())
            held_out += [row["held_out"]] * (abs(needed / measured - 1) <= 0.05)
    assert len(held_out) >= 30
    assert sum(held_out) >= 15


def test_releases_of_2026_make_a_copy_on_each_rank_though_rank_0_alone_should_load():
    copies = {}
    for row in rows_of("loading_releases"):
        if row["outcome"] == "loads":
            ranks = zip(
                row["phases"]["from_pretrained"]["rank_peak_bytes"],
                row["phases"]["imports"]["private_bytes"],
                strict=True,
            )
            _, *others = [peak - before for peak, before in ranks]
            size = row["parameters"] * ELEMENT_BYTES[row["dtype"]]
            copies.setdefault(row["software"]["transformers"], max(others) / size)
    assert copies["5.0.0"] > 1.2
    assert copies["5.6.0"] > 1.2
    assert copies["4.57.6"] < 0.2
