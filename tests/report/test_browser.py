"""The report in a real browser: no errors, nothing cut off or upon another, and pages that answer from their tables."""

import functools
import http.server
import io
import itertools
import json
import random
import shutil
import threading
import time
import typing
from collections import Counter
from pathlib import Path

import matplotlib.image
import numpy
import pytest

from study.cli import pasted
from study.configs.pasted.answer import answer
from study.core.errors import Stop
from study.core.gpus import GPUS
from study.known.faults import table
from study.known.which_apply import Answer
from study.ledger import search, texts
from study.predict.front import fits_on, named
from study.report import answers, browser, calculator, stacks
from study.report import site as report
from tests.cli.test_cli import in_this_process
from tests.report.test_lookups import between_tested_releases, drawn, estimated, looked_up

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="apt-get install chromium chromium-driver")
AUDIT = (Path(__file__).parent / "audit.js").read_text()
BACKGROUND = {"light": "rgb(251, 251, 250)", "dark": "rgb(22, 23, 26)"}
ANSWERS = [f"answer-{each['name']}" for each in answers.questions()]
PAGES = ("index", "gpu", "calculator", "stack", "claims", "sentences", "by_hand", "guide", *report.NOTEBOOKS)


@pytest.fixture(scope="module")
def driver():
    """A browser without a window, which keeps what pages write to its console."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(DRIVER)) as browser:
        yield browser


def look(driver, width: int, colours: str = "light") -> None:
    """Give the window a width, and the reader a preference."""
    window = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
    scheme = {"media": "", "features": [{"name": "prefers-color-scheme", "value": colours}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)


@pytest.fixture
def show(driver, site):
    """A function that opens a page of the site at a width, in light colours."""

    def opened(page: str, width: int = 1280):
        look(driver, width)
        driver.get((site / f"{page}.html").as_uri())
        return driver

    return opened


@pytest.mark.parametrize("page", [*PAGES, *ANSWERS])
def test_a_page_is_whole_and_readable(page, show):
    """At each width in light and in dark. It is loaded once: its script draws nothing for a width or a colour."""
    opened = show(page)
    assert opened.title
    assert page in ANSWERS or opened.find_elements("css selector", "nav [aria-current]"), "a reader sees where he is"
    opened.execute_script("for (const fold of document.querySelectorAll('details')) fold.open = true")
    for width, (colours, background) in itertools.product((390, 1024, 1440), BACKGROUND.items()):
        look(opened, width, colours)
        seen = "return [innerWidth, getComputedStyle(document.body).backgroundColor]"
        assert opened.execute_script(seen) == [width, background]
        assert opened.execute_script(AUDIT) == [], (width, colours)
    assert opened.get_log("browser") == []


@pytest.mark.parametrize("page", ["by_hand", "guide"])
def test_a_phone_shows_tables_of_texts_whole(page, show):
    tables = show(page, 390).find_elements("css selector", "table")
    assert len(tables) > 3
    wide = [each.text for each in tables if each.get_property("scrollWidth") > each.get_property("clientWidth")]
    assert wide == []


def test_a_thumb_finds_sliders_and_the_eye_the_groups_of_pages(show):
    for page in ("index", "stages"):
        opened = show(page, 390)
        sliders = opened.find_elements("css selector", "input[type=range]")
        assert len(sliders) == 3
        assert all(each.rect["height"] >= 44 and each.rect["width"] > 300 for each in sliders), page
        assert min(each.rect["height"] for each in opened.find_elements("css selector", "nav a")) >= 24
        groups = [each.text for each in opened.find_elements("css selector", "nav span")]
        assert groups == [door for door in report.IN_NAVIGATION if door], "hidden, its text would be empty"


def test_a_phone_reads_the_five_files_before_what_is_for_later(show):
    """No fold hides them, and what is for later follows."""
    opened = show("by_hand", 390)
    headings = opened.find_elements("css selector", "h2")
    names = [each.get_attribute("id") for each in headings]
    files = [f"{name}.py" for name in report.BY_HAND]
    first = ["run-it", *files, "what-they-hold", "what-they-send", "exercises", "next"]
    assert names[:-4] == first, "the code of an exercise stands before it"
    assert [bool(each.find_elements("xpath", "ancestor::details")) for each in headings] == [False] * 10 + [True] * 4


def test_figures_follow_the_dark_page(show):
    """What the screen shows: a white box on a dark page is seen in its pixels alone."""
    opened = show("index", 1024)
    for colours, is_light in (("light", True), ("dark", False)):
        look(opened, 1024, colours)
        figures = opened.find_elements("css selector", "figure svg")
        assert len(figures) == 3, "losses, memory and traffic"
        for figure in figures:
            pixels = matplotlib.image.imread(io.BytesIO(figure.screenshot_as_png))[..., :3].mean(axis=2)
            assert (numpy.median(pixels) > 0.5) == is_light, colours
            assert pixels.max() - pixels.min() > 0.6, "and what is drawn stands out"


def test_the_audit_sees_what_is_planted(show):
    opened = show("compare", 1440)
    opened.execute_script("document.body.firstElementChild.style.width = '3000px'")
    opened.execute_script("document.querySelector('main p').style.color = '#aaa'")
    seen = " ".join(opened.execute_script(AUDIT))
    assert "wider than the window" in seen
    assert "contrast" in seen


def test_what_a_reader_does_on_a_page(show):
    """Tables sort both ways, and a link to a claim leads to its place."""
    opened = show("index")
    script = """const table = document.querySelector(".answer table");
        table.tHead.rows[0].cells[0].querySelector("button").click();
        return [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);"""
    up, down = opened.execute_script(script), opened.execute_script(script)
    assert len(set(up)) > 2
    assert sorted(up) == sorted(down)
    assert up[0] == down[-1] != up[-1]
    opened.get(opened.current_url.replace("index.html", "claims.html#P1-17"))
    assert opened.execute_script("return document.querySelector(':target').textContent").startswith("\nP1-17")
    numbers = opened.execute_script(
        "return [...document.querySelectorAll('td.number')].map((cell) => cell.textContent)"
    )
    assert {text.rpartition(" ")[2] for text in numbers} > {"%", "GB"}, "with a unit, too, at the right edge"


def test_claims_are_chosen(show):
    """By document, verdict and word; without a choice all are shown, and a link to one undoes the choice."""
    opened = show("claims")
    script = """const form = document.getElementById("filter");
        for (const [name, value] of Object.entries(arguments[0])) form.elements[name].value = value;
        form.dispatchEvent(new Event("input"));
        const claims = [...document.querySelectorAll("[data-verdict]")];
        return claims.filter((claim) => claim.offsetParent).map((claim) => claim.id);"""
    claims = texts.claims()
    papers, articles = ([claim.id for claim in claims if claim.id.startswith(first)] for first in "PS")
    shown = opened.execute_script(script, {})
    assert (sorted(shown[: len(papers)]), shown[len(papers) :]) == (sorted(papers), articles), (
        "papers read whole come first"
    )
    wanted = {"document": "P1", "verdict": "holds"}
    chosen = [claim.id for claim in claims if claim.document == "P1" and claim.verdict == "holds"]
    assert opened.execute_script(script, wanted) == chosen
    said = opened.find_element("id", "shown").text
    assert said == f"{len(chosen)} of {len(claims)}"
    of_topic = [claim.id for claim in claims if claim.document == "P1" and claim.topic == "traffic"]
    assert opened.execute_script(script, {"document": "P1", "verdict": "", "topic": "traffic"}) == of_topic
    low = [claim.id for claim in claims if claim.document == "P1" and claim.certainty == "low"]
    assert opened.execute_script(script, {"topic": "", "certainty": "low"}) == low
    assert opened.execute_script(script, {"certainty": ""}) != low
    assert sorted(opened.execute_script(script, {"document": "P", "topic": ""})) == sorted(papers)
    assert opened.execute_script(script, {"document": "", "topic": "", "word": "adafactor"}) != []
    for typed, id in (("S000-20", "S000-20"), ("p1-28", "P1-28")):
        opened.execute_script(script, {"word": "adafactor"})
        opened.execute_script("scrollTo(0, 0); location.hash = arguments[0]", typed)
        opened.execute_script("dispatchEvent(new Event('hashchange'))")
        top = "return document.getElementById(arguments[0]).getBoundingClientRect().top"
        assert 0 <= opened.execute_script(top, id) < 200, "a word that was typed is undone before the page scrolls"
        assert opened.find_element("id", id).is_displayed()


WORDS = (
    *("qgZ", "5X", "60 GB", "60GB", "120 GB", "70 GB/s", "Rajbhandari 2021", "bandwidth", "bandwidth P3", "stage 3"),
    *(
        "zero3 sends",
        "activation checkpointing",
        "CPU Adam",
        "super linear",
        "10x",
        "delayed parameter update",
        "900 GB/s",
    ),
    *(
        "trillion parameter models",
        "backward prefetch",
        "adafactor",
        "perplexity",
        "misprint",
        "banana",
        "DeepSpeed 0.19.8",
    ),
    *("ZeRO paper", "the FSDP paper", "ZeRO++ paper", "first article"),
    *("activ", "activation", "activations", "checkpoint", "offload", "offloading", "batches", "quantiz"),
    *("quantize", "quantization", "checkpoints", "8-bit", "Table 1", "trillion", "optimization"),
    *('"stage 3"', '"stage 3" sends', 'offload "stage 3"', "“model states”", "stage 3 holds", "each rank holds"),
    *("holds", "open", "does not hold", '"does not hold"', "Refuted", "holds only if", "open bandwidth", "P1 open"),
)


def test_the_page_finds_what_the_command_finds(show):
    """qgZ was found on the page alone, and what is not judged by the command alone."""
    opened = show("claims")
    lines = "return textOf(document.getElementById(arguments[0]), WHOLE).split('\\n')"
    for each in (*texts.claims(), *texts.faults()):
        ours = search.text_of(each, search.WHOLE).split("\n")
        assert {*filter(None, opened.execute_script(lines, each.id))} == {*filter(None, ours)}
    script = """const form = document.getElementById("filter");
        form.elements.word.value = arguments[0];
        form.dispatchEvent(new Event("input"));
        const all = [...document.querySelectorAll("[data-document] .claims > li")];
        const shown = all.filter((card) => card.offsetParent);
        const [verdicts, words] = verdictsApart(all, wordsOf(arguments[0]));
        const asides = verdicts.length ? [] : [...document.querySelectorAll(".asides > li")];
        const told = found(asides, words, false);
        return [shown.map((card) => card.id), told.map((aside) => aside.textContent)];"""
    for words in WORDS:
        try:
            known = search.named(tuple(words.split()))
        except Stop:
            known = []
        ids = {each.id for each in known if not isinstance(each, texts.Aside)}
        told = {each.said.replace("`", "") for each in known if isinstance(each, texts.Aside)}
        shown, beside = opened.execute_script(script, words)
        assert ({*shown}, {*beside}) == (ids, told), words


def test_a_phone_shows_a_claim_on_its_first_screen_and_an_address_opens_folds(show, site):
    opened = show("claims", 390)
    assert opened.execute_script("return document.querySelector('.claims li').getBoundingClientRect().top") < 844
    assert opened.execute_script("return document.documentElement.scrollHeight") < 150 * len(texts.claims()), "29,000"
    shown = (
        "return [...document.querySelectorAll('[data-verdict] > .verdict')].filter((each) => each.offsetParent).length"
    )
    assert opened.execute_script(shown) == len(texts.claims()), "no verdict is hidden"
    is_open = "return document.getElementById(arguments[0]).querySelector('details').open"
    assert [opened.execute_script(is_open, id) for id in ("P1-28", "P1-17")] == [False, False]
    opened.execute_script("location.hash = 'P1-28'; dispatchEvent(new Event('hashchange'))")
    assert [opened.execute_script(is_open, id) for id in ("P1-28", "P1-17")] == [True, False]
    opened.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert opened.execute_script(is_open, "P1-17")
    for page, place in (("claims", "P1-17"), ("sentences", "loads-empty"), ("index", "words")):
        opened.get("about:blank")
        opened.get(f"{(site / f'{page}.html').as_uri()}#{place}")
        folds = "return [...document.querySelectorAll('details[open]')].length"
        assert opened.execute_script(folds) == 1
        assert opened.find_element("id", place).is_displayed()


def test_a_word_is_found_among_the_words(show):
    opened = show("index", 390)
    opened.execute_script("document.getElementById('words').open = true")
    box = opened.find_element("id", "find-word")
    box.send_keys("reduce-SC")

    def shown() -> list[str]:
        return [each.text for each in opened.find_elements("css selector", "#words dt") if each.is_displayed()]

    assert {"reduce-scatter", "collective"} < {*shown()}, "also in the meaning"
    assert "rank" not in shown()
    assert opened.find_element("id", "no-word").text == ""
    box.send_keys("-elephant")
    assert (shown(), opened.find_element("id", "no-word").text) == ([], "No word, and no meaning, has this.")
    links = {each.get_attribute("href").rpartition("/")[2] for each in opened.find_elements("css selector", "#words a")}
    assert {"answer-traffic.html", "answer-claims.html", "stages.html"} <= links


def test_a_word_finds_a_sentence(show):
    opened = show("sentences", 390)
    assert not opened.find_element("id", "loads-empty").is_displayed()
    opened.find_element("name", "word").send_keys("loads-empty")
    assert opened.find_element("id", "loads-empty").is_displayed()
    assert int(opened.find_element("id", "shown").text.split()[0]) < 9


def test_on_a_phone_commands_wrap_python_scrolls_and_only_a_table_of_many_columns_with_sentences_becomes_cards(show):
    wide = """return [...document.querySelectorAll("pre")]
        .filter((each) => !each.closest(".highlight") && each.scrollWidth > each.clientWidth).length;"""
    tables = """return [...document.querySelectorAll("table")]
        .map((table) => [table.rows[0].cells.length > 3, table.matches(".wordy")]);"""
    found = set()
    for page in (*PAGES, *ANSWERS):
        opened = show(page, 390)
        assert opened.execute_script(wide) == 0, page
        found |= {tuple(each) for each in opened.execute_script(tables)}
    assert found == {(False, False), (True, False), (True, True)}
    opened = show("by_hand", 390)
    line = "return getComputedStyle(document.querySelector('pre > code > span:first-child')).textIndent"
    assert opened.execute_script(line).startswith("-"), "what does not fit of a line is indented"
    scrolls = """for (const fold of document.querySelectorAll("details")) fold.open = true;
        return [...document.querySelectorAll(".highlight pre")].some((each) => each.scrollWidth > each.clientWidth);"""
    assert opened.execute_script(scrolls)
    cut = """const right = (each) => [...each.getClientRects()].pop().right;
        const code = [...document.querySelectorAll(".highlight .c1")];
        return code.filter((each) => right(each) > right(each.closest("pre"))).map((each) => each.textContent);"""
    for page in ("by_hand", "stages"):
        assert show(page, 390).execute_script(cut) == [], "a comment wraps"
    folded = "return document.querySelectorAll('details:not([open]) > summary > h2').length"
    for page, width, is_folded in (("by_hand", 390, True), ("guide", 390, True), ("guide", 1280, False)):
        assert (show(page, width).execute_script(folded) > 3) == is_folded, page
    opened = show("stages", 390)
    heads = [head for head in opened.find_elements("css selector", "th") if head.text == "master"]
    assert len(heads) > 1
    assert heads[1].rect["x"] + heads[1].rect["width"] < 390, "of two ranks, all that is measured is in view"


def test_a_long_page_lists_its_sections_and_each_is_there(show):
    missing = """return [...document.querySelectorAll(".contents a")].map((link) => link.hash.slice(1))
        .filter((id) => !document.getElementById(decodeURIComponent(id)))"""
    for page, least in (("by_hand", 10), ("stages", 9), ("guide", 15), ("compare", 0)):
        opened = show(page, 390)
        listed = opened.find_elements("css selector", ".contents a")
        assert len(listed) >= least
        assert bool(listed) == bool(least)
        assert opened.execute_script(missing) == []


def test_a_stage_is_dragged(show):
    """It opens with stage 1, for a still page. Eight ranks take 5.5, 3.75 and 2 of DDP's 16 bytes a parameter."""
    opened = show("index")
    begun = opened.find_element("css selector", "#drag .total").text
    assert begun == "Model states of a rank: 44.2 GB, 5.5 bytes a parameter; with DDP 16."
    assert f"{named('llama3-8b').parameters / 1e9:.3g} billion" in opened.find_element("name", "size-is").text
    opened = show("stages")
    script = """const form = document.getElementById("drag");
        form.stage.value = arguments[0];
        form.dispatchEvent(new Event("input"));
        return form.querySelector(".total").textContent;"""
    texts = [opened.execute_script(script, stage) for stage in range(4)]
    shares = [text.partition(" bytes a parameter")[0].split()[-1] for text in texts]
    assert shares == ["16", "5.5", "3.75", "2"]


