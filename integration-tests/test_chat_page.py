"""The chat page in a real browser: it talks, stops, shows probabilities, asks for a key, and is accessible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser_helpers import ActionChains, By, Keys, open_browser, set_scheme, text_of, violations, wait
from chat_page_helpers import open_page, send, send_and_wait

pytestmark = pytest.mark.full  # a browser takes seconds to start

KEY = "key-of-the-browser-test"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as driver:
        yield driver


def test_a_conversation_streams_and_can_be_continued(browser: Any, demo_server: Any) -> None:
    open_page(browser, demo_server.url)
    assert text_of(browser, "#model option") == demo_server.client.models.list().data[0].id
    send(browser, "Tell me of a king.", temperature="0", max_tokens="24", seed="1")
    wait(browser, lambda driver: "tokens per second" in text_of(driver, ".assistant .facts"))
    first = text_of(browser, ".assistant .text")
    messages = [{"role": "user", "content": "Tell me of a king."}]
    model = text_of(browser, "#model option")
    expected = demo_server.client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=24, seed=1
    )
    assert " ".join(first.split()) == " ".join((expected.choices[0].message.content or "").split())
    send(browser, "And then?")
    wait(browser, lambda driver: len(driver.find_elements(By.CSS_SELECTOR, ".assistant .facts:not(:empty)")) == 2)
    assert len(browser.find_elements(By.CSS_SELECTOR, ".message.user")) == 2
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_an_answer_can_be_stopped(browser: Any, demo_server: Any) -> None:
    open_page(browser, demo_server.url)
    limits = {"offline": False, "latency": 0, "downloadThroughput": 2000, "uploadThroughput": -1}  # bytes per second
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", limits)
    try:
        send(browser, "A long story.", max_tokens="400")
        wait(browser, lambda driver: text_of(driver, ".assistant .text"))
        browser.find_element(By.ID, "stop").click()
        wait(browser, lambda driver: "stopped" in text_of(driver, ".assistant .facts"))
    finally:
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", limits | {"downloadThroughput": -1})
    assert browser.find_element(By.ID, "send").is_displayed()


def test_probabilities_of_tokens_are_shown_for_the_mouse_and_the_keyboard(browser: Any, demo_server: Any) -> None:
    open_page(browser, demo_server.url)
    browser.execute_script("document.getElementById('logprobs').checked = true")
    send_and_wait(browser, "Tell me of a king.", max_tokens="6")
    group = browser.find_element(By.CSS_SELECTOR, ".tokens")
    assert len(group.find_elements(By.TAG_NAME, "span")) == 6
    ActionChains(browser).move_to_element(group.find_elements(By.TAG_NAME, "span")[2]).perform()
    assert text_of(browser, "#alternatives li").endswith("%") or "(chosen)" in text_of(browser, "#alternatives")
    shown = text_of(browser, "#alternatives")
    group.send_keys(Keys.ARROW_RIGHT)
    assert text_of(browser, "#alternatives") != shown


def test_text_of_the_model_is_never_html(browser: Any, demo_server: Any) -> None:
    open_page(browser, demo_server.url)
    evil = (
        "<img src=x onerror='document.title=1'> **bold** `<b>` [link](javascript:alert(1))\n\n- item\n\n```\n<i>\n```"
    )
    made = browser.execute_script(
        "const root = document.createElement('div');root.append(...markdownNodes(arguments[0])); return root.innerHTML",
        evil,
    )
    assert "&lt;img src=x" in made
    assert "<strong>bold</strong>" in made
    assert "<code>&lt;b&gt;</code>" in made
    assert "javascript" in made
    assert "<a" not in made
    link = browser.execute_script(
        "const root = document.createElement('div');root.append(...markdownNodes('[here](https://a.b/c)'));"
        "return root.innerHTML"
    )
    assert 'href="https://a.b/c" rel="noopener noreferrer" target="_blank"' in link
    assert "here" in link
    assert "(https://a.b/c)" in link
    assert "<li>item</li>" in made
    assert "<code>&lt;i&gt;</code>" in made


def test_the_load_is_shown(browser: Any, demo_server: Any) -> None:
    open_page(browser, demo_server.url)
    browser.find_element(By.CSS_SELECTOR, "#load summary").click()
    wait(browser, lambda driver: text_of(driver, "#running") == "0")
    wait(browser, lambda driver: text_of(driver, "#speed") not in ("", "–"))
    assert text_of(browser, "#cache").endswith("%")


RANDOM = """
const parts = ["*", "_", "`", "```\\n", "\\n", "\\n\\n", "> ", "- ", "1. ", "# ", "|", "|-|", "[", "](", ")", "!",
  "<img src=x>", "<script>", "http://a.b", "javascript:x", "word ", "$", "~~", "\\\\"];
