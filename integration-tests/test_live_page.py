"""The page of the running server in a real browser: it draws, pauses, is accessible, and can be saved as a file."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_helpers import By, open_browser, set_scheme, text_of, violations, wait

pytestmark = pytest.mark.full  # a browser takes seconds to start

# The file that the page saves, read without a download.
SAVED = """
const made = [];
URL.createObjectURL = (blob) => { made.push(blob); return "#"; };
document.getElementById("save").click();
made[0].text().then(arguments[arguments.length - 1]);
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as driver:
        yield driver


def generate(server: Any, count: int) -> None:
    def one(number: int) -> None:
        model = server.client.models.list().data[0].id
        server.client.completions.create(
            model=model, prompt="Once upon a time " * (1 + number), max_tokens=30, extra_body={"ignore_eos": True}
        )

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_requests_are_drawn_while_they_run_and_a_saved_file_shows_the_same(
    browser: Any, demo_server: Any, tmp_path: Path
) -> None:
    browser.get(f"{demo_server.url}/live")
    generate(demo_server, 6)
    wait(browser, lambda driver: len(driver.find_elements(By.CSS_SELECTOR, "#requests button")) >= 6)
    assert re.match(r"\d+ requests over the steps", browser.find_element(By.ID, "lanes").get_attribute("aria-label"))
    browser.find_element(By.CSS_SELECTOR, "#requests button").click()
    wait(browser, lambda driver: "tokens were decoded" in text_of(driver, "#details-text"))
    # The first requests calibrate the prediction of those that follow.
    for _ in range(20):
        generate(demo_server, 2)
        if re.search(r"\d+ m?s, predicted \d+ m?s", text_of(browser, "#fact-ttft")):
            break
    wait(browser, lambda driver: re.search(r"\d+ m?s, predicted \d+ m?s", text_of(driver, "#fact-ttft")))
    for scheme in ("light", "dark"):
        set_scheme(browser, scheme)
        assert violations(browser) == []
    browser.find_element(By.ID, "pause").click()
    step = text_of(browser, "#fact-step")
    generate(demo_server, 1)
    assert text_of(browser, "#fact-step") == step
    names = [button.get_attribute("data-id") for button in browser.find_elements(By.CSS_SELECTOR, "#requests button")]
    saved = tmp_path / "steps.html"
    saved.write_text(browser.execute_async_script(SAVED), encoding="utf-8")
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    browser.get(saved.as_uri())
    # The file ends with the steps that came during the pause, so a narrow view may begin later than the page's.
    browser.find_element(By.ID, "width").send_keys("3000")
    shown = [button.get_attribute("data-id") for button in browser.find_elements(By.CSS_SELECTOR, "#requests button")]
    assert set(names) <= set(shown)
    assert not browser.find_element(By.ID, "save").is_displayed()
    assert violations(browser) == []