# --- the calculator, and is my stack right? --------------------------------------------------------------------------

CHOOSE = """const form = document.querySelector("form.calculator");
    for (const [name, value] of Object.entries(arguments[0])) form.elements[name].value = value;
    for (const value of arguments[1]) form.querySelector(`[value="${value}"]`).click();
    form.dispatchEvent(new Event("input"));"""
UNCHECK = "for (const box of document.querySelectorAll('input:checked')) box.checked = false"
SIMPLEST = [  # model, GPUs, kind of GPU, sequences in a micro-batch, gradient accumulation: what the page advises
    ("gpt2", 1, "H100-80GB", 1, 8, "single on 1 x H100-80GB: 2.63 of 85.5 GB and no offloading."),
    ("gpt2", 8, "H100-80GB", 4, 8, "ddp on 8 x H100-80GB: "),
    ("llama3-8b", 8, "H100-80GB", 1, 1, "Use zero1 on 8 x H100-80GB: 44.8 of 85.5 GB and no offloading."),
    ("llama3-8b", 8, "H100-80GB", 8, 8, "zero2 on "),
    ("llama3-8b", 1, "H100-80GB", 1, 8, "It fits. zero1_cpu is simpler, and perhaps fits: study estimate says it."),
    ("llama3-8b", 4, "A100-40GB", 1, 8, "Use zero3_cpu on "),  # as zero3 fits only just, and zero2_cpu perhaps
    ("gpt-neox-20b", 4, "GH200", 1, 8, "It fits only just."),
    ("llama3-70b", 8, "A100-80GB", 1, 8, "It needs a disk: "),  # as the host has too little memory for zero3_cpu
    ("llama3-70b", 1, "T4", 2, 1, "Nothing fits on 1 x T4: "),
]


