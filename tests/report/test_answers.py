"""The answers of the index: each number and mark is what the records and kept predictions say."""

import re
from dataclasses import replace

import pytest

from study.core.arms import NAMES, ROOT
from study.core.text import nats, size
from study.predict.front import estimate, papers
from study.records import runs as records
from study.report import answers
from study.report.of_record import training_of
from study.report.topics import memory, stages, traffic
from study.report.topics.arms import by_task, in_words
from tests.shaped import failed, finished, put

KEPT = ROOT / "reports/cpu-2core/runs"
OFFLOADING = ("zero2_cpu", "zero3_cpu")
STAGES = ("zero1", "zero2", "zero3")
LARGE, TINY = "llama3-8b, virtual ranks", "gpt-tiny, real ranks"


@pytest.fixture(scope="module")
def kept():
    return records.load([KEPT / "smoke", KEPT / "at_scale"])


@pytest.fixture(scope="module")
def index(kept):
    return {answer.name: answer for answer in answers.answers(kept)}


def test_memory_is_that_of_the_records_with_the_prediction_beside_it(index, kept):
    """Recomputed from the records themselves. Without a GPU no arm that offloads is there: its sum has the host's."""
    rows = index["memory"].rows.query("kind == 'virtual'")
    totals = rows.groupby(["source", "arm"])["bytes"].sum()
    shown = index["memory"].table.set_index("arm")[LARGE]
    chosen = kept.select(model="llama3-8b", ranks=8, checkpointing=True).done
    assert len(chosen) >= 8
    for run in chosen:
        held_bytes, arm = memory.held_bytes(run), run.record.arm
        if arm in OFFLOADING:
            assert arm not in shown
            assert ("measured", arm) not in totals
            continue
        assert totals["measured", arm] == held_bytes
        assert totals["predicted", arm] == pytest.approx(held_bytes, rel=0.024), "as the scoreboard has it"
        assert shown[arm] == size(held_bytes)
    assert [shown[arm] for arm in ("ddp", *STAGES)] == ["161 GB", "44.8 GB", "36.3 GB", "22.1 GB"]
    assert {run.record.arm for run in chosen} > {*OFFLOADING}


def test_losses_are_those_of_a_training_that_learns(index):
    rows = index["losses"].rows
    assert 0 < rows["difference"].max() < 1e-5, "nats: the order of additions in fp32"
    assert rows["arm"].nunique() == 12
    table = index["losses"].table
    assert nats(rows["difference"].max()) in set(table["largest_difference"])
    assert (table["last_loss"] < table["first_loss"] - 1).all()
    assert (nats(0.0), nats(3.6e-7), nats(0.012)) == ("0 nats", "4e-7 nats", "0.01 nats")


def test_traffic_is_in_multiples_of_ddps(index):
    sent = index["traffic"].table.set_index("arm")
    assert [sent[LARGE][arm] for arm in ("ddp", *STAGES)] == ["1", "1.5", "1.5", "1.44"]
    assert [sent[TINY][arm] for arm in ("ddp", *STAGES)] == ["1", "1.5", "1.5", "1"]
    rows = index["traffic"].rows
    of_paper = rows[rows["source"] == traffic.PAPER]
    assert {*of_paper["arm"]} == {arm for arm in rows["arm"] if not arm.startswith("fsdp2")}


def test_with_more_passes_stages_2_and_3_send_as_the_page_says(kept):
    sent = {}
    for run in answers.of_scale(kept):
        training = training_of(run.record)
        several = estimate(replace(training, batch=replace(training.batch, passes=8)))
        sent[run.record.arm] = papers.wire_bytes(several.traffic, 8)
    over = [sent[arm] / sent["ddp"] for arm in STAGES]
    assert over == pytest.approx([1.5, 8.5, 11.52], abs=0.001)
    page = (ROOT / "study/report/templates/index.html").read_text()
    assert "8.5 and 11.5 times as much as DDP with 8 micro-batches, by prediction. Stage 1 stays at 1.5." in page


@pytest.mark.parametrize("arms", [(), ("zero2", "zero3")])
def test_without_runs_of_ddp_kept_ones_are_shown_and_what_makes_them(arms):
    """Runs of the reader that are compared with nothing are not shown."""
    for answer in answers.answers(records.load(KEPT / "smoke").select(arm=[*arms])):
        assert answer.figure is not None
        assert answer.command.startswith("study sweep "), answer.name


