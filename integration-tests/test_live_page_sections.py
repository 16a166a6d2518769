"""The sections of the page of the running server in a real browser: weights, shadow, explanations, replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser_helpers import ActionChains, By, Keys, open_browser, set_scheme, text_of, violations, wait

pytestmark = pytest.mark.full  # a browser takes seconds to start

# What the page consists of for a reader of its outline: the visible sections, their names, and what can be reached.
OUTLINE = """
const isShown = (one) => one.checkVisibility();
const names = (selector, name) => [...document.querySelectorAll(selector)].filter(isShown).map(name);
return {
  headings: names("h1, h2", (one) => `${one.tagName} ${one.textContent}`),
  facts: names("dt", (one) => one.textContent),
  controls: names("select, input, header button, aside button", (one) => one.id),
};
"""
CONTROLS = ["engine", "width", "pause", "save", "position"]
FACTS = ["Step", "Running", "Waiting", "KV blocks in use", "Tokens per second", "Time of a step",
         "Time to first token, median", "Weights"]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Iterator[Any]:
    """Two replicas with a shadow and other settings to load."""
    entry = '{"name": "larger", "num_kv_blocks": 600}'
    options = ["-dp", "2", "--num-kv-blocks", "512", "--routing", "round_robin", "--shadow-scheduler", "policy=fair"]
    with serve(*options, "--enable-control-routes", "--reload-models", entry) as running:
        yield running


def generate(server: Any, count: int, max_tokens: int = 20) -> None:
    def one(number: int) -> None:
        body = {"prompt": "Once upon a time " * (1 + number), "max_tokens": max_tokens, "ignore_eos": True}
        assert server.post("/v1/completions", body)[0] == 200

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def rows(browser: Any) -> list[str]:
    script = "return [...document.querySelectorAll('#requests button')].map((one) => one.dataset.id)"
    found: list[str] = browser.execute_script(script)
    return found


def open_page(browser: Any, server: Any, count: int) -> None:
    """The page, with requests and all steps in it; of two replicas each gets half of them."""
    browser.get(f"{server.url}/live")
    generate(server, 2 * count)
    last = server.get_json("/steps?engine=0")["steps"][-1]["step"]
    wait(browser, lambda driver: len(rows(driver)) >= count and text_of(driver, "#fact-step") == str(last))


def assert_accessible(browser: Any) -> None:
    for scheme in ("light", "dark"):
        set_scheme(browser, scheme)
        assert violations(browser) == []


def test_the_outline_has_every_section_and_a_shadow_says_what_it_found(browser: Any, server: Any) -> None:
    open_page(browser, server, 3)
    wait(browser, lambda driver: text_of(driver, "#shadow-sentences"))
    assert browser.execute_script(OUTLINE) == {
        "headings": ["H1 Requests over steps", "H2 Shadow scheduler policy=fair", "H2 Requests in view"],
        "facts": FACTS,
        "controls": CONTROLS,
    }
    assert text_of(browser, "#fact-weights") == "start"
    assert_accessible(browser)


def test_a_request_is_chosen_and_explained_with_the_keyboard(browser: Any, server: Any) -> None:
    open_page(browser, server, 3)
    browser.find_element(By.ID, "pause").click()
    name = rows(browser)[0]
    keys = ActionChains(browser)
    browser.execute_script("document.getElementById('position').focus()")
    keys.send_keys(Keys.TAB).send_keys(Keys.TAB).send_keys(Keys.ENTER).perform()  # the table, then its first row
    assert text_of(browser, "#details-title") == name
    assert browser.switch_to.active_element.get_attribute("data-id") == name
    browser.find_element(By.ID, "explain").send_keys(Keys.ENTER)
    wait(
        browser,
        lambda driver: "queue" in text_of(driver, "#explanation") or "prompt" in text_of(driver, "#explanation"),
    )
    assert browser.execute_script(OUTLINE)["controls"] == [*CONTROLS, "explain"]
    assert browser.find_element(By.ID, "details-title").tag_name == "h2"
    assert_accessible(browser)


def test_each_replica_has_its_own_requests(browser: Any, server: Any) -> None:
    open_page(browser, server, 3)
    first = set(rows(browser))
    browser.find_element(By.ID, "engine").send_keys("1")
    wait(browser, lambda driver: rows(driver) and first.isdisjoint(rows(driver)))
    assert len(rows(browser)) >= 3
    assert_accessible(browser)


def test_a_paused_page_goes_back_by_its_slider_and_stays_there(browser: Any, server: Any) -> None:
    open_page(browser, server, 3)
    position = browser.find_element(By.ID, "position")
    last = int(text_of(browser, "#fact-step"))
    position.send_keys(Keys.ARROW_LEFT)
    assert browser.find_element(By.ID, "pause").get_attribute("aria-pressed") == "true"
    before = int(text_of(browser, "#fact-step"))
    assert before < last
    position.send_keys(Keys.HOME)
    assert int(text_of(browser, "#fact-step")) < before
    assert "requests over the steps" in browser.find_element(By.TAG_NAME, "canvas").get_attribute("aria-label")
    shown = text_of(browser, "#fact-step")
    generate(server, 2)
    wait(browser, lambda driver: int(driver.find_element(By.ID, "position").get_attribute("max")) > last)
    assert text_of(browser, "#fact-step") == shown
    browser.find_element(By.ID, "pause").send_keys(Keys.ENTER)
    wait(browser, lambda driver: int(text_of(driver, "#fact-step")) > last)


def test_a_reload_is_shown_and_a_paused_page_keeps_the_steps_of_before(browser: Any, server: Any) -> None:
    open_page(browser, server, 3)
    browser.find_element(By.ID, "pause").click()
    step, before = text_of(browser, "#fact-step"), rows(browser)
    status, answer, _ = server.post("/v1/reload", {"name": "larger"})
    assert (status, answer.get("name")) == (200, "larger")
    wait(browser, lambda driver: text_of(driver, "#fact-weights") == "larger")
    wait(browser, lambda driver: "another engine core" in text_of(driver, "#status"))
    assert (text_of(browser, "#fact-step"), rows(browser)) == (step, before)
    assert_accessible(browser)
    generate(server, 2)
    browser.find_element(By.ID, "pause").click()
    wait(browser, lambda driver: "of 600" in text_of(driver, "#fact-blocks") and rows(driver))
    assert set(before).isdisjoint(rows(browser))
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
