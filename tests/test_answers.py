"""The answers of the index and of the README: each sentence and mark is what the records and kept predictions say."""

import re

import pytest

from study.io.numbers import nats
from study.records import runs as records
from study.report import answers, readme, side_by_side, style
from study.report.topics import memory
from study.report.topics.claims import Judged
from study.spec.arms import ROOT

KEPT = ROOT / "reports" / "cpu-2core" / "runs"


@pytest.fixture(scope="module")
def kept():
    return records.load([KEPT / "smoke", KEPT / "at_scale"])


@pytest.fixture(scope="module")
def index(kept):
    return {answer.name: answer for answer in answers.answers(kept)}


def texts(answer) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", style.svg(answer.figure, answer.name))


def test_every_answer_has_a_figure_its_basis_and_its_machine(index):
    assert list(index) == ["losses", "memory", "time", "traffic"]
    for answer in index.values():
        assert answer.figure
        assert len(answer.rows)
        assert answer.bases
        assert answer.where
        assert answer.question.endswith("?")
    assert answers.VIRTUAL in index["memory"].bases
    assert index["time"].bases == (answers.PREDICTED, answers.PUBLISHED), "nothing was measured on a GPU here"


def test_memory_is_that_of_the_records_with_prediction_and_published_beside_it(index, kept):
    """Recomputed from the records themselves. What offloads is predicted: without a GPU its split is not measured."""
    rows = index["memory"].rows
    rows = rows[rows["model"] == "Llama-3-8B"]
    chosen = [run for run in kept.done if run.model == "llama3-8b" and run.ranks == 8 and run.requested.checkpointing]
    assert len(chosen) >= 8
    drawn = texts(index["memory"])
    measured, predicted = (answers.totals(rows, basis) for basis in (answers.VIRTUAL, answers.PREDICTED))
    assert measured.keys() == {run.arm for run in chosen if not memory.has_one_memory(run)}
    for run in chosen:
        if run.arm in measured:
            assert measured[run.arm] == sum(run.components.values())
            assert measured[run.arm] == pytest.approx(predicted[run.arm], rel=0.024), "as the scoreboard has it"
            assert f"{measured[run.arm] / 1e9:.3g} GB" in drawn
    for arm, name in (("ddp", "DDP"), ("zero1", "stage 1"), ("zero2", "stage 2"), ("zero3", "stage 3")):
        assert f"{measured[arm] / 1e9:.3g} GB under {name}" in index["memory"].sentence
    published = rows[rows["basis"] == answers.PUBLISHED].set_index("arm")["bytes"].to_dict()
    assert published == {"zero1": 50.065e9, "zero2": 36.455e9, "zero3": 25.121e9}, "tohtana/ds_verify_loss"
    assert "**On a tiny model it costs memory,**" in index["memory"].more


def test_offloading_takes_less_gpu_memory_than_the_same_stage_without_it(index):
    """Drawn as one bar with what is on the host, it seemed to take more."""
    rows = index["memory"].rows
    rows = rows[rows["model"] == "Llama-3-8B"]
    on_gpu = answers.totals(rows, answers.PREDICTED)
    on_host = rows[rows["memory"] == answers.HOST].set_index("arm")["bytes"].to_dict()
    assert on_host.keys() == {"zero2_cpu", "zero3_cpu"}
    for stage in ("zero2", "zero3"):
        assert on_gpu[f"{stage}_cpu"] < on_gpu[stage]
        assert on_host[f"{stage}_cpu"] > 12e9, "the optimizer states of an eighth of 8 billion parameters, and more"
    assert "host and device are one memory" in index["memory"].figure.get_supxlabel().replace("\n", " ")


def test_a_sentence_turns_with_its_rows(index, kept):
    memory = answers.of_memory(kept.select(virtual=False))
    assert memory.sentence.startswith("**On a tiny model it costs memory,** because")
    assert memory.command == answers.AT_SCALE, "sizes that people train are missing, and that is said"
    factors = memory.rows["arm"].map(lambda arm: 1 if arm == "ddp" else 0.1)
    assert answers.memory_in_words(memory.rows.assign(bytes=memory.rows["bytes"] * factors))[0].startswith("**Yes")
    rows = index["traffic"].rows
    less = rows.assign(times=rows["arm"].map(lambda arm: 1.0 if arm == "ddp" else 0.2))
    assert answers.traffic_in_words(less).startswith("**No.**")
    assert "paper expects 1 for stages 1 and 2" in index["traffic"].sentence
    assert "paper expects" not in answers.traffic_in_words(less)
    alike = index["time"].rows.assign(seconds=1.0, over_ddp_low=0.9, over_ddp_high=1.5)
    assert answers.time_in_words(alike).startswith("**No.**")
    unsure = alike.assign(seconds=alike["arm"].map(lambda arm: 1.2 if arm == "zero3" else 1.0))
    assert answers.time_in_words(unsure).startswith("**Probably with stage 3.**")
    assert answers.time_in_words(unsure.assign(over_ddp_low=1.11)).startswith("**Yes with stage 1, stage 2")


