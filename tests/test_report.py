"""The report: a site that opens from disk, names what is broken, and replaces nothing that it did not write."""

import html
import itertools
import json
import math
import os
import re
import shutil
import xml.etree.ElementTree
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pandas as pd
import pytest
from conftest import at_home
from shaped import finished, put

from study.core.errors import Stop
from study.ledger import texts as ledger
from study.records.keeping import redact
from study.report import answers
from study.report import site as report
from study.report.tables import as_html, cell, heading

BROKEN = {
    "broken-schema": "got 99",
    "broken-json": "Invalid JSON",
    "broken-half": "half-written",
    "broken-none": "record.json' cannot be read",
    "broken-name": "cannot be the name of a file",
}


def links(path: Path) -> list[str]:
    """Where a page leads, but for addresses of sources."""
    every = [html.unescape(link) for link in re.findall(r'<a [^>]*?href="([^"]*)"', path.read_text())]
    return [link for link in every if not link.startswith("https://")]


def table(path: Path) -> list[dict]:
    return pd.read_csv(path).to_dict("records")


def assert_links_lead_somewhere(folder: Path) -> None:
    for path in folder.rglob("*.html"):
        for link in links(path):
            parts = urlsplit(link)
            assert not parts.scheme, f"{path.name} leads out of the site: {link}"
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_file(), f"{path.name} leads to {link}, which is not there"
            assert not parts.fragment or f'id="{unquote(parts.fragment)}"' in target.read_text(), f"{path.name}: {link}"


def test_every_link_leads_somewhere(site):
    assert {path.stem for path in site.rglob("*.html")} == {"index", "calculator", "claims", *report.NOTEBOOKS}
    assert not (site.parent / "escaped.html").exists()
    assert f"Predicted for {answers.ADVISED}" in (site / "index.html").read_text()
    assert_links_lead_somewhere(site)


def test_every_claim_has_a_place_with_its_quote_and_its_verdict(site):
    text = html.unescape((site / "claims.html").read_text())
    for each in (*ledger.claims(), *ledger.faults()):
        assert text.count(f'<li id="{each.id}"') == 1
        assert each.found in text
    assert all(claim.quote in text and claim.outcome in text for claim in ledger.claims())
    assert 'href="https://arxiv.org/abs/1910.02054v3"' in text


