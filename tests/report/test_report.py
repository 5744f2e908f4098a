"""The report: a site that opens from disk, names what is broken, and replaces nothing that it did not write."""

import html
import json
import math
import re
import shutil
import xml.etree.ElementTree
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pandas as pd
import pytest
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


def set_aside(site: Path, name: str) -> str:
    """What the index says of a run that cannot be shown."""
    (line,) = re.findall(rf"<li>[^<]*{name}[^<]*", (site / "index.html").read_text())
    return html.unescape(line)


def test_every_link_leads_somewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert {path.stem for path in pages} == {"index", "calculator", "claims", *report.NOTEBOOKS}
    for path in pages:
        links = map(html.unescape, re.findall(r'<a [^>]*?href="([^"]*)"', path.read_text()))
        for link in [each for each in links if not each.startswith("https://")]:
            parts = urlsplit(link)
            assert not parts.scheme, f"{path.name} leads out of the site: {link}"
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_file(), f"{path.name} leads to {link}, which is not there"
            assert not parts.fragment or f'id="{unquote(parts.fragment)}"' in target.read_text(), f"{path.name}: {link}"
    assert f"Predicted for {answers.ADVISED}" in (site / "index.html").read_text()


def test_every_claim_has_a_place_with_its_quote_and_its_verdict(site):
    text = html.unescape((site / "claims.html").read_text())
    for each in (*ledger.claims(), *ledger.faults()):
        assert text.count(f'<li id="{each.id}"') == 1
        assert each.found in text
    assert all(claim.quote in text and claim.outcome in text for claim in ledger.claims())


def test_nothing_is_loaded_from_a_network_and_no_page_names_a_folder_of_this_machine(site, real_runs):
    for path in [*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.js")]:
        ours = r'xmlns(:\w+)?="[^"]+"|<metadata>.*?</metadata>|<a href="https://[^"]+"( rel="noopener")?>'
        text = re.sub(ours, "", path.read_text(), flags=re.DOTALL)
        assert str(real_runs.parent) not in text, path.name
        assert not re.search(r"""(src|href)=["']?(https?:)?//|url\(["']?(https?:)?//|@import""", text), path


def test_what_is_broken_is_named_with_what_is_wrong(site):
    for name, words in BROKEN.items():
        assert words in set_aside(site, name)
    assert not (site.parent / "escaped.html").exists()


def test_every_figure_is_whole_and_has_its_data_beside_it(site):
    of_page = r'<figure>(<svg.*?</svg>)\s*<figcaption>[^<]*<a href="data/([^"]+)\.csv"'
    figures = [each for path in site.glob("*.html") for each in re.findall(of_page, path.read_text(), re.DOTALL)]
    assert len(figures) > 8
    for image, name in figures:
        xml.etree.ElementTree.fromstring(image)
        assert redact(image) == image, "leaving out paths changes no figure"
        assert len(pd.read_csv(site / "data" / f"{name}.csv")), name
    losses = pd.read_csv(site / "data" / "compare-losses-1.csv")
    assert {*losses["line"]} == {"single", "ddp", "zero2", "zero3_cpu"}


def test_a_table_shows_markup_as_text_sizes_with_units_and_a_dash_for_what_is_unknown():
    """Records come from anybody."""
    assert "<script>" not in as_html(pd.DataFrame({"arm": ["<script>alert(1)</script>"]}))
    assert heading("peak_mb") == "peak MB"
    shown = [cell(4.4e7, "peak_bytes"), cell(0.12345678, "over"), cell(None, "n"), cell(math.nan, "n")]
    assert shown == ["44 MB", "0.1235", "-", "-"]


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


def test_without_a_run_nothing_is_replaced(tmp_path):
    with pytest.raises(Stop, match="there is no run below"):
        report.build([tmp_path / "nowhere"], tmp_path / "out", print)
    assert not (tmp_path / "out").exists()


def test_odd_runs_are_set_aside_and_write_nothing_elsewhere(quick, tmp_path):
    runs = put(tmp_path / "runs", finished("a b#?%ü"), finished("surrogate", requested__model="half \ud800 of a pair"))
    names = ["../../escaped", f"{tmp_path}/absolute", 5, "a\x00b", "..", "a\\b"]
    for number, name in enumerate(names):
        put(runs, finished(f"odd-{number}-"))
        (runs / f"odd-{number}-" / "record.json").write_text(json.dumps(finished() | {"run_id": name}))
    (runs / "deep").mkdir()
    (runs / "deep" / "record.json").write_text("[" * 100_000)
    before = set(tmp_path.rglob("*"))
    quick(runs, tmp_path / "below" / "out")
    assert all(tmp_path / "below" in (path, *path.parents) for path in {*tmp_path.rglob("*")} - before)
    for number in range(len(names)):
        assert "run_id" in set_aside(tmp_path / "below" / "out", f"odd-{number}-")
    for name in ("deep", "surrogate"):
        assert f"{name}/record.json is not a valid record" in set_aside(tmp_path / "below" / "out", name)
