"""The page about runs on a GPU, and what other texts say of these runs: each number is that of the records."""

import json
import re

import pandas as pd
import pytest

from study.conform import releases
from study.core.text import size
from study.known import faults
from study.ledger import search, texts
from study.predict.front import estimate, named
from study.predict.outside import scores
from study.records import metrics, runs
from study.report import answers
from study.report.topics import documents, on_gpu
from study.report.topics.arms import by_task
from tests.conftest import ROOT
from tests.predict.trainings import training_of
from tests.report.test_figures import assert_drawn

TEMPLATES = ROOT / "study/report/templates"
OVER = on_gpu.OVER
MEDIUM = "model == 'gpt2-medium' and micro_batch == 4"


@pytest.fixture(scope="module")
def kept():
    return runs.load(on_gpu.FOLDER / "runs")


@pytest.fixture(scope="module")
def table(kept):
    return on_gpu.table(kept)


def text_of(name: str) -> str:
    return re.sub(r"\s+", " ", (TEMPLATES / name).read_text())


def of(table: pd.DataFrame, **wanted) -> pd.Series:
    """The only row that has these."""
    (row,) = [row for _, row in table.iterrows() if wanted.items() <= row.to_dict().items()]
    return row


@pytest.fixture(scope="module")
def later():
    return [runs.load(folder / "runs") for folder in on_gpu.LATER]


@pytest.fixture(scope="module")
def tables(table, later):
    """Of each set of runs."""
    return [table, *map(on_gpu.table, later, on_gpu.LATER)]


@pytest.fixture(scope="module")
def medium(tables):
    """Seconds of GPT-2 medium with 4 rows over those of one process, by arm, in the first and the third set of runs."""
    return [on_gpu.seconds(tables[i]).query(MEDIUM).set_index("arm")["over"] for i in (0, 2)]


