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
PAGES = ("index", "calculator", "claims", *report.NOTEBOOKS)


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
    assert opened.find_elements("css selector", "nav [aria-current]"), "a reader sees where he is"
    opened.execute_script("for (const fold of document.querySelectorAll('details')) fold.open = true")
    for width, (colours, background) in itertools.product(WIDTHS, BACKGROUND.items()):
        resize(opened, width)
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme(colours))
        assert opened.execute_script(SEEN) == [width, background]
        assert opened.execute_script(AUDIT) == [], (width, colours)
    assert opened.get_log("browser") == []


PLANTED = {
    "wider than the window": "document.body.firstElementChild.style.width = '3000px'",
    "contrast": "document.querySelector('main p').style.color = '#aaa'",
    "half of its row is empty": "for (const each of document.querySelectorAll('.output > :has(figure)'))"
    " each.style.cssText = 'grid-column: 1 / -1; max-width: 20rem'",
    "px high": "for (const svg of document.querySelectorAll('figure svg')) svg.style.width = '25rem'",
    "a table of": "document.querySelector('.scroll').firstElementChild.style.width = '3000px'",
}


@pytest.mark.parametrize("problem", PLANTED)
def test_the_audit_sees(problem, show):
    opened = show("compare", 1440)
    assert opened.execute_script(AUDIT) == []
    opened.execute_script(PLANTED[problem])
    assert problem in " ".join(opened.execute_script(AUDIT))


def test_tables_sort_both_ways(show):
    opened = show("index")
    script = """const table = document.querySelector("#documents ~ .scroll table");
        table.tHead.rows[0].cells[1].querySelector("button").click();
        return [...table.tBodies[0].rows].map((row) => row.cells[1].textContent);"""
    up, down = opened.execute_script(script), opened.execute_script(script)
    assert len(set(up)) > 2
    assert sorted(up) == sorted(down)
    assert up[0] == down[-1] != up[-1]


def test_a_link_to_a_claim_leads_to_its_place(show):
    opened = show("index")
    opened.get(opened.current_url.replace("index.html", "claims.html#P1-17"))
    assert opened.execute_script("return document.querySelector(':target').textContent").startswith("\nP1-17")


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
