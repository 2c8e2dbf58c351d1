"""The page in a real browser: desktop and phone, light and dark; nothing leaves it, nothing overflows."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.cli.main import main
from tests.presentation.invented import write_example
from tests.presentation.test_report import SECTIONS

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

SIZES = {"desktop": (1280, 900), "phone": (375, 740)}
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking "
    "--disable-component-update --disable-sync --no-first-run --no-proxy-server"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    found = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in found:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.lower().endswith("_proxy")}
    try:
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(found[1]))
    finally:
        os.environ.update(kept)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    runs, references = write_example(tmp_path_factory.mktemp("runs"))
    flags = [word for name, path in references.items() for word in (f"--{name}", str(path))]
    assert main(["report", *map(str, runs), *flags, "--out", str(folder)]) == 0
    return folder / "report.html"


def open_page(browser: Any, page: Path, size: str, scheme: str, media: str = "screen") -> None:
    width, height = SIZES[size]
    measures = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", measures)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    browser.get_log("performance")  # forget what other pages asked for
    browser.get_log("browser")
    browser.get(page.as_uri())
    # A reload of the same file may return while the old page is going: wait for the new one, to its last picture.
    from selenium.webdriver.support.ui import WebDriverWait

    loaded = "return document.readyState === 'complete' && [...document.images].every(i => i.complete)"
    WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(loaded))


def requests(browser: Any) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def luminance(browser: Any, script: str) -> float:
    red, green, blue = browser.execute_script(f"return {script}.match(/\\d+/g).slice(0, 3).map(Number)")
    return float(0.2126 * red + 0.7152 * green + 0.0722 * blue)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_opens(browser: Any, page: Path, size: str, scheme: str) -> None:
    open_page(browser, page, size, scheme)
    headings = browser.execute_script("return [...document.querySelectorAll('main > section')].map(s => s.id)")
    assert headings == SECTIONS
    for key in SECTIONS:
        height = browser.execute_script(f"return document.getElementById('{key}').getBoundingClientRect().height")
        assert height > 40, key
    assert browser.get_log("browser") == []
    asked = requests(browser)
    assert asked and all(url.startswith(("file:", "data:")) for url in asked)
    assert [url for url in asked if url.startswith("file:")] == [page.as_uri()]
    ground = luminance(browser, "getComputedStyle(document.body).backgroundColor")
    ink = luminance(browser, "getComputedStyle(document.body).color")
    assert (ground < 40 and ink > 180) if scheme == "dark" else (ground > 240 and ink < 60)


@pytest.mark.parametrize("size", SIZES)
def test_nothing_overflows_also_with_all_data_open(browser: Any, page: Path, size: str) -> None:
    open_page(browser, page, size, "light")
    for unfold in (False, True):
        if unfold:
            browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
        wide, view = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert wide <= view == SIZES[size][0]
        outside = browser.execute_script(
            "return [...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll') "
            "&& e.getBoundingClientRect().right > window.innerWidth + 1).map(e => e.tagName)"
        )
        assert outside == []


def test_every_picture_is_drawn_in_the_colours_of_the_scheme(browser: Any, page: Path) -> None:
    sources = {}
    for scheme in ("light", "dark"):
        open_page(browser, page, "desktop", scheme)
        images = browser.execute_script(
            "return [...document.images].map(i => [i.complete && i.naturalWidth > 100, i.currentSrc, i.alt])"
        )
        assert len(images) >= 10 and all(drawn for drawn, _, _ in images)
        assert all(alt for _, _, alt in images)
        sources[scheme] = [source for _, source, _ in images]
    assert all(light != dark for light, dark in zip(*sources.values(), strict=True))


def test_links_lead_to_sections_and_data_opens(browser: Any, page: Path) -> None:
    open_page(browser, page, "phone", "light")
    browser.find_element("css selector", "nav a[href='#curves']").click()
    assert browser.execute_script("return document.getElementById('curves').getBoundingClientRect().top") < 200
    data = browser.find_element("css selector", "#curve_loss_forget details")
    table = data.find_element("css selector", "table")
    assert not table.is_displayed()
    data.find_element("css selector", "summary").click()
    assert table.is_displayed()


def test_marks_do_not_rely_on_colour(browser: Any, page: Path) -> None:
    open_page(browser, page, "desktop", "dark")
    lines = [
        browser.execute_script(f"return getComputedStyle(document.querySelector('dd .{name}')).textDecorationStyle")
        for name in ("agrees", "differs")
    ]
    assert lines == ["solid", "dashed"]


def test_paper_is_white_also_for_readers_in_the_dark(browser: Any, page: Path) -> None:
    open_page(browser, page, "desktop", "dark", media="print")
    assert luminance(browser, "getComputedStyle(document.body).backgroundColor") > 240
    assert luminance(browser, "getComputedStyle(document.body).color") < 60
    assert not browser.find_element("css selector", "nav").is_displayed()
    source = browser.execute_script("return document.images[0].currentSrc === document.images[0].src")
    assert source  # the light picture
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.69})
    assert len(printed["data"]) > 50_000