@pytest.mark.parametrize("folder", [on_gpu.FOLDER, *on_gpu.LATER], ids=lambda folder: folder.name)
def test_each_run_was_predicted_and_the_readme_beside_has_a_row_for_it(folder):
    done = runs.load(folder / "runs").done
    before = pd.read_csv(folder / "predicted.csv")
    # What stage 3 keeps where recomputation is reentrant depends on releases.
    predicted = {run.record.run_id for run in done if not run.record.requested.reentrant}
    assert sorted(before["run"]) == sorted(predicted)
    table = on_gpu.table(runs.load(folder / "runs"), folder)
    assert len(table) == {"h200": 31, "h200-2": 19, "h200-3": 30, "h100": 19}[folder.name]
    lines = re.findall(r"^\| (.+) \|$", (folder / "README.md").read_text(), re.MULTILINE)[1:]
    expected = []
    for row, run in zip(table.to_dict("records"), done, strict=True):
        words = [f"{row['model']}, {row['micro_batch']} x {row['sequence']}"]
        words[0] += f", {row['accumulation']} micro-batches" if row["accumulation"] > 1 else ""
        words[0] += ", recomputed" if row["checkpointing"] else ""
        asked, software = run.record.requested, run.record.software
        if asked.lora_rank:
            words[0] += ", reentrant" if asked.reentrant else ""
            words[0] += f", LoRA, deepspeed {software['deepspeed']}, transformers {software['transformers']}"
        words[0] += f", {run.record.observed.allocator}" if run.record.observed.allocator else ""
        words += [row["precision"], row["arm"]]
        for name, over in OVER.items():
            scale, form = (1e3, "{:.1f}") if name == "step_s" else (1e-9, "{:.2f}")
            words.append(form.format(scale * row[name]) if row[name] > 0 else "-")
            words.append(f"{row[over]:.2f}" if row[over] > 0 else "-")
        expected.append(" | ".join(words))
    assert sorted(lines) == sorted(expected)


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading of the page, without its head."""
    below = text_of("gpu.html").partition(f'id="{heading}"')[2].partition("<tbody>")[2].partition("</tbody>")[0]
    return [re.findall(r"<td>(.*?)</td>", row) for row in below.split("</tr>")[:-1]]


def test_what_adapters_hold(later):
    measured = []
    for run in later[0].select(lora_rank=16, checkpointing=True).done:
        software, reentrant = run.record.software, run.record.requested.reentrant
        held = [size(metrics.value(run.record, on_gpu.MEASURED[f"{kind}_bytes"])) for kind in ("allocated", "reserved")]
        measured.append([software["deepspeed"], software["transformers"], str(reentrant), *held])
    assert sorted(rows_of("lora")) == sorted(measured)
    (failed,) = (run.record for run in later[0] if run.record.status == "failed")
    assert (failed.software["deepspeed"], failed.requested.reentrant) == ("0.19.2", False)
    assert "CheckpointError" in failed.error.message
    gb = {tuple(words[:3]): words[3].removesuffix(" GB") for words in measured}
    kept = gb.pop(("0.19.8", "5.17.0", "True"))
    assert set(gb.values()) == {"7.89"}
    for name in ("GUIDE.md", "study/report/templates/index.html", "reports/upstream/zero3-reentrant-frozen.md"):
        text = " ".join((ROOT / name).read_text().split())
        assert re.search(rf"H200,? (holds|peaks at) {kept} GB .*?7\.9", text), name
        assert not re.search("(keeps|,) (the whole|all) frozen (model|weights) on each", text), "not quite, by the peak"
    peaks = [
        run.record.memory.components.per_rank[0].at_peak
        for run in later[0].select(lora_rank=16, checkpointing=True).done
    ]
    gathered, whole = max(peak["gathered_weights"] for peak in peaks), 8 * peaks[0]["weights"]
    words = f"At the peak of {kept} GB {gathered / 1e9:.1f} of the {whole / 1e9:.1f} GB of weights are gathered."
    assert words in page_of("lora")


def test_the_page_of_adapters_names_the_releases_in_which_the_script_was_run():
    (fault,) = [each for each in faults.table().fault if each.id == "frozen-weights-stay"]
    page = " ".join(page_of("lora").split())
    having = fault.asked[fault.asked.index(fault.since) :]
    assert having == (fault.since, "0.19.5", "0.19.6", "0.19.7", fault.until)
    assert f"{fault.since} and 0.19.5 to {fault.until} keep it by [a script]" in page
    assert f'0.19.4 was not run.** `study stack` says "{fault.since} to {fault.until}"' in page
    kept = releases.answers().query("adapter == 'zero3' and property == 'lora-recomputed-reentrant'")
    not_kept = [name for name in fault.asked if name not in {*kept["deepspeed"]}]
    assert f"The script's answers of {' and '.join(not_kept)} were not kept" in page
    has = dict(zip(kept["deepspeed"], kept["answer"] == "fails", strict=True))
    assert all(has[name] == (name in having) for name in fault.asked if name in has), "this test says the same"


def test_the_page_of_memory_does_not_refute_a_table_whose_card_has_a_setting_that_comes_near():
    """The card predicts its three rows with 8-bit Adam as well, and the first in its text's batch."""
    (claim,) = search.named(("S000-06",))
    values = [each.value for each in claim.evidence if each.kind == "prediction" and each.optimizer == "adamw_8bit"]
    first, in_its_batch, *others = map("{:.1f}".format, values)
    lean = f"one micro-batch of two sequences we predict {first} GB, {' and '.join(others)}, "
    lean += f"and with the nine micro-batches of its batch {in_its_batch} for ZeRO-0, which does not fit."
    said = f"our DDP holds 184.8. With 8-bit Adam, ZeRO-0 all in bf16 and {lean}"
    assert f"With ordinary Adam its 76 GB for ZeRO-0 do not fit: {said}" in page_of("memory")


def test_adapters_of_a_small_model_hide_the_fault(later):
    """By default stage 3 may hold a billion gathered parameters: of Llama-3.2-1B it holds them in either release."""
    small = later[1].select(model="llama3.2-1b", lora_rank=16).done
    known = {(run.record.software["deepspeed"], run.record.requested.reentrant) for run in small}
    assert known == {("0.19.8", True), ("0.19.8", False), ("0.19.2", True)}
    for run in small:
        peak = run.record.memory.components.per_rank[0].at_peak
        assert peak["gathered_weights"] / 2 == pytest.approx(1e9, rel=0.01)
        assert size(metrics.value(run.record, "peak_allocated_bytes")) == "5.75 GB"
    assert "its peak is 5.75 GB with both releases, reentrant or not" in text_of("gpu.html")