def test_the_calculator_and_study_estimate_say_the_same_of_drawn_cells(show):
    """With what PyTorch reserves. Where that decides, the page says `perhaps`, and that the command knows more."""
    page, cards, draw, said = show("calculator"), calculator.values()["cards"], random.Random(20), Counter()
    of_arm = "return answers(models[arguments[0]][arguments[1]], arguments[2], arguments[4])"
    of_arm += ".find((each) => each.name === arguments[3]).fits"
    for (model, sequence, gpus, arm, activations), _ in drawn(8):
        rows, accumulation = draw.choice(calculator.MICRO_BATCHES), draw.choice(calculator.ACCUMULATIONS)
        predicted = estimated(model, sequence, gpus, arm, activations, rows, accumulation)
        step = {"micro_batch": rows, "accumulation": accumulation, "activations": activations}
        page.execute_script(CHOOSE, {"model": model, "gpus": gpus} | step, [])
        for name in draw.sample([*GPUS], 8):
            any_host = cards[name] | {"host_bytes": {gpus: 1e15}}
            verdict = page.execute_script(of_arm, model, sequence, gpus, arm, any_host)
            whole = fits_on(GPUS[name], predicted.memory.peak_bytes, predicted.kinds(GPUS[name]).driver)
            alike = {"yes": {"yes", "perhaps"}, "only just": {"just", "perhaps"}, "no": {"no"}}[whole]
            assert verdict in alike, (model, sequence, gpus, arm, activations, rows, accumulation, name)
            said[verdict] += 1
    assert {*said} == {"yes", "perhaps", "just", "no"}
    l40s = {"model": "llama3-8b", "sequence": 2048, "gpus": 8, "gpu": "L40S", "micro_batch": 1}
    page.execute_script(CHOOSE, l40s | {"accumulation": 1, "activations": "recomputed"}, [])
    assert page.find_element("id", "sentence").text == (
        "Use zero3 on 8 x L40S: 22.1 of 48.3 GB and no offloading."
        " It fits. zero2 is simpler, and perhaps fits: study estimate says it."
    )
    page.execute_script(CHOOSE, {"model": "gpt-neox-20b", "gpus": 8, "gpu": "H100-80GB"}, [])
    assert page.find_element("id", "sentence").text.endswith(
        " Its tensors fit. PyTorch reserves more: study estimate says whether that fits."
    )


