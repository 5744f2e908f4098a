"""The small charts of the pages, and a run's page where its record is odd."""

import html
import re

import pytest
from shaped import failed, finished, put, script

from study.records import runs as records
from study.report import charts, run_pages, style


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.6394, 0.7968), (-3, 7e6), (1e-9, 1.1e-9), (5, 5.0001), (0, 2**60)]
)
def test_ticks_hold_what_is_drawn(low, high):
    ticks = charts.ticks(low, high)
    assert ticks[0] <= low + 1e-9 * abs(low)
    assert ticks[-1] >= high - 1e-9 * abs(high)
    assert 2 <= len(ticks) <= charts.MOST_TICKS + 1


def test_every_value_of_a_line_lies_where_its_tick_is():
    drawn = charts.chart({"training": [(1, 2.0), (2, 4.0), (3, 3.0)]}, "step", "loss")
    place_of = {text: place for place, text in drawn.y_ticks}
    assert [y for _, y, _ in drawn.lines[0].points] == [place_of["2"], place_of["4"], place_of["3"]]
    assert [x for x, _ in drawn.x_ticks] == [x for x, _, _ in drawn.lines[0].points]


@pytest.mark.parametrize("values", [[(1, 0.0)], [(1, 7.5)], [(1, 1e300), (2, 1e300)], [(1, float("nan")), (2, 1.0)]])
def test_a_single_value_can_be_drawn(values):
    drawn = charts.chart({"training": values}, "step", "loss")
    left, right, top, bottom = drawn.frame
    assert all(left <= x <= right and top <= y <= bottom for x, y, _ in drawn.lines[0].points)


def test_of_nothing_there_is_no_chart():
    assert charts.chart({"training": [], "evaluation": [(1, float("inf"))]}, "step", "loss") is None


def test_parts_of_bars_have_lengths_in_proportion_to_the_longest():
    drawn = charts.bars({"a": {"weights": 75e6, "gradients": 25e6}, "b": {"weights": 50e6}}, style.PARTS, "Memory", "b")
    assert [[(part, share) for part, _, _, share in bar.parts] for bar in drawn.bars] == [
        [("weights", 75), ("gradients", 25)],
        [("weights", 50)],
    ]
    assert [bar.predicted for bar in drawn.bars] == [False, True]
    assert drawn.legend == {"weights": style.PARTS["weights"], "gradients": style.PARTS["gradients"]}


def test_a_long_line_is_marked_at_its_last_step():
    drawn = charts.chart({"training": [(step, step / 7) for step in range(1, 1001)]}, "step", "loss")
    values = drawn.lines[0].values.split(",")
    assert len(values) <= charts.MOST_MARKS
    assert values[-1] == drawn.lines[0].points[-1][2] == "1000 142.9"


def test_figures_have_no_more_decimals_than_can_be_seen_and_their_texts_keep_all():
    drawing, (axes,) = style.panels([2.0])
    axes.plot([1, 2, 3.3333333], [0.123456789, 2 / 3, 0.5])
    axes.set_title("0.123456789")
    text = style.svg(drawing, "lines")
    assert ">0.123456789<" in text
    lines = re.findall(r' d="([^"]+)"', text)
    assert lines
    assert not any(re.search(r"\.\d{3}", line) for line in lines)


def test_a_bar_and_a_line_of_the_grid_are_written_shorter():
    drawing, (axes,) = style.panels([2.0])
    axes.barh([0], [1])
    lines = re.findall(r' d="([^"]+)"', style.svg(drawing, "bar"))
    assert any(re.fullmatch(r"M[\d.]+ [\d.]+H[\d.]+V[\d.]+H[\d.]+z", line) for line in lines), "a rectangle"
    assert any(re.fullmatch(r"M[\d.]+ [\d.]+V[\d.]+", line) for line in lines), "upright"
    assert any(re.fullmatch(r"M[\d.]+ [\d.]+H[\d.]+", line) for line in lines), "level"


MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages of some odd runs, and what was said of them."""
    folder, out = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("out")
    odd = finished("markup", observed__data_source=MARKUP, observed__wrapper=MARKUP, requested__data=MARKUP)
    odd["software"][MARKUP] = MARKUP
    differs = finished("differs", observed__accumulation=3)
    oom = failed("oom")
    oom["error"]["message"] = MARKUP
    interruption = {"run_id": "first", "step": 3, "arm": "zero2", "ranks": 2, "route": "load_state"}
    resumed = finished("resumed", checkpoints__resumes=[interruption])  # it has no median of its seconds
    put(folder, odd, differs, oom, finished("virtual", ranks=64, virtual=True), script("script"), resumed)
    runs = records.load(folder)
    written, problems = run_pages.write(runs, run_pages.slugs(runs), [], out, {})
    assert (len(written), problems) == (6, [])
    return {page["slug"]: (out / f"{page['slug']}.html").read_text() for page in written}


def test_markup_in_a_record_is_text_on_its_page(pages):
    assert all(html.escape(MARKUP) in pages[name] for name in ("markup", "oom"))
    for text in pages.values():
        assert "<img" not in text


def test_what_was_asked_for_and_not_observed_is_marked(pages):
    assert re.search(r"passes per step<td>1<td>3 <strong class=\"differs\">", pages["differs"])
    assert "differs</strong>" not in pages["virtual"]


def test_a_virtual_run_has_no_loss_and_says_what_it_is(pages):
    assert "A virtual rank: rank 0, run alone." in pages["virtual"]
    assert 'id="loss"' not in pages["virtual"]
    assert 'id="loss"' in pages["differs"]
    assert "Hatched: predicted" in pages["differs"]


def test_every_training_of_a_script_has_its_line(pages):
    """Two of them may have one name."""
    assert pages["script"].count("<polyline") == int(re.search(r"Losses of (\d) trainings", pages["script"])[1])
