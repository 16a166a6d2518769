"""Chromium for the tests of pages; a module that imports this is skipped where there is none."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
axe = pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if not CHROMIUM or not DRIVER:
    pytest.skip("Chromium and its driver are not installed", allow_module_level=True)

By = pytest.importorskip("selenium.webdriver.common.by").By
Keys, ActionChains = webdriver.Keys, webdriver.ActionChains
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait

ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage")  # fmt: skip


@contextmanager
def open_browser(*arguments: str) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    with tempfile.TemporaryDirectory() as folder:
        for argument in (*ARGUMENTS, *arguments, f"--user-data-dir={folder}", "--window-size=1200,900"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        try:
            yield driver
        finally:
            driver.quit()


def wait(browser: Any, condition: Callable[[Any], Any]) -> Any:
    return WebDriverWait(browser, 60).until(condition)


def text_of(browser: Any, selector: str) -> str:
    found = browser.find_elements(By.CSS_SELECTOR, selector)
    return str(found[-1].text) if found else ""


def set_scheme(browser: Any, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def violations(browser: Any) -> list[str]:
    browser.execute_script((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = browser.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
    return [f"{entry['id']}: {entry['nodes'][0]['html'][:200]}" for entry in found["violations"]]