def test_the_calculator_opens_with_an_arm_that_fits_and_no_doubt(show):
    page = show("calculator")
    assert page.find_element("id", "sentence").text == (
        "Use zero1 on 8 x H100-80GB: 44.8 of 85.5 GB and no offloading. It fits."
    )
    fits = [cell.text for cell in page.find_elements("css selector", "#arms td.fits") if cell.is_displayed()]
    assert {*fits} == {"yes", "no"}


def test_the_calculator_names_the_simplest_arm_that_fits(show, monkeypatch, capsys):
    """What offloads only if nothing else fits with room. The commands that the page names are some."""
    page = show("calculator")
    cards, committed = calculator.values()["cards"], json.loads(calculator.FILE.read_text())
    for model, gpus, gpu, rows, accumulation, sentence in SIMPLEST:
        step = {"micro_batch": rows, "accumulation": accumulation}
        chosen = {"model": model, "gpus": gpus, "gpu": gpu, "activations": "recomputed"}
        page.execute_script(CHOOSE, chosen | step, [])
        said = page.find_element("id", "sentence").text
        assert sentence in said
        assert said.startswith("Try ") == ("Its tensors fit." in said)
        assert said.startswith("Use ") == (" It fits" in said)
        assert ("only just" in said) == (gpu == "GH200")
        assert ("no offloading" in said) == (gpu in ("H100-80GB", "GH200") and "_cpu" not in said)
        for setting, activations in enumerate(calculator.ACTIVATIONS):
            page.execute_script(CHOOSE, {"activations": activations}, [])
            shown = [row for row in page.find_elements("css selector", "#arms tbody tr") if row.is_displayed()]
            lines = [row.text.split() for row in shown]
            assert [line[0] for line in lines] == calculator.arms_of(gpus)
            for arm, fits, peak_gb, *_ in lines:
                settings = next(iter(committed[model].values()))[arm][str(gpus)]
                cell = settings[setting][-1 if accumulation > 1 else 0]  # one line serves both where they are equal
                peak_bytes = cell[calculator.MICRO_BATCHES.index(rows)] * 1e6
                assert float(peak_gb) == pytest.approx(peak_bytes / 1e9, rel=0.005)
                has_host = sum(cell[len(calculator.MICRO_BATCHES) :][:1]) * 1e6 <= cards[gpu]["host_bytes"][gpus]
                of_tensors = fits_on(GPUS[gpu], peak_bytes).removeprefix("only ") if has_host else "no"
                assert fits in ({"yes", "perhaps"} if of_tensors == "yes" else {of_tensors}), (arm, gpu)
    training = {"model": "llama3-8b", "gpus": 8, "gpu": "A100-80GB", "micro_batch": 2, "accumulation": 8}
    page.execute_script(CHOOSE, training, [])
    for activations in calculator.ACTIVATIONS:
        page.execute_script(CHOOSE, {"sequence": 8192 if activations == "recomputed" else 2048}, [])
        page.execute_script(CHOOSE, {"activations": activations}, [])
        said = page.find_element("id", "sentence").text
        _, words = page.find_element("id", "same").text.split(maxsplit=1)
        assert in_this_process(monkeypatch, words) is None
        arm, _, peak = said.partition(" ")[2].partition(" on 8 x A100-80GB: ")
        printed = " ".join(capsys.readouterr().out.split())
        assert f"A rank of 8 with {arm} needs {peak.split()[0]} GB" in printed
        tokens = "8,192" if activations == "recomputed" else "2,048"
        assert f"2 sequences of {tokens} tokens per micro-batch, 8 micro-batches in a step" in printed
        assert f"activations {activations}" in printed
    step = {"micro_batch": 2, "accumulation": 1}
    page.execute_script(CHOOSE, {"model": "gpt2", "gpus": 8, "gpu": "T4"} | step, [])
    _, words = page.find_element("id", "command").text.split(maxsplit=1)
    assert in_this_process(monkeypatch, f"{words} --json") is None
    advice = json.loads(capsys.readouterr().out)
    assert advice["choice"]["arm"] == "ddp"
    assert words.endswith("--batch 16")


