"""The report: a site that opens from disk, names what is broken, and replaces nothing that it did not write.

And it tells nothing private, nor runs what a stranger planted in every text of a record.
"""

import html
import json
import math
import re
import xml.etree.ElementTree
from pathlib import Path
from urllib.parse import unquote

import bs4
import nbformat
import pandas as pd
import pytest

from study.configs.sentences import sentences
from study.core.errors import Stop
from study.known.faults import table as table_of_faults
from study.ledger import texts as ledger
from study.ledger import verdicts
from study.records.keeping import redact
from study.records.schema import Record
from study.report import answers
from study.report import site as report
from study.report.notebook import Book
from study.report.stacks import PACKAGES
from study.report.tables import as_html, cell, heading, no_formula
from tests.cases import for_each
from tests.conftest import ROOT, table
from tests.shaped import failed, finished, put

STRANGERS = table("report/strangers.toml")


def set_aside(site: Path, name: str) -> str:
    """What the index says of a run that cannot be shown."""
    (line,) = re.findall(rf"<li>[^<]*{name}[^<]*", (site / "index.html").read_text())
    return html.unescape(line)


def test_every_link_leads_somewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert {path.stem for path in pages} == {
        "index",
        "gpu",
        "contributed",
        "calculator",
        "stack",
        "faults",
        "claims",
        "sentences",
        "by_hand",
        "guide",
        *(f"answer-{each['name']}" for each in answers.questions()),
        *report.NOTEBOOKS,
    }
    for path in pages:
        links = re.findall(r'<a [^>]*?href="([^"]*)"', path.read_text())
        for link in [each for each in links if not each.startswith("https://")]:
            name, _, fragment = unquote(html.unescape(link)).partition("#")
            target = path.parent / (name or path.name)
            assert target.is_file(), f"{path.name} leads to {link}, which is not there"
            assert target.suffix != ".ipynb", f"{path.name} leads to {link}, which a browser shows as JSON"
            assert not fragment or f'id="{fragment}"' in target.read_text(), f"{path.name}: {link}"


def test_each_file_that_is_a_page_is_a_link(site):
    """Wherever its path stands, but in the line that names the page's own."""
    for path in sorted(site.glob("*.html")):
        if path.stem == "faults":  # which works without the others
            continue
        bare = bs4.BeautifulSoup(path.read_text(), "html.parser").find_all("code", string=[*report.pages_of()])
        assert [each.string for each in bare if not each.find_parents(["a", "footer"])] == [], path.name
    harness = "examples/zero_by_hand/harness.py"
    assert (site / "sources" / harness).read_text() == (ROOT / harness).read_text()