def test_the_table_beside_the_gist(later):
    before = pd.concat(pd.read_csv(folder / "predicted.csv", index_col="run") for folder in on_gpu.LATER)
    outside = pd.read_csv(ROOT / "reports/outside/measurements.csv").query("source == 'chenyaofo gist on ZeRO'")
    arms = {"zero2": "zero2", "zero2 + optimizer offload": "zero2_cpu", "zero3": "zero3"}
    arms["zero3 + optimizer offload + parameter offload"] = "zero3_cpu"
    published = {}
    for row in outside.to_dict("records"):
        recomputes = "recomputed" if row["activation_checkpointing"] == "full" else "kept"
        key = (arms.get(row["arm"]), str(int(row["micro_batch"])), recomputes)
        published.setdefault(key, {})[int(row["grad_acc"])] = f"{row['memory_GB']:.1f}"
    expected = []
    for run in [*later[0].select(model="llama-2-7b"), *later[1].select(model="llama-2-7b")]:
        asked = run.record.requested
        assert asked.accumulation == 2
        key = (run.record.arm, str(asked.micro_batch), "recomputed" if asked.checkpointing else "kept")
        theirs = published[key].get(2) or next(iter(published[key].values()))
        peak_bytes = metrics.value(run.record, "peak_allocated_bytes")
        predicted = before["allocated_bytes"][run.record.run_id]
        expected.append([*key, theirs, size(peak_bytes), size(predicted)])
    assert sorted(rows_of("later")) == sorted(expected)
    assert published["zero3", "8", "recomputed"] == {1: "39.1", 2: "63.9"}
    assert "the gist has 63.9 in two micro-batches and 39.1 in one" in text_of("gpu.html")


def test_what_the_page_says_of_memory_on_the_other_machines(tables, later):
    text = text_of("gpu.html")
    rows = pd.concat(tables[1:])
    off = (rows[OVER["allocated_bytes"]].astype(float) - 1).abs().dropna()
    assert (len(rows), len(off), off.max() < 0.005) == (68, 61, True)
    assert "sixty-eight" in text
    assert "within 0.5 % in all 61 runs" in text
    again = tables[1]
    of_eight = again[(again["arm"].isin(["zero3", "zero3_cpu"])) & again["driver_bytes"].isna()]
    beyond = ((1 - of_eight[OVER["reserved_bytes"]].astype(float)) * of_eight["reserved_bytes"] / 1e9).dropna()
    assert f"{beyond.min():.1f} to {beyond.max():.1f} GB more were reserved with stage 3" in text
    eight = {}
    for run in later[1].select(model="llama3-8b", lora_rank=None).done:
        kinds = [metrics.value(run.record, on_gpu.MEASURED[f"{kind}_bytes"]) for kind in ("allocated", "reserved")]
        eight[run.record.arm, run.record.observed.allocator] = [size(kind) for kind in kinds]
    held, reserved = eight["zero2", None]
    assert f"holds {held} with stage 2 and {eight['zero3', None][0]} with stage 3" in text
    grown = "expandable_segments:True"
    words = f"reserved {reserved.removesuffix('.0 GB')} for {held} of tensors, and {eight['zero2', grown][1]} with"
    assert f"{words} <code>PYTORCH_ALLOC_CONF={grown}</code>" in text


def test_another_setting_of_the_allocator_is_another_cell(later):
    usual, grown = later[1].select(model="llama3-8b", arm="zero2").done
    assert usual.key() != grown.key()
    assert len(on_gpu.later()) == 68 - 6 - 4 - 1, "adapters, those of the third set, and that one"


def test_losses_and_seconds_of_the_other_machines(kept, later, tables, medium):
    text = text_of("gpu.html")
    parts = ("loss", "seeds")
    records = [run.record for each in (kept, *later) for run in each if run.facts["protocol_part"] in parts]
    (zero3,) = (record for record in records if record.arm == "zero3")
    exact = {(record.requested.seed, tuple(record.loss.train)) for record in records if record is not zero3}
    assert sorted(seed for seed, _ in exact) == [42, 43, 44], "of a seed all are the same"
    apart = [abs(a - b) for a, b in zip(zero3.loss.train, dict(exact)[zero3.requested.seed], strict=True)]
    assert f"stage 3 is at most {max(apart):.1e} apart".replace("e-04", "e-4") in text
    of_first, *others = (table.set_index(on_gpu.ABOUT)["step_s"].dropna() for table in tables[:3])
    slower = [(steps / of_first.reindex(steps.index)).dropna() for steps in others]
    ddp = slower[0].xs("ddp", level="arm").item()
    others = slower[0].drop("ddp", level="arm")
    assert set(others.map("{:.1f}".format)) == {"1.8"}
    assert f"1.8 times as long in the second set, DDP {ddp:.1f} times" in text
    assert f"{slower[1].min():.1f} to {slower[1].max():.1f} times in the third" in text
    a, b = medium
    for arm, where in (("zero2", "as long with"), ("zero3", "with stage 3"), ("zero2_cpu", "with the optimizer")):
        assert f"{a[arm]:.1f} and {b[arm]:.1f} times {where}" in text
    assert f"{a['zero3_cpu']:.0f}" == f"{b['zero3_cpu']:.0f}" == "12"