def test_nothing_is_loaded_from_a_network_and_no_page_names_a_folder_of_this_machine(site, real_runs):
    for path in [*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.js"), *site.rglob("*.ipynb")]:
        ours = r'xmlns(:\w+)?="[^"]+"|<metadata>.*?</metadata>|<a href="https://[^"]+"( rel="noopener")?>'
        text = re.sub(ours, "", path.read_text(), flags=re.DOTALL)
        assert str(real_runs.parent) not in text, path.name
        if path.suffix != ".ipynb":
            assert not re.search(r"""(src|href)=["']?(https?:)?//|url\(["']?(https?:)?//|@import""", text), path


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named_with_what_is_wrong(name, site):
    (line,) = re.findall(rf"<li>[^<]*{name}[^<]*", (site / "index.html").read_text())
    assert BROKEN[name] in html.unescape(line)


def test_every_figure_is_whole_and_has_its_data_beside_it(site):
    of_page = r'<figure>(<svg.*?</svg>)\s*<figcaption>[^<]*<a href="data/([^"]+)\.csv"'
    figures = [each for path in site.glob("*.html") for each in re.findall(of_page, path.read_text(), re.DOTALL)]
    assert len(figures) > 8
    for image, name in figures:
        xml.etree.ElementTree.fromstring(image)
        assert redact(image) == image, "leaving out paths changes no figure"
        assert table(site / "data" / f"{name}.csv"), name
    losses = table(site / "data" / "compare-losses-1.csv")
    assert {row["line"] for row in losses} == {"single", "ddp", "zero2", "zero3_cpu"}


def test_a_table_shows_markup_as_text_sizes_with_units_and_a_dash_for_what_is_unknown():
    """Records come from anybody."""
    assert "<script>" not in as_html(pd.DataFrame({"arm": ["<script>alert(1)</script>"]}))
    assert heading("peak_mb") == "peak MB"
    assert [cell(4.4e7, "peak_bytes"), cell(0.12345678, "over"), cell(None, "n"), cell(math.nan, "n")] == [
        *("44 MB", "0.1235", "-", "-"),
    ]


def test_a_notebook_that_fails_is_named_and_does_not_end_the_report(real_runs, tmp_path, monkeypatch):
    shutil.copytree(report.ROOT / "notebooks", tmp_path / "root" / "notebooks")
    bad = tmp_path / "root" / "notebooks" / "compare.ipynb"
    bad.write_text(bad.read_text().replace("rows = memory.table(book.runs)", "found = 1 / 0"))
    monkeypatch.setattr(report, "ROOT", tmp_path / "root")
    monkeypatch.setattr(report, "NOTEBOOKS", {"compare": "Compare"})
    monkeypatch.setattr(report.style, "svg", lambda *_: "")
    lines: list[str] = []
    assert report.build([real_runs], tmp_path / "out", lines.append) == ["compare"]
    assert "ZeroDivisionError" in "".join(lines)
    assert "ZeroDivisionError" in (tmp_path / "out" / "compare.html").read_text()
    assert "failed" in (tmp_path / "out" / "index.html").read_text()


# --- what is replaced, and what is not -----------------------------------------------------------------------------


VALUES = report.calculator.values()


@pytest.fixture
def quick(monkeypatch):
    """A build with its pages, and without verdicts and notebooks, after doing `during`."""

    def build(runs: Path, out: Path, during=lambda: None) -> list[str]:
        monkeypatch.setattr(report.calculator, "values", lambda: during() or VALUES)
        monkeypatch.setattr(report, "NOTEBOOKS", {})
        monkeypatch.setattr(report.style, "svg", lambda *_: "")
        return report.build([runs], out, lambda text: None)

    return build


def test_only_what_a_build_made_is_replaced_and_only_by_a_whole_one(quick, tmp_path):
    """What else a folder may hold is in test_output."""
    some_runs, out = put(tmp_path / "runs", finished("one")), tmp_path / "out"
    for place in (some_runs, tmp_path):
        with pytest.raises(Stop, match="contains the runs"):
            quick(some_runs, place)
    assert quick(some_runs, out) == []

    def interrupt():
        raise KeyboardInterrupt

    before = (out / "index.html").stat().st_ino
    with pytest.raises(KeyboardInterrupt):
        quick(some_runs, out, interrupt)
    assert (out / "index.html").stat().st_ino == before
    assert quick(some_runs, out) == []
    assert (out / "index.html").stat().st_ino != before
    (out / "index.html").write_text("by hand")
    with pytest.raises(Stop, match=r"changed since .*index\.html"):
        quick(some_runs, out)
    assert (out / "index.html").read_text() == "by hand"


@pytest.mark.parametrize("runs", ["nowhere", "empty"])
def test_without_a_run_nothing_is_replaced(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(Stop, match=r"is not a folder|no run can be read"):
        report.build([tmp_path / runs], tmp_path / "out", print)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../../escaped", "/absolute", 5, "a\x00b", "..", "a\\b"])
def test_a_run_whose_name_leads_elsewhere_is_set_aside(name, quick, tmp_path):
    name = f"{tmp_path}/absolute" if name == "/absolute" else name
    runs = put(tmp_path / "runs", finished("good"), finished("odd"))
    path = runs / "odd" / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"run_id": name}))
    before = set(tmp_path.rglob("*"))
    quick(runs, tmp_path / "deep" / "out")
    assert all(tmp_path / "deep" in (path, *path.parents) for path in {*tmp_path.rglob("*")} - before)
    text = (tmp_path / "deep" / "out" / "index.html").read_text()
    (line,) = re.findall(r"<li>[^<]*odd[^<]*", text)
    assert "run_id" in line


def test_odd_runs_do_not_end_a_report(quick, tmp_path):
    runs = put(tmp_path / "runs", finished("a b#?%ü"), finished("surrogate", requested__model="half \ud800 of a pair"))
    (runs / "deep").mkdir()
    (runs / "deep" / "record.json").write_text("[" * 100_000)
    quick(runs, tmp_path / "out")
    text = (tmp_path / "out" / "index.html").read_text()
    for name in ("deep", "surrogate"):
        assert re.search(rf"<li>[^<]*{name}/record\.json is not a valid record[^<]*", text)


@pytest.mark.slow
def test_a_report_over_250_runs_takes_a_minute_of_two_cores_and_15_mb(home, tmp_path, monkeypatch):
    """Seconds of processors, because others may use them: the processes of the pool count when they have ended."""
    cells = itertools.product(("ddp", "zero1", "zero2", "zero3", "zero3_cpu"), range(1, 11), range(5))
    for arm, rows, seed in cells:
        name = f"run-{arm}-{rows}-{seed}"
        put(tmp_path / "runs", finished(name, arm, 2, seed, micro_batch=rows, step=0.1 + seed / 1000))
    at_home(home, monkeypatch)
    started = sum(os.times()[:4])
    assert report.build([tmp_path / "runs"], tmp_path / "site", print) == []
    assert sum(os.times()[:4]) - started < 2 * 60
    assert sum(path.stat().st_size for path in (tmp_path / "site").rglob("*") if path.is_file()) < 15e6
