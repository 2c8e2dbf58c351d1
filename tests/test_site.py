"""The documentation as a site: it builds without a warning, needs no other server, and its search works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

pytest.importorskip("material", reason="the extra docs is not installed")
pytestmark = pytest.mark.xdist_group("site")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in site.glob("*.html")}
    assert "Initial" in (site / "tofu.html").read_text(encoding="utf-8")
    assert "0.1.0" in (site / "changelog.html").read_text(encoding="utf-8")  # taken from CHANGELOG.md


def test_every_option_of_every_verb_is_on_the_page_of_commands(site: Path) -> None:
    from rosu_llm.cli import audit, eval
    from rosu_llm.cli.main import VERBS

    page = (site / "commands.html").read_text(encoding="utf-8")
    parts = {"audit": audit.KINDS, "eval": eval.BENCHMARKS}
    for verb in VERBS:
        for call in [f"{verb} {part}" for part in parts[verb]] if verb in parts else [verb]:
            assert f"usage: rosu {call} " in page, call
    assert "--eval-batch-size" in page and "--accelerate-config" in page


def test_the_api_reference_shows_signatures_and_no_roles(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    for name in ("ROSUTrainer", "UnlearningStep", "measure_coupling", "register_loss"):
        assert f'id="rosu_llm.{name}"' in page
    assert "retain_per_forget" in page
    assert re.findall(r":(?:class|func|meth|data):", page) == []


def test_the_site_asks_nothing_of_other_servers(site: Path) -> None:
    """Links may lead elsewhere; scripts, styles, pictures and fonts may not."""
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for tag in re.findall(r"<(?:script|img|link|iframe|source)\b[^>]*>", text):
            address = re.search(r'(?:src|href)="?(https?:)?//', tag)
            assert address is None, f"{page.name}: {tag}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Nothing: requests are no news."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_search_finds_rho(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.support.ui import WebDriverWait

    from tests.presentation.test_report_browser import FLAGS, requests

    found = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in found:
        pytest.skip("chromium and chromedriver are not installed")
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path}", "--window-size=1400,1000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(found[1]))
    try:
        browser.get(f"{address}/index.html")
        browser.find_element("css selector", "input.md-search__input").send_keys("rho")
        results = "return [...document.querySelectorAll('a.md-search-result__link')].map(a => a.href)"
        links = WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(results))
        assert any("settings.html" in link for link in links), links
        assert [url for url in requests(browser) if not url.startswith((address, "data:", "blob:", "chrome:"))] == []
    finally:
        browser.quit()