def test_what_the_page_says_of_an_h100(tables, later):
    other, mine = (set(one.query(MEDIUM)["allocated_bytes"]) for one in tables[2:])
    assert mine == other
    host, disk = (of(tables[3], model="bert-large", arm=f"zero3_{where}")["step_s"] for where in ("cpu", "nvme"))
    text = text_of("gpu.html")
    assert f"took {disk / host:.1f} times the seconds" in text
    assert f"took {disk:.1f} s a step, and {host:.2f} s with both" in text
    one, other = (run.record for run in later[2].select(model="bert-large"))
    assert one.loss.train == other.loss.train


def test_what_the_page_says_of_memory(table):
    text = text_of("gpu.html")
    off_bytes = (table[OVER["allocated_bytes"]].astype(float) - 1) * table["allocated_bytes"]
    assert (off_bytes.abs() < 2000).sum() == 26
    assert off_bytes.notna().sum() == 30
    assert "to 2 kB in 26 of 30 runs" in text
    medium = table[(table["model"] == "gpt2-medium") & (table["micro_batch"] == 4)]
    for arm, words in (("ddp", "took 13 % more"), ("fsdp2", "14 % less")):
        over = of(medium, arm=arm)[OVER["allocated_bytes"]]
        assert f"{abs(1 / over - 1):.0%}".replace("%", " %") in words
        assert words in text
    row = of(table, model="gemma2-9b", arm="zero2")
    reserved = f"{row['reserved_bytes'] / 1e9:.1f} GB for {row['allocated_bytes'] / 1e9:.1f} GB of tensors"
    predicted = row["reserved_bytes"] * row[OVER["reserved_bytes"]] / 1e9
    assert f"reserved {reserved}, and {predicted:.1f} were predicted" in text


def test_the_first_rows_are_those_that_were_predicted_worst():
    from study.report import answers

    (memory,) = [answer for answer in answers.of_gpu() if answer.name == "memory"]
    assert not memory.table.duplicated(["arm", "training"]).any(), "each row says which run it is"
    off = (memory.table[OVER["reserved_bytes"]].astype(float) - 1).abs()
    assert off.is_monotonic_decreasing


def test_what_the_page_says_of_the_driver(table):
    outside = ((table["driver_bytes"] - table["reserved_bytes"]) / 1e9).dropna()
    of_arm = {arm: {round(gb, 1) for gb in outside[table["arm"] == arm]} for arm in table["arm"]}
    assert (of_arm["single"], of_arm["zero3"], of_arm["fsdp2"]) == ({0.8}, {1.4}, {1.4})
    assert of_arm["zero1"] == of_arm["zero2"] == of_arm["zero2_cpu"] == {1.8}
    predicted = {name: table[name] * table[OVER[name]] / 1e9 for name in ("driver_bytes", "reserved_bytes")}
    apart = predicted["driver_bytes"] - predicted["reserved_bytes"]
    assert {round(gb, 1) for gb in apart.dropna()} == {0.4}
    words = "0.8 GB more than is reserved, 1.4 with NCCL, and 1.8 with stages 1 and 2; 0.4 were predicted."
    assert words in text_of("gpu.html")


def test_seconds_are_compared_only_with_those_of_one_process_alone():
    """What no other arm trained would be 1 times its own time."""
    about = {"precision": "fp32", "micro_batch": 4, "accumulation": 1, "sequence": 128, "checkpointing": False}
    rows = [
        about | {"model": "bert", "arm": "single", "step_s": 2.0},
        about | {"model": "bert", "arm": "zero2", "step_s": 5.0},
    ]
    rows.append(about | {"model": "gpt2", "arm": "single", "step_s": 3.0})
    over = on_gpu.seconds(pd.DataFrame(rows))
    assert dict(zip(over["arm"], over["over"], strict=True)) == {"single": 1, "zero2": 2.5}
    assert [*over["model"]] == ["bert", "bert"]


def test_what_the_page_says_of_time_and_losses(kept, table):
    over = on_gpu.seconds(table)
    costs = over[over["arm"] != "single"]["over"]
    assert (f"{costs.min():.1f}", f"{costs.max():.0f}") == ("1.2", "12")
    assert of(over, model="bert-large", arm="zero2")["over"] == pytest.approx(2.66, abs=0.005)
    assert over["model"].nunique() == 3, "what was trained under one arm alone is no comparison"
    off = (table[OVER["step_s"]].astype(float) - 1).abs()
    assert off.median() == pytest.approx(0.235, abs=0.005)
    pair = {run.record.arm: run.record for run in kept.select(protocol_part="loss")}
    assert len(pair["single"].loss.train) == 100
    assert pair["single"].loss.train == pair["zero2"].loss.train
    peaks = [metrics.value(pair[arm], "peak_bytes") for arm in ("zero2", "single")]
    assert f"{peaks[0] / peaks[1] - 1:.0%}" == "46%"
    assert "2.7 times as long, and allocated 46 % more" in text_of("gpu.html")