def test_a_newcomer_sees_kept_records_at_scale_marked_and_his_own_beside_them():
    """On a tiny model ZeRO costs memory: that alone under “it saves memory” would be the opposite of the sentence."""
    own = {answer.name: answer for answer in answers.answers(records.load(KEPT / "smoke"))}
    for name in ("memory", "traffic"):
        assert [*own[name].table] == ["arm", f"{LARGE} (kept)", TINY]
        drawn = [axes.get_title("left") for axes in own[name].figure.axes]
        assert "(kept)" in drawn[0].replace("\n", " "), drawn
        assert own[name].command == answers.AT_SCALE
    assert not own["losses"].command, "these are his own"
    both = answers.answers(records.load([KEPT / "smoke", KEPT / "at_scale"]))
    assert not [answer.command for answer in both if answer.command]
    assert not [title for answer in both for title in answer.table if "kept" in title]


# --- study compare --arms, with which `make study` ends --------------------------------------------------------------

ANSWERS = {"Memory": "peak bytes", "Traffic": "sent bytes"}


def test_each_task_has_a_table_in_the_order_of_arms_and_answers_with_its_numbers():
    compared = [each for each in by_task(records.load(KEPT / "smoke")) if len(each["rows"]) > 5]
    assert {each["group"].split(",")[0] for each in compared} == {"imdb", "wikitext"}
    for each in compared:
        of_arm = {row["arm"]: row for row in each["rows"]}
        assert [*of_arm] == sorted(of_arm, key=NAMES.index)
        lines = {line.partition(":")[0]: line for line in each["in_words"]}
        for answer, name in ANSWERS.items():
            over = [of_arm[f"zero{stage}"][name] / of_arm["ddp"][name] for stage in (1, 2, 3)]
            found = [float(number) for number in re.findall(r"([0-9.]+) times", lines[answer])]
            assert found == pytest.approx(over, rel=0.05)
        furthest = max(row["furthest nats"] for row in each["rows"] if row["furthest nats"] is not None)
        assert f"{nats(furthest)} of ddp" in lines["Losses"]
        assert "buckets outweigh" in lines["Memory"], "or a reader thinks that ZeRO always costs memory"
        assert over[0] == pytest.approx(1.5, rel=0.01), "what stage 1 sends on rings, as the report has it"


def timed(arm: str, *seconds: float, **changes) -> list[dict]:
    return [
        finished(f"{arm}-{turn}-{step_s}", arm, time__step_s=[step_s] * 3, **changes)
        for turn, step_s in enumerate(seconds)
    ]


@pytest.mark.parametrize("ddp", [[1.0], [1.0, 1.1], [1.0, 1.1, 1.2]])
@pytest.mark.parametrize("zero2", [[2.0], [2.0, 2.1], [2.0, 2.1, 2.2]])
def test_a_ratio_of_times_has_the_spread_of_repeats_or_is_none(tmp_path, ddp, zero2):
    (group,) = by_task(records.load(put(tmp_path, *timed("ddp", *ddp), *timed("zero2", *zero2))))
    (line,) = [line for line in group["in_words"] if line.startswith("Time")]
    if len(ddp) == len(zero2) == 3:
        ratio = "Time: stage 2 1.9 times (1.7 to 2.2 times) DDP's seconds, over all pairs of repeats."
        assert line == f"{ratio} They are of CPUs and say nothing of GPUs."
    else:
        assert line == "Time: no ratios, as fewer than three runs of an arm show no spread; the table has seconds."


def test_seconds_of_cpus_are_said_to_be_of_cpus(tmp_path):
    for folder, gpu in (("cpu", False), ("gpu", True)):
        mine = [*timed("ddp", 1.0, 1.1, 1.2, gpu=gpu), *timed("zero2", 2.0, 2.1, 2.2, gpu=gpu)]
        (group,) = by_task(records.load(put(tmp_path / folder, *mine)))
        (line,) = [line for line in group["in_words"] if line.startswith("Time")]
        assert line.endswith("They are of CPUs and say nothing of GPUs.") is not gpu


def test_repeats_of_another_cell_or_machine_give_no_spread(tmp_path):
    """One of the same cell and machine, and three each of another batch and of another processor."""
    others = {"requested__micro_batch": 2}, {"hardware__cpu": "another"}
    put(tmp_path, *timed("ddp", 1.0, 1.1, 1.2), *timed("zero2", 2.0))
    for number, change in enumerate(others, 1):
        put(tmp_path, *timed("zero2", *(2 + number / 10 + turn / 100 for turn in range(3)), **change))
    for group in by_task(records.load(tmp_path)):
        assert not [line for line in group["in_words"] if line.startswith("Time") and " times " in line]