let seed = arguments[0];
const random = (size) => { // mulberry32
  seed = (seed + 0x6d2b79f5) | 0;
  let mixed = Math.imul(seed ^ (seed >>> 15), 1 | seed);
  mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed);
  return ((mixed ^ (mixed >>> 14)) >>> 0) % size;
};
const found = new Set();
for (let round = 0; round < 300; round += 1) {
  const root = document.createElement("div");
  let text = "";
  for (let count = random(60); count >= 0; count -= 1) text += parts[random(parts.length)];
  root.append(...markdownNodes(text));
  for (const made of root.querySelectorAll("*")) {
    found.add(made.tagName.toLowerCase());
    for (const { name } of made.attributes) found.add(`@${name}`);
    if (made.tagName === "A" && !/^https?:/.test(made.href)) found.add(made.href);
  }
}
return [...found];
"""
DRAWN = {
    "p", "h3", "ul", "ol", "li", "blockquote", "pre", "code", "strong", "em", "del", "a", "span", "table", "thead",
    "tbody", "tr", "th", "td", "hr", "div", "button", "@class", "@start", "@href", "@rel", "@target", "@tabindex",
    "@role", "@aria-label", "@type",
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_random_markdown_makes_no_other_element(browser: Any, demo_server: Any, seed: int) -> None:
    open_page(browser, demo_server.url)
    found = set(browser.execute_script(RANDOM, seed))
    assert {"p", "li", "a", "pre"} <= found
    assert found <= DRAWN


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Any, demo_server: Any, scheme: str) -> None:
    set_scheme(browser, scheme)
    open_page(browser, demo_server.url)
    browser.execute_script("document.getElementById('load').open = true")
    browser.execute_script("document.getElementById('logprobs').checked = true")
    send_and_wait(browser, "Tell me of a king.", max_tokens="8")
    group = browser.find_element(By.CSS_SELECTOR, ".tokens")
    group.send_keys(Keys.ARROW_RIGHT)
    assert violations(browser) == []
    set_scheme(browser, "light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_reference_of_the_api_is_readable_in_both_schemes(browser: Any, demo_server: Any, scheme: str) -> None:
    set_scheme(browser, scheme)
    browser.get(f"{demo_server.url}/docs")
    wait(browser, lambda page: page.find_elements(By.CSS_SELECTOR, ".opblock-summary-method"))
    assert browser.execute_script("return document.documentElement.matches('.dark-mode')") is (scheme == "dark")
    # Headings and landmarks are Swagger UI's own.
    assert [entry for entry in violations(browser) if entry.startswith("color-contrast")] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_a_server_with_a_key_is_asked_with_it_and_nothing_keeps_it(browser: Any, serve: Callable[..., Any]) -> None:
    with serve("--api-key", KEY) as server:
        browser.get(server.url)
        field = wait(browser, lambda driver: driver.find_element(By.ID, "key"))
        wait(browser, lambda driver: field.is_displayed())
        assert violations(browser) == []
        field.send_keys("wrong", Keys.ENTER)
        wait(browser, lambda driver: "API key" in text_of(driver, "#status"))
        wait(browser, lambda driver: field.is_displayed())
        field.send_keys(KEY, Keys.ENTER)
        wait(browser, lambda driver: driver.find_elements(By.CSS_SELECTOR, "#model option"))
        kept = browser.execute_script(
            "return JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
            " + document.documentElement.innerHTML"
        )
        assert KEY not in kept