def test_losses_are_those_of_a_training_that_learns(index):
    answer = index["losses"]
    worst = answer.rows["difference"].max()
    assert 0 < worst < answers.FP32_NOISE
    assert nats(worst) in answer.sentence
    assert answer.sentence.startswith("**No.**")
    curve = answer.rows.groupby("step")["loss"].mean()
    assert curve.iloc[-1] < curve.iloc[0] - 1, "nats"
    assert answer.rows["arm"].nunique() == 12
    assert (nats(0.0), nats(3.6e-7), nats(0.012)) == ("0 nats", "4e-7 nats", "0.01 nats")


def test_traffic_and_time_say_for_how_many_passes(index, kept):
    """Stage 2 all-reduces in each pass and gathers once, DDP all-reduces once: (8 x 2 + 1) / 2 times its bytes."""
    sent = index["traffic"].sentence
    assert "1.5 with stage 2" in sent.partition("With 8 passes")[0]
    assert "1.5 with stage 1, 8.5 with stage 2 and 12 with stage 3" in sent.partition("With 8 passes")[2]
    assert "With 4 passes of 512 tokens: 1.04 with stage 1, 1.78 with stage 2" in index["time"].sentence
    findings = readme.findings("runs", Judged(kept, []))
    assert sent in findings
    assert "passes in a step: 1" in " ".join(re.findall(r"<text[^>]*>([^<]+)</text>", readme.picture(kept)))


def test_traffic_has_no_paper_for_what_the_paper_does_not_know(index):
    rows = index["traffic"].rows
    of_paper = set(rows[rows["source"] == "ZeRO paper"]["arm"])
    assert of_paper >= {"ddp", "zero1", "zero3"}
    assert not [arm for arm in of_paper if arm.startswith("fsdp2")]


def test_over_no_runs_each_says_what_makes_them():
    nothing = records.Runs(())
    for answer in answers.answers(nothing):
        assert answer.figure or answer.command.startswith("study sweep "), answer.name


# --- the README's picture and findings -----------------------------------------------------------------------------


def test_findings_and_picture_have_the_records_numbers(kept):
    """Recomputed from the records themselves, without the tables that the picture is drawn from."""
    at_scale = {
        run.arm: run for run in kept.done if run.folder.name.startswith("llama3-8b") and run.requested.checkpointing
    }
    text = readme.findings("runs", Judged(kept, []))
    for arm in ("zero1", "zero2", "zero3"):
        assert f"{at_scale[arm].tracked_bytes / 1e9:.1f} GB under stage {arm[-1]}" in text
    assert at_scale["ddp"].tracked_bytes > at_scale["zero1"].tracked_bytes > at_scale["zero3"].tracked_bytes
    assert "the losses of 11 arms" in text
    assert "7.65 to 6.51" in text, "gpt-tiny on wikitext learns"
    drawn = re.findall(r"<text[^>]*>([^<]+)</text>", readme.picture(kept))
    plain = [run for run in at_scale.values() if not memory.has_one_memory(run)]
    assert {f"{run.tracked_bytes / 1e9:.3g} GB" for run in plain} <= set(drawn)
    assert "5.81 GB + 20.6 GB host" in drawn, "as `study estimate --arm zero3_cpu` has it"
    sent = sum(at_scale["zero2"].traffic[kind] * times for kind, times in (("all_reduce", 2), ("all_gather", 1)))
    rows = answers.sent(kept)
    counted = rows[(rows["arm"] == "zero2") & (rows["source"] == "counted")]["times"].sum()
    assert counted == pytest.approx(sent / (2 * 2 * at_scale["zero2"].parameters), rel=0.01), "of 16-bit gradients"


def test_where_a_panel_lacks_its_records_there_is_no_picture(kept):
    assert "headline" not in readme.findings("runs", Judged(kept.select(virtual=False), []))


def test_a_label_of_a_group_is_words():
    label = "imdb, bert-tiny, fp32, rows/pass 8, passes 1, tokens 64, epochs 2.0, environment A"
    words = "imdb, bert-tiny, fp32, 8 rows per pass, 1 pass, 64 tokens, 2 epochs, environment A"
    assert style.conditions(label) == words


# --- what is kept --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_kept_is_what_theory_says_now():
    now, kept = side_by_side.predicted(), side_by_side.read()
    assert now["advice"] == kept["advice"]
    for ours, theirs in zip(now["steps"], kept["steps"], strict=True):
        assert ours == pytest.approx(theirs)