def test_drawn_choices_have_the_answers_of_the_table(show):
    """Whose cells are those of `study stack`: test_lookups.py."""
    page = show("stack")
    draw = random.Random(67)
    shown = """const found = {};
        const answers = {faults: "applies", likely: "likely", maybe: "applies if", others: "applies if"};
        for (const [list, answer] of Object.entries(answers))
          for (const card of document.querySelectorAll(`#${list} li`))
            if (!card.hidden) found[card.id] = [answer, card.querySelector("em").textContent];
        return found;"""
    levels = set()
    for likely in (*between_tested_releases()[:1], *[{}] * 12):
        said = {name: f"{name}=={draw.choice(stacks.releases(name))}" for name in stacks.PACKAGES}
        boxes = {name: draw.choice([*stacks.BOXES[name][1]]) for name in draw.sample([*stacks.BOXES], 5)}
        said = {name: likely.get(name, said[name]) for name in said}
        boxes |= {name: word for name, word in likely.items() if name not in said}
        page.execute_script(UNCHECK)
        page.execute_script(CHOOSE, said, [*boxes.values()])
        found = {id: tuple(each) for id, each in page.execute_script(shown).items()}
        assert found == looked_up(said | boxes)
        levels.update(answer for answer, _ in found.values())
    assert levels == {*typing.get_args(Answer)}
    words = [*said.values(), *(boxes[name] for name in stacks.BOXES if name in boxes)]
    words = [word for word in words if word not in stacks.TAKEN.values() and "accumulates" not in word]
    assert page.find_element("id", "command").text == f"study stack {' '.join(words)}"


