"""Host memory while a model is loaded: the prediction, the kept cells, and what an advice says about it."""

import json

from conftest import ROOT

from study.predict.advise import advise
from study.predict.architecture import named
from study.predict.memory.loading import HOST_PROCESS_BYTES, Load, loaded_bytes, on_gpus_bytes, peaks
from study.predict.question import Question
from study.report.advice import in_words

WEIGHTS = 4 * 124_439_808  # of gpt2
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


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


def test_an_advice_warns_of_a_host_that_cannot_load():
    for memory, warns in (("256GB", True), ("1TB", False)):
        question = Question.of(named("llama3-8b"), 8, "H100", precision="fp32", host_memory=memory)
        said = in_words(advise(question))
        assert any("To load it" in line for line in said) == warns


def test_30_peaks_are_predicted_within_5_percent_half_of_them_held_out():
    held_out = []  # of each close one
    for row in map(json.loads, (ROOT / "reports/cpu-2core/loading.jsonl").read_text().splitlines()):
        phases = {name: row["phases"][name] for name in ("from_pretrained", "prepare") if name in row["phases"]}
        if {"prepare", row["last"]} & {*row["phases"]}:
            sizes = (ELEMENT_BYTES[row["saved"]], ELEMENT_BYTES[row["dtype"]])
            cell = Load(named(row["model"]), row["way"], row["ranks"], *sizes, reads_whole=row["files"] == "legacy")
            needed = max(peaks(cell)[name] for name in phases)
            measured = max(phase["peak_bytes"] + phase["shared_bytes"] for phase in phases.values())
            held_out += [row["held_out"]] * (abs(needed / measured - 1) <= 0.05)
    assert len(held_out) >= 30
    assert sum(held_out) >= 15