def test_an_arm_that_stands_apart_is_named_and_not_called_near():
    (group,) = [each for each in by_task(records.load(KEPT / "smoke")) if "bert" in each["group"]]
    wrong = [row | {"furthest nats": 0.5} if row["arm"] == "zero2" else row for row in group["rows"]]
    near, apart = in_words(wrong)[:2]
    assert "10 arms are within 4e-7 nats of ddp" in near
    assert apart == "But zero2 differs by up to 0.5 nats."


@pytest.mark.parametrize("newest", [1, 2])
def test_a_row_is_of_the_seed_that_all_arms_have_and_its_distance_of_all_seeds(tmp_path, newest):
    """Whichever seed an arm trained last, and also where one trained a seed that nobody else has."""
    for arm, apart in (("ddp", 0), ("zero2", 0.01)):
        for seed in (1, 2):
            turn = 2 if seed == (newest if arm == "ddp" else 3 - newest) else 1
            mine = finished(f"{arm}-{seed}", arm, seed=seed, loss=2 + seed + apart * seed)
            put(tmp_path, mine | {"started_utc": f"2026-01-02T03:04:0{turn}+00:00"})
    put(tmp_path, finished("c", "ddp", seed=0) | {"started_utc": "2026-01-03T03:04:05+00:00"})
    (group,) = by_task(records.load(tmp_path))
    ddp, zero2 = group["rows"]
    assert (ddp["seed"], zero2["seed"]) == (1, 1)
    assert (ddp["last loss"], zero2["last loss"]) == (3, pytest.approx(3.01))
    assert zero2["furthest nats"] == pytest.approx(1.5 * 0.02), "of seed 2"


@pytest.mark.parametrize("change", [{"requested__steps": 3}, {"requested__steps": None, "requested__epochs": 2.0}])
def test_trainings_of_another_length_are_another_task(tmp_path, change):
    put(tmp_path, finished("a", "ddp"), finished("b", "zero2", **change), finished("c", "zero1"))
    compared = by_task(records.load(tmp_path))
    assert [[row["arm"] for row in group["rows"]] for group in compared] == [["ddp", "zero1"]]


def test_kept_rows_are_of_one_seed_and_one_number_of_ranks():
    compared = by_task(records.load([KEPT / "guelph", KEPT / "stages"]))
    assert len(compared) > 10
    for group in compared:
        assert len({(row["seed"], row["ranks"]) for row in group["rows"]}) == 1, group
        assert len({round(row["last loss"], 2) for row in group["rows"]}) == 1, group


def test_what_cannot_be_compared_is_not(tmp_path):
    """Another seed, weights that are drawn in place, a run that failed; and without DDP nothing has a ratio."""
    put(tmp_path / "a", finished("a", "ddp"), finished("b", "zero3", loss=3.0, requested__init="in_place"))
    put(tmp_path / "a", finished("c", "zero2", loss=2.5), finished("d", "zero1", seed=7))
    (group,) = by_task(records.load(tmp_path / "a"))
    furthest = {row["arm"]: row["furthest nats"] for row in group["rows"]}
    assert furthest == {"ddp": None, "zero1": None, "zero2": pytest.approx(0.75), "zero3": None}
    assert "The losses of zero1 are not compared: another seed, data or steps." in group["in_words"]
    in_place = "The losses of zero3 are not compared: each run draws its own first weights, in place."
    assert in_place in group["in_words"], "their seed is DDP's"
    (group,) = by_task(records.load(put(tmp_path / "b", finished("a", "zero1"), failed("c", arm="zero3", seed=42))))
    (line,) = group["in_words"]
    assert line.startswith("zero3 did not run: ")


def test_what_stage_2_divides_is_seen_at_the_peak():
    """Of the kept runs that the notebook shows: beside stage 1, by hand a half on 2 ranks and an eighth on 8."""
    for protocol, chosen, ranks in (("stages", stages.PASSES, 2), ("at_scale", stages.LARGE, 8)):
        found = stages.recorded(records.load(KEPT / protocol).select(**chosen))
        share = found["zero2"]["gradients"] / found["zero1"]["gradients"]
        assert 1 / ranks <= share < 1.2 / ranks