def test_the_table_of_document_000(kept):
    """Peaks of tensors. Of FSDP2 PyTorch's own alone is known. Its DDP was not measured: it does not fit."""
    before = pd.read_csv(on_gpu.FOLDER / "predicted.csv", index_col="run")["allocated_bytes"]
    shown = {arm: [printed, *ours] for arm, printed, *ours in rows_of("document")}
    for run in kept.select(virtual=True):
        peak_bytes = metrics.value(run.record, "tracked_peak_bytes")
        peak_bytes = peak_bytes or metrics.value(run.record, "peak_allocated_bytes")
        assert shown[run.record.arm][1:] == [size(peak_bytes), size(before[run.record.run_id])]
    assert {arm: printed for arm, (printed, *_) in shown.items() if arm in documents.MEMORY_000} == {
        arm: size(printed_bytes) for arm, printed_bytes in documents.MEMORY_000.items()
    }
    more = {"accumulation": 2, "checkpointing": True, "attention": "eager", "device": "cuda"}
    ddp = training_of(named(documents.MODEL_000), "ddp", **documents.SETTING_000, **more)
    assert shown["ddp"][1:] == ["-", size(estimate(ddp).peak_bytes)]


def page_of(name: str) -> str:
    return " ".join((ROOT / f"reports/answers/{name}.md").read_text().split())


def ratios(tables: list[pd.DataFrame], base: str, arms: list[str]) -> list[float]:
    """Seconds of GPT-2 medium with these arms over those of another, in each set of runs that has both."""
    found = []
    for table in tables:
        step_s = table.query(MEDIUM).set_index("arm")["step_s"]
        found += [step_s[arm] / step_s[base] for arm in arms if arm in step_s]
    return found


def test_ratios_of_time_are_the_least_and_the_most_of_the_arms_that_are_named(tables):
    """Over DDP in the same set, where a set has both: whatever arms a row names, and all sets."""
    time = page_of("time")
    named = r"((?:`\w+`(?:, | and )?)+) ([\d.]+) to ([\d.]+)"
    seen = set()
    for row in re.findall(r"\| (GPT-2 medium on one GPU.*?|the same.*?) \| (.*?) \|", time):
        base = "single" if "one process alone" in row[0] else "ddp"
        for arms, *printed in re.findall(named, row[1]):
            arms = re.findall(r"\w+", arms)
            found = ratios(tables, base, arms)
            assert [f"{times:.2g}" if times >= 9.5 else f"{times:.1f}" for times in (min(found), max(found))] == printed
            seen |= {(base, arm) for arm in arms}
    every = {arm for table in tables for arm in table.query(MEDIUM)["arm"]} - {"single", "ddp"}
    assert {("ddp", arm) for arm in every} <= seen, "no arm is left out"
    # The README of the last set, of an H100, says that its ratios say little.
    stage_2, stage_3 = (ratios(tables[:3], "ddp", [arm]) for arm in ("zero2", "zero3"))
    (said,) = [each for each in answers.questions() if each["name"] == "time"]
    assert f": stage 3 took up to {max(stage_3):.1f} times DDP's seconds." in said["answer"]
    assert len(stage_2) == len(stage_3) == 2, "README says two pairs"
    least, most = ([f"{end(pair):.1f}" for pair in (stage_2, stage_3)] for end in (min, max))
    assert f"So stage 3's {least[1]} to {most[1]} times DDP's seconds on H200 say nothing of eight GPUs." in time
    stage_1 = ratios(tables[:3], "ddp", ["zero1"])
    words = f"stage 1 took {min(stage_1):.1f} to {max(stage_1):.1f} times DDP's seconds"
    assert f"{words}, stage 2 {least[0]} to {most[0]}, and stage 3 {least[1]} to {most[1]}." in time
    assert said["known"].startswith(
        "GPT-2 medium on an H200, two pairs of runs, small buckets, busy hosts; higher on an H100;"
    )
    of_h100 = (ratios(tables[3:], "ddp", [arm])[0] for arm in ("zero2", "zero3"))
    assert all(ratio > max(pair) for ratio, pair in zip(of_h100, (stage_2, stage_3), strict=True))
    bert = [table.query("model == 'bert-large' and precision == 'fp32' and micro_batch == 8") for table in tables[:3]]
    alone, divided = ([rows[rows["arm"] == arm]["step_s"] for rows in bert] for arm in ("single", "zero2"))
    least = min(b.min() / a.max() for a, b in zip(alone, divided, strict=True))
    most = max(b.max() / a.min() for a, b in zip(alone, divided, strict=True))
    assert f"{least:.1f} to {most:.1f} times as long with stage 2 | measured in the three sets on an H200" in time


