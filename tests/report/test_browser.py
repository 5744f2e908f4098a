"""The report in a real browser: no errors, nothing cut off or upon another, and a calculator that answers as Python."""

import gzip
import io
import itertools
import json
import random
import shlex
import shutil
from pathlib import Path

import matplotlib.image
import numpy
import pytest

from study.cli import predictions
from study.cli.diagnosis import in_words, order
from study.core.arms import load_arm
from study.core.gpus import GPUS
from study.core.optimizers import refusal
from study.core.text import size
from study.known import lists
from study.known.faults import table
from study.known.which_apply import Flags, Stack, which_apply
from study.ledger import texts
from study.predict.architecture import named
from study.predict.estimate import estimate
from study.predict.front import BUCKET_ELEMENTS, PlaceFlags, TrainingFlags
from study.predict.pace import peak_flops_per_s
from study.report import calculator
from study.report import site as report
from study.report.topics import memory
from tests.cli.test_cli import in_this_process
from tests.conftest import table as cases

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="apt-get install chromium chromium-driver")
AUDIT = (Path(__file__).parent / "audit.js").read_text()
BACKGROUND = {"light": "rgb(251, 251, 250)", "dark": "rgb(22, 23, 26)"}
PAGES = ("index", "gpu", "calculator", "stack", "claims", "by_hand", *report.NOTEBOOKS)


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


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_whole_and_readable(page, show):
    """At each width in light and in dark. It is loaded once: its script draws nothing for a width or a colour."""
    opened = show(page)
    assert opened.title
    assert opened.find_elements("css selector", "nav [aria-current]"), "a reader sees where he is"
    opened.execute_script("for (const fold of document.querySelectorAll('details')) fold.open = true")
    for width, (colours, background) in itertools.product((390, 1024, 1440), BACKGROUND.items()):
        look(opened, width, colours)
        seen = "return [innerWidth, getComputedStyle(document.body).backgroundColor]"
        assert opened.execute_script(seen) == [width, background]
        assert opened.execute_script(AUDIT) == [], (width, colours)
    assert opened.get_log("browser") == []


def test_figures_follow_the_dark_page(show):
    """What the screen shows: a white box on a dark page is seen in its pixels alone."""
    opened = show("index", 1024)
    for colours, is_light in (("light", True), ("dark", False)):
        look(opened, 1024, colours)
        figures = opened.find_elements("css selector", "figure svg")
        assert len(figures) == 4, "one of each answer"
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
    script = """const table = document.querySelector("#documents ~ .scroll table");
        table.tHead.rows[0].cells[1].querySelector("button").click();
        return [...table.tBodies[0].rows].map((row) => row.cells[1].textContent);"""
    up, down = opened.execute_script(script), opened.execute_script(script)
    assert len(set(up)) > 2
    assert sorted(up) == sorted(down)
    assert up[0] == down[-1] != up[-1]
    opened.get(opened.current_url.replace("index.html", "claims.html#P1-17"))
    assert opened.execute_script("return document.querySelector(':target').textContent").startswith("\nP1-17")


def test_claims_are_chosen(show):
    """By document, verdict and word; without a choice all are shown, and a link to one undoes the choice."""
    opened = show("claims")
    script = """const form = document.getElementById("filter");
        for (const [name, value] of Object.entries(arguments[0])) form.elements[name].value = value;
        form.dispatchEvent(new Event("input"));
        const claims = [...document.querySelectorAll("[data-verdict]")];
        return claims.filter((claim) => claim.offsetParent).map((claim) => claim.id);"""
    claims = texts.claims()
    assert opened.execute_script(script, {}) == [claim.id for claim in claims]
    wanted = {"document": "P1", "verdict": "holds"}
    chosen = [claim.id for claim in claims if claim.document == "P1" and claim.verdict == "holds"]
    assert opened.execute_script(script, wanted) == chosen
    said = opened.find_element("id", "shown").text
    assert said == f"{len(chosen)} of {len(claims)} claims"
    assert opened.execute_script(script, {"document": "", "verdict": "", "word": "adafactor"}) != []
    opened.execute_script("location.hash = 'S000-20'")
    assert opened.find_element("id", "S000-20").is_displayed()


def test_a_stage_is_dragged(show):
    """16 bytes a parameter under DDP; with eight ranks, stages 1 to 3 take 5.5, 3.75 and 2."""
    opened = show("stages")
    script = """const form = document.getElementById("drag");
        form.stage.value = arguments[0];
        form.dispatchEvent(new Event("input"));
        return form.querySelector(".total").textContent;"""
    texts = [opened.execute_script(script, stage) for stage in range(4)]
    shares = [text.partition(" bytes a parameter")[0].split()[-1] for text in texts]
    assert shares == ["16", "5.5", "3.75", "2"]


# --- the calculator ------------------------------------------------------------------------------------------------

MODELS = json.loads(gzip.decompress(calculator.FILE.read_bytes()))["models"]
READY = """const done = arguments[0];
(function look() { typeof form === "undefined" || form.hidden ? setTimeout(look, 20) : done(); })()"""


CHOICES = {
    "arm": calculator.ARMS,
    "gpu": [*GPUS],
    "gpus": calculator.GPUS_TRIED,
    "rows": [1, 2, 3, 8, 31, 1000],
    "passes": [1, 1, 2, 5],
    "recomputes": [True, False],
    "optimizer": [*calculator.OPTIMIZERS],
}


