"""The browser that the report's pages are tested in."""

import contextlib
import shutil
from collections.abc import Iterator

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="needs a browser and its driver: apt-get install chromium chromium-driver"
)


@contextlib.contextmanager
def opened_browser() -> Iterator:
    """A browser without a window, which keeps what pages write to its console."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(DRIVER)) as browser:
        yield browser
