"""The page about runs on a GPU, and what other texts say of these runs: each number is that of the records."""

import re

import pandas as pd
import pytest

from study.core.text import size
from study.predict.front import estimate, named
from study.records import metrics, runs
from study.report import site
from study.report.topics import documents, on_gpu
from study.report.topics.arms import by_task
from tests.conftest import ROOT
from tests.predict.trainings import training_of
from tests.report.test_figures import assert_drawn
from tests.report.test_report import quick  # noqa: F401

TEMPLATES = ROOT / "study/report/templates"
OVER = on_gpu.OVER


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


def test_each_run_was_predicted_and_the_readme_beside_has_a_row_for_it(kept, table):
    before = pd.read_csv(on_gpu.FOLDER / "predicted.csv")
    assert sorted(before["run"]) == sorted(run.record.run_id for run in kept.done)
    assert len(table) == len(kept) == 31
    lines = re.findall(r"^\| (.+) \|$", (on_gpu.FOLDER / "README.md").read_text(), re.MULTILINE)[1:]
    expected = []
    for row in table.to_dict("records"):
        words = [f"{row['model']}, {row['micro_batch']} x {row['sequence']}"]
        words[0] += f", {row['accumulation']} passes" if row["accumulation"] > 1 else ""
        words[0] += ", recomputed" if row["checkpointing"] else ""
        words += [row["precision"], row["arm"]]
        for name, over in OVER.items():
            scale, form = (1e3, "{:.1f}") if name == "step_s" else (1e-9, "{:.2f}")
            words += [form.format(scale * row[name]), f"{row[over]:.2f}"] if row[name] > 0 else ["-", "-"]
        expected.append(" | ".join(words))
    assert sorted(lines) == sorted(expected)


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


def test_what_the_page_says_of_the_driver(table):
    outside = ((table["driver_bytes"] - table["reserved_bytes"]) / 1e9).dropna()
    of_arm = {arm: {round(gb, 1) for gb in outside[table["arm"] == arm]} for arm in table["arm"]}
    assert (of_arm["single"], of_arm["zero3"], of_arm["fsdp2"]) == ({0.8}, {1.4}, {1.4})
    assert of_arm["zero1"] == of_arm["zero2"] == of_arm["zero2_cpu"] == {1.8}
    predicted = {name: table[name] * table[OVER[name]] / 1e9 for name in ("driver_bytes", "reserved_bytes")}
    apart = predicted["driver_bytes"] - predicted["reserved_bytes"]
    assert {round(gb, 1) for gb in apart.dropna()} == {0.4}
    words = "0.8 GB more than is reserved, with NCCL 1.4, under stages 1 and 2 1.8. Predicted were 0.4."
    assert words in text_of("gpu.html")


def test_what_the_page_says_of_time_and_losses(kept, table):
    over = on_gpu.seconds(table)
    costs = over[over["arm"] != "single"]["over"]
    assert (f"{costs.min():.1f}", f"{costs.max():.0f}") == ("1.2", "12")
    assert of(over, model="bert-large", arm="zero2")["over"] == pytest.approx(2.66, abs=0.005)
    assert (over[over["arm"] == "single"]["over"] == 1).all()
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
    """PyTorch's own peak, which is known of each. Its DDP was not measured: it does not fit."""
    before = pd.read_csv(on_gpu.FOLDER / "predicted.csv", index_col="run")["allocated_bytes"]
    cells = re.findall(r"<tr><td>(\w+)</td><td>(.+?)</td><td>(.+?)</td><td>(.+?)</td></tr>", text_of("gpu.html"))
    shown = {arm: [printed, *ours] for arm, printed, *ours in cells}
    for run in kept.select(virtual=True):
        peak_bytes = metrics.value(run.record, "peak_allocated_bytes")
        assert shown[run.record.arm][1:] == [size(peak_bytes), size(before[run.record.run_id])]
    assert {arm: printed for arm, (printed, *_) in shown.items() if arm in documents.MEMORY_000} == {
        arm: size(printed_bytes) for arm, printed_bytes in documents.MEMORY_000.items()
    }
    more = {"accumulation": 2, "checkpointing": True, "attention": "eager", "device": "cuda"}
    ddp = training_of(named(documents.MODEL_000), "ddp", **documents.SETTING_000, **more)
    assert shown["ddp"][1:] == ["-", size(estimate(ddp).peak_bytes)]


def test_what_advice_and_the_first_page_say(table):
    off = (table[OVER["allocated_bytes"]].astype(float) - 1).abs()
    assert f"{(off < 0.01).sum()} of {off.notna().sum()} peaks were within 1 %" in text_of("index.html")


def test_what_the_readme_says(kept, table):
    text = " ".join((ROOT / "README.md").read_text().split())
    over = on_gpu.seconds(table).query("model == 'gpt2-medium' and micro_batch == 4").set_index("arm")["over"]
    stages = f"{over['zero2']:.1f} times as long under stage 2 as alone, {over['zero3']:.1f} under stage 3, "
    assert f"{stages}{over['zero2_cpu']:.1f} and {over['zero3_cpu']:.0f} with offloading" in text
    held = {run.record.arm: metrics.value(run.record, "peak_allocated_bytes") for run in kept.select(virtual=True)}
    assert f"holds tensors of {size(held['zero2'])} under stage 2" in text
    assert f"and of {size(held['zero3']).removesuffix(' GB')} under stage 3" in text
    assert "27 of 30 runs peaked within 1 %" in text, "as test_what_advice_and_the_first_page_say has it"
    assert (
        "DDP took 13 % more memory than predicted, FSDP2 under autocast 14 % less; stage 2 reserved up to 43 % more"
        in text
    )


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


def test_a_page_whose_source_is_absent_is_not_linked(quick, tmp_path, monkeypatch):  # noqa: F811
    """As in a wheel."""
    from tests.shaped import finished, put

    pages = [*site.FROM_A_CHECKOUT]
    monkeypatch.setattr(site, "FROM_A_CHECKOUT", dict.fromkeys(pages, tmp_path / "nowhere"))
    quick(put(tmp_path / "runs", finished("one")), tmp_path / "out")
    texts = "".join(path.read_text() for path in (tmp_path / "out").glob("*.html"))
    for page in pages:
        assert not (tmp_path / "out" / f"{page}.html").exists()
        assert f"{page}.html" not in texts


def test_one_rank_has_nobody_to_share_with(kept):
    alone = next(each for each in by_task(kept) if len(each["rows"]) > 5)
    (words,) = [line for line in alone["in_words"] if line.startswith("Memory")]
    assert words.endswith("what DDP holds."), "buckets outweigh nothing that is divided"
    pair = by_task(kept.select(protocol_part="loss"))[0]["in_words"]
    assert pair == ["Losses: at every step, 1 arm is within 0 nats of single."]