def test_the_one_file_answers_alone(driver, site, tmp_path):
    """Lines that are pasted choose releases, and what is not known is left to the command."""
    alone = shutil.copy(site / "faults.html", tmp_path)
    assert json.loads((site / "faults.json").read_text())["asked"]["deepspeed"][-1] == table().asked["deepspeed"][-1]
    driver.get(Path(alone).as_uri())
    driver.find_element("name", "list").send_keys("deepspeed==0.17.6\ntorch==2.99.0+cu130")
    for box in ("--stage 2", "--passes 2"):
        driver.find_element("css selector", f"[value='{box}']").click()
    assert driver.find_element("css selector", "#faults #last-pass-only").is_displayed()
    assert "torch==2.99.0" in driver.find_element("id", "unread").text
    command = "study stack torch==2.99.0 deepspeed==0.17.6 --stage 2 --passes 2"
    assert command in driver.find_element("id", "command").text
    driver.find_element("name", "list").clear()
    driver.find_element("name", "list").send_keys("deepspeed==0.1.0 torch==1.0.0")
    assert "apply: not known." in driver.find_element("id", "sentence").text, "none would be an answer"
    driver.find_element("name", "list").clear()
    driver.find_element("name", "list").send_keys(" ")
    assert "apply: none." in driver.find_element("id", "sentence").text
    assert driver.find_element("id", "unread").text == ""
    assert driver.execute_script(AUDIT) == driver.get_log("browser") == []