def test_cards_say_by_what_factor_the_ratios_of_time_that_were_predicted_before_were_off(tables):
    """S003-10 had the errors of a predictor that had met the runs, and called them those of a prediction."""
    before = [
        pd.read_csv(folder / "predicted.csv").assign(arm=lambda rows: rows["run"].str.split("-").str[1])
        for folder in (on_gpu.FOLDER, *on_gpu.LATER)
    ]
    of_medium = [rows[rows["run"].str.startswith("arms-")].set_index("arm")["step_s"] for rows in before]
    said = {}
    for arm, name in (("zero2", "stage 2"), ("zero3", "stage 3"), ("fsdp2", "FSDP2")):
        predicted = [step_s[arm] / step_s["ddp"] for step_s in of_medium if arm in step_s]
        off = [max(a / b, b / a) for a, b in zip(ratios(tables, "ddp", [arm]), predicted, strict=True)]
        said[name] = (
            f"Predicted before the runs, the ratio of {name} to DDP, of GPT-2 medium on one GPU, was off by factors of "
            "{:.1f} and {:.1f} in two sets with an H200, and of {:.1f} in one with an H100.".format(*off)
        )
    told = [f"{claim.found} {claim.because} {claim.changes}" for claim in texts.claims()]
    sentences = [
        each for text in told for each in re.split(r"(?<=[.!?])\s+", text) if re.search("off by (?!default)", each)
    ]
    assert sorted(sentences) == sorted(said.values())


def test_no_arm_whose_seconds_have_a_base_is_left_out_of_the_page_of_time(tables):
    """Of other models than GPT-2 medium: BERT-large's stage 2 has a row of its own, above."""
    pairs = pd.concat([on_gpu.seconds(table) for table in tables[:3]])
    others = pairs.query("model != 'gpt2-medium' and arm != 'single'").set_index(["model", "arm"])["over"]
    printed = {"bert-large": r"\| the same with stage 3 \| (.+?) \|", "llama3.2-1b": r"\| Llama-3.2-1B .+? \| (.+?) \|"}
    found = {
        (model, arm): times
        for model, row in printed.items()
        for arm, times in re.findall(r"`(\w+)` ([\d.]+)", re.search(row, page_of("time"))[1])
    }
    del others["bert-large", "zero2"]
    assert {pair: f"{over:.1f}" for pair, over in others.items()} == found


def test_a_training_that_is_repeated_counts_once(tables):
    """By the words of the READMEs' rows, which another test holds to the records."""
    first: dict[tuple, float] = {}
    for folder in (on_gpu.FOLDER, *on_gpu.LATER):
        rows = re.findall(r"^\| (.+) \|$", (folder / "README.md").read_text(), re.MULTILINE)[1:]
        for cells in (row.split(" | ") for row in rows):
            if not cells[4].startswith("-"):
                first.setdefault(tuple(cells[:3]), float(cells[4]))
    within = f"{sum(abs(over - 1) < 0.015 for over in first.values())} of {len(first)}"
    hits, of = within.split(" of ")
    assert f"of {of} different trainings {hits} at first sight" in page_of("fit")
    known = pd.concat(tables)[OVER["allocated_bytes"]].notna().sum()
    assert f"{known - len(first)} of the {known} runs repeat one" in page_of("fit")
    (answer,) = [each["answer"] for each in answers.questions() if each["name"] == "fit"]
    assert f": {within} peaks were predicted within 1 %." in answer
    assert f"What our trainer's tensors take, yes: {within} peaks were within 1 %" in page_of("fit")
    counted = on_gpu.at_first_sight().set_index("set").loc["all"]  # from the records
    assert [counted["runs"], counted["new trainings"], counted["new trainings within 1 %"]] == [
        known,
        len(first),
        int(hits),
    ]
    recounted = f"{counted['runs within 1 %']} of {known} runs, {within} trainings"
    assert f"python tools/scored.py --gpus # counts them again, by set: {recounted}" in page_of("fit")
    guide = " ".join((ROOT / "GUIDE.md").read_text().split())
    assert f"In four sets of runs on a GPU {within} peaks of tensors were" in guide