def test_no_page_shows_a_backtick_outside_of_code_and_drawings(site):
    for path in sorted(site.rglob("*.html")):
        plain = re.sub(r"<(code|pre|script|style)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)
        assert not re.search(r"`[^`]+`", plain), path.name


def test_navigation_has_the_order_of_readmes_doors(tmp_path, monkeypatch):
    """Each notebook is in it, and the page that reads a log where there is one."""
    readme = " ".join(re.findall(r"^\*\*(.+?)\*\*", (ROOT / "README.md").read_text(), re.MULTILINE))
    doors = [*report.IN_NAVIGATION][1:4]
    starts = [readme.lower().index(door.lower().removeprefix("your ")) for door in doors]
    assert starts == sorted(starts)
    for paste in (False, True):
        monkeypatch.setitem(report.PAGES.globals, "paste", paste)
        report.write(tmp_path, "sentences", sentences=[])
        nav = (tmp_path / "sentences.html").read_text().partition("</nav>")[0]
        shown = re.findall(r'<a href="(\w+)\.html"', nav)
        assert shown[:3] == ["index", "by_hand", "stages"]
        assert shown.index("stack") < shown.index("claims")
        assert {*shown} > report.NOTEBOOKS.keys()
        assert ("paste" in shown) == paste
        assert '<a href="index.html#words">Words</a>' in nav


def test_links_of_a_text_lead_to_pages_of_the_site_or_name_the_file():
    text = "[memory](../../reports/answers/memory.md), [book](../../notebooks/stages.ipynb), ![p](p.svg)"
    assert report.linked(text, report.ANSWERS) == "[memory](answer-memory.html), [book](stages.html), ![p](p.svg)"
    assert (
        report.linked("[guide](../../GUIDE.md#x), [below](#y)", report.ANSWERS) == "[guide](guide.html#x), [below](#y)"
    )
    files = "[one run](../h200-3/README.md), [the `site.py`](../../study/report/site.py)"
    named = "one run (`reports/h200-3/README.md` in the repository), [the `site.py`](sources/study/report/site.py)"
    assert report.linked(files, report.ANSWERS) == named
    of_words = "[words](../../WORDS.md), [low](../../WORDS.md#verdicts), [by hand](../../notebooks/by_hand.ipynb)"
    there = "[words](index.html#words), [low](index.html#words), [by hand](by_hand.html)"
    assert report.linked(of_words, report.ANSWERS) == there
    cards = {report.ANSWERS: "claims/P1.md", report.BY_HAND_FOLDER: "../../reports/answers/claims/P1.md"}
    for folder, path in cards.items():
        assert report.linked(f"[P1-03]({path}#p1-03)", folder) == "[P1-03](claims.html#P1-03)"


def test_the_first_page_begins_with_what_a_stage_divides_and_has_each_answer_with_its_page(site):
    index = html.unescape((site / "index.html").read_text())
    doors = ("I want to understand ZeRO", "study oom train.log", 'href="claims.html">Each')
    parts = ("stage 1 the optimizer states", *doors, 'id="drag"', 'id="answers"', "<table")
    begun = [index.index(words) for words in parts]
    assert begun == sorted(begun)
    for each in answers.questions():
        card = index[index.rindex(f"<dt>{each['question']}</dt>") :].partition("</div>")[0]
        said = card.replace("<code>", "`").replace("</code>", "`")
        assert each["answer"] in said
        assert each["known"] in card
        page = html.unescape((site / f"answer-{each['name']}.html").read_text())
        assert f"answer-{each['name']}.html" in card
        assert each["question"] in page
        assert "study " in page, "its commands"


def test_each_id_of_a_claim_a_fault_or_a_sentence_leads_to_its_place(site):
    """Wherever it stands: in a sentence, a cell, a command. The page of faults in one file works without the others."""
    pages = {path.stem: bs4.BeautifulSoup(path.read_text(), "html.parser") for path in site.glob("*.html")}
    del pages["faults"]
    known = {each.id for each in (*sentences(), *ledger.claims(), *ledger.faults()) if re.search("[-_]", each.id)}
    for name, page in pages.items():
        bare = [text for text in page.find_all(string=True) if not text.find_parents(NO_LINK)]
        words = {word for text in bare for word in re.findall(r"[\w-]+", text)}
        claims = {word for word in words if re.fullmatch(r"[PS]\d+-\d+|[KLO]-\d+", word)}
        assert (words & known) - {"data-parallel"} | claims == set(), name
    linked = {link["href"] for page in pages.values() for link in page.select("main a[href*='.html#']")}
    assert {"claims.html#P1-17", "claims.html#L-54", "sentences.html#last-pass-only"} <= linked


NO_LINK = ["a", "script", "style", "svg", "title", "option"]


def test_zero_by_hand_shows_of_the_last_two_files_what_they_change(site):
    whole = (site / "by_hand.html").read_text()
    page = html.unescape(re.sub("<.*?>", "", whole[whole.index('<h2 id="one_process.py">') :]))
    shown = {name: page.partition(f"{name}.py\n")[2] for name in report.BY_HAND}
    assert shown["stage2"].startswith("The one idea: each gradient is reduce-scattered")
    assert "Beside stage1.py:\n@@" in shown["stage2"]
    assert not re.search(r'\n-(class|""")', page), "neither names nor docstrings"
    assert "\n+        weight.register_post_accumulate_grad_hook(self.reduce)" in shown["stage2"]
    assert page.count("def padded(self, tensor)") == 1, "once, in stage1.py"
    assert all(f'href="#{name}.py"' in whole and f'id="{name}.py"' in whole for name in report.BY_HAND)


def test_kept_records_are_labelled_where_they_are_shown(site):
    """The runs of this report are small: what it says of large models is of records that the repository keeps."""
    index = html.unescape((site / "index.html").read_text())
    memory = index[index.index('<h2 id="memory">') : index.index('<h2 id="traffic">')]
    assert memory.count("Kept records.") == 1
    assert memory.index("Kept records.") < memory.index("<table"), "before the numbers"
    assert "<th>llama3-8b, virtual ranks (kept)</th>" in memory
    assert answers.AT_SCALE in memory
    losses = index[index.index('<h2 id="losses">') : index.index('<h2 id="memory">')]
    assert "Kept records." not in losses
    stages = (site / "stages.html").read_text()
    assert "at_scale, from two CPU cores" in stages
    assert "smoke, from two CPU cores" in stages, "the reader's two ranks trained a BERT, and the notebook shows a GPT"


def of_claims(site: Path) -> str:
    """The page of claims without its links, as a claim is written."""
    page = re.sub("</?a\\b.*?>", "", (site / "claims.html").read_text())
    return re.sub("</?code>", "`", html.unescape(page))


def test_every_claim_has_a_place_with_its_quote_and_its_verdict(site):
    text = of_claims(site)
    for each in (*ledger.claims(), *ledger.faults()):
        assert text.count(f'<li id="{each.id}"') == 1
        assert each.found in text
    assert all(claim.quote in text for claim in ledger.claims())


def test_a_closed_card_shows_its_verdict_with_one_sentence_and_one_number(site):
    """The rest is in its fold. An answer of five words, such as that nothing was run, has no number."""
    text = of_claims(site)
    cards = {
        id: (closed, fold)
        for id, closed, fold in re.findall(r'(?s)<li id="([SP]\d+-\d+)"(.*?)<details>(.*?)</li>', text)
    }
    for each in ledger.claims():
        closed, fold = cards[each.id]
        shown = [words.strip() for words in re.split("<.*?>", closed.partition(">")[2])]
        certainty = each.certainty and f"certainty: {each.certainty}"
        wanted = (certainty, each.not_judged and "judged in part", each.answer, each.numbers and f"{each.numbers}.")
        assert [*filter(None, shown)] == [each.id, each.verdict, *filter(None, wanted)]
        assert all(words in fold for words in (each.quote, each.found, each.condition or ""))


def test_a_claim_of_runs_leads_to_its_records_and_to_what_makes_them_again(site):
    text = re.sub("</?a\\b.*?>", "", html.unescape((site / "claims.html").read_text()))
    cards = re.findall(r'(?s)<li id="([SP]\d+-\d+)"(.*?)</details></li>', text)
    papers_first = sorted(ledger.texts(), key=lambda text: (text.document.startswith("S"), text.is_read_in_part))
    claims = [claim for text in papers_first for claim in text.claim]
    assert [id for id, _ in cards] == [claim.id for claim in claims]
    assert (verdicts.by_reading() in text, text.count(">body not read<")) == (True, 3)
    for claim, (id, card) in zip(claims, cards, strict=True):
        of_runs = any(piece.kind in ("runs", "virtual") for piece in claim.evidence)
        assert (f"<code>study claims {id} --runs reports</code>" in card) == of_runs
        folders = re.findall(r"<code>(reports/.+?)</code>", card.partition("in a checkout. Records: ")[2])
        assert bool(folders) == of_runs
        assert all([*(ROOT / folder).glob("*/record.json")] for folder in folders)
        assert (
            bool(re.search(r"Runs like them, not these: <code>(study sweep|accelerate launch|git checkout) ", card))
            == of_runs
        )


def test_every_sentence_has_its_id_as_a_place(site):
    pages = {name: (site / f"{name}.html").read_text() for name in ("stack", "sentences")}
    of_training = [fault for fault in table_of_faults().fault if fault.when is not None and fault.package in PACKAGES]
    for name, of_page in (("stack", of_training), ("sentences", sentences())):
        assert [each.id for each in of_page if pages[name].count(f'<li id="{each.id}"') != 1] == []


def test_nothing_is_loaded_from_a_network_and_no_page_names_a_folder_of_this_machine(site, real_runs):
    ours = r'xmlns(:\w+)?="[^"]+"|<metadata>.*?</metadata>|<a href="https://[^"]+"( rel="noopener")?>'
    for path in [*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.js")]:
        text = re.sub(ours, "", path.read_text(), flags=re.DOTALL)
        assert str(real_runs.parent) not in text, path.name
        assert not re.search(r"""(src|href)=["']?(https?:)?//|url\(["']?(https?:)?//|@import""", text), path


def test_every_figure_is_whole_and_has_its_data_beside_it(site):
    of_page = r'<figure>(<svg.*?</svg>)\s*<figcaption>[^<]*<a href="data/([^"]+)\.csv"'
    pages = "".join(path.read_text() for path in site.glob("*.html"))
    figures = re.findall(of_page, pages, re.DOTALL)
    assert len(figures) > 8
    for image, name in figures:
        xml.etree.ElementTree.fromstring(image)
        assert redact(image) == image, "leaving out paths changes no figure"
        assert len(pd.read_csv(site / "data" / f"{name}.csv")), name
    losses = pd.read_csv(site / "data/compare-losses-1.csv")
    assert {*losses["line"]} == {"single", "ddp", "zero2", "zero3_cpu"}


def test_a_table_shows_markup_as_text_sizes_with_units_and_a_dash_for_what_is_unknown():
    """Records come from anybody."""
    assert "<script>" not in as_html(pd.DataFrame({"arm": ["<script>alert(1)</script>"]}))
    assert (heading("peak_bytes"), heading("micro_batch"), heading("last_loss")) == (
        "peak",
        "micro-batch",
        "last loss",
    )
    shown = [cell(4.4e7, "peak_bytes"), cell(0.12345678, "over"), cell(None, "n"), cell(math.nan, "n")]
    assert shown == ["44 MB", "0.1235", "-", "-"]


def test_a_table_leaves_out_a_column_of_which_nothing_is_known():
    rows = pd.DataFrame({"arm": ["ddp", "zero2"], "cuda": [None, ""], "n": [None, 3]})
    assert re.findall("<th>(.*?)</th>", as_html(rows)) == ["arm", "runs"]
    assert re.findall("<th>(.*?)</th>", as_html(rows[:0])) == ["arm", "cuda", "runs"], (
        "an empty table shows its columns"
    )


def test_a_notebook_that_fails_is_named_and_does_not_end_the_report(quick, tmp_path, monkeypatch, capsys):
    metadata = {"language_info": {"name": "python"}}
    bad = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")], metadata=metadata)
    (tmp_path / "notebooks").mkdir()
    nbformat.write(bad, tmp_path / "notebooks/compare.ipynb")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert quick(put(tmp_path / "runs", finished("one")), tmp_path / "out", {"compare": "Compare"}) == ["compare"]
    page = (tmp_path / "out/compare.html").read_text()
    for text in (capsys.readouterr().out, page):
        assert "ZeroDivisionError" in text
    assert "failed" in (tmp_path / "out/index.html").read_text()


# --- what is replaced, and what is not -----------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """A build without figures, and with no notebooks but those that are given."""

    def build(runs: Path, out: Path, notebooks: dict[str, str] | None = None, address: str = "") -> list[str]:
        monkeypatch.setattr(report, "NOTEBOOKS", notebooks or {})
        monkeypatch.setattr(report.style, "svg", lambda *_: "")
        return report.build([runs], out, address)

    return build


def test_a_build_replaces_the_last_one_and_nothing_else(quick, tmp_path):
    """Where the address is known, a link to a page has a picture."""
    some_runs, out = put(tmp_path / "runs", finished("one")), tmp_path / "out"
    for place in (some_runs, tmp_path):
        with pytest.raises(Stop, match="contains the runs"):
            quick(some_runs, place)
    with pytest.raises(Stop, match="there is no run below"):
        quick(tmp_path / "nowhere", out)
    assert not out.exists()
    for address, pictures in (("", []), ("https://example.org/zero", ["https://example.org/zero/preview.png"])):
        assert quick(some_runs, out, address=address) == []
        for page in ("index", "stack", "claims"):
            text = (out / f"{page}.html").read_text()
            assert re.findall(r'og:image" content="([^"]*)"', text) == pictures, "of the last build"
    assert (out / "preview.png").read_bytes() == report.PREVIEW.read_bytes()


def test_a_report_of_damaged_records_alone_has_failed(quick, tmp_path):
    (tmp_path / "runs/damaged").mkdir(parents=True)
    (tmp_path / "runs/damaged/record.json").write_text('{"run_id": ')
    assert quick(tmp_path / "runs", tmp_path / "out") == ["records"]
    assert "damaged" in set_aside(tmp_path / "out", "damaged")


def test_an_installed_wheel_has_no_report_and_says_what_to_do(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "BY_HAND_FOLDER", tmp_path / "nowhere")
    with pytest.raises(Stop, match="a report needs the checkout") as caught:
        quick(put(tmp_path / "runs", finished("one")), tmp_path / "out")
    assert "`make report`" in caught.value.remedy


# --- strangers -----------------------------------------------------------------------------------------------------

PRIVATE = STRANGERS["private"].values()
TELLS, RUNS = STRANGERS["tells"], STRANGERS["runs"]
MARKUP = "<script>alert(1)</script><img src=x onerror=alert(1)> ![x](http://evil.org/a.png) [x](javascript:alert(1))"


def planted(value, text: str, where: str = ""):
    """A record with a text added to every text of it. A value that the record does not take stays as it was."""
    if isinstance(value, dict):
        return {name: planted(each, text, f"{where}.{name}") for name, each in value.items()}
    if isinstance(value, list):
        return [planted(each, text, where) for each in value]
    return f"={value} {text}" if isinstance(value, str) and where not in KEPT else value


# What decides that it is a record of a run that is done, and what only has some values.
KEPT = {".status", ".run_id", ".started_utc", ".finished_utc", ".commit", ".observed.backend"}
KEPT |= {f".requested.{name}" for name in ("task", "init", "precision", "attention", "optimizer", "repair")}


REDACTED = [*STRANGERS["cut"].items(), *((text, text) for text in STRANGERS["stays"]["texts"])]


@for_each(("told", "expected"), REDACTED)
def test_what_tells_of_a_machine_or_its_user_is_taken_out(told, expected):
    assert redact(told) == expected


@pytest.mark.parametrize("text", PRIVATE)
def test_whatever_stands_around_it_nothing_private_is_left(text):
    for told in (f"before {text} after", json.dumps({"x": text})):
        assert not [word for word in TELLS if word in redact(told)], redact(told)


def test_a_secret_is_known_by_its_name():
    assert redact({"hf_token": "short", "tokenizer": "gpt2"}) == {"hf_token": "(secret)", "tokenizer": "gpt2"}


ODD = ("../../escaped", "/tmp/absolute", 5, "a\x00b", "..", "a\\b")  # names of runs


@pytest.fixture
def stranger(tmp_path):
    """Runs of a stranger who put something into every text, and gave odd names."""
    runs = tmp_path / "runs"
    text = f"{' '.join(STRANGERS['private'].values())} {MARKUP}"
    for content in (finished("a", "zero2"), finished("b", "ddp"), failed("c", arm="zero3")):
        put(runs, planted(content, text) | {"run_id": content["run_id"]})
    put(runs, finished("surrogate", requested__model="half \ud800 of a pair"))
    for number, name in enumerate(ODD):
        put(runs, finished(f"odd-{number}-"))
        (runs / f"odd-{number}-" / "record.json").write_text(json.dumps(finished() | {"run_id": name}))
    (runs / "deep").mkdir()
    (runs / "deep/record.json").write_text("[" * 100_000)
    return runs


def test_a_report_tells_nothing_private_and_runs_and_writes_nothing_of_a_stranger(stranger, quick, tmp_path):
    record = (stranger / "a/record.json").read_text()
    assert Record.model_validate_json(record).arm.startswith("=zero2 ")
    assert record.count("alice") > 50, "what is looked for is there"
    before = set(tmp_path.rglob("*"))
    out = tmp_path / "below/out"
    quick(stranger, out)
    assert all(tmp_path / "below" in (path, *path.parents) for path in {*tmp_path.rglob("*")} - before)
    own = 10  # index, gpu, contributed, claims, sentences, calculator, by hand, guide, stack, and that in one file
    assert len([*out.rglob("*.html")]) == own + len(answers.questions())
    assert "Ended early, and why: 1" in (out / "index.html").read_text()
    for path in filter(Path.is_file, out.rglob("*")):
        assert not [word for word in (*TELLS, *RUNS) if word in path.read_text(errors="replace")], path.name
    for number in range(len(ODD)):
        assert "run_id" in set_aside(out, f"odd-{number}-")
    assert "it is nested too deeply" in set_aside(out, "deep")
    assert "surrogate/record.json is not a valid record" in set_aside(out, "surrogate")


def test_data_files_tell_nothing_and_have_no_formula(stranger, tmp_path):
    """What a notebook writes beside a report."""
    book = Book("compare", str(stranger), str(tmp_path))
    book.table(pd.DataFrame([{"arm": run.record.arm} for run in book.runs]), "runs")
    file = tmp_path / "compare-runs.csv"
    assert not [word for word in TELLS if word in file.read_text()]
    starts = pd.read_csv(file)["arm"].str.slice(0, 3)
    assert {"'=z", "'=d"} == {*starts[starts.str.contains("=")]}


def test_a_number_below_zero_is_no_formula():
    texts = ("=1", "+1+1", "@x", "\tx", "\rx", "\n=x", "-x", "\uff1d1")
    assert [no_formula(text) for text in texts] == [f"'{text}" for text in texts]
    others = ["-1.5", "+2", "-1e-07", -3, None, "a=b", "zero2"]
    assert list(map(no_formula, others)) == others