def question(draw: random.Random) -> dict:
    model = draw.choice([*MODELS])
    most = min(MODELS[model]["positions"] or 10**6, 100_000)
    precision = draw.choice([name for name in calculator.PRECISIONS if name in MODELS[model]])
    drawn = {name: draw.choice(choices) for name, choices in CHOICES.items()}
    return drawn | {"model": model, "precision": precision, "tokens": draw.choice([2, 77, 128, most])}


def answer(model, arm, gpu, gpus, precision, rows, passes, tokens, recomputes, optimizer) -> dict | None:
    """Return the answer of `study estimate`; None where a library refuses the optimizer."""
    if refusal(load_arm(arm), optimizer, precision):
        return None
    training = TrainingFlags(gpus=gpus, sequence=tokens, precision=precision, optimizer=optimizer)
    passes = predictions.Passes(arm=arm, micro_batch=rows, accumulation=passes, checkpointing=recomputes)
    ours, _ = predictions.training_of(named(model), training, PlaceFlags(), passes, BUCKET_ELEMENTS)
    whole = estimate(ours)
    left = dict.fromkeys(itertools.chain(*memory.PARTS.values()), 0) | whole.at_peak
    left["activations"] += left.pop("temporaries")  # the page shows them as one
    flops = ours.traced.flops * ours.batch.passes
    return {
        "parts": [sum(left.get(role, 0) for role in roles) for roles in memory.PARTS.values()],
        "peakBytes": whole.peak_bytes,
        "hostBytes": whole.host_bytes,
        "diskBytes": whole.swapped_bytes,
        "traffic": whole.traffic,
        "leastS": pytest.approx(flops / peak_flops_per_s(gpu, precision == "fp32"), rel=1e-9),
    }


def test_drawn_questions_have_the_answers_of_python(show):
    """After a change of the predictor run tools/calculator_tables.py."""
    page = show("calculator")
    page.execute_async_script(READY)
    draw = random.Random(18)
    asked = [question(draw) for _ in range(40)]
    script = """return arguments[0].map((question) =>
        armsOf(question).includes(question.arm) ? answerOf(question, question.arm) : null)"""
    for each, theirs in zip(asked, page.execute_script(script, asked), strict=True):
        ours = answer(**each)
        assert (theirs and ours and {name: theirs[name] for name in ours}) == ours, each


def test_what_is_typed_is_answered_and_kept_in_the_address(show, monkeypatch, capsys):
    """The command that the page names gives the same numbers."""
    page = show("calculator")
    page.execute_async_script(READY)
    typed = {"model": "qwen2.5-7b", "gpus": 16, "gpu": "A100-80GB", "tokens": 1024, "rows": 2, "passes": 3}
    script = """const field = form.elements[arguments[0]];
        if (field.type === "checkbox") field.checked = arguments[1]; else field.value = arguments[1];
        field.dispatchEvent(new Event("input", { bubbles: true }))"""
    for name, value in (typed | {"recomputes": True}).items():
        page.execute_script(script, name, value)
    cells = """return Object.fromEntries([...document.querySelectorAll("#arms tbody tr")].map((row) =>
        [row.dataset.arm, [...row.cells].slice(1).map((cell) => cell.textContent)]))"""
    shown = page.execute_script(cells)
    _, *words = shlex.split(page.find_element("id", "command").text)
    assert in_this_process(monkeypatch, f"{shlex.join(words)} --json") is None
    said = json.loads(capsys.readouterr().out)
    assert shown["zero3"][1] == size(said["estimate"]["peak_bytes"])
    page.refresh()
    page.execute_async_script(READY)
    assert page.execute_script(cells) == shown


# --- is my stack right? ----------------------------------------------------------------------------------------------

DRAWN = cases("known/stacks.toml")["drawn"]


def test_drawn_stacks_have_the_answers_of_python(show):
    page = show("stack")
    draw = random.Random(67)
    released = DRAWN["releases"] | table().asked
    asked = []
    for _ in range(40):
        names = draw.sample([*released], 3)
        text = "\n".join(draw.choice(DRAWN["lines"]).format(name, draw.choice(released[name])) for name in names)
        flags = {name: draw.choice(DRAWN["flags"][name]) for name in draw.sample([*DRAWN["flags"]], draw.randint(0, 8))}
        asked.append((text, flags))
    theirs = page.execute_script("return arguments[0].map((each) => answered(...each))", asked)
    for (text, flags), answer in zip(asked, theirs, strict=True):
        training = Stack.of(lists.listed(text), Flags(**flags))
        ours = in_words(training, sorted(which_apply(training), key=order))
        assert [answer["free"], answer["not_asked"]] == [ours["free"], ours["not_asked"]]
        keys = ("id", "answer", "question", "do")
        both = (answer["answers"], ours["faults"])
        rows = [[tuple(map(row.get, keys)) for row in each] for each in both]
        assert rows[0] == rows[1], (text, flags)
    assert len({len(answer["answers"]) for answer in theirs}) > 10


def test_the_one_file_answers_alone(driver, site, tmp_path):
    """A list that is pasted counts, and is not put into the address."""
    alone = shutil.copy(site / "faults.html", tmp_path)
    assert json.loads((site / "faults.json").read_text())["asked"]["deepspeed"][-1] == table().asked["deepspeed"][-1]
    driver.get(Path(alone).as_uri())
    driver.find_element("name", "list").send_keys("deepspeed==0.17.6")
    driver.find_element("name", "stage").send_keys("ZeRO 2")
    driver.find_element("name", "passes").send_keys("4")
    assert driver.find_element("id", "last-pass-only").is_displayed()
    assert "stage=2" in driver.current_url
    assert "0.17.6" not in driver.current_url
    assert driver.execute_script(AUDIT) == driver.get_log("browser") == []