def test_what_the_pages_of_answers_say(kept, tables):
    time, memory, fit, lora = map(page_of, ("time", "memory", "fit", "lora"))
    said = {each["name"]: each["answer"] for each in answers.questions()}
    more_rows = of(on_gpu.seconds(tables[0]), arm="zero2", micro_batch=16)["over"]
    words = f"with 16 sequences, over the seconds of one process alone | {more_rows:.1f} times as long with stage 2"
    assert words in time
    held = {run.record.arm: metrics.value(run.record, "tracked_peak_bytes") for run in kept.select(virtual=True)}
    assert f"holds {size(held['zero2'])} with stage 2 and {size(held['zero3'])} with stage 3" in memory
    eight = tables[2].query("model == 'llama3-8b' and checkpointing").set_index("arm")
    for stage in (2, 3):
        assert {size(held) for held in eight["allocated_bytes"][[f"zero{stage}"]]} == {
            re.search(rf"\| stage {stage} \| (\S+ GB)", memory)[1]
        }
    assert size(eight["reserved_bytes"]["zero2"].max()).removesuffix(" GB") in memory
    off = pd.concat(tables)[OVER["allocated_bytes"]].astype(float).sub(1).abs()
    within = f"{(off < 0.01).sum()} of {off.notna().sum()}"
    assert f"{within} runs peaked so" in fit
    slower = [100 * each[OVER["step_s"]].astype(float).sub(1).abs().median() for each in tables]
    first, *later = map(int, slower)
    words = f"off by more than {first} %, and in the later sets, whose hosts were slower, "
    words += f"by more than {later[0]}, {later[1]} and {later[2]} %"
    assert words in fit
    seconds = pd.concat(tables)[OVER["step_s"]].astype(float).dropna()
    words = f"of {len(seconds)} steps half were off by over a third, mostly [too short]"
    assert words in (ROOT / "README.md").read_text()
    assert f"Of {len(seconds)} predicted steps, over all sets, half were off by more than a third, mostly" in time
    assert 1 / 3 < seconds.sub(1).abs().median() < 0.4
    short, long = (seconds < 0.9).sum(), (seconds > 1.1).sum()
    assert short > len(seconds) / 2
    words = f"of {len(seconds)} half were off by more than a third: {short} were predicted more than 10 % too short"
    assert f"{words}, {long} more than 10 % too long" in fit
    assert "a GPU holds 17.2 GB instead of 7.9." in said["lora"]
    assert "| 0.19.8 | 5.17.0 | True | 17.2 GB |" in lora
    of_adapters = runs.load([on_gpu.FOLDER.parent / "h200-2/runs"]).select(lora_rank=16).done
    recomputed = [run.record for run in of_adapters if run.record.requested.checkpointing]
    assert len(recomputed) == 5
    held = sorted(
        tuple(metrics.value(record, name) / 1e9 for name in ("tracked_peak_bytes", on_gpu.MEASURED["reserved_bytes"]))
        for record in recomputed
    )
    assert [f"{tensors:.1f}" for tensors, _ in held] == ["7.9"] * 4 + ["17.2"]
    allocated = sorted({f"{metrics.value(record, 'peak_allocated_bytes') / 1e9:.1f}" for record in recomputed})
    assert f"`torch.cuda.max_memory_allocated` had {' and '.join(allocated)} GB" in lora
    reserved = [f"{each:.1f}" for _, each in held]
    assert f"PyTorch reserved {reserved[-1]} GB beside the 17.2 GB, and {min(reserved)} to {max(reserved[:-1])}" in lora
    assert "DDP took 13 % more, FSDP2 with autocast 14 % less" in fit
    over = pd.concat(tables)[OVER["reserved_bytes"]].astype(float).dropna()
    near, low = over.sub(1).abs().le(0.1).sum(), (over < 0.9).sum()
    words = f"of {len(over)} runs {near} within 10 %, {low} more than 10 % too low"
    assert f"{words}: {over.min():.2f} to {over.max():.2f} times what was measured" in fit


