"""The page of the running server in a real browser: it draws, pauses, is accessible, and can be saved as a file."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_helpers import By, open_browser, set_scheme, text_of, violations, wait

from llmstack_insight.timeline import timeline_page

pytestmark = pytest.mark.full  # a browser takes seconds to start

# The file that the page saves, read without a download.
SAVED = """
const made = [];
URL.createObjectURL = (blob) => { made.push(blob); return "#"; };
document.getElementById("save").click();
made[0].text().then(arguments[arguments.length - 1]);
"""

OTHER_SCRIPT = """
const made = document.createElement("script");
made.textContent = "window.isRun = true";
document.head.append(made);
"""
MOVE = """
const slider = document.getElementById("position");
slider.value = arguments[0];
slider.dispatchEvent(new Event("input"));
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as driver:
        yield driver


def generate(server: Any, count: int, max_tokens: int = 30) -> None:
    def one(number: int) -> None:
        model = server.client.models.list().data[0].id
        server.client.completions.create(
            model=model,
            prompt="Once upon a time " * (1 + number),
            max_tokens=max_tokens,
            extra_body={"ignore_eos": True},
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
    assert re.match(
        r"\d+ requests over the steps", browser.find_element(By.TAG_NAME, "canvas").get_attribute("aria-label")
    )
    browser.find_element(By.CSS_SELECTOR, "#requests button").click()
    wait(browser, lambda driver: "tokens came" in text_of(driver, "#details-text"))
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
    browser.execute_script("document.getElementById('explanation').textContent = 'text of a prompt'")
    saved = tmp_path / "steps.html"
    saved.write_text(browser.execute_async_script(SAVED), encoding="utf-8")
    assert "text of a prompt" not in saved.read_text(encoding="utf-8")
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    browser.get(saved.as_uri())
    # The file ends with the steps that came during the pause, so a narrow view may begin later than the page's.
    browser.find_element(By.ID, "width").send_keys("3000")
    shown = [button.get_attribute("data-id") for button in browser.find_elements(By.CSS_SELECTOR, "#requests button")]
    assert set(names) <= set(shown)
    assert not browser.find_element(By.ID, "save").is_displayed()
    assert_keeps_to_its_policy(browser)
    assert violations(browser) == []


def assert_keeps_to_its_policy(browser: Any) -> None:
    """The document is shown as a file, runs its script alone, and cannot connect to anything."""
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    policy = browser.find_element(By.CSS_SELECTOR, "meta[http-equiv]").get_attribute("content")
    assert policy.startswith("default-src 'none'; ")
    assert "connect-src 'none'" in policy
    connect = "fetch('http://127.0.0.1:9/').catch(() => {}).finally(arguments[arguments.length - 1])"
    browser.execute_async_script(connect)
    assert any("violates" in entry["message"] for entry in browser.get_log("browser"))
    browser.execute_script(OTHER_SCRIPT)
    assert browser.execute_script("return window.isRun") is None
    browser.get_log("browser")  # what follows starts with an empty one


def test_a_page_of_a_log_shows_its_requests_without_a_server(
    browser: Any, serve: Callable[..., Any], tmp_path: Path
) -> None:
    log, page = tmp_path / "steps.log", tmp_path / "steps.html"
    # Few blocks: requests share the first ones of their prompts, and are preempted.
    with serve("--record-steps", str(log), "--num-kv-blocks", "30") as server:
        generate(server, 8, max_tokens=100)
    command = [sys.executable, "-m", "llmstack_command", "replay", str(log), "--page", str(page)]
    subprocess.run(command, check=True, timeout=60)
    browser.get(page.as_uri())
    browser.find_element(By.ID, "width").send_keys("3000")
    rows = [row.text for row in browser.find_elements(By.CSS_SELECTOR, "#requests tr")]
    assert len(rows) == 8
    preempted = [
        int(row.find_elements(By.TAG_NAME, "td")[7].text)
        for row in browser.find_elements(By.CSS_SELECTOR, "#requests tr")
    ]
    assert max(preempted) > 0
    assert_keeps_to_its_policy(browser)
    # Back to where several requests run: they share the blocks of a common prefix.
    last = int(browser.find_element(By.ID, "position").get_attribute("max"))
    texts = []
    for place in range(0, last + 1, 10):
        browser.execute_script(MOVE, place)
        if " shared" in text_of(browser, "#fact-blocks"):
            sharing = [
                row
                for row in browser.find_elements(By.CSS_SELECTOR, "#requests tr")
                if row.find_elements(By.TAG_NAME, "td")[8].text != "0"
            ]
            sharing[0].find_element(By.TAG_NAME, "button").click()
            texts.append(text_of(browser, "#details-text"))
            break
    assert re.search(r"it shares KV blocks: \d+ with cmpl-", texts[0])
    for scheme in ("light", "dark"):
        set_scheme(browser, scheme)
        assert violations(browser) == []


def test_a_request_whose_first_steps_are_gone_was_queued_until_its_first_one(browser: Any, tmp_path: Path) -> None:
    steps = [[number, 100.0 + number / 10, 50.0, 1, 0, 3, 8, 0, 1] for number in range(20, 40)]
    known = [["whole", 102.0, "waiting"], ["whole", 102.1, "running"], ["whole", 103.9, "finished_stopped"]]
    cut = [["cut", 90.0, "waiting"], ["cut", 90.25, "running"], ["cut", 103.9, "finished_stopped"]]
    runs = [
        ["cut", 20, 39, "d", 20, 0, 40, []], ["whole", 21, 21, "p", 8, 0, 4, []],
        ["whole", 22, 39, "d", 18, 0, 12, []],
    ]  # fmt: skip
    page = tmp_path / "page.html"
    timeline = {"steps": steps, "runs": runs, "events": cut + known, "predictions": []}
    page.write_text(timeline_page(timeline).text, encoding="utf-8")
    browser.get(page.as_uri())
    cells = {}
    for row in browser.find_elements(By.CSS_SELECTOR, "#requests tr"):
        values = [cell.text for cell in row.find_elements(By.TAG_NAME, "td")]
        cells[row.find_element(By.TAG_NAME, "button").get_attribute("data-id")] = values
    assert cells["whole"][:5] == ["stopped", "100 ms", "150 ms", "–", "4"]
    assert cells["cut"][:5] == ["stopped", "250 ms", "–", "–", "–"]
