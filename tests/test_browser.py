"""The report in a real browser: no errors, nothing cut off or upon another at three widths, and it can be read."""

import itertools
from pathlib import Path

import pytest
from browser import needs_browser, opened_browser

from study.report import site as report

pytestmark = needs_browser
AUDIT = (Path(__file__).parent / "audit.js").read_text()
SEEN = "return [innerWidth, getComputedStyle(document.body).backgroundColor]"
WIDTHS = (390, 1024, 1440)
BACKGROUND = {"light": "rgb(251, 251, 250)", "dark": "rgb(22, 23, 26)"}
PAGES = ("index", "calculator", "claims/index", "claims/P1-01", *report.NOTEBOOKS, "run/shaped-virtual")


@pytest.fixture(scope="module")
def driver():
    with opened_browser() as browser:
        yield browser


def scheme(name: str) -> dict:
    """What a browser is told of a reader's preference: light or dark."""
    return {"media": "", "features": [{"name": "prefers-color-scheme", "value": name}]}


def resize(driver, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


@pytest.fixture
def show(driver, site):
    """A function that opens a page of the site at a width, in light colours."""

    def opened(page: str, width: int = 1280):
        resize(driver, width)
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme("light"))
        driver.get((site / f"{page}.html").as_uri())
        return driver

    return opened


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_whole_and_readable(page, show):
    """At each width in light and in dark. It is loaded once: its script draws nothing for a width or a colour."""
    opened = show(page)
    assert opened.title
    (current,) = opened.find_elements("css selector", "nav [aria-current]") or [None]
    assert (current is None) == page.startswith("run/"), "a reader sees where he is"
    opened.execute_script("for (const fold of document.querySelectorAll('details')) fold.open = true")
    for width, (colours, background) in itertools.product(WIDTHS, BACKGROUND.items()):
        resize(opened, width)
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme(colours))
        assert opened.execute_script(SEEN) == [width, background]
        assert opened.execute_script(AUDIT) == [], (width, colours)
    assert opened.get_log("browser") == []


def test_the_audit_can_fail(show):
    opened = show("compare")
    opened.execute_script("document.body.firstElementChild.style.width = '3000px'")
    opened.execute_script("document.querySelector('main p').style.color = '#aaa'")
    problems = " ".join(opened.execute_script(AUDIT))
    assert "wider than the window" in problems
    assert "contrast" in problems


PLANTED = {
    "white in the dark": "for (const svg of document.querySelectorAll('figure svg')) svg.style.background = '#fff'",
    "half of its row is empty": "for (const each of document.querySelectorAll('.outputs > figure'))"
    " each.style.cssText = 'grid-column: 1 / -1; max-width: 20rem'",
    "px high": "for (const svg of document.querySelectorAll('figure svg')) svg.style.width = '25rem'",
    "a table of": "document.querySelector('.scroll').firstElementChild.style.width = '3000px'",
}


@pytest.mark.parametrize("problem", PLANTED)
def test_the_audit_sees(problem, show):
    opened = show("compare", 1440)
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme("dark"))
    assert opened.execute_script(AUDIT) == []
    opened.execute_script(PLANTED[problem])
    assert problem in " ".join(opened.execute_script(AUDIT))


def peaks(opened) -> list[str]:
    """The column of peaks in the table of all runs."""
    script = """const table = document.querySelector("#run-table");
        const at = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent === "peak MB");
        return [...table.tBodies[0].rows].map((row) => row.cells[at].textContent.trim());"""
    return opened.execute_script(script)


def test_tables_sort_both_ways_and_by_value(show):
    opened = show("index")
    (head,) = [cell for cell in opened.find_elements("css selector", "#run-table th button") if cell.text == "peak MB"]
    before = peaks(opened)
    opened.execute_script("arguments[0].scrollIntoView({block: 'center', inline: 'center'})", head)
    head.click()
    up = peaks(opened)
    head.click()
    down = peaks(opened)
    numbers = [float(value) for value in up if value != "-"]
    assert len(set(numbers)) > 2
    assert numbers == sorted(numbers)
    assert [float(value) for value in down if value != "-"] == numbers[::-1]
    assert up[-1] == down[-1] == "-", "what is not known is last, whichever way"
    assert sorted(before) == sorted(up)


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