PASTED = """copying a param with shape torch.Size([0]) from checkpoint, the shape in current
model is torch.Size([32000, 4096]).
deepspeed==0.18.2, stage 3"""


def test_a_text_is_read_in_the_browser_by_the_same_python(driver, tmp_path, monkeypatch, capsys):
    """By the real runtime, over a web server that has nothing else. Where it cannot be loaded, the page says so."""
    monkeypatch.chdir(tmp_path)
    try:
        archives = browser.fetch(tmp_path / "python")
    except Stop:
        archives = []
    report.PAGES.globals["address"] = ""
    report.write(tmp_path, "paste", archives=archives, program=report.READER)
    for name in ("site.css", "site.js"):
        shutil.copyfile(report.TEMPLATES / name, tmp_path / name)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        driver.get(f"http://127.0.0.1:{server.server_port}/paste.html")
        for width, colours in itertools.product((390, 1440), BACKGROUND):
            look(driver, width, colours)
            assert driver.execute_script(AUDIT) == [], (width, colours)
        told = driver.find_element("id", "told")
        before = told.text
        script = "const form = document.getElementById('paste'); form.text.value = arguments[0]; form.requestSubmit()"
        driver.execute_script(script, PASTED)
        end = time.monotonic() + 120
        while told.text in (before, "Reading ...") and time.monotonic() < end:
            time.sleep(0.2)
        server.shutdown()
    if not archives:
        assert told.text.startswith("This browser cannot run it")
        assert "study diagnose - " in driver.page_source, "what to type instead"
        return
    capsys.readouterr()
    pasted.tell(answer(PASTED), False)
    assert told.text.split() == capsys.readouterr().out.split()
    assert "[loads-empty]" in told.text
