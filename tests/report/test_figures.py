"""Figures: what is drawn is what the table says."""

import matplotlib
import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from study.core.text import size
from study.records import runs
from study.report import style
from study.report.topics import documents, losses, memory, traffic
from tests.conftest import ROOT
from tests.shaped import finished, put

KEPT = ROOT / "reports/cpu-2core/runs"


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory):
    """Four arms with three seeds each, and what is kept of the script."""
    records = []
    for number, arm in enumerate(("ddp", "zero1", "zero2", "zero3")):
        for seed in (1, 2, 3):
            records.append(finished(f"{arm}-{seed}", arm, 2, seed, gpu=True, loss=2 + seed / 100 + number / 1000))
    return runs.load([put(tmp_path_factory.mktemp("runs"), *records), KEPT / "as_printed"])


@pytest.fixture(scope="module")
def drawn(all_runs):
    """Each figure once, with its rows."""
    tables = {"losses": losses, "memory": memory, "traffic": traffic}
    rows = {name: topic.table(all_runs) for name, topic in tables.items()}
    pairs = {name: (topic.figure(rows[name]), rows[name]) for name, topic in tables.items()}
    of_document = documents.memory_000(runs.load(KEPT / "h100"))
    return pairs | {"memory_000": (memory.figure(of_document), of_document)}


def assert_drawn(expected: list, axes) -> None:
    drawn = np.concatenate([line.get_xydata() for line in axes.lines])
    for point in expected:
        assert np.isclose(drawn, point, rtol=1e-9).all(axis=1).any(), point


def names(axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def test_losses(drawn):
    figure, rows = drawn["losses"]
    above, below = figure.axes
    others = names(below)
    assert others == ["zero1", "zero2", "zero3"], "each arm has a line of its own, with its name"
    for (arm, step), mine in rows.groupby(["arm", "step"]):
        assert_drawn([(step, mine["loss"].mean())], above)
        known = mine["difference"].dropna()
        assert_drawn([(known.max(), others.index(arm))] if arm != "ddp" else [], below)
    assert len(above.collections) == 4, "a band from the least to the most"


@pytest.mark.parametrize(("apart", "entries"), [(1e-7, 0), (0.5, 3)])
def test_lines_that_lie_on_one_another_have_no_legend(tmp_path, apart, entries):
    mine = [finished(arm, arm, 2, loss=2 + apart * number) for number, arm in enumerate(("ddp", "zero1", "zero2"))]
    figure = losses.figure(losses.table(runs.load(put(tmp_path, *mine))))
    assert sum(len(legend.get_texts()) for legend in figure.legends) == entries
    assert names(figure.axes[1]) == ["zero1", "zero2"], "the lower panel names them in any case"


def test_without_a_gpu_offloaded_memory_is_in_a_panel_of_its_own(tmp_path):
    mine = [finished(arm, arm, 1) for arm in ("single", "zero3_cpu")]
    loaded = runs.load(put(tmp_path, *mine))
    above, below = memory.figure(memory.table(loaded)).axes
    assert (names(above), names(below)) == (["single"], ["zero3_cpu"])
    assert below.get_title("left").replace("\n", " ").endswith(memory.ONE_MEMORY)


def test_script(all_runs):
    """Each of its trainings in each version: medians over three seeds."""
    table = documents.script(all_runs).set_index(["script", "training"])
    assert [*table.index] == [(words, number) for words in documents.REPAIRS.values() for number in (1, 2, 3)]
    second = table.xs(2, level="training")
    assert [*second["deepspeed_initialize_calls"]] == [0, 0, 1]
    assert [*second["weights_from"]] == ["the end of training 1", "the initial weights", "the initial weights"]
    assert [*second["median_last_loss"]] == pytest.approx([0.164, 0.679, 0.679], abs=5e-4)


def test_document_000_prints_other_sizes_than_its_runs_hold():
    sizes = documents.memory_000(runs.load(KEPT / "h100")).groupby(["arm", "source"])["bytes"].sum().unstack() / 1e9
    assert [*sizes["measured"].round(1)] == [184.9, 42.7, 28.5]
    assert [*sizes["the document"]] == [76, 45, 28]


def test_ddp_sends_one_all_reduce_of_its_gradients_in_each_precision():
    """What a bar is divided by has the bytes of the gradients that were counted."""
    folders = [KEPT / name for name in ("nodes", "offload", "optimizers", "smoke")]
    kept = runs.load(folders).select(arm="ddp", model="gpt-tiny")
    assert {run.record.requested.precision for run in kept.done} == {"fp32", "bf16", "bf16_cast", "bf16_pure"}
    rows = traffic.table(kept)
    counted = rows[rows["source"] == traffic.COUNTED].groupby(["panel", "line"])["times"].sum()
    assert [*counted] == pytest.approx([1.0] * len(counted), rel=1e-3)


@pytest.mark.parametrize(("name", "value"), [("memory", "bytes"), ("memory_000", "bytes"), ("traffic", "times")])
def test_stacked_bars(drawn, name, value):
    """The first source of a line is a bar of parts, and the sums of the others are marks."""
    figure, rows = drawn[name]
    axes = figure.axes[0]
    first = rows["source"] == rows.groupby("line")["source"].transform("first")
    assert [bar.get_width() for bar in axes.patches] == pytest.approx(list(rows[first][value]))
    totals = rows[first].groupby("line", sort=False)[value].sum()
    texts = [f"{total:.3g}" if value == "times" else size(total) for total in totals]
    assert [text.get_text() for text in axes.texts] == texts
    places = {line: place for place, line in enumerate(totals.index)}
    for (line, _), total in rows[~first].groupby(["line", "source"])[value].sum().items():
        assert_drawn([(total, places[line])], axes)


def drawn_kinds(figure) -> dict[str, bool]:
    """What a note may explain, and whether the figure has it."""
    axes = figure.axes
    return {
        "Bands": any(isinstance(each, PolyCollection) for each in axes[0].collections),
        "Hatched": any(bar.get_hatch() for panel in axes for bar in panel.patches),
        "Lower panel": axes[-1].get_xlabel().startswith("difference"),
        "coincide": len(axes[0].lines) > 1 and axes[0].get_ylabel().startswith("training loss"),
        "a panel of their own": any("one memory" in panel.get_title("left").replace("\n", " ") for panel in axes),
    }


@pytest.mark.parametrize(
    ("folder", "arms"),
    [
        ("smoke", ["ddp"]),
        ("smoke", ["ddp", "zero2", "zero3_cpu"]),
        ("stages", ["ddp", "zero3"]),
        ("at_scale", ["zero2", "zero3"]),
    ],
)
@pytest.mark.parametrize("topic", [losses, memory, traffic], ids=lambda topic: topic.__name__.rpartition(".")[2])
def test_a_note_explains_what_its_figure_has_and_nothing_else(topic, folder, arms):
    rows = topic.table(runs.load(KEPT / folder).select(arm=arms))
    if rows.empty:
        assert (topic, folder) == (losses, "at_scale"), "virtual ranks have no loss"
        return
    figure = topic.figure(rows[rows["group"] == rows["group"].iloc[0]])
    note = figure.legends[0].get_title().get_text().replace("\n", " ")
    drawn = drawn_kinds(figure)
    assert {words: words in note for words in drawn} == drawn


def test_the_svg_is_text_the_same_each_time_and_leaves_no_style_behind(drawn):
    before = dict(matplotlib.rcParams)
    text, again = (style.svg(losses.figure(drawn["losses"][1]), "losses") for _ in range(2))
    assert dict(matplotlib.rcParams) == before
    assert text == again
    assert ">optimizer step</text>" in text