def test_rows_are_filtered(show):
    opened = show("index")
    field = opened.find_element("css selector", "input[type=search]")
    field.send_keys("zero2 virtual")
    rows = [row for row in opened.find_elements("css selector", "#run-table tbody tr") if row.is_displayed()]
    assert len(rows) == 1
    assert "shaped-virtual" in rows[0].text


def test_links_lead_where_they_say(show):
    opened = show("index")
    opened.find_element("link text", "Compare").click()
    assert opened.title.startswith("Compare")
    opened.find_element("link text", "Memory at the peak").click()
    assert opened.execute_script("return document.querySelector(':target').textContent") == "Memory at the peak"
    opened.find_element("link text", "data as CSV")
    opened.find_element("link text", "Answers").click()
    opened.find_element("css selector", "#run-table tbody a").click()
    assert opened.execute_script("return document.querySelectorAll('.chart circle > title').length") > 1
    opened.find_element("link text", "all records")
    opened.find_element("link text", "checks").click()
    assert opened.execute_script("return document.querySelector(':target').open"), "a fold that a link leads to opens"


def test_a_click_on_an_arm_hides_it_and_a_mark_shows_its_value(show):
    opened = show("index", 1024)
    figure = "arguments[0].closest('section').querySelector('svg')"
    key = opened.find_element("css selector", "#traffic ~ figure svg [data-key][data-arm=zero2]")
    of_arm = f"[...{figure}.querySelectorAll('[data-arm=zero2]:not([data-key])')]"
    marks = f"return {of_arm}.map((mark) => getComputedStyle(mark).display)"
    others = marks.replace("zero2", "ddp")
    assert set(opened.execute_script(marks, key)) == {"inline"}
    assert key.get_attribute("aria-pressed") == "false"
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", key)
    key.click()
    assert set(opened.execute_script(marks, key)) == {"none"}
    assert set(opened.execute_script(others, key)) == {"inline"}
    key.send_keys(" ")
    assert set(opened.execute_script(marks, key)) == {"inline"}, "also with a keyboard, and again it is there"
    hover = """const bar = document.querySelector("#traffic ~ figure svg [data-arm=zero2]:not([data-key]) path");
        bar.dispatchEvent(new PointerEvent("pointerover", {bubbles: true, clientX: 50, clientY: 300}));
        return [...document.querySelectorAll(".tip")].filter((tip) => !tip.hidden).map((tip) => tip.textContent);"""
    (shown,) = opened.execute_script(hover)
    assert shown.startswith("zero2, all-reduce: ")
    assert opened.get_log("browser") == []


CHOSEN = "return [...document.querySelectorAll('.claims li')].filter((item) => item.checkVisibility())"


def test_claims_are_filtered_and_the_address_keeps_it(show, site):
    opened = show("claims/index", 390)
    everything = opened.execute_script(f"{CHOSEN}.length")
    form = opened.find_element("css selector", "form[data-list]")
    for name, value in {"document": "P1", "verdict": "consistent", "basis": "own numbers"}.items():
        form.find_element("css selector", f"select[name={name}] option[value='{value}']").click()
    script = f"{CHOSEN}.map((item) => [item.dataset.document, item.dataset.verdict, item.dataset.basis])"
    chosen = opened.execute_script(script)
    assert 1 < len(chosen) < everything
    assert all(each == ["P1", "consistent", "own numbers"] for each in chosen)
    form.find_element("name", "words").send_keys("states model")
    texts = opened.execute_script(f"{CHOSEN}.map((item) => item.textContent.toLowerCase())")
    assert 1 <= len(texts) < len(chosen)
    assert all("states" in text and "model" in text for text in texts)
    counted = f"{len(texts)} of {everything} claims"
    assert form.find_element("css selector", "output").text == counted
    opened.refresh()
    assert opened.find_element("css selector", "form output").text == counted
    opened.find_element("css selector", "form button").click()
    opened.execute_async_script("setTimeout(arguments[0], 50)")
    assert opened.execute_script(f"{CHOSEN}.length") == everything
    assert opened.get_log("browser") == []