def test_losses_of_weights_that_were_drawn_on_a_gpu(kept, later):
    """They are systematically others with stage 3: the page says so, and compares none."""
    drawn = [run for each in (kept, *later) for run in each.select(model="gpt2-medium", precision="bf16").done]
    drawn = [run for run in drawn if run.record.requested.micro_batch == 4 and len(run.record.loss.train) > 1]
    assert {run.record.requested.init for run in drawn} == {"in_place"}
    second = {with_3: [] for with_3 in (True, False)}
    for run in drawn:
        second[run.record.arm.startswith("zero3")].append(run.record.loss.train[1])
    assert len(second[True]) == 6
    (least, most), (low, high) = ((min(each), max(each)) for each in second.values())
    assert f"| 2 | {least:.2f} to {most:.2f} | {low:.2f} to {high:.2f} |" in page_of("losses")


def test_the_intervals_that_were_predicted_before(kept, later):
    """Each set's first intervals, not those of constants that were fitted afterwards."""
    held = []
    for folder, mine in zip([on_gpu.FOLDER, *on_gpu.LATER], [kept, *later], strict=True):
        before = pd.read_csv(folder / "predicted.csv", index_col="run").dropna(subset="step_s")
        timed = [run.record for run in mine.done if not run.record.is_virtual and run.record.run_id in before.index]
        said = [(before.loc[record.run_id], metrics.value(record, "step_s")) for record in timed]
        within = [row["step_low_s"] <= step_s <= row["step_high_s"] for row, step_s in said]
        held.append((sum(within), len(within)))
    words = "{} of {}, {} of {}, {} of {} and {} of {}".format(*(number for pair in held for number in pair))
    total, steps = map(sum, zip(*held, strict=True))
    assert f"it held {words}: {total} of {steps}" in page_of("fit")


def test_first_predictions_of_others_steps():
    """At most twelve numbers of a source, and all."""
    first = [each for each in scores.numbers() if each.first and each.quantity == "time"]
    capped, every = (scores.score(chosen, "first") for chosen in (scores.capped(first), first))
    percents = {name: [f"{100 * each[name]:.0f}" for each in (capped, every)] for name in ("median error", "too low")}
    (near, far), (short, shorter) = percents.values()
    assert f"half were first predicted within {near} %, and {short} % more than 10 % too short |" in page_of("fit")
    assert f"| all {len(first)} of these | half within {far} %, and {shorter} % too short |" in page_of("fit")


def test_first_predictions_of_others_peaks():
    """At most twelve numbers of a source, and all."""
    first = [each for each in scores.numbers() if each.first and each.quantity == "memory"]
    capped, every = (scores.score(chosen, "first") for chosen in (scores.capped(first), first))
    words = "half within {:.1f} %, {:.0f} % were predicted more than 10 % too low"
    near, far = (words.format(100 * each["median error"], 100 * each["too low"]) for each in (capped, every))
    assert f"| published peaks | {near} |" in page_of("fit")
    assert f"| all {len(first)} of these | {far} |" in page_of("fit")


def test_each_run_is_a_dot_and_each_arm_a_bar(table):
    axes = on_gpu.memory_figure(table).axes
    for ax, name in zip(axes, on_gpu.MEASURED, strict=False):
        known = table[table[name].notna()]
        for x, y in zip(known[name] / 1e9, known[OVER[name]], strict=True):
            assert_drawn([(x, y)], ax)
            assert ax.get_ylim()[0] < y < ax.get_ylim()[1], "no dot is outside of its panel"
    over = on_gpu.seconds(table)
    widths = [bar.get_width() for ax in on_gpu.seconds_figure(over).axes for bar in ax.patches]
    assert sorted(widths) == pytest.approx(sorted(over["over"]))


def test_one_rank_has_nobody_to_share_with(kept):
    alone = next(each for each in by_task(kept) if len(each["rows"]) > 5)
    (words,) = [line for line in alone["in_words"] if line.startswith("Memory")]
    assert words.endswith("what DDP holds."), "buckets outweigh nothing that is divided"
    pair = by_task(kept.select(protocol_part="loss"))[0]["in_words"]
    assert pair == ["Losses: at every step, 1 arm is identical to single."]


def test_how_slow_a_host_was_is_in_its_kept_file():
    """Seconds of a kernel are in no file: only their ratio to what was assumed when the machine was measured."""
    kept_files = sorted((ROOT / "reports").glob("h*/peaks.json"))
    assert len(kept_files) == 3
    for path in kept_files:
        page = " ".join((path.parent / "README.md").read_text().split())
        pace = json.loads(path.read_text())["host_pace"]
        assert f"A kernel took {pace:.2f} times as long as predictions assumed then (`host_pace`)." in page
        assert not re.search(r"\d us\b", page)
    h100 = json.loads((ROOT / "reports/h100/peaks.json").read_text())
    assert f"a kernel took {h100['host_pace']:.2f} times as long as predictions assumed then" in text_of("gpu.html")
